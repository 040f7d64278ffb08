"""Defences: strategies follow one option, bear a liar that breaks them without, or refuse it."""

from functools import partial

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedntk.clients import PersonalisedClient, SCAFFOLDClient, SGDClient
from fedntk.ntk.robust_averages import DEFENCES
from fedntk.simulations.attacks import ATTACKS
from fedntk.simulations.engine.lies import LyingGrid
from fedntk.strategies import NTKFL, SCAFFOLD, FedBN, FedEnsemble, SeededFedAvg, WeightedFedAvg

from .federation import Grid, app, arrays_of, network, start, told

ROBUST = [defence for defence in DEFENCES if defence != "none"]
CASES = {
    "fedavg": (partial(SeededFedAvg, outlier_factor=np.inf), app(SGDClient)),
    "scaffold": (partial(SCAFFOLD, outlier_factor=np.inf), app(SCAFFOLDClient)),
}


def lying(clients, liars=(2,), attack="sign-flip", factor=60.0):
    return LyingGrid(Grid(clients), liars, ATTACKS[attack], factor=factor)


def distance(one, other):
    return max(float(np.abs(one[n] - other[n]).max()) for n in one if one[n].dtype.kind == "f")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("defence", [d for d in ROBUST if d != "bulyan"])  # six clients: too few
def test_a_liar_that_moves_the_mean_far_moves_the_defended_little(name, defence):
    """The liar's change is -60 times an honest one: a sixth of it is ten honest changes."""
    make, clients = CASES[name]
    honest = start(make(), Grid(clients), 2)
    first = arrays_of(ArrayRecord(dict(network().state_dict())))
    moved = distance(first, honest)
    undefended = start(make(), lying(clients), 2)
    defended = start(make(defence=defence), lying(clients), 2)
    assert distance(undefended, honest) > 3 * moved
    assert distance(defended, honest) < 2 * moved


def test_the_option_is_no_change_without_it_and_another_with_it():
    plain = start(SeededFedAvg(), Grid(CASES["fedavg"][1]), 2)
    for defence, same in (("none", True), ("median", False)):
        own = start(SeededFedAvg(defence=defence), Grid(CASES["fedavg"][1]), 2)
        assert (distance(plain, own) == 0) == same


def test_too_few_replies_for_the_liars_expected_leave_the_model():
    """Krum bears two liars among seven, and six clients reply."""
    strategy = SeededFedAvg(defence="krum", liars_expected=2)
    after = start(strategy, Grid(CASES["fedavg"][1]))
    assert told(strategy) == [6]
    assert distance(after, arrays_of(ArrayRecord(dict(network().state_dict())))) == 0


def test_personal_methods_defend_what_is_shared():
    make = partial(FedBN, network=network(), outlier_factor=np.inf)
    clients = app(PersonalisedClient)
    honest = start(make(), Grid(clients), 2)
    defended = start(make(defence="nnm"), lying(clients), 2)
    assert distance(defended, honest) < distance(start(make(), lying(clients), 2), honest) / 3


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partial(NTKFL, learning_rate=0.1), "none for NTKFL, got median"),
        (partial(WeightedFedAvg, network=network()), "none or norm-bound for WeightedFedAvg"),
        (partial(FedEnsemble, inner=SeededFedAvg), "that of inner, which follows it, none"),
    ],
)
def test_methods_without_such_a_mean_refuse(make, expected):
    with pytest.raises(ValueError, match=f"defence: expected {expected}"):
        make(defence="median")
