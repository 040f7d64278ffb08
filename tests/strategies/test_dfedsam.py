"""DFedSAM: with a radius of zero it is DFedAvg, bit for bit."""

from typing import Any

import pytest

from fedntk.clients import DFedAvgClient, DFedSAMClient, SGDClient
from fedntk.strategies import DFedAvg, DFedSAM, NoUsableReply, Topology

from .federation import Contract, Grid, app, bits, kept_by
from .test_dfedavg import OPTIONS, in_double, run

CLIENTS = app(DFedSAMClient, learning_rate=0.1, batch_size=4, local_epochs=2, rho=0.05)


def strategy(**options: Any) -> DFedSAM:
    return DFedSAM(**{"topology": Topology("regular", degree=3), **options})


CONTRACT = {"DFedSAM": Contract(strategy, CLIENTS, sends_arrays=False, one_exchange=False)}
RING: dict[str, Any] = {"topology": Topology("ring", seed=1), **OPTIONS}


def test_a_radius_of_zero_is_dfedavg_bit_for_bit_with_the_papers_factor():
    """0.95 by default; with momentum it is DFedAvgM. Another radius is something else."""
    options = {"momentum": 0.9, "weight_decay": 5e-4}
    expected, zero, own = (
        DFedAvg(learning_rate_factor=0.95, **RING),
        DFedSAM(**RING),
        DFedSAM(**RING),
    )
    mean = run(expected, Grid(in_double(DFedAvgClient, **options)), 2)
    same = run(zero, Grid(in_double(DFedSAMClient, rho=0.0, **options)), 2)
    other = run(own, Grid(in_double(DFedSAMClient, rho=0.05, **options)), 2)
    assert bits(mean) == bits(same) != bits(other)
    for client in range(6):
        assert bits(kept_by(zero, client, 2)) == bits(kept_by(expected, client, 2))


def test_another_client_is_told_what_to_use():
    with pytest.raises(NoUsableReply, match="client_fn return a DFedSAMClient"):
        run(DFedSAM(**OPTIONS), Grid(app(SGDClient)))
