"""A ledger of kept sums: clients that harm the model are removed, as if they had never sent any."""

from functools import partial

import pytest
import torch

from fedntk.strategies import KeptSums, Ledger

from .federation import Grid, arrays_of, bits, damaged, lost
from .test_one_exchange import clients_of, make, run


def draw(count: int, seed: int, moved: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of three classes, with labels moved on."""
    drawn = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, 4, generator=drawn) + 2 * torch.nn.functional.one_hot(y, 4)
    return x, (y + moved) % 3


CLIENTS = clients_of([draw(120, k, moved=int(k == 4)) for k in range(6)])
VALIDATION = draw(900, 99)
strategy = partial(make, validation=VALIDATION)


@pytest.mark.parametrize("bits_", [8, 32])
def test_a_liar_is_removed_and_comes_back_on_request(bits_, tmp_path):
    """The model is that of a run in which the liar was lost; restored, that of all clients."""
    exchange = strategy(storage=KeptSums(tmp_path), ledger=Ledger(0.05), bits=bits_)
    found = run(exchange, Grid(CLIENTS))
    assert (exchange.ledger.removed, exchange.storage.summed) == ((4,), (0, 1, 2, 3, 5))
    assert exchange.train_metrics[1]["clients-removed"] == 1
    assert bits(found) == bits(run(strategy(bits=bits_), Grid(CLIENTS, changes={4: lost})))
    back = exchange.without([], exchange.global_arrays, restored=[4])
    everyone = run(strategy(bits=bits_), Grid(CLIENTS))
    assert bits(arrays_of(back)) == bits(everyone)
    with pytest.raises(ValueError, match=r"restored: expected some of \(4,\), got \[3\]"):
        exchange.without([], exchange.global_arrays, restored=[3])


def test_sums_of_no_examples_are_removed_and_said(tmp_path, caplog):
    """All class sums times 1.2 pass every check of one number."""
    parts = {"storage": KeptSums(tmp_path), "ledger": Ledger(0.05)}
    exchange = strategy(**parts, auto_ridge=False, validation_share=0.0)
    change = damaged(1, lambda sums: sums + sums // 2)
    run(exchange, Grid(clients_of([draw(60, k) for k in range(6)]), changes={2: change}))
    assert exchange.ledger.removed == (2,)
    assert "client 2 is removed: no examples have its sums" in caplog.text


def test_honest_clients_stay(tmp_path):
    exchange = strategy(storage=KeptSums(tmp_path), ledger=Ledger(0.05))
    honest = clients_of([draw(60, k) for k in range(6)])
    found = run(exchange, Grid(honest))
    assert exchange.train_metrics[1]["clients-removed"] == 0
    assert bits(found) == bits(run(strategy(), Grid(honest)))
