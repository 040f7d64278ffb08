"""DFedSAM: with a radius of zero it is DFedAvg, bit for bit."""

from fedntk.clients import DFedAvgClient, DFedSAMClient
from fedntk.strategies import DFedAvg, DFedSAM, Topology

from .federation import Grid, bits, kept_by
from .test_dfedavg import OPTIONS, contract, in_double, run

CONTRACT = {"DFedSAM": contract(DFedSAM, DFedSAMClient)}


def test_a_radius_of_zero_is_dfedavg_bit_for_bit_with_the_papers_factor():
    """0.95 by default; with momentum it is DFedAvgM. Another radius is something else."""
    ring = {"topology": Topology("ring", seed=1), **OPTIONS}
    sgd = {"momentum": 0.9, "weight_decay": 5e-4}
    expected, zero = DFedAvg(learning_rate_factor=0.95, **ring), DFedSAM(**ring)
    mean = run(expected, Grid(in_double(DFedAvgClient, sgd)), 2)
    same = run(zero, Grid(in_double(DFedSAMClient, sgd, rho=0.0)), 2)
    other = run(DFedSAM(**ring), Grid(in_double(DFedSAMClient, sgd)), 2)
    assert bits(mean) == bits(same) != bits(other)
    assert bits(kept_by(zero, 2, 2)) == bits(kept_by(expected, 2, 2))
