"""Every wrong setting is refused at once, by name, with what was expected."""

from pathlib import Path

import numpy as np
import pytest

from fedntk.simulations import Config, ConfigError

DP = {
    "method": "cp-ntk-fl", "selection": "linearised", "clients-per-evaluation": 0,
    "clip": 1.0, "noise-multiplier": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning-rat": 0.1}, "unknown key 'learning-rat'; did you mean 'learning-rate'"),
        ({"zzz": 1}, "unknown key 'zzz'; known keys: method, name"),
        (
            {"method": "ntkfl"},
            "ntk-fl, cp-ntk-fl, tct, fedavg, scaffold, got 'ntkfl'; did you mean 'ntk-fl'",
        ),
        ({"rounds": "ten"}, "rounds: expected int, got str 'ten'"),
        ({"rounds": True}, "rounds: expected int, got bool True"),
        ({"rounds": 2.5}, "rounds: expected int, got float 2.5"),
        ({"rounds": -1}, "rounds: expected at least 0, got -1"),
        ({"learning-rate": 0}, "learning-rate: expected more than 0, got 0"),
        ({"learning-rate": "0.1"}, "learning-rate: expected float, got str"),
        ({"learning-rate": float("inf")}, "learning-rate: expected a finite number, got inf"),
        ({"alpha": -0.1}, "alpha: expected more than 0, got -0.1"),
        ({"local-test-fraction": 1.0}, "local-test-fraction: expected less than 1, got 1.0"),
        ({"steps": "100;200"}, "steps: expected numbers with commas between them, got '100;200'"),
        ({"steps": ""}, "steps: expected increasing whole numbers, got ''"),
        ({"steps": "200,100"}, "steps: expected increasing whole numbers"),
        ({"targets": "85"}, "targets: expected numbers between 0 and 1"),
        ({"clients-per-round": 51}, "clients-per-round: expected at most the 50 clients that"),
        ({"clients-per-evaluation": -1}, "clients-per-evaluation: expected at least 0, got -1"),
        ({"client-gpus": 0.5, "device": "cpu"}, "client-gpus = 0.5 does not go with device = cpu"),
        ({"monitor": "accurcy"}, "got 'accurcy'; did you mean 'accuracy'"),
        (
            {"monitor": "client-loss-worst", "clients-per-evaluation": 0},
            "monitor = client-loss-worst needs clients-per-evaluation of at least 1",
        ),
        ({"min-completed": 11}, "min-completed: expected at most clients-per-round = 10, got 11"),
        ({"selection": "validation"}, "selection = validation goes with one of"),
        ({"validation-clients": 2}, "selection = validation goes with one of"),
        ({"partition": "natural"}, "partition = natural needs natural-column"),
        ({"sampling-rate": 0.0}, "sampling-rate: expected more than 0, got 0.0"),
        ({"sampling-rate": 1.5}, "sampling-rate: expected at most 1, got 1.5"),
        ({"projection": -1}, "projection: expected at least 0, got -1"),
        ({"sparsity": 1.0}, "sparsity: expected less than 1, got 1.0"),
        ({"bits": 0}, "bits: expected at least 1, got 0"),
        ({"bits": 20}, "bits: expected 1 ... 16, or 32 for numbers as they are, got 20"),
        ({"shuffle": True}, "shuffle = True goes with method = cp-ntk-fl, got ntk-fl"),
        ({"bits": 6}, "bits = 6 goes with method = cp-ntk-fl, got ntk-fl"),
        (DP | {"method": "fedavg"}, "goes with method = cp-ntk-fl, got fedavg"),
        (DP | {"clip": 0.0}, "takes clip and noise-multiplier above 0"),
        (DP | {"noise-multiplier": 0.0}, "takes clip and noise-multiplier above 0"),
        (DP | {"selection": "clients"}, "use linearised, or validation with"),
        (
            DP | {"selection": "validation", "validation-clients": 2},
            "use linearised, or validation with",
        ),
        (DP | {"clients-per-evaluation": 5}, "set local-test-fraction, or clients-per-evaluation"),
        (DP | {"label-noise": 2.0}, "label-noise: expected at most 1, got 2.0"),
        ({"proximal-mu": -0.1}, "proximal-mu: expected at least 0, got -0.1"),
        ({"scaffold-option": "2"}, "scaffold-option: expected one of II, I, got '2'"),
        ({"server-learning-rate": 0}, "server-learning-rate: expected more than 0, got 0"),
        (
            {"method": "scaffold", "local-epochs": 0},
            "local-epochs: expected at least 1 with method = scaffold, got 0",
        ),
        (DP | {"delta": 0.0}, "delta: expected more than 0, got 0.0"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_in_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        Config.parse(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_held_out_clients_cannot_be_sampled():
    options = {"selection": "validation", "num_clients": 10, "validation_clients": 2}
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
    config = Config(rounds=3, learning_rate=0.5, method="fedavg")
    config.save(tmp_path / "config.toml")
    assert Config.load(tmp_path / "config.toml") == config
    assert Config.load(tmp_path / "config.toml", rounds=4).rounds == 4


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
    lines = Config.describe().splitlines()
    assert len(lines) == len(Config().values())
    assert "partition = 'dirichlet' (iid, dirichlet, client-dirichlet" in Config.describe()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rounds", "7", 7),
        ("learning-rate", "1e-3", 0.001),
        ("learning_rate", "2", 2.0),
        ("steps", "10,20", "10,20"),
    ],
)
def test_text_becomes_a_value_of_the_keys_type(key, text, value):
    converted = Config.convert(key, text)
    assert (converted, type(converted)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("rounds", "1.5", "rounds: expected int, got '1.5'"),
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
