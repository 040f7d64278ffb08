"""Wrong settings are refused at once, by name; files, text and keys give a configuration back.

Limits and types of options are tested with the options, rules of one method with its strategy.
"""

import dataclasses
import json
from typing import Any

import pytest

from fedntk.simulations import Config, ConfigError

from .outcomes import refused

SUMS = {"method": "tct", "tct.sums.validation-share": 0.0, "tct.sums.auto-ridge": False}
SECURE = SUMS | {"secure": True, "validation-examples": 9}
JUDGED = {"method": "fedavg", "screening.rule": "validation"}
VALIDATION = {"ntk-fl.selection": "validation", "validation-clients": 2}
DISTILLED = {"method": "fed-be", "fed-be.distill": True}
CLUSTERED = {"degree": 2, "evolve_once": True, "topology": "clustered", "average_first": False}
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
    ({"method": "scaffold", "optimizer": "adam"}, "optimizer: expected sgd with SCAFFOLD, got"),
    ({"method": "d-psgd", "optimizer": "adam"}, "optimizer: expected sgd with DPSGD, got adam"),
    ({"method": "fedavg", "optimizer": "adam", "momentum": 0.5}, "momentum: expected 0 with"),
    ({"evaluate-on": "validation"}, "nothing is held out of training; set validation-examples"),
    ({"evaluate-on": "validation", "private-test": True, "validation-examples": 50},
     "local-test-fraction: expected more than 0 with private-test"),
    ({"evaluate-on": "validation", "local-test-fraction": 0.1}, "nothing is held out of training"),
    ({"owners": 2}, "owners = 2 needs partition = natural, got dirichlet"),
    (JUDGED, "that the server keeps; set validation-ex"),
    (JUDGED | {"method": "fedavg", "validation-examples": 50, "evaluate-on": "validation"},
     "screening.rule uses the examples that evaluate-on = validation mea"),
    (JUDGED | {"method": "tct", "validation-examples": 50, "evaluate-on": "validation"},
     "screening.rule uses the examples that evaluate-on = validation mea"),
    ({"ntk-fl.selection": "validation"}, "ntk-fl.selection = validation goes with one of"),
    (VALIDATION | {"validation-examples": 9}, "validation-clients (held out), got 9 and 2"),
    (VALIDATION | {"evaluate-on": "validation"}, "evaluate-on = test, or change ntk-fl.sel"),
    (SUMS | {"tct.sums.auto-ridge": True, "tct.sums.bits": 32},
     "tct.sums.auto-ridge needs validation-examples, and no proj"),
    ({"method": "tct", "tct.sums": True}, "tct.sums.bits needs validation-examples, and no proj"),
    (SUMS | {"tct.sums.validation-share": 0.2},
     "tct.sums.validation-share: goes with tct.sums.auto-ridge = True, got False"),
    ({"method": "one-exchange", "one-exchange.noise": True},
     "one-exchange.noise.epsilon: expected more than 0, got 0"),
    ({"method": "one-exchange", "one-exchange.ledger": True},
     "one-exchange.ledger: expected storage, as each"),
    (SECURE | {"num-clients": 2, "clients-per-round": 2},
     "secure: expected clients-per-round and num-clients"),
    (SECURE, "set clients-per-evaluation = 0, or local-test-fraction; got 10 and 0"),
    (SUMS | {"validation-examples": 9, "evaluate-on": "validation"},
     "tct.sums.bits uses the examples that evaluate-on = validation measures with"),
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
    ({"methods": {"a": 1}}, "unknown key 'methods'; did you mean 'method'?"),
    ({"num-features": 5}, "unknown key 'num-features'; did you mean 'tct.num-features' or"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_wrong_setting_is_refused_in_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        Config.parse(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_part_is_a_table_or_true():
    as_table = Config(method="fedavg", secure={"threshold": 0.9}, screening={"rule": "none"})
    assert (
        as_table.secure.threshold
        == Config.parse({"secure.threshold": 0.9, "method": "fedavg"}).secure.threshold
        == 0.9
    )
    assert Config(method="fedavg", secure=True).secure.threshold == pytest.approx(2 / 3)
    assert Config().secure is Config(secure=False).secure is Config(secure=None).secure is None
    assert as_table.replace(secure=False).secure is None
    assert as_table.replace(secure=True).secure.threshold == 0.9
    assert as_table.replace(secure=False).replace(secure={"threshold": 0.8}).secure.threshold == 0.8
    assert as_table.differences(as_table.replace(secure=False)) == {"secure": (True, False)}
    assert Config(method="scaffold", centre=True).centre is not None
    with pytest.raises(ConfigError, match="secure: expected true, false or a table"):
        Config(method="fedavg", secure=0.9)
    with pytest.raises(ConfigError, match=r"secure\.threshold: expected more than 0\.5, got 0\.5"):
        Config(method="fedavg", secure={"threshold": 0.5})


def test_the_run_config_of_flower_has_a_part_that_it_names():
    """The app's defaults have all keys of a part that is not there."""
    defaults = Config.run_config_defaults()
    assert defaults["secure"] is False
    named = Config.parse(defaults | {"method": "fedavg", "secure": True})
    other = Config.parse(defaults | {"method": "fedavg", "secure.threshold": 0.9})
    assert (named.secure.threshold, other.secure.threshold) == (pytest.approx(2 / 3), 0.9)
    assert Config.parse(defaults).secure is None
    assert Config.parse(json.loads(json.dumps(defaults))) == Config()  # equal, of other objects


def test_a_part_that_a_method_cannot_have_is_refused_with_those_that_can():
    with pytest.raises(ConfigError, match=r"secure: ntk-fl cannot have it; expected .*fedavg"):
        Config(method="ntk-fl", secure=True)
    with pytest.raises(ConfigError, match="expected method = one-exchange, or asynchrony = false"):
        Config(method="fedavg", asynchrony=True)


def test_a_methods_own_parts_are_tables_in_its_table(tmp_path):
    """The numbers that were not chosen are the part's own; `true` is all of its defaults."""
    own = {"sums": {"bits": 5}, "storage": True, "bias": False}
    config = Config(method="tct", tct=own, validation_examples=9)
    assert (config.settings.sums.bits, config.settings.sums.ridge) == (5, 0.01)
    assert Config(method="tct").settings.sums is None
    assert Config(method="one-exchange").settings.sums.bits == 8  # it is always there
    config.save(tmp_path / "config.toml")
    text = (tmp_path / "config.toml").read_text()
    assert "storage = true\n" in text
    assert "[tct.sums]\nbits = 5\n" in text
    assert Config.load(tmp_path / "config.toml") == config
    assert Config.parse(Config.run_config_defaults() | config.run_config()) == config
    assert config.replace(tct={"sums": False, "storage": False}).settings.sums is None
    assert config.replace(tct={"sums": {"ridge": 1}}).settings.sums.bits == 5
    assert config.settings_of("one-exchange") == Config().settings_of("one-exchange")


def test_file_round_trip_and_overrides(tmp_path):
    config = Config(rounds=3, learning_rate=0.5, method="fedavg", tct={"bias": True})
    config.save(tmp_path / "config.toml")
    assert Config.load(tmp_path / "config.toml") == config
    assert Config.of_run(tmp_path) == config.replace(out=str(tmp_path))
    text = (tmp_path / "config.toml").read_text()
    assert "\nsecure = false\n" in text
    assert "\n[screening]\nrule = " in text
    assert "\n[fedavg]\nproximal-mu = 0.0\n" in text
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
    assert sent.keys() <= Config.run_config_defaults().keys()
    assert Config.parse(Config.run_config_defaults() | sent) == config


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


@pytest.mark.parametrize("name", ["class_prior", "class_weights"])
def test_weights_and_priors_of_classes_need_local_sgd_or_sums(name):
    """They would change nothing in the others, nor in an ensemble of these."""
    value = {"class_prior": True, "class_weights": [1.0] * 10}[name]
    for options in ({"method": "fedavg"}, {"method": "fed-ensemble"}, {"method": "ditto"}):
        assert getattr(Config(**options, **{name: value}, clients_per_round=10), name)
    for method in ("afl", "fed-ncm"):
        ensemble = {"method": "fed-ensemble", "fed_ensemble": {"inner": method}}
        for options in ({"method": method}, {**ensemble, "clients_per_round": 10}):
            if (name, method) == ("class_weights", "afl"):
                assert Config(**options, class_weights=value).class_weights
            else:
                words = f"{name.replace('_', '-')} needs local SGD"
                refused(words, Config, **options, **{name: value})
    refused("set ntk-fl.class-prior", Config, method="ntk-fl", class_prior=True)
