"""DFedAvgClient by itself: shares of those who are heard, and what it refuses."""

import pytest

from fedntk.clients import DFedAvgClient, LocalSGD, NamedArrays
from fedntk.clients.gossip.relay import Message
from fedntk.clients.gossip.relay_memory import RelayMemory
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from ..strategies.federation import examples, network


def test_a_neighbour_that_was_not_heard_leaves_its_share():
    """The client has 8 examples and three neighbours; two are heard, which have one and five."""
    config = {"degrees": [1, 2, 5], "server-round": 2}
    own, heard = DFedAvgClient(network(), *examples(3)), [(1, 2), (7, 10)]
    memory = RelayMemory(None, own.model, own.seed, config, same_weights=True)
    for rule, expected in (
        ("examples", [8 / 20, 2 / 20, 10 / 20]),
        ("metropolis", [1 - 1 / 4 - 1 / 6, 1 / 4, 1 / 6]),
    ):
        message = Message(config, {}, DFedAvgOptions(mixing=rule), memory, neighbours=(1, 4, 7))
        assert own.shares(heard, message) == pytest.approx(expected, abs=1e-15)


def test_an_average_without_training_is_refused():
    told = {"step": "average", "server-round": 3, **DFedAvgOptions().to_config()}
    with pytest.raises(ValueError, match="the weights of this round are lost"):
        DFedAvgClient(network(), *examples(3)).fit(NamedArrays({}), told)


def test_a_global_model_to_be_near_to_is_refused():
    with pytest.raises(ValueError, match=r"proximal_mu: .*; DFedAvgClient has no global"):
        DFedAvgClient(network(), *examples(3), sgd=LocalSGD(proximal_mu=0.1))
