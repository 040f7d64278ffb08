"""Strategies that only average weights, so that clients can mask theirs.

Source: McMahan et al., AISTATS 2017, algorithm 1, under the masks of Bonawitz et al., CCS 2017. See
:mod:`fedntk.ntk.payloads.masked_average` for the numbers, and
:mod:`fedntk.clients.core.masked_weights` for the client half.
"""

import secrets
from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedntk.ntk.options import state
from fedntk.ntk.payloads.masked_average import BESIDE, AverageTask, average_digest, average_of
from fedntk.ntk.support.arrays import Arrays

from .lost_state import ResendingStrategy
from .replies import Reply
from .secure_sums import SecureSums, WordFormat

Average = tuple[Arrays | None, list[Reply], MetricRecord]  # mean, if any; who is in it; metrics


class AveragingStrategy(ResendingStrategy):
    """A strategy whose model is the mean of the clients' weights, by their examples.

    With `secure_aggregation` clients need the mod :class:`~fedntk.clients.MaskedWeights`. The
    server learns the mean and the sum of examples; as metrics, the mean ``train-loss``, and how
    many numbers were out of range and ``clipped``. It cannot screen weights by `outlier_factor`.
    """

    masks = True

    run_key: str = state(lambda: secrets.token_hex(8))  # names the run for the clients' folders

    def __post_init__(self) -> None:
        super().__post_init__()
        self._secure = SecureSums(self) if self.secure_aggregation else None

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add the current exchange of a secure sum; only one of them needs the model."""
        if self._secure is None or stage != MessageType.TRAIN:
            return super().content_for(client, stage, arrays, config)
        task = AverageTask(masked_step=self._secure.step, run_key=self.run_key)
        sent = arrays if task.masked_step == "masked" else ArrayRecord()
        own = ConfigRecord({**config, **task.to_config()})
        content = super().content_for(client, stage, sent, own)
        self._secure.add_to(content, client)
        return content

    def average(self, replies: Iterable[Message], model: Arrays) -> Average:
        """Return the mean of the weights of a model that came, or of the masked ones to come."""
        if self._secure is None:
            pairs, metrics = self.accept_weights(replies, model)
            added = [reply for reply, _ in pairs]
            if not self.enough(len(pairs)):
                return None, added, metrics
            return self.robust_mean_of(model, pairs), added, metrics

        def format_for(clients: int) -> WordFormat:  # a reply to a secure sum counts as one example
            about = average_digest(model, self.run_key, self.server_round)
            size = sum(array.size for array in model.values())
            return WordFormat(size + BESIDE, np.dtype(np.uint64), about)

        found = self.answers(replies, self._secure.public_part, MessageType.TRAIN)
        total, added = self._secure.complete(
            found, format_for, lambda words, clients: average_of(words, model, clients)
        )
        mean, own = (None, {}) if total is None else total
        return mean, added, MetricRecord({**self.round_metrics(added, found.rejected), **own})
