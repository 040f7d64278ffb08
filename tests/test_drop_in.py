"""docs/drop-in.md: the app, its change to each method, and that all of them run."""

import contextlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy import Strategy
from torch.utils.data import DataLoader, TensorDataset

from fedntk.clients import NTKFLClient
from fedntk.ntk import TCTModel, one_hot
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.engine.flwr_run import superlink, tool
from fedntk.strategies import (
    CPNTKFL,
    NTKFL,
    SCAFFOLD,
    TCT,
    BaseStrategy,
    FedPer,
)

from .conftest import ROOT

PAGE = (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
BLOCKS = {name: (language, text) for language, name, text in BLOCK.findall(PAGE)}
STOCK = {name: text for name, (language, text) in BLOCKS.items() if language != "diff"}
DIFFS = {name: text for name, (language, text) in BLOCKS.items() if language == "diff"}
STRATEGIES: dict[str, type[Strategy]] = {
    "ntk_fl.diff": NTKFL, "cp_ntk_fl.diff": CPNTKFL, "scaffold.diff": SCAFFOLD, "tct.diff": TCT,
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


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"digits/__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_model_data_and_the_users_functions_stay_and_the_page_counts_what_changes(name):
    """Of NTK-FL at most ten lines; of TCT's evaluation those change that make the network."""
    assert DIFFS.keys() == STRATEGIES.keys()
    lines = len(re.findall(r"^\+(?!\+\+ b/)", DIFFS[name], re.M))
    assert PAGE.split(DIFFS[name])[1].startswith(f"```\n\n{lines} lines added or changed.\n")
    assert lines <= (10 if name == "ntk_fl.diff" else 99)
    changed = applied(DIFFS[name], STOCK)
    assert changed != STOCK
    assert changed["digits/task.py"] == STOCK["digits/task.py"]
    for file, definition in (("client", "def evaluate("), ("server", "def global_evaluate(")):
        before, after = (
            files[f"digits/{file}_app.py"].partition(definition)[2] for files in (STOCK, changed)
        )
        lost = [line for line in before.splitlines() if line not in after.splitlines()]
        assert len(lost) <= (3 if name == "tct.diff" else 0)
        assert "return M" in after


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


# ------------------------------------------------------------------------------------ running


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Strategy, Result]]]:
    """Strategies that were started, with their results; modules of the app go in the end."""
    kept: list[tuple[Strategy, Result]] = []

    def noting(start: Any) -> Any:
        def noted(self: Strategy, *args: Any, **options: Any) -> Result:
            result: Result = start(self, *args, **options)
            kept.append((self, result))
            return result

        return noted

    for kind in (Strategy, BaseStrategy):
        monkeypatch.setattr(kind, "start", noting(kind.start))
    yield kept
    for name in [name for name in sys.modules if name.partition(".")[0] == "digits"]:
        del sys.modules[name]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an app in this process, as its pyproject.toml says."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    client, server = (
        getattr(import_module(module), name)
        for module, _, name in (
            settings["components"][which].partition(":") for which in ("clientapp", "serverapp")
        )
    )
    grid = LocalGrid(client, NUM_CLIENTS, settings["config"])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        server(grid, Context(1, 0, {}, RecordDict(), settings["config"]))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("", "cp_ntk_fl.diff", "tct.diff")]


@pytest.mark.parametrize("name", ["ntk_fl.diff", "scaffold.diff", *SLOW])
def test_the_app_runs_with_each_method(name, tmp_path, monkeypatch, started):
    """Chance is 0.1. Half of ten clients train, all of them in TCT's end; all of them evaluate."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = applied(DIFFS[name], STOCK) if name else STOCK
    run(write(tmp_path / "app", files), monkeypatch)
    strategy, result = started[-1]
    assert type(strategy) is STRATEGIES.get(name, FedAvg)
    rounds = 6 if name == "tct.diff" else 3
    central = result.evaluate_metrics_serverapp
    assert sorted(central) == list(range(rounds + 1))
    assert all(set(metrics) == {"accuracy", "loss"} for metrics in central.values())
    assert central[rounds]["accuracy"] > 0.4
    assert central[rounds]["loss"] < central[0]["loss"]
    for server_round in range(1, rounds + 1):
        evaluated = result.evaluate_metrics_clientapp[server_round]
        trained = result.train_metrics_clientapp[server_round]
        assert set(evaluated) >= {"eval_loss", "eval_acc"}
        if name:
            second_stage = name == "tct.diff" and server_round > 3  # in which all take part
            trainers = NUM_CLIENTS if second_stage else NUM_CLIENTS // 2
            assert trained["replies-accepted"] == trainers
            assert evaluated["replies-accepted"] == NUM_CLIENTS
            assert trained["replies-rejected"] == evaluated["replies-rejected"] == 0
    assert result.evaluate_metrics_clientapp[rounds]["eval_acc"] > 0.4
    task = import_module("digits.task")
    if name == "tct.diff":
        learned: torch.nn.Module = TCTModel.load(tmp_path / "app" / "final_model", task.Net())
    else:
        learned = task.Net()
        learned.load_state_dict(torch.load(tmp_path / "app" / "final_model.pt"))
    _, accuracy = task.test(learned, task.load_centralized_data(), "cpu")
    assert accuracy == central[rounds]["accuracy"]


def test_the_app_runs_with_a_model_for_each_client(tmp_path, monkeypatch, started):
    """The diff of SCAFFOLD with FedPer's names, and without the clients' evaluation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = applied(DIFFS["scaffold.diff"], STOCK)
    names = {
        "SCAFFOLDClient": "PersonalisedClient", "SCAFFOLD(": "FedPer(network=Net(), ",
        "import SCAFFOLD\n": "import FedPer\n",
    }  # fmt: skip
    for old, new in names.items():
        files = {name: text.replace(old, new) for name, text in files.items()}
    files["digits/client_app.py"] = files["digits/client_app.py"].partition("@app.evaluate()")[0]
    run(write(tmp_path / "app", files), monkeypatch)
    made, result = started[-1]
    assert type(made) is FedPer
    evaluated = result.evaluate_metrics_clientapp
    assert [metrics["replies-accepted"] for metrics in evaluated.values()] == [NUM_CLIENTS] * 3
    accuracies = [metrics["accuracy"] for metrics in evaluated.values()]
    assert accuracies[2] > max(accuracies[0], 0.3)  # chance is 0.1
    assert result.train_metrics_clientapp[3]["replies-rejected"] == 0


@pytest.mark.xdist_group("ray")
@pytest.mark.ray
@pytest.mark.slow
def test_a_changed_app_runs_with_flwr_run(tmp_path, monkeypatch):
    """Through SuperLink and Ray: the metrics of both evaluations are in what it prints."""
    monkeypatch.chdir(tmp_path)  # where the SuperLink's processes write the model
    app = write(tmp_path / "app", applied(DIFFS["ntk_fl.diff"], STOCK))
    with superlink(tmp_path / "flwr") as (_, environment):
        command = [
            *(tool("flwr"), "run", str(app), "fedntk", "--stream"),
            *("--run-config", "num-server-rounds=2"),
            *("--federation-config", "num-supernodes=4 client-resources-num-cpus=1"),
        ]
        done = subprocess.run(  # noqa: S603
            command, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stdout + done.stderr
    weights = torch.load(tmp_path / "final_model.pt")
    assert weights["fc.weight"].shape == (10, 64)
    for said in ("eval_acc", "'accuracy'", "'replies-accepted': 4"):
        assert said in done.stdout
    assert "rejected-" not in done.stdout
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME", "").startswith(str(tmp_path)):
                left.append(process.cmdline())
    assert left == []
