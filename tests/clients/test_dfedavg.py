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


def linear() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.load_state_dict({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    return layer


def client(**options: Any) -> DFedAvgClient:
    return DFedAvgClient(linear(), *examples(3), learning_rate=0.1, **options)  # 8 examples


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
    assert sum(shares) == pytest.approx(1, abs=1e-15)


def test_an_average_without_oneself_is_of_the_others():
    """By examples 2 and 10, of weights 0 (one's own), 1 and 4: (2 + 40) / 12."""
    own = {"weight": np.zeros((3, 4), np.float32)}
    others = [
        (1, WeightsParcel({"weight": np.ones((3, 4), np.float32)}, 2)),
        (7, WeightsParcel({"weight": np.full((3, 4), 4, np.float32)}, 10)),
    ]
    average = client().mix(own, others, message(), with_own=False)
    np.testing.assert_allclose(average["weight"], 3.5, rtol=1e-7)
    assert client().mix(own, [], message(), with_own=False)["weight"].max() == 0


def test_an_unknown_rule_or_step_and_an_average_without_training_are_refused():
    told = DFedAvgOptions().to_config()
    with pytest.raises(ValueError, match="mixing: expected one of examples, equal, metropolis"):
        client().fit(NamedArrays({}), {**told, "option-mixing": "median"})
    with pytest.raises(ValueError, match="step: expected one of train, average, got 'jacobians'"):
        client().fit(NamedArrays({}), {**told, "step": "jacobians"})
    config = {"step": "average", "server-round": 3, "personal-run": "alone", "client-id": "3"}
    with pytest.raises(ValueError, match="the weights of this round are lost"):
        client().fit(NamedArrays({}), {**told, **config})


def test_a_global_model_to_be_near_to_is_refused():
    with pytest.raises(ValueError, match=r"proximal_mu: .*; DFedAvgClient has no global"):
        client(proximal_mu=0.1)


def test_the_strategys_factor_multiplies_the_rate():
    """One full batch from zero: the step is in proportion to the rate; lr of train_config, too."""
    weights = {name: tensor.numpy() for name, tensor in linear().state_dict().items()}
    halved = message(learning_rate_factor=0.5)
    whole, _ = client(batch_size=8).train_from(weights, message())
    half, _ = client(batch_size=8).train_from(weights, halved)
    twice = halved._replace(config={**halved.config, "lr": 0.2})
    other, _ = client(batch_size=8).train_from(weights, twice)
    np.testing.assert_allclose(2 * half["weight"], whole["weight"], rtol=1e-6)
    np.testing.assert_array_equal(other["weight"], whole["weight"])
    assert np.abs(whole["weight"]).max() > 0.01
