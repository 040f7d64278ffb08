"""Runs with noise: what they may use, and that nothing else of the examples is in their results."""

import json
import tomllib

import numpy as np
import pytest

from fedntk.ntk.options import parameters_of, parts_of
from fedntk.simulations import Config, OwnData, run
from fedntk.simulations.config.private import HARMLESS_SETTINGS, keyed
from fedntk.simulations.errors import RunFailed, Stopped
from fedntk.simulations.report.report import write_report
from fedntk.strategies import OneExchange

from .outcomes import bits, refused

EXACT = {"auto_ridge": False, "validation_share": 0.0}
SUMS = {
    "method": "one-exchange", "standardise": False, "clients_per_evaluation": 0, "rounds": 1,
    "one_exchange": {"noise": {"epsilon": 3.0}, "sums": EXACT},
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"standardise": True}, "standardise: .* mean and standard deviation .* add moments to"),
        ({"dataset": "csv:patients.csv"}, "dataset: .* names of columns and classes"),
        ({"model": "mynet.py:build"}, "model: .* add model to public, got public = 'moments'"),
        ({"weights": "of-another-run.safetensors"}, "weights: .* add weights to public"),
        ({"validation_examples": 20}, "validation-examples: .* expected 0, got 20"),
        ({"validation_clients": 2}, "validation-clients: .* expected 0, got 2"),
        ({"centre": True}, "centre: (one-exchange cannot have it|with noise .* expected None)"),
        ({"attack": "mimic", "liars": 2}, "attack: .* expected 'none', got 'mimic'"),
        ({"evaluate_on": "validation", "private_test": True, "local_test_fraction": 0.2},
         "evaluate-on: .* expected 'test', got 'validation'"),
        ({"public": "moments,ages"}, "public: expected words of schema: .* got 'ages'"),
    ],
)  # fmt: skip
def test_with_noise_a_run_uses_only_what_is_on_the_list(given, said):
    if said.startswith("model"):
        given = {**given, "public": "moments"}
    refused(said, Config, **(SUMS | given))


def test_what_an_owner_says_to_be_public_is_used_and_named():
    """Sums of rows that depend on others are refused."""
    Config(**SUMS | {"standardise": True, "public": "moments"})
    own = {"dataset": "csv:patients.csv", "public": "schema", "test_share": 0.0}
    Config(**SUMS | own | {"partition": "iid"})
    Config(**SUMS | own | {"partition": "natural", "client_column": "hospital"})
    refused("sampling-rate: .* expected 1.0, got 0.5", Config, **SUMS | {"sampling_rate": 0.5})
    more = {"one_exchange": {"noise": {"epsilon": 1.0}, "sums": {"validation_share": 0.0}}}
    refused("auto-ridge: .* expected False", Config, **SUMS | more)


def test_every_name_on_the_list_is_a_setting_or_an_option():
    """A name that is none would permit an option of that name that someone adds later."""
    known = {*Config.options(), *parts_of(Config)}
    method = Config(method="one-exchange").chosen_method
    for kind in (method.strategy_class, method.client_class, method.settings):
        known |= parameters_of(kind).keys()
    assert known >= HARMLESS_SETTINGS


MEASURED = (
    *("accuracy", "loss", "best", "to-target", "machine", "threads", "peak-memory", "seconds"),
    *("peak-memory-clients", "seconds-clients", "seconds-server"),
)
KEYED = "data", "split"


def facts(value):
    """What a summary says, apart from what follows from sums with noise, and keyed names."""
    return {key: part for key, part in value.items() if key not in (*MEASURED, *KEYED)}


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ({}, "partition: .* expected 'given' or 'natural' or 'iid', got 'dirichlet'"),
        ({"test_share": 0.2}, "test-share: .* expected 0.0, got 0.2"),
        ({"local_test_fraction": 0.1}, "local-test-fraction: .* expected 0, got 0.1"),
        ({"train_examples": 50}, "train-examples: .* expected 0, got 50"),
        ({"private_test": True}, "private-test: .* expected False, got True"),
        ({"partition": "natural", "owners": 3}, "owners: .* expected 0, got 3"),
        ({"max_examples": 20}, "max-examples: .* expected 0, got 20"),
    ],
)
def test_of_a_users_examples_none_are_drawn_by_what_the_others_are(drawn, said):
    """With one more, or with another label, a client would have others, and the sums move."""
    own = {"dataset": "csv:patients.csv", "public": "schema", "test_share": 0.0}
    start = {} if "got 'dirichlet'" in said else {"partition": "iid"}
    refused(said, Config, **SUMS | own | start | drawn)


class Mine(OneExchange):
    client = "ClosedFormClient"


def test_a_method_that_is_derived_from_a_private_one_has_its_list():
    own = {"noise": {"epsilon": 0.5}, "sums": EXACT}
    refused("standardise: the noise does not cover", Config, method=Mine, mine=own,
            clients_per_evaluation=0)  # fmt: skip


def test_noise_cannot_be_drawn_again(tmp_path):
    """Two runs of one seed have different models."""
    x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 2
    data, models = OwnData((x, y), test=(x[:9], y[:9])), []
    config = SUMS | {"public": "schema", "num_clients": 3, "partition": "iid", "test_share": 0.0}
    for name in "ab":
        run(config | {"rounds": 1}, data=data, out=tmp_path / name, progress=False, width=4)
        models.append(bits(tmp_path / name))
    assert models[0] != models[1]


def test_what_may_have_been_released_is_not_released_again_without_a_checkpoint(tmp_path):
    config = Config(**SUMS | {"out": str(tmp_path), "num_clients": 4, "width": 8})

    def cut_off(record):
        if record["round"]:
            raise Stopped("cut off")

    with pytest.raises(RunFailed):
        run(config, progress=False, on_round=cut_off)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(b"damaged")
    refused("a second release adds to epsilon", run, config, progress=False)


def test_two_data_sets_that_differ_by_one_example_leave_the_same_traces(tmp_path):
    """Apart from the model with noise, and what is measured of it on test examples.

    The one example has an extreme value and is the only one of its client's class.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), np.arange(60) % 2
    test, labels = rng.normal(size=(20, 5)), np.arange(20) % 2
    x[-1], y[40:] = 1e3, 0
    y[-1] = 1
    found = []
    for name, rows in (("with", 60), ("without", 59)):
        data = OwnData((x[:rows], y[:rows]), test=(test, labels))
        config = SUMS | {"public": "schema", "num_clients": 3, "partition": "iid", "rounds": 1}
        config["test_share"] = 0.0
        result = run(config, data=data, out=tmp_path / name, progress=False, width=8)
        settings = tomllib.loads((result.folder / "config.toml").read_text())
        assert settings.pop("dataset") != f"passed:{data.read().checksum[:16]}"
        del settings["out"]
        lines = (result.folder / "rounds.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        inputs = json.loads((result.folder / "inputs.json").read_text())
        found.append((facts(result.summary), settings, inputs, list(map(facts, records))))
        report = write_report(result.folder, tmp_path / f"report-{name}")
        assert "Classes of the clients" not in report.with_name("report.html").read_text()
    assert found[0] == found[1]
    privacy = found[0][0]["privacy"]
    assert any("with noise" in part for part in privacy["released"])
    assert any(said.startswith("names of columns and classes") for said in privacy["not-covered"])


def test_a_private_run_is_known_by_a_key_that_stays_on_the_machine(tmp_path, monkeypatch):
    """So it is read again if the same examples are passed, and nobody else can try examples."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert keyed("a") == keyed("a") != keyed("b")
    key = tmp_path / "cache" / "fedntk" / "checksum.key"
    assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)
    before = keyed("a")
    key.unlink()
    assert keyed("a") != before
