"""DFedAvgClient by itself: mixing rules, the rate, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import DFedAvgClient, NamedArrays
from fedntk.clients.gossip.relay import Message, WeightsParcel
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from ..strategies.federation import examples


def client(**options: Any) -> DFedAvgClient:
    layer = nn.Linear(4, 3)
    layer.load_state_dict({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    return DFedAvgClient(layer, *examples(3), learning_rate=0.1, **options)  # 8 examples


def message(**options: Any) -> Message:
    """A message to a client with the neighbours 1, 4 and 7, which have 1, 2 and 5."""
    config = {"neighbours": [1, 4, 7], "degrees": [1, 2, 5], "server-round": 2}
    return Message(config, {}, DFedAvgOptions(**options))


@pytest.mark.parametrize(
    ("mixing", "expected"),
    [
        ("examples", [8 / 20, 2 / 20, 10 / 20]),
        ("equal", [1 / 3, 1 / 3, 1 / 3]),
        # three neighbours of its own, of which two are heard; they have one and five
        ("metropolis", [1 - 1 / 4 - 1 / 6, 1 / 4, 1 / 6]),
    ],
)
def test_a_row_of_the_mixing_matrix_sums_to_one(mixing, expected):
    shares = client().shares([(1, 2), (7, 10)], message(mixing=mixing))
    assert shares == pytest.approx(expected, abs=1e-15)


def test_an_average_without_oneself_is_of_the_others():
    """By examples 2 and 10, of weights 0 (one's own), 1 and 4: (2 + 40) / 12."""
    zeros, ones = (np.full((3, 4), value, np.float32) for value in (0, 1))
    others = [(1, WeightsParcel({"w": ones}, 2)), (7, WeightsParcel({"w": 4 * ones}, 10))]
    average = client().mix({"w": zeros}, others, message(), with_own=False)
    np.testing.assert_allclose(average["w"], 3.5, rtol=1e-7)
    assert client().mix({"w": zeros}, [], message(), with_own=False)["w"].max() == 0


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"option-mixing": "median"}, "mixing: expected one of examples, equal, metropolis"),
        ({"step": "jacobians"}, "step: expected one of train, average, got 'jacobians'"),
        ({"step": "average", "server-round": 3}, "the weights of this round are lost"),
    ],
)
def test_an_unknown_rule_or_step_and_an_average_without_training_are_refused(told, reason):
    with pytest.raises(ValueError, match=reason):
        client().fit(NamedArrays({}), {**DFedAvgOptions().to_config(), "client-id": "3", **told})


def test_a_global_model_to_be_near_to_is_refused():
    with pytest.raises(ValueError, match=r"proximal_mu: .*; DFedAvgClient has no global"):
        client(proximal_mu=0.1)


def test_the_strategys_factor_multiplies_the_rate():
    """One full batch from zero: the step is in proportion to the rate; lr of train_config, too."""
    halved = message(learning_rate_factor=0.5)
    twice = halved._replace(config={**halved.config, "lr": 0.2})
    whole, half, other = (
        client(batch_size=8).train_from(client().model_weights(), each)[0]["weight"]
        for each in (message(), halved, twice)
    )
    np.testing.assert_allclose(2 * half, whole, rtol=1e-6)
    np.testing.assert_array_equal(other, whole)
    assert np.abs(whole).max() > 0.01
