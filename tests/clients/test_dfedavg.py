"""DFedAvgClient by itself: shares of those who are heard, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from fedntk.clients import DFedAvgClient, NamedArrays
from fedntk.clients.gossip.relay import Message
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


def test_a_neighbour_that_was_not_heard_leaves_its_share():
    """Three neighbours, of which two are heard; they have one and five."""
    heard = [(1, 2), (7, 10)]
    shares = [client().shares(heard, message(mixing=rule)) for rule in ("examples", "metropolis")]
    assert shares[0] == pytest.approx([8 / 20, 2 / 20, 10 / 20], abs=1e-15)
    assert shares[1] == pytest.approx([1 - 1 / 4 - 1 / 6, 1 / 4, 1 / 6], abs=1e-15)


def test_an_average_without_training_is_refused():
    told = {"client-id": "3", "step": "average", "server-round": 3}
    with pytest.raises(ValueError, match="the weights of this round are lost"):
        client().fit(NamedArrays({}), {**DFedAvgOptions().to_config(), **told})


def test_a_global_model_to_be_near_to_is_refused():
    with pytest.raises(ValueError, match=r"proximal_mu: .*; DFedAvgClient has no global"):
        client(proximal_mu=0.1)
