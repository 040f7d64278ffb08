"""TCT without some clients: the bits of a run that never had them, and what is refused."""

from logging import WARNING
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedntk.ntk import NotEnoughMemory
from fedntk.strategies import TCT, SeededFedAvg

from .federation import Grid, arrays_of, bits, lost, network
from .tct_problem import FIXED, LINEAR, held, served, sums

WAYS: dict[str, dict[str, Any]] = {
    "float64": {},
    "few bits, with a bias": {"bits": 3, "validation": held(), "bias": True},
    "ridge on the server's examples": {"auto_ridge": True, "validation": held()},
    "integers, ridge on what is held out": {"auto_ridge": True, "validation_share": 0.3, **FIXED},
    "features as they are": {"normalise": False},
}


@pytest.fixture
def clients(tmp_path: Path) -> Any:
    return served(tmp_path / "cache")


def started(strategy: TCT, grid: Grid, rounds: int = 2, **options: Any) -> ArrayRecord:
    initial = ArrayRecord(dict(network().state_dict()))
    return strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds, **options).arrays


def raw(arrays: ArrayRecord) -> dict[str, bytes]:
    return bits(arrays_of(arrays))


@pytest.mark.parametrize("way", sorted(WAYS))
def test_it_is_to_the_bit_the_model_of_a_run_that_never_had_them(clients, tmp_path, way):
    """The first weights are the network, which is never trained: both runs have the same.

    Sums are added up in the order of the clients, whatever that of nodes and replies, so that
    float64 rounds alike as well.
    """
    strategy = sums(keep_sums=tmp_path / "sums", **WAYS[way])
    arrays = started(strategy, Grid(clients, node_ids=[90, 12, 55, 7, 31, 68], order=1))
    expected = started(sums(held_out=[5, 0], **WAYS[way]), Grid(clients))
    found = strategy.without([5, 0], arrays)
    assert raw(found) == raw(expected)
    assert raw(found)[LINEAR] != raw(arrays)[LINEAR]
    assert raw(strategy.without([], arrays)) == raw(arrays)
    assert raw(found) == raw(strategy.without([0, 5], found))  # of the kept sums alone


def test_a_client_whose_reply_never_came_is_not_in_the_model(clients, tmp_path):
    """It cannot be taken out; without another one the model is that of neither."""
    strategy = sums(keep_sums=tmp_path, **FIXED)
    arrays = started(strategy, Grid(clients, changes={2: lost}))
    assert strategy.summed == (0, 1, 3, 4, 5)
    with pytest.raises(ValueError, match=r"clients: expected some of .* 0, 1, 3, 4, 5, got 2"):
        strategy.without([2], arrays)
    expected = started(sums(held_out=[2, 4], **FIXED), Grid(clients))
    assert raw(strategy.without([4], arrays)) == raw(expected)


def test_a_network_that_was_trained_stays_as_it_is(clients, tmp_path):
    """Stage 1 has seen the client; the linear model is that of the others on this network."""
    options: dict[str, Any] = {"bootstrap": SeededFedAvg(), "bootstrap_rounds": 1, **FIXED}
    strategy = sums(keep_sums=tmp_path, **options)
    arrays = started(strategy, Grid(clients), rounds=3)
    trained = ArrayRecord({name: arrays[name] for name in network().state_dict()})
    others = sums(held_out=[1], **FIXED)
    expected = others.start(grid=Grid(clients), initial_arrays=trained, num_rounds=1).arrays
    assert raw(strategy.without([1], arrays)) == raw(expected)


def test_each_run_keeps_its_own_and_one_that_was_cut_off_finds_them_again(clients, tmp_path):
    """In a new object, that goes on from the checkpoint or has loaded the state alone."""
    options = {"keep_sums": tmp_path / "sums", **FIXED}
    first, again, loaded = (sums(**options) for _ in range(3))
    before = started(first, Grid(clients), 1, checkpoint=tmp_path / "cut")
    state, expected = first.state_dict(), raw(first.without([4], before))
    assert expected == raw(first.without([4], started(first, Grid(clients))))
    assert len(list((tmp_path / "sums").iterdir())) == 2
    arrays = started(again, Grid(clients), 3, checkpoint=tmp_path / "cut")
    loaded.load_state_dict(state)
    assert [raw(strategy.without([4], arrays)) for strategy in (again, loaded)] == [expected] * 2


def test_what_was_forgotten_or_damaged_is_gone_and_has_to_be_named_from_then_on(clients, tmp_path):
    strategy = sums(keep_sums=tmp_path)
    arrays = started(strategy, Grid(clients))
    strategy.forget_kept([3])
    assert not list(tmp_path.glob("*/client-3"))
    with pytest.raises(ValueError, match=r"those of client 3 are not in .* take that client out"):
        strategy.without([1], arrays)
    (path,) = tmp_path.glob("*/client-4/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"those of client 4 are not in .* or are damaged"):
        strategy.without([1, 3], arrays)
    expected = started(sums(held_out=[1, 3, 4]), Grid(clients))
    assert raw(strategy.without([1, 3, 4], arrays)) == raw(expected)


def test_a_disk_that_fills_up_is_logged_and_the_run_goes_on(clients, tmp_path, monkeypatch, caplog):
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    strategy = sums(keep_sums=tmp_path)
    monkeypatch.setattr(strategy.kept_sums, "write", full)
    with caplog.at_level(WARNING, "flwr"):
        arrays = started(strategy, Grid(clients))
    assert "the clients' sums are not kept: no space left on device" in caplog.text
    assert arrays[LINEAR].numpy().any()
    with pytest.raises(ValueError, match=r"no sums were kept in .* by this run yet"):
        strategy.without([1], arrays)


def test_what_cannot_be_solved_again_is_refused(clients, tmp_path, monkeypatch):
    strategy, arrays = sums(keep_sums=tmp_path), ArrayRecord(dict(network().state_dict()))
    with pytest.raises(ValueError, match=r"no sums were kept .* its round of pooled-statistics"):
        strategy.without([1], arrays)
    with pytest.raises(ValueError, match="without: goes with solve = statistics, got solve = cl"):
        sums(solve="clients").without([1], arrays)
    arrays = started(strategy, Grid(clients))
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda _: 2000)
    with pytest.raises(NotEnoughMemory, match="pooled-statistics of 12 features needs"):
        strategy.without([1], arrays)
