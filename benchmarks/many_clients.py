"""Whether a visit of a client costs the same however many clients and rounds there are.

    python benchmarks/many_clients.py --data-dir FOLDER [--clients 1000,5000] [--rounds 100]

FedAvg on Fashion-MNIST on the local engine: 100 clients in each round, an MLP of 10 hidden units,
one step with all of a client's images, no evaluation. Milliseconds are those of a round by the
clock over 100 visits: medians of the first tenth of the rounds and of the last. Each number of
clients is a process of its own.

Writes results/many_clients.csv and .json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any

from common import machine, measured, write

VISITS = 100  # clients in a round


def child(clients: int, rounds: int, data_dir: str) -> dict[str, Any]:
    """Measure one number of clients."""
    from fedntk.simulations import Config, run

    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            method="fedavg", dataset="fashion-mnist", data_dir=data_dir, partition="iid",
            model="mlp", width=10, batch_size=2000, num_clients=clients, clients_per_round=VISITS,
            clients_per_evaluation=0, test_examples=1, rounds=rounds, out=folder,
        )  # fmt: skip
        run(config, progress=False, on_round=lambda record: seconds.append(record["seconds"]))
    tenth = max(1, rounds // 10)
    first, last = (
        1e3 * statistics.median(some) / VISITS
        for some in (seconds[1 : tenth + 1], seconds[-tenth:])
    )
    return {"clients": clients, "rounds": rounds, "first-ms": first, "last-ms": last}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--clients", default="1000,5000")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(**json.loads(options.child))))
        sys.exit()
    os.environ["OMP_NUM_THREADS"] = "1"
    common = {"rounds": options.rounds, "data_dir": options.data_dir}
    cases = [{"clients": int(number), **common} for number in options.clients.split(",")]
    rows = measured(__file__, cases)
    for row in rows:
        del row["data_dir"]
    write("many_clients", rows, {"machine": machine("cpu")})


if __name__ == "__main__":
    main()
