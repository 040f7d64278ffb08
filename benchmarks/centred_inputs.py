"""Inputs centred by their mean over all clients, or not: digits as 64 numbers with unlike means.

The settings of the methods' configurations for digits, three seeds, 10 rounds, and no shuffling;
nothing is searched for. The seed changes the split, the first weights and the sampling.

    python benchmarks/centred_inputs.py [--rounds 10] [--seeds 0,1,2]

Writes beside this file results/centred_inputs.csv (accuracy of all rounds) and .json (machine,
means over the seeds).
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from fedntk.simulations import Config, compare
from fedntk.simulations.report.results import machine

CONF = Path(__file__).parent.parent / "simulations" / "conf"
# name -> configuration, and what differs from it
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "NTK-FL": ("ntk_fl_digits", {}),
    "CP-NTK-FL": ("cp_ntk_fl_digits", {"cp-ntk-fl.shuffle": False}),
    "FedAvg": ("fedavg_digits", {}),
    "SCAFFOLD": ("scaffold_digits", {}),
}
SHOWN = (1, 2, 3, 5, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    configs = {
        f"{name}{', centred' * centred}": Config.load(
            CONF / f"{stem}.toml",
            **changes,
            rounds=options.rounds,
            centre=centred,
            clients_per_evaluation=0,
        )
        for name, (stem, changes) in METHODS.items()
        for centred in (False, True)
    }
    with tempfile.TemporaryDirectory() as scratch:
        rounds = compare(configs, seeds=map(int, options.seeds.split(",")), out=scratch)
    accuracy = rounds[rounds.metric == "accuracy"]
    means = accuracy.groupby(["run", "round"], sort=False).value.mean().unstack().round(4)
    print(means.to_string())
    stem = Path(__file__).parent / "results" / "centred_inputs"
    columns = ["run", "seed", "round", "value"]
    accuracy[columns].to_csv(stem.with_suffix(".csv"), index=False, float_format="%.4f")
    shown = means[[number for number in SHOWN if number in means]].to_dict("index")
    content = {"machine": machine(), "accuracy": shown}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
