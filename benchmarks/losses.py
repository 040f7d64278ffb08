"""Accuracy of every method with clients that are lost or late in a round, beside none.

Each method runs with the settings of its file in simulations/conf for scikit-learn's digits, which
need no download, and three kinds of losses: none; 30 % of the clients lost, drawn anew in each
round; and 30 % lost and 30 % late. Nothing is tuned for them. One exchange also runs as
asynchronous, with 10 rounds.

    python benchmarks/losses.py [--seeds 0,1,2] [--losses none,lost,late] [--methods fedavg,tct]

The accuracy is that of the method's headline metric after the last round: of the server's model on
the test set, or the mean over the clients' own models.
"""

import tempfile
import time
from typing import Any

from common import CONF, keep_rows, parse_options

from fedntk.simulations import Config, run

KEYS = ["method", "losses", "seed"]
LOSSES: dict[str, dict[str, Any]] = {
    "none": {},
    "lost": {"lost_share": 0.3, "min_completed": 1},
    "late": {"lost_share": 0.3, "late_share": 0.3, "round_deadline": 0.01, "min_completed": 1},
}
ASYNCHRONOUS = {"rounds": 10, "round_deadline": 0.01, "asynchrony": True}


def cases() -> dict[str, Config]:
    files = sorted((CONF).glob("*_digits.toml"))
    found = {config.method: config for config in map(Config.load, files)}
    return {**found, "one-exchange, asynchronous": found["one-exchange"].replace(**ASYNCHRONOUS)}


def measure(config: Config, losses: str, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        own = config.replace(seed=seed, out=folder, **LOSSES[losses])
        result = run(own, progress=False)
    headline = config.chosen_method.headline
    return {
        "metric": headline,
        "accuracy": float(result.curve(headline).iloc[-1]),
        "rounds": config.rounds,
        "unchanged": result.summary["rounds-unchanged"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    options = parse_options(
        __doc__,
        seeds=(0, 1, 2),
        losses=tuple(LOSSES),
        methods=tuple({config.method: None for config in cases().values()}),
    )
    names = options.methods
    methods = {name: own for name, own in cases().items() if own.method in names}
    for seed in options.seeds:
        for losses in options.losses:
            for method, config in methods.items():
                key = {"method": method, "losses": losses, "seed": seed}
                row = {**key, **measure(config, losses, seed)}
                print(row, flush=True)
                keep_rows("losses", [row], KEYS)


if __name__ == "__main__":
    main()
