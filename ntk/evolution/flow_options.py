"""The options of an evolution, which strategies and clients share."""

import itertools
from collections.abc import Sequence
from typing import Literal

from ..losses import Loss
from ..options import Declared, shared

Kernel = Literal["mean", "corrected", "full"]
AUTO = "auto"
AUTO_STEPS = (10, 30, 100, 300, 1000, 3000, 10_000)  # in times of the kernel's fastest part


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
