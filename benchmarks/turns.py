"""Programs that take turns in being measured, each in a process and an environment of its own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
Work = Callable[[str, dict[str, np.ndarray]], Callable[[], np.ndarray]]


def serve(work: Work) -> None:
    """Answer lines of JSON: load a case and save its result, or take a turn of some repetitions."""
    run: Callable[[], Any] = list
    for line in sys.stdin:
        asked = json.loads(line)
        if "network" in asked:
            with np.load(asked["arrays"]) as arrays:
                run = work(asked["network"], dict(arrays))
            np.save(asked["result"], run())
        seconds = []
        for _ in range(asked["repeats"]):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        print("took", json.dumps(seconds), flush=True)


class Contestant:
    """One of the programs, on the last cores of this machine if `threads` says how many."""

    def __init__(
        self, command: Sequence[str | Path], threads: int = 0, log: Any = None, **environment: str
    ) -> None:
        environment = {"PYTHONPATH": str(FOLDER), **os.environ, **environment}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
            environment["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()}"
        cores = sorted(os.sched_getaffinity(0))[-threads:]
        self._process: Any = subprocess.Popen(  # noqa: S603 - the benchmarks' own programs
            [str(part) for part in command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip

    def ask(self, **asked: Any) -> Any:
        """Return what it says that its turn took."""
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("took "):
                return json.loads(line[5:])
        raise RuntimeError("a program that is measured has ended")

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.stdin.close()
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
