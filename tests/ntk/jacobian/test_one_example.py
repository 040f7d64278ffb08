"""Networks that are functions of one example are accepted; others are refused, with a name."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedntk.clients import ClosedFormClient, NTKFLClient, get_weights
from fedntk.ntk import FeatureMap, entk_features, gradient_norms, jacobian
from fedntk.ntk.jacobian import one_example
from fedntk.ntk.jacobian.one_example import check_function_of_one_example
from fedntk.ntk.payloads.sum_task import SumTask

from ...conftest import refused
from ..arithmetic import normal
from ..cases import Net


def function(use: Callable[[Any, Tensor], Tensor]) -> Net:
    """A function as a module; it may count its calls, or keep a number."""
    net = Net(use, calls=0)
    net.register_buffer("total", torch.zeros(()))
    return net


class InTraining(nn.BatchNorm1d):
    """It leaves evaluation mode out."""

    def train(self, mode: bool = True) -> "InTraining":
        return super().train(mode=True)


def _with(*layers: nn.Module, last: int = 6) -> nn.Module:
    torch.default_generator.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(last, 3))


def _zero(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        nn.init.zeros_(model.get_parameter(name))
    return model


def _counted(module: Any, h: Tensor) -> Tensor:
    module.calls += 1
    return h * module.calls


def _seventh(module: Any, h: Tensor) -> Tensor:
    module.calls += 1
    return h + (module.calls % 7 == 0)


def _updated(module: Any, h: Tensor) -> Tensor:
    module.total.add_(h.mean())
    return h - module.total


def _exchanged(_: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h.data = h.data.flip(0)
    return h


def _batch_norm() -> nn.Module:
    return nn.BatchNorm1d(6, track_running_stats=False)


OF_A_BATCH: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda _, h: h - h.mean(0),
    "mean without gradients": lambda _, h: h - h.detach().mean(0),
    "small mean": lambda _, h: h + 1e-4 * h.mean(),
    "maximum": lambda _, h: h / h.abs().max(),
    "softmax over examples": lambda _, h: h.softmax(0),
    "attention over examples": lambda _, h: torch.softmax(h @ h.T, 1) @ h,
    "best half": lambda _, h: h * (h.sum(1) >= h.sum(1).median())[:, None],
    "ranks": lambda _, h: h + h.sum(1).argsort().argsort()[:, None],
    "one norm of all": lambda _, h: functional.layer_norm(h, h.shape),
    "row before": lambda _, h: h + 0.1 * h.roll(1, 0),
    "first row": lambda _, h: h - h[:1],
    "sums so far": lambda _, h: h.cumsum(0),
    "reversed": lambda _, h: h.flip(0),
    "reversed unseen": _exchanged,
    "sorted": lambda _, h: h[h.sum(1).argsort()],
    "position": lambda _, h: h + torch.arange(len(h))[:, None],
    "size": lambda _, h: h / len(h),
    "size, above a number": lambda _, h: h * (2 if len(h) > 4 else 1),
    "sign of a sum": lambda _, h: h if h.sum() > 0 else 2 * h,
    "at least three": lambda _, h: h + 0 * h.topk(3, 0)[0][:1],
    "dropout": lambda _, h: functional.dropout(h, 0.5),
    "rare dropout": lambda _, h: functional.dropout(h, 0.005),
    "noise of Python": lambda _, h: h.flip(1) if random.random() < 0.1 else h,  # noqa: S311
    "noise of NumPy": lambda _, h: h + np.random.randn(),  # noqa: NPY002
    "counter": _counted,
    "seventh call": _seventh,
    "kept sum": _updated,
}
REFUSED: dict[str, tuple[nn.Module, str]] = {
    "statistics of the batch": (_with(_batch_norm()), r"'1' \(BatchNorm1d\).*with track_running"),
    "after a zero": (_zero(_with(_batch_norm()), "1.weight"), r"'1' \(BatchNorm1d\)"),
    "before a zero": (_zero(_with(_batch_norm()), "2.weight", "2.bias"), r"'1' \(BatchNorm1d\)"),
    "always in training": (_with(nn.Sequential(InTraining(6))), r"'1\.0' \(InTraining\)"),
    "wrong axis": (
        nn.Sequential(nn.TransformerEncoderLayer(5, 1, 4), nn.Flatten(), nn.Linear(10, 3)),
        r"'0\.self_attn' \(MultiheadAttention\)",
    ),
} | {name: (_with(function(use)), r"'1' \(Net\)") for name, use in OF_A_BATCH.items()}  # fmt: skip
REFUSED["at least three"] = (REFUSED["at least three"][0], "takes 12 and fails for 2")
ACCEPTED: dict[str, nn.Module] = {
    "running statistics": _with(nn.BatchNorm1d(6)),
    "group norm": _with(nn.GroupNorm(2, 6)),
    "instance norm": _with(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()
    ),
    "layer norm": _with(nn.LayerNorm(6)),
    "dropout": _with(nn.Dropout(0.5)),
    "reordered": _with(function(lambda _, h: h[(o := h.sum(1).argsort())].exp()[o.argsort()])),
    "unused noise": _with(function(lambda _, h: (torch.rand(3), h)[1])),
    "unused counter": _with(function(lambda m, h: (setattr(m, "calls", m.calls + 1), h)[1])),
    "written over": nn.Sequential(function(lambda _, x: x.sub_(2)), nn.Linear(5, 3)),
    "large numbers": _with(function(lambda _, h: 1e6 * torch.tanh(1e4 * h))),
    "not finite": _with(function(lambda _, h: h.log())),
    "rounding": _with(*[nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU()] * 20),
}


def examples(name: str) -> Tensor:
    return normal(12, 2, 5, seed=6) if name == "wrong axis" else normal(12, 5, seed=6)


@pytest.fixture(autouse=True)
def nothing_checked():
    one_example._CHECKED.clear()
    torch.default_generator.manual_seed(0)
    random.seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_is_no_function_of_one_example_is_refused_by_name(name, dtype):
    model, message = REFUSED[name]
    x = examples(name).to(dtype)
    refused(message, check_function_of_one_example, model.to(dtype), x)
    refused(message, check_function_of_one_example, model, x)  # again: a refusal is not kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_function_of_one_example_is_accepted_and_left_as_it_was(name, dtype):
    model, x = ACCEPTED[name].to(dtype).train(), examples(name).to(dtype)
    before = x.clone(), [p.clone() for p in model.parameters()]
    check_function_of_one_example(model, x)
    assert torch.equal(x, before[0])
    assert all(map(torch.equal, model.parameters(), before[1]))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("use", [lambda _, h: (h, h), lambda _, h: {"logits": h}])
def test_several_outputs_are_refused(use):
    network, x, y = (
        nn.Sequential(nn.Linear(3, 2), function(use)),
        torch.ones(4, 3),
        torch.eye(2)[:1],
    )
    for call, *more in (
        (jacobian,),
        (gradient_norms, y.expand(4, 2), functional.cross_entropy),
        (entk_features, 2, 0),
    ):
        refused("expected one tensor of outputs .* got a (tuple|dict)", call, network, x, *more)


def test_examples_that_are_all_alike_do_not_vouch_for_others():
    """They are the same whatever is beside them; so is a single one."""
    model = _with(function(lambda _, h: h - h.mean(0)))
    x = normal(12, 5, seed=6).float()
    for alike in (x[:1], x[:1].expand(12, 5)):
        check_function_of_one_example(model, alike)
    refused("'1' .Net.", check_function_of_one_example, model, x)


def test_a_network_is_examined_once_for_a_form_of_examples():
    passes: list[int] = []
    model, x = _with(function(lambda _, h: h)), normal(12, 5, seed=6).float()
    forward = type(model[1]).forward
    Net.forward = lambda module, h: (passes.append(len(h)), forward(module, h))[1]
    try:
        check_function_of_one_example(model, x)
        examined = len(passes)
        assert examined
        nn.init.ones_(model[0].weight)
        check_function_of_one_example(model, x.flip(0))
        assert len(passes) == examined
        check_function_of_one_example(model, x.double().float().unsqueeze(1).expand(12, 2, 5))
        assert len(passes) > examined
    finally:
        Net.forward = forward


def test_all_that_assumes_it_refuses():
    model, x, y = _with(_batch_norm()), normal(12, 5, seed=6).float(), torch.arange(12) % 3
    message, loss = r"'1' \(BatchNorm1d\)", nn.CrossEntropyLoss(reduction="none")
    refused(message, jacobian, model, x)
    refused(message, jacobian, model, x, structure="dense")
    refused(message, gradient_norms, model, x, y, loss)
    refused(message, entk_features, model, x, 5, 0)
    for kind in ("entk", "entk-sketch", "last-layer", "fourier"):
        refused(message, FeatureMap(kind, 10).extractor(model), x)
    refused(message, FeatureMap("fourier", 10).extractor_with_outputs(model), x)
    refused(message, NTKFLClient(model, x, y).upload, get_weights(model), {})
    config = {**FeatureMap("last-layer").to_config(), **SumTask().to_config()}
    refused(message, ClosedFormClient(model, x, y).fit, get_weights(model), config)
