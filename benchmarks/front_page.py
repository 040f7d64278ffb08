"""Draw the picture of the README and of the site's front page.

It shows three of the runs of ntk_fl_fmnist.py, from that program's committed results. The rounds to
85 % are by `round_at`, a mean over five rounds.

    python benchmarks/front_page.py
"""

import json

import pandas as pd
from common import RESULTS
from matplotlib import pyplot

from fedntk.simulations.report.figures import COLOURS, MARKERS, curve

TARGET = "0.85"
SHOWN = {  # the runs, by what the picture says of them; styles as in that program's picture
    "NTK-FL, full kernel": ("NTK-FL, full kernel (ours)", 1),
    "NTK-FL": ("NTK-FL, mean kernel (the paper's)", 0),
    "FedAvg": ("FedAvg, best of 12 settings", 4),
}


def main() -> None:
    """Draw it."""
    rounds = pd.read_csv(RESULTS / "ntk_fl_fmnist.csv")
    reached = json.loads((RESULTS / "ntk_fl_fmnist.json").read_text())["rounds-to-target"]
    pyplot.rcParams["font.size"] = 12
    figure, axes = pyplot.subplots(figsize=(6.8, 4.4), layout="constrained")
    for run, (name, number) in SHOWN.items():
        drawn = curve(rounds[rounds.run == run], "accuracy")
        first = [str(each) for each in reached[run][TARGET] if each]
        few = "" if len(first) == len(reached[run][TARGET]) else f" ({len(first)} of 3 seeds)"
        when = f"85 % at round {', '.join(first)}{few}" if first else "not at 85 % within 40 rounds"
        x, colour = drawn["rounds"], COLOURS[number]
        style = {"color": colour, "marker": MARKERS[number], "ms": 4}
        axes.plot(x, 100 * drawn["mean"], label=f"{name}:\n{when}", **style)
        axes.fill_between(x, 100 * drawn["min"], 100 * drawn["max"], color=colour, alpha=0.2, lw=0)
    axes.axhline(100 * float(TARGET), color="0.4", lw=1, ls="--", zorder=1)
    axes.set(xlim=(0, 40), ylim=(50, 88), xlabel="round", ylabel="test accuracy (%)")
    title = "Fashion-MNIST, 300 clients, few classes each; mean and range of 3 seeds"
    axes.set_title(title, loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.legend(loc="lower right", frameon=False, labelspacing=0.7)
    figure.savefig(RESULTS / "front_page.png", dpi=150)


if __name__ == "__main__":
    main()
