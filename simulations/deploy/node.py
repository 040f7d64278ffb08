"""One node of a deployment: its settings, what is checked before it starts, and its process."""

import contextlib
import json
import math
import socket
import ssl
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import tomli_w
from flwr.app import Context, RecordDict

from fedntk.clients import PrivacyLedger, PrivacyLimits
from fedntk.ntk.options import part
from fedntk.ntk.predictors.inputs import InputTransform
from fedntk.ntk.support.files import claimed, owner_only

from ..config.data import TABLE, DatasetSettings
from ..config.settings import ConfigError, Settings, Value, key_of, nearest, setting
from ..engine import processes
from ..engine.client_app import INPUTS, ROWS, client_fn
from ..errors import RunFailed, first_line, naming
from .federation import MARK, supernode_command

AUTHORITY, KEY, RUN = "ca.pem", "node.key", "run.toml"  # beside a node's settings
NEEDED = (AUTHORITY, KEY, RUN, InputTransform.FILE)
TIMEOUT = 10.0  # seconds for the server's answer
NOT_TAKEN, PAUSE = "Failed to activate SuperNode", 2.0  # words of Flower's; seconds until again
_TABLE, _LIMITS = DatasetSettings.options(), PrivacyLimits.options()


class PrivacySettings(Settings, frozen=True, eq=True):
    """What the owner of a node's examples allows, whatever a run says."""

    table = "privacy"

    ledger: str = setting(
        "mine.ledger",
        "file that remembers what your rows gave: fedntk privacy-ledger --new makes it",
    )
    epsilon: float = _LIMITS["epsilon"].field()
    delta: float = _LIMITS["delta"].field()
    fewest_clients: int = _LIMITS["fewest_clients"].field()
    least_colluding: int = _LIMITS["least_colluding"].field()
    most_radius: int = _LIMITS["most_radius"].field()
    malicious: int = _LIMITS["malicious"].field()
    most_bits: int = _LIMITS["most_bits"].field()
    only_masked: bool = setting(
        True, "only masked sums leave; false: a trusted server may get exact sums and add the noise"
    )
    allow_repeats: bool = setting(
        False, "further exact sums of the same rows: two of them tell what one node sent"
    )


class NodeSettings(Settings, frozen=True, eq=True):
    """What one node of a deployment has, and what its owner allows."""

    server: str = setting("", "host and port of the server")
    data_path: str = setting(
        "mine.csv",
        "your rows: a csv, parquet or npz file, or a folder with one, or with train and test",
    )
    partition_id: int = setting(0, "the client's number, the same for good", at_least=0)
    target: str = _TABLE["target"].field()
    client_column: str = setting("", "column that is left out, as all rows are this client's")
    separator: str = _TABLE["separator"].field()
    decimal: str = _TABLE["decimal"].field()
    encoding: str = _TABLE["encoding"].field()
    check_ranges: bool = setting(True, "refuse columns of another unit or kind than the run's")
    rows_path: str = setting(
        "mine.rows",
        "folder that remembers which of your rows count, if a run lets you delete some; as safe as "
        "the rows, and the same for good",
    )
    methods: str = setting("", "methods that are answered, with commas; empty: all")
    privacy: PrivacySettings | None = part(
        "your limits; without them the node gives no sums that are masked or have noise",
        default=None,
    )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a node's TOML file; paths in it are relative to its folder."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {first_line(error)}") from error
        tables: dict[str, dict[str, Any]] = {"": {}, PrivacySettings.table: {}}
        limits = content.pop(PrivacySettings.table, None)
        with naming(str(path)):
            if limits is not None and (not isinstance(limits, dict) or not limits.get("ledger")):
                raise ConfigError("privacy: expected a table with ledger, the file of your ledger")
            flat = content | {f"privacy.{key}": value for key, value in (limits or {}).items()}
            places = cls.places()
            for key, value in flat.items():
                if key_of(key) not in places:
                    raise ConfigError(f"unknown key {key!r}{nearest(key, places)}")
                table, name = places[key_of(key)]
                tables[table][name] = value
            return cls.from_tables(tables)

    def check(self) -> None:
        """Refuse a server without a port, and a table that cannot be read."""
        host, _, port = self.server.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            raise ConfigError(
                f"server: expected host and port, such as fl.example.org:8000, got {self.server!r}"
            )
        DatasetSettings(**{name: getattr(self, name) for name in TABLE})

    def node_config(self, folder: Path) -> dict[str, Value]:
        """Return what the node's clients find in ``context.node_config``."""
        names = ("partition_id", "check_ranges", "methods", *TABLE)
        config: dict[str, Value] = {key_of(name): getattr(self, name) for name in names}
        config |= {
            INPUTS: str(folder),
            "data-path": str(folder / Path(self.data_path).expanduser()),
            ROWS: str(folder / Path(self.rows_path).expanduser()),
        }
        if self.privacy is not None:
            defaults = PrivacySettings().values()
            limits = {k: v for k, v in self.privacy.values().items() if v != defaults[k]}
            limits["privacy.ledger"] = str(folder / Path(self.privacy.ledger).expanduser())
            config |= {key.replace(".", "-"): value for key, value in limits.items()}
        return config

    def as_toml(self) -> str:
        """Return the settings as a TOML file with what each means."""
        lines = _as_lines(self)
        if self.privacy is not None:
            lines += ["", f"[{self.privacy.table}]", *_as_lines(self.privacy)]
        return "\n".join(lines) + "\n"


def _as_lines(settings: Settings) -> list[str]:
    lines = []
    for name, option in settings.options().items():
        value = getattr(settings, name)
        literal = "inf" if value == math.inf else json.dumps(value, ensure_ascii=False)
        lines += [f"# {option.meaning}", f"{key_of(name)} = {literal}"]
    return lines


def check_node(path: Path) -> NodeSettings:
    """Check the files and the examples of a node, by its TOML file, and return its settings.

    The client is made as a run will make it, by the run's settings and the owner's limits.
    ConfigError says what does not fit; figures of examples are only logged.
    """
    settings, folder = NodeSettings.read(path), path.absolute().parent
    if lacking := ", ".join(name for name in NEEDED if not (folder / name).is_file()):
        raise ConfigError(f"{folder}: expected the files of fedntk deploy, {lacking} is missing")
    _client(settings, folder)
    if settings.privacy is not None:
        with naming("privacy.ledger", ValueError, FileNotFoundError):
            PrivacyLedger(folder / Path(settings.privacy.ledger).expanduser()).releases()
    return settings


def count_rows(path: Path) -> int:
    """Have exactly the rows of a node's file count, by its TOML file, and return how many.

    The next round of a run takes those that left the file out of the model, and adds new ones.
    ConfigError if its run has no changes.
    """
    client = _client(check_node(path), path.absolute().parent)
    if (rows := getattr(client, "rows", None)) is None:
        raise ConfigError(f"{path}: rows count for good, as the run lacks the setting changes")
    rows.replace(*client.raw_examples())
    return len(rows)


def _client(settings: NodeSettings, folder: Path) -> Any:
    run_config = tomllib.loads((folder / RUN).read_text(encoding="utf-8"))
    return client_fn(Context(0, 0, dict(settings.node_config(folder)), RecordDict(), run_config))


def run_node(path: Path, say: Callable[[str], None]) -> None:
    """Check a node and its server, and have its SuperNode answer runs until it is interrupted.

    All processes that it started end with it. A server that does not take the node, or has yet to
    register its key, is asked again. RunFailed if the SuperNode ends by itself for another reason.
    """
    settings, folder = check_node(path), path.absolute().parent
    authority, log = folder / AUTHORITY, folder / "node.log"
    check_server(settings.server, authority)
    told = folder / "flwr" / "node-config.toml"  # text would need quotes in paths
    command = supernode_command(settings.server, str(told), authority, folder / KEY)
    environment = processes.flower_environment(folder / "flwr") | {MARK: str(folder)}
    with owner_only(), claimed(folder, "node"), contextlib.ExitStack() as stack:
        processes.end_with(MARK, folder)  # what a killed one left
        stack.callback(processes.end_with, MARK, folder)
        log.unlink(missing_ok=True)
        told.parent.mkdir(exist_ok=True)
        told.write_text(tomli_w.dumps(settings.node_config(folder)), encoding="utf-8")
        say(f"it answers runs of {settings.server} until Ctrl-C; its log is {log}")
        while True:
            node, _ = processes.start_on_free_port(
                lambda port: [*command, str(port)], environment, log
            )
            try:
                node.wait()
            finally:
                processes.stop(node)
            text = log.read_text(encoding="utf-8", errors="replace")
            if NOT_TAKEN not in text:
                break
            say(f"{settings.server} does not know this node's key yet; it is asked again")
            log.unlink(missing_ok=True)
            time.sleep(PAUSE)
    raise RunFailed(f"the SuperNode has ended ({processes.last_words(text)}); see {log}")


def check_server(server: str, authority: Path) -> None:
    """Refuse a server that does not answer, or not with a certificate of the authority."""
    host, _, port = server.rpartition(":")
    try:
        trusted = ssl.create_default_context(cafile=authority)
        with (
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT) as connection,
            trusted.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            pass
    except ssl.SSLError as error:
        raise ConfigError(
            f"server: {server} answers, but does not show a certificate for {host} by "
            f"{authority.name} ({error.reason or error}); ask who wrote this folder for a new one"
        ) from error
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"server: nobody answers at {server} ({first_line(error)}); start it first, with "
            "fedntk serve, and have your firewall let this machine out to it"
        ) from error
