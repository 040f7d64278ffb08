"""The table of cases in float32 on a device, against float64 on the CPU; ``make gpu`` runs it.

A float32 is right to 6e-8, and these networks add up some hundred products a number: results are
right to about 1e-6 of their norm, and a few 1e-6 where an eigendecomposition or the solver, whose
errors are not amplified, comes after. A kernel in TF32, right to 5e-4, is found out by `BOUND`.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedntk import ntk
from fedntk.ntk import Jacobian, evolve, jacobian
from fedntk.ntk.convex.local_steps import Spectrum, residual_sum
from fedntk.ntk.features.rows import FeatureRows
from fedntk.ntk.support.precision import full_float32

from .arithmetic import normal
from .cases import CASES, make

BOUND = 5e-5
STEPS = [0.0, 3.0, 30.0]
Results = Mapping[str, Tensor]


def products(name: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Jacobian of a network and products with it, and features, which come back to the CPU."""
    model, x = _on(device, dtype, name)
    results: dict[str, Tensor] = {}
    for structure in ("factored", "dense"):
        jac = jacobian(model, x, structure=structure, chunk_size=4, device=device)
        residual = normal(jac.num_examples, jac.num_outputs, seed=0).to(device, dtype)
        update = jac.vjp(residual)
        results |= {
            f"Jacobian, {structure}": _flat(jac.dense()),
            f"gram, {structure}": jac.gram(),
            f"vjp, {structure}": _flat(update),
            f"jvp, {structure}": jac.jvp(update),
            f"full product, {structure}": jac.full_product(residual),
            f"mean product, {structure}": jac.mean_product(residual[:, :2]),
            f"squared norms, {structure}": jac.squared_norms(),
            f"gram of two, {structure}": Jacobian.concatenate([jac, jac]).gram(jac),
        }
    width = min(8, sum(p.numel() for p in model.parameters() if p.requires_grad))
    for method in ("subsample", "projection"):
        options = {"method": method, "dtype": dtype, "chunk_size": 4}
        results[f"features, {method}"] = ntk.entk_features(model, x, width, 3, **options)
    return results


def network(name: str, dtype: torch.dtype, device: str) -> Results:
    """All that is computed of one network: Jacobian, products, features, evolution."""
    actual = products(name, dtype, device)
    model, x = _on(device, dtype, name)
    jac = jacobian(model, x, structure="dense", chunk_size=4, device=device)
    with full_float32(), torch.no_grad():
        f = model.eval()(x).reshape(len(x), -1)
    y = torch.eye(jac.num_outputs).to(f)[torch.arange(len(f)) % jac.num_outputs]
    rate = 3 * len(f) / float(jac.squared_norms().sum())  # some oscillations of plain descent
    for loss in ("mse", "cross-entropy"):
        for kernel in ("mean", "full"):
            flow = evolve(
                jac, f, y, loss=loss, learning_rate=rate, steps=STEPS, kernel=kernel, tolerance=1e-6
            )
            actual[f"outputs, {loss}, {kernel}"] = flow.outputs
            actual[f"residuals, {loss}, {kernel}"] = flow.residuals
    return actual


def convex(_: str, dtype: torch.dtype, device: str) -> Results:
    """Products of features, ridge regression and sums of local steps' residuals."""
    z = normal(30, 50, seed=0).to(dtype)
    rows = FeatureRows(z.numpy(), device=device, bias=True)
    w, y, h = (normal(*s, seed=i).to(dtype) for i, s in enumerate([(51, 3), (30, 3), (51, 3)]))
    gram, outputs, drift = rows.gram(dtype), rows @ w, rows @ h
    kernel, *state = (t.to(device) for t in (gram, outputs, y, drift))
    options = {"learning_rate": 0.1, "local_steps": 40}
    return {
        "Z W": outputs,
        "Z^T A": rows.transposed_matmul(y),
        "Z Z^T": gram,
        "closed form": residual_sum(Spectrum.of(kernel), *state, **options),
        "cross-entropy": residual_sum(kernel, *state, **options, loss="cross-entropy"),
        "ridge": ntk.ridge_regression(kernel, state[1], 0.1),
        "projection": ntk.random_projection(z.to(device), 4, seed=2**63 - 1),
    }


TABLE: dict[str, Callable[[str, torch.dtype, str], Results]] = {
    **dict.fromkeys(sorted(CASES), network),
    "convex problem": convex,
}


def differences(name: str, device: str) -> dict[str, float]:
    """How far each result of a case is from the CPU's in float64, relative to its norm."""
    expected = TABLE[name](name, torch.float64, "cpu")
    actual = TABLE[name](name, torch.float32, device)
    return {
        what: float((actual[what].double().cpu() - tensor).norm() / (tensor.norm() or 1.0))
        for what, tensor in expected.items()
    }


def report(device: str, names: Sequence[str] = ()) -> bool:
    """Print cases, all by default, with their largest difference; return whether all is good."""
    good = True
    for name in names or TABLE:
        errors = differences(name, device)
        worst = max(errors, key=lambda what: (math.isnan(errors[what]), errors[what]))
        within = errors[worst] <= BOUND
        good &= within
        mark = "" if within else f", more than {BOUND:g}"
        line = f"{name:20}{len(errors):3} results, at most {errors[worst]:.1e} off: {worst}{mark}"
        print(line, flush=True)  # noqa: T201
    return good


def _on(device: str, dtype: torch.dtype, name: str) -> tuple[nn.Module, Tensor]:
    model, x = make(name)
    return copy.deepcopy(model).to(device, dtype), x.to(device, dtype)


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])
