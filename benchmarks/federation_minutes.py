"""Seconds by the clock from a run's start to 88 % on Fashion-MNIST, in a real federation.

    python benchmarks/federation_minutes.py --data-dir FOLDER [--cap 300] [--methods ...]

One SuperLink with TLS and three SuperNodes that authenticate, all on this machine
(fedntk.simulations.deploy.federation); all 60,000 images, Dirichlet 0.5 over three clients, the
whole test set on the server after each round. Rates are those of simulations/conf; NTK-FL's clients
take 1 % of their images in a round, about 200 as there. One exchange is run with all images and
p = 1,000, and with 20,000 of them and p = 2,000: images are what costs. The federation is up when
the clock begins, at ``flwr run``. A run is stopped at the target, or after `--cap` seconds. Rows of
methods that are not asked for stay.

Each row of results/federation_minutes.csv is a run: `seconds` until the target was seen, empty if
it was not; `accuracy` and `rounds` at the end; and when, in seconds from the start, `started`: the
ServerApp has loaded Flower, torch and the data; `answered`: the clients' first replies are
aggregated; `evaluated`: the first model is. `load` is the machine's load average before the run.
Each row of results/federation_processes.csv is a process that began or worked while a method ran:
when it began, how long it lived and how many seconds of the processor it took, in the run.
"""

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from common import keep_rows, parse_options

from fedntk.simulations import RunFailed
from fedntk.simulations.deploy.federation import CONNECTION, Federation

APP = Path(__file__).parents[1] / "simulations"
TARGET = 0.88
COMMON = {
    "dataset": "fashion-mnist", "num-clients": 3, "clients-per-round": 3, "alpha": 0.5,
    "clients-per-evaluation": 0, "seed": 0,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "one-exchange": {
        "model": "scattering", "random-features": 1000, "bandwidth": 1.6, "standardise": False,
        "rounds": 1,
    },
    "one-exchange-20000": {
        "method": "one-exchange",
        "model": "scattering", "random-features": 2000, "bandwidth": 1.6, "standardise": False,
        "rounds": 1, "train-examples": 20_000,
    },
    "fedavg": {"learning-rate": 0.1, "local-epochs": 50, "batch-size": 200, "rounds": 40},
    "scaffold": {"learning-rate": 0.3, "local-epochs": 10, "batch-size": 32, "rounds": 40},
    "ntk-fl": {"learning-rate": 0.01, "sampling-rate": 0.01, "rounds": 40},
}  # fmt: skip
MOMENTS = {"started": "Starting ", "answered": "Aggregated MetricRecord"}
EVALUATION = re.compile(r"Evaluation on the server: (?:None|\{'accuracy': ([0-9.]+))")


class Processes(threading.Thread):
    """Watch the processes that this one starts, and those that they start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begin, self.ended = time.time(), threading.Event()
        self.before = {process.pid: cpu for process, cpu in self._alive()}
        self.rows: dict[int, dict[str, Any]] = {}

    def _alive(self) -> Iterator[tuple[psutil.Process, float]]:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                yield process, times.user + times.system

    def run(self) -> None:
        """Look five times a second."""
        while not self.ended.wait(0.2):
            now = time.time() - self.begin
            for process, cpu in self._alive():
                pid = process.pid
                with contextlib.suppress(psutil.Error):
                    if pid not in self.rows:
                        program = [part for part in process.cmdline() if "fl" in Path(part).name]
                        name = Path(program[0]).name if program else process.name()
                        began = max(0.0, process.create_time() - self.begin)
                        self.rows[pid] = {"process": name, "pid": pid, "began": began}
                    lived = now - self.rows[pid]["began"]
                    self.rows[pid] |= {"lived": lived, "cpu": cpu - self.before.get(pid, 0.0)}


def measure(
    federation: Federation, method: str, data_dir: str, cap: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    row: dict[str, Any] = {"method": method, "load": os.getloadavg()[0], "seconds": None}
    out = str(federation.folder / f"results-{method}")
    settings = {"method": method, **COMMON, **METHODS[method], "data-dir": data_dir, "out": out}
    begin, processes = time.monotonic(), Processes()
    processes.start()
    submission = federation.submit(APP, settings)
    ended = False
    while not ended and row["seconds"] is None and (now := time.monotonic() - begin) < cap:
        ended = submission.process.poll() is not None  # and then its log is read once more
        for moment, sign in MOMENTS.items():
            if moment not in row and sign in submission.text:
                row[moment] = now
        found = [float(text) for text in EVALUATION.findall(submission.text)[1:]]  # from round 1
        if found:
            row.setdefault("evaluated", now)
            row |= {"accuracy": found[-1], "rounds": len(found), "until": now}
            row["seconds"] = now if found[-1] >= TARGET else None
        time.sleep(0.2)
    processes.ended.set()
    seen = [{"method": method, **own} for own in processes.rows.values() if own["cpu"] >= 0.1]
    run = re.search(r"started run (\d+)", submission.text)
    if submission.process.poll() is None and run:
        with contextlib.suppress(RunFailed):  # it may end by itself just now
            federation.flwr("stop", run[1], CONNECTION)
    submission.process.wait()
    if "accuracy" not in row and ended:
        raise RuntimeError(submission.text[-2000:])
    print(row, flush=True)
    return row, seen


def main() -> None:
    options = parse_options(__doc__, data_dir=True, cap=300.0, methods=tuple(METHODS))
    data_dir = str(Path(options.data_dir).absolute())
    with (
        tempfile.TemporaryDirectory() as folder,
        Federation(folder, 3, environment={"OMP_NUM_THREADS": "1"}) as federation,
    ):
        found = [measure(federation, method, data_dir, options.cap) for method in options.methods]
    described = {"cap": options.cap, "load-after": os.getloadavg()[0]}
    seen = [process for _, processes in found for process in processes]
    for stem, rows in (("minutes", [row for row, _ in found]), ("processes", seen)):
        print(keep_rows(f"federation_{stem}", rows, ["method"], described))


if __name__ == "__main__":
    main()
