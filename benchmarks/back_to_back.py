"""Memory in use and processes left after comparisons back to back in one process.

    python benchmarks/back_to_back.py [--comparisons 20]

NTK-FL and FedAvg on digits, two rounds, on the local engine and on Ray. Writes
results/back_to_back.json.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import psutil

from fedntk.simulations import Config, compare
from fedntk.simulations.report.results import machine


def back_to_back(engine: str, times: int, scratch: Path) -> dict[str, Any]:
    """Compare two methods again and again in this process; memory after each, processes left."""
    configs = {
        m: Config(method=m, num_clients=8, clients_per_round=4) for m in ("ntk-fl", "fedavg")
    }
    process, memory = psutil.Process(), []
    for i in range(times):
        out = scratch / f"{engine}-again-{i}"
        compare(configs, out=out, rounds=2, engine=engine, progress=False)
        memory.append(round(process.memory_info().rss / 1e6, 1))
    homes = (str(scratch / f"{engine}-again"),)
    left = [
        " ".join(p.cmdline())[:80]
        for p in psutil.process_iter()
        if p.pid != process.pid and _home(p).startswith(homes)
    ]
    return {
        "comparisons": times,
        "memory-mb": memory,
        "children-left": len(process.children(recursive=True)) + len(left),
    }


def _home(process: psutil.Process) -> str:
    try:
        return process.environ().get("FLWR_HOME", "")
    except psutil.Error:
        return ""


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comparisons", type=int, default=20)
    times = parser.parse_args().comparisons
    summary: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("local", "ray"):
            summary[engine] = back_to_back(engine, times, Path(folder))
    text = json.dumps(summary, indent=2)
    results = Path(__file__).parent / "results"
    (results / "back_to_back.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
