"""Runs that are killed, fill their disk or lose their stores, beside undisturbed runs.

A case is a method with the settings of the tests. It is disturbed in one of three ways, and the
same call is made again until it finishes:

- ``kill``: SIGKILL at a random moment, once or twice;
- ``disk``: a disk of 20 MB with less room than the run needs; it gets room before the second call.
  This mounts a tmpfs, for which one has to be root;
- ``loss``: after a random round the folder goes in which clients keep their arrays, features and
  keys, or that of the sums from which a client can be taken out, with the process or without.

Model and metrics then have the bits of an undisturbed run, except seconds, bytes and
memory; or else the run says why not, in its log or by its error.

    python -m tests.crashes 200 0  # number of kills, seed

writes benchmarks/results/crashes.csv, a row for each case and trouble, with a quarter as many full
disks and losses. ``said`` has the sentences of runs that ended with other bits.
"""

import argparse
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet  # noqa: F401 - imported before a process forks
import torch

from fedntk.ntk.support.files import PARTIAL
from fedntk.simulations import Config, run, unlearn
from fedntk.simulations.engine.server_app import prepare
from fedntk.simulations.errors import first_line

from .simulations.outcomes import outcome
from .simulations.settings import SETTINGS, SMALL

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "crashes.csv"
DISK = 20 * 2**20
SUMS: dict[str, Any] = {"num_clients": 6, "clients_per_round": 6, "random_features": 50}
MASKED: dict[str, Any] = SUMS | {"clients_per_evaluation": 0, "validation_examples": 30}
TCT: dict[str, Any] = {"method": "tct", "rounds": 2, **MASKED}
PLAIN = {"auto_ridge": False, "validation_share": 0.0}
OF_SUMS = {"sums": PLAIN, "bootstrap_rounds": 1, "num_features": 60}
CASES: dict[str, dict[str, Any]] = {
    **{
        method: {"method": method, **SETTINGS[method]}
        for method in (
            "ditto", "fed-bn", "fed-per", "fed-proto", "local-training", "weighted-fedavg",
            "d-psgd", "dfedavg", "dispfl", "ntk-dfl", "fed-be", "fed-ensemble", "tct",
        )
    },
    "fedavg, masked": {"method": "fedavg", **MASKED, "secure": True},
    "fed-per, masked": {"method": "fed-per", **MASKED, "secure": True},
    "one-exchange, kept sums": {
        "method": "one-exchange", **SUMS, "one_exchange": {"storage": True}
    },
    "one-exchange, masked": {
        "method": "one-exchange", **MASKED, "secure": True
    },
    "one-exchange, asynchronous": {
        "method": "one-exchange", **SUMS, "rounds": 6, "lost_share": 0.4,
        "round_deadline": 0.01,
        "asynchrony": True, "one_exchange": {"storage": True},
    },
    "tct, kept sums": TCT | {"tct": OF_SUMS | {"storage": True}},
    "tct, masked": TCT | {"tct": OF_SUMS, "secure": True},
}  # fmt: skip
SHARES = {"kill": 1, "disk": 4, "loss": 4}  # one full disk and one loss for four kills
STORES = "cache", "details/sums"  # in a run's folder
Draw = np.random.Generator
Interrupt = Callable[[Path, int], None]  # folder, round


def attempt(
    config: Config, folder: Path, kill_after: float | None = None, then: Interrupt | None = None
) -> tuple[str, list[str]]:
    """Run in a forked process: return how it ended, and what it warned of.

    If sums of clients are kept, the model without client 0 is solved from them. The process ends as
    ``finished``, ``killed``, or with the first line of its error. `then` is called after each
    round.
    """
    with tempfile.NamedTemporaryFile("r+") as log:
        if not (pid := os.fork()):  # the imports are paid for once, and no thread has been started
            logger, handler = logging.getLogger("flwr"), logging.StreamHandler(log)
            handler.setLevel(logging.WARNING)
            handler.format = sentence
            logger.handlers, logger.propagate = [handler], False
            on_round = (lambda record: then(folder, int(record["round"]))) if then else None
            try:
                done = run(config, out=folder, progress=False, on_round=on_round)
                if getattr(config.settings, "storage", None) is not None:
                    unlearn(done, [0])
            except BaseException as error:
                log.write(f"{first_line(error)}\n")
                log.flush()
                os._exit(1)
            os._exit(0)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = Path(log.name).read_text(encoding="utf-8").splitlines()
    endings = {0: "finished", -signal.SIGKILL: "killed"}
    return endings.get(code) or said[-1], said


def sentence(record: logging.LogRecord) -> str:
    """Return a log's message as one line: the last of a traceback, the first of anything else."""
    lines = record.getMessage().strip().splitlines()
    return lines[-1 if "Traceback" in lines[0] else 0]


def with_kills(config: Config, folder: Path, seconds: float, draw: Draw) -> int:
    """Kill a run that takes so many seconds once or twice; return how often, 0 if it finished."""
    for kills in range(draw.integers(1, 3)):
        if attempt(config, folder, kill_after=seconds * draw.random())[0] != "killed":
            return kills
    return kills + 1


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a disk of 20 MB."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder]
        subprocess.run(options, check=True)  # noqa: S603 - our own program
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)  # noqa: S603, S607


def with_full_disk(config: Config, folder: Path, most: float, draw: Draw) -> list[str]:
    """Run with room for a part of `most` bytes on a small disk; return what it warned of."""
    ballast = folder.parent / "ballast"
    ballast.write_bytes(bytes(int(DISK - most * draw.random())))
    _, said = attempt(config, folder)
    ballast.unlink()
    return said


def lose(store: str, after: int, *, kill: bool) -> Interrupt:
    """Return what removes a store after a round, and the run with it if wanted."""

    def interrupt(folder: Path, server_round: int) -> None:
        if server_round == after:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder / store)
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)

    return interrupt


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, in blocks of 4096."""
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in folder.rglob("*") if p.is_file())


def general(said: str) -> str:
    """Return a sentence without what differs from run to run."""
    said = re.sub(rf"{tempfile.gettempdir()}/\S*?/\d+(?=[/:, ]|$)", "FOLDER", said)
    said = re.sub(r"[0-9a-f]{16,}", "KEY", said)
    return re.sub(r"\b\d+(\.\d+)?\b", "N", said)[:300]


class Straight(NamedTuple):
    """An undisturbed run, and its warnings."""

    outcome: tuple[object, ...]
    said: set[str]
    seconds: float
    num_bytes: int
    stores: list[str]  # in which something is kept


def leave_alone(config: Config) -> Straight:
    """Run a case from its start to its end."""
    prepare(config)
    with tempfile.TemporaryDirectory() as base:
        folder, begun = Path(base) / "straight", time.perf_counter()
        ended, said = attempt(config, folder)
        assert ended == "finished", ended
        seconds = time.perf_counter() - begun
        stores = [store for store in STORES if (folder / store).exists()]
        return Straight(everything(folder), {*said}, seconds, used_bytes(folder), stores)


def everything(folder: Path) -> tuple[object, ...]:
    """Return the outcome of a run, its models without a client, and what was left half written."""
    without = [p.read_bytes() for p in folder.glob("without-*/*.safetensors")]
    return (*outcome(folder, sent=False), without, list(folder.rglob(f"*{PARTIAL}")))


def disturb(
    config: Config, straight: Straight, trouble: str, count: int, base: Path, draw: Draw
) -> dict[str, Any]:
    """Disturb a case until it was disturbed `count` times; return what came of it."""
    disturbed = runs = same = 0
    said: set[str] = set()
    while disturbed < count:
        folder, words, times = base / str(runs), list[str](), 1
        if trouble == "kill":
            times = with_kills(config, folder, straight.seconds, draw)
        elif trouble == "disk":
            words = with_full_disk(config, folder, 1.2 * straight.num_bytes, draw)
            times = int(not set(words) <= straight.said)
        else:
            store, after = draw.choice(straight.stores), 1 + int(draw.integers(config.rounds))
            then = lose(store, after, kill=draw.random() < 0.5)
            _, words = attempt(config, folder, then=then)
        if not times:  # it was killed too late, or had room enough
            shutil.rmtree(folder)
            continue
        again, more = attempt(config, folder)
        disturbed, runs = disturbed + times, runs + 1
        if again == "finished" and everything(folder) == straight.outcome:
            same += 1
        else:
            said |= {general(line) for line in {*words, *more} - straight.said} or {"nothing"}
        shutil.rmtree(folder)
    return {
        "disturbed": disturbed,
        "runs": runs,
        "same-bits": same,
        "said": " | ".join(sorted(said)),
    }


def main() -> None:
    """Disturb from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--cases", default="|".join(CASES))
    parser.add_argument("--troubles", default=",".join(SHARES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, names = [], arguments.cases.split("|")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in names:
            config = SMALL.replace(**CASES[name])
            straight = leave_alone(config)
            for trouble in arguments.troubles.split(","):
                if trouble == "loss" and not straight.stores:
                    continue
                count = -(-arguments.kills // (len(names) * SHARES[trouble]))
                draw = np.random.default_rng([arguments.seed, *name.encode(), *trouble.encode()])
                with small_disk() if trouble == "disk" else tempfile.TemporaryDirectory() as base:
                    outcome = disturb(config, straight, trouble, count, Path(base), draw)
                rows.append({"case": name, "trouble": trouble, **outcome})
                print(rows[-1], flush=True)  # noqa: T201
                pd.DataFrame(rows).to_csv(arguments.out, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
