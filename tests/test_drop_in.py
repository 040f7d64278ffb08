"""docs/drop-in.md: the app, its change to each method, and that all of them run."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch.utils.data import DataLoader, TensorDataset

from fedntk.clients import NTKFLClient
from fedntk.ntk import TCTModel, one_hot
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD, TCT, Strategy

from .conftest import FILE, ROOT

PAGE = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
STOCK = dict(FILE.findall(PAGE))
DIFFS = {name: STOCK.pop(name) for name in [*STOCK] if name.endswith(".diff")}
STRATEGIES: dict[str, type[FlowerStrategy]] = {
    "ntk_fl.diff": NTKFL, "cp_ntk_fl.diff": CPNTKFL, "scaffold.diff": SCAFFOLD, "tct.diff": TCT,
    "tct_statistics.diff": TCT,
}  # fmt: skip
NUM_CLIENTS = 10


def applied(diff: str, files: dict[str, str]) -> dict[str, str]:
    """Return files after a unified diff; every line that it shows must be there."""
    changed = dict(files)
    for part in re.split(r"^--- a/.*\n\+\+\+ b/", diff, flags=re.M)[1:]:
        name, hunks = part.split("\n", 1)
        old, new, done = files[name].splitlines(), [], 0
        for hunk in re.split(r"^@@ -", hunks, flags=re.M)[1:]:
            header, *lines = hunk.splitlines()
            first = int(header.partition(",")[0]) - 1
            shown = [line[1:] for line in lines if line[0] in " -"]
            assert old[first : first + len(shown)] == shown
            new += old[done:first] + [line[1:] for line in lines if line[0] in " +"]
            done = first + len(shown)
        changed[name] = "\n".join([*new, *old[done:]]) + "\n"
    return changed


def changed_by(name: str) -> dict[str, str]:
    """Return the app after a change, one of which goes on top of another."""
    before = changed_by("tct.diff") if name == "tct_statistics.diff" else STOCK
    return applied(DIFFS[name], before) if name else STOCK


@pytest.mark.parametrize("name", STRATEGIES)
def test_model_data_and_the_users_functions_stay_and_the_page_counts_what_changes(name):
    """Of TCT's evaluation those lines change that make the network."""
    lines = len(re.findall(r"^\+(?!\+\+ b/)", DIFFS[name], re.M))
    assert PAGE.split(DIFFS[name])[1].startswith(f"```\n\n{lines} lines added or changed.\n")
    changed = changed_by(name)
    assert changed["digits/task.py"] == STOCK["digits/task.py"]
    for file, definition in (("client", "def evaluate("), ("server", "def global_evaluate(")):
        before, after = (
            files[f"digits/{file}_app.py"].partition(definition)[2] for files in (STOCK, changed)
        )
        lost = set(before.splitlines()) - set(after.splitlines())
        assert len(lost) <= (3 if name.startswith("tct") else 0)


def test_clients_take_the_data_that_the_page_names():
    """Each line of the page's other example; all see the same five examples."""
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
    scans = [{"scan": x[i], "id": i, "diagnosis": int(y[i])} for i in range(5)]
    names = {
        "NTKFLClient": NTKFLClient, "Net": lambda: torch.nn.Linear(4, 3), "x": x, "y": y,
        "trainloader": loader, "testloader": loader, "dataset": scans,
    }  # fmt: skip
    clients = [eval(line, names) for line in example.splitlines()]  # noqa: S307
    assert len(clients) == 4
    for client in clients:
        assert torch.equal(client.inputs, x)
        assert torch.equal(client.test_targets, one_hot(y, 3))


def run_app(
    folder: Path, patch: pytest.MonkeyPatch, **changed: Any
) -> tuple[FlowerStrategy, Result]:
    """Run an app in this process, as its pyproject.toml says; the last strategy, and its result."""
    kept: list[tuple[FlowerStrategy, Result]] = []

    for kind in (FlowerStrategy, Strategy):

        def noted(self: Strategy, *args: Any, start: Any = kind.start, **options: Any) -> Result:
            kept.append((self, start(self, *args, **options)))
            return kept[-1][1]

        patch.setattr(kind, "start", noted)
    patch.syspath_prepend(str(folder))
    settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config, found = {**settings["config"], **changed}, {}
    for which, reference in settings["components"].items():
        module, _, attribute = reference.partition(":")
        found[which] = getattr(import_module(module), attribute)
    grid = LocalGrid(found["clientapp"], NUM_CLIENTS, config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        found["serverapp"](grid, Context(1, 0, {}, RecordDict(), config))
    return kept[-1]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("", "cp_ntk_fl.diff", "tct.diff")]


@pytest.mark.parametrize("name", ["ntk_fl.diff", "scaffold.diff", "tct_statistics.diff", *SLOW])
def test_the_app_runs_with_each_method(name, tmp_path, monkeypatch):
    """Chance is 0.1. Half of ten clients train, all of them in TCT's end; all of them evaluate."""
    for path, text in {"digits/__init__.py": "", **changed_by(name)}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    for module in [module for module in sys.modules if module.partition(".")[0] == "digits"]:
        del sys.modules[module]
    monkeypatch.chdir(tmp_path)
    strategy, result = run_app(tmp_path, monkeypatch)
    assert type(strategy) is STRATEGIES.get(name, FedAvg)
    rounds = {"tct.diff": 6, "tct_statistics.diff": 4}.get(name, 3)
    central = result.evaluate_metrics_serverapp
    assert sorted(central) == list(range(rounds + 1))
    assert central[rounds]["accuracy"] > 0.4
    assert central[rounds]["loss"] < central[0]["loss"]
    for server_round in range(1, rounds + 1):
        evaluated = result.evaluate_metrics_clientapp[server_round]
        trained = result.train_metrics_clientapp[server_round]
        assert set(evaluated) >= {"eval_loss", "eval_acc"}
        if name:
            second_stage = name.startswith("tct") and server_round > 3  # in which all take part
            trainers = NUM_CLIENTS if second_stage else NUM_CLIENTS // 2
            assert (trained["replies-accepted"], trained["replies-rejected"]) == (trainers, 0)
            assert evaluated["replies-accepted"] == NUM_CLIENTS
    assert result.evaluate_metrics_clientapp[rounds]["eval_acc"] > 0.4
    task = import_module("digits.task")
    if name.startswith("tct"):
        learned: torch.nn.Module = TCTModel.load(tmp_path / "final_model", task.Net())
    else:
        learned = task.Net()
        learned.load_state_dict(torch.load(tmp_path / "final_model.pt"))
    _, accuracy = task.test(learned, task.load_centralized_data(), "cpu")
    assert accuracy == central[rounds]["accuracy"]


@pytest.mark.parametrize(
    "example",
    sorted(p.parent for p in (ROOT / "examples").glob("*/pyproject.toml")),
    ids=lambda p: p.name,
)
def test_an_example_runs_and_saves_what_it_learned(example, tmp_path, monkeypatch):
    """In three rounds. Chance is 0.1. The app stands in the layout of Flower's baselines."""
    monkeypatch.chdir(tmp_path)
    for file in ("README.md", "__init__.py", "client_app.py", "server_app.py", "task.py"):
        assert (example / ("" if file == "README.md" else example.name) / file).is_file()
    _, result = run_app(example, monkeypatch, **{"num-server-rounds": 3, "bootstrap-rounds": 1})
    central = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
    assert central[-1] > 0.5
    assert len([*tmp_path.iterdir()]) == 1
