"""Every wrong setting is refused at once, by name, with what was expected."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.methods import all_methods

DP = {
    "method": "cp-ntk-fl", "cp-ntk-fl.selection": "linearised", "clients-per-evaluation": 0,
    "cp-ntk-fl.clip": 1.0, "cp-ntk-fl.noise-multiplier": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning-rat": 0.1}, "unknown key 'learning-rat'; did you mean 'learning-rate'"),
        ({"zzz": 1}, "unknown key 'zzz'; known keys: dataset, data-dir"),
        (
            {"method": "ntkfl"},
            "got 'ntkfl'; did you mean 'ntk-fl'",
        ),
        ({"rounds": "ten"}, "rounds: expected int, got 'ten'"),
        ({"rounds": True}, "rounds: expected int, got bool True"),
        ({"rounds": 2.5}, "rounds: expected int, got float 2.5"),
        ({"rounds": -1}, "rounds: expected at least 0, got -1"),
        ({"learning-rate": 0}, "learning-rate: expected more than 0, got 0"),
        ({"learning-rate": "0.1"}, "learning-rate: expected float, got '0.1'"),
        ({"learning-rate": float("inf")}, "learning-rate: expected a finite number, got inf"),
        ({"alpha": -0.1}, "alpha: expected more than 0, got -0.1"),
        ({"local-test-fraction": 1.0}, "local-test-fraction: expected less than 1, got 1.0"),
        (
            {"ntk-fl.steps": "100;200"},
            "ntk-fl.steps: expected a sequence of float, got '100;200'",
        ),
        ({"ntk-fl.steps": "200,100"}, "ntk-fl.steps: expected increasing times"),
        (
            {"method": "cp-ntk-fl", "cp-ntk-fl": {"steps": "2,1"}},
            "cp-ntk-fl.steps: expected increasing times",
        ),
        ({"targets": "85"}, "targets: expected less than 1, got 85"),
        ({"clients-per-round": 51}, "clients-per-round: expected at most the 50 clients that"),
        ({"clients-per-evaluation": -1}, "clients-per-evaluation: expected at least 0, got -1"),
        ({"client-gpus": 0.5, "device": "cpu"}, "client-gpus = 0.5 does not go with device = cpu"),
        ({"monitor": "accurcy"}, "got 'accurcy'; did you mean 'accuracy'"),
        (
            {"monitor": "client-loss-worst", "clients-per-evaluation": 0},
            "monitor = client-loss-worst needs clients-per-evaluation of at least 1",
        ),
        ({"min-completed": 11}, "min-completed: expected at most clients-per-round = 10, got 11"),
        ({"ntk-fl.selection": "validation"}, "ntk-fl.selection = validation goes with one of"),
        ({"class-prior": True}, "which ntk-fl lacks; set ntk-fl.class-prior"),
        (
            {"class-prior": True, "method": "fedavg", "loss": "mse"},
            "class-prior goes with loss = cross-entropy, got mse",
        ),
        (
            {"ntk-fl.selection": "validation", "validation-clients": 2, "validation-examples": 9},
            "validation-clients (held out), got 9 and 2",
        ),
        ({"evaluate-on": "validation"}, "nothing is held out of training; set validation-examples"),
        (
            {
                "ntk-fl.selection": "validation", "validation-clients": 2,
                "evaluate-on": "validation",
            },
            "set ntk-fl.selection = clients or linearised",
        ),
        ({"partition": "natural"}, "partition = natural needs natural-column"),
        ({"sampling-rate": 0.0}, "sampling-rate: expected more than 0, got 0.0"),
        ({"sampling-rate": 1.5}, "sampling-rate: expected at most 1, got 1.5"),
        ({"projection": -1}, "projection: expected at least 0, got -1"),
        ({"cp-ntk-fl.sparsity": 1.0}, "cp-ntk-fl.sparsity: expected less than 1, got 1.0"),
        ({"cp-ntk-fl.bits": 0}, "cp-ntk-fl.bits: expected at least 1, got 0"),
        (
            {"method": "cp-ntk-fl", "cp-ntk-fl.bits": 20},
            "cp-ntk-fl.bits: expected 1 ... 16, or 32 for numbers as they are, got 20",
        ),
        (DP | {"cp-ntk-fl.clip": 0.0}, "takes clip and cp-ntk-fl.noise-multiplier above 0"),
        (
            DP | {"cp-ntk-fl.noise-multiplier": 0.0},
            "takes clip and cp-ntk-fl.noise-multiplier above 0",
        ),
        (DP | {"cp-ntk-fl.selection": "clients"}, "use selection='linearised'"),
        (
            DP | {"cp-ntk-fl.selection": "validation", "validation-clients": 2},
            "use linearised, or validation with",
        ),
        (DP | {"clients-per-evaluation": 5}, "set local-test-fraction, or clients-per-evaluation"),
        (DP | {"cp-ntk-fl.label-noise": 2.0}, "cp-ntk-fl.label-noise: expected at most 1, got 2"),
        (DP | {"cp-ntk-fl.delta": 0.0}, "cp-ntk-fl.delta: expected more than 0, got 0.0"),
        ({"fedavg.proximal-mu": -0.1}, "fedavg.proximal-mu: expected at least 0, got -0.1"),
        ({"scaffold.option": "2"}, "scaffold.option: expected one of I, II, got '2'"),
        (
            {"scaffold": {"server-learning-rate": 0}},
            "scaffold.server-learning-rate: expected more than 0, got 0",
        ),
        (
            {"method": "scaffold", "local-epochs": 0},
            "local-epochs: expected at least 1 with SCAFFOLD, got 0",
        ),
        ({"tct": {"num-features": -1}}, "tct.num-features: expected at least 0, got -1"),
        (
            {"method": "tct", "tct": {"solve": "server", "loss": "cross-entropy"}},
            "tct.loss: expected mse for solve = server, got cross-entropy",
        ),
        ({"method": "tct", "tct.bits": 8}, "go with solve = server, got solve = clients"),
        ({"method": "tct", "tct.balanced": True}, "tct.balanced: goes with solve = statistics"),
        (
            {"method": "tct", "tct": {"solve": "statistics", "sparsity": 0.5}},
            "tct.sparsity: expected 0 for solve = statistics, got 0.5",
        ),
        (
            {"method": "tct", "tct": {"solve": "statistics", "balanced": True, "bits": 8}},
            "sums of weighted examples are no whole numbers; expected bits = 32",
        ),
        ({"tct.validation-share": 0.6}, "tct.validation-share: expected at most 0.5, got 0.6"),
        (
            {"method": "tct", "tct": {"solve": "statistics", "validation-share": 0.2}},
            "tct.validation-share: goes with tct.auto-ridge = True, got False",
        ),
        (
            {
                "method": "tct",
                "tct": {
                    "solve": "statistics", "auto-ridge": True, "validation-share": 0.2, "bits": 8,
                },
            },
            "tct.bits needs validation-examples, and no projection",
        ),
        ({"method": "tct", "tct.keep-sums": True}, "tct.keep-sums: goes with solve = statistics"),
        (
            {
                "method": "tct",
                "tct": {"solve": "statistics", "keep-sums": True, "balanced": True},
            },
            "as its weights come from all clients' counts, got True",
        ),
        (
            {"method": "tct", "tct": {"solve": "statistics", "secure-aggregation": True}},
            "masks are added to whole numbers; expected bits = 2 ... 8, got 32",
        ),
        (
            {
                "method": "tct", "validation-examples": 9, "num-clients": 2, "clients-per-round": 2,
                "tct": {"solve": "statistics", "bits": 8, "secure-aggregation": True},
            },
            "tct.secure-aggregation needs num-clients = 3 or more",
        ),
        (
            {
                "method": "tct", "validation-examples": 9,
                "tct": {"solve": "statistics", "bits": 8, "secure-aggregation": True},
            },
            "set clients-per-evaluation = 0, or local-test-fraction; got 10 and 0",
        ),
        (
            {"method": "tct", "tct": {"solve": "statistics", "auto-ridge": True}},
            "tct.auto-ridge needs validation-examples, and no projection",
        ),
        (
            {
                "method": "tct", "tct": {"solve": "statistics", "bits": 8},
                "validation-examples": 9, "evaluate-on": "validation",
            },
            "tct.bits uses the examples that evaluate-on = validation measures with",
        ),
        ({"tct": {"dtype": "float16", "normalise": False}}, "without tct.normalise; use float32"),
        # where keys are now, and near ones
        ({"num-features": 5}, "unknown key 'num-features'; it is now tct.num-features"),
        ({"tct.num-feature": 5}, "unknown key 'tct.num-feature'; did you mean 'tct.num-features'?"),
        ({"tct": {"num-feature": 5}}, "key 'tct.num-feature'; did you mean 'tct.num-features'?"),
        ({"tct": 5}, "tct: expected a table of settings, got int 5"),
        ({"rounds": {"a": 1}}, "rounds: expected int, got dict {'a': 1}"),
        ({"nothing.bits": 5}, "unknown key 'nothing.bits'"),
        ({"plugged-in": "{"}, "plugged-in: expected JSON, got '{'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_in_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        Config.parse(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_held_out_clients_cannot_be_sampled():
    options = {"method": "fedavg", "num_clients": 10, "validation_clients": 2}
    Config(clients_per_round=8, **options)
    with pytest.raises(ConfigError, match="at most the 8 clients that train, got 9"):
        Config(clients_per_round=9, **options)


def test_what_users_have_at_hand_is_taken():
    """Whole numbers for floats, NumPy's numbers, paths."""
    config = Config(learning_rate=1, seed=np.int64(3), alpha=np.float32(0.5), out=Path("a/b"))
    assert (config.learning_rate, config.seed, config.alpha, config.out) == (1.0, 3, 0.5, "a/b")
    kinds = [type(v) for v in (config.learning_rate, config.seed, config.alpha, config.out)]
    assert kinds == [float, int, float, str]


def test_file_round_trip_and_overrides(tmp_path):
    config = Config(rounds=3, learning_rate=0.5, method="fedavg", tct={"bias": True})
    config.save(tmp_path / "config.toml")
    assert Config.load(tmp_path / "config.toml") == config == Config.of_run(tmp_path)
    text = (tmp_path / "config.toml").read_text()
    assert "\n[fedavg]\nproximal-mu = 0.0\n" in text
    assert "[scaffold]" not in text  # its settings are defaults, and have no effect
    changed = Config.load(tmp_path / "config.toml", rounds=4, tct={"num_features": 7})
    assert changed == config.replace(rounds=4, **{"tct.num-features": 7})
    own = changed.settings_of("tct")
    assert (own.num_features, own.bias, changed.rounds) == (7, True, 4)


def test_tables_belong_to_the_method_of_their_name():
    config = Config(method="tct", tct={"num_features": 10}, scaffold={"option": "I"})
    assert config.settings.num_features == 10
    assert config.settings_of("scaffold").option == "I"
    assert config.replace(method="scaffold").settings.option == "I"
    assert config.replace(tct={"local_steps": 3}).settings.num_features == 10
    assert hash(config) == hash(dataclasses.replace(config)) != hash(config.replace(rounds=1))
    assert dataclasses.replace(config, rounds=7).settings.num_features == 10
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.settings.num_features = 3


def test_tables_of_other_methods_are_checked_and_have_no_effect():
    plain, other = Config(method="fedavg"), Config(method="fedavg", tct={"num_features": 10})
    assert plain != other
    assert plain.differences(other) == {}
    assert plain.folder == other.folder
    assert Config(method="fedavg", tct={"num_features": 100_000}) == plain  # the default
    acting = plain.replace(fedavg={"proximal_mu": 1.0})
    assert plain.differences(acting) == {"fedavg.proximal-mu": (0.0, 1.0)}
    assert plain.folder != acting.folder


def test_flowers_run_config_gives_the_configuration_back():
    """Flower adds the defaults of the keys that are not given; it takes none with tables."""
    config = Config(method="tct", rounds=3, tct={"bias": True}, scaffold={"option": "I"})
    sent = config.run_config()
    assert {type(value) for value in sent.values()} <= {bool, int, float, str}
    assert sent.keys() <= Config.default_run_config().keys()
    assert Config.parse(Config.default_run_config() | sent) == config


@pytest.mark.parametrize("lines", [0, 5, -3, -1])
def test_a_runs_configuration_that_is_cut_off_is_refused(tmp_path, lines):
    """Not read as defaults; cut at the end of a line, it is still TOML."""
    Config(method="tct").save(tmp_path / "config.toml")
    whole = (tmp_path / "config.toml").read_text().splitlines(keepends=True)
    (tmp_path / "config.toml").write_text("".join(whole[:lines]))
    Config.load(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"config\.toml is cut off, or of an older version: its last line"):
        Config.of_run(tmp_path)
    with pytest.raises(ConfigError, match=r"no run in .*: config\.toml is missing"):
        Config.of_run(tmp_path / "nowhere")


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no configuration at"):
        Config.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = ")
    with pytest.raises(ConfigError, match="is no TOML"):
        Config.load(tmp_path / "bad.toml")
    (tmp_path / "typo.toml").write_text("round = 3")
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        Config.load(tmp_path / "typo.toml")


def test_description_names_every_key():
    keys = [line.partition(" = ")[0] for line in Config.describe()]
    assert {*keys, "plugged-in"} == Config.default_run_config().keys()
    assert len(keys) == len(set(keys))
    described = "\n".join(Config.describe())
    assert "partition = 'dirichlet' (iid, dirichlet, client-dirichlet" in described
    assert f"method = 'ntk-fl' ({', '.join(sorted(all_methods()))}): what to run" in described
    assert Config.describe("scaffold")[1].startswith("scaffold.option = 'II' (I, II): ")
    with pytest.raises(ConfigError, match="got 'scafold'; did you mean 'scaffold'"):
        Config.describe("scafold")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rounds", "7", 7),
        ("learning-rate", "1e-3", 0.001),
        ("learning_rate", "2", 2.0),
        ("ntk-fl.steps", "10,20", (10.0, 20.0)),
        ("tct.num_features", "3", 3),
        ("cp-ntk-fl.shuffle", "true", True),
    ],
)
def test_text_becomes_a_value_of_the_keys_type(key, text, value):
    converted = Config.convert(key, text)
    assert (converted, type(converted)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("rounds", "1.5", "rounds: expected int, got '1.5'"),
        ("tct.bias", "1", "tct.bias: expected bool, got '1'"),
        ("roundz", "1", "unknown key 'roundz'; did you mean 'rounds'"),
    ],
)
def test_text_that_is_no_such_value_is_refused(key, text, message):
    with pytest.raises(ConfigError, match=message):
        Config.convert(key, text)


def test_each_configuration_has_a_default_folder_of_its_own():
    """Another setting, another folder; where results go and how safely does not count."""
    folder = Config().folder
    assert Config(learning_rate=0.02).folder != folder
    assert Config(seed=1).folder != folder
    assert Config(checkpoint_every=5, data_dir="d").folder == folder
    assert folder.parent.name == "runs"
    assert folder.name.startswith("ntk-fl-digits-0-")
