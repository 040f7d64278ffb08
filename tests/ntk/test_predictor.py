"""A predictor has the scores of what was learned, and the loss and accuracy of clients."""

import pytest
import torch
from torch import nn

from fedntk.clients import ModelClient, get_weights
from fedntk.ntk import FeatureMap, Normaliser, TCTModel
from fedntk.ntk.convex.local_steps import convex_loss
from fedntk.ntk.predictors.network import NetworkPredictor, Predictor, arrays_of

from ..conftest import refused

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2100, 6, generator=GENERATOR)
Y = torch.randint(3, (2100,), generator=GENERATOR)


def network(width=8):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.ReLU(),
            nn.Linear(width, 3),
        )  # fmt: skip


def tct(loss="mse"):
    width = FeatureMap().width(network())
    linear = torch.randn(width, 3, generator=torch.Generator().manual_seed(2)) / width
    return TCTModel(network(), FeatureMap(), Normaliser.identity(width), linear.numpy(), loss=loss)


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_networks_metrics_are_the_bits_of_a_clients(loss):
    """The same chunks and the same sums; 2,100 examples are two chunks and a part."""
    client = ModelClient(network(), X, Y, loss=loss)
    value, _, metrics = client.evaluate(get_weights(network()), {})
    evaluated = NetworkPredictor(network(), loss=loss).evaluate(X, Y)
    assert (evaluated.loss, evaluated.accuracy) == (value, metrics["accuracy"])
    assert torch.equal(NetworkPredictor(network()).predict(X), client.outputs(X))


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_tct_has_the_loss_of_its_convex_problem(loss):
    """Least squares against one-hot minus 1/C."""
    model = tct(loss)
    scores = model.predict(X)
    targets = nn.functional.one_hot(Y, 3) - (1 / 3 if loss == "mse" else 0)
    evaluated = model.evaluate(X, Y)
    assert evaluated.loss == pytest.approx(convex_loss(scores, targets, loss), rel=1e-12)
    assert evaluated.accuracy == float((scores.argmax(1) == Y).double().mean())


@pytest.mark.parametrize(
    "make", [lambda: NetworkPredictor(network(), loss="mse"), lambda: tct("cross-entropy")]
)
def test_a_predictor_is_a_module_whose_state_holds_it(make, tmp_path):
    one, other = make(), make()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    assert isinstance(one, Predictor)
    assert not torch.equal(one.predict(X), other.predict(X))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.predict(X), other.predict(X))
    assert torch.equal(one.eval()(X), one.predict(X))
    one.save(tmp_path)
    loaded = type(one).load(tmp_path, network())
    assert torch.equal(loaded.predict(X), one.predict(X))
    assert (loaded.loss, loaded.evaluate(X, Y)) == (one.loss, one.evaluate(X, Y))


def test_a_predictor_keeps_its_own_network():
    """In training, what it is given may change; gradients flow through a call."""
    given = network()
    predictor = NetworkPredictor.from_arrays(given, {**arrays_of(network()), "more": X.numpy()})
    before = predictor.predict(X)
    with torch.no_grad():
        given[0].weight.zero_()
    assert torch.equal(predictor.predict(X), before)
    predictor(X[:5]).sum().backward()
    assert predictor.network[0].weight.grad.abs().sum() > 0
    assert not before.requires_grad


@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_file_is_refused(tmp_path, size):
    NetworkPredictor(network()).save(tmp_path)
    path = tmp_path / "network.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused("no network that can be read", NetworkPredictor.load, tmp_path, network())
    path.unlink()
    with pytest.raises(FileNotFoundError):
        NetworkPredictor.load(tmp_path, network())


def test_another_network_and_no_examples_are_refused(tmp_path):
    NetworkPredictor(network()).save(tmp_path)
    with pytest.raises(ValueError, match=r"another network: it differs in 0\.weight, 0\.bias"):
        NetworkPredictor.load(tmp_path, network(width=5))
    for x, y in ((X[:0], Y[:0]), (X, Y[:3])):
        with pytest.raises(ValueError, match="at least one example and as many labels"):
            NetworkPredictor(network()).evaluate(x, y)
    refused("loss: expected one of", NetworkPredictor, network(), loss="l1")
