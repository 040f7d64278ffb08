"""How long commands, imports and a short run take, beside torch and Flower.

    python benchmarks/startup.py [--times 9]

Each program runs in a process of its own, with one thread, and all take turns. Seconds of the CPU
are hardly changed by what else is at work; those by the clock are. All modules are compiled before,
as in an installation. The .json has the ratio of
`import fedntk.strategies` to `import torch, flwr`.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import parse_options, write

COMMAND = str(Path(sys.executable).parent / "fedntk")
BASE, STRATEGIES = "import torch, flwr", "import fedntk.strategies"
PROGRAMS = {
    "fedntk --version": [COMMAND, "--version"],
    "fedntk --help": [COMMAND, "--help"],
    "fedntk run, three rounds of FedAvg": [
        *(COMMAND, "run", "--set", "method=fedavg", "--set", "train_examples=130"),
        *("--set", "num_clients=5", "--set", "rounds=3"),
    ],
    **{
        code: [sys.executable, "-c", code]
        for code in ("pass", BASE, STRATEGIES, "from fedntk.simulations import run")
    },
}


def seconds(command: list[str]) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)  # noqa: S603
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    times = parse_options(__doc__, times=9).times
    turns = [
        {name: seconds(command) for name, command in PROGRAMS.items()} for _ in range(times + 1)
    ][1:]  # the first compiles, and fills the system's caches
    rows = []
    for name in PROGRAMS:
        clock, cpu = (statistics.median(turn[name][i] for turn in turns) for i in (0, 1))
        rows.append({"program": name, "median_seconds": clock, "median_cpu_seconds": cpu})
    ratios = [[turn[STRATEGIES][i] / turn[BASE][i] for turn in turns] for i in (0, 1)]
    summary = {
        "times": times,
        "strategies-by-torch-and-flwr": {
            kind: [round(f(values), 3) for f in (min, statistics.median, max)]
            for kind, values in zip(("clock", "cpu"), ratios, strict=True)
        },
    }
    write("startup", rows, summary)


if __name__ == "__main__":
    main()
