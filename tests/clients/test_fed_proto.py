"""FedProtoClient: a step by autograd on the formula, and what it refuses."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import FedProtoClient, LocalSGD, NamedArrays, get_weights
from fedntk.ntk import FeatureMap, NetworkPredictor, PrototypePredictor
from fedntk.ntk.payloads.prototypes import Prototypes

from ..strategies.federation import examples, network

ONES = Prototypes(np.ones((3, 8), np.float32), np.ones(3, int))
NONE = Prototypes.none(3, 8)


def message(model, prototypes):
    weights = dict(zip(model.state_dict(), get_weights(model), strict=True))
    return NamedArrays({"arrays": prototypes.to_global_arrays(), "personal": weights})


def config_of(server_round=1, **more):
    map_config = FeatureMap("last-layer").to_config()
    return {"server-round": server_round, "personal-run": "by-hand", **map_config, **more}


def test_a_step_is_along_the_gradient_of_cross_entropy_and_the_examples_distances():
    """One full batch in float64, by autograd on the formula: 1e-12.

    Class 2 has no prototype: its examples pull at nothing, and count in the batch's size.
    """
    x, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    rng = np.random.default_rng(0)
    means = rng.normal(size=(3, 5)).astype(np.float32)
    prototypes = Prototypes(means * [[1], [1], [0]], np.array([2, 7, 0]))
    rate, pull = 0.3, 2.5
    before, z = get_weights(model), model[:2](x)
    distances = (z - torch.from_numpy(prototypes.means).double()[y]).square().sum(1) / 5
    loss = nn.functional.cross_entropy(model[2](z), y) + pull * distances[y < 2].sum() / 9
    loss.backward()
    expected = [w - rate * p.grad.numpy() for w, p in zip(before, model.parameters(), strict=True)]
    own = FedProtoClient(model, x, y, pull=pull, sgd=LocalSGD(learning_rate=rate, batch_size=9))
    own.targets = own.targets.double()
    _, _, metrics = own.fit(message(model, prototypes), config_of())
    for found, wanted in zip(get_weights(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert metrics["train-loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert not any(module._forward_pre_hooks for module in model.modules())  # no hook stays


def test_before_there_are_prototypes_it_evaluates_its_head():
    own, by_head = (
        FedProtoClient(network(), *examples(4), predict=p) for p in ("prototype", "head")
    )
    for prototypes, kind in ((NONE, NetworkPredictor), (ONES, PrototypePredictor)):
        predictor = own.predictor(message(network(1), prototypes), config_of())
        assert type(predictor) is kind
    expected = by_head.evaluate(message(network(1), ONES), config_of())
    assert own.evaluate(message(network(1), NONE), config_of()) == expected


def test_a_head_that_the_strategy_names_is_that_of_the_predictor_too():
    """The first layer: its inputs are the examples themselves, and it has 8 outputs."""
    means = np.arange(32, dtype=np.float32).reshape(8, 4)
    x, y = examples(4)
    sent = message(network(), Prototypes(means, np.ones(8, int)))
    config = config_of() | FeatureMap("last-layer", head="0").to_config()
    scores = FedProtoClient(network(), x, y).predictor(sent, config)(x)
    distances = (x[:, None] - torch.from_numpy(means)).square().sum(2)
    np.testing.assert_allclose(scores, -distances, rtol=1e-6)


def test_prototypes_of_another_network_are_refused():
    own = FedProtoClient(network(), *examples(4))
    for shape in ((3, 7), (4, 8)):
        with pytest.raises(ValueError, match=r"expected 3 classes and 8 features .*; give the st"):
            own.fit(message(network(), Prototypes.none(*shape)), config_of())
    with pytest.raises(ValueError, match=r"arrays: expected global-prototypes\.means and"):
        own.fit(NamedArrays({"arrays": {"0.weight": np.zeros(3)}}), config_of())
