"""FedEnsembleClient trains as the client within does, and evaluates the mean of the models."""

import pytest
import torch
from torch import nn

from fedntk.clients import FedEnsembleClient, NamedArrays, SGDClient, get_weights

from ..conftest import refused
from ..strategies.federation import network
from .problem import X, Y, raw, weights_of


def sent(*models):
    return NamedArrays({f"model-{k}.arrays": weights_of(m) for k, m in enumerate(models)})


def test_it_trains_as_the_client_within_and_refuses_to_evaluate_one_model():
    plain = SGDClient(network(0), X, Y, seed=1)
    client = FedEnsembleClient(SGDClient(network(0), X, Y, seed=1))
    weights, config = get_weights(network(5)), {"server-round": 3}
    ours, theirs = client.fit(weights, config), plain.fit(weights, config)
    assert raw(ours[0]) == raw(theirs[0])
    assert ours[1:] == theirs[1:]
    text = r"model-0\.arrays, from the strategy FedEnsemble, got"
    refused(text, client.evaluate, NamedArrays({"arrays": {}}), {})


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_it_evaluates_the_mean_of_probabilities_or_outputs(loss):
    """Against float64; float32 sums of three models and twenty examples are right to 1e-6."""
    models = [network(k) for k in range(3)]
    client = FedEnsembleClient(SGDClient(network(0), X, Y, loss=loss))
    value, count, metrics = client.evaluate(sent(*models), {"server-round": 1})
    outputs = torch.stack([model.double().eval()(X.double()).detach() for model in models])
    if loss == "mse":
        mean = outputs.mean(0)
        expected = float(((mean - nn.functional.one_hot(Y, 3)) ** 2).mean() / 2)
    else:
        p = outputs.softmax(-1)
        mean = p.mean(0)
        expected = -float(mean[torch.arange(20), Y].log().mean())
        entropies = [float(-(q * q.log()).sum(-1).mean()) for q in (mean, p)]
        assert metrics["mutual-information"] == pytest.approx(entropies[0] - entropies[1])
    assert (value, count) == (pytest.approx(expected, rel=1e-5), 20)
    assert metrics["accuracy"] == float((mean.argmax(1) == Y).double().mean())


def test_configuration_of_one_model_reaches_only_that_model():
    class Watching(SGDClient):
        def predictor(self, parameters, config):
            seen.append((config["shared"], config.get("own")))
            return super().predictor(parameters, config)

    seen = []
    client = FedEnsembleClient(Watching(network(0), X, Y))
    client.evaluate(sent(network(0), network(1)), {"shared": 1, "model-1.own": "b"})
    assert seen == [(1, None), (1, "b")]
