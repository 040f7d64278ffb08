"""``flwr run`` on Ray as a subprocess, on a SuperLink of our own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from .config import Config, nested
from .errors import RunFailed

__all__ = ["end_leftovers", "flwr_run", "superlink", "tool"]

OnRound = Callable[[dict[str, Any]], None]
APP = Path(__file__).parent


def flwr_run(config: Config, on_round: OnRound) -> None:
    """Run a configuration with ``flwr run``, following the rounds as they are written.

    The SuperLink is started for this run and stopped after it; all of Flower's files are in the
    run's folder.

    Parameters
    ----------
    config : Config
        What to run. If it has checkpoints already, it goes on from the newest.
    on_round : callable
        Is given the metrics of each round, those of a resumed run's earlier rounds too.

    Raises
    ------
    RunFailed
        If the run ends without a result, with the reason it gave.
    """
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "rounds.jsonl"):  # which this run will write again
        (folder / name).unlink(missing_ok=True)
    config = config.replace(out=str(folder), data_dir=_absolute(config.data_dir))
    settings = folder / "run-config.toml"
    settings.write_text(tomli_w.dumps(nested(config.run_config())), encoding="utf-8")
    federation = (
        f"num-supernodes={config.num_clients} client-resources-num-cpus={config.client_cpus} "
        f"client-resources-num-gpus={config.client_gpus}"
    )
    with (
        superlink(folder / "flwr") as (server, environment),
        (folder / "flwr.log").open("w", encoding="utf-8") as log,
    ):
        command = [
            *(tool("flwr"), "run", str(APP), "fedntk", "--stream"),
            *("--run-config", str(settings), "--federation-config", federation),
        ]
        process = subprocess.Popen(  # noqa: S603
            command, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            shown = 0
            while True:
                ended = process.poll() is not None or server.poll() is not None
                shown = _show_rounds(folder / "rounds.jsonl", shown, on_round)
                if ended:
                    break
                time.sleep(0.2)
        finally:
            _stop(process)
    settings.unlink()
    if not (folder / "summary.json").exists():
        lines = (folder / "flwr.log").read_text(encoding="utf-8").splitlines()
        said = [line.strip(" │") for line in lines if any(map(str.isalnum, line))]
        raise RunFailed(f"flwr run ended without a result ({' '.join(said[-1:])}); see {log.name}")


def end_leftovers(folder: Path) -> None:
    """End what an earlier run on Ray in this folder left at work, when it was killed itself.

    All that such a run starts has ``flwr`` in the folder as Flower's home, in its environment.
    """
    home, left = folder / "flwr", []
    if not home.exists():
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME") == str(home):
                process.terminate()
                left.append(process)
    _outlast(left)


def _show_rounds(path: Path, shown: int, on_round: OnRound) -> int:
    if not path.exists():
        return shown
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    for line in lines[shown:]:
        on_round(json.loads(line))
    return len(lines)


@contextlib.contextmanager
def superlink(home: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Start a SuperLink in simulation mode, and stop it with all that it started.

    Parameters
    ----------
    home : Path
        Where Flower's files go.

    Yields
    ------
    tuple of Popen and dict
        The process, and the environment with which ``flwr run`` finds it.
    """
    home.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    for _ in range(3):  # another process may take a port that was free a moment ago
        port = _free_port()
        command = [
            *(tool("flower-superlink"), "--insecure", "--simulation"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]
        with (home / "superlink.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(  # noqa: S603
                command, env=environment, stdout=log, stderr=log
            )
        try:
            if not _listens(process, port):
                continue
            connection = {"address": f"127.0.0.1:{port}", "insecure": True}
            settings = {"superlink": {"default": "fedntk", "fedntk": connection}}
            (home / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
            yield process, environment
            return
        finally:
            _stop(process)
    raise RunFailed(f"the SuperLink did not start; see {home / 'superlink.log'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(process: subprocess.Popen[bytes], port: int, timeout: float = 60) -> bool:
    """Wait until the process itself listens on the port."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
        time.sleep(0.1)
    return False


def _outlast(processes: list[psutil.Process], patience: float = 15) -> None:
    """Wait until processes have ended; kill those that are there after `patience` s."""
    _, left = psutil.wait_procs(processes, timeout=patience)
    for survivor in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(left, timeout=patience)


def _stop(process: subprocess.Popen[bytes], patience: float = 15) -> None:
    """End a process and all that it started, and wait until they are gone."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    _outlast(family, patience)
    process.kill()
    process.wait()


def tool(name: str) -> str:
    """Path of a command that was installed with this Python."""
    return str(Path(sys.executable).parent / name)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else path
