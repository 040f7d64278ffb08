"""Programs that take turns in being measured, each in a process and an environment of its own."""

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
    """One of the programs."""

    def __init__(self, command: Sequence[str | Path], threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[-threads:]
        flags = f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()}"
        self._process: Any = subprocess.Popen(  # noqa: S603 - the benchmarks' own programs
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": str(threads), "XLA_FLAGS": flags, "PYTHONPATH": str(FOLDER)},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._to, self._from = self._process.stdin, self._process.stdout

    def ask(self, **asked: Any) -> list[float]:
        """Return the seconds of each repetition."""
        self._to.write(json.dumps(asked) + "\n")
        self._to.flush()
        for line in self._from:
            if line.startswith("took "):
                return [float(s) for s in json.loads(line[5:])]
        raise RuntimeError("a program that is measured has ended")

    def close(self) -> None:
        """End it."""
        self._to.close()
        self._process.wait()
