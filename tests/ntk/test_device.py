"""The mathematics on a device other than the CPU: each tensor is where its operation is.

The fake device computes on the CPU, in float64, what it is asked to: the same numbers come out up
to another order of sums, 1e-10 as in the tests on the CPU.
"""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedntk.ntk import (
    FeatureMap,
    Jacobian,
    entk_features,
    evolve,
    jacobian,
    random_projection,
    ridge_regression,
)
from fedntk.ntk.convex import Spectrum, looped_steps, residual_sum
from fedntk.ntk.features import FeatureRows

from ..fake_device import NAME, FakeDevice
from .arithmetic import normal, relative
from .cases import CASES, make

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
        lambda: torch.cat([there, here]),
        lambda: here[there.long()],
        lambda: there.numpy(),
        lambda: there.uniform_(generator=torch.Generator()),
        lambda: nn.Linear(3, 2)(there),
        lambda: nn.Linear(3, 2).to(NAME)(here),
    ):
        with pytest.raises(RuntimeError):
            operation()
    assert torch.equal((there[torch.tensor([0, 2])] + 1).cpu(), torch.full((2,), 2.0))
    here.copy_(2 * there)
    assert here.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("structure", ["factored", "dense"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_jacobian_and_its_products(name, structure):
    """Made on the model's device, kept on the CPU; moved, all products stay on the device."""
    model, x = make(name)
    here = jacobian(model, x, structure=structure)
    made = jacobian(copy.deepcopy(model).to(NAME), x.to(NAME), structure=structure, chunk_size=4)
    assert made.device.type == "cpu"
    assert made.form == here.form
    there = made.to(NAME)
    assert close(there.gram(), here.gram())
    assert close(there.squared_norms(), here.squared_norms())
    residual = normal(here.num_examples, here.num_outputs, seed=0)
    assert close(there.full_product(residual.to(NAME)), here.full_product(residual))
    assert close(there.mean_product(residual.to(NAME)), here.mean_product(residual))
    update, dense = there.vjp(residual.to(NAME)), there.dense()
    for parameter, tensor in here.vjp(residual).items():
        assert close(update[parameter], tensor)
        assert close(dense[parameter], here.dense()[parameter])
    assert close(there.jvp(update), here.jvp(here.vjp(residual)))
    both = Jacobian.concatenate([there, there])
    assert close(both.gram(there), Jacobian.concatenate([here, here]).gram(here))


@pytest.mark.parametrize(
    ("kernel", "residuals"),
    [
        *((k, "integral") for k in ("mean", "full", "unbuilt", "matrix")),
        ("mean", "sum"),
        ("full", "sum"),
    ],
)
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


@pytest.mark.parametrize("method", ["subsample", "projection"])
@pytest.mark.parametrize("name", sorted(set(CASES) - {"lstm"}))
def test_features_come_back_to_the_cpu(name, method):
    model, x = make(name)
    options = {"method": method, "dtype": torch.float64, "chunk_size": 4}
    here = entk_features(model, x, 10, 3, **options)
    there = entk_features(model.to(NAME), x.to(NAME), 10, 3, **options)
    assert there.device.type == "cpu"
    assert relative(there, here) < CLOSE


@pytest.mark.parametrize("kind", ["entk", "last-layer"])
def test_extractor_takes_examples_of_the_cpu(kind):
    """In float32, which rounds to 6e-8 and adds up at most 40 products: 1e-5 of each example."""
    model, x = (part.float() for part in make("batch-norm"))
    chosen = FeatureMap(kind, num_features=20)
    here = chosen.extractor(model)(x)
    there = chosen.extractor(model.to(NAME))(x)
    assert there.device.type == "cpu"
    assert relative(there, here) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_features_come_back_to_the_cpu(bias):
    z = normal(9, 5, seed=0)
    w, a = normal(5 + bias, 3, seed=1), normal(9, 2, seed=2)
    here, there = (FeatureRows.of(z.numpy(), bias=bias, device=d) for d in ("cpu", NAME))
    assert there[:].device.type == NAME
    for own, expected in (
        (there @ w, here @ w),
        (there.transposed_matmul(a), here.transposed_matmul(a)),
        (there.gram(torch.float64), here.gram(torch.float64)),
    ):
        assert own.device.type == "cpu"
        assert relative(own, expected) < CLOSE


def test_convex_steps_ridge_and_projection():
    z, w, y, h = (normal(*s, seed=i) for i, s in enumerate([(9, 5), (5, 2), (9, 2), (5, 2)]))
    options = {"learning_rate": 0.1, "local_steps": 7}

    def found(device: str) -> list[Tensor]:
        own_z, own_w, own_y, own_h = (t.to(device) for t in (z, w, y, h))
        kernel, given = own_z @ own_z.T, (own_z @ own_w, own_y, own_z @ own_h)
        return [
            residual_sum(Spectrum.of(kernel), *given, **options),
            residual_sum(kernel, *given, **options, loss="cross-entropy"),
            *looped_steps(own_z, own_w, own_y, own_h, **options),
            ridge_regression(kernel, own_y, 0.1),
            random_projection(own_z, 4, seed=np.iinfo(np.int64).max),
        ]

    assert all(map(close, found(NAME), found("cpu")))
