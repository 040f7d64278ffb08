"""The moving average of a model over rounds: evaluated and returned, and sent to none to train.

If rounds differ much, as with few clients of few classes each, the newest weights jump around
their mean. (Polyak and Juditsky, *Acceleration of Stochastic Approximation by
Averaging*, SIAM Journal on Control and Optimization 30, 1992; as an exponential mean of a server's
weights: Charles and Konečný, *Convergence and Accuracy Trade-Offs in Federated Learning and
Meta-Learning*, AISTATS 2021.)
"""

from flwr.app import ArrayRecord

from fedntk.ntk.averages import moving_mean
from fedntk.ntk.options import Declared, option, state

from .averaging import cast_like, named_arrays


class WeightAverage(Declared):
    """Exponential moving average (EMA) of the weights that a strategy learned.

    After n changes to the weights w_1 ... w_n: the sum of decay^(n-k) w_k over the sum of these
    factors. Whole numbers, as of BatchNorm's batches, are the newest.

    Attributes
    ----------
    newest, mean : ArrayRecord
        w_n, which the next round begins with, and the average; empty before the first change.
    count : int
        n.
    """

    decay: float = option(
        "decay of the average over the rounds that changed the weights",
        default=0.7,
        above=0,
        below=1,
        kw_only=False,
    )
    newest: ArrayRecord = state(ArrayRecord)
    mean: ArrayRecord = state(ArrayRecord)
    count: int = state(int)

    def add(self, arrays: ArrayRecord) -> None:
        """Take new weights into the mean."""
        new, old = named_arrays(arrays), named_arrays(self.mean)
        # of the newest among all: (1 - d) / (1 - d^n)
        share = (1 - self.decay) / (1 - self.decay ** (self.count + 1))
        mean = moving_mean(old if self.count else None, new, share)
        self.newest, self.mean, self.count = arrays, cast_like(mean, new), self.count + 1
