"""The moving average of a model over rounds: evaluated and returned, and sent to none to train.

If rounds differ much, as with few clients of few classes each, the newest weights jump around
their mean. (Polyak and Juditsky, *Acceleration of Stochastic Approximation by
Averaging*, SIAM Journal on Control and Optimization 30, 1992; as an exponential mean of a server's
weights: Charles and Konečný, *Convergence and Accuracy Trade-Offs in Federated Learning and
Meta-Learning*, AISTATS 2021.)
"""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord

from fedntk.ntk.averages import moving_mean

from .array_archive import under
from .averaging import cast_like, named_arrays, record_of

NEWEST, MEAN = "newest.", "mean."  # before names of arrays in the state


class AveragedModel:
    """Exponential moving average (EMA) of the weights that a strategy learned.

    After n changes to the weights w_1 ... w_n it is the sum of decay^(n-k) w_k over the sum of
    these factors, so that the first weights, which nobody learned, have no part in it. Whole
    numbers, as of BatchNorm's batches, are the newest.

    `newest` is w_n, which the next round begins with; before the first change it and the `mean` are
    empty.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.reset()

    def reset(self) -> None:
        """Forget all weights."""
        self.newest, self.mean, self.count = ArrayRecord(), ArrayRecord(), 0

    def add(self, arrays: ArrayRecord) -> None:
        """Take new weights into the mean."""
        new, old = named_arrays(arrays), named_arrays(self.mean)
        # of the newest among all: (1 - d) / (1 - d^n)
        share = (1 - self.decay) / (1 - self.decay ** (self.count + 1))
        mean = moving_mean(old if self.count else None, new, share)
        self.newest, self.mean, self.count = arrays, cast_like(mean, new), self.count + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the newest weights, their mean, and how many there were."""
        parts = ((NEWEST, self.newest), (MEAN, self.mean))
        named = {way + n: array for way, own in parts for n, array in named_arrays(own).items()}
        return {"count": self.count, **named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.newest, self.mean = (record_of(under(way, state)) for way in (NEWEST, MEAN))
        self.count = int(state["count"])
