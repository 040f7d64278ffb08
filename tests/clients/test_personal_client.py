"""PersonalisedClient without a strategy: named arrays in, named arrays out, the rest kept here."""

import shutil

import numpy as np
import pytest
import torch

from fedntk.clients import LocalSGD, NamedArrays, PersonalisedClient, get_weights

from ..conftest import refused
from ..strategies.federation import examples, loaded, network

WEIGHTS = dict(zip(network().state_dict(), get_weights(network()), strict=True))
PERSONAL = {name: array for name, array in WEIGHTS.items() if name[0] == "3"}
SHARED = {name: array for name, array in WEIGHTS.items() if name[0] != "3"}
SGD = {"sgd": LocalSGD(epochs=2, learning_rate=0.1, batch_size=4)}
X, Y = examples(3)


def config(server_round, kept=0):
    own = {"server-round": server_round, "personal-run": "a", "client-id": "3"}
    return {**own, "personal-round": kept} if kept else own


def client(cache):
    return PersonalisedClient(network(1), X, Y, cache=cache, **SGD)


def first(cache):
    """What a client sends and keeps of round 1; the records may come in any order."""
    message = NamedArrays({"personal": PERSONAL, "arrays": dict(reversed(SHARED.items()))})
    result, _, _ = client(cache).fit(message, config(1))
    assert list(result.records) == ["arrays"]
    return result.records["arrays"], client(cache).load_personal(config(2, kept=1))


def test_evaluation_and_predictor_are_of_its_own_network(tmp_path):
    """Float32 sums of 8 products: 1e-6."""
    sent, kept = first(tmp_path)
    own, message = client(tmp_path), NamedArrays({"arrays": sent})
    loss, count, metrics = own.evaluate(message, config(1, kept=1))
    with torch.no_grad():
        outputs = loaded({**sent, **kept}).double()(X.double())
    assert count == len(X)
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, Y)), rel=1e-6)
    assert metrics == {"accuracy": pytest.approx(float((outputs.argmax(1) == Y).double().mean()))}
    scores = own.predictor(message, config(1, kept=1)).predict(X)
    np.testing.assert_allclose(scores, outputs, rtol=1e-6, atol=1e-6)


def test_one_whose_arrays_are_lost_says_so_and_sends_nothing(tmp_path):
    """Also if the strategy now has a part personal that was shared before."""
    lost, message = {"lost-state": 0}, NamedArrays({"arrays": SHARED})
    first(tmp_path)
    fewer = {name: array for name, array in SHARED.items() if name != "0.bias"}
    found = client(tmp_path).fit(NamedArrays({"arrays": fewer}), config(2, kept=1))
    assert found == ([], len(X), lost)
    shutil.rmtree(tmp_path)
    own = client(tmp_path)
    assert own.fit(message, config(2, kept=1)) == ([], len(X), lost)
    assert own.evaluate(message, config(2, kept=1)) == (0.0, len(X), lost)
    refused("what was kept there is lost", own.predictor, message, config(2, kept=1))


def test_arrays_without_names_or_with_others_are_refused(tmp_path):
    message = NamedArrays({"arrays": {**SHARED, "4.weight": np.zeros(2, np.float32)}})
    for call in (client(tmp_path).fit, client(tmp_path).evaluate):
        refused(r"arrays: the network has none of the names \['4.wei", call, message, config(1))
    with pytest.raises(ValueError, match="NamedArrays with the records of the strategy Personal"):
        client(tmp_path).fit(list(WEIGHTS.values()), config(1))
