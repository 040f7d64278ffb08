"""A real federation on this machine: a SuperLink with TLS, and SuperNodes that authenticate.

    python -m fedntk.simulations.deploy.federation run simulations --nodes 3

starts it, runs an app in it, and stops all that it started. Nothing in it is simulated but the
network: clients are processes, messages are encrypted, and Flower polls as it does between
machines. Each command is printed, so that it can be copied for a deployment over several machines.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from fedntk.ntk.support.files import claimed

from ..errors import RunFailed, command_line, with_extra_named
from .certificates import Certificates, make_certificates, make_node_key

try:
    from ..engine import processes
    from ..engine.processes import Process, tool
except ModuleNotFoundError as error:
    raise with_extra_named(error) from error

HOST = "127.0.0.1"
CONNECTION = "fedntk"  # name of the SuperLink in Flower's configuration
MARK = "FEDNTK_FEDERATION"  # variable in the environment of all that a federation starts
Value = bool | float | int | str
Settings = Mapping[str, Value] | str  # or as Flower's commands take them: "key=value key=value"
Say = Callable[[str], None]


@dataclass
class Supernode:
    """One node of a federation; the server knows it by `node_id`."""

    log: Path
    process: Process = field(repr=False)
    node_id: int = 0


@dataclass(eq=False)
class Submission:
    """A run that was submitted: ``flwr run --stream``, and the log of what the ServerApp says."""

    federation: "Federation" = field(repr=False)
    process: Process = field(repr=False)
    log: Path

    @property
    def text(self) -> str:
        """What the ServerApp has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def status(self) -> str:
        """What Flower says of the run, such as ``finished:completed``; or ``refused``."""
        number = re.search(r"started run (\d+)", self.text)
        if number is None:
            return "refused"
        answer = self.federation.flwr("ls", "--run-id", number[1], CONNECTION, "--format", "json")
        return str(json.loads(answer)["runs"][0]["status"])

    def wait(self, on_line: Say | None = None) -> None:
        """Give each line of the log to `on_line`; RunFailed if the run did not finish."""
        federation, superlink = self.federation, self.federation.superlink
        for line in processes.follow(self.log, self.process, superlink):
            if on_line is not None:
                on_line(line)
        if superlink.poll() is not None:
            processes.stop(self.process)
            raise RunFailed(f"the SuperLink has ended; see {federation.superlink_log}")
        if (status := self.status) != "finished:completed":
            said = processes.last_words(self.text)
            raise RunFailed(f"the run ended as {status} ({said}); see {self.log}")


class Federation:
    """A SuperLink and SuperNodes on this machine, as a context manager.

    At its end all processes that it started have ended, also those that a killed one left. It
    raises BlockingIOError if there is a federation in the folder already, and RunFailed, with the
    log that says why, if the SuperLink or a SuperNode does not start.

    Parameters
    ----------
    folder : path
        Folder for certificates, keys, logs, the SuperLink's database and Flower's other files.
    num_supernodes : int
        Number of nodes.
    node_configs : sequence of dict or str, optional
        One for each node: what its clients find in ``context.node_config``. By default
        ``partition-id`` and ``num-partitions``. A string is given to ``flower-supernode`` as it is.
    environment : dict, optional
        Variables for all processes, besides this process's own.
    say : callable, optional
        Function that is given what is done, and each command.
    host, port : str, int
        Address at which the SuperLink listens; by default this machine only, and a free port.
    certificates : Certificates, optional
        Files of TLS; by default they are made in the folder.

    Examples
    --------
    ::

        with Federation("federation", num_supernodes=3) as federation:
            federation.run("simulations", {"num-clients": 3, "clients-per-round": 3, "rounds": 2})
    """

    def __init__(
        self,
        folder: str | Path,
        num_supernodes: int = 3,
        *,
        node_configs: Sequence[Settings] | None = None,
        environment: Mapping[str, str] | None = None,
        say: Say | None = None,
        host: str = HOST,
        port: int | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        if node_configs is None:
            numbers = range(num_supernodes)
            node_configs = [{"partition-id": i, "num-partitions": len(numbers)} for i in numbers]
        if len(node_configs) != num_supernodes:
            raise ValueError(
                f"node_configs: expected one for each node, got {len(node_configs)} for "
                f"{num_supernodes}"
            )
        self.folder = Path(folder).expanduser().absolute()
        self.superlink_log = self.folder / "server.log"
        self.node_configs = [_as_text(config) for config in node_configs]
        self.supernodes: list[Supernode] = []
        self._extra = dict(environment or {})
        self._say = say or (lambda _: None)
        self.ports: list[int] = []
        self._started: list[Process] = []
        self._claim = contextlib.ExitStack()
        self._host, self._port = host, port
        self._certificates = certificates
        self._submitted = 0

    def __enter__(self) -> Self:
        self._claim.enter_context(claimed(self.folder, "federation"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes that were started, and those that they have started."""
        self._say("# stopping all processes")
        with self._claim:
            processes.stop(*self._started)
            self._started = []
            processes.end_with(MARK, self.folder)  # what has no parent any more

    def _start(self) -> None:
        processes.end_with(MARK, self.folder)  # what a killed federation left
        self._say(f"# certificates and keys: {self.folder}")
        self.certificates = self._certificates or make_certificates(self.folder / "tls")
        self.start_superlink()
        for config in self.node_configs:
            self._start_supernode(config)
        for node in self.supernodes:
            node.node_id = self._node_id(node)

    def add_supernode(self, node_config: Settings) -> Supernode:
        """Start one more node, also while a run is going on, and wait until it is known."""
        node = self._start_supernode(_as_text(node_config))
        node.node_id = self._node_id(node)
        return node

    def _start_supernode(self, config: str) -> Supernode:
        name = f"node-{len(self.supernodes)}"
        key = self.folder / name / "node.key"
        self.register(make_node_key(key))
        command = supernode_command(self.address, config, self.certificates.authority, key)
        what = f"a SuperNode, on a machine of its own ({name})"
        process, _ = self.start(name, command, what)
        self.supernodes.append(Supernode(self.folder / f"{name}.log", process))
        return self.supernodes[-1]

    def register(self, public_key: Path) -> None:
        """Have the SuperLink know a node by its public key; that it does already is no error."""
        try:
            self.flwr("supernode", "register", str(public_key), CONNECTION)
        except RunFailed as error:
            if "already in use" not in str(error):
                raise

    def await_supernodes(self, number: int) -> None:
        """Wait until so many nodes are online, as long as it takes."""
        seen = -1
        while seen < number:
            if self.superlink.poll() is not None:
                raise RunFailed(f"the SuperLink has ended; see {self.superlink_log}")
            nodes = json.loads(self.flwr("supernode", "list", CONNECTION, "--format", "json"))
            online = sum(node["status"] == "online" for node in nodes["nodes"])
            if online != seen:
                self._say(f"# {online} of {number} nodes are there")
            seen = online
            time.sleep(1.0 if seen < number else 0.0)

    @property
    def address(self) -> str:
        """Host and port of the SuperLink, for this machine."""
        return f"{HOST}:{self._port}"

    def environment(self, home: str) -> dict[str, str]:
        """Return the environment of the processes of one machine, `home` its folder's name."""
        flower = processes.flower_environment(self.folder / home / "flwr")
        unproxied = [os.environ.get("NO_PROXY", ""), HOST, "localhost"]
        direct = {"NO_PROXY": ",".join(filter(None, unproxied))}
        return flower | direct | self._extra | {MARK: str(self.folder)}

    def start_superlink(self) -> None:
        """Start the SuperLink; after it was killed, on the same port, with what it knew."""
        tls, home = self.certificates, self.folder / "server"
        command = [
            *(tool("flower-superlink"), "--ssl-ca-certfile", str(tls.authority)),
            *("--ssl-certfile", str(tls.certificate)),
            *("--ssl-keyfile", str(tls.key), "--enable-supernode-auth"),
            *("--database", str(home / "superlink.db"), "--host", self._host, "--port"),
        ]
        what = "the SuperLink, on the server"
        self.superlink, self._port = self.start("server", command, what, self._port)
        connection = {"address": self.address, "root-certificates": str(tls.authority)}
        processes.write_connection(home / "flwr", CONNECTION, **connection)

    def _node_id(self, node: Supernode, patience: float = 120) -> int:
        """Wait until a node is known to the SuperLink, and return its id."""
        deadline = time.monotonic() + patience
        while node.process.poll() is None and time.monotonic() < deadline:
            said = node.log.read_text(encoding="utf-8", errors="replace")
            if match := re.search(r"SuperNode ID: (\d+)", said):
                return int(match[1])
            time.sleep(0.1)
        raise RunFailed(f"the SuperLink did not accept a node; see {node.log}")

    def start(
        self, name: str, command: Sequence[str], what: str = "", port: int | None = None
    ) -> tuple[Process, int]:
        """Start a server, such as a trusted third party; return its process and its port.

        The port, a free one by default, is appended to the command; `name` is of the log and the
        folder, and `what` is shown.
        """
        (self.folder / name).mkdir(exist_ok=True)
        log = self.folder / f"{name}.log"
        process, port = processes.start_on_free_port(
            lambda port: [*command, str(port)], self.environment(name), log, port=port
        )
        self._started.append(process)
        self.ports.append(port)
        self._show(what or name, name, process.args)
        return process, port

    def submit(self, app: str | Path, run_config: Settings = "") -> Submission:
        """Submit the app in a folder, and return at once.

        The run config wins over the settings in the app's ``pyproject.toml``. A string is given to
        ``flwr run`` as it is: settings, or the path of a TOML file.
        """
        self._submitted += 1
        command = [tool("flwr"), "run", str(app), CONNECTION, "--stream"]
        if run_config:
            command += ["--run-config", _as_text(run_config)]
        log = self.folder / f"run-{self._submitted}.log"
        log.unlink(missing_ok=True)
        process = processes.start(command, self.environment("server"), log)
        self._started.append(process)
        self._show("the run", "server", process.args)
        return Submission(self, process, log)

    def run(self, app: str | Path, run_config: Settings = "", on_line: Say | None = None) -> str:
        """Run an app, as :meth:`submit`, and return what its ServerApp said.

        `on_line` is given each line as it comes. It raises RunFailed if the run did not finish.
        """
        submission = self.submit(app, run_config)
        submission.wait(on_line)
        return submission.text

    def flwr(self, *arguments: str) -> str:
        """Run one of Flower's commands, and return what it says."""
        command = [tool("flwr"), *arguments]
        if "--format" not in arguments:  # it only looks
            self._say(f"$ {_as_typed(command)}")
        done = subprocess.run(  # noqa: S603
            command, env=self.environment("server"), capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = processes.last_words(done.stdout + done.stderr)
            raise RunFailed(f"{_as_typed(command)} failed: {said}")
        return done.stdout

    def _show(self, what: str, home: str, command: Any) -> None:
        self._say(f"# {what}; Flower's files are in FLWR_HOME={self.folder / home / 'flwr'}")
        self._say(f"$ {_as_typed(command)}")


def supernode_command(address: str, config: str, authority: Path, key: Path) -> list[str]:
    """Return the command of a SuperNode, which lacks the number of a free port at its end."""
    return [
        *(tool("flower-supernode"), "--superlink", address, "--node-config", config),
        *("--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(key), "--port"),
    ]


def _as_text(settings: Settings) -> str:
    """Return settings as Flower's commands take them: JSON's literals are valid TOML."""
    if isinstance(settings, str):
        return settings
    return " ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in settings.items())


def _as_typed(command: Sequence[str]) -> str:
    """Return a command as one types it, with the bare name of the program."""
    return shlex.join([Path(command[0]).name, *command[1:]])


cli = command_line(
    "fedntk.simulations.deploy.federation",
    "A real federation on this machine: a SuperLink with TLS and SuperNodes with keys.",
)


@cli.command("run")
def run_command(
    app: Annotated[
        Path | None,
        typer.Argument(help="Folder of a Flower app; without one, the federation waits for runs."),
    ] = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes.")] = 3,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KEY=VALUE ...'",
            help="Of one node; once for each. By default partition-id and num-partitions.",
        ),
    ] = None,
    run_config: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="Of the run, or a TOML file.")
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(help="For keys, logs and Flower's files; a temporary one by default."),
    ] = None,
) -> None:
    """Start a federation on this machine, run an app in it, and stop it.

    Each command is printed after a $, so that it can be copied for a deployment over several
    machines. Ctrl-C stops everything.

    [b]Examples[/]

      python -m fedntk.simulations.deploy.federation run my_app --nodes 2

      python -m fedntk.simulations.deploy.federation run my_app --nodes 2
      --node-config 'data-path="a.npz"' --node-config 'data-path="b.npz"'
      --run-config 'num-clients=2 rounds=5'
    """
    if node_config and len(node_config) != nodes:
        raise typer.BadParameter(
            f"expected one for each of {nodes} nodes, got {len(node_config)}",
            param_hint="--node-config",
        )
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedntk-")))
        federation = Federation(place, nodes, node_configs=node_config or None, say=typer.echo)
        stack.enter_context(federation)
        if app is not None:
            federation.run(app, run_config, on_line=typer.echo)
            return
        home = federation.folder / "server" / "flwr"
        typer.echo("# ready. Submit runs from another terminal; Ctrl-C stops everything:")
        typer.echo(f"$ FLWR_HOME={shlex.quote(str(home))} flwr run <app> {CONNECTION} --stream")
        federation.superlink.wait()
        raise RunFailed(f"the SuperLink has ended; see {federation.superlink_log}")


@cli.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="Folder for the files.")],
    *,
    host: Annotated[
        list[str], typer.Option(help="Name or address of the server; may be repeated.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes that get a key pair.")] = 3,
) -> None:
    """Make certificates and keys for a trial over several machines.

    FOLDER gets ca.pem (for all machines), server.pem and server.key (for the server), and for each
    node node-<i>.key (for that machine) and node-<i>.key.pub (to be registered). An organisation
    with a certificate authority of its own uses that one.
    """
    made = make_certificates(folder, host)
    public = [make_node_key(folder / f"node-{i}.key") for i in range(nodes)]
    for path in (made.authority, made.certificate, made.key, *public):
        typer.echo(str(path))


if __name__ == "__main__":
    cli(prog_name="python -m fedntk.simulations.deploy.federation")
