"""What a user did is named, with what to do, before any work is done."""

import contextlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedntk.clients import MaskedWeights, SGDClient, client_app
from fedntk.simulations import Config, OwnData, compare, load_predictor, run
from fedntk.simulations.data.load import load_data, load_own
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import SecureAggregation, SeededFedAvg

from .outcomes import refused
from .test_cli import fedntk
from .test_identity import SMALL

X, Y = np.eye(12, 4, dtype=np.float32), np.arange(12) % 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.npz", "expected an npz file of x and y, as numpy.savez writes it"),
        ("a.parquet", "data-path: .*a.parquet: "),
        ("a.npy", "expected a csv, parquet or npz file, or a folder with one"),
        ("a.xlsx", "expected a csv, parquet or npz file, or a folder with one"),
    ],
)
def test_what_is_no_file_of_examples_is_said_to_be_none(tmp_path, name, message):
    path = tmp_path / name
    path.write_bytes(b"a,b,label\n1,2,0\n")
    if name.endswith("npy"):
        np.save(path, X)
    refused(message, load_own, str(path), load_data(Config()), 99)
    words = np.array([{"a": 1}], object)
    np.savez(tmp_path / "objects.npz", x=words, y=words, x_train=words, y_train=words)
    objects = "arrays of numbers or texts, got Python objects"
    refused(objects, load_own, str(tmp_path / "objects.npz"), load_data(Config()), 99)
    refused(objects, load_data, Config(dataset=f"npz:{tmp_path}/objects.npz"))


def test_secure_aggregation_without_the_mod_names_the_mod(caplog):
    """With it, the same federation runs."""
    for mods, said in (([], True), ([MaskedWeights(only_masked=False)], False)):
        app = client_app(lambda context: SGDClient(nn.Linear(4, 3), X, Y), mods=mods)
        strategy = SeededFedAvg(
            secure=SecureAggregation(), min_available_nodes=4, min_train_nodes=4
        )
        first = ArrayRecord(nn.Linear(4, 3).state_dict())
        caplog.clear()
        failing = pytest.raises(RuntimeError) if said else contextlib.nullcontext()
        with failing:
            strategy.start(LocalGrid(app, 4, {}), first, num_rounds=1)
        assert ("mods=[MaskedWeights()]" in caplog.text) == said
        assert "arrays, got 0" not in caplog.text


def test_a_comparison_takes_tables_of_settings(tmp_path):
    configs = {"a": {"method": "fedavg", "momentum": 0.5}, "b": {"method": "fedavg"}}
    table = compare(configs, out=tmp_path, **{**SMALL, "rounds": 0})
    assert table.run.unique().tolist() == ["a", "b"]
    assert Config.of_run(tmp_path / "a" / "seed-0").momentum == 0.5
    for other in (3, None, ["fedavg"], SeededFedAvg()):
        refused("x: config: expected a Config, a dict of settings, a TOML", compare, {"x": other})


def test_a_predictor_of_what_is_no_run_says_what_it_is(tmp_path):
    table = compare({"a": "fedavg"}, out=tmp_path / "c", **{**SMALL, "rounds": 0})
    assert len(table)
    one = tmp_path / "c" / "a" / "seed-0"
    no_run = FileNotFoundError
    refused(
        f"name one of the runs in it, such as {one}", load_predictor, tmp_path / "c", error=no_run
    )
    load_predictor(one).save(tmp_path / "saved")
    refused("NetworkPredictor.load", load_predictor, tmp_path / "saved", error=no_run)
    refused(
        "the folder of a run, got .*nowhere$", load_predictor, tmp_path / "nowhere", error=no_run
    )


DATES = {
    "iso": ["2024-01-02", "2024-02-03"] * 6,
    "with a time": ["2024-01-02 03:04:05", "2024-01-02T03:04:06"] * 6,
    "of a country": ["3.1.2024", "04.02.24"] * 6,
    "slashes": ["1/2/2024", "12/31/1999"] * 6,
    "of pandas": pd.date_range("2024-01-01", periods=12),
    "words": ["mild", "1-2 cups", "2-3"] * 4,
    "spans": pd.to_timedelta(np.arange(12), "D"),
}


@pytest.mark.parametrize("kind", DATES)
def test_words_and_dates_are_for_a_schema(kind):
    frame = pd.DataFrame({"when": DATES[kind], "a": np.arange(12.0), "label": Y})
    refused(r"got others in when \(.+\); say in a schema what words and dates", OwnData(frame).read)


def by_hand(x):
    powers = (x - x.max(1, keepdim=True).values).exp()
    return powers / powers.sum(1, keepdim=True)


class Ends(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.body, self.end = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), end

    def forward(self, x):
        return self.end(self.body(x))


PROBABILITIES = {
    "module": nn.Softmax(1), "function": lambda x: x.softmax(-1), "logarithm": nn.LogSoftmax(1),
    "sigmoid": torch.sigmoid, "by hand": by_hand, "viewed": lambda x: x.softmax(1).view(-1, 10),
    "logarithm by hand": lambda x: x - x.logsumexp(1, keepdim=True),
    "exponential": lambda x: x.log_softmax(1).exp(),
}  # fmt: skip
SCORES = {
    "relu": torch.relu, "tanh": torch.tanh, "scaled": lambda x: x / 3, "times": lambda x: 2 * x,
    "attention inside": lambda x: x.softmax(1) @ torch.ones(10, 10) + x,
}  # fmt: skip


@pytest.mark.parametrize("end", PROBABILITIES)
def test_a_network_that_ends_in_probabilities_is_refused_for_cross_entropy(tmp_path, end):
    """In a run and by clients; with the loss mse they are what is wanted."""
    network = Ends(PROBABILITIES[end])
    options = {"model": network, "out": tmp_path, **SMALL}
    refused("got probabilities, or their logarithms; leave out", run, "fedavg", **options)
    assert list(tmp_path.iterdir()) == []
    x, y = torch.randn(5, 64), torch.arange(5)
    refused("got probabilities, or their", SGDClient, network, x, y, error=ValueError)
    SGDClient(network, x, y, loss="mse")


@pytest.mark.parametrize("end", SCORES)
def test_networks_with_scores_are_taken(end):
    SGDClient(Ends(SCORES[end]), torch.randn(5, 64), torch.arange(5))
    with torch.no_grad():  # solved least squares: scores that sum to one are no probabilities
        solved = Ends(nn.Identity())
        solved.body[1].weight.zero_()
        solved.body[1].bias.fill_(0.1)
    SGDClient(solved, torch.randn(5, 64), torch.arange(5))


def test_commands_take_a_method_and_the_files_that_come_with_fedntk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ["--set=rounds=1", "--quiet", "--out=a"]
    for name in ("fedavg", "fedavg_digits.toml", "simulations/conf/fedavg_digits.toml"):
        assert "after round 1" in fedntk("run", name, *few, "--again")
    assert "did you mean 'fedavg'" in fedntk("run", "fedavgg", fails=2)
    Path("fedavg_digits.toml").write_text(
        "method = 'ntk-fl'\nrounds = 0\n"
    )  # one's own comes first
    assert Config.load("fedavg_digits.toml").method == "ntk-fl"


def test_quiet_is_quiet(tmp_path, capfd):
    """Also of the bars of other libraries."""
    from PIL import Image

    for i, (part, kind) in enumerate((p, k) for p in ("train", "test") for k in "ab"):
        (tmp_path / part / kind).mkdir(parents=True)
        for j in range(6):
            Image.new("L", (8, 8), 10 * i + j).save(tmp_path / part / kind / f"{j}.png")
    options = {**SMALL, "train_examples": 0, "test_examples": 0, "num_clients": 2}
    for partition in ("iid", "dirichlet", "pathological"):
        run(
            "fedavg",
            dataset=f"hf:{tmp_path}",
            out=tmp_path / partition,
            partition=partition,
            **options,
        )
    assert capfd.readouterr().err == ""
