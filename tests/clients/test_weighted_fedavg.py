"""A client of weighted FedAvg without a strategy around it: what it sends, and of which network."""

import numpy as np
import pytest
import torch

from fedntk.clients import LocalSGD, NamedArrays, PersonalisedClient, WeightedFedAvgClient
from fedntk.ntk import FeatureMap
from fedntk.ntk.payloads.prototypes import Prototypes

from ..strategies.federation import bits, loaded, network

X = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2] * 5 + [2])
LOCAL = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4), "seed": 3}


def message():
    named = {name: tensor.numpy() for name, tensor in network().state_dict().items()}
    return NamedArrays({"arrays": named})


@pytest.mark.parametrize(
    ("feature_map", "sampling_rate"),
    [(FeatureMap("last-layer"), 1.0), (FeatureMap("entk", 15, 7), 0.5)],
)
def test_it_sends_what_sgd_makes_of_the_weights_and_the_prototypes_of_that_network(
    feature_map, sampling_rate
):
    """Of the same examples: with a sampling rate, of those that the round drew."""
    config = {"server-round": 2, **feature_map.to_config()}
    options = {**LOCAL, "sampling_rate": sampling_rate}
    client = WeightedFedAvgClient(network(), X, Y, **options)
    result, num_examples, metrics = client.fit(message(), config)
    plain = PersonalisedClient(network(), X, Y, **options)
    expected, _, own_metrics = plain.fit(message(), config)
    assert list(result.records) == ["arrays", "prototypes"]
    assert bits(result.records["arrays"]) == bits(expected.records["arrays"])
    assert metrics == own_metrics
    trained = loaded(result.records["arrays"])
    x, targets = plain.training_examples(config)
    own = Prototypes.of(feature_map.extractor(trained), x, targets.argmax(1), 3)
    np.testing.assert_array_equal(result.records["prototypes"]["counts"], own.counts)
    np.testing.assert_allclose(
        result.records["prototypes"]["means"], own.means[own.present], rtol=1e-5, atol=1e-6
    )
    assert num_examples == len(x) == (11 if sampling_rate == 1 else 6)
    assert own.counts.sum() == len(x)


def test_a_client_that_lost_what_it_kept_forms_no_prototypes(tmp_path):
    """The message has the body alone, and says that the head is the client's own of round 1."""
    shared = {name: a for name, a in message().records["arrays"].items() if name[0] != "3"}
    config = {"personal-run": "a", "personal-round": 1, **FeatureMap("last-layer").to_config()}
    client = WeightedFedAvgClient(network(), X, Y, cache=tmp_path, **LOCAL)
    assert client.fit(NamedArrays({"arrays": shared}), config) == ([], 11, {"lost-state": 0})
