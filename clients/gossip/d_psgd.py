"""Client of D-PSGD: averages with its neighbours, and steps along its own gradient.

Source: Lian et al., *Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study
for Decentralized Parallel Stochastic Gradient Descent*, NeurIPS 2017, algorithm 1.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ..core.weights import Scalar
from .gossip import GossipClient
from .relay import ALL, Answer, Arrays, Message

__all__ = ["DPSGDClient"]


class DPSGDClient(GossipClient):
    """Answers the steps of D-PSGD: ``weights`` and ``step``.

    The steps of SGD begin at the client's own weights x_i, not at the average: what they move is
    added to the average. Buffers, such as BatchNorm's statistics, are averaged after the training,
    the client's own new ones with the neighbours'. A client that lost its weights takes over the
    average of its neighbours.

    Parameters
    ----------
    **options
        Of :class:`GossipClient`: model, x, y, x_test, y_test, local_epochs (1 in the comparison of
        Thompson et al. 2025), batch_size, learning_rate, momentum, weight_decay, loss, device,
        cache, seed. With batches of all examples and one epoch it is the paper's algorithm 1.
    """

    strategy = "DPSGD"

    def steps(self, message: Message) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step."""
        del message
        return {"weights": self._send_weights, "step": self._step}

    def _send_weights(self, message: Message) -> Answer:
        """Send x_i; one that lost it has nothing to say."""
        own, lost = self.current(message.config)
        sent = {} if lost and message.neighbours else {ALL: self.parcel(own)}
        return sent, len(self._training), {"restarted": int(lost)}

    def _step(self, message: Message) -> Answer:
        """Average the x_j, add what training moved x_i by, and send the new weights."""
        own, lost = self.current(message.config)
        others = self.weights_heard(message, own)
        trained, metrics = self.trained_from(own, message.config)
        average = self.mixed(own, others, message, alone=not lost)
        self.keep_before(average, message.config)
        if lost and others:
            new = average
        else:
            new = _moved(own, trained, average)
            statistics = self.mixed(trained, others, message)
            new |= {name: statistics[name] for name, _ in self.model.named_buffers() if name in new}
        self.keep(new, message.config)
        told: dict[str, Scalar] = {"restarted": int(lost), "neighbours-heard": len(others)}
        return {ALL: self.parcel(new)}, len(self._training), {**metrics, **told}


def _moved(own: Arrays, trained: Arrays, average: Arrays) -> Arrays:
    """Return average + (trained - own), in float64 and cast back."""
    moved: Arrays = {}
    for name, centre in average.items():
        before, after = (np.asarray(w[name], np.float64) for w in (own, trained))
        moved[name] = np.asarray(centre + (after - before)).astype(centre.dtype)
    return moved
