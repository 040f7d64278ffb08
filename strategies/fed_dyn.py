"""FedDyn: FedAvg whose clients' losses are corrected so that their minima meet at the pooled one.

Source: Acar et al., *Federated Learning Based on Dynamic Regularization*, ICLR 2021, algorithm 1,
for the clients P of a round out of m; g_k and h are zero before the first:

    w_k <- minimum of L_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2
    g_k <- g_k - alpha (w_k - w)                     for the clients in P
    h <- h - (alpha / m) sum over P of (w_k - w)
    w <- mean over P of w_k - h / alpha

Here g_k / alpha and h / alpha are stored, so that alpha only scales what clients are pulled by:
the first line's terms are (alpha / 2) ||v - (w + g_k / alpha)||^2 and a constant.
"""

from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk.averages import are_finite
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.parts import trained_arrays
from fedntk.ntk.payloads import wire
from fedntk.ntk.robust_averages import DEFENCES

from .core.averaging import cast_like
from .core.centre import CentreInputs
from .core.channel import Rounds
from .core.round import Round
from .core.strategy import Strategy
from .core.uploads import Update
from .core.weight_average import WeightAverage

logger = getLogger("flwr")


class FedDyn(Strategy):
    """FedDyn (Acar et al. 2021). Clients are :class:`~fedntk.clients.FedDynClient`.

    Clients count alike, as in the paper, whatever their numbers of examples. They keep nothing: the
    server computes g_k from their replies, and sends ``w + g_k / alpha`` as a record
    ``proximal-centre`` to those that have one. Arrays that are not trained are averaged.

    Attributes
    ----------
    duals : dict of int to ndarray, shape (P_t,)
        Client -> g_k / alpha of the trained arrays, one after the other by their names, float64.
    shift : dict of str to ndarray
        h / alpha of each trained array, float64.
    """

    client = "FedDynClient"
    takes_real_targets = True
    rules = (*DEFENCES, "validation")

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    pull: float = option(
        "alpha: how strongly clients are pulled to the corrected weights; 0: neither pull nor "
        "correction, which is FedAvg with clients that count alike",
        default=0.1,
        at_least=0,
    )
    average: WeightAverage | None = part("average of the weights over rounds", default=None)
    centre: CentreInputs | None = part("take the mean over all clients off inputs", default=None)
    duals: dict[int, NDArray[Any]] = state(dict)
    shift: dict[str, NDArray[Any]] = state(dict)

    def train_round(self, r: Round) -> Rounds[Update]:
        """Average the clients' weights, and shift the mean by h."""
        names = sorted(trained_arrays(self.network) & r.model.keys())
        start = {n: r.model[n].astype(np.float64) for n in names}
        ends = np.cumsum([start[n].size for n in names])[:-1]

        def records(client: int) -> dict[str, Any]:
            if client not in self.duals:
                return {}
            pieces = zip(names, np.split(self.duals[client], ends), strict=True)
            centre = {n: start[n] + dual.reshape(start[n].shape) for n, dual in pieces}
            return {wire.PROXIMAL_CENTRE: cast_like(centre, {n: r.model[n] for n in names})}

        told = {wire.PROXIMAL_MU: self.pull}
        uploads = yield from r.ask(r.weights, config=told, records=records)
        uploads = self.screening.drop_outliers(uploads, r.model)
        if not self.enough(uploads):
            return Update(uploads)
        new = self.screening.mean(uploads, r.model, [1] * len(uploads))
        shift = {}
        if self.pull:
            everyone = r.registry.clients(without=r.held_out, departed=True) | self.duals.keys()
            share = len(uploads) / len(everyone)
            shift = {n: self.shift.get(n, 0.0) - share * (new[n] - start[n]) for n in start}
            new |= {n: new[n] - shift[n] for n in start if shift[n].any()}
        if not are_finite({n: new[n] for n in start}, r.model):
            logger.warning("the new weights are not finite: the model stays as it was")
            return Update(uploads)
        self.shift = shift
        for upload in uploads if self.pull else ():
            change = np.concatenate([(upload.value[n] - start[n]).ravel() for n in names])
            self.duals[upload.client] = self.duals.get(upload.client, 0.0) - change
        return Update(uploads, cast_like(new, r.model))
