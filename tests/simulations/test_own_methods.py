"""Methods of users' own: classes of a cell, of a file, of a module; their errors have a place."""

import pickle
import sys

import pytest
from typer.testing import CliRunner

from fedntk.clients import SGDClient
from fedntk.ntk.options import Declared, option, part
from fedntk.simulations import Config, Method, RunFailed, compare, load_predictor, run
from fedntk.simulations.cli import app
from fedntk.strategies import SeededFedAvg, Update

from .outcomes import bits, refused

SMALL = {
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
        out=folder, mine={"depth": 3}, half_fl={"share": 0.25}, **SMALL,
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
    run("mine.py:HalfFL", half_fl={"share": 0.25}, out="run", **SMALL)
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
    refused(place, run, "mine.py:HalfFL", out="run", error=RunFailed, **SMALL)
    command = ["run", "--set=method=mine.py:HalfFL", "--set=rounds=1", "--quiet", "--again"]
    short, long = (CliRunner().invoke(app, [*command, *more]) for more in ((), ("--debug",)))
    assert [done.exit_code for done in (short, long)] == [1, 1]
    assert ["in failing_as_run" in done.output for done in (short, long)] == [False, True]
    for message, train_round in FAULTY.items():
        faulty = type("Faulty", (SeededFedAvg,), {"train_round": train_round})
        refused(message, run, faulty, error=RunFailed, **SMALL)
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
    refused(message, run, method, **SMALL)


def test_what_other_processes_cannot_import_is_refused_before_the_run(folder):
    """Also what they would find to be another method."""
    local = type("Local", (SeededFedAvg,), {"__module__": "__main__"})
    for method in (local, Method(Mine, headline="loss")):
        refused("cannot import it; put it into a file, such", run, method, engine="ray", **SMALL)
    assert not (folder / "runs").exists()
