"""Accuracy of every method with clients that are lost or late in a round, beside none.

Each method runs with the settings of its file in simulations/conf for scikit-learn's digits, which
need no download, and three kinds of losses: none; 30 % of the clients lost, drawn anew in each
round; and 30 % lost and 30 % late. Nothing is tuned for them. One exchange also runs as
asynchronous, with 10 rounds.

    python benchmarks/losses.py [--seeds 0,1,2] [--losses none,lost,late] [--methods fedavg,tct]

Writes results/losses.csv, a run a row; other rows stay as they are. The accuracy is that of the
method's headline metric after the last round: of the server's model on the test set, or the mean
over the clients' own models.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from common import keep_rows

from fedntk.simulations import Config, run

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).parent / "results" / "losses.csv"
KEYS = ["method", "losses", "seed"]
LOSSES: dict[str, dict[str, Any]] = {
    "none": {},
    "lost": {"lost_share": 0.3, "min_completed": 1},
    "late": {"lost_share": 0.3, "late_share": 0.3, "round_deadline": 0.01, "min_completed": 1},
}
ASYNCHRONOUS = {"rounds": 10, "round_deadline": 0.01, "asynchrony": True}


def cases() -> dict[str, Config]:
    """Return each method's configuration by its name in the results."""
    files = sorted((ROOT / "simulations" / "conf").glob("*_digits.toml"))
    found = {config.method: config for config in map(Config.load, files)}
    return {**found, "one-exchange, asynchronous": found["one-exchange"].replace(**ASYNCHRONOUS)}


def measure(config: Config, losses: str, seed: int) -> dict[str, Any]:
    """Run a configuration once."""
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
    """Measure what is asked for, and write each row when it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--methods", default=",".join(own.method for own in cases().values()))
    options = parser.parse_args()
    names = options.methods.split(",")
    methods = {name: own for name, own in cases().items() if own.method in names}
    for seed in map(int, options.seeds.split(",")):
        for losses in options.losses.split(","):
            for method, config in methods.items():
                key = {"method": method, "losses": losses, "seed": seed}
                row = {**key, **measure(config, losses, seed)}
                print(row, flush=True)
                keep_rows(FILE, [row], KEYS)


if __name__ == "__main__":
    main()
