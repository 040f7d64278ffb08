"""Clients of personal methods without a strategy: steps by hand, and what they send and keep."""

import copy
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import (
    DittoClient,
    FedBABUClient,
    FedProtoClient,
    FedRepClient,
    LocalSGD,
    PersonalisedClient,
    WeightedFedAvgClient,
    get_weights,
)
from fedntk.ntk import FeatureMap, NetworkPredictor, PrototypePredictor
from fedntk.ntk.payloads.prototypes import Prototypes

from ..conftest import refused
from ..strategies.federation import bits, examples, loaded, network
from .problem import named, weights_of

WEIGHTS = weights_of(network())
PERSONAL = {name: array for name, array in WEIGHTS.items() if name[0] == "3"}
SHARED = {name: array for name, array in WEIGHTS.items() if name[0] != "3"}
X, Y = examples(4)
LOST = {"lost-state": 0}
LAST_LAYER = FeatureMap("last-layer")


def config(server_round, saved=0):
    keys = {"server-round": server_round, "personal-run": "a", "client-id": "3"}
    return {**keys, "personal-round": saved} if saved else keys


def config_of(server_round=1, feature_map=LAST_LAYER):
    return config(server_round) | feature_map.to_config()


# ------------------------------------------------------------------ partial personalisation


def client(cache):
    sgd = LocalSGD(epochs=2, learning_rate=0.1, batch_size=4)
    return PersonalisedClient(network(1), X, Y, cache=cache, sgd=sgd)


def first(cache):
    """What a client sends and keeps of round 1; the records may come in any order."""
    message = named(personal=PERSONAL, arrays=dict(reversed(SHARED.items())))
    result, _, _ = client(cache).fit(message, config(1))
    assert list(result.records) == ["arrays"]
    return result.records["arrays"], client(cache).load_personal(config(2, saved=1))


def test_evaluation_and_predictor_are_of_its_own_network(tmp_path):
    """Float32 sums of 8 products: 1e-6."""
    sent, saved = first(tmp_path)
    message, told = named(arrays=sent), config(1, saved=1)
    loss, count, metrics = client(tmp_path).evaluate(message, told)
    with torch.no_grad():
        outputs = loaded({**sent, **saved}).double()(X.double())
    assert count == len(X)
    assert loss == pytest.approx(float(nn.functional.cross_entropy(outputs, Y)), rel=1e-6)
    assert metrics == {"accuracy": pytest.approx(float((outputs.argmax(1) == Y).double().mean()))}
    scores = client(tmp_path).predictor(message, told).predict(X)
    np.testing.assert_allclose(scores, outputs, rtol=1e-6, atol=1e-6)


def test_one_whose_arrays_are_lost_says_so_and_sends_nothing(tmp_path):
    """Also if the strategy now has a part personal that was shared before; nor prototypes."""
    message, told = named(arrays=SHARED), config(2, saved=1)
    first(tmp_path)
    fewer = {name: array for name, array in SHARED.items() if name != "0.bias"}
    assert client(tmp_path).fit(named(arrays=fewer), told) == ([], len(X), LOST)
    shutil.rmtree(tmp_path)
    assert client(tmp_path).fit(message, told) == ([], len(X), LOST)
    assert client(tmp_path).evaluate(message, told) == (0.0, len(X), LOST)
    predictor, text = client(tmp_path).predictor, "what was kept there is lost"
    refused(text, predictor, message, told, error=LookupError)
    weighted = WeightedFedAvgClient(network(), X, Y, cache=tmp_path)
    assert weighted.fit(message, told | LAST_LAYER.to_config()) == ([], len(X), LOST)


def test_arrays_without_names_or_with_others_are_refused(tmp_path):
    message = named(arrays={**SHARED, "4.weight": np.zeros(2, np.float32)})
    for call in (client(tmp_path).fit, client(tmp_path).evaluate):
        refused(r"arrays: the network has none of the names \['4.wei", call, message, config(1))
    unnamed = list(WEIGHTS.values())
    text = "NamedArrays with the records of the strategy Personal"
    refused(text, client(tmp_path).fit, unnamed, config(1))


# ------------------------------------------------------------------ Ditto


def test_dittos_steps_are_the_papers_with_the_received_weights_as_the_centre():
    """Two rounds of client 0 by hand in float64; one step an epoch, three epochs of v.

    In round 2 v begins where it ended, which is not the centre. Numbers of size 1, a dozen steps of
    float32: 1e-5.
    """
    x, y = examples(0)
    rate, pull = 0.2, 0.7
    x64, targets = x.double(), nn.functional.one_hot(y, 3).double()

    def gradient(w, b):
        slope = (torch.softmax(x64 @ w.T + b, 1) - targets) / len(x)
        return slope.T @ x64, slope.sum(0)

    w, b = torch.zeros(3, 4).double(), torch.zeros(3).double()
    v, c = w, b
    sgd = LocalSGD(learning_rate=rate, batch_size=len(x))
    own = DittoClient(nn.Linear(4, 3), x, y, sgd=sgd, pull=pull, personal_epochs=3)
    for number in (1, 2):
        received = {"weight": w.float().numpy(), "bias": b.float().numpy()}
        told = {"server-round": number, "personal-run": "by-hand", "personal-round": number - 1}
        result, count, metrics = own.fit(named(arrays=received), told)
        assert (list(result.records), count) == (["arrays"], len(x))
        assert sorted(metrics) == ["personal-loss", "restarted", "train-loss"]
        for _ in range(3):
            dv, dc = gradient(v, c)
            v, c = v - rate * (dv + pull * (v - w)), c - rate * (dc + pull * (c - b))
        dw, db = gradient(w, b)
        w, b = w - rate * dw, b - rate * db
        sent, saved = result.records["arrays"], own.load_personal(told | {"personal-round": number})
        for actual, expected in ((sent["weight"], w), (saved["weight"], v), (saved["bias"], c)):
            np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)
    assert np.abs(saved["weight"] - sent["weight"]).max() > 0.01


# ------------------------------------------------------------------ FedRep and FedBABU


def in_float64(kind, **options):
    """A client, the same network, and what takes torch's steps on layers of it: whole batches."""
    x, y = examples(4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    sgd = LocalSGD(epochs=2, learning_rate=0.5, batch_size=20)
    client = kind(copy.deepcopy(model), x.double(), y, sgd=sgd, **options)

    def descend(layer, steps):
        optimizer = torch.optim.SGD(model[layer].parameters(), lr=0.5)
        for _ in range(steps):
            model.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
        return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}

    return client, model, descend


def assert_equal(actual, expected):
    for name, array in actual.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12, atol=1e-13)


def test_fed_rep_trains_the_head_and_then_the_body(tmp_path):
    client, model, descend = in_float64(FedRepClient, head_epochs=3, cache=tmp_path)
    start = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    head, body = ({n: a for n, a in start.items() if (n[0] == "2") == of} for of in (True, False))
    reply, _, _ = client.fit(named(arrays=body, personal=head), config(1))
    descend(2, 3)
    expected = descend(0, 2)
    assert_equal(reply.records["arrays"], expected)
    assert_equal(client.load_personal(config(2, saved=1)), expected)
    assert all(parameter.requires_grad for parameter in client.model.parameters())


def test_fed_babu_trains_the_body_and_its_head_only_to_evaluate():
    client, model, descend = in_float64(FedBABUClient, head_epochs=4)
    start = get_weights(model)
    trained = dict(zip(model.state_dict(), client.fit(start, {})[0], strict=True))
    expected = descend(0, 2)
    assert_equal(trained, expected)
    loss, _, _ = client.evaluate(list(trained.values()), {})
    descend(2, 4)
    x, y = examples(4)
    wanted = nn.functional.cross_entropy(model(x.double()), y).item()
    assert loss == pytest.approx(wanted, rel=1e-12)
    predictor = client.predictor(list(trained.values()), {})
    assert predictor.evaluate(x.double(), y).loss == pytest.approx(wanted, rel=1e-12)
    alone = FedBABUClient(nn.Linear(4, 3), x, y)
    refused("model: nothing is trained of", alone.fit, get_weights(alone.model), {})


# ------------------------------------------------------------------ FedProto

ONES, NONE = Prototypes(np.ones((3, 8), np.float32), np.ones(3, int)), Prototypes.none(3, 8)


def proto_message(model, prototypes):
    return named(arrays=prototypes.to_global_arrays(), personal=weights_of(model))


def test_a_step_is_along_the_gradient_of_cross_entropy_and_the_examples_distances():
    """One full batch in float64, by autograd on the formula: 1e-12.

    Class 2 has no prototype: its examples pull at nothing, and count in the batch's size.
    """
    x, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    means = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    prototypes = Prototypes(means * [[1], [1], [0]], np.array([2, 7, 0]))
    rate, pull = 0.3, 2.5
    before, z = get_weights(model), model[:2](x)
    distances = (z - torch.from_numpy(prototypes.means).double()[y]).square().sum(1) / 5
    loss = nn.functional.cross_entropy(model[2](z), y) + pull * distances[y < 2].sum() / 9
    loss.backward()
    expected = [w - rate * p.grad.numpy() for w, p in zip(before, model.parameters(), strict=True)]
    own = FedProtoClient(model, x, y, pull=pull, sgd=LocalSGD(learning_rate=rate, batch_size=9))
    own.targets = own.targets.double()
    _, _, metrics = own.fit(proto_message(model, prototypes), config_of())
    for actual, array in zip(get_weights(model), expected, strict=True):
        np.testing.assert_allclose(actual, array, rtol=1e-12, atol=1e-12)
    assert metrics["train-loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert not any(module._forward_pre_hooks for module in model.modules())  # no hook stays


def test_before_there_are_prototypes_it_evaluates_its_head():
    own, by_head = (FedProtoClient(network(), X, Y, predict=p) for p in ("prototype", "head"))
    for prototypes, kind in ((NONE, NetworkPredictor), (ONES, PrototypePredictor)):
        assert type(own.predictor(proto_message(network(1), prototypes), config_of())) is kind
    expected = by_head.evaluate(proto_message(network(1), ONES), config_of())
    assert own.evaluate(proto_message(network(1), NONE), config_of()) == expected


def test_a_head_that_the_strategy_names_is_that_of_the_predictor_too():
    """The first layer: its inputs are the examples themselves, and it has 8 outputs."""
    means = np.arange(32, dtype=np.float32).reshape(8, 4)
    sent = proto_message(network(), Prototypes(means, np.ones(8, int)))
    told = config_of(feature_map=FeatureMap("last-layer", head="0"))
    scores = FedProtoClient(network(), X, Y).predictor(sent, told)(X)
    distances = (X[:, None] - torch.from_numpy(means)).square().sum(2)
    np.testing.assert_allclose(scores, -distances, rtol=1e-6)


def test_prototypes_of_another_network_are_refused():
    own, text = (
        FedProtoClient(network(), X, Y),
        r"expected 3 classes and 8 features .*; give the st",
    )
    for shape in ((3, 7), (4, 8)):
        sent = proto_message(network(), Prototypes.none(*shape))
        refused(text, own.fit, sent, config_of())
    other = named(arrays={"0.weight": np.zeros(3)})
    refused(r"arrays: expected global-prototypes\.means and", own.fit, other, config_of())


# ------------------------------------------------------------------ similarity-weighted FedAvg


@pytest.mark.parametrize(
    ("feature_map", "rate"), [(LAST_LAYER, 1.0), (FeatureMap("entk", 15, 7), 0.5)]
)
def test_it_sends_what_sgd_makes_of_the_weights_and_the_prototypes_of_that_network(
    feature_map, rate
):
    """Both are of the same examples: with a sampling rate, those that the round drew."""
    told, y = config_of(2, feature_map), torch.tensor([0, 2] * 4 + [2])
    options = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4), "seed": 3, "sampling_rate": rate}
    own, plain = (
        kind(network(), X, y, **options) for kind in (WeightedFedAvgClient, PersonalisedClient)
    )
    result, num_examples, metrics = own.fit(named(arrays=WEIGHTS), told)
    expected, _, same = plain.fit(named(arrays=WEIGHTS), told)
    assert list(result.records) == ["arrays", "prototypes"]
    assert bits(result.records["arrays"]) == bits(expected.records["arrays"])
    assert metrics == same
    x, targets = plain.training_examples(told)
    extract = feature_map.extractor(loaded(result.records["arrays"]))
    exact, sent = Prototypes.of(extract, x, targets.argmax(1), 3), result.records["prototypes"]
    np.testing.assert_array_equal(sent["counts"], exact.counts)
    np.testing.assert_allclose(sent["means"], exact.means[exact.present], rtol=1e-5, atol=1e-6)
    assert num_examples == len(x) == exact.counts.sum() == (9 if rate == 1 else 4)
