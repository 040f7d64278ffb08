"""What threads that spin while they wait cost on a busy machine, and what passive waiting saves.

Torch with all cores, by itself and beside as many busy processes as there are cores. This program
starts and ends them; `load-before` says how busy the machine was already. "spinning" is what GNU's
OpenMP does by default (300,000 turns of a loop, some milliseconds), "passive" is
``OMP_WAIT_POLICY=PASSIVE``, which ``fedntk.ntk`` sets, and "one thread" has nobody to wait for.
Three pieces of the server's work, and a run by the command.

    python benchmarks/threads.py [--repeats 5]

Each measurement runs in a process of its own, and the ways take turns, so that other work on the
machine slows all of them alike. Writes results/threads.csv and .json. Needs fedntk installed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import ROOT, STEPS, in_child, machine, make, timed, use_checkout, write
from torch import nn

WAYS = {
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
NAMES = {name for way in WAYS.values() for name in way}
WORKS = ("kernel, n=1000", "evolution, n=200", "30 steps of SGD", "fedntk run, 5 rounds")


def child(work: str, way: str) -> dict[str, Any]:
    """Measure one piece of work."""
    torch.manual_seed(0)
    if work == WORKS[3]:
        return command()
    use_checkout()
    from fedntk.ntk import evolve, jacobian, one_hot

    if work == WORKS[2]:
        model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(10816, 10))
        x = torch.randn(64, 1, 28, 28)

        def measured() -> None:
            for _ in range(30):
                model.zero_grad()
                model(x).square().sum().backward()

    else:
        network, x = make("mlp-100", int(work.split("=")[1]), "cpu")
        kernel, outputs = jacobian(network, x).gram(), network(x).detach()
        targets = one_hot(torch.randint(0, 10, (len(x),)), 10)

        def measured() -> None:
            if work == WORKS[0]:
                jacobian(network, x).gram()
            else:
                options = {"loss": "cross-entropy", "learning_rate": 0.01, "steps": STEPS}
                evolve(kernel, outputs, targets, **options)

    measured()
    return timed(measured, "cpu", at_least=2.0)


def command() -> dict[str, Any]:
    """Seconds that a run of NTK-FL on the digits says it took, its start not counted."""
    conf = ROOT / "simulations" / "conf" / "ntk_fl_digits.toml"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["run", str(conf), "--quiet", "--set", "rounds=5", "--out", folder]
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", "from fedntk.simulations.cli import app; app()", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with open(f"{folder}/summary.json", encoding="utf-8") as file:
            return {"seconds": json.load(file)["seconds"]}


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile, by processes of our own."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]  # noqa: S603
    time.sleep(1.0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(work: str, way: str) -> float:
    """Seconds of one piece of work, in a process with that way of waiting."""
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(WAYS[way])
    found = in_child(__file__, {"work": work, "way": way})
    if found is None:
        raise SystemExit(f"{work} could not be measured")
    return float(found["seconds"])


def main() -> None:
    """Measure all, write, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(child(**json.loads(chosen.child))))
        return
    cores, found = os.cpu_count() or 1, {}
    before = os.getloadavg()[0]
    for work in WORKS:
        for beside in (0, cores):
            with busy(beside):
                for _ in range(chosen.repeats):
                    for way in WAYS:
                        found.setdefault((work, beside, way), []).append(measure(work, way))
            print({w: s for (k, b, w), s in found.items() if (k, b) == (work, beside)}, flush=True)
    rows = [
        {
            "work": work,
            "busy-processes": beside,
            "way": way,
            "seconds": statistics.median(seconds),
            "least": min(seconds),
            "most": max(seconds),
        }
        for (work, beside, way), seconds in found.items()
    ]
    median = {(r["work"], r["busy-processes"], r["way"]): r["seconds"] for r in rows}
    summary = {
        "machine": machine("cpu") | {"load-before": before},
        "times-slower-beside-busy-processes": {
            work: {way: round(median[work, cores, way] / median[work, 0, way], 1) for way in WAYS}
            for work in WORKS
        },
        "spinning-over-passive": {
            work: {
                kind: round(median[work, beside, "spinning"] / median[work, beside, "passive"], 2)
                for kind, beside in (("alone", 0), ("beside busy processes", cores))
            }
            for work in WORKS
        },
    }
    write("threads", rows, summary)


if __name__ == "__main__":
    main()
