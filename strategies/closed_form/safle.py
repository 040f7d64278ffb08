"""SAFLe: AFL on sums of table rows, which bits of the last layer's inputs choose.

Source: Bacellar et al., *Single-Round Scalable Analytic Federated Learning*, CVPR 2026, arXiv
2512.03336; read were its abstract and others' reports of its equations. In place of the frozen
network's features x (d,) the last layer has Phi(x) in {0, 1}^p of
:class:`~fedntk.ntk.features.layers.OverlapCodes`, and the server solves as in AFL for

    W = (sum_k Phi_k^T Phi_k)^+ sum_k Phi_k^T Y_k.

This package's own is where the limits of bits lie: at the normal quantiles l / (L + 1) of each
feature's mean and deviation over all clients, which are asked for these first. Sums of whole
numbers are exact, so for given limits W is the same to the bit for every split.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MessageType

from fedntk.ntk import BadReply, Moments
from fedntk.ntk.features.layers import OverlapCodes
from fedntk.ntk.options import option
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics

from ..core.channel import Rounds
from ..core.replies import MOST_NUMBERS, Reply, result_of, screen_own_sizes
from ..core.round import Round
from ..core.uploads import Update
from .afl import AFL
from .closed_form import Layer


class SAFLe(AFL):
    """SAFLe (Bacellar et al. 2026); clients are :class:`~fedntk.clients.SAFLeClient`.

    The network is of :func:`~fedntk.ntk.with_overlap_codes`. One without codes, as for L = 0, gives
    AFL. The ridge of 0 is the paper's.
    """

    client = "SAFLeClient"

    fit: bool = option(
        "ask for means and deviations of features first, for the limits of bits; else limits are "
        "the network's: normal quantiles, for features of mean 0 and variance 1",
        default=True,
    )

    def prepare_method(self) -> None:
        """Find the codes, and refuse more features than a reply's metrics have room for."""
        self.codes = OverlapCodes.find(self.network)
        size = 0 if self.codes is None else len(self.codes[1].limits)
        if self.fit and 2 * size > MOST_NUMBERS:
            raise ValueError(
                f"fit: expected codes of at most {MOST_NUMBERS // 2} features, got {size}; project "
                "the features, or set the network's limits and fit = False"
            )

    def train_round(self, r: Round) -> Rounds[Update]:
        """Set the limits, ask all clients for their sums, and compute the last layer."""
        if self.solved:
            return Update(None)
        before = r.arrays
        if self.codes is not None and self.fit:
            name, codes = self.codes
            answers = yield from r.ask(
                lambda reply: _moments_in(reply, len(codes.limits)),
                stage=MessageType.QUERY,
                clients=r.everyone(),
            )
            answers = self.screening.drop(answers, screen_own_sizes)
            if not self.enough(answers):
                return Update(answers)
            before = _with_limits(before, f"{name}.limits", codes, answers.values)
        uploads = yield from self.ask_sums(r, before)
        if not self.enough(uploads):
            return Update(uploads)
        arrays = result_of(lambda: self.with_layer(before, self.solution(uploads.values)))
        self.solved = arrays is not None
        return Update(uploads, arrays)

    def solution(self, sums: Sequence[FeatureStatistics]) -> Layer:
        """Return AFL's layer; sums of codes are whole numbers."""
        joint = FeatureStatistics.join(sums)
        return self.last_layer([joint if self.codes is None else joint.rounded()])


def _moments_in(reply: Reply, width: int) -> Moments:
    """Check the moments of a client's features, two lists among its metrics."""
    arrays: dict[str, Any] = {}
    for name in Moments.NAMES:
        numbers = reply.metrics.get(name)
        if not isinstance(numbers, list):
            raise BadReply("moments", f"expected {width} numbers {name}, got {str(numbers)[:80]}")
        arrays[name] = np.array(numbers, dtype=np.float64)
    return Moments.from_arrays(arrays, reply.num_examples, width)


def _with_limits(
    arrays: ArrayRecord, name: str, codes: OverlapCodes, moments: list[Moments]
) -> ArrayRecord:
    joint = Moments.join(moments)
    std = np.sqrt(joint.sum_sq_dev / joint.count)
    limits = codes.limits_at(torch.from_numpy(joint.mean), torch.from_numpy(std))
    return ArrayRecord({**arrays, name: Array(limits.numpy())})
