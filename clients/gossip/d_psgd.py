"""Client of D-PSGD: averages with its neighbours, and steps along its own gradient.

Source: Lian et al., *Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study
for Decentralized Parallel Stochastic Gradient Descent*, NeurIPS 2017, algorithm 1.
"""

import numpy as np

from fedntk.ntk.payloads.gossip_options import ALL
from fedntk.ntk.support.arrays import ArrayDict
from fedntk.ntk.support.shared_arrays import unify

from .gossip import GossipClient
from .relay import HEARD, RESTARTED, Answer, Message


class DPSGDClient(GossipClient):
    """Answers the steps of D-PSGD: ``weights`` and ``step``.

    The steps of SGD begin at the client's own weights x_i, not at the average: what they move is
    added to the average. Buffers, such as BatchNorm's statistics, are averaged after the training,
    the client's own new ones with the neighbours'. A client that lost its weights takes over the
    average of its neighbours. With batches of all examples and one epoch it is the paper's
    algorithm 1.
    """

    strategy = "DPSGD"

    def step_step(self, message: Message) -> Answer:
        """Average the x_j, add what training moved x_i by, and send the new weights."""
        own, lost = self.current(message.config)
        others = self.read_weights(message, own)
        trained, metrics = self.train_from(own, message)
        average = self.mix(own, others, message, with_own=not lost)
        self.keep_before(average, message.config)
        if lost and others:
            new = average
        else:
            new = _add_step(own, trained, average)
            statistics = self.mix(trained, others, message)
            new |= {name: statistics[name] for name, _ in self.model.named_buffers() if name in new}
            new = unify(self.model, new)
        self.keep(new, message.config)
        metrics |= {RESTARTED: int(lost), HEARD: len(others)}
        return {ALL: self.parcel(new)}, metrics


def _add_step(own: ArrayDict, trained: ArrayDict, average: ArrayDict) -> ArrayDict:
    """Return average + (trained - own), in float64 and cast back."""
    moved: ArrayDict = {}
    for name, centre in average.items():
        before, after = (np.asarray(w[name], np.float64) for w in (own, trained))
        moved[name] = np.asarray(centre + (after - before)).astype(centre.dtype)
    return moved
