"""The mathematics on a device other than the CPU: each tensor is where its operation is.

The fake device computes on the CPU, in float64, what it is asked to: the same numbers come out up
to another order of sums, 1e-10 as in the tests on the CPU.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fedntk.ntk import FeatureMap, evolve, jacobian

from ..fake_device import NAME, FakeDevice
from .arithmetic import relative
from .cases import CASES, make
from .on_device import convex, products

CLOSE = 1e-10


@pytest.fixture(autouse=True)
def device():
    with FakeDevice():
        yield NAME


def close(there: Tensor, here: Tensor) -> bool:
    """Whether a result is on the device, and what it is on the CPU."""
    assert (there.device.type, here.device.type) == (NAME, "cpu")
    return float((there.cpu() - here).norm()) <= CLOSE * (1 + float(here.norm()))


def test_the_fake_device_refuses_what_a_gpu_refuses():
    there, here = torch.ones(3, device=NAME), torch.ones(3)
    for operation in (
        lambda: there + here,
        lambda: here.add_(there),
        lambda: here[there.long()],
        lambda: there.numpy(),
        lambda: there.uniform_(generator=torch.Generator()),
        lambda: nn.Linear(3, 2).to(NAME)(here),
    ):
        with pytest.raises(RuntimeError):
            operation()
    assert torch.equal((there[torch.tensor([0, 2])] + 1).cpu(), torch.full((2,), 2.0))
    here.copy_(2 * there)
    assert here.tolist() == [2.0, 2.0, 2.0]


SAME = {"in-place", "frozen-layer", "single-output", "called-twice", "functional-use", "sequence",
        "folded-positions", "shuffled", "depthwise", "cnn", "batch-statistics",
        "no-outputs-axis", "gpt"}  # fmt: skip


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - SAME), "convex problem"])
def test_products_and_features(name):
    """Features, and what is made of their rows, come back to the CPU; the rest stays there."""
    compute = products if name in CASES else convex
    with _disable_current_modes():
        here = compute(name, torch.float64, "cpu")
    there = compute(name, torch.float64, NAME)
    for what, actual in there.items():
        if what.startswith(("features", "Z")):
            assert actual.device.type == "cpu"
            assert relative(actual, here[what]) < CLOSE, what
        else:
            assert close(actual, here[what]), what


def test_jacobians_are_kept_on_the_cpu():
    model, x = make("mlp")
    assert jacobian(model.to(NAME), x.to(NAME), chunk_size=4).device.type == "cpu"


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_differentiates_all_outputs_at_once_or_else_one_by_one(monkeypatch, fails):
    """Also where an operation has no batching rule, or memory is short, which torch says alike."""
    tried, batched = [], torch.func.vmap

    def vmap(function):
        tried.append(function)
        if fails:
            raise RuntimeError("too little memory")
        return batched(function)

    monkeypatch.setattr(torch.func, "vmap", vmap)
    model, x = make("cnn")
    here = jacobian(model, x).gram()
    assert not tried
    there = jacobian(model.to(NAME), x.to(NAME), chunk_size=4, device=NAME).gram()
    assert tried
    assert close(there, here)


KINDS = [(kernel, "integral") for kernel in ("mean", "full", "unbuilt", "matrix")]


@pytest.mark.parametrize(("kernel", "residuals"), [*KINDS, ("mean", "sum"), ("full", "sum")])
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_evolution(loss, kernel, residuals):
    """Where the solver adapts its steps, both take the same ones; its errors are not amplified."""
    model, x = make("mlp")
    f, y = model(x).detach(), torch.eye(3, dtype=torch.float64)[torch.arange(6) % 3]
    here = jacobian(model, x)
    options = {"learning_rate": 0.5, "steps": [0, 1, 5], "residuals": residuals, "tolerance": 0.01}
    options |= {"kernel": "full"} if kernel == "full" else {}
    options |= {"memory_budget": 0} if kernel == "unbuilt" else {}
    there, expected = (
        evolve(
            jac.gram() if kernel == "matrix" else jac,
            *(t.to(jac.device) for t in (f, y)),
            loss=loss,
            **options,
        )
        for jac in (here.to(NAME), here)
    )
    assert there.kernel_products == expected.kernel_products
    assert close(there.outputs, expected.outputs)
    assert close(there.residuals, expected.residuals)
    assert expected.outputs[2].sub(f).norm() > 0.1


@pytest.mark.parametrize("kind", ["entk", "last-layer"])
def test_extractor_takes_examples_of_the_cpu(kind):
    """In float32, which rounds to 6e-8 and adds up at most 40 products: 1e-5 of each example."""
    model, x = (part.float() for part in make("batch-norm"))
    chosen = FeatureMap(kind, num_features=20)
    here = chosen.extractor(model)(x)
    there = chosen.extractor(model.to(NAME))(x)
    assert there.device.type == "cpu"
    assert relative(there, here) < 1e-5
