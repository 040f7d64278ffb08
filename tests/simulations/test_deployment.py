"""A deployment that is written from one file: who gets what, what is checked, what is learned."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context

from fedntk.clients import PrivacyLedger
from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.data.data import Data
from fedntk.simulations.deploy import node as node_module
from fedntk.simulations.deploy.certificates import make_certificates
from fedntk.simulations.deploy.deployment import serve, write_deployment
from fedntk.simulations.deploy.federation import MARK
from fedntk.simulations.deploy.node import NodeSettings, check_server, count_rows
from fedntk.simulations.engine.client_app import client_fn, load
from fedntk.simulations.engine.processes import processes_with, tool
from fedntk.simulations.engine.server_app import serve as serve_run

from .outcomes import grid_of, refused
from .test_cli import fedntk

PATIENCE = 600.0  # s, for what takes 40 where nothing else is at work
SITES = ("A", "B", "C")


def patients(n: int = 240, seed: int = 0) -> pd.DataFrame:
    """Rows of three sites of unlike patients, with whole, real and binary columns."""
    rng = np.random.default_rng(seed)
    site = np.arange(n) % 3
    frame = pd.DataFrame({"age": rng.integers(20, 70, n) + 10 * site})
    frame["glucose"] = rng.normal(100, 30, n).round(2)
    frame["smoker"] = (rng.random(n) < 0.3).astype(int)
    risk = frame.age + 0.2 * frame.glucose + rng.normal(0, 10, n)
    frame["outcome"] = np.where(risk > 85, "dead", "alive")
    return frame.assign(site=np.array(SITES)[site])


SCHEMA = """
[age]
kind = "number"
unit = "years"
range = [0, 120]
missing = ["k. A."]
gap = "mean"
indicator = true
[glucose]
kind = "number"
missing = ["k. A."]
gap = 100
[smoker]
kind = "category"
categories = ["no", "yes"]
reference = "no"
[seen]
kind = "date"
format = "%d.%m.%Y"
[outcome]
kind = "target"
categories = ["alive", "dead"]
[site]
kind = "client"
"""


def described_patients(n: int = 240, seed: int = 0) -> pd.DataFrame:
    """The same with what only a schema makes numbers of: gaps, words and dates."""
    frame, rng = patients(n, seed), np.random.default_rng(seed)
    gaps = {name: frame[name].where(rng.random(n) > 0.1) for name in ("age", "glucose")}
    smoker = frame.smoker.map({0: "no", 1: "yes"})
    seen = pd.Series(pd.date_range("2020-01-31", periods=n)).dt.strftime("%d.%m.%Y")
    return frame.assign(**gaps, smoker=smoker, seen=seen)


Table = Callable[..., pd.DataFrame]


def make_config(folder: Path, table: Table, **more: Any) -> Config:
    """One exchange of masked sums, of 8 bits, over the three sites; their order plays no part.

    With auto-ridge it would: by it a client chooses the rows that it holds out.
    """
    (folder / "pool").mkdir()
    table().to_csv(folder / "pool" / "train.csv", index=False)
    table(60, seed=1).to_csv(folder / "pool" / "test.csv", index=False)
    return Config(
        method="one-exchange", dataset=f"csv:{folder}/pool", target="outcome", num_clients=3,
        client_column="site", partition="natural", clients_per_evaluation=0, rounds=1, secure=True,
        one_exchange={"sums": {"bits": 8, "auto_ridge": False, "validation_share": 0.0}}, **more,
    )  # fmt: skip


def make_deployment(config: Config, folder: Path, table: Table) -> Path:
    """Folders whose nodes have their own rows, one of them as a German spreadsheet saves them."""
    frame = table()
    write_deployment(config, folder, ["localhost"])
    for i, site in enumerate(SITES):
        place = folder / f"node-{i}"
        form = {"sep": ";", "decimal": ",", "na_rep": "k. A."} if i == 2 else {}
        frame[frame.site == site].to_csv(place / "mine.csv", index=False, **form)
        PrivacyLedger.create(place / "mine.ledger")
    change(folder / "node-2", separator="semicolon", decimal="comma")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, patients)


@pytest.fixture
def deployment(config: Config, tmp_path: Path) -> Path:
    return make_deployment(config, tmp_path / 'of "our" clinic', patients)


def change(node: Path, **settings: Any) -> None:
    """Change lines of a node's settings, as its owner does."""
    text = (node / "mine.toml").read_text()
    for name, value in settings.items():
        key = name.replace("_", "-")
        (line,) = (line for line in text.splitlines() if line.startswith(f"{key} = "))
        text = text.replace(line, f"{key} = {json.dumps(value)}")
    (node / "mine.toml").write_text(text)


def scores(folder: Path, table: Table = patients) -> bytes:
    """What a run's model says of the test set, in bits."""
    rows = table(60, seed=1).drop(columns=["outcome", "site"])
    return load_predictor(folder).predict(rows).numpy().tobytes()


def test_each_side_gets_its_files_and_no_others(config, deployment):
    """All files are their owner's; no node has a key of another side, or a row of the run's."""
    files = {path for path in deployment.rglob("*") if path.is_file()}
    ours = {path for path in files if path.suffix not in (".csv", ".ledger", ".lock")}
    assert {*write_deployment(config, deployment, ["localhost"], again=True)} == ours
    assert {path.stat().st_mode & 0o777 for path in ours} == {0o600}
    folders = {path for path in (deployment, *deployment.rglob("*")) if path.is_dir()}
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    names = {path.name for path in ours if path.parent.name == "node-1"}
    assert names == {"ca.pem", "node.key", "inputs.json", "run.toml", "mine.toml", "README.md"}
    texts = {path: path.read_text() for path in ours}
    keys = [text for text in texts.values() if "PRIVATE KEY" in text]
    assert len(keys) == len({*keys}) == 4  # the server's, and one for each node
    told = "".join(text for path, text in texts.items() if path.parent.name.startswith("node-"))
    rows = patients().drop(columns="site").astype(str).agg(",".join, axis=1)
    assert [row for row in rows if row in told] == []


def test_keys_in_use_are_not_replaced_unless_that_is_asked_for(config, deployment):
    keys = [deployment / "server" / "server.key", deployment / "node-2" / "node.key"]
    before = [key.read_bytes() for key in keys]
    keys[0].unlink()
    refused("node-0/node.key exists and is not replaced", write_deployment,
            config, deployment, ["localhost"])  # fmt: skip
    assert not keys[0].exists()
    write_deployment(config.replace(num_clients=3), deployment, ["localhost"], again=True)
    assert all(key.read_bytes() != old for key, old in zip(keys, before, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "w.safetensors"}, "weights = .*: nodes lack this file"),
        ({"method": "fedavg", "secure": False, "projection": 2}, "projection: the keys come from"),
        ({"method": "fedavg", "secure": False, "private_test": True}, "private-test are for sim"),
        ({"secure": False}, None),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_a_file_is_written(
    config, tmp_path, settings, message
):
    new, host = tmp_path / "new", "localhost" if message else "https://fl.example.org"
    message = message or "server: expected host and port, .* got 'https"
    refused(message, write_deployment, config.replace(**settings), new, [host])
    assert not new.exists()


def test_a_nodes_settings_are_read_as_they_were_written(deployment):
    """With what each means; the path of its rows and of its ledger are beside its file."""
    node = deployment / "node-2"
    settings = NodeSettings.read(node / "mine.toml")
    (node / "again.toml").write_text(settings.as_toml())
    assert NodeSettings.read(node / "again.toml") == settings
    assert settings.node_config(node) == {
        "partition-id": 2, "check-ranges": True, "methods": "one-exchange", "target": "outcome",
        "client-column": "site", "separator": "semicolon", "decimal": "comma", "encoding": "utf-8",
        "inputs": str(node), "data-path": f"{node}/mine.csv", "rows-path": f"{node}/mine.rows",
        "privacy-ledger": f"{node}/mine.ledger",
    }  # fmt: skip
    change(node, fewest_clients=9, epsilon=2.0, only_masked=False, data_path="/srv/rows.parquet")
    changed = NodeSettings.read(node / "mine.toml").node_config(node)
    assert changed["data-path"] == "/srv/rows.parquet"
    limits = {key: value for key, value in changed.items() if key.startswith("privacy-")}
    assert limits == {
        "privacy-ledger": f"{node}/mine.ledger", "privacy-fewest-clients": 9,
        "privacy-epsilon": 2.0, "privacy-only-masked": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server = 'a:1'\nmethod = 'fedavg'", "unknown key 'method'; did you mean 'methods'"),
        ("server = 'a:1'\n[privacy]\nledgr = 'a'", "privacy: expected a table with ledger"),
        ("server = 'a:1'\n[privacy]", "privacy: expected a table with ledger"),
        ("server = 'a:1'\n[privacy]\nledger = 'a'\nepsilon = -1.0", "epsilon: expected more than"),
        ("server = 'a:1'\n[privacy]\nledger = 'a'\nepsilo = 1.0", "did you mean 'privacy.epsilon"),
        ("server = 'a:1'\nseparator = ';'", "separator: expected one of"),
        ("server = 'a:1'\ndecimal = 'comma'", "expected another separator"),
        ("server = 'fl.example.org'", "expected host and port, such as fl.example.org:8000"),
        ("server = ", "cannot be read"),
    ],
)
def test_settings_of_a_node_that_cannot_be_meant_are_refused(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    refused(f"{tmp_path}/mine.toml.*{message}", NodeSettings.read, tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda node: (node / "node.key").unlink(), "node.key is missing"),
        (lambda node: (node / "mine.csv").unlink(), "no file or folder at .*mine.csv"),
        (lambda node: (node / "mine.ledger").unlink(), "privacy-ledger --new"),
        (lambda node: (node / "mine.ledger").write_text("{"), "damaged"),
        (lambda node: change(node, target="died"), "target: the set has the columns .* 'died'"),
        (lambda node: change(node, separator="tab"), "set separator = comma"),
        (lambda node: change(node, methods="fedavg"), "this node answers fedavg, and the run's is"),
        (lambda node: change(node, server="localhost:1"), "nobody answers at localhost:1 "),
        (lambda node: change(node, server="localhost:70000"), "nobody answers at localhost:70000 "),
    ],
)
def test_a_node_is_checked_before_it_starts(deployment, spoil, message, monkeypatch, caplog):
    """All but the address in any case; nothing is started, and the log says what is private."""
    node = deployment / "node-0"
    change(node, server="localhost:1")
    monkeypatch.setattr(node_module.processes, "start_on_free_port", None)
    spoil(node)
    caplog.set_level("INFO", "flwr")
    said = fedntk("node", node / "mine.toml", fails=2)
    assert pd.Series([said + caplog.text]).str.contains(message).all()


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[int]:
    """A server on loopback with a certificate for localhost; its port."""
    made = make_certificates(tmp_path / "tls", ["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:  # closed
                    return
                with connection, contextlib.suppress(OSError):  # a client that does not trust it
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_only_the_server_with_the_certificate_is_the_server(tmp_path, tls_server):
    check_server(f"localhost:{tls_server}", tmp_path / "tls" / "ca.pem")
    for_name = "does not show a certificate for 127.0.0.1 by ca.pem"
    refused(for_name, check_server, f"127.0.0.1:{tls_server}", tmp_path / "tls" / "ca.pem")
    other = make_certificates(tmp_path / "other", ["localhost"]).authority
    refused("for localhost by ca.pem", check_server, f"localhost:{tls_server}", other)


def context_of(node: Path, config: Config) -> Context:
    """The context of a node's clients in a run."""
    context = grid_of(config).contexts[1]
    context.node_config = NodeSettings.read(node / "mine.toml").node_config(node)
    return context


def test_nodes_without_the_runs_data_set_learn_the_bits_of_the_simulation(
    config, deployment, tmp_path
):
    """Each node has its rows, and of the others' what inputs.json holds: moments and names."""
    expected = run(config, out=tmp_path / "simulated", progress=False)
    served = Config.load(deployment / "server" / "config.toml", out=str(tmp_path / "deployed"))
    of = grid_of(served.replace(dataset="csv:nowhere.csv"))
    for i, context in enumerate(of.contexts.values()):
        node = deployment / f"node-{i}"
        context.node_config = NodeSettings.read(node / "mine.toml").node_config(node)
    serve_run(of, served)
    assert scores(tmp_path / "deployed") == scores(expected.folder)
    ledgers = [PrivacyLedger(deployment / f"node-{i}/mine.ledger") for i in range(3)]
    assert [len(ledger.releases()) for ledger in ledgers] == [1, 1, 1]
    assert not (tmp_path / "deployed" / "cache").exists()


def test_only_rows_that_a_nodes_owner_counted_are_in_the_model(config, deployment, tmp_path):
    """To the bit, whatever else is in its file; the folder is the node's, and is used anew."""
    changing = config.replace(secure=False, max_examples=240, **{"one-exchange.changes": True})
    frame, folder = patients(), tmp_path / "deployed"
    write_deployment(changing, folder, ["localhost"])
    node, rows = folder / "node-1", [f"{tmp_path}/rows-{i}" for i in range(3)]

    def learn(number: int, dropped: int, later: int) -> bytes:
        of_site = {site: frame[frame.site == site] for site in SITES}
        for i, site in enumerate(SITES):
            of_site[site].to_csv(folder / f"node-{i}" / "mine.csv", index=False)
            change(folder / f"node-{i}", rows_path=f"{rows[number]}-{i}")
        of_site["B"].iloc[dropped:].to_csv(node / "mine.csv", index=False)
        assert count_rows(node / "mine.toml") == 80 - dropped
        of_site["B"].iloc[later:].to_csv(node / "mine.csv", index=False)
        of = grid_of(changing)
        for i, context in enumerate(of.contexts.values()):
            at = folder / f"node-{i}"
            context.node_config = NodeSettings.read(at / "mine.toml").node_config(at)
        served = Config.load(folder / "server" / "config.toml", out=str(tmp_path / f"run-{number}"))
        serve_run(of, served)
        return scores(tmp_path / f"run-{number}")

    few, few_of_more, every = learn(0, 7, 7), learn(1, 7, 0), learn(2, 0, 0)
    assert few == few_of_more != every
    assert sorted(path.name for path in tmp_path.glob("rows-?-1")) == [
        "rows-0-1",
        "rows-1-1",
        "rows-2-1",
    ]
    refused(
        "rows count for good, as the run lacks", count_rows, deployment / "node-0" / "mine.toml"
    )
    other = config.replace(secure=False, max_examples=240)
    refused("rows-path goes with data-path", client_fn, without_data(node, other))


def test_rows_that_were_counted_without_a_rows_path_go_on_counting(config, deployment):
    """Else rows that were deleted there would count again, in a new folder."""
    changing = config.replace(secure=False, max_examples=240, **{"one-exchange.changes": True})
    node = deployment / "node-0"
    context, before = context_of(node, changing), context_of(node, changing)
    assert client_fn(context).rows.folder == node / "mine.rows"
    del before.node_config["rows-path"]
    client = client_fn(before)
    client.rows.replace(*(part[:9] for part in client.raw_examples()))
    assert len(client_fn(context).rows) == 9
    client.rows.folder.rename(node / "mine.rows")
    assert client_fn(context).rows.folder == node / "mine.rows"


def without_data(node: Path, config: Config) -> Context:
    context = context_of(node, config)
    for key in ("data-path", "inputs"):
        del context.node_config[key]
    return context


def test_a_node_answers_the_methods_that_its_owner_allows(config, deployment):
    other = config.replace(method="fedavg", secure=False, max_examples=240)
    refused("this node answers one-exchange, and the run's is fedavg",
            load, context_of(deployment / "node-0", other))  # fmt: skip
    change(deployment / "node-0", methods="one-exchange, fedavg")
    assert load(context_of(deployment / "node-0", other)).data.num_train == 240


def test_a_node_that_knows_no_row_of_the_run_checks_as_much(config, deployment):
    """Ranges of columns by the moments; a run that does not say how many rows a node may have."""
    node = deployment / "node-0"
    served = config.replace(max_examples=240)
    frame = pd.read_csv(node / "mine.csv")
    frame.assign(glucose=frame.glucose / 18).to_csv(node / "mine.csv", index=False)
    refused("this node's log says why", client_fn, context_of(node, served))
    refused("max-examples: expected the most", client_fn, context_of(node, config))
    context = context_of(node, served)
    del context.node_config["data-path"]
    refused("inputs goes with data-path", load, context)
    refused("no inputs.json in .*fedntk deploy", load_inputs_of_nothing, node, served)


def load_inputs_of_nothing(node: Path, served: Config) -> Data:
    (node / "inputs.json").unlink()
    return load(context_of(node, served)).data


def test_a_server_without_its_files_or_its_port_is_refused(deployment, tmp_path):
    refused("expected the server's folder", serve, tmp_path, say=print)
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104
        port = taken.getsockname()[1]
        refused(f"port {port}: .*in use", serve, deployment / "server", port=port, say=print)


@pytest.mark.federation
def test_three_nodes_with_tables_of_their_own_learn_the_bits_of_the_simulation(tmp_path):
    """Over TLS, by the commands of each README, with masked sums; Ctrl-C leaves no process.

    A schema says what their words, dates and gaps mean, and moments come from sums over rows; no
    node has their files.
    """
    (tmp_path / "schema.toml").write_text(SCHEMA)
    config = make_config(tmp_path, described_patients, schema=f"{tmp_path}/schema.toml")
    first = config.replace(method="glm", model="linear")
    pooled = run(first, out=tmp_path / "first", progress=False).folder / "details"
    config = config.replace(moments=str(pooled))
    deployment = make_deployment(config, tmp_path / 'of "our" clinic', described_patients)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    places = [deployment / f"node-{i}" for i in range(3)]
    started = []
    log = (tmp_path / "said.log").open("wb")

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [tool("fedntk"), *arguments]
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where tests ignore it
        options: Any = {"env": environment, "stdout": log, "stderr": log, "preexec_fn": heed}
        started.append(subprocess.Popen(command, start_new_session=True, **options))  # noqa: S603
        return started[-1]

    try:
        server = start("serve", str(deployment / "server"), "--port", str(port))
        server_log = deployment / "server" / "server.log"
        while not server_log.exists() or "Uvicorn" not in server_log.read_text():
            assert server.poll() is None
            time.sleep(0.1)
        for place in places:
            change(place, server=f"localhost:{port}")
            start("node", str(place / "mine.toml"))
        assert server.wait(PATIENCE) == 0, (tmp_path / "said.log").read_text()
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        ended = [process.wait(60) for process in started]
        log.close()
    assert ended == [0, 130, 130, 130]
    for place in (deployment / "server", *places):
        assert processes_with(MARK, place) == []
    simulated = run(config, out=tmp_path / "simulated", progress=False)
    results = deployment / "server" / "results"
    of = partial(scores, table=described_patients)
    assert of(results) == of(simulated.folder)
    said: list[str] = []
    assert serve(deployment / "server", say=said.append) == results
    assert "finished before" in said[0]
    for place in places:
        (release,) = PrivacyLedger(place / "mine.ledger").releases()
        assert release.spent
        assert "mine.csv: rows 80, columns 5, classes alive" in (place / "node.log").read_text()
    assert "mine.csv" not in (deployment / "server" / "run-1.log").read_text()
