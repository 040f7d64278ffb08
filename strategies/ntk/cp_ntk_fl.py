"""Server of CP-NTK-FL: NTK-FL's, for clients that compress, project, shuffle or add noise.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2. The evolution is NTK-FL's, eq. (6)-(11), of the Jacobian at the sampled, projected inputs.
Rows are sorted by their bytes before any sum, so that the update, a sum over rows, has the same
bits whether and however they were permuted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedntk.ntk import (
    BadReply,
    CompressedUpload,
    JacobianUpload,
    RowNoise,
    UploadLimits,
    loss_value,
)
from fedntk.ntk.noise import Noise
from fedntk.ntk.options import argument, option, refuse_first, state
from fedntk.ntk.payloads.compression import CompressionOptions
from fedntk.ntk.payloads.screening import MemoryBudget

from ..core.exchange import Aggregated, logger
from ..core.replies import Reply
from ..core.saved_state import pack
from ..core.trust_protocols import Shuffles
from .ntk_fl import NTKFL, Gathered


class CPNTKFL(CompressionOptions, NTKFL):
    """CP-NTK-FL (Yue et al. 2022, section 4.2). Clients are :class:`~fedntk.clients.CPNTKFLClient`.

    Every tool is optional. Sampling, projection, noise and compression are the clients' work; the
    server refuses what is more than it asks for.
    """

    client = "CPNTKFLClient"
    replies = "compressed Jacobians"

    shuffling_server: Shuffles | None = argument(
        "opens the clients' sealed uploads and returns their rows, permuted, such as "
        "fedntk.trust.RemoteShufflingServer, or ShufflingServer in a simulation",
        default=None,
    )
    noise_multiplier: float = option(
        "the clients' Gaussian noise over the clipping norm, for the accounting of their "
        "differential privacy (takes Opacus); a client with other noise is refused",
        default=0.0,
        at_least=0,
    )
    label_noise: float = option(
        "share of labels that clients draw at random; without it the metric is "
        "epsilon-without-labels",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    delta: float = option("delta at which epsilon is reported", default=1e-5, above=0, below=1)

    rounds_asked: int = state(int, reset=False)
    _asked_before: Counter[int] = state(Counter, reset=False)  # partition -> uploads, when loaded
    _num_outputs: int = state(int, reset=False)  # known with the first upload

    def __post_init__(self) -> None:
        super().__post_init__()
        self._asked: Counter[int] = Counter()  # node -> uploads
        self._was_shuffled = False
        if self.noise_multiplier:
            self._noise().epsilon(self.delta)  # is the accountant there?

    def check(self) -> None:
        """Refuse options that do not go together."""
        super().check()
        if self.label_noise:
            self._noise()
        shuffled = self.shuffling_server is not None
        rules = {
            "shuffling_server: name the training run with run=...": shuffled and not self.run,
            "defence: shuffled rows do not say whose they are; expected none with a "
            f"shuffling_server, got {self.defence}": shuffled and self.defence != "none",
            "centre_inputs asks each client for a sum of its examples, which helps to tell rows "
            "apart; leave it out with a shuffling_server": self.centre_inputs and shuffled,
        }
        refuse_first(rules)

    @classmethod
    def mechanism_of(cls, options: Any) -> type[Noise] | None:
        """Return what adds noise if there is a noise multiplier."""
        return RowNoise if options.noise_multiplier else None

    def _noise(self) -> RowNoise:
        """Return the clients' noise; the norm that they clip to is not known."""
        return RowNoise(
            clip=1.0, noise_multiplier=self.noise_multiplier, label_noise=self.label_noise
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, which counts all uploads that this object asked for."""
        super().load_state_dict(state)
        self._asked.clear()

    @property
    def uploads_asked(self) -> Counter[int]:
        """Number of uploads that each partition was asked for; -1: nodes of unknown partitions."""
        asked = Counter(self._asked_before)
        for node, count in self._asked.items():
            partition = self.registry.partitions[node]
            asked[-1 if partition == node else partition] += count
        return asked

    def settings(self) -> dict[str, Any]:
        """Add whether rows are shuffled."""
        return {**super().settings(), "shuffled": self.shuffling_server is not None}

    def state_dict(self) -> dict[str, Any]:
        """Add uploads by partition: nodes have other ids after a restart."""
        return {**super().state_dict(), **pack("_asked_before", self.uploads_asked)}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Step 1: broadcast the weights to a sample of the clients, and count who was asked."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._asked.update(message.metadata.dst_node_id for message in messages)
        self.rounds_asked += bool(messages)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """NTK-FL's steps 3 and 4, and the epsilon spent."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.noise_multiplier and self._num_outputs and metrics is not None:
            name = "epsilon" if self.label_noise else "epsilon-without-labels"
            asked = self.uploads_asked
            # a node of an unknown partition may have been another before
            most = self.rounds_asked if asked[-1] else max(asked.values(), default=0)
            metrics[name] = self._noise().epsilon(self.delta, most, self._num_outputs)
        return arrays, metrics

    def gather(self, server_round: int, replies: Iterable[Message]) -> Gathered:
        """Have the shuffling server, if there is one, check, pool and permute the rows.

        Its answer is checked like any other.
        """
        if self.shuffling_server is None:
            return super().gather(server_round, replies)
        pairs, rejected = self.accepted(replies, self._read_sealed, MessageType.TRAIN)
        try:
            shuffled = self.shuffling_server.shuffle(
                [sealed for _, sealed in pairs],
                limits=self._limits(),
                run=self.run,
                server_round=server_round,
                num_examples=[reply.num_examples for reply, _ in pairs],
            )
            verdicts = [shuffled.rejected.get(i) for i in range(len(pairs))]
            if shuffled.upload is None:
                raise ValueError(shuffled.message)
            of_pairs = zip(pairs, verdicts, strict=True)
            count = sum(reply.num_examples for (reply, _), bad in of_pairs if bad is None)
            if unknown := sorted(shuffled.rejected.keys() - set(range(len(pairs)))):
                raise ValueError(f"it refused uploads {unknown} of {len(pairs)}")
            if len(shuffled.upload.outputs) != count:
                raise ValueError(f"{len(shuffled.upload.outputs)} rows for {count} examples")
        except Exception as error:  # whatever a server elsewhere may do
            if isinstance(error, ConnectionError) and not self._was_shuffled:
                raise  # before anything was trained
            self.last_refusal = f"nothing came from the shuffling server: {error}"
            logger.warning("%s", self.last_refusal)
            return [], [], rejected + Counter({"shuffling": len(pairs)})
        self._was_shuffled = True
        pairs = self.apply_screen(pairs, rejected, lambda _, __: verdicts)
        return [reply for reply, _ in pairs], [shuffled.upload], rejected

    def parser(self) -> Callable[[Reply], JacobianUpload]:
        """Decode uploads within the limits, as long as the round's fit in memory together."""
        limits, budget = self._limits(), MemoryBudget()

        def parse(reply: Reply) -> JacobianUpload:
            self._require_noise(reply)
            upload = CompressedUpload.from_arrays(reply.arrays(), limits)
            return budget.hold(upload.claimed(reply.num_examples))

        return parse

    def _limits(self) -> UploadLimits:
        shapes = {name: list(array.shape) for name, array in self.global_arrays.items()}
        return UploadLimits(shapes, self.max_examples, self.sparsity, self.bits)

    def _read_sealed(self, reply: Reply) -> bytes:
        self._require_noise(reply)
        arrays = list(reply.arrays().values())
        if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
            raise BadReply("sealed", "expected one array of bytes, sealed for the shuffling server")
        return arrays[0].tobytes()

    def _require_noise(self, reply: Reply) -> None:
        """Refuse a client whose noise is not what epsilon is reckoned from."""
        own = {"noise-multiplier": self.noise_multiplier, "label-noise": self.label_noise}
        for name, expected in own.items():
            if (told := reply.metrics.get(name, 0.0)) != expected:
                raise BadReply("noise", f"expected {name} = {expected:g}, got {told}")

    def pooled(self, uploads: Sequence[JacobianUpload], metrics: MetricRecord) -> JacobianUpload:
        """Stack the rows of the uploads and sort them by their bytes."""
        whole = super().pooled(uploads, metrics).canonical()
        self._num_outputs = whole.outputs.shape[1]
        if self.shuffling_server is not None and not self.noise_multiplier:
            metrics["train-loss"] = loss_value(whole.outputs, whole.targets, self.flow.loss)
        return whole
