"""Client of DFedAvg and DFedAvgM: local epochs of SGD, then an average with its neighbours.

Source: Sun, Li and Wang, *Decentralized Federated Averaging*, IEEE Transactions on Pattern Analysis
and Machine Intelligence 45, 2023 (arXiv 2104.11375).
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from ..core.weights import Scalar
from ..personal.personal_store import PersonalStore
from .gossip import GossipClient
from .relay import ALL, Answer, Arrays, Message

__all__ = ["DFedAvgClient"]

WITHIN = "-within-round"  # what is kept from one exchange to the next, beside the weights
LOSS, LOST = "train-loss", "restarted"  # names beside the weights there
AVERAGED = "holds-an-average"  # the same: whether the weights have a neighbour's part


class DFedAvgClient(GossipClient):
    """Answers the steps of DFedAvg: ``train`` and ``average``.

    A client that lost its weights trains from the first ones again. It sends nothing in that round,
    and takes over the average of its neighbours.

    Parameters
    ----------
    **options
        Of :class:`GossipClient`: model, x, y, x_test, y_test, local_epochs, batch_size,
        learning_rate, momentum (above 0 it is DFedAvgM), weight_decay, loss, device, cache, seed.
    """

    strategy = "DFedAvg"
    config_keys: ClassVar[frozenset[str]] = GossipClient.config_keys | {"gossip-steps"}

    def steps(self, message: Message) -> Mapping[str, Callable[[Message], Answer]]:
        """Return what the client does in each step."""
        del message
        return {"train": self._train_and_send, "average": self._average}

    def _train_and_send(self, message: Message) -> Answer:
        """Train from x_i, and send z_i to the neighbours."""
        own, lost = self.current(message.config)
        trained, metrics = self.trained_from(own, message.config)
        told = {LOST: np.array(lost), AVERAGED: np.array(False)}
        told |= {k: np.array(v) for k, v in metrics.items()}
        self._within(message).save(self._round(message), {**trained, **told})
        self.keep_before(trained, message.config)
        sent = {} if lost and message.neighbours else {ALL: self.parcel(trained)}
        return sent, len(self._training), {**metrics, LOST: int(lost)}

    def _average(self, message: Message) -> Answer:
        """Average what was trained, or averaged in the step before, with the neighbours'."""
        kept = self._kept(message)
        own = {name: kept[name] for name in self.model.state_dict()}
        told = {name: kept[name] for name in (LOST, LOSS) if name in kept}
        lost, averaged = bool(kept[LOST]), bool(kept[AVERAGED])
        others = self.weights_heard(message, own)
        average = self.mixed(own, others, message, alone=averaged or not lost)
        metrics: dict[str, Scalar] = {LOST: int(lost), "neighbours-heard": len(others)}
        metrics |= {LOSS: float(kept[LOSS])} if LOSS in kept else {}
        if message.batch == int(message.config.get("gossip-steps", 1)) - 1:
            self.keep(average, message.config)
            return {}, len(self._training), metrics
        told |= {AVERAGED: np.array(averaged or bool(others))}
        self._within(message).save(self._round(message), {**average, **told})
        return {ALL: self.parcel(average)}, len(self._training), metrics

    # ------------------------------------------------------- within the round

    def _within(self, message: Message) -> PersonalStore:
        return self.store(message.config, WITHIN)

    def _round(self, message: Message) -> int:
        return int(message.config.get("server-round", 0))

    def _kept(self, message: Message) -> Arrays:
        kept = self._within(message).load(self._round(message))
        if kept is None:
            raise ValueError(
                f"{self._within(message).folder}: what was trained in this round is lost; the "
                "client goes on with the next round"
            )
        return kept
