"""NTK evolution: the linearised network under gradient flow, and the weights that follow it.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, eq. (5), (7),
(9a), (9b) and (10). With G(f) = scale * (Y - f) for MSE, scale = eta/(n C), and
G(f) = scale * (Y - softmax(f)) for cross-entropy, scale = eta/n:

    df/dt = H G(f),    R(t) = integral of G(f(u)) du from 0 to t,    w(t) = w + J^T R(t),

so that f(t) = f(0) + H R(t). Time is counted in steps of the learning rate. The paper writes 1/N
in eq. (7) and (9a) but 1/(N d_2) in eq. (10); used literally, functions and weights would move at
speeds that differ by d_2 = C. Here one normalisation, that of the loss, serves both.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .jacobian import Jacobian
from .losses import Loss, check_loss, output_scale, residual
from .memory import require_memory

__all__ = ["Evolution", "evolve"]

Apply = Callable[[Tensor], Tensor]
MAX_PRODUCTS = 20_000
MAX_STAGES = 500
_NOT_FINITE = "the kernel or the outputs are not finite; look for NaN in the inputs"


@dataclass(frozen=True, eq=False)
class Evolution:
    """Outputs and residuals of the linearised network at the requested steps.

    Attributes
    ----------
    steps : tuple of float, length T
        The times t, in steps of the learning rate.
    outputs : Tensor, shape (T, n, C)
        f(t): eq. (9a) for MSE.
    residuals : Tensor, shape (T, n, C)
        R(t), such that ``jacobian.vjp(residuals[k])`` is the change of the weights: eq. (9b), (10).
    kernel_products : int
        How many products of the kernel with an (n, C) matrix the solver took; 0 in closed form.
    solver_steps : int
        How many steps it accepted; the estimated error of each is within the tolerance.
    """

    steps: tuple[float, ...]
    outputs: Tensor
    residuals: Tensor
    kernel_products: int
    solver_steps: int


def evolve(
    jacobian_or_kernel: Jacobian | Tensor,
    outputs: Tensor,
    targets: Tensor,
    *,
    loss: Loss,
    learning_rate: float,
    steps: Sequence[float],
    kernel: Literal["mean", "full"] = "mean",
    residuals: Literal["integral", "sum"] = "integral",
    tolerance: float = 1e-4,
) -> Evolution:
    """Evolve the outputs of a linearised network under gradient flow.

    MSE with the mean kernel is solved in closed form in the kernel's eigenbasis, in float64.
    Otherwise the differential equation is stiff, and a stabilised explicit Runge-Kutta-Chebyshev
    method of second order with error control integrates it (Sommeijer, Shampine and Verwer, *RKC:
    an explicit solver for parabolic PDEs*, J. Comput. Appl. Math. 88, 1998).

    Parameters
    ----------
    jacobian_or_kernel : Jacobian or Tensor of shape (n, n)
        Of the n examples; a tensor is taken as the mean kernel H of eq. (6).
    outputs : Tensor, shape (n, C)
        f(0), the network's outputs at the current weights.
    targets : Tensor, shape (n, C)
        One-hot targets Y.
    loss : {"mse", "cross-entropy"}
        Loss averaged over examples (and outputs, for MSE).
    learning_rate : float
        eta.
    steps : sequence of float, length T
        Increasing times t >= 0 at which to report, in steps of the learning rate.
    kernel : {"mean", "full"}
        ``"mean"``: one kernel for all outputs, H, as in the paper. ``"full"``: all outputs coupled,
        the exact linearised network; needs a Jacobian, builds no matrix.
    residuals : {"integral", "sum"}
        ``"integral"``: R(t) as above; it never overshoots. ``"sum"``: the paper's eq. (10) to the
        letter, the sum of G(f(u)) over the integers u = 0 ... t - 1, which approaches the integral
        as eta goes to 0 and overshoots where eta lambda_max is not small; t must be whole.
    tolerance : float
        Error allowed per step of the solver, relative to the norm of the outputs.

    Returns
    -------
    Evolution
        In the dtype of `outputs`.

    Raises
    ------
    ValueError
        If an argument is out of range, shapes do not fit, or the kernel is not finite.
    NotEnoughMemory
        If the kernel would not fit.
    FloatingPointError
        If no step, however small, meets the tolerance, or 20,000 kernel products do not suffice.

    Examples
    --------
    One example, one output, H = 2: f(t) = 1 - exp(-2 t) for a learning rate of 1.

    >>> one = torch.ones(1, 1)
    >>> evolve(2 * one, 0 * one, one, loss="mse", learning_rate=1.0, steps=[0, 1]).outputs.flatten()
    tensor([0.0000, 0.8647])
    """
    check_loss(loss)
    if residuals not in ("integral", "sum"):
        raise ValueError(f"residuals: expected 'integral' or 'sum', got {residuals!r}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: expected a number between 0 and 1, got {tolerance}")
    n, num_outputs = _check(jacobian_or_kernel, outputs, targets, learning_rate, kernel)
    times = _check_steps(steps, whole=residuals == "sum")
    scale = learning_rate * output_scale(n, num_outputs, loss)
    if isinstance(jacobian_or_kernel, Tensor):
        matrix = jacobian_or_kernel
    elif kernel == "mean":
        matrix = jacobian_or_kernel.gram()
    else:
        full = jacobian_or_kernel
        return _evolve_stiff(
            lambda r: full.jvp(full.vjp(r)),
            *(outputs, targets, loss, scale, times, residuals, tolerance),
        )
    if loss == "mse":
        return _evolve_mse(matrix, outputs, targets, scale, times, residuals)
    return _evolve_stiff(
        lambda r: matrix @ r, outputs, targets, loss, scale, times, residuals, tolerance
    )


def _check(
    operator: Jacobian | Tensor, outputs: Tensor, targets: Tensor, learning_rate: float, kernel: str
) -> tuple[int, int]:
    if kernel not in ("mean", "full"):
        raise ValueError(f"kernel: expected 'mean' or 'full', got {kernel!r}")
    if kernel == "full" and isinstance(operator, Tensor):
        raise ValueError("kernel='full' couples the outputs: pass a Jacobian, not a kernel matrix")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate: expected a positive number, got {learning_rate}")
    if outputs.ndim != 2 or outputs.shape != targets.shape:
        raise ValueError(
            "outputs and targets: expected one shape (n, C), "
            f"got {tuple(outputs.shape)} and {tuple(targets.shape)}"
        )
    n, num_outputs = outputs.shape
    shape = (
        tuple(operator.shape)
        if isinstance(operator, Tensor)
        else (operator.num_examples, operator.num_examples)
    )
    if shape != (n, n):
        raise ValueError(f"expected a kernel of {n} x {n} examples, got {shape}")
    return n, num_outputs


def _check_steps(steps: Sequence[float], *, whole: bool) -> tuple[float, ...]:
    times = tuple(float(t) for t in steps)
    if not times or any(a >= b for a, b in itertools.pairwise(times)) or times[0] < 0:
        raise ValueError(f"steps: expected increasing times of at least 0, got {steps}")
    if not all(math.isfinite(t) for t in times):
        raise ValueError(f"steps: expected finite times, got {steps}")
    if whole and any(t != round(t) for t in times):
        raise ValueError(f"steps: the sum of eq. (10) needs whole steps, got {steps}")
    return times


def _evolve_mse(
    kernel: Tensor,
    outputs: Tensor,
    targets: Tensor,
    scale: float,
    times: tuple[float, ...],
    residuals: str,
) -> Evolution:
    """Solve in closed form: each eigenvalue's part of Y - f decays as exp(-rate t), eq. (9a)."""
    if not (torch.isfinite(kernel).all() and torch.isfinite(outputs).all()):
        raise ValueError(_NOT_FINITE)
    require_memory(
        4 * 8 * kernel.numel(),
        f"the eigendecomposition of the kernel of {len(kernel)} examples",
        device=kernel.device,
        cure="sample fewer clients a round or fewer examples on each",
    )
    eigenvalues, basis = torch.linalg.eigh(kernel.double())
    rates = scale * eigenvalues.clamp(min=0)
    start = basis.T @ (targets - outputs).double()
    t = torch.tensor(times, dtype=torch.float64, device=rates.device)[:, None]
    decay = -torch.expm1(-rates * t)  # 1 - exp(-rate t)
    total = _ratio(decay, rates, t)  # integral of exp(-rate u)
    if residuals == "sum":  # geometric series
        unit = -torch.expm1(-rates)
        total = _ratio(decay, unit, t)
    evolved = outputs.double() + basis @ (decay[:, :, None] * start)
    accumulated = scale * (basis @ (total[:, :, None] * start))
    dtype = outputs.dtype
    return Evolution(times, evolved.to(dtype), accumulated.to(dtype), 0, 0)


def _ratio(numerator: Tensor, denominator: Tensor, limit: Tensor) -> Tensor:
    """Numerator / denominator, and `limit` where the denominator is zero."""
    zero = denominator == 0
    return torch.where(zero, limit, numerator / denominator.masked_fill(zero, 1.0))


def _evolve_stiff(
    apply: Apply,
    outputs: Tensor,
    targets: Tensor,
    loss: Loss,
    scale: float,
    times: tuple[float, ...],
    residuals: str,
    tolerance: float,
) -> Evolution:
    """Integrate f and R together; `apply` is the product with the kernel."""
    double = targets.double()
    solver = _RungeKuttaChebyshev(
        apply, lambda f: scale * residual(f, double, loss), outputs, tolerance
    )
    # softmax's own Jacobian has a norm of at most 1/2
    solver.bound_spectrum(scale * (0.5 if loss == "cross-entropy" else 1.0))
    evolved, accumulated = [], []
    for t in times:
        solver.advance(t, whole_steps=residuals == "sum")
        evolved.append(solver.outputs)
        accumulated.append(solver.integral if residuals == "integral" else solver.sum)
    return Evolution(
        times,
        torch.stack(evolved).to(outputs.dtype),
        torch.stack(accumulated).to(outputs.dtype),
        solver.products,
        solver.steps,
    )


class _RungeKuttaChebyshev:
    """RKC of second order for df/dt = H G(f), with R = integral of G(f) carried along.

    One kernel product serves a stage of both. The number of stages s follows the step: its
    stability interval grows with s squared, and so does the weight of rounding errors. The state is
    therefore kept in float64; the kernel product, which is the cost, stays in the outputs' dtype.
    """

    def __init__(self, apply: Apply, rate: Apply, outputs: Tensor, tolerance: float) -> None:
        self.products = 0
        self.steps = 0
        dtype, outputs = outputs.dtype, outputs.double()
        self._apply: Apply = lambda r: apply(r.to(dtype)).double()
        self._rate = rate
        self._tolerance = tolerance
        self._floor = math.sqrt(outputs.numel())  # logits of size 1
        self.time = 0.0
        self.outputs = outputs
        self.integral = torch.zeros_like(outputs)
        self.sum = torch.zeros_like(outputs)
        self._slope = self._derivative(outputs)  # (df/dt, dR/dt)
        self._step = math.inf
        self._radius = self._factor = 0.0
        self._vector: Tensor | None = None

    def _derivative(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        rate = self._rate(outputs)
        self.products += 1
        return self._apply(rate), rate

    def bound_spectrum(self, factor: float, *, iterations: int = 50) -> None:
        """Set the spectral radius to `factor` times the kernel's, by power iteration, plus 10 %.

        Later calls go on from where the last one stopped.
        """
        if self._vector is None:
            generator = torch.Generator().manual_seed(0)
            self._vector = torch.randn(self.outputs.shape, generator=generator).to(self.outputs)
        self._factor, radius = factor, 0.0
        for i in range(iterations):
            self._vector = self._apply(self._vector / self._vector.norm())
            self.products += 1
            previous, radius = radius, float(self._vector.norm())
            if radius == 0 or (i >= 10 and abs(radius - previous) < 1e-3 * radius):
                break
        if not math.isfinite(radius):
            raise ValueError(_NOT_FINITE)
        self._radius = max(self._radius, 1.1 * factor * radius)

    def advance(self, time: float, *, whole_steps: bool) -> None:
        """Integrate to `time`; with `whole_steps`, add up G at the integers passed, eq. (10)."""
        while self.time < time:
            if math.isinf(self._step):
                self._step = self._first_step(time - self.time)
            step = min(self._step, time - self.time)
            if self._radius and _stages_for(step * self._radius) > MAX_STAGES:
                step = (MAX_STAGES / 2) ** 2 / self._radius
            if self.products > MAX_PRODUCTS:
                raise FloatingPointError(
                    f"the evolution took {self.products} kernel products to t = {self.time:g} of "
                    f"{time:g}; lower the learning rate, the steps or the tolerance's strictness"
                )
            outputs, integral = self._stages(step)
            slope = self._derivative(outputs)
            error = self._error(step, outputs, slope)
            factor = min(5.0, max(0.1, 0.8 * error ** (-1 / 3))) if error > 0 else 5.0
            if error > 1:
                if step * factor < 1e-12 * max(time, 1.0):
                    raise FloatingPointError(
                        f"the evolution cannot be integrated past t = {self.time:g} within "
                        f"the tolerance {self._tolerance:g}"
                    )
                self._step = step * factor
                if factor < 0.2:  # far off: the radius may be larger than it seemed
                    self.bound_spectrum(self._factor, iterations=20)
                continue
            if whole_steps:
                self._add_whole_steps(step, outputs, slope)
            self.steps += 1
            self.time = time if step == time - self.time else self.time + step
            self.outputs, self.integral, self._slope = outputs, integral, slope
            self._step = max(self._step, step * factor) if factor >= 1 else step * factor

    def _first_step(self, longest: float) -> float:
        """Such that the linear change of the outputs is within the tolerance's order."""
        size = max(self._floor, float(self.outputs.norm()))
        speed = float(self._slope[0].norm())
        curvature = max(self._radius, 1e-300) * speed
        return min(longest, math.sqrt(self._tolerance * size / curvature) if curvature else longest)

    def _error(self, step: float, outputs: Tensor, slope: tuple[Tensor, Tensor]) -> float:
        estimate = 0.8 * (self.outputs - outputs) + 0.4 * step * (self._slope[0] + slope[0])
        size = max(self._floor, float(self.outputs.norm()), float(outputs.norm()))
        error = float(estimate.norm()) / (self._tolerance * size)
        return error if math.isfinite(error) else math.inf

    def _stages(self, step: float) -> tuple[Tensor, Tensor]:
        s = _stages_for(step * self._radius)
        w0 = 1 + 2 / (13 * s**2)
        values, first, second = _chebyshev(w0, s)
        w1 = first[s] / second[s]
        b = [0.0, 0.0] + [second[j] / first[j] ** 2 for j in range(2, s + 1)]
        b[0] = b[1] = b[2]
        (f0, r0), (df0, dr0) = (self.outputs, self.integral), self._slope
        before = (f0, r0)
        now = (f0 + b[1] * w1 * step * df0, r0 + b[1] * w1 * step * dr0)
        for j in range(2, s + 1):
            mu, nu = 2 * b[j] * w0 / b[j - 1], -b[j] / b[j - 2]
            mu_t = 2 * b[j] * w1 / b[j - 1]
            gamma_t = -(1 - b[j - 1] * values[j - 1]) * mu_t
            df, dr = self._derivative(now[0])
            following = (
                (1 - mu - nu) * f0
                + mu * now[0]
                + nu * before[0]
                + step * (mu_t * df + gamma_t * df0),
                (1 - mu - nu) * r0
                + mu * now[1]
                + nu * before[1]
                + step * (mu_t * dr + gamma_t * dr0),
            )
            before, now = now, following
        return now

    def _add_whole_steps(self, step: float, outputs: Tensor, slope: tuple[Tensor, Tensor]) -> None:
        """Add G(f(u)) for the integers u in [time, time + step), f by cubic interpolation."""
        first, last = math.ceil(self.time - 1e-9), math.ceil(self.time + step - 1e-9)
        for u in range(first, last):
            x = (u - self.time) / step
            at_u = (
                (1 + 2 * x) * (1 - x) ** 2 * self.outputs
                + x * (1 - x) ** 2 * step * self._slope[0]
                + x**2 * (3 - 2 * x) * outputs
                + x**2 * (x - 1) * step * slope[0]
            )
            self.sum = self.sum + self._rate(at_u)


def _stages_for(stiffness: float) -> int:
    """Stages that keep a step stable, whose length times the spectral radius is `stiffness`."""
    return 1 + math.ceil(math.sqrt(1 + 1.54 * stiffness))


def _chebyshev(x: float, degree: int) -> tuple[list[float], list[float], list[float]]:
    """Chebyshev polynomials T_0 ... T_degree at x, with first and second derivatives."""
    values, first, second = [1.0, x], [0.0, 1.0], [0.0, 0.0]
    for _ in range(2, degree + 1):
        values.append(2 * x * values[-1] - values[-2])
        first.append(2 * values[-2] + 2 * x * first[-1] - first[-2])
        second.append(4 * first[-2] + 2 * x * second[-1] - second[-2])
    return values, first, second
