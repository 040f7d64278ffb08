"""A run that was cut off goes on to the same bits; the best model; early stopping."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from jupyter_client.manager import start_new_kernel

from fedntk.ntk.support.files import claimed
from fedntk.simulations import ConfigError, Run, RunFailed, load_model, run
from fedntk.simulations.checkpoints import Best, Checkpoint, Checkpoints, Round
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.methods import all_methods
from fedntk.simulations.report.results import run_state

from ..conftest import output_of
from .outcomes import bits, grid_of, interrupted, outcome, refused, write_data
from .settings import FEDAVG, each_of, small

SMALL = FEDAVG.replace(rounds=5, checkpoint_every=2, server_threads=1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(SMALL, out=tmp_path_factory.mktemp("straight"), progress=False)


CUTS = [(0, 1), (1, 1), (1, 2)]  # round after which a run ends, rounds between checkpoints


@pytest.mark.parametrize("method", each_of(all_methods()))
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, finished_run, method):
    """And longer: then TCT's clients, which remove at the end what can be sent again, send more."""
    after, every = CUTS[(sorted(all_methods()).index(method) + 1) % len(CUTS)]
    config = small(method).replace(out=tmp_path, checkpoint_every=every)
    shorter, last = config.replace(rounds=config.rounds - 1), config.rounds
    interrupted(shorter, after)  # an exception saves what there is
    seen: list[float] = []
    run(shorter, progress=False, on_round=lambda record: seen.append(record["round"]))
    assert seen == [*range(after + 1, last)]
    run(config, progress=False)
    sent = method != "tct"
    assert outcome(tmp_path, sent=sent) == outcome(finished_run(method).folder, sent=sent)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [*range(last + 1)]
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert kept.name == f"round-{last:06}.safetensors"


def test_a_rate_that_falls_by_round_goes_on_where_it_was(tmp_path, straight):
    """Cut off after round 3 of 5, where it has fallen once; the first two rounds are as without."""
    config = SMALL.replace(rate_decay=0.5, rate_decay_after=2)
    whole = run(config, out=tmp_path / "whole", progress=False)
    interrupted(cut := config.replace(out=tmp_path / "cut"), 3)
    assert outcome(run(cut, progress=False).folder) == outcome(whole.folder)
    losses, plain = (result.curve("loss") for result in (whole, straight))
    assert (losses == plain).tolist() == [True, True, True, False, False, False]


KILLER = """
import itertools, os, signal, sys, warnings
import pyarrow.parquet
import torch
from fedntk.simulations import Config, run
from fedntk.simulations.engine.server_app import prepare
warnings.simplefilter("ignore")
torch.set_num_threads(1)
base, step = sys.argv[1], int(sys.argv[2])
config = Config.load(f"{base}/config.toml")
prepare(config)

def attempt(folder, fatal):
    # fork: the imports are paid for once, and no thread has been started
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    numbers = itertools.count(1)

    def count(event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            if str(arguments[0]).startswith(folder) and next(numbers) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(config, out=folder, progress=False)
    os._exit(0)

for fatal in range(1, 10_000, step):
    folder = f"{base}/runs/{fatal}"
    if attempt(folder, fatal) == 0:
        break  # the run has fewer file operations
    assert attempt(folder, 0) == 0, fatal
"""


@pytest.mark.parametrize("step", [pytest.param(7, marks=pytest.mark.slow), 30])
def test_kill_9_at_any_operation_on_a_file(tmp_path, step):
    """Killed at every so many files it opens, renames or removes, and then gone on with."""
    config = SMALL.replace(rounds=3 if step == 30 else 5, width=10, test_examples=50)
    config.save(tmp_path / "config.toml")
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    output_of(sys.executable, "-c", KILLER, tmp_path, step, env=one_thread)
    killed = list((tmp_path / "runs").iterdir())
    assert len(killed) > 60 // step
    straight = outcome(run(config, out=tmp_path / "straight", progress=False).folder)
    for folder in killed:
        assert outcome(folder) == straight, folder.name


RAY = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=RAY)])
def test_after_a_kernels_interrupt_the_same_cell_goes_on_to_the_same_bits(
    tmp_path, engine, monkeypatch
):
    """In any place of a round. Jupyter shows a bar before, and then one line on how to go on."""
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as silence_bars does, for the bars of others
    rounds = 16 if engine == "ray" else 60  # some seconds: an interrupt takes a while to arrive
    config = SMALL.replace(rounds=rounds, local_epochs=40, out=str(tmp_path / "cut"))
    config.save(tmp_path / "conf.toml")
    cell = f"from fedntk.simulations import run\nrun('{tmp_path}/conf.toml', engine='{engine}')"
    manager, client = start_new_kernel(kernel_name="python3")
    shown: list[str] = []

    def interrupt(message: dict[str, object]) -> None:
        first = f"round 1/{rounds}" not in "".join(shown)
        first &= f"round 1/{rounds}" in str(message["content"])
        shown.append(str(message["content"]))
        if first:
            manager.interrupt_kernel()

    try:
        first = client.execute_interactive(cell, timeout=300, output_hook=interrupt)["content"]
        assert first.get("ename") == "KeyboardInterrupt", shown[-3:]
        for text in (" left ", "accuracy", f"fedntk run --resume {tmp_path}/cut"):
            assert any(text in each for each in shown)
        assert run_state(config) == "interrupted"
        again = client.execute_interactive(cell, timeout=300, output_hook=lambda message: None)
        assert again["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    whole = run(config, out=tmp_path / "whole", progress=False)
    assert outcome(tmp_path / "cut") == outcome(whole.folder)


def damage(path: Path) -> None:
    """Turn one bit in the middle of the weights."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("both", [False, True])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, straight, both):
    """Without any whole one the run begins again."""
    config = SMALL.replace(out=tmp_path)
    interrupted(config.replace(checkpoint_every=1), after=3)
    older, newer = sorted((tmp_path / "checkpoints").glob("round-*"))
    damage(newer)
    newer.with_name(f"{newer.name}.0.partial").write_bytes(b"half")
    assert Checkpoints(tmp_path).newest().round == 2
    if both:
        older.write_bytes(older.read_bytes()[:500])
    seen: list[float] = []
    run(config, progress=False, on_round=lambda record: seen.append(record["round"]))
    assert seen == list(range(0 if both else 3, 6))
    assert outcome(tmp_path) == outcome(straight.folder)
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_folder_with_a_finished_or_another_run_is_left_alone(straight):
    """By `serve`, too, which is what ``flwr run`` calls: it goes by what is in the folder."""
    config, files = straight.config, [straight.folder, *straight.folder.rglob("*")]
    before, grid = [path.stat().st_mtime_ns for path in files], grid_of(config)
    assert run(config, progress=False).rounds.equals(straight.rounds)
    with pytest.raises(ConfigError, match=r"other settings: learning-rate = 0.1 \(now 0.2\); ch"):
        run(config, learning_rate=0.2, progress=False)
    refused(r"rounds = 5 \(now 0\)", run, config, rounds=0, progress=False)
    serve(grid, config, lambda record: pytest.fail("ran again"))
    refused("other settings: width = 100", serve, grid, config.replace(width=50))
    assert [path.stat().st_mtime_ns for path in files] == before


def test_a_run_in_which_no_client_succeeded_begins_anew(tmp_path, straight, monkeypatch):
    """Called again after its reason is gone; none of its rounds counts."""
    with monkeypatch.context() as patch:
        patch.setattr("fedntk.clients.SGDClient.fit", lambda *_: 1 / 0)
        with pytest.raises(RunFailed, match=r"in 3 rounds no client's .* division by zero"):
            run(SMALL, out=tmp_path, progress=False)
    run(SMALL, out=tmp_path, progress=False)
    assert outcome(tmp_path) == outcome(straight.folder)


@pytest.mark.parametrize("finished", [False, True])
def test_data_that_changed_is_refused(tmp_path, finished):
    """The configuration, the labels and the split are the same; the values are not."""
    own = {"dataset": write_data(tmp_path / "d.npz"), "train_examples": 0, "partition": "iid"}
    config = SMALL.replace(**own, out=tmp_path / "run")
    if finished:
        run(config, progress=False)
    else:
        interrupted(config, after=2)
    write_data(tmp_path / "d.npz", scale=5.0)
    refused("the data set has changed since the", run, config, progress=False)
    write_data(tmp_path / "d.npz")
    assert run(config, progress=False).summary["rounds"] == 5


def test_two_runs_in_one_folder_at_a_time_are_refused(tmp_path):
    config = SMALL.replace(out=tmp_path, rounds=1)

    def again(record: dict[str, float]) -> None:
        with pytest.raises(BlockingIOError, match="another process is at work in"):
            serve(grid_of(config), config)

    serve(grid_of(config), config, again)
    with claimed(tmp_path, "run"), pytest.raises(ConfigError, match="another process is at work"):
        run(config, rounds=2, progress=False)


@pytest.mark.parametrize(
    ("monitor", "best_of"),
    [("accuracy", np.argmax), ("loss", np.argmin), ("client-loss-mean", np.argmin)],
)
def test_the_best_model_is_that_of_the_best_round(tmp_path, monitor, best_of):
    """The weights of the run that ends with the best round; the first of equals."""
    config = SMALL.replace(learning_rate=3.0, monitor=monitor)  # the last is not the best
    result = run(config, out=tmp_path / "all", progress=False)
    curve = result.curve(monitor)
    best = int(curve.index[best_of(curve.to_numpy())])
    assert best < 5
    assert result.summary["best"] == {"metric": monitor, "round": best, "value": curve[best]}
    until = run(config, out=tmp_path / "until", rounds=best, progress=False)
    found = load_model(result.folder, "best")
    assert {name: array.tobytes() for name, array in found.items()} == bits(until.folder)


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3]), (5, [0, 5])])
def test_early_stopping_after_patience_rounds_without_a_better_model(tmp_path, every, rounds):
    """Round 0 stays the best without local epochs: the first round evaluated from 3 on is last."""
    own = {"local_epochs": 0, "rounds": 8, "patience": 3, "evaluate_every": every}
    config = SMALL.replace(**own, out=tmp_path)
    interrupted(config, after=2)
    result = run(config, progress=False)
    assert result.curve().index.tolist() == rounds
    assert (result.summary["best"]["round"], result.summary["rounds"]) == (0, rounds[-1])
    assert run(config, rounds=9, progress=False).curve().index.tolist() == rounds


def a_checkpoint(rounds: int, weights, state=None, best=None) -> Checkpoint:
    records = [Round({"round": r, "accuracy": 0.5}) for r in range(rounds + 1)]
    return Checkpoint(weights, "network", state or {}, {"split": "s"}, records, best)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    state = {"strategy": "X", "momentum": np.arange(4.0), "momenta": {"beta": [0.9, 1]}, "a": 3}
    own = {2**64 - 5: {"loss": 0.5}, 3: {"value": 1.0, "loss": float("nan")}}  # NaN is no entry
    rounds = [Round.of({"round": r}, own) for r in range(71)]
    turned = np.arange(6, dtype=np.float16).reshape(2, 3).T
    weights = {"w": turned, "counter": np.array(3), "none": np.zeros((0, 2))}
    best = Best(70, 0.5, "network", weights)
    written = Checkpoint(weights, "network", state, {"device": "cpu"}, rounds, best)
    Checkpoints(tmp_path).save(written)
    read = Checkpoints(tmp_path).newest()
    np.testing.assert_equal(vars(read) | {"rounds": 0}, vars(written) | {"rounds": 0})
    assert list(read.strategy) == list(state)
    for name, array in weights.items():
        np.testing.assert_array_equal(read.weights[name], array, strict=True)
    assert rounds[0].clients == [(-5, "loss", 0.5), (3, "value", 1.0)]
    assert [(own.metrics, [tuple(row) for row in own.clients]) for own in read.rounds] == rounds


def test_a_checkpoint_is_one_file_that_others_cannot_read_and_the_newest_two_stay(tmp_path):
    checkpoints, folder = Checkpoints(tmp_path), tmp_path / "checkpoints"
    for number in range(4):
        checkpoints.save(a_checkpoint(number, {"w": np.full(3, number)}))
        expected = [f"round-{r:06}.safetensors" for r in range(max(number - 1, 0), number + 1)]
        assert sorted(path.name for path in folder.iterdir()) == expected
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    last = a_checkpoint(4, {"w": np.full(3, 4)})
    checkpoints.save(last, last=True)
    assert [path.name for path in folder.iterdir()] == ["round-000004.safetensors"]
    np.testing.assert_equal(Checkpoints(tmp_path).newest().weights, last.weights)


def test_any_bit_that_turned_is_noticed(tmp_path):
    """One in each byte of a file."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(a_checkpoint(0, {"w": np.arange(3.0)}, {"controls.0": np.ones(2)}))
    (path,) = (tmp_path / "checkpoints").iterdir()
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert checkpoints.newest() is None
        except ConfigError as error:  # the number of the format is not 5
            assert "another version of fedntk" in str(error)  # noqa: PT017
    path.write_bytes(content)
    assert checkpoints.newest().round == 0
