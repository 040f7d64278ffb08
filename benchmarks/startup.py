"""How long commands, imports and a short run take, beside torch and Flower.

    python benchmarks/startup.py [--times 9]

Each program runs in a process of its own, with one thread, and all take turns. Seconds of the CPU
are hardly changed by what else is at work; those by the clock are. All modules are compiled before,
as in an installation. Writes results/startup.csv and .json, with the ratio of
`import fedntk.strategies` to `import torch, flwr` in each turn.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedntk.simulations.report.results import machine

RESULTS = Path(__file__).parent / "results"
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
    """Run a program; return its seconds by the clock and of the CPU."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)  # noqa: S603
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=9)
    times = parser.parse_args().times
    turns = [
        {name: seconds(command) for name, command in PROGRAMS.items()} for _ in range(times + 1)
    ][1:]  # the first compiles, and fills the system's caches
    lines = ["program,median_seconds,median_cpu_seconds"]
    for name in PROGRAMS:
        clock, cpu = (statistics.median(turn[name][i] for turn in turns) for i in (0, 1))
        lines.append(f'"{name}",{clock:.3f},{cpu:.3f}')
    ratios = [[turn[STRATEGIES][i] / turn[BASE][i] for turn in turns] for i in (0, 1)]
    summary = {
        "machine": machine(),
        "times": times,
        "strategies-by-torch-and-flwr": {
            kind: [round(f(values), 3) for f in (min, statistics.median, max)]
            for kind, values in zip(("clock", "cpu"), ratios, strict=True)
        },
    }
    (RESULTS / "startup.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps(summary, indent=2)
    (RESULTS / "startup.json").write_text(text + "\n", encoding="utf-8")
    print("\n".join(lines), text, sep="\n")


if __name__ == "__main__":
    main()
