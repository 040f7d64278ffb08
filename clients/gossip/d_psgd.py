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

    SGD begins at the client's own weights x_i: what it moves is added to the average. Buffers, such
    as BatchNorm's statistics, are averaged after the training, the client's own new ones with the
    neighbours'. A client that lost its weights takes over its neighbours' average. With batches of
    all examples and one epoch it is the paper's algorithm 1.
    """

    strategy = "DPSGD"

    def step_step(self, message: Message) -> Answer:
        """Average the x_j, add what training moved x_i by, and send the new weights."""
        weights, lost = message.memory.current()
        others = self.read_weights(message, weights)
        trained, metrics = self.train_from(weights, message)
        average = self.mix(weights, others, message, with_own=not lost)
        message.memory.keep_before(average)
        if lost and others:
            new = average
        else:
            new = _add_step(weights, trained, average)
            statistics = self.mix(trained, others, message)
            new |= {name: statistics[name] for name, _ in self.model.named_buffers() if name in new}
            new = unify(self.model, new)
        message.memory.keep(new)
        metrics |= {RESTARTED: int(lost), HEARD: len(others)}
        return {ALL: self.parcel(new)}, metrics


def _add_step(start: ArrayDict, trained: ArrayDict, average: ArrayDict) -> ArrayDict:
    moved: ArrayDict = {}
    for name, centre in average.items():
        step = np.asarray(trained[name], np.float64) - np.asarray(start[name], np.float64)
        moved[name] = np.asarray(centre + step).astype(centre.dtype)
    return moved
