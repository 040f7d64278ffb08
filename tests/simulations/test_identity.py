"""Which object is it? One that may differ is another one: no run returns another's results."""

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedntk.simulations import Config, Method, RunFailed, compare, load_predictor, run, tune
from fedntk.simulations.data.load import load_data
from fedntk.simulations.report.results import read_run
from fedntk.strategies import SeededFedAvg

from ..conftest import output_of
from .outcomes import bits, refused

SMALL = {
    "num_clients": 4, "clients_per_round": 2, "clients_per_evaluation": 0, "rounds": 1,
    "train_examples": 100, "test_examples": 50, "learning_rate": 0.1, "progress": False,
}  # fmt: skip


class Net(nn.Module):
    """Differs in ways that neither `repr` nor the state dict shows."""

    def __init__(self, act=torch.relu, scale=1.0, residual=False):
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 10)
        self.act, self.residual = act, residual
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x):
        h = self.act(self.a(x.flatten(1))) * self.scale
        return self.b(h + h.sin() if self.residual else h)


def seeded(**options):
    torch.manual_seed(0)
    return Net(**options)


def hooked():
    net = seeded()
    net.a.register_forward_hook(lambda _, __, out: 2 * out)
    return net


def test_networks_that_look_alike_have_their_own_runs(tmp_path, monkeypatch):
    """Without a folder each call has one of its own; in one folder the second is refused."""
    monkeypatch.chdir(tmp_path)
    for name, net in (("plain", seeded()), ("activation", seeded(act=torch.sin))):
        result = run("fedavg", model=net, **SMALL)
        right = run("fedavg", model=net, out=f"right/{name}", again=True, **SMALL)
        assert bits(result.folder) == bits(right.folder)
        refused("resume=True", run, "fedavg", model=net, out="right/plain", **SMALL)
    assert len(list((tmp_path / "runs").iterdir())) == 2


LEAST = [0.0]


def above(scores, labels, least=LEAST):
    return float(least[0])


class Held:
    def __init__(self, value):
        self.value = value

    def __call__(self, scores, labels):
        return float(self.value)


def test_an_object_that_changed_between_two_calls_is_another(tmp_path):
    """What a closure, a global or a configuration holds; `resume` says that it is the same."""
    state = [1]
    config = Config(method="fedavg", metrics={"m": lambda s, y: state[0], "g": above})
    assert value_of_config(config, tmp_path) == (1, 0)
    assert value_of_config(config, tmp_path, resume=True) == (1, 0)
    state[0] = LEAST[0] = 2
    try:
        refused("resume=True", value_of_config, config, tmp_path)
        assert value_of_config(config, tmp_path, again=True) == (2, 2)
    finally:
        LEAST[0] = 0.0


def value_of_config(config, folder, **options):
    found = run(config, out=folder / "run", **{**SMALL, "rounds": 0, **options})
    return found.summary["metrics"]["m"], found.summary["metrics"]["g"]


def test_two_objects_of_one_name_in_a_comparison_are_two(tmp_path):
    """Also classes that a cell has defined twice."""
    kinds = [
        type("Mine", (SeededFedAvg,), {"__module__": "__main__", "factor": factor, "step": step})
        for factor, step in ((1.0, None), (2.0, None))
    ]

    def train_round(self, r):
        update = yield from SeededFedAvg.train_round(self, r)
        return replace(update, metrics={"train-loss": self.factor})

    for kind in kinds:
        kind.train_round = train_round
    configs = {"a": Method(kinds[0]), "b": Method(kinds[1])}
    table = compare(configs, out=tmp_path / "methods", **SMALL)
    losses = table[(table.metric == "train-loss") & (table["round"] == 1)].set_index("run").value
    assert losses.to_dict() == {"a": 1.0, "b": 2.0}
    refused("method = .*resume=True", compare, configs, out=tmp_path / "methods", **SMALL)
    assert len(compare(configs, out=tmp_path / "methods", resume=True, **SMALL)) == len(table)
    own = {name: Config(metrics={"m": Held(value)}) for name, value in (("a", 1), ("b", 2))}
    table = compare(own, out=tmp_path / "metrics", **{**SMALL, "rounds": 0})
    assert table[table.metric == "m"].set_index("run").value.to_dict() == {"a": 1.0, "b": 2.0}


MINE = """
from dataclasses import replace
import torch
from torch import nn
from fedntk.strategies import SeededFedAvg

def build(shape, classes):
    from helper import act
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), act(), nn.Linear(8, classes))

def value(scores, labels):
    import pack.inner
    return pack.inner.VALUE

def load():
    from helper import examples
    return examples()

class Mine(SeededFedAvg):
    def train_round(self, r):
        from pack import inner
        update = yield from super().train_round(r)
        return replace(update, metrics={"train-loss": inner.VALUE})
"""
HELPER = """
import numpy as np
from torch import nn
act = nn.{act}
def examples():
    return np.load("x.npy"), np.arange(60) % 3
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write a file, modules that it imports when it is used, and examples that it reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()

    def write(act="ReLU", value=1.0, scale=1.0):
        (tmp_path / "mine.py").write_text(MINE)
        (tmp_path / "helper.py").write_text(HELPER.format(act=act))
        (tmp_path / "pack" / "inner.py").write_text("from .deep import *\n")
        (tmp_path / "pack" / "deep.py").write_text(f"VALUE = {value}\n")
        np.save("x.npy", scale * np.random.default_rng(0).normal(size=(60, 64)))
        for path in tmp_path.rglob("*.py"):  # as copies that keep the time
            os.utime(path, (1e9, 1e9))

    write()
    yield write
    for name in ("helper", "pack", "pack.inner", "pack.deep", "mine"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["mine.py:value", "mine:value"])
def test_a_module_of_one_folder_is_not_taken_for_that_of_another(tmp_path, monkeypatch, place):
    """Files of the same names, in one process: each call has those of its own folder."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    measured = []
    for folder in (tmp_path / "a", tmp_path / "b", tmp_path / "a"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        text = f"VALUE = {float(folder.name == 'b')}\n"
        (folder / "aide.py").write_text(text)
        lines = "def value(scores, labels):\n    import aide\n    return aide.VALUE\n"
        (folder / "mine.py").write_text(lines)
        options = {**SMALL, "metrics": f"v={place}", "rounds": 0}
        measured.append(run("fedavg", out=folder / "run", again=True, **options).summary["metrics"])
    for name in ("aide", "mine"):
        sys.modules.pop(name, None)
    assert measured == [{"v": 0.0}, {"v": 1.0}, {"v": 0.0}]


@pytest.mark.parametrize("named", ["mine.py", "mine"])
@pytest.mark.parametrize(
    ("setting", "what", "change"),
    [
        ({"model": ":build"}, "network", {"act": "Tanh"}),
        ({"metrics": "v=:value", "rounds": 0}, "code of the metrics", {"value": 2.0}),
        ({"method": ":Mine"}, "code of the method", {"value": 2.0}),
    ],
)
def test_an_edit_of_a_module_that_a_file_imports_counts(
    tmp_path, files, named, setting, what, change
):
    """At any depth, in a function, in the same second; the new code is what runs then."""
    (key, place), *_ = setting.items()
    own = {**SMALL, "method": "fedavg", **setting, key: place.replace(":", f"{named}:")}
    method = own.pop("method")
    first = run(method, out="a", **own)
    before = bits(first.folder)
    assert run(method, out="a", **own).summary == first.summary
    files(**change)
    refused(f"the ({what}|code of the model) has changed since", run, method, out="a", **own)
    again = run(method, out="a", again=True, **own)
    files()
    right = run(method, out="b", **own)
    assert bits(right.folder) == before
    loss = [r.rounds[r.rounds.metric == "train-loss"].value.tolist() for r in (first, again)]
    changed = {
        "model": bits(again.folder) != before,
        "metrics": again.summary["metrics"] == {"v": 2.0},
        "method": loss == [[1.0], [2.0]],
    }
    assert changed[key]


def test_what_a_function_of_a_file_reads_is_read_again(tmp_path, files):
    config = Config(method="fedavg", dataset="mine.py:load", num_clients=2, rounds=1)
    options = {"progress": False, "train_examples": 0}
    first = run(config, out="a", **options)
    files(scale=3.0)
    refused("the data set has changed since", run, config, out="a", **options)
    again = run(config, out="a", again=True, **options)
    assert again.summary["data"] != first.summary["data"]
    refused(
        "data set has changed", run, Config.of_run("a"), out="a", **options
    ) if files() else None


def test_clients_have_the_data_and_the_network_of_their_run(tmp_path, files):
    """The same settings in the same folder, after the files were changed: no client has the old."""
    config = Config(method="fedavg", model="mine.py:build", out="a", **{
        k: v for k, v in SMALL.items() if k != "progress"})  # fmt: skip
    run(config, progress=False)
    files(act="Tanh")
    again = run(config, progress=False, again=True)
    right = output_of(
        sys.executable, "-c",
        "from fedntk.simulations import run, load_model\n"
        "r = run('a/config.toml', out='fresh', progress=False)\n",
    )  # fmt: skip
    assert right is not None
    assert bits(again.folder) == bits(Path("fresh"))


def test_other_weights_in_the_file_that_a_run_starts_from_count(tmp_path):
    first = run("fedavg", out=tmp_path / "a", **SMALL).folder / "model.safetensors"
    options = {"weights": str(first), "out": tmp_path / "b", **SMALL}
    run("fedavg", **options)
    save_file({name: 2 * tensor for name, tensor in load_file(first).items()}, first)
    refused("network at the start has changed since", run, "fedavg", **options)


def test_a_predictor_is_not_made_of_another_network(tmp_path):
    """Those that look alike compute other outputs; one that was changed since is noticed."""
    net = seeded()
    result = run("fedavg", model=net, out=tmp_path, **SMALL)
    assert load_predictor(result).predict(np.zeros((1, 1, 8, 8))).shape == (1, 10)
    refused("that was passed to the run", load_predictor, result.folder)
    assert load_predictor(tmp_path, model=seeded()).predict(np.zeros((1, 1, 8, 8))).shape == (1, 10)
    others = seeded(act=torch.sin), seeded(residual=True), seeded(scale=3.0), hooked()
    for other in others:
        refused("the network has changed", load_predictor, result, model=other)
    net.act = torch.sin
    refused("the network has changed", load_predictor, result)


def test_a_search_with_other_objects_or_edited_files_is_another(tmp_path, files):
    searched = {"grid": {"momentum": [0.0]}, "out": "t", **SMALL, "validation_examples": 20}
    tune("fedavg", model="mine.py:build", **searched)
    files(act="Tanh")
    refused("another search: source of .*mine.py:build", tune, "fedavg", model="mine.py:build",
            **searched)  # fmt: skip


def test_a_cut_off_run_with_an_object_says_how_to_go_on(tmp_path, caplog):
    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("fedavg", model=seeded(), out=tmp_path / "a", on_round=interrupt, **SMALL)
    assert f"out='{tmp_path}/a' and resume=True" in caplog.text
    resumed = run("fedavg", model=seeded(), out=tmp_path / "a", resume=True, **SMALL)
    whole = run("fedavg", model=seeded(), out=tmp_path / "b", **SMALL)
    assert bits(resumed.folder) == bits(whole.folder)
    refused("resume: expected out", run, "fedavg", model=seeded(), resume=True, **SMALL)


def test_a_run_that_is_read_and_not_run_says_so(tmp_path, capsys):
    options = {**SMALL, "progress": True, "out": tmp_path}
    run("fedavg", **options)
    assert "finished before" not in capsys.readouterr().err
    run("fedavg", **options)
    assert f"finished before: read from {tmp_path}" in capsys.readouterr().err
    run("fedavg", **{**options, "progress": False})
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------- what is written of a user's data

MARK = 1234.5678


def marked(n=60):
    """Rows that are found again in any file that holds one as numbers."""
    x = np.full((n, 4), MARK) + np.random.default_rng(0).normal(size=(n, 4)) * 1e-9
    x[:, 0] = np.arange(n)
    return pd.DataFrame(x, columns=list("abcd")).assign(label=np.arange(n) % 3)


def files_with_rows(*folders):
    kinds = [np.array([MARK], kind).tobytes()[-5:] for kind in ("<f4", "<f8")]
    paths = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    return [path for path in paths if any(kind[:4] in path.read_bytes() for kind in kinds)]


@pytest.mark.parametrize(
    "own", [{}, {"method": "tct", "tct": {"bootstrap_rounds": 0}, "rounds": 3}]
)
def test_rows_that_were_passed_are_in_no_file(tmp_path, monkeypatch, own):
    """Nor is anything of them outside the run's folder, which only its owner can read."""
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("HOME", str(home))
    options = {**SMALL, "train_examples": 0, "test_examples": 0, "standardise": False, **own}
    method = options.pop("method", "fedavg")
    found = run(method, data=marked(), out=tmp_path / "run" / "a", **options)
    assert files_with_rows(tmp_path) == []
    assert not home.exists() or list(home.rglob("*")) == []
    for path in [found.folder, *found.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert run(method, data=marked(), out=found.folder, **options).summary == found.summary
    other = marked().assign(d=0.0)
    refused(
        "other settings: dataset = 'passed:", run, method, data=other, out=found.folder, **options
    )


def test_a_folder_in_hugging_faces_form_leaves_no_copy(tmp_path):
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = sorted(cache.rglob("*"))
    marked().to_parquet(tmp_path / "train.parquet")
    data = load_data(Config(dataset=f"hf:{tmp_path}", num_clients=2))
    assert data.x_train[0, 1] == pytest.approx(MARK)
    assert sorted(cache.rglob("*")) == before


def test_passed_examples_are_those_of_the_call(tmp_path):
    """Arrays that the caller changes afterwards; another process is told to pass them again."""
    x, y = marked().to_numpy()[:, :4].copy(), np.arange(60) % 3
    options = {**SMALL, "train_examples": 0, "test_examples": 0}
    found = run("fedavg", data={"train": (x, y), "test": (x, y)}, out=tmp_path, **options)
    before = load_data(found.config).x_train.copy()
    x[:] = 0
    np.testing.assert_array_equal(load_data(found.config).x_train, before)
    told = output_of(
        sys.executable, "-c",
        "import sys\nfrom fedntk.simulations import ConfigError, run\n"
        f"try: run('{tmp_path}/config.toml', rounds=3, progress=False)\n"
        "except ConfigError as error: print(error)",
    )  # fmt: skip
    assert "pass them again as data=..." in told
    assert read_run(tmp_path).summary == found.summary


@pytest.mark.xdist_group("ray")
@pytest.mark.ray
def test_on_ray_rows_are_in_the_runs_folder_only_while_it_runs(tmp_path):
    """A run that fails after its last round but one leaves none, and goes on without Ray."""
    seen = []

    def look(record):
        (file,) = (tmp_path / "ray").glob("passed.npz")
        seen.append(stat.S_IMODE(file.stat().st_mode))
        if record["round"] == 2:
            raise RuntimeError("enough")

    options = {**SMALL, "train_examples": 0, "test_examples": 0, "rounds": 3}
    with pytest.raises(RunFailed, match="enough"):
        run("fedavg", data=marked(), out=tmp_path / "ray", engine="ray", on_round=look, **options)
    assert set(seen) == {0o600}
    assert not (tmp_path / "ray" / "passed.npz").exists()
    resumed, local = (
        run("fedavg", data=marked(), out=tmp_path / folder, engine="local", **options)
        for folder in ("ray", "local")
    )
    assert bits(resumed.folder) == bits(local.folder)
