"""Whether a visit of a client costs the same however many clients and rounds there are.

    python benchmarks/many_clients.py --data-dir FOLDER

FedAvg on Fashion-MNIST on the local engine: 100 clients in each round, an MLP of 10 hidden units,
one step with all of a client's images, no evaluation. Milliseconds are those of a round by the
clock over 100 visits: medians of the first tenth of the rounds and of the last. Each number of
clients is a process of its own, with one thread.
"""

import statistics
import tempfile
from typing import Any

import torch
from common import measured, parse_options, write

CLIENTS, ROUNDS = (1000, 5000), 100
VISITS = 100  # clients in a round


def child(clients: int, rounds: int, data_dir: str) -> dict[str, Any]:
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
    torch.set_num_threads(1)
    data_dir = parse_options(__doc__, child=child, data_dir=True).data_dir
    cases = [{"clients": n, "rounds": ROUNDS, "data_dir": data_dir} for n in CLIENTS]
    rows = measured(__file__, cases)
    for row in rows:
        del row["data_dir"]
    write("many_clients", rows, {})


if __name__ == "__main__":
    main()
