"""Server of NTK-FL: builds the global tangent kernel and evolves the weights.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.1:

    H^(k) = (1/C) <J_i, J_j>_F over the examples of the sampled clients      eq. (6), (8)
    f^(k,t) = evolution of f^(k) under H^(k)                                 eq. (9a)
    w^(k,t) = w^(k) + J^T R^(k,t)                                            eq. (9b), (10)
    t^(k) = argmin over t_1 ... t_Psi of L(f(w^(k,t); X^(k)); Y^(k))         eq. (11a)
"""

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from logging import getLogger
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from flwr.app import MessageType
from numpy.typing import NDArray

from fedntk.ntk import BadReply, JacobianUpload, require_memory
from fedntk.ntk.evolution.candidates import Candidates, lowest_loss, mean_losses, trimmed_losses
from fedntk.ntk.evolution.gradient_flow import AUTO_STEPS, FlowOptions, GradientFlow
from fedntk.ntk.evolution.solver import SolverStep
from fedntk.ntk.losses import OUTPUT_OFFSET, log_class_prior
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.leave_one_out import screen_harmful
from fedntk.ntk.payloads.screening import screen_losses, screen_uploads

from ..core.averaging import record_of
from ..core.centre import CentreInputs
from ..core.channel import Rounds
from ..core.replies import UNUSABLE, Reply, result_of
from ..core.round import Round
from ..core.screening import Screening
from ..core.strategy import Strategy
from ..core.uploads import Update, Uploads
from ..core.weight_average import WeightAverage

logger = getLogger("flwr")
DEFAULT_STEPS = (*range(100, 1001, 100), 1500, 2000)
SHORT, LONG = 10, 60  # seconds: what lasts longer is logged, or comes with advice
EXPENSIVE = (
    "; to make rounds cheaper use kernel='mean' (one small matrix), learning_rate='auto', "
    "a smaller last t in steps, fewer clients a round or a sampling_rate on the clients"
)
AUTO_RATE = "use learning_rate='auto' (setting auto-learning-rate), a lower rate, or give"
LARGEST_LOSS = 1e30  # a client's; float32's infinity and more count as infinite
Selection = Literal["clients", "linearised", "validation"]
Gathered = tuple[Uploads[Any], list[JacobianUpload]]  # who sent rows, and the rows
# candidates, what was added to the outputs, and metrics
Evolved = tuple[Candidates, torch.Tensor, dict[str, float]]


class KernelStrategy(FlowOptions, Strategy):
    """Rounds of a method in which clients send rows of a Jacobian, and the server evolves.

    A method says in :meth:`gather` how rows are sent and checked.
    """

    rules = ("none", "leave-one-out")
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
        "have t = 0 among the candidates, unlike the paper: then no round raises their loss",
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
        "partitions that never train, which report losses for selection='validation'", default=()
    )
    class_prior: bool = option(
        "take the classes' shares among a round's examples out of what is learned from them, for "
        "cross-entropy: the logarithm of the shares is added to the outputs that evolve, and to "
        "those by which t is chosen (with selection='clients' the round's clients learn it)",
        default=False,
    )
    class_target: Literal["uniform", "seen"] = option(
        "with class_prior: classes are predicted as equally common, or as among examples so far",
        default="uniform",
    )
    memory_budget: float = option(
        "GB that the mean kernel may take before it is left unbuilt; 0: what is available",
        default=0.0,
        at_least=0,
        compared=False,
    )
    device: torch.device | str = argument("where kernel and evolution are computed", default="cpu")

    average: WeightAverage | None = part("average of the weights over rounds", default=None)
    centre: CentreInputs | None = part("take the mean over all clients off inputs", default=None)

    rounds_without_step: int = state(int)  # in a row, for the log
    class_counts: NDArray[np.float64] = state(lambda: np.zeros(0))  # of all rounds so far

    def prepare(self) -> None:
        """Hold out the validation partitions, and make the gradient flow."""
        self.sampling.held_out = (*self.sampling.held_out, *self.validation_partitions)
        steps = self.steps or (AUTO_STEPS if self.has_auto_rate else DEFAULT_STEPS)
        if self.allow_no_step and steps[0] > 0:
            steps = (0, *steps)
        options = {name: getattr(self, name) for name in FlowOptions.options()}
        budget = round(self.memory_budget * 1e9) or None
        self.flow = GradientFlow(**{**options, "steps": steps, "memory_budget": budget})
        self.steps = self.flow.steps

    def check(self) -> None:
        """Refuse options that do not go together."""
        if len(self.steps) and self.steps[-1] == 0:
            raise ValueError(f"steps: expected at least one t above 0, got {list(self.steps)}")
        if self.class_prior and self.loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {self.loss}")
        if self.class_target == "seen" and not self.class_prior:
            raise ValueError("class_target: 'seen' goes with class_prior=True, got False")
        on_server = self.screening.validation_loss is not None
        sources = on_server + (len(self.validation_partitions) > 0)
        if sources != (self.selection == "validation"):
            raise ValueError(
                "selection='validation' goes with screening.validation_loss or "
                f"validation_partitions, not both; got {self.selection!r} and {sources} of them"
            )

    def told_options(self) -> dict[str, Any]:
        """Return none: the server evolves."""
        return {}

    @property
    def agreed_loss(self) -> str:
        """The loss that evolves."""
        return self.loss

    @abstractmethod
    def gather(self, r: Round) -> Rounds[Gathered]:
        """Return the clients with rows that are used, and these (step 2).

        The order of the rows does not depend on that of the replies.
        """

    @abstractmethod
    def pool(self, rows: Sequence[JacobianUpload]) -> tuple[JacobianUpload, dict[str, float]]:
        """Stack the clients' rows, eq. (8); return them and metrics of the round."""

    def train_round(self, r: Round) -> Rounds[Update]:
        """Gather rows, evolve under their kernel, and choose t."""
        uploads, rows = yield from self.gather(r)  # steps 1 and 2
        if not self.enough(uploads) or not rows:
            return Update(uploads)
        evolved = result_of(lambda: self._evolve(r, rows), "evolution")  # step 3
        if evolved is None:
            return Update(uploads)
        candidates, offset, metrics = evolved
        evolution = candidates.evolution
        metrics["kernel-products"] = evolution.kernel_products
        metrics["solver-steps"] = evolution.solver_steps
        metrics["solver-error-estimate"] = evolution.error_estimate
        losses, counts = yield from self._losses_of(r, candidates, uploads, offset)  # step 4
        metrics |= counts
        best = lowest_loss(losses)
        if best is None:
            logger.warning("no candidate has a finite loss: the model stays as it was")
            return Update(uploads, None, metrics)
        metrics["t"] = float(self.steps[best])
        metrics["learning-rate"] = evolution.learning_rate
        metrics["candidate-loss"] = losses[best]
        metrics["linearised-loss"] = candidates.linearised_losses[best]
        if self.steps[best] > 0:
            self.rounds_without_step = 0
            return Update(uploads, record_of(candidates.weights_at(best)), metrics)
        self.rounds_without_step += 1
        logger.info("t = 0 has the lowest loss: the model stays as it was")
        if self.rounds_without_step >= 2:
            logger.warning(
                "in %d rounds in a row no t lowered the loss: learning rate %g times t = %g, the "
                "first of steps, goes beyond where the network is close to its linearisation; %s "
                "steps below it",
                self.rounds_without_step,
                evolution.learning_rate,
                self.steps[1],
                "give" if self.has_auto_rate else AUTO_RATE,
            )
        return Update(uploads, None, metrics)

    def _evolve(self, r: Round, rows: Sequence[JacobianUpload]) -> Evolved:
        """Return weights w^(k,t) for each t, and the losses of f^(k,t): eq. (8) to (10)."""
        pooled, metrics = self.pool(rows)
        targets, offset = pooled.targets, torch.zeros(pooled.targets.shape[1])
        if self.class_prior:
            counts = targets.sum(0, dtype=torch.float64).cpu().numpy()
            self.class_counts = counts + (self.class_counts if len(self.class_counts) else 0)
            seen = torch.from_numpy(self.class_counts) if self.class_target == "seen" else None
            offset = log_class_prior(targets, seen)
        candidates = Candidates.of(
            r.model,
            pooled.jacobian.to(self.device),
            (pooled.outputs + offset).to(self.device),
            targets.to(self.device),
            self.flow,
            _Progress(pooled, self.flow.kernel),
        )
        return candidates, offset, metrics

    def _losses_of(
        self, r: Round, candidates: Candidates, uploads: Uploads[Any], offset: torch.Tensor
    ) -> Rounds[tuple[Sequence[float], dict[str, float]]]:
        """Return each candidate's loss, by the rule that is chosen for eq. (11a), and counts."""
        if self.selection == "linearised":
            return candidates.linearised_losses, {}
        if (validation_loss := self.screening.validation_loss) is not None:
            models = map(candidates.weights_at, range(len(candidates)))
            return [float(validation_loss(record_of(model))) for model in models], {}
        asks_trainers = self.selection == "clients"
        count, validators = len(candidates), self.validation_partitions
        offsets = {OUTPUT_OFFSET: offset.tolist()} if self.class_prior and asks_trainers else None
        answers = yield from r.ask(
            lambda reply: _check_losses(reply, count),
            stage=MessageType.QUERY,
            clients=uploads if asks_trainers else r.registry.nodes_of(validators),
            arrays=record_of(candidates.weights),
            config=offsets,
        )
        answers = self.screening.drop(answers, screen_losses)
        metrics: dict[str, float] = {"losses-accepted": len(answers)}
        for reason, refused in sorted(answers.rejected.items()):
            metrics[f"losses-rejected-{reason}"] = refused
        infinite = [math.inf] * count
        if self.screening.is_robust:  # numbers of examples are claims
            return trimmed_losses(answers.values, self.screening.malicious) or infinite, metrics
        trained_on = dict(zip(uploads.nodes, uploads.counts, strict=True))
        counts = [trained_on.get(answer.node, answer.num_examples) for answer in answers]
        return mean_losses(answers.values, counts) or infinite, metrics


class NTKFL(KernelStrategy):
    """NTK-FL (Yue et al. 2022, section 4.1). Clients are :class:`~fedntk.clients.NTKFLClient`.

    Examples
    --------
    >>> strategy = NTKFL(learning_rate=0.01, min_train_nodes=10, min_completed=5)
    >>> strategy.steps[0], strategy.steps[-1]
    (0.0, 2000.0)
    """

    client = "NTKFLClient"
    replies = "Jacobians"
    takes_real_targets = True

    real_targets: bool = argument(
        "whether clients have real targets, standardised, not classes; for the loss mse",
        default=False,
    )

    def check(self) -> None:
        """Refuse real targets without least squares."""
        if self.real_targets and self.loss != "mse":
            raise ValueError(f"real_targets: expected the loss mse, got {self.loss}")

    def gather(self, r: Round) -> Rounds[Gathered]:
        """Return the clients with rows that are used, and these (step 2)."""
        weights = {name: torch.from_numpy(array) for name, array in r.model.items()}
        shapes = {name: tensor.shape for name, tensor in weights.items()}

        def parse(reply: Reply) -> JacobianUpload:
            upload = JacobianUpload.from_arrays(
                reply.arrays(), parameters=shapes, weights=weights, real_targets=self.real_targets
            )
            return upload.claimed(reply.num_examples)

        uploads = yield from r.ask(parse)
        uploads = screen_rows(uploads, self.screening)
        return uploads, uploads.values

    def pool(self, rows: Sequence[JacobianUpload]) -> tuple[JacobianUpload, dict[str, float]]:
        """Stack the clients' rows: eq. (8)."""
        return stack(rows), {}


def screen_rows(uploads: Uploads[JacobianUpload], screening: Screening) -> Uploads[JacobianUpload]:
    """Drop rows far from the others', and those without which the others' loss would be lower.

    If the rule is to find these and none can be judged, all are dropped.
    """
    uploads = screening.drop(uploads, screen_uploads)
    if not screening.is_robust:
        return uploads
    try:
        verdicts = screen_harmful(uploads.values, screening.malicious)
    except UNUSABLE as error:
        logger.warning("clients cannot be judged: %s", error)
        return uploads.keep(())
    return uploads.judge(verdicts)


def stack(rows: Sequence[JacobianUpload]) -> JacobianUpload:
    """Stack the rows of several uploads; NotEnoughMemory if they are too many."""
    require_memory(
        2 * sum(upload.jacobian.nbytes for upload in rows),
        f"the global Jacobian of {len(rows)} clients",
        cure="sample fewer clients a round, or have them send structure='factored'",
    )
    return rows[0] if len(rows) == 1 else JacobianUpload.concatenate(rows)


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
            pace = seconds / max(1, step.products)
            if pace * step.expected > SHORT:
                message = "%s, will take roughly %d products of %.2g s, %.0f s"
                logger.info(message, self._what, step.expected, pace, pace * step.expected)
        elif now - self._said > SHORT:
            self._said = now
            message = "%s: t = %.3g of %g after %d products and %.0f s"
            logger.info(message, self._what, step.time, step.end, step.products, seconds)
            if seconds > LONG and not self._advised:
                self._advised = True
                logger.warning("%s takes more than %d s%s", self._what, LONG, EXPENSIVE)


def _check_losses(reply: Reply, count: int) -> NDArray[np.float64]:
    losses = reply.metrics.get(wire.LOSSES)
    if not isinstance(losses, list) or len(losses) != count:
        raise BadReply("losses", f"expected {count} losses, got {str(losses)[:80]}")
    values = np.array(losses, dtype=np.float64)
    if (values < 0).any() or not np.isfinite(values).any():
        raise BadReply("losses", f"expected losses of at least 0, some finite, got {losses}")
    if (np.isfinite(values) & (values > LARGEST_LOSS)).any():
        raise BadReply("losses", f"expected finite losses of at most {LARGEST_LOSS:g}")
    return values
