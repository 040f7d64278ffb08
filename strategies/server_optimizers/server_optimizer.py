"""FedAvg whose server takes the mean of the clients' changes as a gradient (FedOpt).

Source: Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, algorithm 1, with Delta the
clients' mean weights less the server's: w <- ServerOpt(w, -Delta, eta).
"""

from abc import abstractmethod
from dataclasses import replace
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk.averages import are_finite, put_back
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.parts import trained_arrays
from fedntk.ntk.robust_averages import DEFENCES

from ..core.averaging import cast_like, named_arrays
from ..core.centre import CentreInputs
from ..core.channel import Rounds
from ..core.round import Round
from ..core.secure import SecureAggregation
from ..core.strategy import Strategy
from ..core.uploads import Update
from ..core.weight_average import WeightAverage
from ..fedavg import average_weights

logger = getLogger("flwr")
Floats = NDArray[np.float64]


class ServerOptimizer(Strategy):
    """FedAvg with an optimizer on the server; :meth:`direction` is what a method writes.

    Clients are :class:`~fedntk.clients.SGDClient`. Arrays that are not trained, such as BatchNorm's
    statistics, are averaged. With `secure` the optimizer steps along the secure mean.

    Attributes
    ----------
    moments : dict of str to float64, shape (k, ...)
        The k moments of each trained array, by its name.
    """

    rules = (*DEFENCES, "validation")
    takes_real_targets = True

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    server_learning_rate: float = option("eta of the server", default=0.01, above=0)
    secure: SecureAggregation | None = part("clients mask their weights", default=None)
    average: WeightAverage | None = part("average of the weights over rounds", default=None)
    centre: CentreInputs | None = part("take the mean over all clients off inputs", default=None)
    moments: dict[str, NDArray[Any]] = state(dict)

    @property
    @abstractmethod
    def first_moments(self) -> tuple[float, ...]:
        """The numbers with which all coordinates' moments begin."""

    @abstractmethod
    def direction(self, change: Floats, moments: Floats) -> tuple[Floats, Floats]:
        """Return what an array steps along, and its new moments (k, ...), from Delta."""

    def prepare(self) -> None:
        """Find the arrays that are trained."""
        self.trained = trained_arrays(self.network)

    def train_round(self, r: Round) -> Rounds[Update]:
        """Step along the mean of the clients' changes."""
        update = yield from average_weights(self, r, self.secure)
        if update.arrays is None:
            return update
        new, moments = named_arrays(update.arrays), dict[str, NDArray[Any]]()
        with np.errstate(over="ignore", invalid="ignore"):  # such steps are refused below
            for name in self.trained & new.keys():
                old = r.model[name].astype(np.float64)
                first = [np.full(old.shape, value) for value in self.first_moments]
                before = self.moments.get(name, np.stack(first))
                step, moments[name] = self.direction(new[name] - old, before)
                after = old + self.server_learning_rate * step
                new[name] = put_back(after, old, step == 0).astype(r.model[name].dtype)
        if not are_finite({name: new[name] for name in moments}, r.model):
            logger.warning("the new weights are not finite: the model stays as it was")
            return replace(update, arrays=None)
        self.moments = moments
        return replace(update, arrays=cast_like(new, r.model))
