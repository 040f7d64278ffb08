"""A stabilised explicit solver for the stiff flow df/dt = H G(f) of a tangent kernel H.

Source: Sommeijer, Shampine and Verwer, *RKC: an explicit solver for parabolic PDEs*, J. Comput.
Appl. Math. 88, 1998: coefficients, damping, number of stages, error estimate, dense output.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_PRODUCTS = 20_000
MAX_STAGES = 500
SAFETY = 1.2  # a power iteration underestimates; the radius moves within a step
NOT_FINITE = "the kernel or the outputs are not finite; look for NaN in the inputs"


class SolverStep(NamedTuple):
    """How far the solver is: t reached, the last t, and kernel products so far.

    `expected` estimates the products at the end: 0.7 to 1.9 times the true number in 36 evolutions
    of MLPs, a CNN and a transformer block.
    """

    time: float
    end: float
    products: int
    expected: int


OnStep = Callable[[SolverStep], None]
State = tuple[Tensor, Tensor]  # f and R


class _Point(NamedTuple):
    """State f and R of the flow at one t, slope df/dt = H G(f), rate dR/dt = G(f); all (n, C)."""

    outputs: Tensor
    integral: Tensor
    slope: Tensor
    rate: Tensor


class RungeKuttaChebyshev:
    """RKC of second order for df/dt = H G(f), with R = integral of G(f) carried along.

    G depends only on f, so the stages are those of f; R takes their sum of G, weighted as the
    method weighs it over a whole step. The stability interval grows with the square of the number
    of stages, and so does the weight of rounding errors: the state is in float64; the kernel
    product, which is the cost, in the outputs' dtype. The spectral radius of the flow's own
    Jacobian, -H dG/df, is followed by power iteration, one product a step: with cross-entropy it
    lies far under that of H. All matrices (n, C) are kept column by column in memory: with few
    columns, products with H and the softmax are several times faster so than row by row.

    The solver takes the product with H (in the outputs' dtype), G and (f, v) -> -(dG/df) v (in
    float64; positive semi-definite in v), f(0), and the error allowed per step, relative to the
    norm of the outputs (of logits of at least 1). `on_step` is called at t = 0 and after each step.
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        rate: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor, Tensor], Tensor],
        outputs: Tensor,
        tolerance: float,
        on_step: OnStep = lambda _: None,
    ) -> None:
        self.products = self.steps = self._expected = 0
        self.error_estimate = self._radius = 0.0
        self._kernel, self._rate, self._slope = apply, rate, slope
        self._dtype, self._tolerance, self._on_step = outputs.dtype, tolerance, on_step
        self._floor = math.sqrt(outputs.numel())  # logits of size 1
        self._outputs = _by_column(outputs.double())
        self._vector = self._random_vector(0)

    def _random_vector(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self._outputs.shape, generator=generator)
        return _by_column(drawn.to(self._outputs))

    def _apply(self, rate: Tensor) -> Tensor:
        self.products += 1
        return self._kernel(rate.to(self._dtype)).double()

    def _point(self, outputs: Tensor, integral: Tensor) -> _Point:
        rate = self._rate(outputs)
        return _Point(outputs, integral, self._apply(rate), rate)

    def solve(self, times: Sequence[float], *, whole_steps: bool = False) -> Iterator[State]:
        """Yield f(t) and R(t) for each of the increasing `times`, by cubic dense output.

        With `whole_steps`, R(t) is the sum of G(f(u)) over the integers u = 0 ... t - 1: eq. (10).
        """
        reported, passed, total = 0, 0, torch.zeros_like(self._outputs)

        def add_steps(at: Callable[[float], State], end: int) -> None:
            nonlocal passed, total
            if whole_steps:
                total += sum(self._rate(at(u)[0]) for u in range(passed, end))
                passed = max(passed, end)

        for end, at in self._steps_until(times[-1]):
            while reported < len(times) and times[reported] <= end:
                t = times[reported]
                outputs, integral = at(t)
                add_steps(at, round(t))
                yield outputs, total.clone() if whole_steps else integral
                reported += 1
            add_steps(at, math.ceil(end))

    def _steps_until(self, end: float) -> Iterator[tuple[float, Callable[[float], State]]]:
        """Yield each accepted step's end, and the state within the step as a function of time."""
        time, now = 0.0, self._point(self._outputs, torch.zeros_like(self._outputs))
        if end == 0:
            yield 0.0, lambda _: (now.outputs, now.integral)
            return
        self._follow_radius(now.outputs, iterations=30)
        # the stages of a step grow with the root of its stiffness, which falls as the examples are
        # learned; power and factor are from trials
        self._expected = self.products + round(60 * math.sqrt(math.sqrt(end * self._radius)))
        self._on_step(SolverStep(time, end, self.products, self._expected))
        step, grown = self._first_step(now, end), 1.0
        while time < end:
            if self.products > MAX_PRODUCTS:
                raise FloatingPointError(
                    f"the evolution took {self.products} kernel products to t = {time:g} of "
                    f"{end:g}; lower the learning rate, the steps or the tolerance's strictness"
                )
            if _stages_for(step * self._radius) > MAX_STAGES:
                step = (MAX_STAGES / 2) ** 2 / self._radius
            last = step >= end - time
            step = min(step, end - time)
            new = self._point(*self._stages(step, now))
            error = self._error(step, now, new)
            factor = min(5.0, max(0.1, 0.8 * error ** (-1 / 3))) if error > 0 else 5.0
            if error > 1:
                if step * factor < 1e-12 * max(end, 1.0):
                    raise FloatingPointError(
                        f"the evolution cannot be integrated past t = {time:g} within "
                        f"the tolerance {self._tolerance:g}"
                    )
                step, grown = step * factor, 1.0
                # far off: the radius may be much larger than it seemed
                self._follow_radius(now.outputs, iterations=2 if factor > 0.2 else 20)
                continue
            self.steps += 1
            self.error_estimate += error * self._tolerance
            start, time = time, end if last else time + step
            yield time, _dense(start, step, now, new)
            # a lower bound of the radius that costs nothing; it shows a mode that begins to grow
            moved = (new.outputs - now.outputs).norm().clamp(1e-300)
            observed = float((new.slope - now.slope).norm() / moved)
            now = new
            self._on_step(SolverStep(time, end, self.products, self._expected))
            step, grown = step * min(5.0, factor * max(1.0, grown)), factor
            if not last and observed > self._radius:
                self._follow_radius(now.outputs, iterations=5)
            elif not last and _stages_for(2 * step * self._radius) > 2:
                self._follow_radius(now.outputs, iterations=1)

    def _follow_radius(self, outputs: Tensor, *, iterations: int) -> None:
        """Power iteration on -H dG/df at `outputs`, from where the last one stopped.

        That is a lower bound, poor after a rest, so the radius falls by 10 % at most.
        """
        radius = 0.0
        for i in range(iterations):
            self._vector = self._apply(self._slope(outputs, self._vector / self._vector.norm()))
            previous, radius = radius, float(self._vector.norm())
            if radius == 0 or (i >= 3 and abs(radius - previous) < 1e-2 * radius):
                break
        if not math.isfinite(radius):
            raise ValueError(NOT_FINITE)
        if radius == 0:
            self._vector = self._random_vector(self.products)
        self._radius = max(SAFETY * radius, 0.9 * self._radius)

    def _first_step(self, start: _Point, longest: float) -> float:
        """Choose a step that changes the outputs, to first order, by about the tolerance."""
        size = max(self._floor, float(start.outputs.norm()))
        curvature = self._radius * float(start.slope.norm())
        return min(longest, math.sqrt(self._tolerance * size / curvature) if curvature else longest)

    def _error(self, step: float, now: _Point, new: _Point) -> float:
        change = (now.outputs - new.outputs).mul_(0.8)
        estimate = change.add_(now.slope, alpha=0.4 * step).add_(new.slope, alpha=0.4 * step)
        size = max(self._floor, float(now.outputs.norm()), float(new.outputs.norm()))
        error = float(estimate.norm()) / (self._tolerance * size)
        return error if math.isfinite(error) else math.inf

    def _stages(self, step: float, now: _Point) -> tuple[Tensor, Tensor]:
        first, stages, weights = _coefficients(_stages_for(step * self._radius))
        before, at = now.outputs, now.outputs.add(now.slope, alpha=first * step)
        integral = now.integral.add(now.rate, alpha=weights[0] * step)
        for stage, weight in zip(stages, weights[1:], strict=True):
            rate = self._rate(at)
            integral.add_(rate, alpha=weight * step)
            following = now.outputs * (1 - stage.mu - stage.nu)
            following.add_(at, alpha=stage.mu).add_(before, alpha=stage.nu)
            following.add_(self._apply(rate), alpha=step * stage.mu_t)
            before, at = at, following.add_(now.slope, alpha=step * stage.gamma_t)
        return at, integral


def _by_column(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous().T


def _dense(start: float, step: float, now: _Point, new: _Point) -> Callable[[float], State]:
    """Cubic Hermite interpolation between the ends of a step."""

    def at(t: float) -> State:
        x = (t - start) / step

        def value(a: Tensor, b: Tensor, slope: Tensor, end: Tensor) -> Tensor:
            return (
                ((1 + 2 * x) * (1 - x) ** 2 * a)
                .add_(slope, alpha=x * (1 - x) ** 2 * step)
                .add_(b, alpha=x**2 * (3 - 2 * x))
                .add_(end, alpha=x**2 * (x - 1) * step)
            )

        return (
            value(now.outputs, new.outputs, now.slope, new.slope),
            value(now.integral, new.integral, now.rate, new.rate),
        )

    return at


def _stages_for(stiffness: float) -> int:
    """Stages s so that 0.65 (s^2 - 1) is at least `stiffness`, step times spectral radius."""
    return max(2, 1 + math.floor(math.sqrt(1 + 1.54 * stiffness)))


class _Stage(NamedTuple):
    mu: float
    nu: float
    mu_t: float
    gamma_t: float


@functools.lru_cache(maxsize=MAX_STAGES)
def _coefficients(s: int) -> tuple[float, tuple[_Stage, ...], tuple[float, ...]]:
    """Return the first stage's factor, the other stages, and the weights of all s slopes.

    A step of length h ends at ``y(0) + h * sum over j of weights[j] F_j``, F_j being the slope at
    stage j, y(0) stage 0. The weights come from the stages' recursion, run backwards.
    """
    w0 = 1 + 2 / (13 * s**2)
    values, first, second = _chebyshev(w0, s)
    w1 = first[s] / second[s]
    b = [0.0, 0.0] + [second[j] / first[j] ** 2 for j in range(2, s + 1)]
    b[0] = b[1] = b[2]
    stages = []
    for j in range(2, s + 1):
        mu_t = 2 * b[j] * w1 / b[j - 1]
        gamma_t = -(1 - b[j - 1] * values[j - 1]) * mu_t
        stages.append(_Stage(2 * b[j] * w0 / b[j - 1], -b[j] / b[j - 2], mu_t, gamma_t))
    weights = [0.0] * s
    share, following, nu = 1.0, 0.0, 0.0  # of stages j and j + 1 in the last one; nu of stage j + 1
    for j in range(s, 1, -1):
        stage = stages[j - 2]
        weights[j - 1] = share * stage.mu_t
        weights[0] += share * stage.gamma_t
        share, following, nu = stage.mu * share + nu * following, share, stage.nu
    weights[0] += share * b[1] * w1
    return b[1] * w1, tuple(stages), tuple(weights)


def _chebyshev(x: float, degree: int) -> tuple[list[float], list[float], list[float]]:
    """Chebyshev polynomials T_0 ... T_degree at x, with first and second derivatives."""
    values, first, second = [1.0, x], [0.0, 1.0], [0.0, 0.0]
    for _ in range(2, degree + 1):
        values.append(2 * x * values[-1] - values[-2])
        first.append(2 * values[-2] + 2 * x * first[-1] - first[-2])
        second.append(4 * first[-2] + 2 * x * second[-1] - second[-2])
    return values, first, second
