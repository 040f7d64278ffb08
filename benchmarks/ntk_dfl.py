"""A round of NTK-DFL on the local engine: seconds, memory, bytes, and how they grow.

Fashion-MNIST, 784-100-10, 200 images a client from Dirichlet(0.1), cross-entropy, eta = 0.01,
t = 800, kappa random neighbours a client, all clients in every round, one torch thread in each
worker. Each case is a process of its own. What is measured is round 2, from the end of round 1 to
its own end, with records and checkpoints, and without evaluation. "seconds" are those of the clock,
which other work on the machine makes longer; "cpu-seconds" are those of the process. "peak-mb" is
the largest resident memory of the process, data set and libraries included.

"bytes-up" and "bytes-down" are metered, and means over the clients. The formulas are those of
docs/methods/ntk_dfl.md. "through no relay" is what a client would send if its weights travelled to
each neighbour. No Jacobian is sent dense; its bytes would be 4 n C P for each neighbour.

    python benchmarks/ntk_dfl.py --data-dir FOLDER

Needs fedntk installed.
"""

import resource
import tempfile
import time
from typing import Any

from common import measured, parse_options, write

CLASSES, INPUTS, WIDTH = 10, 784, 100
P = INPUTS * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
CASES: tuple[dict[str, Any], ...] = (
    {"clients": 100, "kappa": 2},
    {"clients": 100, "kappa": 5},
    {"clients": 100, "kappa": 10},
    {"clients": 200, "kappa": 5},
    {"clients": 300, "kappa": 5},
    {"clients": 300, "kappa": 5, "workers": 2},
    {"clients": 100, "kappa": 5, "tolerance": 1e-4},
    {"clients": 100, "kappa": 5, "tolerance": 1e-2},
    {"clients": 300, "kappa": 5, "topology": "clustered"},
    {"clients": 300, "kappa": 5, "topology": "clustered", "evolve_once": True},
)


SETTINGS = {
    "method": "ntk-dfl", "dataset": "fashion-mnist", "partition": "client-dirichlet", "alpha": 0.1,
    "clients_per_evaluation": 0, "model": "mlp", "width": WIDTH, "loss": "cross-entropy",
    "learning_rate": 0.01,
}  # fmt: skip


class Enough(Exception):  # noqa: N818 - no error
    """Ends the run."""


def child(
    clients: int, kappa: int, data_dir: str, examples: int = 200, workers: int = 1, **own: Any
) -> dict[str, Any]:
    from fedntk.simulations import Config, run

    found: dict[str, Any] = {}
    started: list[float] = []

    def on_round(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            found["seconds"] = time.perf_counter() - started[0]
            found["cpu-seconds"] = time.process_time() - started[1]
            for way in ("up", "down"):
                found[f"bytes-{way}"] = record[f"bytes-{way}"] / clients
            found["mean-examples"] = record["num-examples"] / clients
            raise Enough
        started[:] = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            **SETTINGS, data_dir=data_dir, examples_per_client=examples, num_clients=clients,
            clients_per_round=clients, rounds=3, evaluate_every=3, out=folder,
            ntk_dfl={"degree": kappa, **own},
        )  # fmt: skip
        try:
            run(config, workers=workers, progress=False, on_round=on_round)
        except Exception as error:
            if not isinstance(error.__cause__ or error, Enough):
                raise
    found["peak-mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return found | formulas(kappa, found["mean-examples"], once="evolve_once" in own)


def formulas(kappa: int, examples: float, *, once: bool) -> dict[str, float]:
    """Bytes of a client in a round; where hubs evolve, the mean over one and its members."""
    row = INPUTS + 2 * WIDTH + 2 * CLASSES  # inputs, slopes, activations, outputs, targets
    upload, weights = 4 * examples * row, 4 * P + 8
    if once:
        up = 3 * weights + kappa * (upload + weights)
        down = kappa * (upload + weights) + kappa * 2 * weights
        return {"formula-up": up / (kappa + 1), "formula-down": down / (kappa + 1)}
    return {
        "formula-up": 2 * weights + kappa * upload,
        "formula-down": 2 * kappa * weights + kappa * upload,
        "formula-up, through no relay": 2 * kappa * weights + kappa * upload,
        "formula-up, dense, through no relay": kappa * (2 * weights + 4 * examples * CLASSES * P),
    }


def main() -> None:
    """Measure all, write, print."""
    chosen = parse_options(__doc__, child=child, data_dir=True)
    rows = measured(__file__, [{**case, "data_dir": chosen.data_dir} for case in CASES])
    for row in rows:
        del row["data_dir"]

    def values(key: str, digits: int) -> dict[str, float]:
        return {
            ", ".join(f"{k} {row[k]}" for k in CASE if k in row): round(row[key], digits)
            for row in rows
        }

    summary = {
        "seconds": values("seconds", 1),
        "cpu-seconds": values("cpu-seconds", 1),
        "peak-mb": values("peak-mb", 0),
        "bytes-up": values("bytes-up", 0),
    }
    write("ntk_dfl", rows, summary)


CASE = ("clients", "kappa", "workers", "tolerance", "topology", "evolve_once")

if __name__ == "__main__":
    main()
