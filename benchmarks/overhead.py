"""What a round costs without training, on the local engine and on Ray, by the number of clients.

    python benchmarks/overhead.py [--clients 10,100,500,1000] [--rounds 11]

Two measures. "idle": clients that send the weights back at once, so that only the engine and the
strategy work (benchmarks/idle_app). "fedavg": FedAvg of fedntk's own app without local epochs,
which builds client, data and network for each message and takes the loss once. The first round,
in which workers start, is left out. Then 20 comparisons back to back in this process on each
engine: memory in use after each, and processes left. Writes results/overhead.csv and .json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fedntk.simulations import Config, compare, run
from fedntk.simulations.engine._flower import log_from
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.engine.flwr_run import superlink
from fedntk.simulations.engine.processes import tool
from fedntk.simulations.report.results import machine

HERE = Path(__file__).parent
APP = HERE / "idle_app"
sys.path.insert(0, str(APP))


def idle(engine: str, clients: int, rounds: int, scratch: Path) -> list[float]:
    """Seconds of each round with clients that do nothing."""
    import idle as app

    if engine == "local":
        with log_from(ERROR):
            return app.rounds(LocalGrid(app.client, clients, {}), clients, rounds)
    out = scratch / f"idle-{clients}.json"
    with superlink(scratch / f"flwr-{clients}") as (_, environment):
        command = [
            *(tool("flwr"), "run", str(APP), "fedntk", "--stream"),
            *("--run-config", f'num-clients={clients} rounds={rounds} out="{out}"'),
            *("--federation-config", f"num-supernodes={clients}"),
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603
    return json.loads(out.read_text(encoding="utf-8"))


def fedavg(engine: str, clients: int, rounds: int, scratch: Path) -> list[float]:
    """Seconds of each round of the app's FedAvg without local epochs."""
    config = Config(
        method="fedavg",
        local_epochs=0,
        clients_per_evaluation=0,
        num_clients=clients,
        clients_per_round=clients,
        partition="iid",
        rounds=rounds,
        out=str(scratch / f"{engine}-{clients}"),
    )
    return run(config, engine=engine, progress=False).curve("seconds").tolist()[1:]


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
    parser.add_argument("--clients", default="10,100,500,1000")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--comparisons", type=int, default=20)
    options = parser.parse_args()
    lines = ["measure,engine,clients,median_seconds,min_seconds,max_seconds"]
    medians: dict[tuple[str, str, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for clients in map(int, options.clients.split(",")):
            for name, measure in (("idle", idle), ("fedavg", fedavg)):
                for engine in ("local", "ray"):
                    seconds = measure(engine, clients, options.rounds, scratch)[1:]
                    median = medians[name, engine, clients] = float(np.median(seconds))
                    lines.append(
                        f"{name},{engine},{clients},{median:.4g},{min(seconds):.4g},{max(seconds):.4g}"
                    )
                    print(lines[-1], flush=True)
        summary = {
            "machine": machine(),
            "times-less-on-local": {
                f"{name}, {clients} clients": round(
                    medians[name, "ray", clients] / medians[name, "local", clients], 1
                )
                for name, engine, clients in medians
                if engine == "local"
            },
            "back-to-back-local": back_to_back("local", options.comparisons, scratch),
            "back-to-back-ray": back_to_back("ray", options.comparisons, scratch),
        }
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "overhead.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps(summary, indent=2)
    (results / "overhead.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
