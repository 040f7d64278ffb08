"""A search chooses on what nobody trains on, runs nothing twice, and never sees the test set."""

import itertools
import json
import re

import numpy as np
import optuna
import pandas as pd
import psutil
import pytest
from matplotlib.figure import Figure
from optuna.trial import TrialState
from torch import nn

from fedntk.simulations import Config, RunFailed, load_predictor, run, tune
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.engine.progress import Progress
from fedntk.simulations.methods import all_methods
from fedntk.simulations.report.results import read_run
from fedntk.simulations.tuning import search as searching

from .networks import three_classes
from .outcomes import bits, measured, refused, write_data
from .settings import FEDAVG, SETTINGS
from .test_cli import fedntk

SMALL = FEDAVG.replace(
    num_clients=4, clients_per_round=2, clients_per_evaluation=0, partition="iid", width=10,
    train_examples=200, validation_examples=100, batch_size=8,
)  # fmt: skip
ONE, TWO, THREE = ({"learning-rate": [0.01, 0.3, 0.1][:count]} for count in (1, 2, 3))
PRIVATE = {
    "validation_examples": 50, "private_test": True, "local_test_fraction": 0.2,
    "clients_per_evaluation": 3,
}  # fmt: skip
CLIENTS = {"validation_examples": 0, "validation_clients": 2, "clients_per_evaluation": 2}


def search(folder, config=SMALL, **options):
    return tune(config, out=folder, progress=False, **{"grid": THREE, **options})


def lines(table):
    """The table without what the machine makes of it."""
    return table.drop(columns="seconds").to_csv(index=False)


def folders(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.glob("trials/*/seed-*"))


def name_of(config):
    return f"{config.folder.parent.name}/{config.folder.name}"


@pytest.fixture
def pretended(monkeypatch):
    """Names of runs that only write records: the loss is the distance from the rate 0.1."""
    ran = []

    def pretend(config, *, progress, resume, on_round):
        assert config.evaluate_on == "validation"
        ran.append(name_of(config))
        config.folder.mkdir(parents=True)
        distance = abs(np.log10(config.learning_rate) + 1)
        with (config.folder / "rounds.jsonl").open("w", buffering=1) as file:
            for number in range(config.rounds + 1):
                accuracy = 1 / (2 + distance) + 1e-3 * config.seed + 1e-3 * number
                record = {"round": number, "accuracy": accuracy, "loss": distance, "seconds": 1.0}
                file.write(json.dumps(record) + "\n")
                on_round(record)

    monkeypatch.setattr(searching, "run", pretend)
    monkeypatch.setattr(
        "fedntk.simulations.report.figures.tuning_values", lambda *_, **__: Figure()
    )
    return ran


@pytest.mark.parametrize(
    ("method", "held_out"),
    [
        *((method, PRIVATE) for method in sorted(all_methods())),
        *((method, CLIENTS) for method in ("fedavg", "ntk-fl", "tct", "ntk-dfl")),
    ],
)
def test_no_method_looks_at_the_test_set(tmp_path, method, held_out):
    """Another test set gives the same metrics of all rounds, the same weights and another test.

    Clients evaluate on parts of their own examples. The server's accuracy is that of the learned
    model on the examples held out, which are not in training; only validation clients evaluate.
    """
    plain = write_data(tmp_path / "0.npz")
    changed = write_data(tmp_path / "1.npz", shift=1, scale=-50.0)
    options = {"num_clients": 6, "clients_per_round": 4, **SETTINGS[method], **held_out}
    config = SMALL.replace(**{**options, "projection": 0, "method": method})
    cases = ((plain, "validation"), (changed, "validation"), (changed, "test"))
    first, second, tested = (
        run(config, dataset=data, evaluate_on=on, out=tmp_path / f"{i}", progress=False)
        for i, (data, on) in enumerate(cases)
    )
    assert bits(tested.folder) == bits(second.folder) == bits(first.folder)
    pd.testing.assert_frame_equal(measured(first), measured(second))
    setup = load_setup(first.config)
    split, test = setup.split, load_setup(tested.config).data
    indices = split.validation if len(split.validation) else np.concatenate(split.clients[-2:])
    assert not set(indices) & set(np.concatenate(split.clients[:-2]))
    assert held_out is PRIVATE or set(first.clients.partition) == {4, 5}
    assert not tested.clients.equals(first.clients)
    held = setup.data.x_train[indices], setup.data.y_train[indices]
    for result, (x, y) in ((first, held), (tested, (test.x_test, test.y_test))):
        evaluated = load_predictor(result.folder).evaluate(x, y)
        assert result.curve().iloc[-1] == pytest.approx(evaluated.accuracy, abs=1e-12)


@pytest.mark.parametrize("examples", [0, 50])
@pytest.mark.parametrize("method", ["ntk-fl", "cp-ntk-fl"])
def test_examples_held_out_for_tuning_do_not_choose_t(method, examples):
    held_out = CLIENTS | {"validation_examples": examples}
    strategy = make_strategy(load_setup(SMALL.replace(method=method, **held_out)))
    assert strategy.screening.validation_loss is None
    assert (strategy.validation_partitions, strategy.sampling.held_out) == ((), (2, 3))


def test_a_value_is_the_mean_over_the_last_rounds_and_then_over_seeds(tmp_path, pretended):
    table = search(tmp_path, SMALL.replace(rounds=4), seeds=[0, 1], last=2).trials
    assert table["learning-rate"].tolist() == [0.1, 0.3, 0.01]
    distance = np.abs(np.log10(table["learning-rate"]) + 1)
    np.testing.assert_allclose(table["mean"], 1 / (2 + distance) + 4e-3, rtol=1e-12)
    np.testing.assert_allclose(table["std"], 1e-3 / np.sqrt(2), rtol=1e-9)


def test_a_grid_is_its_product_and_one_that_has_grown_runs_only_what_is_new(tmp_path, pretended):
    grid = THREE | {"local-epochs": [1, 3]}
    for now, ran in ((grid | ONE, 4), (grid, 12), (grid, 12)):
        grown = search(tmp_path / "a", grid=now, seeds=[0, 1])
        assert len(pretended) == ran
    whole = search(tmp_path / "b", grid=grid, seeds=[0, 1])
    assert folders(whole.folder) == [f"trials/{i // 2:03d}/seed-{i % 2}" for i in range(12)]
    tried = whole.trials.sort_values("trial")[list(grid)].itertuples(index=False, name=None)
    assert list(tried) == list(itertools.product(*grid.values()))
    tables = [t.trials.sort_values(list(grid)).drop(columns="trial") for t in (grown, whole)]
    assert lines(tables[0]) == lines(tables[1])


def test_draws_depend_only_on_the_seed(tmp_path, pretended):
    random = {
        "learning-rate": (1e-3, 1.0, "log"), "width": (5, 20), "loss": ["mse", "cross-entropy"],
    }  # fmt: skip

    def draw(folder, trials, **options):
        return search(tmp_path / folder, grid=None, random=random, trials=trials, **options).trials

    whole, _ = draw("a", 4), draw("b", 2)
    longer, shorter = (lines(draw("b", trials)) for trials in (4, 3))
    assert longer == lines(whole) == shorter
    assert len(pretended) == 8
    assert whole["learning-rate"].nunique() == 4
    other = draw("c", 2, sampler_seed=1)
    assert not {*whole["learning-rate"]} & {*other["learning-rate"]}
    assert whole["learning-rate"].between(1e-3, 1).all()
    assert whole["width"].between(5, 20).all()
    tables = [draw(s, 11, sampler=s) for s in ("random", "tpe")]
    same = np.equal(*(table.sort_values("trial")["learning-rate"].to_numpy() for table in tables))
    assert same.tolist() == [True] * 10 + [False]  # then by what came before


def test_another_search_in_the_folder_is_refused(tmp_path, pretended):
    search(tmp_path, grid=TWO)
    for other, message in (
        ({"grid": ONE}, r"learning-rate = \[0.01, 0.3\] \(now \[0.01\]\)"),
        ({"grid": TWO, "seeds": [0, 1]}, r"seeds = \[0\] \(now \[0, 1\]\)"),
        ({"grid": TWO, "dataset": write_data(tmp_path / "d.npz")}, r"data = '\w+' \(now '\w+'\)"),
    ):
        refused(f"another search: .*{message}.*; choose another", search, tmp_path, **other)
    assert len(pretended) == 2
    search(tmp_path, again=True, **other)
    assert folders(tmp_path) == ["trials/000/seed-0", "trials/001/seed-0"]
    assert len(pretended) == 4


def workers():
    children = psutil.Process().children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def running(folder):
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{folder / 'search.db'}")
    return study.get_trials(states=(TrialState.RUNNING,))


EYE = np.eye(4)[np.arange(90) % 3], np.arange(90) % 3  # examples of three classes
OBJECTS = {"data": EYE, "model": three_classes}


def test_processes_that_are_killed_or_interrupted(tmp_path, monkeypatch):
    """One of two is killed: its trial fails. After Ctrl-C none is left. The same call finishes.

    They take data and a network as objects.
    """
    config, killed = SMALL.replace(train_examples=0, validation_examples=20), []

    def kill_and_interrupt(shown, record):
        if not killed:
            if len(running(tmp_path / "a")) == 2:
                killed.append(workers()[0])
                killed[0].kill()
        elif shown.state.startswith("2 of 3"):
            raise KeyboardInterrupt

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "on_round", kill_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "a", config, seeds=[0, 1], parallel=2, **OBJECTS)
    assert not workers()
    assert len(running(tmp_path / "a")) == 1
    refused("model = .*resume=True", search, tmp_path / "a", config, seeds=[0, 1], **OBJECTS)
    again, straight = (
        search(tmp_path / name, config, seeds=[0, 1], resume=True, **OBJECTS) for name in "ab"
    )
    assert lines(again.trials) == lines(straight.trials)
    assert again.best.dataset.startswith("passed:")
    assert ":three_classes#" in again.best.model


def test_a_network_that_other_processes_cannot_import_is_refused(tmp_path):
    config = SMALL.replace(train_examples=0, validation_examples=20)
    refused("model = .*other processes", search, tmp_path, config, data=EYE, model=nn.Linear(4, 3),
            parallel=2)  # fmt: skip


@pytest.mark.parametrize("prune", ["none", "median", "halving"])
def test_a_bad_trial_ends_early_if_asked_and_is_marked(tmp_path, pretended, prune):
    """Four good ones, then one that learns nothing: it ends before half of its rounds."""
    config = SMALL.replace(rounds=8)
    grid = {"learning-rate": [0.1, 0.11, 0.12, 0.13, 1e-7]}
    options = {"grid": grid, "prune": prune, "seeds": [0, 1]}
    first, again = (search(tmp_path, config, **options).trials for _ in range(2))
    last = first[first["trial"] == 4].iloc[0]
    assert last["state"] == ("finished" if prune == "none" else "pruned")
    assert last["rounds"] == 16 if prune == "none" else 0 < last["rounds"] <= 8
    assert first["state"][0] == "finished"
    assert (first[first.state == "finished"]["rounds"] == 16).all()
    assert len(set(pretended)) == len(pretended)
    assert lines(again) == lines(first)


@pytest.mark.parametrize("loss", [{"loss": float("nan")}, {}])
def test_the_smallest_loss_is_best_and_never_one_of_nan(tmp_path, monkeypatch, pretended, loss):
    """Or that is missing in all rounds: NaN would be neither more nor less than the others."""
    pretend = searching.run

    def spoil(config, **options):
        pretend(config, **options)
        if config.learning_rate == 0.01:
            record = json.dumps({"round": 1, "seconds": 1.0} | loss)
            (config.folder / "rounds.jsonl").write_text(record + "\n")

    monkeypatch.setattr(searching, "run", spoil)
    tuning = search(tmp_path / "a", metric="loss")
    assert tuning.trials["state"].tolist() == ["finished", "finished", "failed"]
    assert tuning.trials["error"][2] == "loss is missing or not finite"
    assert tuning.trials["learning-rate"].tolist() == [0.1, 0.3, 0.01]
    assert tuning.best.learning_rate == 0.1
    refused("no trial was finished; trial 0 failed: ", search, tmp_path / "b", grid=ONE,
            metric="loss", error=RunFailed)  # fmt: skip


def test_a_failed_trial_is_tried_again(tmp_path, each_run):
    """Only the run with the full disk. No other search may be at work in the folder."""

    def full(config):
        refused("another process is at work in", search, tmp_path)
        if name_of(config) == "001/seed-1":
            raise OSError("No space left on device")

    options, started = {"grid": TWO, "seeds": [0, 1]}, []
    each_run(full)
    failed = search(tmp_path, **options).trials.iloc[-1]
    assert (failed["trial"], failed["state"]) == (1, "failed")
    assert failed["error"].startswith("seed 1: OSError: No space left on device (test_tune.py")
    each_run(lambda config: started.append(name_of(config)))
    again = search(tmp_path, **options)
    assert started == ["001/seed-1"]
    assert again.trials["state"].tolist() == ["finished"] * 2
    assert again.trials["error"].tolist() == [""] * 2


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"validation_examples": 0}, {}, "nothing is held out of training; set validation"),
        ({}, {"grid": {"learning-rate": [1, 1.0]}}, "each once, got [1.0, 1.0]"),
        ({}, {"grid": {"local-test-fraction": [0.1, 0.2]}}, "local-test-fraction cannot be search"),
        ({}, {"grid": {"tct.bias": [True]}}, "tct.bias has no effect with method = fedavg"),
        ({}, {"grid": {"train-examples": [100, 5000]}}, "(with train-examples = 5000, seed = 0)"),
        ({}, {"metric": "client-loss-mean"}, "needs clients-per-evaluation of at least 1, got 0"),
        ({"clients_per_evaluation": 2}, {"metric": "client-loss-mean"}, "needs validation-clients"),
    ],
)
def test_what_cannot_work_is_refused_before_any_run(tmp_path, pretended, config, options, message):
    refused(re.escape(message), search, tmp_path / "s", SMALL.replace(**config), **options)
    assert pretended == []
    assert not (tmp_path / "s").exists()


def test_best_toml_is_run_on_the_test_set_after_the_same_training(tmp_path):
    straight = search(tmp_path / "s", seeds=[0, 1])
    fedntk("run", straight.folder / "best.toml", "--out", tmp_path / "r", "--quiet")
    final, first = read_run(tmp_path / "r"), straight.trials.iloc[0]
    assert final.config == straight.best.replace(out=str(tmp_path / "r"))
    assert final.config.evaluate_on == "test"
    assert final.config.learning_rate == first["learning-rate"]
    assert bits(final.folder) == bits(straight.folder / f"trials/{first['trial']:03d}/seed-0")


def test_the_command(tmp_path, pretended):
    conf, out = tmp_path / "conf.toml", ("--quiet", "--out")
    SMALL.replace(method="ntk-fl").save(conf)
    grid = "--grid=learning-rate=0.3,1e-6", "--grid=ntk-fl.steps=10;100,200"
    fedntk("tune", conf, *grid, *out, tmp_path / "a", "--set", "rounds=1", "--last", 1)
    best = Config.load(tmp_path / "a" / "best.toml")
    assert (best.learning_rate, best.rounds) == (0.3, 1)
    table = pd.read_csv(tmp_path / "a" / "report" / "trials.csv", dtype=str)
    assert set(table["ntk-fl.steps"]) == {"10", "100,200"}
    random = "--random=learning-rate=0.001:1:log", "--random=loss=mse,cross-entropy"
    fedntk("tune", conf, *random, "--trials", 3, *out, tmp_path / "b")
    assert len(folders(tmp_path / "b")) == 3
    for option in ("--grid", "--random"):
        said = fedntk("tune", conf, f"{option}=width", "--out", tmp_path / "c", fails=2)
        assert f"{option}: expected KEY=" in said
