"""A stabilised explicit solver for the stiff flow df/dt = H G(f) of a tangent kernel H.

Source: Sommeijer, Shampine and Verwer, *RKC: an explicit solver for parabolic PDEs*, J. Comput.
Appl. Math. 88, 1998: coefficients, damping, number of stages, error estimate.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["NOT_FINITE", "Apply", "RungeKuttaChebyshev"]

Apply = Callable[[Tensor], Tensor]
MAX_PRODUCTS = 20_000
MAX_STAGES = 500
NOT_FINITE = "the kernel or the outputs are not finite; look for NaN in the inputs"


class RungeKuttaChebyshev:
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
            raise ValueError(NOT_FINITE)
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
            rest = 1 - mu - nu
            before, now = (
                now,
                (
                    rest * f0 + mu * now[0] + nu * before[0] + step * (mu_t * df + gamma_t * df0),
                    rest * r0 + mu * now[1] + nu * before[1] + step * (mu_t * dr + gamma_t * dr0),
                ),
            )
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
