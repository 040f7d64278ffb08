"""Whatever writes over the tensors that it is given changes no one else's."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedntk import ntk
from fedntk.ntk import FeatureMap, NetworkPredictor, example_gradients, jacobian
from fedntk.ntk.payloads.prototypes import Prototypes

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(7) % 3


class Net(nn.Module):
    """Writes over its input before and after its first layer, and over the last one's."""

    def __init__(self, *, in_place: bool, scale: float | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = None if scale is None else nn.Parameter(torch.tensor(scale))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(0.3).abs_() if self.in_place else x.sub(0.3).abs()
        if self.scale is not None:  # differentiated as it is
            x = x * self.scale
        hidden = torch.tanh(self.first(x))
        scores = self.head(hidden)
        if self.in_place and not torch.is_grad_enabled():
            hidden.zero_()
        return scores


def dense(rows):
    return {name: tensor.numpy() for name, tensor in rows.dense().items()}


def loss_in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.nll_loss(outputs.log_softmax(1), targets.add_(1).sub_(1), reduction="none")


FUNCTIONS = {
    "jacobian": lambda net, x: dense(jacobian(net, x, chunk_size=3)),
    "dense jacobian": lambda net, x: dense(jacobian(net, x, structure="dense")),
    "gradients": lambda net, x: dense(example_gradients(net, x, Y.clone(), loss_in_place)),
    "norms": lambda net, x: {"": ntk.gradient_norms(net, x, Y.clone(), loss_in_place).numpy()},
    "entk": lambda net, x: {"": ntk.entk_features(net, x, 9, seed=0).numpy()},
    **{
        kind: lambda net, x, kind=kind: {"": FeatureMap(kind, 9).extractor(net)(x).numpy()}
        for kind in ("entk", "entk-sketch", "last-layer", "fourier")
    },
}


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_network_that_writes_over_its_input_has_the_same_rows(name, scale):
    x, calculate = X.clone(), FUNCTIONS[name]
    actual = calculate(Net(in_place=True, scale=scale).double(), x)
    assert torch.equal(x, X)
    expected = calculate(Net(in_place=False, scale=scale).double(), X.clone())
    assert actual.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(actual[key], array)


def test_a_loss_that_writes_over_outputs_and_targets_has_the_same_gradients():
    """Against a loss that makes new tensors; a second parameter path calls it twice."""

    def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
        return targets.mul_(0.9).sub_(outputs.mul_(2)).square_().sum(1)

    def out_of_place(outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets * 0.9 - outputs * 2).square().sum(1)

    targets = torch.ones(7, 3, dtype=torch.float64)
    network = Net(in_place=False, scale=0.7).double()
    actual, expected = (
        dense(example_gradients(network, X, targets, loss)) for loss in (in_place, out_of_place)
    )
    assert torch.equal(targets, torch.ones_like(targets))
    for key, array in expected.items():
        np.testing.assert_allclose(actual[key], array, rtol=1e-12)


def predictors(net: nn.Module) -> dict[str, nn.Module]:
    net = copy.deepcopy(net).float()
    features, means = FeatureMap("last-layer"), np.eye(3, 5, dtype=np.float32)
    linear = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    return {
        "network": NetworkPredictor(net),
        "linear model": ntk.TCTModel(net, features, ntk.Normaliser.identity(5), linear),
        "ensemble": ntk.EnsemblePredictor([NetworkPredictor(net), NetworkPredictor(net)]),
        "prototypes": ntk.PrototypePredictor(net, Prototypes(means, np.ones(3, np.int64))),
    }


@pytest.mark.parametrize("name", ["network", "linear model", "ensemble", "prototypes"])
def test_predictors_leave_their_examples_and_labels_as_they_are(name):
    """Also from a metric that sorts what it is given, before loss and other metrics are taken."""

    def sorting(outputs: Tensor, labels: Tensor) -> float:
        labels.zero_()
        return float(outputs.copy_(outputs.sort(1).values)[0, 0])

    x, y = X.float(), Y.clone()
    actual, expected = (predictors(Net(in_place=p))[name] for p in (True, False))
    actual.metrics = {"first": sorting, "again": sorting}
    outputs, scores = actual.predict(x), actual(x)
    evaluated = actual.evaluate(x, y)
    assert torch.equal(x, X.float())
    assert torch.equal(y, Y)
    assert torch.equal(outputs, expected.predict(x))
    assert torch.equal(scores.detach(), expected(x).detach())
    plain = expected.evaluate(x, y)
    assert evaluated[:2] == plain[:2]
    assert evaluated.more["first"] == evaluated.more["again"]


def test_a_predictors_outputs_can_be_differentiated_by_examples_that_its_network_changes():
    x = X.float().requires_grad_()
    NetworkPredictor(Net(in_place=True)).forward(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())
