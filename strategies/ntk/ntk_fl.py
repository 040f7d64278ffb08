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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from logging import INFO, WARNING
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import BadReply, JacobianUpload, Loss, NetworkPredictor, Predictor, require_memory
from fedntk.ntk.class_prior import OUTPUT_OFFSET, log_class_prior
from fedntk.ntk.evolution import (
    AUTO,
    AUTO_STEPS,
    Candidates,
    GradientFlow,
    Kernel,
    KernelDtype,
    SolverStep,
    lowest_loss,
    mean_losses,
)
from fedntk.ntk.payloads import Agreement, screen_losses, screen_uploads

from ..core.averaging import named_arrays
from ..core.base import BaseStrategy
from ..core.exchange import logger
from ..core.replies import Reply

__all__ = ["DEFAULT_STEPS", "NTKFL", "Selection"]

DEFAULT_STEPS = (*range(100, 1001, 100), 1500, 2000)
SHORT, LONG = 10, 60  # seconds: what lasts longer is logged, or comes with advice
EXPENSIVE = (
    "; to make rounds cheaper use kernel='mean' (one small matrix), learning_rate='auto', "
    "a smaller last t in steps, fewer clients a round or a sampling_rate on the clients"
)
LARGEST_LOSS = 1e30  # a client's; float32's infinity and more count as infinite
Selection = Literal["clients", "linearised", "validation"]
ClassTarget = Literal["uniform", "seen"]
Gathered = tuple[list[Reply], list[JacobianUpload], Counter[str]]


class NTKFL(BaseStrategy):
    """NTK-FL (Yue et al. 2022, section 4.1). Clients are :class:`~fedntk.clients.NTKFLClient`.

    Parameters
    ----------
    learning_rate : float or "auto"
        eta. ``"auto"``, beyond the paper: in each round ``1 / (s lambda_max)`` of that round's
        kernel, s = 1/n for cross-entropy and 1/(n C) for MSE: see
        :mod:`fedntk.ntk.evolution.learning_rate`. It suits networks of any kind; a rate that suits
        an MLP is far too large for a convolutional network.
    steps : sequence of int, optional
        The grid t_1 ... t_Psi of update steps to choose from: eq. (11a). By default 100, 200 ...
        1000, 1500, 2000; with ``learning_rate="auto"`` 10, 30 ... 10,000.
    allow_no_step : bool
        Whether t = 0, the weights as they are, is a candidate, too: then no round raises the loss
        by which t is chosen. The paper's grid is without it.
    loss : {"cross-entropy", "mse"}
        Loss that evolves; the clients' must be the same.
    selection : {"clients", "linearised", "validation"}
        How t is chosen.

        * ``"clients"``, the default and the paper's rule: the sampled clients report the true
          network's loss at each candidate, in one more exchange. Only the true network shows
          where the linearisation stops being good (remark 1). With three clients or more, losses
          over 100 times the median client's are left out; a minority can still steer the choice
          by losses within that limit.
        * ``"linearised"``: the loss of the evolved outputs f^(k,t), with no further exchange. Under
          gradient flow that loss never rises with t, so this takes the last step, unless the sum
          of eq. (10) or a coarse tolerance breaks the flow: use it with a grid that is safe.
        * ``"validation"``: the loss on examples that nobody trains on, which the paper suggests:
          `validation_loss` on the server, or the clients in `validation_partitions`.
    validation_loss : callable, optional
        ``ArrayRecord -> float``, the true network's loss on the server's validation examples.
    validation_partitions : sequence of int
        Partitions that are never sampled for training and report the candidates' losses.
    class_prior : bool
        Whether the classes' shares among a round's examples are taken out of what is learned from
        them (ours), for cross-entropy: :func:`~fedntk.ntk.class_prior.log_class_prior` is added to
        the outputs that evolve, and to those whose losses choose t. With ``"clients"`` it is sent
        to the round's clients, so that they learn these shares.
    class_target : {"uniform", "seen"}
        What the network then predicts for: classes that are equally common; or as common as they
        were among all examples so far, this round's included.
    kernel : {"mean", "corrected", "full"}
        One kernel for all outputs, as in the paper; the same, but with the outputs of the exact
        linearised network at each of the `steps`, which learns in fewer rounds: keep these few; or
        all outputs coupled: see :class:`~fedntk.ntk.evolution.GradientFlow`.
    residuals : {"integral", "sum"}
        The residual's integral over t, or eq. (10)'s sum to the letter.
    kernel_dtype : {"outputs", "bfloat16"}
        In which the mean kernel is multiplied: see :class:`~fedntk.ntk.evolution.GradientFlow`.
        With ``"bfloat16"`` use a tolerance of 1e-2: its products are no better.
    tolerance : float
        Of the solver: see :func:`fedntk.ntk.evolve`.
    memory_budget : int, optional
        Bytes that the mean kernel may take before it is left unbuilt: see there.
    device : torch.device or str
        Where kernel and evolution are computed.
    **options
        Of :class:`~fedntk.strategies.BaseStrategy` (seed, min_completed) and of Flower's
        FedAvg.

    Raises
    ------
    ValueError
        If an argument is out of range or two do not fit together.

    Examples
    --------
    >>> strategy = NTKFL(learning_rate=0.01, min_train_nodes=10, min_completed=5)
    >>> strategy.steps[0], strategy.steps[-1]
    (0, 2000)
    """

    client = "NTKFLClient"
    replies = "Jacobians"
    centres = True
    combined_by: ClassVar = {
        "kernel-products": sum,
        "solver-steps": sum,
        "solver-error-estimate": max,
        "losses-": sum,  # accepted, rejected
    }

    def __init__(
        self,
        *,
        learning_rate: float | Literal["auto"],
        steps: Sequence[int] | None = None,
        allow_no_step: bool = True,
        loss: Loss = "cross-entropy",
        selection: Selection = "clients",
        validation_loss: Callable[[ArrayRecord], float] | None = None,
        validation_partitions: Sequence[int] = (),
        class_prior: bool = False,
        class_target: ClassTarget = "uniform",
        kernel: Kernel = "mean",
        residuals: Literal["integral", "sum"] = "integral",
        kernel_dtype: KernelDtype = "outputs",
        tolerance: float = 1e-4,
        memory_budget: int | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        held_out = (*options.pop("held_out", ()), *validation_partitions)
        super().__init__(held_out=held_out, **options)
        if steps is None:
            steps = AUTO_STEPS if learning_rate == AUTO else DEFAULT_STEPS
        if allow_no_step and len(steps) and steps[0] > 0:
            steps = (0, *steps)
        if len(steps) and steps[-1] == 0:
            raise ValueError(f"steps: expected at least one t above 0, got {list(steps)}")
        self.flow = GradientFlow(
            loss=loss,
            learning_rate=learning_rate,
            steps=steps,
            kernel=kernel,
            residuals=residuals,
            kernel_dtype=kernel_dtype,
            tolerance=tolerance,
            memory_budget=memory_budget,
        )
        self.steps = tuple(steps)
        self.rounds_without_step = 0
        if class_prior and loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {loss}")
        if class_target not in get_args(ClassTarget):
            raise ValueError(f"class_target: expected 'uniform' or 'seen', got {class_target!r}")
        if class_target == "seen" and not class_prior:
            raise ValueError("class_target: 'seen' goes with class_prior=True, got False")
        self.class_prior, self.class_target = class_prior, class_target
        self._class_counts = torch.zeros(0)  # of all rounds so far
        self._offset: list[float] = []  # of the outputs, in the round at work
        if selection not in get_args(Selection):
            raise ValueError(
                f"selection: expected one of {', '.join(get_args(Selection))}, got {selection!r}"
            )
        self.selection: Selection = selection
        self.validation_loss = validation_loss
        self.validation_partitions = tuple(validation_partitions)
        if (selection == "validation") != (
            validation_loss is not None or len(validation_partitions) > 0
        ):
            raise ValueError(
                "selection='validation' goes with validation_loss or validation_partitions; got "
                f"selection={selection!r} and "
                f"{'one of them' if selection != 'validation' else 'neither'}"
            )
        if validation_loss is not None and len(validation_partitions) > 0:
            raise ValueError("pass validation_loss or validation_partitions, not both")
        self.device = device

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> NTK-FL: %s loss, learning rate %s, t in %s by %s",
            self.flow.loss,
            self.flow.learning_rate,
            self.steps,
            self.selection,
        )

    def agreement(self) -> Agreement:
        """Add the loss."""
        return replace(super().agreement(), loss=self.flow.loss)

    def settings(self) -> dict[str, Any]:
        """Add the flow's, and how t is chosen."""
        flow = {k: v for k, v in asdict(self.flow).items() if k != "memory_budget"}
        own = {name: getattr(self, name) for name in ("selection", "class_prior", "class_target")}
        return {**super().settings(), **flow, **own}

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Count anew, unless a state was loaded."""
        if not done:
            self.rounds_without_step, self._class_counts = 0, torch.zeros(0)
        return super().begin(initial_arrays, num_rounds, done)

    def state_dict(self) -> dict[str, Any]:
        """Add in how many rounds in a row t = 0 won, for the log, and the classes' counts."""
        own = {
            "rounds-without-step": self.rounds_without_step,
            "class-counts": self._class_counts.tolist(),
        }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.rounds_without_step = int(state["rounds-without-step"])
        self._class_counts = torch.tensor(state["class-counts"], dtype=torch.float64)

    def predictor(
        self, arrays: ArrayRecord | Mapping[str, NDArray[Any]], network: nn.Module
    ) -> Predictor:
        """Make the predictor of the newest arrays, with the loss that evolves."""
        return NetworkPredictor.from_arrays(network, named_arrays(arrays), loss=self.flow.loss)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do steps 3 and 4: global Jacobian, kernel, evolution and choice of t."""
        clients, uploads, rejected = self.gather(server_round, replies)
        metrics = self.round_metrics(clients, rejected)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(clients)) or not uploads:
            return None, metrics
        try:
            candidates = self.candidates(uploads, metrics)
        except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
            # what well-formed numbers of the clients can bring about must not end the run
            logger.log(WARNING, "no evolution (%s): the model stays as it was", error)
            return None, metrics
        losses = self.candidate_losses(candidates, clients, metrics)
        best = lowest_loss(losses)
        if best is None:
            logger.log(WARNING, "no candidate has a finite loss: the model stays as it was")
            return None, metrics
        metrics["t"] = float(self.steps[best])
        metrics["learning-rate"] = candidates.evolution.learning_rate
        metrics["candidate-loss"] = losses[best]
        metrics["linearised-loss"] = candidates.linearised_losses[best]
        if self.steps[best] == 0:
            self._say_no_step(candidates)
            return None, metrics
        self.rounds_without_step = 0
        return _record(candidates.weights_at(best)), metrics

    def _say_no_step(self, candidates: Candidates) -> None:
        """Log that t = 0 won; the second time in a row, with what to do."""
        self.rounds_without_step += 1
        logger.log(INFO, "t = 0 has the lowest loss: the model stays as it was")
        if self.rounds_without_step < 2:
            return
        rate, first = candidates.evolution.learning_rate, self.steps[1]
        cure = (
            "give steps below it"
            if self.flow.learning_rate == AUTO
            else "use learning_rate='auto', a lower rate, or steps below it"
        )
        logger.log(
            WARNING,
            "in %d rounds in a row no t lowered the loss: learning rate %g times t = %g, the first "
            "of steps, goes beyond where the network is close to its linearisation; %s",
            self.rounds_without_step,
            rate,
            first,
            cure,
        )

    # ----------------------------------------------------------------- step 2

    def gather(self, server_round: int, replies: Iterable[Message]) -> Gathered:
        """Check the replies whole and drop those that cannot be used.

        Returns
        -------
        tuple of list of Reply, list of JacobianUpload, Counter
            The clients whose rows are used; uploads that hold these rows, in an order that does
            not depend on the replies'; how many replies were rejected for which reason.
        """
        shapes = {name: array.shape for name, array in self.global_arrays.items()}

        def parse(reply: Reply) -> JacobianUpload:
            arrays = list(reply.arrays().values())
            return matching(reply, JacobianUpload.from_arrays(arrays, parameters=shapes))

        pairs, rejected = self.accepted(replies, parse, MessageType.TRAIN)
        return self.stackable(pairs, rejected)

    def stackable(
        self, pairs: list[tuple[Reply, JacobianUpload]], rejected: Counter[str]
    ) -> Gathered:
        """Drop uploads that do not go with the others' (``screen_uploads``)."""
        pairs = self.screened(pairs, rejected, screen_uploads)
        return [reply for reply, _ in pairs], [upload for _, upload in pairs], rejected

    # ----------------------------------------------------------------- step 3

    def candidates(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> Candidates:
        """Weights w^(k,t) for each t, and the losses of f^(k,t)."""
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
        metrics["kernel-products"] = candidates.evolution.kernel_products
        metrics["solver-steps"] = candidates.evolution.solver_steps
        metrics["solver-error-estimate"] = candidates.evolution.error_estimate
        return candidates

    def pooled(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> JacobianUpload:
        """Stack the rows of the uploads: eq. (8)."""
        return uploads[0] if len(uploads) == 1 else JacobianUpload.concatenate(uploads)

    def _class_offset(self, targets: torch.Tensor) -> torch.Tensor:
        """Return what is added to the outputs of a round's examples; zeros without a prior."""
        if not self.class_prior:
            return torch.zeros(targets.shape[1])
        counts = targets.sum(0, dtype=torch.float64).cpu()
        self._class_counts = counts + (self._class_counts if len(self._class_counts) else 0)
        seen = self._class_counts if self.class_target == "seen" else None
        return log_class_prior(targets, seen)

    # ----------------------------------------------------------------- step 4

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
        """Loss that eq. (11a) compares, for each candidate, by the chosen rule."""
        if self.selection == "linearised":
            return candidates.linearised_losses
        if self.validation_loss is not None:
            each = map(candidates.weights_at, range(len(candidates)))
            return [float(self.validation_loss(_record(weights))) for weights in each]
        nodes = [client.node for client in clients]
        if self.selection == "validation":
            nodes = self.registry.nodes_of(self.validation_partitions)
        count = len(candidates)
        pairs, rejected = self.exchange(
            nodes,
            MessageType.QUERY,
            _record(candidates.weights),
            lambda reply: _checked_losses(reply, count),
        )
        pairs = self.screened(pairs, rejected, screen_losses)
        metrics["losses-accepted"] = len(pairs)
        for reason, refused in sorted(rejected.items()):
            metrics[f"losses-rejected-{reason}"] = refused
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
            expected = seconds / max(1, step.products) * step.expected
            if expected > SHORT:
                logger.log(
                    INFO,
                    "%s, will take roughly %d products of %.2g s, %.0f s",
                    self._what,
                    step.expected,
                    seconds / max(1, step.products),
                    expected,
                )
        elif now - self._said > SHORT:
            self._said = now
            message = "%s: t = %.3g of %g after %d products and %.0f s"
            logger.log(INFO, message, self._what, step.time, step.end, step.products, seconds)
            if seconds > LONG and not self._advised:
                self._advised = True
                logger.log(WARNING, "%s takes more than %d s%s", self._what, LONG, EXPENSIVE)


def matching(reply: Reply, upload: JacobianUpload) -> JacobianUpload:
    """Return the upload if it has as many examples as its client claims; else BadReply."""
    if upload.jacobian.num_examples != reply.num_examples:
        raise BadReply(
            "num-examples", f"claims {reply.num_examples} and sends {upload.jacobian.num_examples}"
        )
    return upload


def _record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _checked_losses(reply: Reply, count: int) -> NDArray[np.float64]:
    losses = reply.metrics.get("losses")
    if not isinstance(losses, list) or len(losses) != count:
        raise BadReply("losses", f"expected {count} losses, got {str(losses)[:80]}")
    values = np.array(losses, dtype=np.float64)
    if (values < 0).any() or not np.isfinite(values).any():
        raise BadReply("losses", f"expected losses of at least 0, some finite, got {losses}")
    if (np.isfinite(values) & (values > LARGEST_LOSS)).any():
        raise BadReply("losses", f"expected finite losses of at most {LARGEST_LOSS:g}")
    return values
