"""Where the time of an exchange goes in a real deployment, without any work of the clients.

    python benchmarks/deployment.py [--nodes 3] [--repeats 5]

A federation on this machine, with TLS and SuperNodes that authenticate
(fedntk.simulations.deploy.federation); 0.3 MB of weights go to each node and come back. Flower
starts a process for each message to a node:

waiting   from the server's call until that process starts: the SuperNode asks for messages every
          3 s, the SuperExec beside it for tasks every second
Flower    until the process has loaded Flower and reaches the app
imports   of the app: torch, and what else fedntk.clients takes
answer    of the client, which does nothing here
back      until the server has all replies: it asks for them every 3 s

`cpu-seconds` are those of the process in each stage. `imports` are the CPU seconds that
``python -X importtime`` finds in the modules of each package, only their own time, and how much
longer ``fedntk.clients`` takes than torch and Flower, each the least of the repeats. Writes
results/deployment.csv, a row for each reply, and .json, with medians.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import parse_options, write

from fedntk.simulations.deploy.federation import Federation

APP = Path(__file__).parent / "deployment_app"
STAGES = ("waiting", "flower", "imports", "answer", "back")
MOMENTS = ("sent", "started", "loaded", "imported", "answered", "received")
NEEDED = "flwr.supernode.cli.flwr_clientapp, flwr.client, flwr.clientapp, torch"
LONGEST = 6  # packages that are named


def exchanges(nodes: int, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        with Federation(Path(folder) / "federation", nodes) as federation:
            federation.run(APP, {"nodes": nodes, "repeats": repeats, "out": str(out)})
        said = json.loads(out.read_text(encoding="utf-8"))
    rows = []
    for row in said:
        at = [row[f"{moment}-time"] for moment in MOMENTS]
        stages = zip(STAGES, at[:-1], at[1:], strict=True)
        cpu = [0.0, *(row[f"{moment}-cpu"] for moment in MOMENTS[2:5])]
        spent = zip(STAGES[1:4], cpu[:-1], cpu[1:], strict=True)
        rows.append({
            "exchange": row["exchange"],
            "seconds": at[-1] - at[0],
            **{f"seconds-{stage}": end - begin for stage, begin, end in stages},
            **{f"cpu-seconds-{stage}": end - begin for stage, begin, end in spent},
        })  # fmt: skip
    return rows


def imports(repeats: int) -> dict[str, Any]:
    """CPU seconds of importing, in fresh processes; by package as -X importtime reports them."""
    pairs = [
        (_import_seconds(NEEDED), _import_seconds(f"{NEEDED}, fedntk.clients"))
        for _ in range(repeats)
    ]
    before, after = (min(seconds) for seconds in zip(*pairs, strict=True))
    done = subprocess.run(  # noqa: S603 - our own Python
        [sys.executable, "-X", "importtime", "-c", f"import {NEEDED}, fedntk.clients"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    own: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        microseconds, _, module = line.removeprefix("import time:").split("|")
        if microseconds.strip().isdigit():
            own[module.strip().partition(".")[0]] += int(microseconds)
    longest = own.most_common(LONGEST)
    named = dict(longest) | {"fedntk": own["fedntk"]}
    others = own.total() - sum(named.values())
    return {
        "seconds-of-torch-and-flower": round(before, 3),
        "seconds-more-of-fedntk-clients": round(after - before, 3),
        "seconds-by-package": {name: round(us / 1e6, 3) for name, us in named.items()}
        | {"others": round(others / 1e6, 3)},
    }


def _import_seconds(modules: str) -> float:
    program = f"import time; import {modules}; print(time.process_time())"
    done = subprocess.run(  # noqa: S603 - our own Python
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def medians(of: list[dict[str, Any]]) -> dict[str, float]:
        keys = [key for key in of[0] if key != "exchange"]
        found = {key: round(statistics.median(row[key] for row in of), 2) for key in keys}
        seconds = [row["seconds"] for row in of]
        return found | {"least": round(min(seconds), 2), "most": round(max(seconds), 2)}

    kinds = dict.fromkeys(row["exchange"] for row in rows)
    of_kinds = {kind: medians([r for r in rows if r["exchange"] == kind]) for kind in kinds}
    return {**of_kinds, "all": medians(rows)}


def main() -> None:
    options = parse_options(__doc__, nodes=3, repeats=5)
    load, begin = os.getloadavg()[0], time.time()
    rows = exchanges(options.nodes, options.repeats)
    result = {
        "load-before": round(load, 2), "load-after": round(os.getloadavg()[0], 2),
        "seconds-in-all": round(time.time() - begin, 1), "nodes": options.nodes,
        "repeats": options.repeats, "medians": summary(rows), "imports": imports(options.repeats),
    }  # fmt: skip
    write("deployment", rows, result)


if __name__ == "__main__":
    main()
