"""Strategies that only average weights, so that clients can mask theirs.

Source: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
AISTATS 2017, algorithm 1, under the masks of Bonawitz et al., CCS 2017: see
:mod:`fedntk.ntk.payloads.masked_average`, and :mod:`fedntk.clients.core.masked_weights` for the
client half.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk.averages import weighted_mean
from fedntk.ntk.options import state
from fedntk.ntk.payloads import AverageOptions, AverageTask

from .lost_state import ResendingStrategy
from .replies import Reply
from .secure_sums import SecureSums, WordFormat

Arrays = Mapping[str, NDArray[Any]]
# the new weights, if there are any; the replies in them; and metrics
Average = tuple[Arrays | None, list[Reply], MetricRecord]


class AveragingStrategy(AverageOptions, ResendingStrategy):
    """A strategy whose model is the mean of the clients' weights, by their examples.

    With `secure_aggregation` clients mask their weights, and the numbers of their examples: they
    have the mod :class:`~fedntk.clients.MaskedWeights`. The server learns the mean, the sums of
    examples and of numbers out of range (the metric ``clipped``), and the mean ``train-loss``. It
    cannot screen the clients' weights: `outlier_factor` plays no part.
    """

    masks = True

    run_key: str = state(lambda: secrets.token_hex(8))  # names the run for the clients' folders

    def __post_init__(self) -> None:
        super().__post_init__()
        self._secure = SecureSums(self) if self.secure_aggregation else None

    def check(self) -> None:
        """Refuse what clients would send beside their masked weights."""
        super().check()
        if self.secure_aggregation:
            self._task("public-key")
        if self.secure_aggregation and self.centre_inputs:
            raise ValueError(
                "secure_aggregation: clients would send the sums of their inputs without masks; "
                "expected centre_inputs = False, got True"
            )

    def _task(self, step: Any) -> AverageTask:
        return AverageTask(
            masked_step=step,
            run_key=getattr(self, "run_key", ""),
            most_examples=self.max_examples,
            secure_range=self.secure_range,
            secure_step=self.secure_step,
        )

    def prepare_round(self, server_round: int, nodes: list[int], grid: Grid) -> None:
        """Begin with public keys."""
        super().prepare_round(server_round, nodes, grid)
        if self._secure is not None:
            self._secure.begin()

    def sends_model(self, stage: str) -> bool:
        """Whether clients need the model for the current exchange of a stage."""
        masked = self._secure is not None and stage == MessageType.TRAIN
        return not masked or self._secure is None or self._secure.step == "masked"

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add which exchange of a secure sum it is, and what of it is for this client."""
        if self._secure is None or stage != MessageType.TRAIN:
            return super().content_for(client, stage, arrays, config)
        own = ConfigRecord({**config, **self._task(self._secure.step).to_config()})
        sent = arrays if self.sends_model(stage) else ArrayRecord()
        content = super().content_for(client, stage, sent, own)
        if (record := self._secure.record_for(client)) is not None:
            content["secure-sum"] = record
        return content

    def average(self, replies: Iterable[Message], model: Arrays) -> Average:
        """Return the mean of the clients' weights, whose replies or public keys came."""
        if self._secure is not None:
            return self._average_masked(self._secure, replies, model)
        pairs, metrics = self.accept_weights(replies, model)
        added = [reply for reply, _ in pairs]
        if not self.enough(len(pairs)):
            return None, added, metrics
        counts = [reply.num_examples for reply in added]
        return weighted_mean([weights for _, weights in pairs], counts), added, metrics

    def _average_masked(
        self, secure: SecureSums, replies: Iterable[Message], model: Arrays
    ) -> Average:
        task = self._task("masked")
        size = sum(array.size for array in model.values())

        def format_for(clients: int) -> WordFormat:  # each counts as one example
            dtype = task.word_dtype(clients, size)
            about = task.digest(model, self.server_round, dtype)
            return WordFormat(size + task.BESIDE, dtype, about)

        found = self.answers(replies, secure.public_part, MessageType.TRAIN)
        total, added = secure.complete(
            found, format_for, lambda words, clients: task.decode(words, model, clients)
        )
        metrics = self.round_metrics(added, found.rejected)
        if total is None:
            return None, added, metrics
        metrics["num-examples"], metrics["clipped"] = total.num_examples, total.clipped
        if total.train_loss is not None:
            metrics["train-loss"] = total.train_loss
        return total.mean, added, metrics
