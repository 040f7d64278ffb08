"""All models without one client, from sums on the disk: seconds and memory on one core.

Clients' sums are whole numbers, of random features; one client's are in memory at a time. A few of
the models are compared, to the bit, with that of a run that never had the client.

    OMP_NUM_THREADS=1 python benchmarks/ledger.py
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import use_checkout, write

use_checkout()

from fedntk.ntk import Normaliser  # noqa: E402
from fedntk.ntk.convex.ledger import ClientLedger  # noqa: E402
from fedntk.ntk.convex.pooled_statistics import NormalEquations  # noqa: E402
from fedntk.ntk.features.fixed_point import FixedPoint  # noqa: E402
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics, SumFormat  # noqa: E402

CLIENTS, EXAMPLES, CLASSES, CHECKED = 100, 120, 10, 3
RIDGE = 1e-2


def measured(width: int) -> dict[str, Any]:
    fixed = FixedPoint(np.full(width, 2.0**-11, np.float32), bits=8)
    expected = SumFormat(width, CLASSES, None, fixed)

    def equations(sums: FeatureStatistics) -> NormalEquations:
        return NormalEquations.of(sums.scaled(fixed), Normaliser.identity(width), bias=True)

    with tempfile.TemporaryDirectory() as folder:
        total = None
        for client in range(CLIENTS):
            drawn = torch.Generator().manual_seed(client)
            labels = torch.randint(CLASSES, (EXAMPLES,), generator=drawn)
            z = (torch.randn(EXAMPLES, width, generator=drawn) + labels[:, None] / 5) * 2.0**-6
            own = FeatureStatistics.of([z], labels, CLASSES, fixed_point=fixed)
            np.savez(Path(folder) / f"{client}.npz", **own.to_arrays(fixed))
            total = own if total is None else total + own

        def read(client: int) -> FeatureStatistics:
            with np.load(Path(folder) / f"{client}.npz") as arrays:
                return FeatureStatistics.from_arrays(dict(arrays), expected)

        ledger = ClientLedger(equations, RIDGE, equations(total))
        wall, cpu, reading = time.perf_counter(), time.process_time(), 0.0
        linear, harms, models = ledger.solve(total), [], {}
        for client in range(CLIENTS):
            start = time.process_time()
            own = read(client)
            reading += time.process_time() - start
            other = ledger.solve(total - own)
            harms.append(ledger.harm(linear, other))
            if client < CHECKED:
                models[client] = other
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        equal = [
            torch.equal(
                other,
                equations(
                    FeatureStatistics.join(read(k) for k in range(CLIENTS) if k != client)
                ).solve(RIDGE),
            )
            for client, other in models.items()
        ]
    return {
        "features": width, "clients": CLIENTS, "seconds": wall, "cpu-seconds": cpu,
        "of-these-reading": reading,
        "peak-memory-gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "equal-to-the-bit": f"{sum(equal)} of {len(equal)}",
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [measured(width) for width in (1000, 2000, 4000)]
    write("ledger", rows, {})
