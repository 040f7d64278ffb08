"""``flwr run`` on Ray as a subprocess, on a SuperLink of our own."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import tomli_w

from ..checkpoints import OnRound
from ..configuration import Config
from ..errors import RunFailed
from . import processes
from .processes import Process, tool

APP = Path(__file__).parents[1]


def flwr_run(config: Config, on_round: OnRound) -> None:
    """Run a configuration with ``flwr run`` on a SuperLink of its own; follow its rounds."""
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "rounds.jsonl"):  # which this run will write again
        (folder / name).unlink(missing_ok=True)
    data_dir = config.data_dir and str(Path(config.data_dir).expanduser().absolute())
    config = config.replace(out=str(folder), data_dir=data_dir)
    settings = folder / "run-config.toml"
    settings.write_text(tomli_w.dumps(config.run_config()), encoding="utf-8")
    federation = (
        f"num-supernodes={config.num_clients} client-resources-num-cpus={config.client_cpus} "
        f"client-resources-num-gpus={config.client_gpus}"
    )
    log = folder / "flwr.log"
    log.unlink(missing_ok=True)
    with superlink(folder / "flwr", config.ray_address) as (server, environment):
        command = [
            *(tool("flwr"), "run", str(APP), "fedntk", "--stream"),
            *("--run-config", str(settings), "--federation-config", federation),
        ]
        process = processes.start(command, environment, log)
        try:
            for line in processes.follow(folder / "rounds.jsonl", process, server):
                on_round(json.loads(line))
        finally:
            processes.stop(process)
    settings.unlink()
    if not (folder / "summary.json").exists():
        said = processes.last_words(log.read_text(encoding="utf-8"))
        raise RunFailed(f"flwr run ended without a result ({said}); see {log}")


@contextlib.contextmanager
def superlink(home: Path, ray_address: str = "") -> Iterator[tuple[Process, dict[str, str]]]:
    """Start a SuperLink in simulation mode with its files in `home`; stop it and all it started.

    Its clients work on the Ray cluster at an address, which goes on, or on a Ray of their own: not
    on one that Ray notes for this machine, which may be somebody's, or gone. It yields the process,
    and the environment with which ``flwr run`` finds it.
    """
    home.mkdir(parents=True, exist_ok=True)
    environment, log = processes.flower_environment(home), home / "superlink.log"
    environment["RAY_ADDRESS"] = processes.cluster_address(ray_address)
    log.unlink(missing_ok=True)
    options = ("--insecure", "--simulation", "--host", "127.0.0.1", "--port")
    process, port = processes.start_on_free_port(
        lambda port: [tool("flower-superlink"), *options, str(port)], environment, log
    )
    try:
        processes.write_connection(home, "fedntk", address=f"127.0.0.1:{port}", insecure=True)
        yield process, environment
    finally:
        processes.end_with("FLWR_HOME", home)  # also Ray's workers, which lost their parent
        processes.stop(process)
