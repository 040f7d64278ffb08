"""NTK-FL, FedAvg and one exchange on real digits, by ``flwr run`` on Ray: ``fedntk demo``."""

from pathlib import Path

import pandas as pd

from .engine.runs import compare
from .report.report import final_table, markdown, target_table

CONF = Path(__file__).parent / "conf"
TARGET = 0.9


def demo(folder: Path) -> None:
    """Run three methods on the same split; print tables, draw curves."""
    print(
        "NTK-FL against Flower's FedAvg on scikit-learn's handwritten digits: 50 clients by\n"
        "Dirichlet(0.1), 10 a round, the same network and first weights. And one exchange of sums\n"
        "with all 50 clients, for which no network is trained.\n"
        "Each is a Flower run on Ray, whose workers take a while to start."
    )
    folder = folder.absolute()
    configs = {
        "NTK-FL": CONF / "ntk_fl_digits.toml",
        "FedAvg": CONF / "fedavg_digits.toml",
        "one exchange": CONF / "one_exchange_digits.toml",
    }
    results = compare(configs, out=folder, engine="ray", again=True)
    runs = results.runs
    curves = pd.DataFrame({run.summary["run"]: 100 * run.curve() for run in runs})
    shown = curves.map("{:.1f} %".format, na_action="ignore").fillna("")
    by_round = shown.rename_axis("round").reset_index()
    print("Test accuracy by communication round:")
    for table in (by_round, target_table(runs, [TARGET]), final_table(runs)):
        print(markdown(table), end="\n\n")
    picture = folder / "accuracy.png"
    title = "Digits, 50 clients, Dirichlet(0.1)"
    results.plot(title=title, target=TARGET).savefig(picture)
    print(f"Curves: {picture}\nAll metrics of each round: {folder}/*/seed-0/rounds.parquet")
