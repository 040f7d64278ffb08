"""A real federation on loopback: the same bits as the local engine, whatever is killed in it.

One federation runs several methods at a time, and then has its server killed. Another one, beside
it, has its nodes killed, which Flower takes a minute each to notice.
"""

import contextlib
import importlib.metadata
import json
import os
import secrets
import signal
import socket
import sys
import sysconfig
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cryptography import x509
from typer.testing import CliRunner

from fedntk.simulations import Config, RunFailed, load_model, run
from fedntk.simulations.deploy.certificates import make_node_key
from fedntk.simulations.deploy.federation import MARK, Federation, cli
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.engine.processes import processes_with, start, tool
from fedntk.trust import KeyServer, ShufflingServer, load_key, new_key, public_bytes, save_key
from fedntk.trust.key_server import load_secret, new_secret
from fedntk.trust.sealing import write_secret

from ..conftest import ROOT, output_of
from ..strategies.federation import bits

pytestmark = pytest.mark.federation
APP = Path(__file__).parent / "hospital_app"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
QUICK = ONE_THREAD | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
PATIENCE = 300.0  # s, for what takes seconds where nothing else is at work
UV = [sys.executable, "-m", "uv"]
ROUNDS = {"tct": 4, "cp-ntk-fl": 1, "secure-fedavg": 1}


@pytest.fixture(scope="module")
def hospitals() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(APP)
        import hospitals

        yield hospitals


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("federation")


@pytest.fixture(scope="module")
def node_configs(folder: Path, hospitals: Any) -> list[dict[str, Any]]:
    """Two nodes with a partition-id, and a third that has a file instead."""
    x, y = hospitals.examples(2)
    np.savez(folder / "hospital-2.npz", x=x.numpy(), y=y.numpy())
    own = [{"partition-id": 0}, {"partition-id": 1}, {"data-path": str(folder / "hospital-2.npz")}]
    for i, config in enumerate(own):
        save_key(new_key(), folder / f"{i}.pem")
        config |= {"hospital": i, "key": str(folder / f"{i}.pem")}
    return own


def wait_for(happened: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"{what} has not happened"
        time.sleep(0.1)


def stopped_at(out: Path, point: str) -> int:
    """Wait until a process of the app has stopped at a point, and return its id."""
    wait_for((out / point).exists, point)
    return int((out / point).read_text(encoding="utf-8"))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _has_ended(pid), f"the end of {pid}")


def _has_ended(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def settings(out: Path, method: str, **others: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    own = {key.replace("_", "-"): value for key, value in others.items()}
    return {"method": method, "rounds": ROUNDS.get(method, 1), "out": str(out), **own}


def learned(out: Path) -> dict[str, bytes]:
    with np.load(out / "learned.npz") as file:
        return bits(dict(file))


def locally(
    hospitals: Any, folder: Path, node_configs: list[dict[str, Any]], **config: Any
) -> dict[str, bytes]:
    """What the local engine learns from the same examples, all of them with a partition-id."""
    defaults = {"nodes": 3, "evaluate": False, "checkpoint": "", "stop-at": "", "fail-at": ""}
    grid = LocalGrid(hospitals.client, 3, defaults | config)
    for i, (context, own) in enumerate(zip(grid.contexts.values(), node_configs, strict=True)):
        named = {key: value for key, value in own.items() if key != "data-path"}
        context.node_config = {"partition-id": i} | named
    parties: list[Any] = []
    if config["method"] == "cp-ntk-fl":
        master, signing = load_secret(folder / "key-server.secret")
        enrolled = [public_bytes(load_key(folder / f"{i}.pem")) for i in range(3)]
        shuffling = ShufflingServer(enrolled, load_key(folder / "shuffling.pem"))
        parties = [KeyServer(master, enrolled, signing), shuffling]
    strategy = hospitals.strategy_of(config["method"], *parties)
    result = hospitals.learn(grid, strategy, defaults | config)
    return bits(result)


@pytest.fixture(scope="module")
def without_nodes(folder: Path, node_configs: Any) -> Iterator[Future[Federation]]:
    """Runs, beside the other tests, a federation two of whose nodes are killed in one round."""
    out, points = folder / "killed", "train:2,query:1"

    def run() -> Federation:
        config = settings(out, "ntk-fl", rounds=1, stop_at=points)
        with Federation(folder / "b", node_configs=node_configs, environment=QUICK) as federation:
            submission = federation.submit(APP, config)
            for point in points.split(","):
                stopped_at(out, point)
                kill(federation.supernodes[int(point[-1])].process.pid)
            submission.wait()
        return federation

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run)


@pytest.fixture(scope="module")
def federation(folder: Path, node_configs: Any, without_nodes: Any) -> Iterator[Federation]:
    """Three nodes, and at the end neither a process nor a port that is taken."""
    with Federation(folder / "a", node_configs=node_configs, environment=QUICK) as made:
        yield made
    assert_nothing_left(made)


@pytest.fixture(scope="module")
def third_parties(federation: Federation, folder: Path) -> dict[str, Any]:
    """A key server and a shuffling server behind TLS; where they are, as the app is told."""
    verify_key = new_secret(folder / "key-server.secret")
    save_key(new_key(), folder / "shuffling.pem")
    enrolled = [public_bytes(load_key(folder / f"{i}.pem")).hex() for i in range(3)]
    (folder / "enrolled.txt").write_text("\n".join(enrolled), encoding="utf-8")
    tls = federation.certificates
    served = ["--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key), "--port"]
    write_secret(folder / "token", secrets.token_hex().encode())
    known = ["--enrolled", str(folder / "enrolled.txt"), "--token", str(folder / "token")]
    options = {"key-server": "key-server.secret", "shuffling-server": "shuffling.pem"}
    told = {
        "authority": str(tls.authority),
        "token": str(folder / "token"),
        "verify-key": verify_key.hex(),
        "shuffling-key": public_bytes(load_key(folder / "shuffling.pem")).hex(),
    }
    for name, secret in options.items():
        command = [sys.executable, "-m", "fedntk.trust", name, "--secret", str(folder / secret)]
        command += [*known, *served]
        _, port = federation.start(name, command)
        told[name] = f"https://localhost:{port}"
    return told


def assert_nothing_left(federation: Federation) -> None:
    assert processes_with(MARK, federation.folder) == []
    for port in federation.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections wait
            probe.bind(("127.0.0.1", port))


def test_methods_of_many_exchanges_learn_the_local_engines_bits(
    federation, third_parties, hospitals, folder, node_configs
):
    """At a time: each node answers the messages of three runs in turn, each in a process.

    SCAFFOLD and NTK-FL are in the tests below.
    """
    submitted = {}
    for method in ROUNDS:
        told = third_parties if method == "cp-ntk-fl" else {}
        config = settings(folder / method, method, evaluate=method == "secure-fedavg", **told)
        submitted[method] = config, federation.submit(APP, config)
    for method, (config, submission) in submitted.items():
        submission.wait()
        expected = locally(hospitals, folder, node_configs, **config)
        assert learned(folder / method) == expected, method
    assert federation.supernodes[2].node_id > 2  # by which the strategies knew it


def test_kill_9_of_the_server_app_and_of_the_superlink(federation, hospitals, folder, node_configs):
    """The same call goes on after the last whole round, with nodes that were never told."""
    out = folder / "again"
    config = settings(out, "scaffold", rounds=2, checkpoint=str(out / "checkpoint"))
    superlink = federation.superlink

    first = federation.submit(APP, {**config, "stop-at": "server:2"})
    kill(stopped_at(out, "server:2"))
    assert superlink.poll() is None

    (out / "server:2").unlink()
    second = federation.submit(APP, {**config, "stop-at": "server:2"})
    server_app = stopped_at(out, "server:2")
    kill(superlink.pid)
    with pytest.raises(RunFailed, match="the SuperLink has ended"):
        second.wait()
    wait_for(lambda: _has_ended(server_app), "the end of the orphaned ServerApp")
    first.process.kill()

    ids = [node.node_id for node in federation.supernodes]
    federation.start_superlink()
    third = federation.submit(APP, config)
    third.wait()
    rounds = [
        [f"[ROUND {i}/2]" in submission.text for i in (1, 2)]
        for submission in (first, second, third)
    ]
    assert rounds == [[True, True], [False, True], [False, True]]
    assert all(node.process.poll() is None for node in federation.supernodes)
    assert [node.node_id for node in federation.supernodes] == ids
    expected = locally(hospitals, folder, node_configs, **{**config, "checkpoint": ""})
    assert learned(out) == expected


def test_kill_9_of_two_supernodes_at_work(without_nodes, hospitals, folder, node_configs):
    """In training and in a query. It goes on with the third, as if these clients had failed."""
    federation = without_nodes.result(timeout=2 * PATIENCE)
    out = folder / "killed"
    config = settings(out, "ntk-fl", rounds=1, fail_at="train:2,query:1")
    assert learned(out) == locally(hospitals, folder, node_configs, **config)
    whole = settings(out, "ntk-fl", rounds=1)
    assert learned(out) != locally(hospitals, folder, node_configs, **whole)
    assert_nothing_left(federation)


def test_a_node_that_comes_during_the_run_counts(hospitals, folder, node_configs):
    """Two of three are there; the model of their sums is made before the third comes."""
    out = folder / "late"
    config = settings(out, "one-exchange", rounds=30, nodes=2)
    first_two = {"node_configs": node_configs[:2], "environment": QUICK}
    with Federation(folder / "c", 2, **first_two) as federation:
        submission = federation.submit(APP, config)
        wait_for(lambda: "'clients': 2" in submission.text, "the sums of two nodes")
        federation.add_supernode(node_configs[2])
        submission.wait()
    found = {name: own for name, own in learned(out).items() if "round" not in name}
    expected = locally(hospitals, folder, node_configs, **config)
    assert found == {name: expected[name] for name in found}
    assert_nothing_left(federation)


def test_a_node_that_is_not_registered_is_refused(federation):
    """The SuperLink takes no node whose key nobody has told it."""
    make_node_key(federation.folder / "stranger.key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(tool("flower-supernode"), "--superlink", federation.address, "--port", str(port)),
        *("--auth-supernode-private-key", str(federation.folder / "stranger.key")),
        *("--root-certificates", str(federation.certificates.authority)),
    ]
    log = federation.folder / "stranger.log"
    stranger = start(command, federation.environment("stranger"), log)
    assert stranger.wait(PATIENCE) != 0
    said = log.read_text(encoding="utf-8")
    assert "SuperNode ID" not in said
    assert "The SuperNode could not establish a connection" in said


SIMULATE = """
import subprocess, sys
from pathlib import Path
from fedntk.simulations.engine.flwr_run import superlink
from fedntk.simulations.engine.processes import tool
app, home, config = sys.argv[1:]
with superlink(Path(home)) as (_, environment):
    command = [tool("flwr"), "run", app, "fedntk", "--stream", "--run-config", config]
    command += ["--federation-config", "num-supernodes=3"]
    subprocess.run(command, env=environment, check=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with fedntk from a wheel; what it needs is this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "venv" / "bin" / "python"
    output_of(*UV, "build", "--wheel", "--out-dir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("fedntk-*.whl")
    output_of(*UV, "venv", "--python", sys.executable, folder / "venv", cwd=folder)
    flower = f"flwr=={importlib.metadata.version('flwr')}"  # for commands of its own
    output_of(*UV, "pip", "install", "--no-deps", "--python", python, wheel, flower, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    where = "import fedntk.simulations; print(fedntk.simulations.__file__)"
    assert Path(output_of(python, "-c", where, cwd=folder).strip()).is_relative_to(packages)
    return python


@pytest.fixture(scope="module")
def bundle(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the Flower app as it comes out of a bundle that `flwr build` makes of the wheel."""
    folder = tmp_path_factory.mktemp("bundle")
    (app,) = (installed.parents[1] / "lib").glob("python*/site-packages/fedntk/simulations")
    said = output_of(installed.parent / "flwr", "build", "--app", app, cwd=folder)
    assert "missing" not in said  # of the properties that it recommends
    (file,) = folder.glob("*.fab")
    assert file.stat().st_size < 10_000_000
    with zipfile.ZipFile(file) as packed:
        assert 0 < len(packed.infolist()) < 1000
        for info in packed.infolist():
            assert info.file_size < 1_000_000
            ours = (".toml", "LICENSE", ".info/CONTENT", "fedntk_app.py")
            assert info.filename.endswith(ours), info.filename
        described = tomllib.loads(packed.read("pyproject.toml").decode())
        assert packed.read("LICENSE") == (ROOT / "LICENSE").read_bytes()
        packed.extractall(folder / "app")
    assert described["tool"]["flwr"]["app"]["fab-format-version"] == 1
    return folder / "app"


def test_the_bundle_runs_simulated_and_deployed(installed, bundle, tmp_path, monkeypatch):
    """With fedntk from a wheel; both learn the local engine's bits, and leave nothing running."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "method": "ntk-fl", "num-clients": 3, "clients-per-round": 3, "clients-per-evaluation": 0,
        "train-examples": 60, "rounds": 1,
    }  # fmt: skip
    expected = run(Config.parse({**settings, "out": tmp_path / "local"}), progress=False)
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    environment = {**os.environ, **ONE_THREAD}
    environment.pop("FLWR_HOME", None)
    simulate = [installed, "-c", SIMULATE, bundle, tmp_path / "flwr"]
    deploy = [installed, "-m", "fedntk.simulations.deploy.federation", "run", bundle, "--nodes"]
    deploy += ["3", "--folder", tmp_path / "federation", "--run-config"]
    wanted = bits(load_model(expected.folder))
    for name, command in (("simulated", simulate), ("deployed", deploy)):
        output_of(*command, f'{text} out="{tmp_path / name}"', env=environment)
        assert bits(load_model(tmp_path / name)) == wanted, name
    assert processes_with(MARK, tmp_path / "federation") == []


def test_the_command_makes_keys_for_several_machines(tmp_path):
    made = CliRunner().invoke(
        cli, ["keys", str(tmp_path), "--host", "fl.example.org", "--host", "10.1.2.3"]
    )
    assert made.exit_code == 0, made.output
    names = ["ca.pem", "server.pem", "server.key"]
    names += [f"node-{i}.key{end}" for i in range(3) for end in ("", ".pub")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in ("server.key", "node-0.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert list(map(str, hosts.get_values_for_type(x509.IPAddress))) == ["10.1.2.3"]
