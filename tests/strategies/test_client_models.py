"""A model for each client: in memory or on disk, and mixed."""

from typing import Any

import numpy as np
import pytest

from fedntk.ntk.averages import mixtures
from fedntk.strategies.core.array_archive import ArrayArchive, checksum
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
    for client in (3, 9, 1):
        models[client] = model(client)
    models[9] = model(99)
    for client in (5, 1):
        models[client] = model(client)
    models[3] = model(33)
    assert list(models) == [1, 3, 5, 9]
    assert models.bytes_in_memory == {np.inf: 4, 2.5 * SIZE: 2, 0: 0}[budget] * SIZE
    for client, seed in ((5, 5), (3, 33), (9, 99), (1, 1)):
        assert bits(models[client]) == bits(model(seed))
    del models[5]
    assert 5 not in models
    assert len(models) == 3


def test_a_model_on_disk_can_be_replaced_while_the_old_one_is_read():
    models = ClientModels(0)
    models[0] = model(0)
    old, folder = models[0], models._folder
    models[0] = model(1)
    assert (bits(old), bits(models[0])) == (bits(model(0)), bits(model(1)))
    assert list(folder.iterdir())
    del models
    assert not folder.exists()  # it ends with the object


def test_what_is_kept_does_not_change_with_the_array_that_was_given():
    models, given = ClientModels(), model(0)
    models[0] = given
    given["weight"][:] = 0
    assert bits(models[0]) == bits(model(0))


def test_a_full_disk_leaves_models_in_memory_and_says_so(monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "open_memmap", full)
    models = ClientModels(0)
    for client in (1, 2):
        models[client] = model(client)
    assert models.bytes_in_memory == 2 * SIZE
    assert [bits(own) for own in models.values()] == [bits(model(1)), bits(model(2))]
    assert [r.message for r in caplog.records if "No space left" in r.message]


def test_mixtures_are_weighted_sums_in_the_models_dtypes(monkeypatch):
    """Against loops in float64; whole numbers are rounded. A chunk is two numbers of two sums."""
    monkeypatch.setattr("fedntk.ntk.averages.COLUMNS", 2)
    monkeypatch.setattr("fedntk.ntk.averages.ROWS", 2)
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=3)
    models = [model(seed) for seed in range(4)]
    found = list(mixtures(weights, models))
    assert len(found) == 3
    for row, mixed in zip(weights, found, strict=True):
        for name, first in models[0].items():
            exact = sum(
                w * own[name].astype(np.float64) for w, own in zip(row, models, strict=True)
            )
            assert (mixed[name].dtype, mixed[name].shape) == (first.dtype, first.shape)
            expected = np.rint(exact) if name == "count" else exact
            np.testing.assert_allclose(mixed[name], np.asarray(expected).astype(first.dtype))
    (same,) = mixtures(np.array([[0.0, 1.0, 0.0, 0.0]]), models)
    assert bits(same) == bits(models[1])


def test_checkpoints_read_and_write_only_the_models_that_changed(tmp_path, monkeypatch):
    """Of ten clients, with models on disk, two change: only theirs are read and written again."""
    read: list[int] = []
    monkeypatch.setattr(
        "fedntk.strategies.core.array_archive.checksum",
        lambda array: read.append(array.nbytes) or checksum(array),
    )
    models, archive = ClientModels(0), ArrayArchive(tmp_path)

    def save(number: int) -> int:
        read.clear()
        named = {f"{k}.{name}": a for k, own in models.items() for name, a in own.items()}
        archive.save(number, named)
        return (tmp_path / f"round-{number:06}.safetensors").stat().st_size

    for client in range(10):
        models[client] = {"weight": np.full(10_000, client, np.float32)}
    first = save(1)
    assert read == [40_000] * 10
    for client in (3, 7):
        models[client] = {"weight": np.full(10_000, client + 0.5, np.float32)}
    second = save(2)
    assert read == [40_000] * 2
    assert first > 400_000
    assert second < 90_000
    newest = ArrayArchive(tmp_path).newest()
    assert newest is not None
    for client in range(10):
        assert set(newest[f"{client}.weight"]) == {client + 0.5 * (client in (3, 7))}
