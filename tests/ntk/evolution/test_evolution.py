"""Evolution against closed forms, real gradient flow and a fine reference of the ODE.

For the closed form (MSE, mean kernel) everything is float64 and 1e-10 leaves room for the
conditioning of an eigendecomposition. The solver keeps the estimated error of each step within its
tolerance, and the flow of a convex loss does not amplify errors, so they add up to at most the
number of steps times the tolerance: that is the bound where the solver is tested. Size is measured
against outputs of at least 1, as the solver measures it.
"""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedntk.ntk import Evolution, Jacobian, NotEnoughMemory, evolve, jacobian, loss_value, one_hot
from fedntk.ntk.evolution.gradient_flow import GradientFlow, Kernel
from fedntk.ntk.evolution.solver import RungeKuttaChebyshev, SolverStep, _coefficients
from fedntk.ntk.losses import output_hessian, output_scale, residual

from ...conftest import refused
from ..arithmetic import relative

TOLERANCE = 1e-6


@pytest.fixture(params=["mse", "cross-entropy"])
def loss(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def problem(*layers: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, 12 examples and targets, in float64."""
    model = nn.Sequential(*layers)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        x = torch.randn(12, 4, dtype=torch.float64)
        y = one_hot(torch.randint(0, 3, (12,)), 3, torch.float64)
    return model.double(), x, y


def mlp(width: int = 5) -> tuple[Jacobian, Tensor, Tensor]:
    """Jacobian, outputs and targets of a small network."""
    model, x, y = problem(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
    return jacobian(model, x), model(x).detach(), y


def flow(*tensors: Any, **options: Any) -> Evolution:
    return evolve(*tensors, **{"learning_rate": 0.3, "tolerance": TOLERANCE, **options})


def flat(model: nn.Module, update: dict[str, Tensor]) -> Tensor:
    return torch.cat([update[name].flatten() for name, _ in model.named_parameters()])


def off_linearised(jac: Jacobian, f: Tensor, evolution: Evolution) -> list[float]:
    """How far the outputs at each step are from f(0) + J J^T R."""
    changes = [jac.jvp(jac.vjp(r)) for r in evolution.residuals]
    return [relative(a - f, b) for a, b in zip(evolution.outputs, changes, strict=True)]


def require_start(evolution: Evolution, f: Tensor) -> None:
    """Check that time 0, the first step, gives the input."""
    assert torch.equal(evolution.outputs[0], f)
    assert torch.equal(evolution.residuals[0], torch.zeros_like(f))


def gradient_flow(
    model: nn.Module, x: Tensor, y: Tensor, loss: str, learning_rate: float, times: list[float]
) -> tuple[Tensor, Tensor]:
    """Integrate dw/dt = -eta grad L(w) to 1e-11; returns (T, P) weights and (T, n, C) outputs."""
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def outputs_at(w: np.ndarray) -> Tensor:
        nn.utils.vector_to_parameters(torch.from_numpy(w.copy()), model.parameters())
        return model(x)

    def slope(_: float, w: np.ndarray) -> np.ndarray:
        outputs = outputs_at(w)
        entropy = nn.functional.cross_entropy(outputs, y)
        value = nn.functional.mse_loss(outputs, y) / 2 if loss == "mse" else entropy
        grads = torch.autograd.grad(value, list(model.parameters()))
        return -learning_rate * torch.cat([g.flatten() for g in grads]).numpy()

    solution = solve_ivp(slope, (0, times[-1]), start.numpy(), t_eval=times, rtol=1e-11, atol=1e-12)
    outputs = torch.stack([outputs_at(w).detach() for w in solution.y.T])
    nn.utils.vector_to_parameters(start, model.parameters())
    return torch.from_numpy(solution.y.T.copy()), outputs


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_linear_model_evolves_as_under_gradient_flow(loss, kernel):
    """It is its linearisation, and all outputs have one kernel, so the mean kernel is exact too."""
    model, x, y = problem(nn.Linear(4, 3))
    times = [0.0, 1.0, 7.0, 40.0]
    weights, outputs = gradient_flow(model, x, y, loss, 0.3, times)
    jac = jacobian(model, x)
    evolution = flow(jac, model(x).detach(), y, loss=loss, steps=times, kernel=kernel)
    bound = max(1e-9, TOLERANCE * evolution.solver_steps)
    assert relative(evolution.outputs, outputs) < bound
    for w, r in zip(weights[1:], evolution.residuals[1:], strict=True):
        assert relative(flat(model, jac.vjp(r)), w - weights[0]) < bound


def test_closed_form_reaches_the_targets_and_stays_finite_for_a_singular_kernel():
    """exp(-rate t) underflows at t = 1e12; a zero eigenvalue's residual grows linearly, f stays."""
    f, y, times = torch.zeros(2, 1), torch.ones(2, 1), [4, 1e12]
    kernel = torch.diag(torch.tensor([3.0, 0.0]))
    evolution = flow(kernel, f, y, loss="mse", learning_rate=0.5, steps=times)
    assert evolution.residuals[:, 1, 0].tolist() == pytest.approx([0.5 / 2 * t for t in times])
    assert evolution.outputs[:, :, 0].tolist() == [[pytest.approx(1 - math.exp(-3)), 0], [1, 0]]
    assert evolution.kernel_products == 0


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_outputs_are_the_kernel_applied_to_the_residual(loss, kernel):
    """f(t) = f(0) + H R(t) for the mean kernel, which J J^T R is far from; else f(0) + J J^T R."""
    jac, f, y = mlp()
    evolution = flow(jac, f, y, loss=loss, steps=[0, 2, 5, 30], kernel=kernel)
    require_start(evolution, f)
    off = off_linearised(jac, f, evolution)[1:]
    if kernel == "mean":
        assert relative(evolution.outputs - f, jac.gram() @ evolution.residuals) < 1e-10
        assert min(off) > 0.05
    else:
        assert max(off) < 1e-10


@pytest.mark.parametrize(("kernel", "rate"), [("mean", 0.5), ("full", 0.5), ("full", 0.005)])
def test_sum_of_equation_10_is_the_literal_sum_over_whole_steps(loss, kernel, rate):
    """At the small rate the solver's steps, and so the times within them, hold several of these."""
    jac, f, y = mlp(9)
    options = {"loss": loss, "learning_rate": rate, "kernel": kernel}
    outputs = flow(jac, f, y, steps=range(30), **options).outputs
    terms = [rate * output_scale(*f.shape, loss) * residual(at_u, y, loss) for at_u in outputs]
    evolution = flow(jac, f, y, steps=[0, 7, 30], residuals="sum", **options)
    require_start(evolution, f)
    bound = max(1e-10, TOLERANCE * evolution.solver_steps)
    for actual, t in zip(evolution.residuals[1:], (7, 30), strict=True):
        assert relative(actual, sum(terms[:t])) < bound


def test_weights_follow_true_gradient_flow_for_a_wide_network_and_a_short_time():
    """Eq. (9b) for a width of 2,048: the kernel changes by about |w(t) - w| / |w|, under 1 %."""
    model, x, y = problem(nn.Linear(4, 2048), nn.Tanh(), nn.Linear(2048, 3))
    with torch.no_grad():
        model[2].weight.mul_(2 / math.sqrt(2048))
    jac, eta, times = jacobian(model, x), 8e-5, [0.0, 400.0]
    options = {"loss": "mse", "learning_rate": eta, "kernel": "full"}
    update = jac.vjp(flow(jac, model(x).detach(), y, steps=times, **options).residuals[1])
    weights, _ = gradient_flow(model, x, y, "mse", eta, times)
    change = weights[1] - weights[0]
    assert float(change.norm() / weights[0].norm()) < 0.01
    assert relative(flat(model, update), change) < 0.02


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor]:
    """A stiff real problem: tangent kernel, outputs and targets of 150 digits."""
    raw = load_digits()
    x = torch.from_numpy(raw.data[:150]).float()
    x = (x - x.mean()) / x.std()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    y = one_hot(torch.from_numpy(raw.target[:150]), 10)
    return jacobian(model, x).gram(), model(x).detach(), y


def test_cross_entropy_solver_against_a_fine_reference(digits):
    """Default tolerance, float32: 1e-3 in all is what users are told to expect.

    A grid of times is read off the solver's own steps: it costs no products.
    """
    kernel, f, y = digits
    double, f64, y64 = kernel.double(), f.double(), y.double()
    eta = 3 * len(f) / float(torch.linalg.eigvalsh(double)[-1])

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        outputs = torch.from_numpy(state).view(f.shape)
        rate = eta / len(f) * residual(outputs, y64, "cross-entropy")
        return (double @ rate).flatten().numpy()

    times = [1.0, 3.7, *range(10, 600, 7), 600.0]
    options = {"rtol": 1e-8, "atol": 1e-9}
    exact = solve_ivp(slope, (0, 600), f64.flatten().numpy(), t_eval=times, **options)
    many, last = (
        evolve(*digits, loss="cross-entropy", learning_rate=eta, steps=steps)
        for steps in (times, times[-1:])
    )
    errors = [
        relative(actual.flatten().double(), torch.from_numpy(reference))
        for actual, reference in zip(many.outputs, exact.y.T, strict=True)
    ]
    assert max(errors) < 1e-3
    assert max(errors) < many.error_estimate < 2e-2
    assert many.kernel_products == last.kernel_products < 600  # what Euler's unit steps would need


def test_the_corrected_kernel_tends_to_the_full_one_with_the_number_of_steps(loss):
    """Between corrections it is off to first order in their distance, so 4 times closer by 4."""

    def end(kernel: str, steps: int = 1) -> Tensor:
        times = [128 * (k + 1) // steps for k in range(steps)]
        return flow(*mlp(), loss=loss, learning_rate=0.02, kernel=kernel, steps=times).residuals[-1]

    full = end("full")
    errors = [relative(end("corrected", steps), full) for steps in (1, 4, 16, 64)]
    assert errors[0] == pytest.approx(relative(end("mean"), full), rel=1e-6)
    assert errors[2] < errors[1] / 3
    assert errors[3] < errors[2] / 3


def test_corrected_sums_at_every_step_are_gradient_descent_on_the_linearised_network(loss):
    jac, f, y = mlp()
    options = {"learning_rate": 0.1, "kernel": "corrected", "residuals": "sum"}
    scale = 0.1 * output_scale(*f.shape, loss)
    for outputs in flow(jac, f, y, loss=loss, steps=range(1, 21), **options).outputs:
        f = f + jac.full_product(scale * residual(f, y, loss))
        assert relative(outputs, f) < 1e-10


def test_corrections_never_raise_the_loss_where_the_mean_kernel_overshoots(loss):
    """All outputs hang on one number: along it the update does C = 10 times what H foresees."""
    model, x, y = problem(nn.Linear(4, 1, bias=False), nn.Linear(1, 10, bias=False))
    y = nn.functional.pad(y, (0, 7))
    with torch.no_grad():
        model[0].weight.mul_(0.1)
    model[1].weight.requires_grad_(False)
    jac, f = jacobian(model, x), model(x).detach()
    options = {"loss": loss, "learning_rate": 1.0, "steps": range(40, 401, 40)}
    mean, corrected, full = (
        evolve(jac, f, y, kernel=kernel, **options) for kernel in ("mean", "corrected", "full")
    )
    before = loss_value(f, y, loss)
    assert loss_value(f + jac.jvp(jac.vjp(mean.residuals[-1])), y, loss) > before
    losses = [before, *(loss_value(outputs, y, loss) for outputs in corrected.outputs)]
    assert losses == sorted(losses, reverse=True)
    assert max(off_linearised(jac, f, corrected)) < 1e-10
    # the full kernel is followed where H cannot be
    assert relative(corrected.outputs[-1], full.outputs[-1]) < 1e-3


def test_the_progress_of_corrected_intervals_is_that_of_the_whole(loss):
    options = {"loss": loss, "learning_rate": 0.3, "kernel": "corrected", "memory_budget": 0}
    steps: list[SolverStep] = []
    evolution = GradientFlow(steps=[5, 10, 30], **options)(*mlp(), steps.append)
    for values in ([step.time for step in steps], [step.products for step in steps]):
        assert values == sorted(values)
    assert {step.end for step in steps} == {steps[-1].time} == {30.0}
    assert evolution.kernel_products == steps[-1].products + 3  # one of the full kernel at each


AUTO, CROSS_ENTROPY = {"learning_rate": "auto"}, {"loss": "cross-entropy"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": []}, "steps: expected at least one time"),
        ({"steps": [2, 1]}, "steps: expected increasing times"),
        ({"steps": [0.5], "residuals": "sum"}, "whole steps"),
        ({"kernel": "full"}, "'full' couples the outputs: pass a Jacobian"),
        ({"targets": torch.zeros(2, 3)}, "outputs and targets"),
        ({"jacobian_or_kernel": torch.zeros(3, 3)}, "kernel of 2 x 2 examples, got"),
        ({"jacobian_or_kernel": torch.full((2, 2), math.nan)}, "not finite"),
        ({"jacobian_or_kernel": torch.full((2, 2), math.inf), **CROSS_ENTROPY}, "not finite"),
        ({"jacobian_or_kernel": torch.full((2, 2), math.nan), **AUTO}, "not finite"),
        ({"jacobian_or_kernel": torch.zeros(2, 2), **AUTO}, "kernel is zero"),
    ],
)
def test_bad_problems_are_refused_by_name(change, message):
    tensors = {"jacobian_or_kernel": torch.eye(2), "outputs": torch.zeros(2, 2)}
    others = {"targets": torch.eye(2), "loss": "mse", "learning_rate": 0.1, "steps": [1]}
    refused(message, evolve, **tensors | others | change)


@pytest.mark.parametrize("size", [1e9, 1e30])
def test_a_problem_that_is_too_stiff_ends_in_bounded_work(size, monkeypatch):
    monkeypatch.setattr("fedntk.ntk.evolution.solver.MAX_PRODUCTS", 2000)
    f, y = torch.zeros(4, 2), one_hot(torch.arange(4) % 2, 2)
    with pytest.raises(FloatingPointError):
        evolve(size * torch.eye(4), f, y, loss="cross-entropy", learning_rate=1.0, steps=[1, 2000])


@pytest.mark.parametrize("residuals", ["integral", "sum"])
def test_mean_kernel_past_its_memory_is_left_unbuilt(loss, residuals):
    """The same flow by products alone; for MSE the closed form is the reference."""
    options = {"loss": loss, "learning_rate": 0.5, "steps": [4, 20], "residuals": residuals}
    built, unbuilt = (evolve(*mlp(9), memory_budget=b, **options) for b in (10**9, 0))
    assert unbuilt.kernel_products > 0
    bound = 1e-4 * (built.solver_steps + unbuilt.solver_steps)
    assert relative(unbuilt.outputs, built.outputs) < bound
    assert relative(unbuilt.residuals, built.residuals) < bound


def test_what_does_not_fit_is_refused_with_its_size(monkeypatch):
    _, f, y = mlp()
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda device: 1000)
    with pytest.raises(NotEnoughMemory, match="eigendecomposition of the kernel of 12 examples"):
        evolve(torch.eye(12).double(), f, y, loss="mse", learning_rate=0.5, steps=[1, 2])


@pytest.mark.parametrize("stages", [2, 3, 7, 60])
def test_a_step_is_of_order_2(stages):
    """The stages as they are defined on dy/dt = -x y: y(h) = 1 - x h + (x h)^2 / 2 + O(h^3)."""
    first, others, weights = _coefficients(stages)
    assert sum(weights) == pytest.approx(1)
    for x in (0.3, 1e-3):
        y = [1.0, 1.0 - first * x]
        for stage in others:
            y.append(
                (1 - stage.mu - stage.nu) + stage.mu * y[-1] + stage.nu * y[-2]
                - x * stage.mu_t * y[-1] - x * stage.gamma_t
            )  # fmt: skip
        by_weights = 1 - x * sum(w * value for w, value in zip(weights, y, strict=False))
        assert by_weights == pytest.approx(y[-1], rel=1e-10)
        assert y[-1] == pytest.approx(1 - x + x**2 / 2, abs=x**3 / 2 + 1e-12)


def test_spectral_radius_is_that_of_the_flow_not_of_the_kernel(digits):
    """Unsure examples have output Hessians of norm 1/C at the start: 5 times below the bound 1/2.

    Steps are limited by the square root of the radius times the horizon, so a solver that took
    the kernel's own would need twice the products.
    """
    kernel, _, y = digits
    f = torch.zeros_like(y)
    scale = 0.05 / len(f)
    hessian = torch.kron(torch.eye(10) / 10 - 0.01, scale * kernel)  # at p = 1/10
    largest = float(torch.linalg.eigvalsh(hessian.double())[-1])
    solver = RungeKuttaChebyshev(
        kernel.__matmul__,
        lambda f: scale * residual(f, y.double(), "cross-entropy"),
        lambda f, v: scale * output_hessian(f, v, "cross-entropy"),
        f,
        1e-4,
    )
    solver._follow_radius(f.double(), iterations=100)
    assert largest <= solver._radius <= 1.3 * largest
    assert largest < 0.11 * scale * float(torch.linalg.eigvalsh(kernel.double())[-1])


@pytest.mark.parametrize("kernel", ["mean", "full"])
def test_the_automatic_rate_is_that_of_the_largest_eigenvalue(kernel, loss):
    """eta s lambda_max = 1, against float64's eigenvalues.

    The iteration converges from below and stops when a product adds less than 1e-4, so the rate is
    a little too large: by 2 % at most with this network.
    """
    model, x, y = problem(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    model, x, y = model.float(), x.float(), y.float()
    jac, f = jacobian(model, x), model(x).detach()
    dense = torch.cat([t.flatten(2) for t in jac.dense().values()], 2).double()
    matrix = dense.flatten(0, 1) @ dense.flatten(0, 1).T
    if kernel == "mean":
        matrix = torch.einsum("icp,jcp->ij", dense, dense) / 3
    best = 1 / (output_scale(*f.shape, loss) * float(torch.linalg.eigvalsh(matrix)[-1]))
    options = {"loss": loss, "steps": [1], "kernel": kernel}
    actual = evolve(jac, f, y, learning_rate="auto", **options)
    assert best <= actual.learning_rate * (1 + 1e-5)
    assert actual.learning_rate < 1.02 * best
    expected = evolve(jac, f, y, learning_rate=actual.learning_rate, **options)
    assert torch.equal(actual.outputs, expected.outputs)
