"""NTK evolution: the linearised network under gradient flow, and the weights that follow it.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, eq. (5), (7),
(9a), (9b) and (10). With G(f) = scale * (Y - f) for MSE, scale = eta/(n C), and
G(f) = scale * (Y - softmax(f)) for cross-entropy, scale = eta/n:

    df/dt = H G(f),    R(t) = integral of G(f(u)) du from 0 to t,    w(t) = w + J^T R(t),

so that f(t) = f(0) + H R(t). Time is counted in steps of the learning rate. The paper writes 1/N
in eq. (7) and (9a) but 1/(N d_2) in eq. (10); used literally, functions and weights would move at
speeds that differ by d_2 = C. Here one normalisation, that of the loss, serves both.

The paper's H is a mean over outputs and omits how they move each other, so f(t) is not what the
update J^T R does to the linearised network: along some directions of MLPs in training it does half
as much again, and the models of the next rounds go up and down.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..jacobian.operator import Jacobian
from ..losses import Loss, loss_value, output_hessian, output_scale, residual
from ..options import Declared, option, shared
from ..support.memory import available_memory, require_memory
from ..support.precision import full_float32
from .solver import NOT_FINITE, OnStep, RungeKuttaChebyshev, SolverStep, State

Kernel = Literal["mean", "corrected", "full"]
AUTO = "auto"
AUTO_STEPS = (10, 30, 100, 300, 1000, 3000, 10_000)  # in times of the kernel's fastest part
MOST_PRODUCTS = 100  # of a power iteration
# (f(0) in float64, increasing times, the time passed before) -> f and R at the times, with R(0) = 0
_Follow = Callable[[Tensor, Sequence[float], float], list[State]]


@dataclass(frozen=True, eq=False)
class Evolution:
    """Outputs f(t) and residuals R(t) of the linearised network at T times, both (T, n, C).

    `steps` are the times, in steps of `learning_rate`, eta; f is that of eq. (9a) for MSE, and
    ``jacobian.vjp(residuals[k])`` is the change of the weights, eq. (9b) and (10).
    `kernel_products` counts products of a kernel, mean or full, with an (n, C) matrix. The
    estimated errors of the `solver_steps`, each within the tolerance and relative to the norm of
    the outputs, add up to `error_estimate`: an upper estimate of the error at the last step,
    because the flow of a convex loss damps errors.
    """

    steps: tuple[float, ...]
    outputs: Tensor
    residuals: Tensor
    kernel_products: int
    solver_steps: int
    error_estimate: float
    learning_rate: float


class FlowOptions(Declared):
    """How outputs evolve; :class:`GradientFlow` says what each choice means."""

    loss: Loss = shared("loss that evolves; the clients' must be the same", default="cross-entropy")
    learning_rate: float | Literal["auto"] = shared(
        "eta; 'auto': the largest at which gradient descent on the linearised network overshoots "
        "along no eigenvector of the round's kernel, for networks of any kind (a rate for an MLP "
        "is far too large for a convolutional network)",
        above=0,
    )
    steps: Sequence[float] = shared(
        "increasing times t, in steps of the learning rate, at which the evolution is known",
        at_least=0,
    )
    kernel: Kernel = shared(
        "mean: one kernel for all outputs, as in the paper; corrected: the same, with the outputs "
        "of the exact linearised network at each of the steps, which learns in fewer rounds (keep "
        "the steps few); full: all outputs coupled",
        default="mean",
    )
    residuals: Literal["integral", "sum"] = shared(
        "how residuals add up over time: their integral, or the paper's sum over whole steps",
        default="integral",
    )
    tolerance: float = shared(
        "error allowed per step of the solver, relative to the norm of the outputs",
        default=1e-4,
        above=0,
        below=1,
    )

    def check(self) -> None:
        """Refuse steps that do not increase, or are not whole where residuals are summed."""
        if any(a >= b for a, b in itertools.pairwise(self.steps)):
            raise ValueError(f"steps: expected increasing times, got {list(self.steps)}")
        if self.residuals == "sum" and any(t != round(t) for t in self.steps):
            raise ValueError(f"steps: residuals='sum' needs whole steps, got {list(self.steps)}")

    @property
    def has_auto_rate(self) -> bool:
        """Whether the learning rate follows the kernel."""
        return self.learning_rate == AUTO


class GradientFlow(FlowOptions):
    """How a linearised network evolves; called with a problem, it gives its :class:`Evolution`.

    - Learning rate ``"auto"``: gradient descent multiplies the residual along an eigenvector by
      ``1 - eta s lambda`` in a step, s being the loss's scale; at ``eta s lambda_max = 1`` none
      overshoots. The flow depends only on ``eta t``, so one grid of steps suits kernels of any
      size. The full kernel's largest eigenvalue counts for ``"corrected"`` and ``"full"``.
    - Kernel ``"full"``: the exact linearised network; needs a Jacobian, builds no matrix.
      ``"corrected"``: the paper's H from one of the steps to the next, and there the outputs of the
      exact linearised network, f(0) + J J^T R, for one product of the full kernel per step. With
      more steps it tends to ``"full"``. If H would raise the linearised network's loss over an
      interval, the full kernel is followed instead. Needs a Jacobian and several steps.
    - Residuals ``"sum"``: the sum of G(f(u)) over the integers u = 0 ... t - 1, as in the paper's
      eq. (10), overshoots if eta lambda_max is not small; the integral never does.
    - Tolerance: the whole error was under 1e-3 with the default on the papers' network and data
      (`solver` of `benchmarks/reports.py`).
    - Beyond the memory budget no matrix is built, and the solver takes products with
      :meth:`Jacobian.mean_product`, which cost up to C^2 times the full kernel's.
    """

    memory_budget: int | None = option(
        "bytes that the mean kernel may take before it is left unbuilt; what is available by "
        "default",
        default=None,
        compared=False,
    )

    def check(self) -> None:
        """Refuse an empty grid."""
        if not self.steps:
            raise ValueError("steps: expected at least one time, got none")

    @full_float32()
    def __call__(
        self,
        jacobian_or_kernel: Jacobian | Tensor,
        outputs: Tensor,
        targets: Tensor,
        on_step: OnStep | None = None,
    ) -> Evolution:
        """Evolve the outputs: see :func:`evolve`; `on_step` is the solver's."""
        _check_shapes(jacobian_or_kernel, outputs, targets)
        jacobian = None if isinstance(jacobian_or_kernel, Tensor) else jacobian_or_kernel
        if self.kernel != "mean" and jacobian is None:
            raise ValueError(
                f"kernel={self.kernel!r} couples the outputs: pass a Jacobian, not a kernel matrix"
            )
        matrix, apply = self._products(jacobian_or_kernel)
        full = None if self.kernel == "mean" or jacobian is None else jacobian.full_product
        scale = output_scale(len(outputs), outputs.shape[1], self.loss)
        rate, products = self.learning_rate, 0
        if isinstance(rate, str):
            operator, columns = (apply, outputs[:, :1]) if full is None else (full, outputs)
            largest, products = largest_eigenvalue(operator, columns)
            if largest == 0:
                raise ValueError(
                    "learning_rate='auto': the kernel is zero; the outputs cannot move"
                )
            rate = 1 / (scale * largest)
        solver = _Solver(self, targets.double(), rate * scale, outputs.dtype, on_step)
        follow: _Follow = partial(solver.follow, apply)
        if self.loss == "mse" and matrix is not None:
            follow = _closed_form(matrix, targets, rate * scale, self.residuals)
        if self.kernel == "corrected" and full is not None:
            states = self._follow_corrected(follow, solver, full, outputs, targets)
        else:
            states = follow(outputs.double(), self.steps, 0.0)
        evolved, accumulated = (torch.stack(values) for values in zip(*states, strict=True))
        return Evolution(
            tuple(self.steps),
            evolved.to(outputs.dtype),
            accumulated.to(outputs.dtype),
            products + solver.products + solver.corrections,
            solver.steps,
            solver.error_estimate,
            rate,
        )

    def _products(
        self, operator: Jacobian | Tensor
    ) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
        """Return the kernel's matrix, None if it is not to be built, and the product with it."""
        if isinstance(operator, Tensor):
            return operator, partial(_matrix_product, operator)
        if self.kernel == "full":
            return None, operator.full_product
        solved = _eigen_bytes(operator.num_examples) if self.loss == "mse" else 0
        budget = self.memory_budget
        budget = available_memory(operator.device) if budget is None else budget
        if operator.gram_bytes() + solved > budget:
            return None, operator.mean_product
        matrix = operator.gram()
        return matrix, partial(_matrix_product, matrix)

    def _follow_corrected(
        self,
        mean: _Follow,
        solver: "_Solver",
        full: Callable[[Tensor], Tensor],
        outputs: Tensor,
        targets: Tensor,
    ) -> list[State]:
        """Follow the mean kernel from each time to the next, from the exact linearised outputs.

        Over an interval where that would raise the linearised loss, follow the full one instead.
        """
        f, total = outputs.double(), torch.zeros_like(outputs, dtype=torch.float64)
        reached, states = loss_value(f, targets, self.loss), []

        def after(follow: _Follow, start: float, end: float) -> tuple[Tensor, Tensor, float]:
            ((_, residuals),) = follow(f, [end - start], start)
            solver.corrections += 1
            corrected = f + full(residuals.to(outputs.dtype)).double()
            return corrected, total + residuals, loss_value(corrected, targets, self.loss)

        for start, end in itertools.pairwise([0.0, *self.steps]):
            if end > start:
                step = after(mean, start, end)
                if not step[-1] <= reached:
                    step = after(partial(solver.follow, full), start, end)
                f, total, reached = step
            states.append((f, total))
        return states


def evolve(
    jacobian_or_kernel: Jacobian | Tensor,
    outputs: Tensor,
    targets: Tensor,
    *,
    loss: Loss,
    learning_rate: float | Literal["auto"],
    steps: Sequence[float],
    kernel: Kernel = "mean",
    residuals: Literal["integral", "sum"] = "integral",
    tolerance: float = 1e-4,
    memory_budget: int | None = None,
) -> Evolution:
    """Evolve the outputs of a linearised network under gradient flow.

    MSE with the mean kernel is solved in closed form in the kernel's eigenbasis, in float64. In all
    other cases the differential equation is stiff, and :mod:`.solver` integrates it. Results have
    the dtype of `outputs`.

    `jacobian_or_kernel` is the Jacobian of the n examples, or the mean kernel H (n, n) of eq. (6),
    `outputs` (n, C) f(0), the outputs at the current weights, `targets` (n, C) one-hot rows Y. The
    options are those of :class:`GradientFlow`.

    Raises
    ------
    FloatingPointError
        If no step, however small, meets the tolerance, or 20,000 kernel products do not suffice
        (for one interval with ``"corrected"``).

    Examples
    --------
    One example, one output, H = 2: f(t) = 1 - exp(-2 t) for a learning rate of 1.

    >>> one = torch.ones(1, 1)
    >>> evolve(2 * one, 0 * one, one, loss="mse", learning_rate=1.0, steps=[0, 1]).outputs.flatten()
    tensor([0.0000, 0.8647])
    """
    flow = GradientFlow(
        loss=loss,
        learning_rate=learning_rate,
        steps=steps,
        kernel=kernel,
        residuals=residuals,
        tolerance=tolerance,
        memory_budget=memory_budget,
    )
    return flow(jacobian_or_kernel, outputs, targets)


def largest_eigenvalue(product: Callable[[Tensor], Tensor], example: Tensor) -> tuple[float, int]:
    """Largest eigenvalue of a positive semi-definite operator, by power iteration from below.

    `product` is the operator's product with a tensor like `example` (shape, dtype, device). The
    iteration stops once the estimate grows by less than 1e-4 in a product, or after 100; their
    number is returned too.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(example.shape, generator=generator, dtype=torch.float64).to(example)
    value, products = 0.0, 0
    while products < MOST_PRODUCTS:
        vector, products = product(vector / vector.norm()), products + 1
        before, value = value, float(vector.norm())
        if not torch.isfinite(vector).all():
            raise ValueError("the kernel is not finite; look for NaN in the inputs")
        if value <= before * (1 + 1e-4):
            break
    return value, products


def _matrix_product(matrix: Tensor, columns: Tensor) -> Tensor:
    """Multiply transposed, which BLAS does faster for few columns."""
    return (columns.to(matrix.dtype).T @ matrix.T).T.to(columns.dtype)


def _eigen_bytes(n: int) -> int:
    """Bytes of the matrix in float64, its eigenvectors, and work space."""
    return 4 * 8 * n**2


def _check_shapes(operator: Jacobian | Tensor, outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape != targets.shape:
        raise ValueError(
            "outputs and targets: expected one shape (n, C), "
            f"got {tuple(outputs.shape)} and {tuple(targets.shape)}"
        )
    n = len(outputs)
    sides = operator.shape if isinstance(operator, Tensor) else (operator.num_examples,) * 2
    if tuple(sides) != (n, n):
        raise ValueError(f"expected a kernel of {n} x {n} examples, got {tuple(sides)}")


def _closed_form(kernel: Tensor, targets: Tensor, scale: float, residuals: str) -> _Follow:
    """MSE in the kernel's eigenbasis: each eigenvalue's part of Y - f decays as exp(-rate t)."""
    if not torch.isfinite(kernel).all():
        raise ValueError(NOT_FINITE)
    require_memory(
        _eigen_bytes(len(kernel)),
        f"the eigendecomposition of the kernel of {len(kernel)} examples",
        device=kernel.device,
        cure="sample fewer clients a round or fewer examples on each",
    )
    eigenvalues, basis = torch.linalg.eigh(kernel.double())
    rates = scale * eigenvalues.clamp(min=0)
    # integral of exp(-rate u), or its geometric series over whole u
    shares = rates if residuals == "integral" else -torch.expm1(-rates)
    still = shares == 0

    def follow(outputs: Tensor, times: Sequence[float], _: float) -> list[State]:
        if not torch.isfinite(outputs).all():
            raise ValueError(NOT_FINITE)
        start = basis.T @ (targets.double() - outputs)
        states = []
        for time in times:
            decay = -torch.expm1(-rates * time)  # 1 - exp(-rate t)
            total = torch.where(still, time, decay / shares.masked_fill(still, 1.0))
            f = outputs + basis @ (decay[:, None] * start)
            states.append((f, scale * (basis @ (total[:, None] * start))))
        return states

    return follow


@dataclass(eq=False)
class _Solver:
    """Any loss and kernel, by the stabilised solver, and what its calls have taken."""

    flow: GradientFlow
    targets: Tensor  # float64
    scale: float
    dtype: torch.dtype
    on_step: OnStep | None
    products: int = 0
    steps: int = 0
    error_estimate: float = 0.0
    corrections: int = 0  # products of the full kernel between intervals

    def follow(
        self,
        apply: Callable[[Tensor], Tensor],
        outputs: Tensor,
        times: Sequence[float],
        passed: float,
    ) -> list[State]:
        loss, scale = self.flow.loss, self.scale
        solver = RungeKuttaChebyshev(
            apply,
            lambda f: scale * residual(f, self.targets, loss),
            lambda f, v: scale * output_hessian(f, v, loss),
            outputs.to(self.dtype),
            self.flow.tolerance,
            lambda step: self._report(step, passed),
        )
        states = list(solver.solve(times, whole_steps=self.flow.residuals == "sum"))
        self.products += solver.products
        self.steps += solver.steps
        self.error_estimate += solver.error_estimate
        return states

    def _report(self, step: SolverStep, passed: float) -> None:
        """Report the progress of the whole evolution; this may be one interval of it."""
        if self.on_step is not None:
            intervals = len(self.flow.steps) if self.flow.kernel == "corrected" else 1
            products, expected = self.products + step.products, step.expected * intervals
            self.on_step(SolverStep(passed + step.time, self.flow.steps[-1], products, expected))
