"""How a client of a decentralised method evolves its weights; all of it comes from the strategy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

from ..evolution.flow_options import Kernel, KernelDtype
from ..evolution.gradient_flow import GradientFlow
from ..losses import Loss
from .compression import UNQUANTISED, check_compression

__all__ = ["EvolutionTask", "LocalSelection"]

PREFIX = "evolution-"
LocalSelection = Literal["last", "true-loss", "own"]


@dataclass(frozen=True)
class EvolutionTask:
    """What a client does with the Jacobians that it got; travels in a message's configuration.

    Attributes
    ----------
    loss : {"cross-entropy", "mse"}
        Loss that evolves.
    learning_rate : float
        eta of the round.
    steps : tuple of float
        The grid of t.
    kernel : {"mean", "corrected", "full"}
        One kernel for all outputs, the same put right at each of the steps, or all outputs coupled.
    selection : {"last", "true-loss", "own"}
        Which t: the last; that of the lowest loss of the network itself over all examples of the
        neighbourhood, for which their inputs travel with the Jacobians; or over the client's own.
    batches : int
        m_1: into how many parts clients divide their examples.
    average : bool
        Whether weights are averaged with the neighbours' first.
    class_prior : bool
        Whether the classes' shares in the neighbourhood are an offset of the outputs while they
        evolve: see :func:`~fedntk.ntk.class_prior.log_class_prior`. For cross-entropy.
    sparsity : float
        Share of the numbers of each tensor of a Jacobian that is dropped before it is sent.
    bits : int
        Of each number that stays, 1 ... 16; 32 leaves them as they are.
    residuals : {"integral", "sum"}
        R(t) over time: see :class:`~fedntk.ntk.evolution.GradientFlow`.
    kernel_dtype : {"outputs", "bfloat16"}
        In which the kernel is multiplied: see the same.
    tolerance : float
        Of the solver: see :class:`~fedntk.ntk.evolution.GradientFlow`.
    """

    loss: Loss = "cross-entropy"
    learning_rate: float = 0.01
    steps: tuple[float, ...] = tuple(range(100, 801, 100))
    kernel: Kernel = "mean"
    selection: LocalSelection = "last"
    batches: int = 1
    average: bool = True
    class_prior: bool = False
    sparsity: float = 0.0
    bits: int = UNQUANTISED
    residuals: Literal["integral", "sum"] = "integral"
    kernel_dtype: KernelDtype = "outputs"
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.selection not in get_args(LocalSelection):
            known = ", ".join(get_args(LocalSelection))
            raise ValueError(f"selection: expected one of {known}, got {self.selection!r}")
        if self.batches < 1:
            raise ValueError(f"batches: expected at least 1, got {self.batches}")
        if self.class_prior and self.loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {self.loss}")
        check_compression(self.sparsity, self.bits)
        object.__setattr__(self, "steps", tuple(self.flow.steps))

    @property
    def flow(self) -> GradientFlow:
        """What evolves outputs so; with the last t alone where the others serve nothing."""
        whole = GradientFlow(
            loss=self.loss,
            learning_rate=self.learning_rate,
            steps=self.steps,
            kernel=self.kernel,
            residuals=self.residuals,
            kernel_dtype=self.kernel_dtype,
            tolerance=self.tolerance,
        )
        others = self.selection != "last" or self.kernel == "corrected"
        return whole if others else replace(whole, steps=whole.steps[-1:])

    def to_config(self) -> dict[str, Any]:
        """Return keys that begin with ``evolution-`` and their values."""
        own = {**asdict(self), "steps": [float(t) for t in self.steps]}
        return {PREFIX + name.replace("_", "-"): value for name, value in own.items()}

    @staticmethod
    def owns(key: str) -> bool:
        """Whether a key of a configuration is one of these."""
        return key.startswith(PREFIX)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_config` returned among other keys."""
        own = {
            k.removeprefix(PREFIX).replace("-", "_"): v for k, v in config.items() if cls.owns(k)
        }
        try:
            return cls(**{**own, "steps": tuple(own["steps"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"expected the settings of an evolution, got {sorted(own)}") from error
