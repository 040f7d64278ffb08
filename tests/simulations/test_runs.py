"""A configuration in, a folder of results out; the same bits on both engines."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from flwr.app import Context, RecordDict
from ray.cluster_utils import Cluster

from fedntk.ntk import TCTModel
from fedntk.simulations import Config, ConfigError, RunFailed, load_predictor, load_results, run
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.engine.processes import last_words
from fedntk.simulations.engine.server_app import main, serve
from fedntk.simulations.report.results import read_run

from .outcomes import bits, grid_of, measured, refused
from .settings import FEDAVG, PROJECTED, SETTINGS, SMALL, TOOLS


def test_a_run_writes_its_folder(finished_run):
    small = finished_run("ntk-fl")
    config, summary, frame = small.config, small.summary, small.rounds
    assert {p.name for p in small.folder.iterdir() if p.name[0] != "."} == {
        *("best.safetensors", "checkpoints", "clients.parquet", "config.toml", "inputs.json"),
        *("model.safetensors", "rounds.jsonl", "rounds.parquet", "summary.json"),
    }
    assert Config.load(small.folder / "config.toml") == config
    assert frame["round"].unique().tolist() == [0, 1, 2, 3]
    first = frame[frame["round"] == 1].set_index("metric").value
    assert np.isfinite(first).all()
    assert {"train-loss", "t", "client-accuracy", "client-loss", "peak-memory"} <= set(first.index)
    assert (first["replies-accepted"], first["client-replies-accepted"]) == (4, 3)
    curve, up = small.curve(), small.curve("bytes-up")
    assert {key: summary[key] for key in ("split", "accuracy", "bytes-up", "device", "data")} == {
        "split": load_split(config).checksum, "accuracy": curve[3], "bytes-up": up.sum(),
        "device": "cpu", "data": load_data(config).checksum,
    }  # fmt: skip
    means = {0: curve[0], 1: curve[1], 2: curve.loc[1:3].mean(), 3: curve.loc[1:3].mean()}
    reached = next(r for r, mean in means.items() if mean >= 0.3)
    found = summary["to-target"]["0.3"]
    assert (found["round"], found["bytes-up"]) == (reached, up.loc[:reached].sum())
    assert (small.to_target(0.3), small.to_target(0.999)) == (found, None)


def test_a_round_after_the_solution_asks_nobody_and_is_not_counted_as_unchanged(finished_run):
    found = finished_run("afl")
    assert found.curve("model-updated").to_dict() == {1: 1}
    assert found.summary["rounds-unchanged"] == 0


def test_statistics_over_clients_are_those_of_their_table(finished_run):
    small = finished_run("ntk-fl")
    table = small.clients
    for metric, worst in (("accuracy", "min"), ("loss", "max")):
        values = table[table.metric == metric].groupby("round").value
        assert values.size().tolist() == [3, 3, 3]
        expected = {"mean": values.mean(), "worst": values.agg(worst), "std": values.std(ddof=0)}
        for name, own in expected.items():
            np.testing.assert_allclose(small.curve(f"client-{metric}-{name}"), own, rtol=1e-12)


FITS = 2 * 10**8  # bytes


@pytest.mark.parametrize(
    ("options", "free", "message"),
    [
        ({"ntk_fl": {"structure": "dense"}}, FITS, "a round of .* clients, .* needs .* GB and cpu"),
        (
            {"method": "tct", "tct": {"local_steps": 1, "bootstrap_rounds": 0}},
            100,
            "features of all examples need .* GB",
        ),
    ],
)
def test_what_cannot_fit_is_refused_at_once(tmp_path, monkeypatch, options, free, message):
    """By the size on the wire, or what all clients keep on the disk."""
    bytes_free = [FITS]
    memory = "fedntk.ntk.support.memory.available_memory"
    monkeypatch.setattr(memory, lambda device="cpu": bytes_free[-1])
    config = SMALL.replace(out=tmp_path, rounds=0, train_examples=0)
    run(config, progress=False)
    bytes_free.append(free)
    differentiate = sys.modules["fedntk.ntk.jacobian.differentiate"]  # beside a function
    monkeypatch.setattr(differentiate, "require_memory", lambda *a, **o: None)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(message, run, config, **options, progress=False, again=True)
    assert read_run(tmp_path).summary["rounds"] == 0  # and what was there is there still


def test_tct_goes_on_from_another_runs_network_and_its_predictor_can_be_kept(tmp_path):
    """T_1 = 2 is a run of FedAvg and, from its weights, one of T_1 = 0; 50 test examples count."""
    settings = {**SETTINGS["tct"], "sampling_rate": 1.0, "projection": 0, "test_examples": 50}
    shared = SMALL.replace(method="tct", **settings, clients_per_round=SMALL.num_clients)
    shared = shared.replace(tct={"num_features": 0, "bootstrap_rounds": 2}, rounds=4)
    both = run(shared, out=tmp_path / "both", progress=False)
    first = run(shared, method="fedavg", rounds=2, out=tmp_path / "one", progress=False)
    second = run(
        shared, tct={"bootstrap_rounds": 0}, rounds=2, out=tmp_path / "two", progress=False,
        weights=str(first.folder / "model.safetensors"),
    )  # fmt: skip
    assert bits(both.folder) == bits(second.folder)
    assert both.curve()[2] == first.curve()[2] == second.curve()[0]
    predictor, network = (load_predictor(result.folder) for result in (second, first))
    data = load_data(shared)
    x, y = data.x_test[:50], data.y_test[:50]
    assert second.curve()[2] == predictor.evaluate(x, y).accuracy
    assert network.evaluate(x, y)[:2] == (first.curve("loss")[2], first.curve()[2])
    predictor.save(tmp_path / "kept")
    again = TCTModel.load(tmp_path / "kept", predictor.network)
    assert torch.equal(again.predict(x), predictor.predict(x))


def test_different_runs_of_one_name_are_told_apart(tmp_path):
    """Runs that were killed are left out."""
    for folder, own in {"a": {"learning_rate": 0.5}, "b": {}, "c": {"seed": 1}}.items():
        run(SMALL, rounds=0, method="fedavg", out=tmp_path / folder, progress=False, **own)
    names = load_results(tmp_path).groupby(["run", "seed"]).size().index.tolist()
    same = [("fedavg, learning-rate = 0.01", seed) for seed in (0, 1)]
    assert names == [*same, ("fedavg, learning-rate = 0.5", 0)]
    apart = load_results([tmp_path / "b", tmp_path / "c"])
    (tmp_path / "a" / "summary.json").unlink()
    pd.testing.assert_frame_equal(load_results(tmp_path), apart)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "npz:/nowhere.npz"}, "no file or folder at /nowhere.npz"),
        ({"num_clients": 2000}, "at most one client for each of the 400"),
        ({"train_examples": 1438}, "train-examples: expected at most 1437, got 1438"),
        ({"partition": "dirichlet", "min_partition_size": 500}, "partition = dirichlet"),
        ({"partition": "pathological", "classes_per_client": 11}, "partition = pathological"),
        ({"partition": "natural"}, "digits names no owners; set client-column"),
        ({"partition": "client-dirichlet", "examples_per_client": 900}, "is to get"),
        ({"device": "banana"}, "device = banana: cannot be used"),
        ({"weights": "/nowhere.safetensors"}, "weights = /nowhere.safetensors: cannot be read"),
        (
            {
                "method": "tct",
                "tct": {"bootstrap_rounds": 0},
                "model": "tests.simulations.networks:no_linear",
            },
            "last nn.Linear",
        ),
        ({"method": "tct", "rounds": 11}, "rounds: expected more than 11, after which"),
        ({"workers": 2, "engine": "ray"}, "workers is for the local engine"),
        ({"engine": "ray", "client_cpus": 10_000}, "client-cpus: expected at most this machine's"),
    ],
)
def test_what_cannot_work_is_refused_before_round_1(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(SMALL, out=tmp_path, **options, progress=False)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_flowers_own_command_meets(tmp_path):
    """It does not go through `run`: failures are kept, numbers of nodes and settings checked."""
    config = SMALL.replace(out=tmp_path, dataset="npz:/nowhere.npz")
    refused("no file or folder at", serve, grid_of(SMALL), config)
    refused(r"no file or folder at /nowhere\.npz", read_run, tmp_path, error=RunFailed)
    with pytest.raises(ConfigError, match=r'expected 12 nodes, got 13.*"num-supernodes=12"'):
        serve(grid_of(SMALL.replace(num_clients=13)), SMALL.replace(out=tmp_path / "a"))
    values = SMALL.replace(out=tmp_path / "b").run_config() | {"learning-rate": -1.0}
    with pytest.raises(ConfigError, match="learning-rate: expected more than 0"):
        main(grid_of(SMALL), Context(1, 0, {}, RecordDict(), values))
    assert not (tmp_path / "b" / "rounds.jsonl").exists()


OWN = """
import beside
from fedntk.clients import CPNTKFLClient
from fedntk.ntk.options import option
from fedntk.simulations.methods import own_methods
from fedntk.strategies import CPNTKFL

class OwnClient(CPNTKFLClient):
    share: float = option("that it tells", default=0.5, at_least=0)

    def fit(self, parameters, config):
        arrays, number, metrics = super().fit(parameters, config)
        return arrays, number, metrics | {"share": self.share}

class OwnFL(CPNTKFL):
    client = "OwnClient"

METHOD = type(own_methods()["cp-ntk-fl"])(OwnFL)
"""


@pytest.mark.xdist_group("ray")
@pytest.mark.ray
def test_flwr_run_on_ray_gives_the_bits_of_the_local_engine_and_leaves_no_process(
    tmp_path, monkeypatch
):
    """With a method and a metric of files, and all tools of CP-NTK-FL: clients in several processes
    open the seed with the challenge they keep. A cluster that was killed left its address behind.
    """
    notes = tempfile.TemporaryDirectory()  # a short path: Ray's sockets lie in it
    (Path(notes.name) / "ray_current_cluster").write_text("127.0.0.1:9")
    monkeypatch.setenv("RAY_TMPDIR", notes.name)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    files = {"mine": OWN, "beside": "", "ours": "def n(scores, labels):\n    return len(labels)\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    config = SMALL.replace(
        method=f"{tmp_path}/mine.py:METHOD", **PROJECTED, min_completed=2, private_test=True,
        own_fl=TOOLS["cp_ntk_fl"] | {"share": 0.25}, metrics=f"f1-macro,{tmp_path}/ours.py:n",
        num_clients=4, clients_per_round=2, clients_per_evaluation=2, rounds=2, train_examples=100,
    )  # fmt: skip
    ray, local = (
        run(config, out=tmp_path / engine, engine=engine, progress=False)
        for engine in ("ray", "local")
    )
    assert bits(ray.folder) == bits(local.folder)
    pd.testing.assert_frame_equal(measured(ray), measured(local))
    pd.testing.assert_frame_equal(ray.clients, local.clients)
    assert (ray.curve("seconds-clients")[1:] > 0).all()
    assert set(ray.curve("share")) == {0.25}
    assert len(ray.curve("n")) == len(ray.curve("f1-macro")) == 3
    assert processes_of(tmp_path) == []
    notes.cleanup()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "ERROR: An exception occured!! no cluster at 10.0.0.1\nFor more, visit: <docs>\n\n",
            "no ",
        ),
        ("ERROR: An exception occurred !! \n│ no space │\n╰──────╯\n", "no space"),
        ("", ""),
    ],
)
def test_a_failed_run_says_the_cause_that_flower_names(log, words):
    assert last_words(log).startswith(words)
    assert "visit" not in last_words(log)


BUILD = """
import pathlib, ray
from torch import nn
def build(shape, classes):
    if ray.is_initialized():
        node = ray.get_runtime_context().get_node_id()
        (pathlib.Path(__file__).parent / node).touch()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def cluster():
    """A cluster of two nodes."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's open files
def test_a_cluster_of_two_nodes_gives_the_bits_of_one_machine(tmp_path, cluster):
    """Clients work on both; the cluster goes on after the run."""
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "net.py").write_text(BUILD)
    config = FEDAVG.replace(model=f"{tmp_path}/nodes/net.py:build", clients_per_round=8)
    options = {"engine": "ray", "ray_address": cluster.address, "progress": False}
    both = run(config, out=tmp_path / "both", **options)
    assert len([path for path in (tmp_path / "nodes").iterdir() if path.is_file()]) == 1 + 2
    assert len(cluster.list_all_nodes()) == 2
    one = run(config, out=tmp_path / "one", progress=False)
    assert bits(both.folder) == bits(one.folder)
    pd.testing.assert_frame_equal(measured(both), measured(one))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.ray
def test_a_worker_of_ray_that_dies_costs_a_reply_and_no_later_one(tmp_path):
    """Flower's pool alone goes on with the dead one, and loses most replies of each round."""
    killed = []

    def kill(record):
        if record["round"] == 2:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    home = process.environ().get("FLWR_HOME", "")
                    if home.startswith(str(tmp_path)) and "ray::ClientApp" in process.cmdline()[0]:
                        process.kill()
                        killed.append(process.pid)
                        return

    config = FEDAVG.replace(num_clients=20, clients_per_round=20, rounds=6)
    result = run(config, out=tmp_path, engine="ray", progress=False, on_round=kill)
    assert len(killed) == 1
    accepted = result.curve("replies-accepted")
    assert accepted.sum() >= 6 * 20 - 2  # the killed one's, and one sent to it before that is seen
    assert accepted[3:].tolist() == [20] * 3
    assert result.summary["status"] == "finished"
    assert result.summary["replies-asked"] == 6 * 20


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's open files
def test_a_run_outlives_a_machine_of_its_cluster(tmp_path, cluster):
    (node,) = cluster.list_all_nodes()[1:]

    def remove(record):
        if record["round"] == 2:
            cluster.remove_node(node, allow_graceful=False)

    config = FEDAVG.replace(num_clients=10, clients_per_round=10, rounds=8)
    options = {"engine": "ray", "ray_address": cluster.address, "progress": False}
    result = run(config, out=tmp_path, on_round=remove, **options)
    accepted = result.curve("replies-accepted")
    assert accepted[-4:].tolist() == [10] * 4
    assert accepted.sum() >= 8 * 10 - 4
    assert result.summary["replies-used"] == accepted.sum()


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes whose Flower home, which all inherit, is in `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME", "").startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
@pytest.mark.ray
def test_after_kill_9_on_ray_the_same_command_ends_what_is_left_and_goes_on(tmp_path):
    """Killed, the command leaves Flower's processes at work, which would write on."""
    folder, conf = tmp_path / "ray", tmp_path / "conf.toml"
    config = SMALL.replace(rounds=40, ntk_fl={"steps": "50"}, clients_per_evaluation=0)
    config.save(conf)
    command = [sys.executable, "-m", "fedntk.simulations.cli", "run", str(conf)]
    lines, deadline = folder / "rounds.jsonl", time.monotonic() + 300
    with subprocess.Popen([*command, "--out", str(folder), "--engine", "ray"]) as process:  # noqa: S603
        try:
            while not (lines.exists() and lines.read_text().count("\n") > 3):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.kill()
    assert processes_of(tmp_path) != []
    resumed = run(config, out=str(folder), progress=False)
    assert processes_of(tmp_path) == []
    whole = run(config, out=str(tmp_path / "whole"), progress=False)
    assert bits(resumed.folder) == bits(whole.folder)
