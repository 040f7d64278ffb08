"""What one message asks of clients that add up features."""

from typing import Any, Literal, Self

from ..options import Declared, shared
from .compression import UNQUANTISED
from .feature_statistics import SumStep


class SumOptions(Declared):
    """Options of sums over features that server and clients share."""

    bits: int = shared(
        "bits of the fixed-point numbers that are summed, 2 ... 8: the sums are then exact, the "
        "same to the bit for every split and order of the examples; 32: none",
        default=UNQUANTISED,
        at_least=2,
    )
    validation_share: float = shared(
        "share of a client's examples that it holds out, by class, to choose the ridge by; doubles "
        "the bytes up",
        default=0.0,
        at_least=0,
        at_most=0.5,
    )


class SumTask(SumOptions):
    """What a client reads from a message: options, and which exchange it is."""

    step: Literal["statistics", SumStep] = shared(
        "the sums from which least squares are solved (statistics), or an exchange of a secure sum",
        default="statistics",
    )
    ridge: float = shared("ridge of the joint problem, beside the total", default=0.0)
    run_key: str = shared("name of the training run, for what a client keeps", default="")

    @classmethod
    def of_message(cls, config: Any) -> Self | None:
        """Read a message's configuration; None if it asks for no such sums."""
        return cls.from_config(config) if "option-step" in config else None
