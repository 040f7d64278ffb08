"""Server of CP-NTK-FL: NTK-FL's, for clients that compress, project, shuffle or add noise.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2. The evolution is NTK-FL's, eq. (6)-(11), of the Jacobian at the sampled, projected inputs.
Rows are sorted by their bytes before any sum, so that the update, a sum over rows, has the same
bits whether and however they were permuted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedntk.ntk import BadReply, CompressedUpload, JacobianUpload, UploadLimits, loss_value
from fedntk.ntk.payloads import UNQUANTISED, MemoryBudget, check_privacy

from ..core.base import BaseStrategy
from ..core.exchange import logger
from ..core.replies import Reply
from ..core.trust_protocols import Shuffles
from .accounting import epsilon_after
from .ntk_fl import NTKFL, Gathered, matching

__all__ = ["CPNTKFL"]


class CPNTKFL(NTKFL):
    """CP-NTK-FL (Yue et al. 2022, section 4.2). Clients are :class:`~fedntk.clients.CPNTKFLClient`.

    Every tool is optional. Sampling, projection, noise and compression are the clients' work; the
    server says what it asks for, and refuses what is more.

    Parameters
    ----------
    sparsity : float
        An upload with a tensor of which fewer numbers were dropped is refused.
    bits : int
        So is one with more bits a number.
    shuffling_server : Shuffles, optional
        Opens the clients' sealed uploads and returns their rows, permuted, such as
        :class:`fedntk.trust.RemoteShufflingServer`, whose process this server cannot see into, or,
        in a simulation, ``ShufflingServer``.
    noise_multiplier, label_noise : float
        The clients', for the accounting of their differential privacy; a client with other noise
        is refused. The metric ``epsilon`` is that of the client which was asked for most uploads,
        or, if nodes report no partition id, of one that was asked each round;
        ``epsilon-without-labels`` its name where labels have no noise. Takes Opacus.
    delta : float
        At which epsilon is reported.
    **ntk_fl_options
        Of :class:`NTKFL`, such as learning_rate, and of
        :class:`~fedntk.strategies.BaseStrategy`, such as key_server (for projected inputs) and
        run.

    Raises
    ------
    ValueError
        If an argument is out of range or two do not fit together.

    Examples
    --------
    >>> strategy = CPNTKFL(learning_rate=0.01, sparsity=0.5, bits=6)
    >>> strategy.bits
    6
    """

    client = "CPNTKFLClient"
    replies = "compressed Jacobians"

    def __init__(
        self,
        *,
        sparsity: float = 0.0,
        bits: int = UNQUANTISED,
        shuffling_server: Shuffles | None = None,
        noise_multiplier: float = 0.0,
        label_noise: float = 0.0,
        delta: float = 1e-5,
        **ntk_fl_options: Any,
    ) -> None:
        super().__init__(**ntk_fl_options)
        self.sparsity = sparsity
        self.bits = bits
        self.shuffling_server = shuffling_server
        self.noise_multiplier = noise_multiplier
        self.label_noise = label_noise
        self.delta = delta
        self._asked_before: Counter[int] = Counter()  # partition -> uploads, of a loaded state
        self._asked: Counter[int] = Counter()  # node -> uploads
        self.rounds_asked = 0
        self._num_outputs = 0  # known with the first upload
        self._was_shuffled = False
        UploadLimits({}, sparsity=sparsity, bits=bits)  # refuses what is out of range
        check_privacy(1.0 if noise_multiplier else 0.0, noise_multiplier, label_noise)
        if not 0 < delta < 1:
            raise ValueError(f"delta: expected 0 < delta < 1, got {delta}")
        if shuffling_server is not None and not self.run:
            raise ValueError("shuffling_server: name the training run with run=...")
        if noise_multiplier and (self.selection == "clients" or self.validation_partitions):
            raise ValueError(
                "selection='clients' and validation_partitions ask clients for losses of their "
                "examples, which differential privacy does not cover; use selection='linearised' "
                "with a grid that is safe, or validation_loss"
            )
        if self.centre_inputs and (noise_multiplier or shuffling_server is not None):
            raise ValueError(
                "centre_inputs asks each client for a sum of its examples, which differential "
                "privacy does not cover and by which shuffled rows can be told apart; leave it out"
            )
        if noise_multiplier:
            self._epsilon(1, 2)  # is the accountant there?

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        tools = {
            "projected by the key server's seed": self._seeds is not None,
            f"sparsity {self.sparsity:g}": self.sparsity > 0,
            f"{self.bits} bits": self.bits != UNQUANTISED,
            "shuffled": self.shuffling_server is not None,
            f"noise {self.noise_multiplier:g}": self.noise_multiplier > 0,
        }
        words = ", ".join(tool for tool, used in tools.items() if used) or "no tool"
        logger.log(INFO, "\t└──> CP-NTK-FL: %s", words)

    def work_within(self, owner: BaseStrategy, *, everyone: bool) -> None:
        """Share another strategy's clients, without differential privacy.

        Raises
        ------
        ValueError
            With noise: epsilon counts the uploads of one model, and clients would send to several.
        """
        if self.noise_multiplier:
            raise ValueError(
                "noise_multiplier: epsilon is reckoned for the uploads of one model, so expected 0 "
                f"within a {type(owner).__name__}, got {self.noise_multiplier:g}"
            )
        super().work_within(owner, everyone=everyone)

    @property
    def uploads_asked(self) -> Counter[int]:
        """How many uploads each partition was asked for."""
        asked = Counter(self._asked_before)
        for node, count in self._asked.items():
            asked[self.registry.partitions[node]] += count
        return asked

    def settings(self) -> dict[str, Any]:
        """Add the tools'."""
        names = ("sparsity", "bits", "noise_multiplier", "label_noise", "delta")
        shuffled = self.shuffling_server is not None
        own = {name: getattr(self, name) for name in names}
        return {**super().settings(), **own, "shuffled": shuffled}

    def state_dict(self) -> dict[str, Any]:
        """Add how many uploads each partition, and any client, was asked for."""
        asked = {str(partition): count for partition, count in sorted(self.uploads_asked.items())}
        return {
            **super().state_dict(),
            "uploads-asked": asked,
            "rounds-asked": self.rounds_asked,
            "num-outputs": self._num_outputs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._asked_before = Counter({int(k): int(v) for k, v in state["uploads-asked"].items()})
        self._asked = Counter()
        self.rounds_asked = int(state["rounds-asked"])
        self._num_outputs = int(state["num-outputs"])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Step 1: broadcast the weights to a sample of the clients, and count who was asked."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._asked.update(message.metadata.dst_node_id for message in messages)
        self.rounds_asked += bool(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """NTK-FL's steps 3 and 4, and the epsilon spent."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.noise_multiplier and self._num_outputs and metrics is not None:
            name = "epsilon" if self.label_noise else "epsilon-without-labels"
            metrics[name] = self._epsilon(self._most_uploads, self._num_outputs)
        return arrays, metrics

    @property
    def _most_uploads(self) -> int:
        """Of one client, at most: a node that reports no partition may have been another before."""
        if all(node != partition for node, partition in self.registry.partitions.items()):
            return max(self.uploads_asked.values(), default=0)
        return self.rounds_asked

    def _epsilon(self, uploads: int, num_outputs: int) -> float:
        return epsilon_after(
            uploads,
            noise_multiplier=self.noise_multiplier,
            label_noise=self.label_noise,
            num_outputs=num_outputs,
            delta=self.delta,
        )

    def gather(self, server_round: int, replies: Iterable[Message]) -> Gathered:
        """Check and decode the replies, or have the shuffling server do it."""
        limits = UploadLimits(
            {name: list(array.shape) for name, array in self.global_arrays.items()},
            self.max_examples,
            self.sparsity,
            self.bits,
        )
        if self.shuffling_server is not None:
            sealed, rejected = self.accepted(replies, self._sealed, MessageType.TRAIN)
            return self._shuffled(self.shuffling_server, server_round, sealed, limits, rejected)
        budget = MemoryBudget()
        pairs, rejected = self.accepted(
            replies, lambda reply: self._decoded(reply, limits, budget), MessageType.TRAIN
        )
        return self.stackable(pairs, rejected)

    def _decoded(self, reply: Reply, limits: UploadLimits, budget: MemoryBudget) -> JacobianUpload:
        self._require_noise(reply)
        upload = CompressedUpload.from_arrays(list(reply.arrays().values()), limits)
        return budget.hold(matching(reply, upload))

    def _sealed(self, reply: Reply) -> bytes:
        self._require_noise(reply)
        arrays = list(reply.arrays().values())
        if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
            raise BadReply("sealed", "expected one array of bytes, sealed for the shuffling server")
        return arrays[0].tobytes()

    def _require_noise(self, reply: Reply) -> None:
        """Refuse a client whose noise is not what epsilon is reckoned from."""
        own = {"noise-multiplier": self.noise_multiplier, "label-noise": self.label_noise}
        for name, expected in own.items():
            if reply.metrics.get(name, 0.0) != expected:
                raise BadReply(
                    "noise", f"expected {name} = {expected:g}, got {reply.metrics.get(name, 0.0)}"
                )

    def _shuffled(
        self,
        server: Shuffles,
        server_round: int,
        pairs: list[tuple[Reply, bytes]],
        limits: UploadLimits,
        rejected: Counter[str],
    ) -> Gathered:
        """Have the rows pooled and permuted; nothing that comes back is taken on trust."""
        try:
            shuffled = server.shuffle(
                [sealed for _, sealed in pairs],
                limits=limits,
                run=self.run,
                server_round=server_round,
                num_examples=[reply.num_examples for reply, _ in pairs],
            )
            clients = [reply for i, (reply, _) in enumerate(pairs) if i not in shuffled.rejected]
            refused = [(pairs[i][0].node, bad) for i, bad in sorted(shuffled.rejected.items())]
            if shuffled.upload is None:
                raise ValueError(shuffled.message)
            count = sum(reply.num_examples for reply in clients)
            if len(shuffled.upload.outputs) != count or min(shuffled.rejected, default=0) < 0:
                raise ValueError(f"{len(shuffled.upload.outputs)} rows for {count} examples")
        except Exception as error:  # whatever a server elsewhere may do
            if isinstance(error, ConnectionError) and not self._was_shuffled:
                raise  # before anything was trained
            self.last_refusal = f"nothing came from the shuffling server: {error}"
            logger.log(WARNING, "%s", self.last_refusal)
            return [], [], rejected + Counter({"shuffling": len(pairs)})
        self._was_shuffled = True
        for node, bad in refused:
            logger.log(WARNING, "dropped the reply of node %d: %s", node, bad)
        return clients, [shuffled.upload], rejected + Counter(str(b.reason) for _, b in refused)

    def pooled(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> JacobianUpload:
        """Stack the rows of the uploads and sort them by their bytes."""
        whole = super().pooled(uploads, metrics).canonical()
        self._num_outputs = whole.outputs.shape[1]
        if self.shuffling_server is not None and not self.noise_multiplier:
            metrics["train-loss"] = loss_value(whole.outputs, whole.targets, self.flow.loss)
        return whole
