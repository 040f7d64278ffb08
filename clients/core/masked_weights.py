"""A mod for Flower's ClientApp: weights go to the server under masks, which sees only their mean.

The server half is :mod:`fedntk.strategies.core.secure_average`. Source: Bonawitz et al., CCS 2017,
see :mod:`fedntk.trust.secure_sum`; the numbers are those of
:mod:`fedntk.ntk.payloads.masked_average`.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict

from fedntk.ntk.noise import ANSWERED
from fedntk.ntk.payloads.masked_average import AverageTask, average_digest, average_words
from fedntk.ntk.payloads.npy import from_npy

from .adapter import Function, make_reply, received
from .base import PROMISED
from .masking import Arrays, Masking
from .privacy_ledger import Release

OPEN = ANSWERED - {MessageType.TRAIN}  # messages that tell of no training
COUNT, LOSS = "num-examples", "train-loss"  # metrics of a reply


class MaskedWeights(Masking):
    """Mask the weights with which a ClientApp replies, for strategies with `secure_aggregation`.

    It goes with any client or function whose reply is one set of weights::

        app = client_app(client_fn, mods=[MaskedWeights(privacy=PrivacyLimits(ledger="x.ledger"))])

    The client trains as ever. What leaves it are masked words; of its metrics only ``num-examples``
    and ``train-loss`` are among them, and the others are dropped. Weights that are not finite are
    an error. With `only_masked`, the default here, it refuses to train for a strategy without
    masks, and to answer any message but the protocol's, and evaluations on examples for that: a
    client of fedntk's refuses to evaluate on its training examples.
    """

    cache_name = "weights"

    only_masked: bool = Masking.options()["only_masked"].field(default=True)

    def __call__(self, message: Message, context: Context, call_next: Function) -> Message:
        """Answer an exchange of a secure sum; other messages go on to the app."""
        kind, config = message.metadata.message_type, dict[str, Any]()
        for record in message.content.config_records.values():
            config.update(record)
        training = kind == MessageType.TRAIN
        task = AverageTask.of_message(config, "masked_step") if training else None
        if task is None:
            self.require_masked(kind, OPEN)
            promised = PROMISED.set(self.is_private)  # no evaluation on training examples
            try:
                return call_next(message, context)
            finally:
                PROMISED.reset(promised)
        parameters, config = received(message, context)
        sent: dict[str, Arrays] = dict(parameters.records)
        if task.masked_step != "masked":
            found = self.answer_sum(task.masked_step, task, sent, config)
        else:
            protocol = sent.pop("secure-sum")
            reply = call_next(_without_masks(message), context)
            own = reply.content.array_records if reply.has_content() else {}
            if not any(own.values()):  # an error, or a client that lost its state
                return reply
            found = self._mask(reply, task, sent, protocol, config)
        return make_reply(message, context, {COUNT: 1}, {"arrays": found})

    def _mask(
        self,
        reply: Message,
        task: AverageTask,
        sent: Mapping[str, Arrays],
        protocol: Arrays,
        config: Mapping[str, Any],
    ) -> Arrays:
        """Return the masked words of a reply; `sent` are the records that came with the model."""
        (record,) = reply.content.array_records.values()
        (metrics,) = reply.content.metric_records.values()
        own = {name: from_npy(array.data) for name, array in record.items()}
        model = next((arrays for arrays in sent.values() if arrays.keys() == own.keys()), None)
        if model is None:
            raise ValueError(
                f"weights: expected arrays with the names that came, got {sorted(own)[:5]}"
            )
        told: dict[str, Any] = dict(metrics)
        loss = told.get(LOSS)
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            loss = None
        words = average_words(model, own, told[COUNT], loss)
        about = average_digest(model, task.run_key, int(config["server-round"]))
        return self.mask_words(words, about, protocol, task, config)

    def release_of(self, task: AverageTask, config: Mapping[str, Any]) -> Release:
        """Return a round of a run: the weights of each round are another function of the data."""
        return Release(task.run_key[:64], server_round=int(config["server-round"]))


def _without_masks(message: Message) -> Message:
    """Return a message as the app knows it; the one that came, which others may hold, stays."""
    bare = copy.copy(message)
    kept = {name: message.content[name] for name in message.content if name != "secure-sum"}
    bare.content = RecordDict(kept)
    return bare
