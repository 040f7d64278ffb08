"""A model for each client: in memory or on disk, and mixed."""

from typing import Any

import numpy as np
import pytest

from fedntk.ntk.averages import mixtures
from fedntk.strategies.personal.client_models import ClientModels

from .federation import bits


def model(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=7).astype(np.float16),
        "double": rng.normal(size=(2, 2)),
        "count": np.array(seed, np.int64),
        "none": np.zeros((0, 4), np.float32),
    }


SIZE = sum(array.nbytes for array in model(0).values())


@pytest.mark.parametrize("budget", [np.inf, 2.5 * SIZE, 0])
def test_what_is_set_comes_back_whatever_is_on_disk(budget):
    models = ClientModels(budget)
    for client, seed in ((3, 3), (9, 9), (1, 1), (9, 99), (5, 5), (1, 1), (3, 33)):
        models[client] = given = model(seed)
        old = models[client]
        given["weight"][:] = 0  # changes nothing that is kept
        models[client] = model(seed)
        assert bits(old) == bits(model(seed))  # also while it is replaced
    assert list(models) == [1, 3, 5, 9]
    assert models.bytes_in_memory == {np.inf: 4, 2.5 * SIZE: 2, 0: 0}[budget] * SIZE
    for client, seed in ((5, 5), (3, 33), (9, 99), (1, 1)):
        assert bits(models[client]) == bits(model(seed))
    models.limit_to(SIZE)
    assert models.bytes_in_memory == min(budget, SIZE)
    del models[5]
    assert list(models) == [1, 3, 9]


def test_a_full_disk_leaves_models_in_memory_and_says_so(monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "open_memmap", full)
    models = ClientModels(0)
    for client in (1, 2):
        models[client] = model(client)
    assert models.bytes_in_memory == 2 * SIZE
    assert [bits(own) for own in models.values()] == [bits(model(1)), bits(model(2))]
    assert "No space left" in caplog.text


def test_mixtures_are_weighted_sums_in_the_models_dtypes(monkeypatch):
    """Against loops in float64; whole numbers are rounded. A chunk is two numbers of two sums."""
    monkeypatch.setattr("fedntk.ntk.averages.COLUMNS", 2)
    monkeypatch.setattr("fedntk.ntk.averages.ROWS", 2)
    weights = np.vstack([np.random.default_rng(0).dirichlet(np.ones(4), size=2), np.eye(4)[1]])
    models = [model(seed) for seed in range(4)]
    found = list(mixtures(weights, models))
    for row, mixed in zip(weights, found, strict=True):
        for name, first in models[0].items():
            each = np.stack([own[name].astype(np.float64) for own in models])
            exact = np.asarray(np.tensordot(row, each, 1))
            expected = (np.rint(exact) if name == "count" else exact).astype(first.dtype)
            assert (mixed[name].dtype, mixed[name].shape) == (first.dtype, first.shape)
            np.testing.assert_allclose(mixed[name], expected)
    assert bits(found[2]) == bits(models[1])
