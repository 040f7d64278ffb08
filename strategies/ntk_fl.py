"""Server of NTK-FL: builds the global tangent kernel and evolves the weights.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.1:

    H^(k) = (1/C) <J_i, J_j>_F over the examples of the sampled clients      eq. (6), (8)
    f^(k,t) = evolution of f^(k) under H^(k)                                 eq. (9a)
    w^(k,t) = w^(k) + J^T R^(k,t)                                            eq. (9b), (10)
    t^(k) = argmin over t_1 ... t_Psi of L(f(w^(k,t); X^(k)); Y^(k))         eq. (11a)
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, Literal, get_args

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
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import (
    BadReply,
    Evolution,
    Jacobian,
    JacobianUpload,
    Loss,
    evolve,
    loss_value,
    require_memory,
)
from fedntk.ntk.evolution import stack_candidates
from fedntk.ntk.jacobian import DenseBlock
from fedntk.ntk.losses import check_loss
from fedntk.ntk.payloads import screen_uploads

from .replies import Reply
from .seeded_fedavg import SeededFedAvg, logger

__all__ = ["DEFAULT_STEPS", "NTKFL", "Selection"]

DEFAULT_STEPS = (*range(100, 1001, 100), 1500, 2000)
LARGEST_LOSS = 1e30  # a client's; float32's infinity and more count as infinite
Selection = Literal["clients", "linearised", "validation"]


class NTKFL(SeededFedAvg):
    """NTK-FL (Yue et al. 2022, section 4.1). Clients are :class:`~fedntk.clients.NTKFLClient`.

    Parameters
    ----------
    learning_rate : float
        eta.
    steps : sequence of int
        The grid t_1 ... t_Psi of update steps to choose from: eq. (11a).
    loss : {"cross-entropy", "mse"}
        Loss that evolves; the clients' must be the same.
    selection : {"clients", "linearised", "validation"}
        How t is chosen.

        * ``"clients"``, the default and the paper's rule: the sampled clients report the true
          network's loss at each candidate, in one more exchange. Only the true network shows
          where the linearisation stops being good (remark 1).
        * ``"linearised"``: the loss of the evolved outputs f^(k,t), with no further exchange. Under
          gradient flow that loss never rises with t, so this takes the last step, unless the sum
          of eq. (10) or a coarse tolerance breaks the flow: use it with a grid that is safe.
        * ``"validation"``: the loss on examples that nobody trains on, which the paper suggests:
          `validation_loss` on the server, or the clients in `validation_partitions`.
    validation_loss : callable, optional
        ``ArrayRecord -> float``, the true network's loss on the server's validation examples.
    validation_partitions : sequence of int
        Partitions that are never sampled for training and report the candidates' losses.
    kernel : {"mean", "full"}
        One kernel for all outputs, as in the paper, or all outputs coupled.
    residuals : {"integral", "sum"}
        The residual's integral over t, or eq. (10)'s sum to the letter.
    tolerance : float
        Of the solver: see :func:`fedntk.ntk.evolve`.
    memory_budget : int, optional
        Bytes that the mean kernel may take before it is left unbuilt: see there.
    device : torch.device or str
        Where kernel and evolution are computed.
    **fedavg_options
        Of :class:`SeededFedAvg` (seed, min_completed) and of Flower's FedAvg.

    Raises
    ------
    ValueError
        If an argument is out of range or two do not fit together.

    Examples
    --------
    >>> strategy = NTKFL(learning_rate=0.01, min_train_nodes=10, min_completed=5)
    >>> strategy.steps[-2:]
    (1500, 2000)
    """

    def __init__(
        self,
        *,
        learning_rate: float,
        steps: Sequence[int] = DEFAULT_STEPS,
        loss: Loss = "cross-entropy",
        selection: Selection = "clients",
        validation_loss: Callable[[ArrayRecord], float] | None = None,
        validation_partitions: Sequence[int] = (),
        kernel: Literal["mean", "full"] = "mean",
        residuals: Literal["integral", "sum"] = "integral",
        tolerance: float = 1e-4,
        memory_budget: int | None = None,
        device: torch.device | str = "cpu",
        **fedavg_options: Any,
    ) -> None:
        super().__init__(held_out=validation_partitions, **fedavg_options)
        self.learning_rate = learning_rate
        self.steps = tuple(steps)
        self.loss = check_loss(loss)
        if selection not in get_args(Selection):
            raise ValueError(
                f"selection: expected one of {', '.join(get_args(Selection))}, got {selection!r}"
            )
        self.selection: Selection = selection
        self.validation_loss = validation_loss
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
        self.kernel: Literal["mean", "full"] = kernel
        self.residuals: Literal["integral", "sum"] = residuals
        self.tolerance = tolerance
        self.memory_budget = memory_budget
        self.device = device
        self._grid: Grid | None = None
        one = torch.ones(1, 1)  # refuse bad hyper-parameters now, before any work is lost
        self.evolve(Jacobian((DenseBlock("weight", one[None]),)), 0 * one, one)

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> NTK-FL: %s loss, learning rate %g, t in %s by %s",
            self.loss,
            self.learning_rate,
            self.steps,
            self.selection,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Step 1: broadcast the weights to a sample of the clients."""
        self._grid = grid
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do steps 3 and 4: global Jacobian, kernel, evolution and choice of t."""
        weights = {name: array.numpy() for name, array in self.global_arrays.items()}
        clients, uploads, rejected = self.gather(server_round, replies)
        metrics = self.round_metrics(clients, rejected)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(clients)) or not uploads:
            return None, metrics

        try:
            candidates, linearised = self._candidates(uploads, weights, metrics)
        except (ArithmeticError, RuntimeError, ValueError, MemoryError) as error:
            # what well-formed numbers of the clients can bring about must not end the run
            logger.log(WARNING, "no evolution (%s): the model stays as it was", error)
            return None, metrics
        losses = [
            loss if not math.isnan(loss) else math.inf
            for loss in self._candidate_losses(
                server_round, candidates, linearised, clients, metrics
            )
        ]
        best = int(np.argmin(losses))
        if not math.isfinite(losses[best]):
            logger.log(WARNING, "no candidate has a finite loss: the model stays as it was")
            return None, metrics
        metrics["t"] = float(self.steps[best])
        metrics["candidate-loss"] = losses[best]
        metrics["linearised-loss"] = linearised[best]
        return _candidate(candidates, best), metrics

    def gather(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[list[Reply], list[JacobianUpload], Counter[str]]:
        """Check the replies whole and drop those that cannot be used.

        Returns
        -------
        tuple of list of Reply, list of JacobianUpload, Counter
            The clients whose rows are used; uploads that hold these rows, in an order that does
            not depend on the replies'; how many replies were rejected for which reason.
        """
        shapes = {name: array.shape for name, array in self.global_arrays.items()}
        pairs, rejected = self.accepted(replies, lambda reply: _parsed(reply, shapes))
        return self.stackable(pairs, rejected)

    def stackable(
        self, pairs: list[tuple[Reply, JacobianUpload]], rejected: Counter[str]
    ) -> tuple[list[Reply], list[JacobianUpload], Counter[str]]:
        """Drop uploads that do not go with the others' (``screen_uploads``)."""
        clients, uploads = [], []
        verdicts = screen_uploads([upload for _, upload in pairs])
        for (reply, upload), verdict in zip(pairs, verdicts, strict=True):
            if verdict is None:
                clients.append(reply)
                uploads.append(upload)
            else:
                rejected[verdict.reason] += 1
                logger.log(WARNING, "dropped the reply of node %d: %s", reply.node, verdict)
        return clients, uploads, rejected

    def _candidates(
        self,
        uploads: Sequence[JacobianUpload],
        weights: Mapping[str, NDArray[Any]],
        metrics: MetricRecord,
    ) -> tuple[dict[str, NDArray[Any]], list[float]]:
        """Weights w^(k,t) for each t, stacked, and the losses of f^(k,t)."""
        require_memory(
            2 * sum(upload.jacobian.nbytes for upload in uploads),
            f"the global Jacobian of {len(uploads)} clients",
            cure="sample fewer clients a round, or have them send wire='factored'",
        )
        whole = self.pooled(uploads, metrics)
        jacobian = whole.jacobian.to(self.device)
        outputs, targets = whole.outputs.to(self.device), whole.targets.to(self.device)
        evolution = self.evolve(jacobian, outputs, targets)
        metrics["kernel-products"] = evolution.kernel_products
        metrics["solver-steps"] = evolution.solver_steps
        metrics["solver-error-estimate"] = evolution.error_estimate
        updates = [jacobian.vjp(residuals) for residuals in evolution.residuals]
        linearised = [loss_value(f, targets, self.loss) for f in evolution.outputs]
        return stack_candidates(weights, updates), linearised

    def pooled(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> JacobianUpload:
        """Stack the rows of the uploads: eq. (8)."""
        return uploads[0] if len(uploads) == 1 else JacobianUpload.concatenate(uploads)

    def evolve(self, jacobian: Jacobian, outputs: torch.Tensor, targets: torch.Tensor) -> Evolution:
        """Evolve with the strategy's hyper-parameters: see :func:`fedntk.ntk.evolve`."""
        return evolve(
            jacobian,
            outputs,
            targets,
            loss=self.loss,
            learning_rate=self.learning_rate,
            steps=self.steps,
            kernel=self.kernel,
            residuals=self.residuals,
            tolerance=self.tolerance,
            memory_budget=self.memory_budget,
        )

    def _candidate_losses(
        self,
        server_round: int,
        candidates: Mapping[str, NDArray[Any]],
        linearised: list[float],
        clients: Sequence[Reply],
        metrics: MetricRecord,
    ) -> list[float]:
        """Loss that eq. (11a) compares, for each candidate, by the chosen rule."""
        if self.selection == "linearised":
            return linearised
        if self.validation_loss is not None:
            return [
                float(self.validation_loss(_candidate(candidates, i)))
                for i in range(len(self.steps))
            ]
        if self.selection == "clients":
            nodes = [client.node for client in clients]
        else:
            nodes = [n for n, partition in self.partitions.items() if partition in self.held_out]
        return self._ask_for_losses(server_round, candidates, nodes, clients, metrics)

    def _ask_for_losses(
        self,
        server_round: int,
        candidates: Mapping[str, NDArray[Any]],
        nodes: Sequence[int],
        clients: Sequence[Reply],
        metrics: MetricRecord,
    ) -> list[float]:
        """Mean of the candidates' losses over the nodes' examples; infinite if none answers."""
        if self._grid is None:
            raise RuntimeError("aggregate_train: call configure_train first, which sets the grid")
        record = RecordDict(
            {
                self.arrayrecord_key: ArrayRecord(
                    {name: Array(rows) for name, rows in candidates.items()}
                ),
                self.configrecord_key: ConfigRecord({"server-round": server_round}),
            }
        )
        instructions = self.messages(record, list(nodes), MessageType.QUERY, self._grid)
        answers = self._grid.send_and_receive(instructions, timeout=self.query_timeout)
        pairs, rejected = self.accepted(answers, lambda reply: _losses(reply, len(self.steps)))
        metrics["losses-accepted"] = len(pairs)
        for reason, refused in sorted(rejected.items()):
            metrics[f"losses-rejected-{reason}"] = refused
        examples = {client.node: client.num_examples for client in clients}
        total, count = np.zeros(len(self.steps)), 0
        for reply, losses in pairs:
            weight = examples.get(reply.node, reply.num_examples)
            total += weight * losses
            count += weight
        return [float(value) / count if count else math.inf for value in total]


def _parsed(reply: Reply, shapes: Mapping[str, tuple[int, ...]]) -> JacobianUpload:
    arrays = list(reply.arrays().values())
    return of_its_size(JacobianUpload.from_arrays(arrays, parameters=shapes), reply)


def of_its_size(upload: JacobianUpload, reply: Reply) -> JacobianUpload:
    """Return the upload if it has as many examples as its client claims; else BadReply."""
    if upload.jacobian.num_examples != reply.num_examples:
        raise BadReply(
            "num-examples", f"claims {reply.num_examples} and sends {upload.jacobian.num_examples}"
        )
    return upload


def _candidate(candidates: Mapping[str, NDArray[Any]], row: int) -> ArrayRecord:
    return ArrayRecord({name: Array(rows[row, ...]) for name, rows in candidates.items()})


def _losses(reply: Reply, count: int) -> NDArray[np.float64]:
    losses = reply.metrics.get("losses")
    if not isinstance(losses, list) or len(losses) != count:
        raise BadReply("losses", f"expected {count} losses, got {str(losses)[:80]}")
    values = np.array(losses, dtype=np.float64)
    if (values < 0).any() or not np.isfinite(values).any():
        raise BadReply("losses", f"expected losses of at least 0, some finite, got {losses}")
    if (np.isfinite(values) & (values > LARGEST_LOSS)).any():
        raise BadReply("losses", f"expected finite losses of at most {LARGEST_LOSS:g}")
    return values
