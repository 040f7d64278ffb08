"""Processes of Flower's: started on free ports, and ended with all that they started."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import tomli_w

from ..config.importing import SEARCHED, search_path
from ..errors import RunFailed

Process = subprocess.Popen[bytes]
PATIENCE = 15.0  # seconds in which a process that was told to end may do so


def tool(name: str) -> str:
    """Path of a command that was installed with this Python."""
    return str(Path(sys.executable).parent / name)


def flower_environment(home: Path) -> dict[str, str]:
    """Return an environment in which Flower keeps its files in `home` and installs nothing."""
    return os.environ | {
        "FLWR_HOME": str(home),
        SEARCHED: search_path(),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def cluster_address(configured: str) -> str:
    """Return the address of the Ray cluster that a run is told, or "local": a Ray of its own."""
    return configured or os.environ.get("RAY_ADDRESS") or "local"


def last_words(text: str) -> str:
    """Return what ended a process by its log: the exception that Flower names, or the last line.

    A line counts if it has words, without the frame that Flower draws.
    """
    if cause := re.search(r"An exception occur+ed ?!! (.*\w.*)", text):
        return cause[1].strip()
    lines = [line.strip(" │╭╰─╮╯") for line in text.splitlines()]
    return next((line for line in reversed(lines) if any(map(str.isalnum, line))), "")


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a process that appends what it says to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(  # noqa: S603
            command, env=dict(environment), stdout=file, stderr=subprocess.STDOUT
        )


def start_on_free_port(
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    log: Path,
    *,
    port: int | None = None,
) -> tuple[Process, int]:
    """Start a server with the command for a port, a free one by default; wait until it listens."""
    for _ in range(3):  # another process may take a port that was free a moment ago
        with socket.create_server(("127.0.0.1", 0)) as probe:
            chosen = port or int(probe.getsockname()[1])
        arguments = command(chosen)
        process = start(arguments, environment, log)
        try:
            if _listens(process, chosen):
                return process, chosen
        except BaseException:
            stop(process)
            raise
        stop(process)
    raise RunFailed(f"{Path(arguments[0]).name} did not start; see {log}")


def write_connection(home: Path, name: str, **connection: str | bool) -> None:
    """Write Flower's configuration into `home`: by default, its commands use this SuperLink."""
    home.mkdir(parents=True, exist_ok=True)
    settings = {"superlink": {"default": name, name: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")


def _listens(process: Process, port: int, timeout: float = 60) -> bool:
    """Wait until the process itself listens on the port; False if it ends or takes too long."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
        time.sleep(0.1)
    return False


def follow(path: Path, *running: Process) -> Iterator[str]:
    """Yield the whole lines of a file that grows, until one of the processes has ended."""
    shown, ended = 0, False
    while not ended:
        ended = any(process.poll() is not None for process in running)
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
            yield from lines[shown:]
            shown = len(lines)
        time.sleep(0.0 if ended else 0.2)


def stop(*processes: Process, patience: float = PATIENCE) -> None:
    """End processes and all that they started, and wait until they are gone."""
    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(deadline - time.monotonic(), 0))
    _, left = psutil.wait_procs(family, timeout=patience)
    for survivor in [*left, *processes]:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(left, timeout=patience)
    for process in processes:
        process.wait()


def processes_with(variable: str, folder: Path) -> list[psutil.Process]:
    """Return the processes that have this folder in an environment variable."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == str(folder):
                processes.append(process)
    return processes


def end_with(variable: str, folder: Path) -> None:
    """Kill the processes that have this folder in an environment variable; wait for their end.

    All at once: a server that outlives its clients would take their end for a round's replies.
    """
    processes = processes_with(variable, folder)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=PATIENCE)
