"""Every method on every kind of data, with only `method` and `dataset` set."""

import numpy as np
import pytest

from fedntk.simulations import Config, run
from fedntk.simulations.engine.building import load_setup, make_strategy
from fedntk.simulations.methods import all_methods

NUM_CLASSES = 3


def examples(kind: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return examples that a mean tells apart, and their labels."""
    drawn, y = np.random.default_rng(0), np.arange(number) % NUM_CLASSES
    shape = {"table": (5,), "grey": (8, 8), "colour": (3, 9, 8), "tokens": (7,)}[kind]
    x = drawn.normal(size=(number, *shape)) + y.reshape(-1, *[1] * len(shape))
    if kind == "table":
        return x, y
    if kind == "tokens":
        return np.clip(x * 5 + 20, 0, 49).astype(np.int64), y
    return np.clip(x * 30 + 80, 0, 255).astype(np.uint8), y


@pytest.mark.parametrize("kind", ["table", "grey", "colour", "tokens"])
@pytest.mark.parametrize("method", sorted(all_methods()))
def test_each_method_runs_on_any_data(method, kind, tmp_path):
    x, y = examples(kind, 240)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
    rounds = 12 if method == "tct" else 2  # 10 are stage 1
    model = "linear" if method == "glm" else "mlp"  # the default
    dataset = f"npz:{tmp_path / 'own.npz'}"
    config = Config(method=method, dataset=dataset, num_clients=8, model=model)
    result = run(config, out=tmp_path / "run", rounds=rounds, progress=False)
    assert 0 <= result.summary["accuracy"] <= 1


@pytest.mark.parametrize(
    ("shape", "number"), [((20,), 200), ((8, 8), 200), ((28, 28), 504), ((3, 64, 64), 1000)]
)
def test_one_exchange_chooses_its_features_by_the_size_of_an_example(shape, number, tmp_path):
    """18 sqrt(d), so that 4 p^2 bytes of sums are those of 324 examples of d float32 numbers."""
    x = np.random.default_rng(0).integers(0, 255, (60, *shape)).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(60) % 2)
    config = Config(method="one-exchange", dataset=f"npz:{tmp_path / 'own.npz'}", num_clients=3)
    assert make_strategy(load_setup(config)).width == number
    assert make_strategy(load_setup(config.replace(random_features=40))).width == 40
    plain = config.replace(one_exchange={"sums": {"bits": 32}})
    assert make_strategy(load_setup(plain)).width == 100  # the mlp's
    assert make_strategy(load_setup(config.replace(validation_examples=10))).width == 100


def test_one_exchange_learns_with_only_a_data_set(tmp_path):
    """Bayes' rule knows 99 %: means are 5 and more deviations apart over 5 columns."""
    x, y = examples("table", 600)
    np.savez(tmp_path / "own.npz", x_train=2 * x, y_train=y)
    config = Config(method="one-exchange", dataset=f"npz:{tmp_path / 'own.npz'}")
    assert run(config, out=tmp_path / "run", progress=False).summary["accuracy"] > 0.7


# ------------------------------------------ a table in which 94 % have one class

SUMS = {"sums": {"bits": 32, "auto_ridge": False, "validation_share": 0.0}, "num_features": 400}
AUTO = {**SUMS, "sums": {"bits": 32, "validation_share": 0.2}}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Two classes 2.4 deviations apart in 12 columns: Bayes' rule knows 96 %, or 88 % balanced."""
    drawn, arrays = np.random.default_rng(0), {}
    for half in ("train", "test"):
        y = arrays[f"y_{half}"] = (np.arange(1500) % 50 < 3).astype(np.int64)
        arrays[f"x_{half}"] = drawn.normal(size=(1500, 12)) + 2.4 / 12**0.5 * y[:, None]
    path = tmp_path_factory.mktemp("table") / "own.npz"
    np.savez(path, **arrays)
    return f"npz:{path}"


def accuracies(dataset, folder, method, rounds, **tct):
    options = {"tct": {"num_features": 400, **tct}} if method == "tct" else {}
    config = Config(
        method=method, dataset=dataset, metrics="balanced-accuracy", num_clients=10, alpha=0.5,
        evaluate_every=100, clients_per_evaluation=0, **options,
    )  # fmt: skip
    result = run(config, out=folder, rounds=rounds, progress=False)
    return [result.curve(name).iloc[-1] for name in ("accuracy", "balanced-accuracy")]


@pytest.mark.parametrize(
    ("method", "rounds", "options"),
    [
        ("tct", 20, {}),
        ("tct", 20, {"loss": "cross-entropy", "local_steps": 50}),
        ("tct", 11, SUMS),
        ("tct", 11, AUTO),
        ("one-exchange", 1, {}),
        ("afl", 1, {}),
        ("fed3r", 1, {}),
        ("deep-afl", 3, {}),
    ],
)
def test_a_rare_class_costs_no_accuracy(unequal, tmp_path, method, rounds, options):
    """94 % is what always saying the common class has; 2 points are three standard errors."""
    assert accuracies(unequal, tmp_path / "run", method, rounds, **options)[0] > 0.92


@pytest.mark.parametrize("options", [SUMS, AUTO])
def test_balanced_weights_raise_balanced_accuracy(unequal, tmp_path, options):
    """With 90 rare examples of the test set a standard error is 2.5 points."""
    _, plain = accuracies(unequal, tmp_path / "a", "tct", 11, **options)
    _, balanced = accuracies(unequal, tmp_path / "b", "tct", 12, **options, balanced=True)
    assert balanced > plain + 0.025
