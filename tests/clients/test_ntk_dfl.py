"""A client of NTK-DFL without a strategy around it: what it sends to whom, and what it refuses."""

import numpy as np
import pytest

from fedntk.clients import NamedArrays, NTKDFLClient
from fedntk.clients.gossip.ntk_dfl import EvolvedParcel
from fedntk.clients.gossip.relay import WeightsParcel
from fedntk.ntk import BadReply
from fedntk.ntk.payloads.gossip_options import NTKDFLTask

from ..strategies.federation import examples, network

X, Y = examples(4)


def weights(seed=0):
    return {name: t.numpy().copy() for name, t in network(seed).state_dict().items()}


def client(tmp_path, count=9, **options):
    return NTKDFLClient(network(), X[:count], Y[:count], loss="mse", cache=tmp_path, **options)


def message(step, *, options=(), told=(), **records):
    task = {"learning_rate": 0.1, "steps": (1.0, 4.0), "loss": "mse", **dict(options)}
    config = {
        "server-round": 1, "step": step, "batch": 0, "neighbours": [2, 5], "personal-run": "r",
        "personal-round": 0, **NTKDFLTask(**task).to_config(), **dict(told),
    }  # fmt: skip
    named = {name.replace("_", "-"): record for name, record in records.items()}
    return NamedArrays({"arrays": weights(), **named}), config


def parcel(seed, count=4):
    return WeightsParcel(weights(seed), count).to_arrays()


def test_batches_are_never_empty_and_inputs_travel_only_if_t_is_chosen_by_them(tmp_path):
    own, task = client(tmp_path, 1), {"selection": "true-loss", "batches": 2}
    for batch in (0, 1):
        asked = message("jacobians", options=task, told={"batch": batch}, from_2=parcel(2))
        np.testing.assert_array_equal(own.fit(*asked)[0].records["to-2"]["inputs"], X[:1])
    result, *_ = own.fit(*message("jacobians", from_2=parcel(2)))
    assert "inputs" not in result.records["to-2"]


def test_weights_that_would_not_be_finite_are_not_taken(tmp_path):
    """One neighbour, so nothing to compare with; its outputs are near the largest of float32."""
    first, second = (client(tmp_path, seed=seed) for seed in (1, 2))
    task = {"learning_rate": 100.0}
    first.fit(*message("average", options=task))
    asked = message("jacobians", options=task, from_1=parcel(0, 9))
    rows = second.fit(*asked)[0].records["to-1"]
    huge = {**rows, "outputs": np.full_like(rows["outputs"], 3e38)}
    for heard, t in ((rows, 4.0), (huge, 0.0)):
        result, _, metrics = first.fit(*message("evolve", options=task, from_2=heard))
        new = result.records["to-neighbours"]
        assert (metrics["t"], metrics["neighbours-heard"]) == (t, 1)
        assert all(np.isfinite(a).all() for a in new.values())
        assert all((new[name] == a).all() for name, a in weights().items()) == (t == 0)


GOOD = EvolvedParcel(WeightsParcel(weights(2), 4), 4.0, 2).to_arrays()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"0.weight": GOOD["0.weight"][:-1]}, "shape"),
        ({"0.bias": np.full(8, np.nan, np.float32)}, "non-finite"),
        ({"1.running_var": -GOOD["1.running_var"]}, "range"),
        ({"another": np.zeros(1)}, "arrays"),
        ({"num-examples": np.array(0)}, "range"),
        ({"num-examples": np.array(21)}, "range"),
        ({"metric-t": np.array(-1.0)}, "range"),
        ({"metric-neighbours-heard": np.array(-1)}, "range"),
    ],
)
def test_a_damaged_parcel_is_refused(bad, reason):
    EvolvedParcel.from_arrays(GOOD, weights(), 20)
    with pytest.raises(BadReply, match=f"^{reason}:"):
        EvolvedParcel.from_arrays(GOOD | bad, weights(), 20)


def test_weights_of_a_hub_are_adopted_unless_they_cannot_be_used(tmp_path):
    """Then the client fails in the step, and so keeps the weights that it had."""
    own, member = client(tmp_path), {"hub": False}
    own.fit(*message("jacobians", told=member, from_2=parcel(2)))
    result, _, metrics = own.fit(*message("adopt", told=member, from_2=GOOD))
    assert (metrics["t"], metrics["neighbours-heard"]) == (4.0, 2)
    found = result.records["to-neighbours"]
    assert all((found[name] == array).all() for name, array in weights(2).items())
    with pytest.raises(ValueError, match="no weights came from the cluster's hub"):
        own.fit(*message("adopt", told=member, from_2=parcel(2)))
