"""FedNova: FedAvg whose clients count alike per local step, however many steps they take.

Source: Wang et al., *Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization*, NeurIPS 2020, eq. (8) and algorithm 1, with p_i = n_i / n and d_i the normalised
gradient of client i, whose change of the weights is w_i - w = -eta ||a_i||_1 d_i:

    w <- w - tau_eff sum over the sampled clients i of p_i eta d_i
    tau_eff = sum of p_i ||a_i||_1

That is FedAvg's mean of the models w + (tau_eff / ||a_i||_1) (w_i - w).
"""

import numpy as np
from torch import nn

from fedntk.ntk import BadReply
from fedntk.ntk.averages import moving_mean
from fedntk.ntk.options import argument, part
from fedntk.ntk.parts import trained_arrays
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.screening import screen_sizes
from fedntk.ntk.robust_averages import DEFENCES
from fedntk.ntk.support.arrays import ArrayDict

from .core.averaging import cast_like, named_arrays
from .core.centre import CentreInputs
from .core.channel import Rounds
from .core.replies import Reply
from .core.round import Round
from .core.strategy import Strategy
from .core.uploads import Update, Uploads
from .core.weight_average import WeightAverage

MOST_STEPS = 1e9  # that a client may claim
Both = tuple[ArrayDict, float]  # weights, and how many steps they are of


class FedNova(Strategy):
    """FedNova (Wang et al. 2020). Clients are :class:`~fedntk.clients.FedNovaClient`.

    The metric ``effective-steps`` is tau_eff. Under an aggregation rule tau_eff is the clients'
    median, as steps are claims. Arrays that are not trained, such as BatchNorm's statistics, are
    averaged as in FedAvg.
    """

    client = "FedNovaClient"
    takes_real_targets = True
    rules = (*DEFENCES, "validation")

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    average: WeightAverage | None = part("average of the weights over rounds", default=None)
    centre: CentreInputs | None = part("take the mean over all clients off inputs", default=None)

    def prepare(self) -> None:
        """Find the arrays that are trained."""
        self.trained = trained_arrays(self.network)

    def train_round(self, r: Round) -> Rounds[Update]:
        """Average the clients' weights as if all had taken tau_eff steps."""

        def parse(reply: Reply) -> Both:
            steps = reply.metrics.get(wire.EFFECTIVE_STEPS)
            if not isinstance(steps, int | float) or not 1 <= steps <= MOST_STEPS:
                got = str(steps)[:80]
                raise BadReply(
                    wire.EFFECTIVE_STEPS,
                    f"expected a number of 1 ... {MOST_STEPS:g}, got {got}: is it a {self.client}?",
                )
            return r.weights(reply), float(steps)

        both = yield from r.ask(parse)
        both = self.screening.drop(both, lambda v, factor: screen_sizes([s for _, s in v], factor))
        if not self.enough(both):
            return Update(both)
        _, models = self._normalised(r.model, both)
        uploads = self.screening.drop_outliers(both.with_values(models), r.model)
        if not self.enough(uploads):
            return Update(uploads)
        effective, models = self._normalised(r.model, both.keep(uploads.nodes))
        new = cast_like(self.screening.mean(uploads.with_values(models), r.model), r.model)
        return Update(uploads, new, {wire.EFFECTIVE_STEPS: effective})

    def _normalised(self, before: ArrayDict, both: Uploads[Both]) -> tuple[float, list[ArrayDict]]:
        """Return tau_eff, and the clients' weights as if all had taken as many steps."""
        steps = [s for _, s in both.values]
        effective = float(np.average(steps, weights=both.counts))
        if self.screening.is_robust or len(set(steps)) == 1:
            effective = float(np.median(steps))
        return effective, [self._scaled(before, w, effective / s) for w, s in both.values]

    def _scaled(self, before: ArrayDict, after: ArrayDict, share: float) -> ArrayDict:
        if share == 1:
            return after
        trained = {name: after[name] for name in after if name in self.trained}
        moved = moving_mean(before, trained, share)
        return {**after, **named_arrays(cast_like(moved, trained))}
