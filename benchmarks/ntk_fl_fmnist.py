"""NTK-FL with both losses and both kernels on non-IID Fashion-MNIST, next to FedAvg.

Yue et al. 2022, section 6: 300 clients, 20 a round, Dirichlet(0.1), MLP with 100 hidden units. The
seed changes the split, the first weights and the sampling; all runs share all three.

    python benchmarks/ntk_fl_fmnist.py --data-dir FOLDER [--rounds 40] [--seeds 0,1,2]
"""

import tempfile
from typing import Any

from common import CONF, RESULTS, parse_options, write

from fedntk.simulations import Config, compare, read_runs
from fedntk.simulations.report.figures import accuracy_curves

KEPT = ("accuracy", "loss", "t", "kernel-products", "bytes-up", "bytes-down", "seconds")
SHOWN = (3, 6, 11, 19, 40)
TARGETS = (0.7, 0.75, 0.8, 0.85)
MSE = {"loss": "mse", "learning_rate": 0.03}  # of 0.01, 0.03, 0.1 and 1, by 16 rounds of seed 0
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "NTK-FL": ("ntk_fl_fmnist", {}),
    "NTK-FL, full kernel": ("ntk_fl_fmnist", {"ntk-fl.kernel": "full"}),
    "NTK-FL, MSE": ("ntk_fl_fmnist", MSE),
    "NTK-FL, MSE, full kernel": ("ntk_fl_fmnist", MSE | {"ntk-fl.kernel": "full"}),
    "FedAvg": ("fedavg_fmnist", {}),
}


def main() -> None:
    options = parse_options(__doc__, data_dir=True, rounds=40, seeds=(0, 1, 2))
    configs = {
        name: Config.load(CONF / f"{stem}.toml", **overrides)
        for name, (stem, overrides) in RUNS.items()
    }
    splits, settings = {}, {}
    reached: dict[str, dict[str, list[int | None]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        rounds = compare(
            configs, seeds=options.seeds, out=scratch, rounds=options.rounds,
            data_dir=options.data_dir, targets=",".join(map(str, TARGETS)),
        )  # fmt: skip
        for finished in read_runs(scratch):
            name, summary = finished.summary["run"], finished.summary
            splits[str(summary["seed"])] = summary["split"]
            for target, first in summary["to-target"].items():
                reached.setdefault(name, {}).setdefault(target, []).append(first and first["round"])
            settings[name] = {
                key: value
                for key, value in finished.config.values().items()
                if key not in ("out", "data-dir", "seed")
            }
    accuracy = rounds[rounds.metric == "accuracy"]
    table = accuracy.pivot_table(index=["run", "seed"], columns="round", values="value")
    table = table.loc[list(RUNS)]
    shown = table[[r for r in SHOWN if r in table.columns]]
    seconds = rounds[(rounds.metric == "seconds") & (rounds["round"] > 0)].groupby("run").value
    summary = {
        "configurations": settings,
        "splits": splits,
        "rounds-to-target": reached,
        "median-seconds-a-round": seconds.median().round(2).to_dict(),
    }
    write("ntk_fl_fmnist", rounds[rounds.metric.isin(KEPT)], summary)
    accuracy_curves(
        rounds,
        title="Fashion-MNIST, 300 clients, Dirichlet(0.1), 20 clients a round",
        target=0.85,
        bottom=0.5,
    ).savefig(RESULTS / "ntk_fl_fmnist.png")
    print(shown.round(4).to_string())
    print(shown.groupby("run").mean().round(4).to_string())


if __name__ == "__main__":
    main()
