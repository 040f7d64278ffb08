"""Every method on every kind of data, with only `method` and `dataset` set."""

import numpy as np
import pytest

from fedntk.simulations import Config, run
from fedntk.simulations.engine.building import load_setup, make_client, make_strategy
from fedntk.simulations.methods import all_methods

NUM_CLASSES = 3
# on data this small, only for time: the defaults are 20 rounds of 50 clients
QUICK = {"num_clients": 8, "rounds": 2, "progress": False}


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


@pytest.fixture(params=["table", "grey", "colour", "tokens"])
def dataset(request, tmp_path):
    def write(number):
        x, y = examples(request.param, number)
        np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
        return f"npz:{tmp_path / 'own.npz'}"

    return write


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_each_method_builds_all_its_parts_on_any_data(method, dataset):
    setup = load_setup(Config(method=method, dataset=dataset(300)))
    make_strategy(setup)
    make_client(setup, 0, {})


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_each_method_runs_on_any_data(method, dataset, tmp_path):
    options = {**QUICK, "rounds": 12} if method == "tct" else QUICK  # 10 are stage 1
    found = run(Config(method=method, dataset=dataset(240)), out=tmp_path / "run", **options)
    assert 0 <= found.summary["accuracy"] <= 1


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
    found = run(config, out=tmp_path / "run", progress=False)
    assert found.summary["accuracy"] > 0.7
