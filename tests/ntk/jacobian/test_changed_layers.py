"""Whatever changes what a layer returns, or its gradients: right, or refused; float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from fedntk.ntk import entk_features, jacobian
from fedntk.ntk.jacobian import differentiate

from ...conftest import refused
from ..arithmetic import close, normal, relative
from ..cases import one_by_one


class Network(nn.Module):
    """A convolution and linear layers, the second called twice; it has a branch and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.flat = nn.Conv1d(1, 3, 2), nn.Flatten()
        self.first, self.second = nn.Linear(12, 6), nn.Linear(6, 6)
        self.third, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.between, self.axis = torch.tanh, 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(self.first(self.flat(torch.tanh(self.conv(x[:, None])))))
        h = torch.tanh(self.second(torch.tanh(self.second(h)))).flip(self.axis)
        if self.head.bias.mean() > 50:
            h = h @ self.second.weight
        return self.head(self.last(self.third(h)))

    def last(self, h: Tensor) -> Tensor:
        return h.tanh()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Standardised(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def _wrapped(layer: nn.Module, name: str) -> None:
    before = getattr(layer, name)
    setattr(layer, name, lambda *args: 2 * before(*args))


def _with_other_weight(m: Network) -> None:
    """The layer's own forward, with a weight that is made of the parameter."""
    call = torch.func.functional_call
    m.between = lambda h: call(m.second, {"weight": m.second.weight.square()}, (h,))


def _without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h.relu()


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


CHANGES: dict[str, Callable[[Network], Any]] = {
    "hook": lambda m: m.first.register_forward_hook(lambda _, __, z: 2 * z),
    "of the logits": lambda m: m.head.register_forward_hook(lambda _, __, z: z / 10),
    "of a layer called twice": lambda m: m.second.register_forward_hook(lambda _, __, z: z.sin()),
    "of a convolution": lambda m: m.conv.register_forward_hook(lambda _, __, z: z.clamp(-0.3, 0.3)),
    "of the network": lambda m: m.register_forward_hook(lambda _, __, z: z.exp()),
    "before others": lambda m: (
        m.first.register_forward_hook(lambda _, __, z: 2 * z),
        m.first.register_forward_hook(lambda _, __, z: z + 1, prepend=True),
    ),
    "always called": lambda m: m.first.register_forward_hook(
        lambda _, __, z: z.sin(), always_call=True
    ),
    "in place": lambda m: m.first.register_forward_hook(lambda _, __, z: (z.mul_(2), None)[1]),
    "with keywords": lambda m: m.second.register_forward_hook(
        lambda _, a, __, z: z * a[0], with_kwargs=True
    ),
    "reads the weight": lambda m: m.second.register_forward_hook(
        lambda layer, a, z: z + a[0] @ layer.weight
    ),
    "of all modules": lambda m: of_all.register_module_forward_hook(
        lambda layer, _, z: 1.5 * z if _linear(layer) else None
    ),
    "before": lambda m: m.first.register_forward_pre_hook(lambda _, a: (2 * a[0],)),
    "before, by keyword": lambda m: m.second.register_forward_pre_hook(
        lambda _, a, __: ((), {"input": 3 * a[0]}), with_kwargs=True
    ),
    "before all modules": lambda m: of_all.register_module_forward_pre_hook(
        lambda layer, a: (1.5 * a[0],) if _linear(layer) else None
    ),
    "gradients, doubled": lambda m: m.second.register_full_backward_hook(
        lambda _, inner, __: (2 * inner[0],)
    ),
    "gradients, doubled before": lambda m: m.first.register_full_backward_pre_hook(
        lambda _, outer: (2 * outer[0],)
    ),
    "gradients, looked at": lambda m: m.first.weight.register_hook(lambda gradient: None),
    "weight norm": lambda m: parametrizations.weight_norm(m.first),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.second),
    "orthogonal": lambda m: parametrizations.orthogonal(m.second),
    "weight norm, by a hook": lambda m: weight_norm(m.conv),
    "spectral norm, by a hook": lambda m: spectral_norm(m.first),
    "pruned": lambda m: prune.l1_unstructured(m.first, "weight", 20),
    "pruned bias": lambda m: prune.random_unstructured(m.conv, "bias", 1),
    "other forward": lambda m: setattr(m, "first", Doubled(12, 6).double()),
    "other call": lambda m: setattr(m, "first", DoubledCall(12, 6).double()),
    "other convolution": lambda m: setattr(m, "conv", Standardised(1, 3, 2).double()),
    "replaced forward": lambda m: _wrapped(m.first, "forward"),
    "replaced convolution": lambda m: _wrapped(m.conv, "_conv_forward"),
    "other weight for a call": _with_other_weight,
    "written over": lambda m: setattr(m, "between", functional.relu_),
    "added to": lambda m: setattr(m, "between", lambda h: h.add_(1).mul_(2).tanh()),
    "written without gradients": lambda m: setattr(m, "between", _without_gradients),
    "other function": lambda m: setattr(m, "between", torch.sin),
    "other axis": lambda m: setattr(m, "axis", ()),
    "other method": lambda m: setattr(type(m), "last", lambda m, h: h.sin() @ m.second.weight),
    "other forward of all": lambda m: setattr(
        m, "forward", lambda x: m.head(m.first(m.flat(m.conv(x[:, None]))) @ m.third.weight)
    ),
    "branch": lambda m: nn.init.constant_(m.head.bias, 100.0),
    "tied": lambda m: setattr(m.third, "weight", m.second.weight),
    "frozen": lambda m: m.first.bias.requires_grad_(requires_grad=False),
    "two layers for one": lambda m: setattr(
        m, "third", nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)).double()
    ),
    "subclass": lambda m: setattr(m.first, "__class__", type("Sub", (nn.Linear,), {})),
    "read by a function": lambda m: setattr(
        m, "between", lambda h: functional.linear(h, m.second.weight)
    ),
}
REFUSED: dict[str, Callable[[Network], Any]] = {
    "clipped": lambda m: m.second.register_full_backward_hook(
        lambda _, inner, __: (inner[0] / inner[0].norm(),)
    ),
    "clipped, of all": lambda m: of_all.register_module_full_backward_hook(
        lambda layer, inner, _: (inner[0].clamp(-1e-3, 1e-3),) if layer is m.second else None
    ),
    "masked": lambda m: m.first.weight.register_hook(lambda g: g * (torch.arange(12) < 4)),
    "of a tensor": lambda m: setattr(m, "between", _clipped),
}


def _clipped(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.sign())
    return h.tanh()


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(Network, "last", Network.last)
    differentiate._PLANS.clear()
    torch.default_generator.manual_seed(3)
    yield Network().double()
    for hooks in (
        of_all._global_forward_hooks,
        of_all._global_forward_pre_hooks,
        of_all._global_backward_hooks,
    ):
        hooks.clear()
    of_all._global_is_full_backward_hook = None


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of weight norm, by torch
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_gets_the_gradients_of_what_the_network_computes(change, network):
    """After a call of the network as it was, whose plan is not taken for the changed one."""
    x = normal(6, 5, seed=1)
    jacobian(network, x)
    CHANGES[change](network)
    expected = one_by_one(network, x)
    for chunk_size in (None, 4):
        rows = jacobian(network, x, chunk_size=chunk_size)
        layout, actual = rows.layout, rows.dense()
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert close(actual[name], tensor), name
    differentiate._PLANS.clear()
    assert jacobian(network, x).layout == layout
    rows = torch.cat([t.flatten(2)[:, 1] for t in expected.values()], 1)
    features = entk_features(network, x, rows.shape[1], 0, 1, dtype=torch.float64)
    assert relative(features, rows) <= 1e-10


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("change", REFUSED)
def test_gradients_that_are_no_derivatives_are_refused(change, network):
    x = normal(6, 5, seed=1)
    jacobian(network, x)
    REFUSED[change](network)
    refused("remove hooks that change gradients", jacobian, network, x)


def test_layers_are_left_without_a_trace(network):
    _wrapped(network.first, "forward")
    before = [dict(vars(module)) for module in network.modules()]
    jacobian(network, normal(6, 5, seed=1))
    assert [dict(vars(module)) for module in network.modules()] == before
