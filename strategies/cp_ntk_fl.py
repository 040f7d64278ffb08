"""Server of CP-NTK-FL: NTK-FL's, for clients that compress, project, shuffle or add noise.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2. The evolution is NTK-FL's, eq. (6)-(11), of the Jacobian at the sampled, projected inputs.
Rows are sorted by their bytes before any sum, so that the update, a sum over rows, has the same
bits whether and however they were permuted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedntk.ntk import (
    UNQUANTISED,
    Asked,
    BadReply,
    CompressedUpload,
    JacobianUpload,
    check_privacy,
)

from .accounting import epsilon_after
from .ntk_fl import NTKFL, of_its_size
from .replies import Reply
from .seeded_fedavg import logger
from .third_parties import Shuffles

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
        :class:`fedntk.trust.ShufflingServer` or ``RemoteShufflingServer``. This server then sees
        no client's upload.
    noise_multiplier, label_noise : float
        The clients', for the accounting of their differential privacy: the metric ``epsilon`` is
        that of the client which was asked for most uploads; ``epsilon-without-labels`` its name
        where labels have no noise. Takes Opacus.
    delta : float
        At which epsilon is reported.
    **ntk_fl_options
        Of :class:`NTKFL`, such as learning_rate, and of :class:`SeededFedAvg`, such as key_server
        (for projected inputs) and run.

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
        self.uploads_asked: Counter[int] = Counter()
        self._num_outputs = 0  # known with the first upload
        Asked({}, sparsity=sparsity, bits=bits)  # refuses what is out of range
        check_privacy(1.0 if noise_multiplier else 0.0, noise_multiplier, label_noise)
        if not 0 < delta < 1:
            raise ValueError(f"delta: expected 0 < delta < 1, got {delta}")
        if shuffling_server is not None and not self.run:
            raise ValueError("shuffling_server: name the training run with run=...")
        if noise_multiplier and self.selection == "clients":
            raise ValueError(
                "selection='clients' asks for losses of the training examples, which their "
                "differential privacy does not cover; use 'linearised' or 'validation'"
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

    def state_dict(self) -> dict[str, Any]:
        """Add how many uploads each partition was asked for."""
        asked = {str(partition): count for partition, count in sorted(self.uploads_asked.items())}
        return {**super().state_dict(), "uploads-asked": asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.uploads_asked = Counter({int(k): int(v) for k, v in state["uploads-asked"].items()})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Step 1: broadcast the weights to a sample of the clients, and count who was asked."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            node = message.metadata.dst_node_id
            self.uploads_asked[self.partitions.get(node, node)] += 1
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """NTK-FL's steps 3 and 4, and the epsilon spent."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.noise_multiplier and self._num_outputs and metrics is not None:
            name = "epsilon" if self.label_noise else "epsilon-without-labels"
            most = max(self.uploads_asked.values(), default=0)
            metrics[name] = self._epsilon(most, self._num_outputs)
        return arrays, metrics

    def _epsilon(self, uploads: int, num_outputs: int) -> float:
        return epsilon_after(
            uploads,
            noise_multiplier=self.noise_multiplier,
            label_noise=self.label_noise,
            num_outputs=num_outputs,
            delta=self.delta,
        )

    def gather(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[list[Reply], list[JacobianUpload], Counter[str]]:
        """Check and decode the replies, or have the shuffling server do it; sort the rows."""
        asked = Asked(
            {name: list(array.shape) for name, array in self.global_arrays.items()},
            self.max_examples,
            self.sparsity,
            self.bits,
        )
        if self.shuffling_server is not None:
            clients, uploads, rejected = self._shuffled(
                self.shuffling_server, server_round, replies, asked
            )
        else:
            pairs, rejected = self.accepted(replies, lambda reply: _decoded(reply, asked))
            clients, uploads, rejected = self.stackable(pairs, rejected)
        if uploads:
            self._num_outputs = uploads[0].outputs.shape[1]
            uploads = [JacobianUpload.concatenate(uploads).canonical()]
        return clients, uploads, rejected

    def _shuffled(
        self,
        shuffling_server: Shuffles,
        server_round: int,
        replies: Iterable[Message],
        asked: Asked,
    ) -> tuple[list[Reply], list[JacobianUpload], Counter[str]]:
        pairs, rejected = self.accepted(replies, _sealed)
        try:
            shuffled = shuffling_server.shuffle(
                [sealed for _, sealed in pairs],
                asked=asked,
                run=self.run,
                server_round=server_round,
                num_examples=[reply.num_examples for reply, _ in pairs],
            )
        except Exception as error:  # whatever a server elsewhere may do
            logger.log(WARNING, "nothing came from the shuffling server: %s", error)
            return [], [], rejected
        for index, verdict in sorted(shuffled.rejected.items()):
            node = pairs[index][0].node
            logger.log(WARNING, "dropped the reply of node %d: %s", node, verdict)
            rejected[verdict.reason] += 1
        if shuffled.message:
            logger.log(WARNING, "%s", shuffled.message)
        clients = [reply for i, (reply, _) in enumerate(pairs) if i not in shuffled.rejected]
        return clients, [] if shuffled.upload is None else [shuffled.upload], rejected


def _decoded(reply: Reply, asked: Asked) -> JacobianUpload:
    return of_its_size(CompressedUpload.parse(list(reply.arrays().values()), asked), reply)


def _sealed(reply: Reply) -> bytes:
    arrays = list(reply.arrays().values())
    if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
        raise BadReply("sealed", "expected one array of bytes, sealed for the shuffling server")
    return arrays[0].tobytes()
