"""Methods as objects, of other packages, of users' files and of a notebook's cells."""

import inspect
import pickle
import re
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from typer.testing import CliRunner

from fedntk.clients import SGDClient
from fedntk.ntk.options import Declared, option, part
from fedntk.simulations import Config, ConfigError, Method, RunFailed, compare, load_predictor, run
from fedntk.simulations.cli import app
from fedntk.simulations.config.metrics import BUILT_IN
from fedntk.simulations.engine.building import load_setup, make_client, make_strategy
from fedntk.simulations.engine.server_app import prepare
from fedntk.simulations.methods import all_methods, own_methods
from fedntk.strategies import SeededFedAvg, Update

from .outcomes import bits, refused
from .settings import FEDAVG, SETTINGS


def test_what_other_packages_name_wrongly_is_left_out(monkeypatch, caplog):
    """What they name well is used as the page on adding a method says."""
    named = {
        "missing": ("math:NOTHING", "AttributeError"),
        "number": ("math:pi", "expected an object of a subclass of Method, got 3.14"),
        "twice": ("fedntk.simulations.methods.tct:METHOD", "is a method 'tct' already"),
    }
    entries = [EntryPoint(name, value, "fedntk.methods") for name, (value, _) in named.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    assert all_methods.__wrapped__() == own_methods()
    for said, (name, (value, reason)) in zip(caplog.messages, named.items(), strict=True):
        assert f"method {name} ({value}) is left out: " in said
        assert reason in said


class ToyAvg(SeededFedAvg):
    """FedAvg with one option more."""

    depth: int = option("how deep", default=2, at_least=1, at_most=9)


class Toy(Method):
    name = "toy-avg"
    strategy_class = ToyAvg


def test_a_method_has_a_name_in_kebab_case():
    with pytest.raises(ValueError, match="name: expected words in kebab-case, got 'Toy_Avg'"):
        type("Odd", (Toy,), {"name": "Toy_Avg"})()


TOY = Toy()


def test_an_option_of_one_line_is_known_everywhere(tmp_path):
    """In the signature, the TOML table, what flwr run carries, checkpoints and the list."""
    assert inspect.signature(ToyAvg).parameters["depth"].default == 2
    with pytest.raises(ValueError, match="expected depth = 2, got 3"):
        ToyAvg().load_state_dict(ToyAvg(depth=3).state_dict())
    place = f"{__name__}:TOY"
    (tmp_path / "toy.toml").write_text(f'method = "{place}"\n[toy-avg]\ndepth = 4\n')
    config = Config.load(tmp_path / "toy.toml")
    assert Config.parse(config.run_config()) == config
    assert config.chosen_method is TOY
    assert Config.parse({"method": place, "toy-avg.depth": 5}).settings.depth == 5
    with pytest.raises(ConfigError, match=r"toy-avg\.depth: expected at most 9, got 10"):
        config.replace(toy_avg={"depth": 10})
    own = ["toy-avg.depth"]
    assert [line.split(" = ")[0] for line in Config.describe(place)] == own
    assert Config.describe(place)[-1] == "toy-avg.depth = 2: how deep"
    assert make_strategy(load_setup(config)).depth == config.settings.depth == 4
    assert "toy-avg.depth" not in config.replace(method="fedavg").values()


def test_tct_has_an_optimizer_for_each_of_its_stages():
    setup = load_setup(Config(method="tct", optimizer="adam", tct={"optimizer": "gd"}))
    stages = make_client(setup, 0, {}).sgd.optimizer, make_strategy(setup).optimizer
    assert stages == ("adam", "gd")


OWN_MODELS = sorted(n for n, own in own_methods().items() if own.headline.startswith("client"))


@pytest.mark.parametrize("method", OWN_MODELS)
def test_the_model_of_a_client_is_what_the_client_evaluated(tmp_path, method):
    """Of a finished run, by another process's strategy."""
    config = Config(
        method=method, num_clients=4, clients_per_round=4, clients_per_evaluation=4, rounds=2,
        learning_rate=0.1, out=str(tmp_path), local_test_fraction=0.3, metrics="f1-macro,auc",
        **{**SETTINGS[method], "projection": 0},
    )  # fmt: skip
    result = run(config, progress=False)
    newest = result.clients[result.clients["round"] == 2]
    every = newest.pivot(index="partition", columns="metric", values="value")
    reported = every["accuracy"]
    assert set(reported.index) == set(range(4))
    setup, first = load_setup(result.config), load_predictor(result.folder)
    for client in range(4):
        _, kept = setup.split.train_and_test(client, setup.config)
        x, y = setup.data.x_train[kept], setup.data.y_train[kept]
        predictor = load_predictor(result.folder, client=client)
        own = predictor.evaluate(x, y)
        assert own.accuracy == pytest.approx(reported[client], abs=1e-12)
        assert own.loss != first.evaluate(x, y).loss
        scores = predictor.predict(x), predictor.inputs.labels(y)
        for name in ("f1-macro", "auc"):
            value = BUILT_IN[name](*scores)
            assert every.loc[client, name] == pytest.approx(value, abs=1e-6)


def test_who_was_mixed_from_whom_is_written_of_each_round(finished_run):
    files = sorted((finished_run("weighted-fedavg").folder / "details").iterdir())
    assert [path.name for path in files] == [f"similarity-00000{i}.npz" for i in (1, 2, 3)]
    with np.load(files[2]) as saved:
        assert saved["server_round"] == 3
        assert saved["weights"].sum(1) == pytest.approx(np.ones(4))


def test_the_app_masks_weights_if_asked(tmp_path):
    """The mean differs by roundings of float32, so the loss hardly does."""
    small = Config(
        method="fedavg", num_clients=5, clients_per_round=4, clients_per_evaluation=0,
        train_examples=150, test_examples=50, learning_rate=0.1,
    )  # fmt: skip
    masked = {"secure": True}
    plain, secure = (
        run(small, **own, rounds=2, out=tmp_path / name, progress=False)
        for name, own in (("plain", {}), ("masked", masked))
    )
    losses = [own.curve("loss").to_numpy() for own in (plain, secure)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"secure: expected clients-per-round"):
        small.replace(**masked, clients_per_round=2)


@pytest.mark.parametrize("inner", sorted(all_methods().keys() - {"fed-ensemble"}))
def test_an_ensemble_is_made_of_any_method_or_says_why_not(inner):
    members = {"num_models": 2, "inner": inner}
    model = "linear" if inner == "glm" else FEDAVG.model
    config = FEDAVG.replace(model=model, rounds=20, clients_per_round=8, tct={"normalise": False})
    refusal = ""
    try:
        prepare(config.replace(method="fed-ensemble", fed_ensemble=members))
    except ConfigError as error:
        refusal = str(error)
    assert re.fullmatch(r"|.*(work within a FedEnsemble|shows all clients|: network: ).*", refusal)
    assert refusal == "" or inner not in ("fedavg", "scaffold", "ntk-fl", "cp-ntk-fl", "tct")


FEW = {
    "num_clients": 6, "clients_per_round": 3, "clients_per_evaluation": 2, "rounds": 2,
    "train_examples": 200, "progress": False,
}  # fmt: skip
FILE = """
from __future__ import annotations
from fedntk.clients import SGDClient
from fedntk.ntk.options import option
from fedntk.strategies import SeededFedAvg
import beside

class HalfClient(SGDClient):
    share: float = option("of the change that is kept", default=0.5, at_least=0)

    def step_train(self, parameters, config):
        new, number, metrics = super().step_train(parameters, config)
        pairs = zip(new, parameters, strict=True)
        return [old + self.share * (own - old) for own, old in pairs], number, metrics

class HalfFL(SeededFedAvg):
    client = "HalfClient"
"""


class Mine(SeededFedAvg):
    """FedAvg."""


class MyClient(SGDClient):
    """SGD with an option."""

    depth: int = option("how deep", default=2, at_least=1)


def without_an_update(self, r):
    yield from r.ask(r.weights)


def with_a_bare_yield(self, r):
    yield r.ask(r.weights)


def without_a_yield(self, r):
    return Update(r.ask(r.weights))


FAULTY = {
    "Faulty.train_round: expected an Update, got NoneType; end it by": without_an_update,
    "expected an exchange, got generator; write uploads = yield from": with_a_bare_yield,
    "uploads: expected Uploads, got a generator; write uploads = yield from": without_a_yield,
}


class Layers(Declared):
    """A part with a number that must be given."""

    width: int = option("how wide", above=0)
    depth: int = option("how deep", default=2)


class Layered(SeededFedAvg):
    """FedAvg with parts."""

    first: Layers = part("always there", default=Layers(width=5, depth=3))
    second: Layers | None = part("there if it is set", default=None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory with a file of a method, which imports another beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "beside.py").touch()
    return tmp_path


def test_classes_of_a_cell_run_beside_files_and_names(folder):
    """Without a step of its own the class is FedAvg; half a change is not."""
    table = compare(
        {"cell": Method(Mine, MyClient), "FedAvg": "fedavg", "file": "mine.py:HalfFL"},
        out=folder, mine={"depth": 3}, half_fl={"share": 0.25}, **FEW,
    )  # fmt: skip
    assert table.method.unique().tolist() == ["mine", "fedavg", "half-fl"]
    folders = [folder / name / "seed-0" for name in ("cell", "FedAvg", "file")]
    cell, plain, file = map(bits, folders)
    assert cell == plain != file
    assert Config.of_run(folders[0]).settings.depth == 3
    assert Config.of_run(folders[0]).method.partition("#")[0] == f"{__name__}:Mine,MyClient"


def test_the_parts_of_a_strategy_are_tables():
    own = Config(method=Layered, layered={"second": {"width": 4}})
    first, second = own.settings.first, own.settings.second
    assert (first.width, first.depth, second.width, second.depth) == (5, 3, 4, 2)
    assert Config(method=Layered).settings.second is None
    refused(r"layered\.second\.width: expected more than 0, got 0", own.replace,
            layered={"second": {"depth": 1, "width": 0}})  # fmt: skip
    refused(r"layered\.second\.width: expected more than 0", Config, method=Layered,
            layered={"second": True})  # fmt: skip


def test_a_method_in_a_file_is_found_from_elsewhere(folder, monkeypatch):
    """The setting has the whole path: a run goes on, and its model is read, in any directory."""
    run("mine.py:HalfFL", half_fl={"share": 0.25}, out="run", **FEW)
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    config = Config.of_run(folder / "run")
    assert config.method == f"{folder}/mine.py:HalfFL"
    assert config.replace(out="").folder.name.startswith("half-fl-digits-0-")
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own
    assert load_predictor(folder / "run")
    done = CliRunner().invoke(app, f"run --resume {folder}/run --set rounds=3 --quiet".split())
    assert "after round 3" in done.output
    whole = run(config, rounds=3, out="whole", progress=False)
    assert bits(whole.folder) == bits(folder / "run")
    (folder / "mine.py").write_text(FILE.replace("0.5", "0.75"))  # which is loaded again
    done = CliRunner().invoke(app, ["settings", f"{folder}/mine.py:HalfFL"])
    assert done.output == "half-fl.share = 0.75: of the change that is kept\n"


def test_an_error_in_a_file_has_its_line(folder):
    line = FILE.splitlines().index("        pairs = zip(new, parameters, strict=True)") + 1
    (folder / "mine.py").write_text(FILE.replace("zip(new,", "zip(nwe,"))
    place = rf"NameError: name 'nwe' is not defined \(mine.py, line {line}\)"
    refused(place, run, "mine.py:HalfFL", out="run", error=RunFailed, **FEW)
    command = ["run", "--set=method=mine.py:HalfFL", "--set=rounds=1", "--quiet", "--again"]
    short, long = (CliRunner().invoke(app, [*command, *more]) for more in ((), ("--debug",)))
    assert [done.exit_code for done in (short, long)] == [1, 1]
    assert ["in failing_as_run" in done.output for done in (short, long)] == [False, True]
    for message, train_round in FAULTY.items():
        faulty = type("Faulty", (SeededFedAvg,), {"train_round": train_round})
        refused(message, run, faulty, error=RunFailed, **FEW)
    (folder / "mine.py").write_text("x = 1\nnwe\n")
    refused(r"imported: .*'nwe' is not defined \(mine.py, line 2\)", run, "mine.py:HalfFL")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fedavgg", "expected one of .*; did you mean 'fedavg'"),
        ("nowhere.py:Mine", "there is no file .*nowhere.py"),
        ("mine.py:HalfFl", "mine.py has no HalfFl; did you mean 'HalfFL'"),
        ("mine.py:HalfClient", "expected a class derived from Strategy or SeededFedAvg, got"),
        ("__main__:Gone", "run the cell or script that defines it again"),
        (type("SCAFFOLD", (SeededFedAvg,), {}), "'scaffold' is a method or a setting .*; rename"),
        (type("Momentum", (SeededFedAvg,), {}), "'momentum' is a method or a setting already"),
        (type("Alone", (SeededFedAvg,), {"client": "Gone"}), "client = 'Gone' is neither beside"),
    ],
)
def test_what_is_no_method_is_refused_with_a_cure(folder, method, message):
    refused(message, run, method, **FEW)


def test_what_other_processes_cannot_import_is_refused_before_the_run(folder):
    """Also what they would find to be another method."""
    local = type("Local", (SeededFedAvg,), {"__module__": "__main__"})
    for method in (local, Method(Mine, headline="loss")):
        refused("cannot import it; put it into a file, such", run, method, engine="ray", **FEW)
    assert not (folder / "runs").exists()
