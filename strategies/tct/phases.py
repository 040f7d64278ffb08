"""The phases of TCT, in the order of the paper; each knows what it sends and what it makes of it.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4 and algorithms 1 and 2. Which phase is at work is the strategy's to say.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply, Moments, Normaliser, TCTModel, UploadLimits, available_memory
from fedntk.ntk.averages import weighted_mean
from fedntk.ntk.convex import pooled_ridge
from fedntk.ntk.payloads import ConvexTask, FeatureUpload, screen_changes

from ..core.averaging import named_arrays
from ..core.exchange import Pairs, logger
from ..core.inner import InnerStrategy
from ..core.lost_state import Answers
from ..core.replies import Reply, require_like, screen_own_sizes

if TYPE_CHECKING:
    from .tct import TCT

__all__ = [
    "BootstrapRounds",
    "ConvexRounds",
    "Convexify",
    "Phase",
    "ServerSolve",
    "StageTwo",
]

LINEAR, MEAN, SCALE = TCTModel.ARRAYS
CONTROL = "tct.control"
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class Phase(ABC):
    """What TCT does in some successive rounds.

    Parameters
    ----------
    tct : TCT
        Whose phase it is: it samples, sends, checks replies, and holds the global arrays.
    """

    name: ClassVar[str]
    asks_everyone: ClassVar[bool] = False
    changes_linear: ClassVar[bool] = False

    def __init__(self, tct: "TCT") -> None:
        self.tct = tct

    def messages(
        self,
        server_round: int,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Make the round's messages."""
        return self.tct.messages(server_round, nodes, MessageType.TRAIN, arrays, config)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return what one client is sent for training."""
        raise NotImplementedError

    @abstractmethod
    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Return the arrays that the round changed, None if none did, and its metrics."""

    @abstractmethod
    def is_over(self, server_round: int, *, updated: bool) -> bool:
        """Whether the next phase follows a round, which changed some arrays or did not."""


class BootstrapRounds(Phase):
    """Stage 1: rounds of another strategy on the network (section 4.1)."""

    name = "bootstrap"

    def __init__(self, tct: "TCT", bootstrap: InnerStrategy, rounds: int) -> None:
        super().__init__(tct)
        self.bootstrap, self.rounds = bootstrap, rounds

    def messages(
        self,
        server_round: int,
        nodes: list[int],
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Have the other strategy instruct some of the nodes.

        The task travels along, so that clients say in round 1 if they could not do stage 2.
        """
        self.tct.prepare_config(config, server_round)
        task = replace(self.tct.task, step="bootstrap", run=self.tct.run_key)
        for key, value in task.to_config().items():
            config[key] = value
        return self.bootstrap.messages(
            server_round, self.tct.network_of(arrays), config, grid, nodes
        )

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Have the other strategy aggregate what passed the checks."""
        network = self.tct.network_of(self.tct.global_arrays)
        expected = named_arrays(network)
        return self.bootstrap.aggregate(server_round, replies, expected)

    def is_over(self, server_round: int, *, updated: bool) -> bool:
        """After T_1 rounds, whatever they did."""
        return server_round >= self.rounds


class StageTwo(Phase):
    """A phase whose clients need the bootstrapped network, and other parts, of which they keep."""

    needs: tuple[str, ...] = ("network",)

    def task(self, client: int) -> ConvexTask:
        """Return what a client is asked to do; the key is added to it."""
        raise NotImplementedError

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, and those parts that the client has not been sent."""
        parts = self.tct.sent.lacks(client, *self.needs)
        return self.tct.asked(self.task(client), parts, arrays, config)

    def answers(self, replies: Iterable[Message], parse: Callable[[Reply], T]) -> Answers[T]:
        """Check replies, and note what those who sent good ones now have."""
        found = self.tct.answers(replies, parse, MessageType.TRAIN)
        for reply, _ in found.pairs:
            self.tct.sent.mark(reply.client, *self.needs)
        return found

    def gathered(
        self,
        replies: Iterable[Message],
        parse: Callable[[Reply], T],
        *screens: Callable[[Sequence[T], float], Sequence[BadReply | None]],
    ) -> tuple[Pairs[T], MetricRecord]:
        """Check replies one by one and against each other; return them and the round's metrics."""
        pairs, rejected, _ = self.answers(replies, parse)
        for screen in screens:
            pairs = self.tct.screened(pairs, rejected, screen)
        return pairs, self.tct.round_metrics([reply for reply, _ in pairs], rejected)

    def is_over(self, server_round: int, *, updated: bool) -> bool:
        """Once a round gave what was asked for."""
        return updated


class Convexify(StageTwo):
    """One exchange of the features' moments, for mean 0 and variance 1 (section 4.3)."""

    name = "convexify"
    asks_everyone = True

    def task(self, client: int) -> ConvexTask:
        """Ask for the moments."""
        return replace(self.tct.task, step="moments")

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Join the moments to the normaliser."""
        tct = self.tct

        def parse(reply: Reply) -> Moments:
            arrays = list(reply.arrays().values())
            return Moments.from_arrays(arrays, reply.num_examples, tct.width)

        pairs, metrics = self.gathered(replies, parse, screen_own_sizes)
        if not tct.enough(len(pairs)):
            return None, metrics
        tct.control.know({reply.client: reply.num_examples for reply, _ in pairs})
        normaliser = Normaliser.of(Moments.join(moments for _, moments in pairs))
        metrics["features-constant"] = int((normaliser.inv_std == 0).sum())
        return {MEAN: normaliser.mean, SCALE: normaliser.inv_std}, metrics


class ConvexRounds(StageTwo):
    """Stage 2: rounds of SCAFFOLD on the linear model (algorithm 1)."""

    name = "convex-rounds"
    changes_linear = True
    needs = ("network", "normaliser", "linear")

    def task(self, client: int) -> ConvexTask:
        """Ask for M steps, with the c_k that counts and the way to know c."""
        tct = self.tct
        source = tct.control.source(client, tct.server_round)
        if source == "last" and tct.sent.lacks(client, "linear"):
            source = "sent"  # it lost the last model
        state_round = tct.control.round_of(client)
        return replace(tct.task, state_round=state_round, control=source)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, what the client lacks, the linear model, and c where it is sent."""
        task = self.task(client)
        parts = [*self.tct.sent.lacks(client, "network", "normaliser"), "linear"]
        content = self.tct.asked(task, parts, arrays, config)
        if task.control == "sent":
            control = Array(self.tct.control.value)
            content["control"] = ArrayRecord({CONTROL: control})
        return content

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Average the linear models, and take the changes of the c_k into c."""
        tct = self.tct
        theta = tct.global_arrays[LINEAR].numpy()

        def parse(reply: Reply) -> Arrays:
            if "diverged" in reply.metrics:
                rate = str(reply.metrics.get("rate-times-lambda"))[:20]
                raise BadReply("diverged", f"its steps overflow; rate-times-lambda is {rate}")
            arrays = list(reply.arrays().values())
            if len(arrays) != 1:
                raise BadReply("arrays", f"expected 1, got {len(arrays)}")
            require_like(LINEAR, arrays[0], theta)
            return {LINEAR: arrays[0]}

        pairs, rejected, lost = self.answers(replies, parse)
        pairs = tct.screened(
            pairs, rejected, lambda own, most: screen_changes({LINEAR: theta}, own, most)
        )
        metrics = tct.round_metrics([reply for reply, _ in pairs], rejected)
        self._report_rates([reply for reply, _ in pairs], metrics)
        if changed := [r.client for r, _ in pairs if r.metrics.get("examples-changed") == 1]:
            logger.log(
                WARNING,
                "stage 2: %d clients have other examples than before (%s ...), and compute their "
                "features anew; a client_fn must return the same examples in all rounds",
                len(changed),
                changed[0],
            )
        # some c_k is no more, and c still holds it
        reset = any(tct.control.round_of(client) for client in lost)
        if reset:
            logger.log(WARNING, "a client lost its state: all corrections start again from zero")
            tct.control.reset()
        if not tct.enough(len(pairs)):
            return None, metrics
        counts = [self._weight(reply) for reply, _ in pairs]
        mean = np.asarray(weighted_mean([own for _, own in pairs], counts)[LINEAR], np.float32)
        if tct.task.corrected and not reset:
            models = (linear[LINEAR] for _, linear in pairs)
            own = {
                reply.client: (count, model)
                for (reply, _), count, model in zip(pairs, counts, models, strict=True)
            }
            everyone = tct.registry.clients(without=tct.held_out)
            tct.control.update(server_round, theta, mean, own, everyone)
        return {LINEAR: mean}, metrics

    def _weight(self, reply: Reply) -> int:
        """Return the examples that a client counts with: as many as it first said."""
        known = self.tct.control.examples_of(reply.client)
        if known is None or known == reply.num_examples:
            return reply.num_examples
        logger.log(
            WARNING,
            "stage 2: client %d had %d examples before and has %d now; it counts with %d",
            *(reply.client, known, reply.num_examples, known),
        )
        return known

    def _report_rates(self, replies: Sequence[Reply], metrics: MetricRecord) -> None:
        given = [reply.metrics.get("rate-times-lambda") for reply in replies]
        rates = [rate for rate in given if isinstance(rate, int | float) and rate >= 0]
        if rates:
            metrics["rate-times-lambda"] = max(rates)
        if any(rate > 2 for rate in rates):
            logger.log(
                WARNING,
                "stage 2: learning rate times largest eigenvalue over n is %.3g on a client; "
                "above 2 its steps diverge: lower the learning rate",
                max(rates),
            )

    def is_over(self, server_round: int, *, updated: bool) -> bool:
        """Until the run ends."""
        return False


class ServerSolve(StageTwo):
    """Beyond the paper: clients send their features, and the server solves exactly."""

    name = "server-solve"
    asks_everyone = True
    changes_linear = True

    def task(self, client: int) -> ConvexTask:
        """Ask for the features."""
        return replace(self.tct.task, step="features")

    def aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[Arrays | None, MetricRecord]:
        """Solve the ridge regression on all clients' features."""
        tct = self.tct
        limits = UploadLimits({}, tct.max_examples, tct.task.sparsity, tct.task.bits)
        num_outputs = tct.shape[1]

        def parse(reply: Reply) -> FeatureUpload:
            arrays = list(reply.arrays().values())
            upload = FeatureUpload.from_arrays(
                arrays, limits, width=tct.width, num_outputs=num_outputs
            )
            if len(upload.labels) != reply.num_examples:
                raise BadReply(
                    "num-examples", f"claims {reply.num_examples}, sends {len(upload.labels)}"
                )
            return upload

        pairs, metrics = self.gathered(replies, parse, screen_own_sizes, _affordable)
        if not tct.enough(len(pairs)):
            return None, metrics
        try:
            linear, normaliser = pooled_ridge(
                [upload for _, upload in pairs],
                num_outputs,
                ridge=tct.ridge,
                normalise=tct.normalise,
                bias=tct.task.bias,
                device=tct.device,
            )
        except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
            logger.log(WARNING, "no solution (%s): the model stays as it was", error)
            return None, metrics
        return {LINEAR: linear, MEAN: normaliser.mean, SCALE: normaliser.inv_std}, metrics


def _affordable(uploads: Sequence[FeatureUpload], _: float) -> list[BadReply | None]:
    """Refuse the largest uploads while a kernel of all examples would not fit."""
    verdicts: list[BadReply | None] = [None] * len(uploads)
    sizes: Mapping[int, int] = {i: len(upload.labels) for i, upload in enumerate(uploads)}
    left, memory = dict(sizes), available_memory()
    while left and 24 * sum(left.values()) ** 2 > memory:
        largest = max(left, key=lambda i: left[i])
        del left[largest]
        verdicts[largest] = BadReply(
            "too-large",
            f"a kernel with its {sizes[largest]} examples does not fit in {memory / 1e9:.1f} GB",
        )
    return verdicts
