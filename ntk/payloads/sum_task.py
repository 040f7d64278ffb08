"""What one message asks of clients that add up features."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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


class NoiseOptions(Declared):
    """Options of noise in the sums: see :mod:`fedntk.ntk.convex.private_sums`."""

    epsilon: float = shared(
        "epsilon of differential privacy, of sums that are released once, with noise; 0: exact "
        "sums. A trusted server adds Gaussian noise; under secure aggregation each client adds a "
        "share of Skellam noise to its own sums, and secure.threshold gives the fewest shares",
        default=0.0,
        at_least=0,
    )
    delta: float = shared("delta of differential privacy", default=1e-5, above=0, below=1)
    radius: int = shared(
        "norm to which each example's features are scaled, as whole numbers, if there is noise",
        default=127,
        at_least=1,
        at_most=10**4,
    )
    client_examples: int = shared(
        "0: epsilon is of one example, added or removed. Else it is of a client, with at most so "
        "many examples: one that has more draws them",
        default=0,
        at_least=0,
    )
    colluding: int = shared(
        "clients who may pool what they know of their own shares of noise: epsilon counts only the "
        "others' shares. 0: only the server looks at the sums",
        default=1,
        at_least=0,
    )


def weights_of_classes() -> Any:
    """Declare weights of the classes' examples, which server and clients share."""
    return shared(
        "weights w_c of each class's examples in the sums, in the order of the classes: a row "
        "counts w_c times; none: 1. Only their ratios count; whole numbers if sums are",
        default=(),
        above=0,
    )


class SumTask(SumOptions, NoiseOptions):
    """What a client reads from a message: options, and which exchange it is."""

    step: Literal["statistics", SumStep] = shared(
        "the sums from which least squares are solved (statistics), or an exchange of a secure sum",
        default="statistics",
    )
    ridge: float = shared("ridge of the joint problem, beside the total", default=0.0)
    changes: bool = shared(
        "whether it asks how the sums changed since a round counted them: see row_change.py",
        default=False,
    )
    run_key: str = shared("name of the training run, for what a client keeps", default="")
    class_weights: tuple[float, ...] = weights_of_classes()

    @property
    def example_weights(self) -> NDArray[np.float64] | None:
        """The weights (C,); None: 1."""
        return np.array(self.class_weights) if self.class_weights else None

    def check(self) -> None:
        """Refuse weights with noise, whose epsilon is of rows that count once."""
        if self.epsilon and self.class_weights:
            raise ValueError("class_weights: noise is for rows that count once; expected none")
