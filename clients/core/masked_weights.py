"""A mod for Flower's ClientApp: weights go to the server under masks, which sees only their mean.

The server half is :mod:`fedntk.strategies.core.secure`; see also :mod:`fedntk.trust.secure_sum`.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict

from fedntk.ntk.noise import ANSWERED
from fedntk.ntk.options import read_task
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.masked_average import AverageTask, average_digest, average_words
from fedntk.ntk.payloads.npy import from_npy

from .adapter import Function, make_reply, received
from .base import PROMISED
from .disk_store import client_name
from .privacy_ledger import Release
from .secure_sum import Arrays, MaskedSums, SumRequest

OPEN = ANSWERED - {MessageType.TRAIN}  # messages that tell of no training
COUNT = "num-examples"  # metric of a reply


class MaskedWeights(MaskedSums, frozen=True):
    """Mask the weights with which a ClientApp replies, for strategies with secure aggregation.

    It goes with any client or function whose reply is one set of weights::

        app = client_app(client_fn, mods=[MaskedWeights(privacy=PrivacyLimits(ledger="x.ledger"))])

    What leaves the client are masked words. Of its metrics only ``num-examples`` and ``train-loss``
    are among them. With `only_masked`, the default here, it refuses to train for a strategy without
    masks, and to answer other messages than the protocol's and evaluations on examples for that.
    """

    only_masked: bool = MaskedSums.options()["only_masked"].field(default=True)

    def __call__(self, message: Message, context: Context, call_next: Function) -> Message:
        """Answer an exchange of a secure sum; other messages go on to the app."""
        kind, config = message.metadata.message_type, dict[str, Any]()
        for record in message.content.config_records.values():
            config.update(record)
        training = kind == MessageType.TRAIN
        task = read_task(AverageTask, config, "masked_step") if training else None
        if task is None:
            self.require_masked(kind, OPEN)
            promised = PROMISED.set(self.is_private)  # no evaluation on training examples
            try:
                return call_next(message, context)
            finally:
                PROMISED.reset(promised)
        parameters, config = received(message, context)
        records: dict[str, Arrays] = dict(parameters.records)
        protocol = records.pop(wire.SECURE_SUM, {})
        # the weights of each round are another function of the data
        release = Release(task.run_key[:64], server_round=int(config["server-round"]))
        request = SumRequest(task, client_name(config, ()), release)
        if self.answers(task.masked_step):
            arrays = self.answer(task.masked_step, request, protocol)
        else:
            bare, content = copy.copy(message), message.content  # others may hold what came
            names = [name for name in content if name != wire.SECURE_SUM]
            bare.content = RecordDict({name: content[name] for name in names})
            reply = call_next(bare, context)
            weights = reply.content.array_records if reply.has_content() else {}
            if not any(weights.values()):  # an error, or a client that lost its state
                return reply
            arrays = self._mask_reply(reply, request, records, protocol)
        return make_reply(message, context, {COUNT: 1}, {"arrays": arrays})

    def _mask_reply(
        self, reply: Message, request: SumRequest, records: Mapping[str, Arrays], protocol: Arrays
    ) -> Arrays:
        (record,) = reply.content.array_records.values()
        (metrics,) = reply.content.metric_records.values()
        weights = {name: from_npy(array.data) for name, array in record.items()}
        model = next((a for a in records.values() if a.keys() == weights.keys()), None)
        if model is None:
            raise ValueError(
                f"weights: expected arrays with the names that came, got {sorted(weights)[:5]}"
            )
        values: dict[str, Any] = dict(metrics)
        loss = values.get(wire.TRAIN_LOSS)
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            loss = None
        words = average_words(model, weights, values[COUNT], loss)
        about = average_digest(model, request.task.run_key, request.release.server_round)
        return self.mask(words, about, request, protocol)
