"""Run a configuration, in this process or through ``flwr run`` on Ray."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import tomli_w
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ._flower import log_from
from .client_app import app as client_application
from .config import Config
from .engines import LocalGrid
from .results import Run, RunFailed, read_run
from .server_app import OnRound, serve

__all__ = ["Engine", "run"]

Engine = Literal["local", "ray"]
APP = Path(__file__).parent


def run(
    config: Config | str | Path,
    *,
    engine: Engine = "local",
    progress: bool = True,
    **overrides: Any,
) -> Run:
    """Run a configuration and read its results back.

    Parameters
    ----------
    config : Config, or path of a TOML file
        What to run.
    engine : {"local", "ray"}
        ``"local"``: virtual clients one after the other in this process, no Ray. ``"ray"``:
        ``flwr run`` as a subprocess, with a SuperLink of its own that is stopped afterwards;
        Flower's files go into the run's folder. The same seed gives the same model bits on both.
    progress : bool
        Show a line with the round, the accuracy and the time left.
    **overrides
        Settings (snake_case) that win over `config`.

    Returns
    -------
    Run
        Its folder, rounds and summary.

    Raises
    ------
    ConfigError
        If a setting cannot work; nothing has been run.
    RunFailed
        If the run ended early on the ray engine, with the reason it gave.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run(Config(rounds=1, out=folder), progress=False)
    >>> list(result.curve().index)
    [0, 1]
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine: expected one of {', '.join(get_args(Engine))}, got {engine!r}")
    if isinstance(config, Config):
        config = replace(config, **overrides)
    else:
        config = Config.load(config, **overrides)
    with _display(config, progress) as on_round:
        if engine == "local":
            grid = LocalGrid(client_application, config.num_clients, config.values())
            with log_from(WARNING):  # the display and the results say the rest
                serve(grid, config, on_round)
        else:
            _flwr_run(config, on_round)
    return read_run(config.folder)


@contextlib.contextmanager
def _display(config: Config, enabled: bool) -> Iterator[OnRound]:
    """Show a progress bar over the rounds."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as progress:
        name = f"{config.name or config.method} on {config.dataset}"
        task = progress.add_task(name, total=config.rounds, state="starting")

        def on_round(record: dict[str, float]) -> None:
            state = f"accuracy {record['accuracy']:.3f}"
            progress.update(task, completed=int(record["round"]), state=state)

        yield on_round


def _flwr_run(config: Config, on_round: OnRound) -> None:
    """``flwr run`` on a SuperLink of our own, following the rounds as they are written."""
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "rounds.jsonl"):
        (folder / name).unlink(missing_ok=True)
    config = replace(config, out=str(folder), data_dir=_absolute(config.data_dir))
    settings = folder / "run-config.toml"
    config.save(settings)
    federation = (
        f"num-supernodes={config.num_clients} client-resources-num-cpus={config.client_cpus} "
        f"client-resources-num-gpus={config.client_gpus}"
    )
    with (
        _superlink(folder / "flwr") as (superlink, environment),
        (folder / "flwr.log").open("w", encoding="utf-8") as log,
    ):
        command = [
            *(_tool("flwr"), "run", str(APP), "fedntk", "--stream"),
            *("--run-config", str(settings), "--federation-config", federation),
        ]
        process = subprocess.Popen(  # noqa: S603
            command, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            shown = 0
            while True:
                ended = process.poll() is not None or superlink.poll() is not None
                shown = _show_rounds(folder / "rounds.jsonl", shown, on_round)
                if ended:
                    break
                time.sleep(0.2)
        finally:
            _stop(process)
    settings.unlink()
    if not (folder / "summary.json").exists():
        last = (folder / "flwr.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RunFailed(f"flwr run ended without a result ({' '.join(last)}); see {log.name}")


def _show_rounds(path: Path, shown: int, on_round: OnRound) -> int:
    if not path.exists():
        return shown
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    for line in lines[shown:]:
        on_round(json.loads(line))
    return len(lines)


@contextlib.contextmanager
def _superlink(home: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Start a SuperLink in simulation mode; yield it and the environment for its user."""
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
            *(_tool("flower-superlink"), "--insecure", "--simulation"),
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


def _stop(process: subprocess.Popen[bytes], patience: float = 15) -> None:
    """End a process and all that it started, and wait until they are gone."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    _, left = psutil.wait_procs(family, timeout=patience)
    for survivor in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(left, timeout=patience)
    process.kill()
    process.wait()


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else path
