"""Server of CP-NTK-FL: NTK-FL's, for clients that sample, project, compress or shuffle.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2. The evolution is NTK-FL's, eq. (6)-(11), of the Jacobian at the sampled, projected inputs.
Rows are sorted by their bytes before any sum, so that the update, a sum over rows, has the same
bits whether and however they were permuted.
"""

from collections.abc import Sequence
from logging import getLogger
from typing import Any

import numpy as np

from fedntk.ntk import BadReply, CompressedUpload, JacobianUpload, UploadLimits, loss_value
from fedntk.ntk.options import argument, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.compression import CompressionOptions, check_compression
from fedntk.ntk.payloads.screening import MemoryBudget

from ..core.channel import Rounds
from ..core.replies import Reply
from ..core.round import Round
from ..core.trust_protocols import Shuffles
from ..core.uploads import Uploads
from .ntk_fl import Gathered, KernelStrategy, screen_rows, stack

logger = getLogger("flwr")


class CPNTKFL(KernelStrategy):
    """CP-NTK-FL (Yue et al. 2022, section 4.2). Clients are :class:`~fedntk.clients.CPNTKFLClient`.

    Every tool is optional. Sampling, projection and compression are the clients' work; the server
    refuses what is more than it asks for.
    """

    client = "CPNTKFLClient"
    replies = "compressed Jacobians"

    sparsity: float = CompressionOptions.options()["sparsity"].field()
    bits: int = CompressionOptions.options()["bits"].field()
    shuffling_server: Shuffles | None = argument(
        "opens the clients' sealed uploads and returns their rows, permuted, such as "
        "fedntk.trust.RemoteShufflingServer, or ShufflingServer in a simulation",
        default=None,
    )
    was_shuffled: bool = state(bool, saved=False)  # whether the shuffling server has answered

    def check(self) -> None:
        """Refuse options that do not go together."""
        check_compression(self.sparsity, self.bits)
        if self.shuffling_server is None:
            return
        if not self.run:
            raise ValueError("shuffling_server: name the training run with run=...")
        if self.screening.is_robust:
            raise ValueError(
                "screening.rule: shuffled rows do not say whose they are; expected none with a "
                f"shuffling_server, got {self.screening.rule}"
            )
        if self.centre is not None:
            raise ValueError(
                "centre asks each client for a sum of its examples, which helps to tell rows "
                "apart; leave it out with a shuffling_server"
            )

    def further_settings(self) -> dict[str, Any]:
        """Return whether rows are shuffled."""
        return {"shuffled": self.shuffling_server is not None}

    def gather(self, r: Round) -> Rounds[Gathered]:
        """Decode uploads within the limits, or have the shuffling server permute their rows."""
        shapes = {name: list(array.shape) for name, array in r.arrays.items()}
        limits = UploadLimits(shapes, self.max_examples, self.sparsity, self.bits)
        if self.shuffling_server is not None:
            sealed = yield from r.ask(_read_sealed)
            return self._shuffled(r, sealed, limits)
        budget = MemoryBudget()  # of all uploads of the round together

        def parse(reply: Reply) -> JacobianUpload:
            upload = CompressedUpload.from_arrays(reply.arrays(), limits)
            return budget.hold(upload.claimed(reply.num_examples))

        uploads = yield from r.ask(parse)
        uploads = screen_rows(uploads, self.screening)
        return uploads, uploads.values

    def _shuffled(self, r: Round, sealed: Uploads[bytes], limits: UploadLimits) -> Gathered:
        """Have the shuffling server check, pool and permute the rows.

        Its answer is checked like any other.
        """
        try:
            shuffled = self.shuffling_server.shuffle(  # type: ignore[union-attr]
                sealed.values,
                limits=limits,
                run=self.run,
                server_round=r.number,
                num_examples=sealed.counts,
            )
            verdicts = [shuffled.rejected.get(i) for i in range(len(sealed))]
            if shuffled.upload is None:
                raise ValueError(shuffled.message)
            judged = zip(sealed.counts, verdicts, strict=True)
            count = sum(examples for examples, bad in judged if bad is None)
            if unknown := sorted(shuffled.rejected.keys() - set(range(len(sealed)))):
                raise ValueError(f"it refused uploads {unknown} of {len(sealed)}")
            if len(shuffled.upload.outputs) != count:
                raise ValueError(f"{len(shuffled.upload.outputs)} rows for {count} examples")
        except Exception as error:  # whatever a server elsewhere may do
            if isinstance(error, ConnectionError) and not self.was_shuffled:
                raise  # before anything was trained
            r.channel.last_refusal = f"nothing came from the shuffling server: {error}"
            logger.warning("%s", r.channel.last_refusal)
            return sealed.keep(()).with_rejected({"shuffling": len(sealed)}), []
        self.was_shuffled = True
        return sealed.judge(verdicts), [shuffled.upload]

    def pool(self, rows: Sequence[JacobianUpload]) -> tuple[JacobianUpload, dict[str, float]]:
        """Stack the clients' rows, and sort them by their bytes."""
        pooled = stack(rows).canonical()
        if self.shuffling_server is None:
            return pooled, {}
        return pooled, {wire.TRAIN_LOSS: loss_value(pooled.outputs, pooled.targets, self.loss)}


def _read_sealed(reply: Reply) -> bytes:
    arrays = list(reply.arrays().values())
    if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
        raise BadReply("sealed", "expected one array of bytes, sealed for the shuffling server")
    return arrays[0].tobytes()
