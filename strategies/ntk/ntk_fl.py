"""Server of NTK-FL: builds the global tangent kernel and evolves the weights.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.1:

    H^(k) = (1/C) <J_i, J_j>_F over the examples of the sampled clients      eq. (6), (8)
    f^(k,t) = evolution of f^(k) under H^(k)                                 eq. (9a)
    w^(k,t) = w^(k) + J^T R^(k,t)                                            eq. (9b), (10)
    t^(k) = argmin over t_1 ... t_Psi of L(f(w^(k,t); X^(k)); Y^(k))         eq. (11a)
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply, JacobianUpload, require_memory
from fedntk.ntk.class_prior import OUTPUT_OFFSET, log_class_prior
from fedntk.ntk.evolution.candidates import Candidates, lowest_loss, mean_losses, trimmed_losses
from fedntk.ntk.evolution.flow_options import FlowOptions
from fedntk.ntk.evolution.gradient_flow import GradientFlow
from fedntk.ntk.evolution.learning_rate import AUTO_STEPS
from fedntk.ntk.evolution.solver import SolverStep
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.payloads.leave_one_out import screen_harmful
from fedntk.ntk.payloads.screening import screen_losses, screen_uploads

from ..core.averaging import named_arrays, record_of
from ..core.base import BaseStrategy
from ..core.exchange import UNUSABLE, Aggregated, logger, result_of
from ..core.replies import Reply

DEFAULT_STEPS = (*range(100, 1001, 100), 1500, 2000)
SHORT, LONG = 10, 60  # seconds: what lasts longer is logged, or comes with advice
EXPENSIVE = (
    "; to make rounds cheaper use kernel='mean' (one small matrix), learning_rate='auto', "
    "a smaller last t in steps, fewer clients a round or a sampling_rate on the clients"
)
AUTO_RATE = "use learning_rate='auto' (setting auto-learning-rate), a lower rate, or give"
LARGEST_LOSS = 1e30  # a client's; float32's infinity and more count as infinite
Selection = Literal["clients", "linearised", "validation"]
Gathered = tuple[list[Reply], list[JacobianUpload], Counter[str]]


class NTKFL(FlowOptions, BaseStrategy):
    """NTK-FL (Yue et al. 2022, section 4.1). Clients are :class:`~fedntk.clients.NTKFLClient`.

    Examples
    --------
    >>> strategy = NTKFL(learning_rate=0.01, min_train_nodes=10, min_completed=5)
    >>> strategy.steps[0], strategy.steps[-1]
    (0.0, 2000.0)
    """

    client = "NTKFLClient"
    replies = "Jacobians"
    tells_options = False  # the server evolves
    defences = ("none", "leave-one-out")
    centres = True
    combined_by: ClassVar = {
        "kernel-products": sum,
        "solver-steps": sum,
        "solver-error-estimate": max,
        "losses-": sum,  # accepted, rejected
    }

    steps: Sequence[float] = option(
        "the grid t_1 ... t_Psi of update steps to choose from: eq. (11a); by default 100, 200 ... "
        "1000, 1500, 2000, and with the learning rate 'auto' 10, 30 ... 10,000",
        default=(),
        at_least=0,
    )
    allow_no_step: bool = option(
        "have t = 0, the weights as they are, among the candidates: then no round raises the loss "
        "by which t is chosen; the paper's grid lacks it",
        default=True,
    )
    selection: Selection = option(
        "how t is chosen: by the sampled clients' losses of the true network, in one more exchange "
        "(the paper's rule, remark 1; losses over 100 times the median client's are left out); by "
        "the loss of the evolved outputs, which takes the last step of a safe grid; or by the loss "
        "on examples that nobody trains on",
        default="clients",
    )
    validation_partitions: Sequence[int] = argument(
        "partitions never sampled for training, which report the candidates' losses for "
        "selection='validation'",
        default=(),
    )
    class_prior: bool = option(
        "take the classes' shares among a round's examples out of what is learned from them, for "
        "cross-entropy: the logarithm of the shares is added to the outputs that evolve, and to "
        "those by which t is chosen (with selection='clients' the round's clients learn it)",
        default=False,
    )
    class_target: Literal["uniform", "seen"] = option(
        "with class_prior: predict for classes that are equally common, or as common as among all "
        "examples so far",
        default="uniform",
    )
    memory_budget: float = option(
        "GB that the mean kernel may take before it is left unbuilt; 0: what is available",
        default=0.0,
        at_least=0,
        compared=False,
    )
    device: torch.device | str = argument("where kernel and evolution are computed", default="cpu")

    rounds_without_step: int = state(int)  # in a row, for the log
    _class_counts: NDArray[np.float64] = state(lambda: np.zeros(0))  # of all rounds so far

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.validation_loss is not None) + (len(self.validation_partitions) > 0)
        if given != (self.selection == "validation"):
            raise ValueError(
                "selection='validation' goes with validation_loss or validation_partitions, not "
                f"both; got selection={self.selection!r} and {given} of them"
            )
        self.held_out = (*self.held_out, *self.validation_partitions)
        steps = self.steps or (AUTO_STEPS if self.has_auto_rate else DEFAULT_STEPS)
        if self.allow_no_step and steps[0] > 0:
            steps = (0, *steps)
        shared = {name: getattr(self, name) for name in FlowOptions.options()}
        budget = round(self.memory_budget * 1e9) or None
        self.flow = GradientFlow(**{**shared, "steps": steps, "memory_budget": budget})
        self.steps = self.flow.steps
        self._offset: list[float] = []  # of the outputs, in the current round

    def check(self) -> None:
        """Refuse options that do not go together."""
        super().check()
        if len(self.steps) and self.steps[-1] == 0:
            raise ValueError(f"steps: expected at least one t above 0, got {list(self.steps)}")
        if self.class_prior and self.loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {self.loss}")
        if self.class_target == "seen" and not self.class_prior:
            raise ValueError("class_target: 'seen' goes with class_prior=True, got False")

    def agreement(self) -> Agreement:
        """Add the loss."""
        return replace(super().agreement(), loss=self.loss)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Do steps 3 and 4: global Jacobian, kernel, evolution and choice of t."""
        clients, uploads, rejected = self.gather(server_round, replies)
        metrics = self.round_metrics(clients, rejected)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(clients)) or not uploads:
            return None, metrics
        candidates = result_of(lambda: self.candidates(uploads, metrics), "evolution")
        if candidates is None:
            return None, metrics
        losses = self.candidate_losses(candidates, clients, metrics)
        best = lowest_loss(losses)
        if best is None:
            logger.warning("no candidate has a finite loss: the model stays as it was")
            return None, metrics
        metrics["t"] = float(self.steps[best])
        metrics["learning-rate"] = candidates.evolution.learning_rate
        metrics["candidate-loss"] = losses[best]
        metrics["linearised-loss"] = candidates.linearised_losses[best]
        if self.steps[best] > 0:
            self.rounds_without_step = 0
            return record_of(candidates.weights_at(best)), metrics
        self.rounds_without_step += 1
        logger.info("t = 0 has the lowest loss: the model stays as it was")
        if self.rounds_without_step >= 2:
            logger.warning(
                "in %d rounds in a row no t lowered the loss: learning rate %g times t = %g, the "
                "first of steps, goes beyond where the network is close to its linearisation; %s "
                "steps below it",
                self.rounds_without_step,
                candidates.evolution.learning_rate,
                self.steps[1],
                "give" if self.has_auto_rate else AUTO_RATE,
            )
        return None, metrics

    def gather(self, server_round: int, replies: Iterable[Message]) -> Gathered:
        """Return the clients whose rows are used, uploads with these, and refusals (step 2).

        The order of the uploads does not depend on that of the replies.
        """
        pairs, rejected = self.accepted(replies, self.parser(), MessageType.TRAIN)
        pairs = self.apply_screen(pairs, rejected, screen_uploads)
        if self.defence == "leave-one-out":
            try:
                pairs = self.apply_screen(
                    pairs, rejected, lambda uploads, _: screen_harmful(uploads, self.liars_expected)
                )
            except UNUSABLE as error:
                logger.warning("clients cannot be judged: %s", error)
                pairs = []
        return [reply for reply, _ in pairs], [upload for _, upload in pairs], rejected

    def parser(self) -> Callable[[Reply], JacobianUpload]:
        """Make what checks each reply of a round, or raises BadReply."""
        sent = {n: torch.from_numpy(a) for n, a in named_arrays(self.global_arrays).items()}
        shapes = {name: tensor.shape for name, tensor in sent.items()}

        def parse(reply: Reply) -> JacobianUpload:
            upload = JacobianUpload.from_arrays(reply.arrays(), parameters=shapes, weights=sent)
            return upload.claimed(reply.num_examples)

        return parse

    def candidates(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> Candidates:
        """Return weights w^(k,t) for each t, and the losses of f^(k,t) (step 3)."""
        require_memory(
            2 * sum(upload.jacobian.nbytes for upload in uploads),
            f"the global Jacobian of {len(uploads)} clients",
            cure="sample fewer clients a round, or have them send structure='factored'",
        )
        whole = self.pooled(uploads, metrics)
        offset = self._class_offset(whole.targets)
        self._offset = offset.tolist()
        candidates = Candidates.of(
            named_arrays(self.global_arrays),
            whole.jacobian.to(self.device),
            (whole.outputs + offset).to(self.device),
            whole.targets.to(self.device),
            self.flow,
            _Progress(whole, self.flow.kernel),
        )
        evolution = candidates.evolution
        metrics["kernel-products"] = evolution.kernel_products
        metrics["solver-steps"] = evolution.solver_steps
        metrics["solver-error-estimate"] = evolution.error_estimate
        return candidates

    def pooled(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> JacobianUpload:
        """Stack the rows of the uploads: eq. (8)."""
        return uploads[0] if len(uploads) == 1 else JacobianUpload.concatenate(uploads)

    def _class_offset(self, targets: torch.Tensor) -> torch.Tensor:
        """Return what is added to the outputs of a round's examples; zeros without a prior."""
        if not self.class_prior:
            return torch.zeros(targets.shape[1])
        counts = targets.sum(0, dtype=torch.float64).cpu().numpy()
        self._class_counts = counts + (self._class_counts if len(self._class_counts) else 0)
        seen = torch.from_numpy(self._class_counts) if self.class_target == "seen" else None
        return log_class_prior(targets, seen)

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Add the offset of the outputs where losses are asked for on the round's examples."""
        if stage == MessageType.QUERY and self.class_prior and self.selection == "clients":
            config = ConfigRecord({**config, OUTPUT_OFFSET: self._offset})
        return super().content_for(client, stage, arrays, config)

    def candidate_losses(
        self, candidates: Candidates, clients: Sequence[Reply], metrics: MetricRecord
    ) -> Sequence[float]:
        """Return each candidate's loss, by the rule that is chosen for eq. (11a) (step 4)."""
        if self.selection == "linearised":
            return candidates.linearised_losses
        if self.validation_loss is not None:
            each = map(candidates.weights_at, range(len(candidates)))
            return [float(self.validation_loss(record_of(weights))) for weights in each]
        nodes = [client.node for client in clients]
        if self.selection == "validation":
            nodes = self.registry.nodes_of(self.validation_partitions)
        count = len(candidates)
        pairs, rejected = self.exchange(
            nodes,
            MessageType.QUERY,
            record_of(candidates.weights),
            lambda reply: _check_losses(reply, count),
        )
        pairs = self.apply_screen(pairs, rejected, screen_losses)
        metrics["losses-accepted"] = len(pairs)
        for reason, refused in sorted(rejected.items()):
            metrics[f"losses-rejected-{reason}"] = refused
        if self.defence != "none":  # numbers of examples are claims
            trimmed = trimmed_losses([losses for _, losses in pairs], self.liars_expected)
            return trimmed or [math.inf] * count
        trained_on = {client.node: client.num_examples for client in clients}
        counts = [trained_on.get(reply.node, reply.num_examples) for reply, _ in pairs]
        return mean_losses([losses for _, losses in pairs], counts) or [math.inf] * count


class _Progress:
    """Logs what an evolution will cost if that is much, and how far it is."""

    def __init__(self, upload: JacobianUpload, kernel: str) -> None:
        n, num_outputs = upload.outputs.shape
        self._what = f"the evolution of {n} examples x {num_outputs} outputs, {kernel} kernel"
        self._start = self._said = time.monotonic()
        self._advised = False

    def __call__(self, step: SolverStep) -> None:
        now = time.monotonic()
        seconds = now - self._start
        if step.time == 0:
            each = seconds / max(1, step.products)
            if each * step.expected > SHORT:
                message = "%s, will take roughly %d products of %.2g s, %.0f s"
                logger.info(message, self._what, step.expected, each, each * step.expected)
        elif now - self._said > SHORT:
            self._said = now
            message = "%s: t = %.3g of %g after %d products and %.0f s"
            logger.info(message, self._what, step.time, step.end, step.products, seconds)
            if seconds > LONG and not self._advised:
                self._advised = True
                logger.warning("%s takes more than %d s%s", self._what, LONG, EXPENSIVE)


def _check_losses(reply: Reply, count: int) -> NDArray[np.float64]:
    losses = reply.metrics.get("losses")
    if not isinstance(losses, list) or len(losses) != count:
        raise BadReply("losses", f"expected {count} losses, got {str(losses)[:80]}")
    values = np.array(losses, dtype=np.float64)
    if (values < 0).any() or not np.isfinite(values).any():
        raise BadReply("losses", f"expected losses of at least 0, some finite, got {losses}")
    if (np.isfinite(values) & (values > LARGEST_LOSS)).any():
        raise BadReply("losses", f"expected finite losses of at most {LARGEST_LOSS:g}")
    return values
