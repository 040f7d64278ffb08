"""Wrong settings are refused at once, by name; files, text and keys give a configuration back.

Limits and types of options are tested with the options, rules of one method with its strategy.
"""

import dataclasses
from typing import Any

import pytest

from fedntk.simulations import Config, ConfigError

from .outcomes import refused
from .settings import default_run_config

DP = {
    "method": "cp-ntk-fl", "cp-ntk-fl.selection": "linearised", "clients-per-evaluation": 0,
    "cp-ntk-fl.clip": 1.0, "cp-ntk-fl.noise-multiplier": 1.0, "standardise": False,
}  # fmt: skip
SUMS = {"method": "tct", "tct.solve": "statistics"}
SECURE = SUMS | {"tct.bits": 8, "tct.secure-aggregation": True, "validation-examples": 9}
VALIDATION = {"ntk-fl.selection": "validation", "validation-clients": 2}
DISTILLED = {"method": "fed-be", "fed-be.distill": True}
CLUSTERED = {"degree": 2, "evolve_once": True, "topology": "clustered", "average": False}
HELD = DISTILLED | {"validation-examples": 50}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num-clients": 10, "validation-clients": 2, "clients-per-round": 9},
     "expected 1 ... 8, the clients that train, got 9"),
    ({"client-gpus": 0.5, "device": "cpu"}, "client-gpus = 0.5 does not go with device = cpu"),
    ({"monitor": "client-loss-worst", "clients-per-evaluation": 0},
     "monitor = client-loss-worst needs clients-per-evaluation"),
    ({"min-completed": 11}, "min-completed: expected at most clients-per-round = 10, got 11"),
    ({"init": "he", "weights": "a.safetensors"},
     "init = he draws first weights, and weights ="),
    ({"projection-kind": "low-frequency"}, "low-frequency goes with projection, the number"),
    ({"class-prior": True}, "which ntk-fl lacks; set ntk-fl.class-prior"),
    ({"class-prior": True, "method": "fedavg", "loss": "mse"},
     "class-prior goes with loss = cross-entropy, got mse"),
    ({"evaluate-on": "validation"}, "nothing is held out of training; set validation-examples"),
    ({"evaluate-on": "validation", "private-test": True, "validation-examples": 50},
     "local-test-fraction: expected more than 0 with private-test"),
    ({"evaluate-on": "validation", "local-test-fraction": 0.1}, "nothing is held out of training"),
    ({"owners": 2}, "owners = 2 needs partition = natural, got dirichlet"),
    ({"method": "fedavg", "defence": "validation"}, "that the server keeps; set validation-ex"),
    ({"method": "fedavg", "defence": "validation", "validation-examples": 50,
      "evaluate-on": "validation"}, "defence uses the examples that evaluate-on = validation mea"),
    ({"method": "tct", "defence": "validation", "validation-examples": 50,
      "evaluate-on": "validation"}, "defence uses the examples that evaluate-on = validation mea"),
    ({"ntk-fl.selection": "validation"}, "ntk-fl.selection = validation goes with one of"),
    (VALIDATION | {"validation-examples": 9}, "validation-clients (held out), got 9 and 2"),
    (VALIDATION | {"evaluate-on": "validation"}, "evaluate-on = test, or change ntk-fl.sel"),
    (DP | {"cp-ntk-fl.selection": "validation", "validation-clients": 2},
     "validation-clients: with noise only what its epsilon covers may be used; expected 0, got 2"),
    (DP | {"clients-per-evaluation": 5}, "set local-test-fraction, or clients-per-evaluation"),
    (SUMS | {"tct.sparsity": 0.5}, "tct.sparsity: expected 0 for solve = statistics, got 0.5"),
    (SUMS | {"tct.auto-ridge": True}, "tct.auto-ridge needs validation-examples, and no proj"),
    (SUMS | {"tct.auto-ridge": True, "tct.validation-share": 0.2, "tct.bits": 8},
     "tct.bits needs validation-examples, and no projection"),
    (SECURE | {"num-clients": 2, "clients-per-round": 2},
     "tct.secure-aggregation: expected clients-per-round and num-clients"),
    (SECURE, "set clients-per-evaluation = 0, or local-test-fraction; got 10 and 0"),
    (SUMS | {"tct.bits": 8, "validation-examples": 9, "evaluate-on": "validation"},
     "tct.bits uses the examples that evaluate-on = validation measures with"),
    ({"method": "tct", "tct": {"dtype": "float16", "normalise": False}},
     "without tct.normalise; use float32"),
    # an ensemble that the server distils, and one of which all models begin otherwise
    (DISTILLED, "validation-examples: expected at least 2 for the server to distil on, got 0"),
    (HELD | {"loss": "mse"}, "loss: expected cross-entropy with fed-be.distill"),
    (HELD | {"evaluate-on": "validation"}, "fed-be.distill uses the examples that evaluate-on"),
    (HELD | {"projection": 20}, "projection: expected 0 with fed-be.distill"),
    ({"method": "fed-ensemble", "weights": "a.safetensors"}, "expected none with fed-ensemble"),
    ({"method": "dispfl", "num-clients": 5, "clients-per-round": 5},
     "dispfl.degree: expected less than clients-per-round = 5, got 5"),
    ({"method": "ntk-dfl", "ntk-dfl": CLUSTERED}, "evolve-once: expected clusters"),
    ({"num-features": 5}, "unknown key 'num-features'; did you mean 'tct.num-features' or"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_wrong_setting_is_refused_in_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        Config.parse(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_round_trip_and_overrides(tmp_path):
    config = Config(rounds=3, learning_rate=0.5, method="fedavg", tct={"bias": True})
    config.save(tmp_path / "config.toml")
    assert Config.load(tmp_path / "config.toml") == config
    assert Config.of_run(tmp_path) == config.replace(out=str(tmp_path))
    text = (tmp_path / "config.toml").read_text()
    assert "\n[fedavg]\nsecure-aggregation = false\n" in text
    assert "[scaffold]" not in text  # its settings are defaults, and have no effect
    changed = Config.load(tmp_path / "config.toml", rounds=4, tct={"num_features": 7})
    assert changed == config.replace(rounds=4, **{"tct.num-features": 7})
    own = changed.settings_of("tct")
    assert (own.num_features, own.bias, changed.rounds) == (7, True, 4)
    assert changed.replace(method="tct", rounds=20).settings == own
    assert hash(config) == hash(dataclasses.replace(config)) != hash(changed)


def test_which_settings_have_an_effect():
    """Each configuration has a default folder of its own; other methods' tables do not count."""
    plain, other = Config(method="fedavg"), Config(method="fedavg", tct={"num_features": 10})
    assert plain != other
    assert Config(method="fedavg", tct={"num_features": 100_000}) == plain  # the default
    acting = plain.replace(fedavg={"proximal_mu": 1.0})
    assert plain.differences(acting) == {"fedavg.proximal-mu": (0.0, 1.0)}
    for same in (other, plain.replace(checkpoint_every=5, data_dir="d")):
        assert (plain.differences(same), plain.folder) == ({}, same.folder)
    folders = {plain.folder, acting.folder, plain.replace(seed=1).folder, Config().folder}
    assert len(folders) == 4


def test_flowers_run_config_gives_the_configuration_back():
    """Flower adds the defaults of the keys that are not given; it takes none with tables."""
    config = Config(method="tct", rounds=13, tct={"bias": True}, scaffold={"option": "I"})
    sent = config.run_config()
    assert {type(value) for value in sent.values()} <= {bool, int, float, str}
    assert sent.keys() <= default_run_config().keys()
    assert Config.parse(default_run_config() | sent) == config


@pytest.mark.parametrize("lines", [0, -1])
def test_a_runs_configuration_that_is_cut_off_is_refused(tmp_path, lines):
    """Not read as defaults; cut at the end of a line, it is still TOML."""
    path = tmp_path / "config.toml"
    Config(method="tct").save(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    Config.load(path)
    refused(r"config\.toml is cut off, or of an older version", Config.of_run, tmp_path)
    path.write_text("a = ")
    refused("is no TOML", Config.load, path)
