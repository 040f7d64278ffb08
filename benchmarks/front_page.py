"""Draw the picture of the README and of the site's front page.

It shows three rows of tables/ntk_fl_fmnist.toml, from its committed results. The rounds to 85 % are
by `round_at`, a mean over five rounds.

    python benchmarks/front_page.py
"""

import pandas as pd
from common import RESULTS, ROOT
from matplotlib import pyplot

from fedntk.simulations.report.figures import COLOURS, MARKERS

TARGET = 85
SHOWN = {  # the rows, by what the picture says of them; styles as in the table's picture
    "full": ("NTK-FL, full kernel (ours)", 1),
    "mean": ("NTK-FL, mean kernel (the paper's)", 0),
    "fedavg": ("FedAvg, best of 12 settings", 4),
}


def main() -> None:
    """Draw it."""
    table = pd.read_parquet(ROOT / "benchmarks" / "tables" / "ntk_fl_fmnist.parquet")
    pyplot.rcParams["font.size"] = 12
    figure, axes = pyplot.subplots(figsize=(6.8, 4.4), layout="constrained")
    for row, (name, number) in SHOWN.items():
        part = table[table.row == row]
        drawn = part[part.measure == "curve"].groupby("round").value.agg(["mean", "min", "max"])
        rounds = part[part.measure == f"rounds-{TARGET}"].value
        first = [f"{number:.0f}" for number in rounds.dropna()]
        few = "" if len(first) == len(rounds) else f" ({len(first)} of {len(rounds)} seeds)"
        when = f"{TARGET} % at round {', '.join(first)}{few}"
        when = when if first else f"not at {TARGET} % within 40 rounds"
        style = {"color": COLOURS[number], "marker": MARKERS[number], "ms": 4}
        axes.plot(drawn.index, drawn["mean"], label=f"{name}:\n{when}", **style)
        band = {"color": COLOURS[number], "alpha": 0.2, "lw": 0}
        axes.fill_between(drawn.index, drawn["min"], drawn["max"], **band)
    axes.axhline(TARGET, color="0.4", lw=1, ls="--", zorder=1)
    axes.set(xlim=(0, 40), ylim=(50, 88), xlabel="round", ylabel="test accuracy (%)")
    title = "Fashion-MNIST, 300 clients, few classes each; mean and range of 3 seeds"
    axes.set_title(title, loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.legend(loc="lower right", frameon=False, labelspacing=0.7)
    figure.savefig(RESULTS / "front_page.png", dpi=150)


if __name__ == "__main__":
    main()
