"""The phases of TCT, in the order of the paper: what each sends and makes of the replies.

Sections and algorithms are those of Yu et al., NeurIPS 2022: see :mod:`.tct`. All that lasts is in
the strategy's state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedntk.ntk import BadReply, Moments, Normaliser, UploadLimits, available_memory
from fedntk.ntk.convex.local_steps import best_bias
from fedntk.ntk.convex.ridge import pooled_ridge
from fedntk.ntk.payloads.convex_task import MessageTask, Step
from fedntk.ntk.payloads.feature_upload import FeatureUpload
from fedntk.ntk.payloads.screening import screen_changes
from fedntk.ntk.support.arrays import ArrayDict

from ..core.averaging import named_arrays, record_of
from ..core.exchange import Pairs, Screen, logger, result_of
from ..core.inner import InnerStrategy
from ..core.lost_state import Answers
from ..core.replies import Reply, require_like, screen_own_sizes
from .convex_strategy import LINEAR, ConvexStrategy

CONTROL = "tct.control"
Result = tuple[ArrayDict | None, MetricRecord]  # arrays that a round changed, if any; its metrics
T = TypeVar("T")


class Phase(ABC):
    """What TCT does in some successive rounds.

    Clients need the network, the bootstrapped one from stage 2 on, and other parts, which they
    keep.
    """

    step: ClassVar[Step]
    needs: ClassVar[tuple[str, ...]] = ("network",)
    asks_everyone: ClassVar[bool] = False
    changes_linear: ClassVar[bool] = False

    def __init__(self, tct: ConvexStrategy) -> None:
        self.tct = tct

    def messages(self, nodes: list[int], config: ConfigRecord, grid: Grid) -> list[Message]:
        """Make the round's messages to some nodes."""
        tct = self.tct
        return tct.messages(nodes, MessageType.TRAIN, tct.global_arrays, config)

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return the task, and those parts that the client has not been sent."""
        parts = self.tct.sent.lacks(client, *self.needs)
        return self.tct.task_message(self.step, parts, arrays, config)

    @abstractmethod
    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Return the arrays that the round changed, None if none did, and its metrics."""

    def answers(self, replies: Iterable[Message], parse: Callable[[Reply], T]) -> Answers[T]:
        """Check replies, and note what those who sent good ones now have."""
        found = self.tct.answers(replies, parse, MessageType.TRAIN)
        for reply, _ in found.pairs:
            self.tct.sent.mark(reply.client, *self.needs)
        return found

    def gather(
        self, replies: Iterable[Message], parse: Callable[[Reply], T], *screens: Screen[Any]
    ) -> tuple[Pairs[T], MetricRecord]:
        """Check replies one by one and against each other; return them and the round's metrics.

        Too few replies count as none.
        """
        pairs, rejected, _ = self.answers(replies, parse)
        for screen in screens:
            pairs = self.tct.apply_screen(pairs, rejected, screen)
        metrics = self.tct.round_metrics([reply for reply, _ in pairs], rejected)
        return pairs if self.tct.enough(len(pairs)) else [], metrics

    def is_over(self, *, updated: bool) -> bool:
        """Whether the next phase follows a round: by default one that gave what was asked for."""
        return updated


class BootstrapRounds(Phase):
    """Stage 1: T_1 rounds of another strategy on the network (section 4.1)."""

    step = "bootstrap"

    def __init__(self, tct: ConvexStrategy, bootstrap: InnerStrategy) -> None:
        super().__init__(tct)
        self.bootstrap = bootstrap

    def messages(self, nodes: list[int], config: ConfigRecord, grid: Grid) -> list[Message]:
        """Have the other strategy instruct some of the nodes.

        The task travels along, so that clients say in round 1 if they could not do stage 2.
        """
        task = MessageTask(step=self.step, run_key=self.tct.run_key)
        own = ConfigRecord({**config, **task.to_config()})
        network = self.tct.network_of(self.tct.global_arrays)
        return self.bootstrap.messages(network, own, grid, nodes)

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Have the other strategy aggregate what passed the checks."""
        expected = named_arrays(self.tct.network_of(self.tct.global_arrays))
        found, metrics = self.bootstrap.aggregate(replies, expected)
        return None if found is None else named_arrays(found), metrics

    def is_over(self, *, updated: bool) -> bool:
        """After T_1 rounds, whatever they did."""
        return self.tct.server_round >= self.tct.bootstrap_rounds


class Convexify(Phase):
    """One exchange of the features' moments, for mean 0 and variance 1 (section 4.3).

    The classes' counts come with them if there is a bias, which starts by these.
    """

    step = "moments"
    asks_everyone = True

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Join the moments to the normaliser, and start the bias."""
        tct, num_classes = self.tct, self.tct.bias * self.tct.shape[1]

        def parse(reply: Reply) -> Moments:
            return Moments.from_arrays(reply.arrays(), reply.num_examples, tct.width, num_classes)

        pairs, metrics = self.gather(replies, parse, screen_own_sizes)
        if not pairs:
            return None, metrics
        tct.control.know({reply.client: reply.num_examples for reply, _ in pairs})
        joint = Moments.join(moments for _, moments in pairs)
        normaliser, linear = Normaliser.of(joint), np.zeros(tct.shape, np.float32)
        metrics["features-constant"] = int((normaliser.inv_std == 0).sum())
        if tct.bias:
            linear[-1] = best_bias(joint.class_counts, tct.loss)
        return tct.arrays_of(normaliser, linear), metrics


class ConvexRounds(Phase):
    """Stage 2: rounds of SCAFFOLD on the linear model (algorithm 1)."""

    step = "linear"
    changes_linear = True
    needs = ("network", "normaliser", "linear")

    def content_for(self, client: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """Return M steps as the task, what the client lacks, the linear model, and c if sent."""
        tct = self.tct
        source = tct.control.source(client, tct.server_round)
        if source == "last" and tct.sent.lacks(client, "linear"):
            source = "sent"  # it lost the last model
        parts = [*tct.sent.lacks(client, "network", "normaliser"), "linear"]
        state_round = tct.control.rounds.get(client, 0)
        content = tct.task_message(
            self.step, parts, arrays, config, state_round=state_round, control=source
        )
        if source == "sent":
            content["control"] = record_of({CONTROL: tct.control.value})
        return content

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Average the linear models, and take the changes of the c_k into c."""
        tct = self.tct
        theta = tct.global_arrays[LINEAR].numpy()

        def parse(reply: Reply) -> ArrayDict:
            if "diverged" in reply.metrics:
                rate = str(reply.metrics.get("rate-times-lambda"))[:20]
                raise BadReply("diverged", f"its steps overflow; rate-times-lambda is {rate}")
            (linear,) = reply.ordered_arrays(LINEAR)
            require_like(LINEAR, linear, theta)
            return {LINEAR: linear}

        pairs, rejected, lost = self.answers(replies, parse)
        pairs = tct.apply_screen(
            pairs, rejected, lambda own, most: screen_changes({LINEAR: theta}, own, most)
        )
        weights = {reply.node: self._weight(reply) for reply, _ in pairs}
        whole = named_arrays(tct.global_arrays)
        pairs = tct.judged(pairs, rejected, whole, lambda own: own, [*weights.values()])
        replied = [reply for reply, _ in pairs]
        metrics = tct.round_metrics(replied, rejected)
        _report(replied, metrics)
        reset = any(tct.control.rounds.get(client, 0) for client in lost)
        if reset:  # c still includes the c_k that was lost
            logger.warning("a client lost its state: all corrections start again from zero")
            tct.control.reset_state()
        if not tct.enough(len(pairs)):
            return None, metrics
        counts = [weights[reply.node] for reply in replied]
        mean = np.asarray(tct.robust_mean_of({LINEAR: theta}, pairs, counts)[LINEAR], np.float32)
        if tct.corrected and not reset:
            own = {
                reply.client: (count, model[LINEAR])
                for (reply, model), count in zip(pairs, counts, strict=True)
            }
            everyone = tct.registry.clients(without=tct.held_out)
            tct.control.update(tct.server_round, theta, mean, own, everyone, tct.span)
        return {LINEAR: mean}, metrics

    def _weight(self, reply: Reply) -> int:
        """Return the examples that a client counts with: as many as it first said."""
        known = self.tct.control.examples.get(reply.client, reply.num_examples)
        if known != reply.num_examples:
            logger.warning(
                "stage 2: client %d had %d examples before and has %d now; it counts with %d",
                *(reply.client, known, reply.num_examples, known),
            )
        return known

    def is_over(self, *, updated: bool) -> bool:
        """Never: the run ends it."""
        return False


def _report(replies: Sequence[Reply], metrics: MetricRecord) -> None:
    """Add the largest rate to the metrics; log rates too large and examples that changed."""
    given = [reply.metrics.get("rate-times-lambda") for reply in replies]
    rates = [rate for rate in given if isinstance(rate, int | float) and rate >= 0]
    if rates:
        metrics["rate-times-lambda"] = max(rates)
    if any(rate > 2 for rate in rates):
        logger.warning(
            "stage 2: learning rate times largest eigenvalue over n is %.3g on a client; "
            "above 2 its steps diverge: lower the learning rate",
            max(rates),
        )
    if changed := [r.client for r in replies if r.metrics.get("examples-changed") == 1]:
        logger.warning(
            "stage 2: %d clients have other examples than before (%s ...), and compute their "
            "features anew; a client_fn must return the same examples in all rounds",
            len(changed),
            changed[0],
        )


class ServerSolve(Phase):
    """Beyond the paper: clients send their features, and the server solves exactly."""

    step = "features"
    asks_everyone = True
    changes_linear = True

    def aggregate(self, replies: Iterable[Message]) -> Result:
        """Solve the ridge regression on all clients' features."""
        tct, num_outputs = self.tct, self.tct.shape[1]
        limits = UploadLimits({}, tct.max_examples, tct.sparsity, tct.bits)

        def parse(reply: Reply) -> FeatureUpload:
            upload = FeatureUpload.from_arrays(
                reply.arrays(), limits, width=tct.width, num_outputs=num_outputs
            )
            if (n := len(upload.labels)) != reply.num_examples:
                raise BadReply("num-examples", f"claims {reply.num_examples}, sends {n}")
            return upload

        def solve() -> ArrayDict:
            linear, normaliser = pooled_ridge(
                [upload for _, upload in pairs],
                num_outputs,
                ridge=tct.ridge,
                normalise=tct.normalise,
                bias=tct.bias,
                device=tct.device,
            )
            return tct.arrays_of(normaliser, linear)

        pairs, metrics = self.gather(replies, parse, screen_own_sizes, _screen_sizes)
        return result_of(solve) if pairs else None, metrics


def _screen_sizes(uploads: Sequence[FeatureUpload], _: float) -> list[BadReply | None]:
    """Refuse the largest uploads while a kernel of all examples would not fit."""
    verdicts: list[BadReply | None] = [None] * len(uploads)
    left, memory = {i: len(upload.labels) for i, upload in enumerate(uploads)}, available_memory()
    while left and 24 * sum(left.values()) ** 2 > memory:
        largest = max(left, key=lambda i: left[i])
        verdicts[largest] = BadReply(
            "too-large",
            f"a kernel with its {left.pop(largest)} examples does not fit in {memory / 1e9:.1f} GB",
        )
    return verdicts
