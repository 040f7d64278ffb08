"""Inputs centred by their mean over all clients, or not: digits as 64 numbers with unlike means.

The settings of the methods' configurations for digits, three seeds, 10 rounds, and no shuffling;
nothing is searched for. The seed changes the split, the first weights and the sampling.

    python benchmarks/centred_inputs.py [--rounds 10] [--seeds 0,1,2]
"""

import tempfile
from typing import Any

from common import CONF, parse_options, write

from fedntk.simulations import Config, compare

# name -> configuration, and what differs from it
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "NTK-FL": ("ntk_fl_digits", {}),
    "CP-NTK-FL": ("cp_ntk_fl_digits", {"cp-ntk-fl.shuffle": False}),
    "FedAvg": ("fedavg_digits", {}),
    "SCAFFOLD": ("scaffold_digits", {}),
}
SHOWN = (1, 2, 3, 5, 10)


def main() -> None:
    options = parse_options(__doc__, rounds=10, seeds=(0, 1, 2))
    configs = {
        f"{name}{', centred' * centred}": Config.load(
            CONF / f"{stem}.toml", **changes, rounds=options.rounds, centre=centred,
            clients_per_evaluation=0,
        )
        for name, (stem, changes) in METHODS.items()
        for centred in (False, True)
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        rounds = compare(configs, seeds=options.seeds, out=scratch)
    accuracy = rounds[rounds.metric == "accuracy"]
    means = accuracy.groupby(["run", "round"], sort=False).value.mean().unstack().round(4)
    print(means.to_string())
    write(
        "centred_inputs",
        accuracy[["run", "seed", "round", "value"]],
        {"accuracy": means[[number for number in SHOWN if number in means]].to_dict("index")},
    )


if __name__ == "__main__":
    main()
