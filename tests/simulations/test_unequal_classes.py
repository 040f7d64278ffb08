"""A table in which 94 % of the examples have one class: no method may do worse than that class."""

import numpy as np
import pytest

from fedntk.simulations import Config, run

FIXED = {"bits": 32, "auto_ridge": False, "validation_share": 0.0}
SUMS = {"sums": FIXED, "num_features": 400}
AUTO = {**SUMS, "sums": {"bits": 32, "validation_share": 0.2}}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Two classes 2.4 deviations apart in 12 columns: Bayes' rule knows 96 %, or 88 % balanced."""
    drawn = np.random.default_rng(0)

    def part(number):
        y = (np.arange(number) % 50 < 3).astype(np.int64)
        return drawn.normal(size=(number, 12)) + 2.4 / 12**0.5 * y[:, None], y

    path = tmp_path_factory.mktemp("table") / "own.npz"
    (x, y), (x_test, y_test) = part(1500), part(1500)
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return f"npz:{path}"


def reached(table, folder, method, rounds, **tct):
    settings = {"num_clients": 10, "alpha": 0.5, "evaluate_every": 100, "clients_per_evaluation": 0}
    own = {"tct": {"num_features": 400, **tct}} if method == "tct" else {}
    config = Config(method=method, dataset=table, metrics="balanced-accuracy", **settings, **own)
    found = run(config, out=folder / "run", rounds=rounds, progress=False)
    last = found.rounds.groupby("metric")["value"].last()
    return last["accuracy"], last["balanced-accuracy"]


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
def test_a_rare_class_costs_no_accuracy(table, tmp_path, method, rounds, options):
    """94 % is what always saying the common class has; 2 points are three standard errors."""
    accuracy, _ = reached(table, tmp_path, method, rounds, **options)
    assert accuracy > 0.92


@pytest.mark.parametrize("options", [SUMS, AUTO])
def test_balanced_weights_raise_balanced_accuracy(table, tmp_path, options):
    """With 90 rare examples of the test set a standard error is 2.5 points."""
    _, plain = reached(table, tmp_path / "a", "tct", 11, **options)
    _, balanced = reached(table, tmp_path / "b", "tct", 12, **options, balanced=True)
    assert balanced > plain + 0.025
