"""A deployment from one configuration: a folder for the server, and one for each node."""

import contextlib
import shlex
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import tomli_w

from fedntk import __version__
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.support.files import owner_only

from ..config.config import nest
from ..config.data import TABLE
from ..config.settings import ConfigError
from ..configuration import Config
from ..data.schema import columns_of
from ..engine.building import load_setup, make_strategy
from ..engine.flwr_run import APP
from ..errors import naming
from ..methods.method import Setup
from ..report.results import run_state
from .certificates import Certificates, make_certificates, make_node_key
from .federation import HOST, Federation
from .node import AUTHORITY, KEY, RUN, NodeSettings, PrivacySettings

CONFIG, NODES, SETTINGS = "config.toml", "nodes", "mine.toml"
PORT, EVERYWHERE = 8000, "0.0.0.0"  # noqa: S104 - nodes are elsewhere


def write_deployment(
    config: Config, folder: Path, hosts: Sequence[str], *, port: int = PORT, again: bool = False
) -> list[Path]:
    """Write a folder for the server and one for each node; return the files, all of mode 0600.

    Nodes get what the run knows of examples, such as means of columns and names of classes, and no
    row of its data set. ConfigError if the configuration cannot be deployed, or if there are keys
    that are not to be replaced.

    Parameters
    ----------
    config : Config
        Settings of the run; its data set is a table like those of the nodes.
    folder : path
        Folder that gets ``server``, ``node-0``, ``node-1``, ...
    hosts : sequence of str
        Names and addresses of the server; nodes use the first one.
    port : int
        Port of the server.
    again : bool
        Whether to replace the keys and all else that is there.
    """
    _require_deployable(config)
    setup = load_setup(config)
    make_strategy(setup)
    places = [folder / f"node-{i}" for i in range(config.num_clients)]
    server, keys = folder / "server", [folder / "server" / "server.key", *(p / KEY for p in places)]
    if used := [str(key) for key in keys if key.exists()]:
        if not again:
            raise ConfigError(
                f"{used[0]} exists and is not replaced, as nodes may use it; choose another "
                "folder, or replace all keys with again=True (on the command line --again)"
            )
        shutil.rmtree(server / NODES, ignore_errors=True)
    schema, target = setup.data.inputs.schema, config.target
    if schema is not None:
        target, _ = columns_of(schema, target, "")
    run = config.replace(
        max_examples=setup.max_examples, out=config.out or "results", target=target
    )
    files: dict[Path, str] = {
        server / CONFIG: tomli_w.dumps(nest(run.values())),
        server / "README.md": _server_page(run, hosts[0], port),
    }
    for i, place in enumerate(places):
        files |= {
            place / RUN: tomli_w.dumps(run.run_config()),
            place / SETTINGS: _node_settings(run, f"{hosts[0]}:{port}", i).as_toml(),
            place / "README.md": _node_page(run, setup, i),
        }
    with owner_only():
        with naming("host", ValueError):
            tls = make_certificates(server, [*dict.fromkeys([*hosts, "localhost", HOST])])
        written = [tls.authority, tls.certificate, tls.key]
        (server / NODES).mkdir(exist_ok=True)
        for place in places:
            public = make_node_key(place / KEY)
            registered = server / NODES / f"{place.name}.pub"
            public.replace(registered)
            shutil.copyfile(tls.authority, place / AUTHORITY)
            setup.data.inputs.save(place)
            written += [registered, place / KEY, place / AUTHORITY, place / InputTransform.FILE]
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    for path in (*written, *files):  # those that were there may have other modes
        path.chmod(0o600)
    return [*written, *files]


def serve(folder: Path, *, port: int = PORT, say: Callable[[str], None]) -> Path:
    """Start the SuperLink of a server's folder, wait for its nodes, run, and stop it.

    Return the folder of the results. An interrupted run goes on from its newest checkpoint.
    """
    folder = folder.absolute()
    tls = Certificates(*(folder / name for name in (AUTHORITY, "server.pem", "server.key")))
    nodes = sorted((folder / NODES).glob("*.pub"))
    if not nodes or not tls.key.is_file():
        raise ConfigError(f"{folder}: expected the server's folder of fedntk deploy")
    config = Config.load(folder / CONFIG)
    config = config.replace(out=str(folder / config.out))
    if run_state(config) == "finished":
        say(f"finished before; for another run, set out in {folder / CONFIG}")
        return config.folder
    with naming(f"port {port}", OSError), socket.create_server((EVERYWHERE, port)):
        pass  # it is free
    with owner_only(), contextlib.ExitStack() as stack:
        federation = Federation(folder, 0, host=EVERYWHERE, port=port, certificates=tls, say=say)
        stack.enter_context(federation)
        settings = federation.folder / "server" / RUN
        settings.write_text(tomli_w.dumps(config.run_config()), encoding="utf-8")
        for key in nodes:
            federation.register(key)
        federation.await_supernodes(config.num_clients)
        federation.run(APP, str(settings), on_line=say)
    return config.folder


def _require_deployable(config: Config) -> None:
    """Refuse what nodes with examples of their own lack, or would refuse."""
    for key in ("method", "model", "weights", "pretrained_weights"):
        value = str(getattr(config, key))
        if ".py:" in value or ("weights" in key and value):
            raise ConfigError(
                f"{config.key(key)} = {value}: nodes lack this file; name <module>:<function> of "
                "a package that all sides install, or leave it out"
            )
    if seeded := config.chosen_method.seeded_protection(config):
        raise ConfigError(
            f"{', '.join(seeded)}: the keys come from the seed, so they protect nothing; write a "
            "client with keys of its own"
        )
    if config.validation_clients or config.liars or config.private_test:
        raise ConfigError(
            "validation-clients, liars and private-test are for simulations: they need parts of "
            "the run's data set, and nodes have rows of their own; leave them out"
        )


def _node_settings(config: Config, server: str, partition: int) -> NodeSettings:
    masked = config.secure is not None
    limits = PrivacySettings(only_masked=masked) if masked or config.mechanism else None
    return NodeSettings(
        server=server,
        partition_id=partition,
        methods=config.method,
        privacy=limits,
        **{name: getattr(config, name) for name in TABLE},
    )


def _node_page(config: Config, setup: Setup, number: int) -> str:
    inputs = setup.data.inputs
    columns = dict(zip(inputs.columns, inputs.kinds, strict=True))
    if (schema := inputs.schema) is not None:
        columns = {n: c.describe() for n, c in schema.columns.items() if c.outputs(n)}
    rows = ["| column | holds |", "|---|---|"]
    rows += [f"| `{name}` | {holds} |" for name, holds in columns.items()]
    rows += ["| any other name, of one column | texts |"] * (not inputs.shape)
    rows += [f"| `{config.target}` | {', '.join(map(str, inputs.classes))} |"]
    ledger = "fedntk privacy-ledger --new mine.ledger   # once\n"
    ledger *= bool(config.secure is not None or config.mechanism)
    return f"""# Node {number}

Only you should be able to read this folder: `{KEY}` is how the server knows you. Install
fedntk {__version__} with the extra `simulation`. Put your rows here as `mine.csv`, or say in
`{SETTINGS}` where and how they are written; your limits are there too. Then, in this folder:

```sh
{ledger}fedntk node {SETTINGS}
```

It checks your rows and the server's address before it starts, and Ctrl-C ends it. What it read
stays in its log. The run's method is {config.method}, its settings are in `{RUN}`.

{chr(10).join(rows)}
"""


def _server_page(config: Config, host: str, port: int) -> str:
    more = f" --port {port}" * (port != PORT)
    return f"""# The server

Give each `node-<i>` folder to its owner over a way that nobody else reads, and keep this one.
Install fedntk {__version__} with the extra `simulation`, and let nodes reach port {port} of
{host}. Then, in this folder:

```sh
fedntk serve .{more}
```

It waits for {config.num_clients} nodes, runs `{CONFIG}`, and stops; results are in `{config.out}`.
After an interruption give the same command again. It reads {shlex.quote(config.dataset)} here.
"""
