"""The shuffling server, which hides from the aggregation server whose row is whose.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2: rows of the Jacobians, network states and labels are permuted in synchronisation, across
clients, so that the update J^T R, eq. (9b), stays the same. The paper leaves the rest open; this
module's choices:

* Clients seal their uploads to the shuffling server, and the aggregation server hands them over.
  An upload opens in its run and round alone, and a round's rows are given out once: those of one
  client could be told by asking again without it.
* The permutation comes from the operating system's entropy.
* Uploads are checked here, since the aggregation server no longer can.
* What is to be shuffled is compressed row by row: numbers quantised on one scale, or dropped under
  one threshold, would show which rows are one client's.

What it does not hide: how long each sealed upload is, and so about how many rows it holds; which
uploads were refused, and why. The server trusts the aggregation server to hand over uploads of its
clients, not of its own making: anyone can seal one. It forgets which rounds were given out when it
is started again.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedntk.ntk import BadReply, CompressedUpload, JacobianUpload, NotEnoughMemory, UploadLimits
from fedntk.ntk.payloads import MemoryBudget, from_npy, screen_uploads, to_npy

from .sealing import SealError, check_run, frame, new_key, public_bytes, seal, unframe, unseal

__all__ = ["Shuffled", "ShufflingServer", "seal_upload"]


@dataclass(frozen=True, eq=False)
class Shuffled:
    """What the shuffling server gives out for a round.

    Attributes
    ----------
    upload : JacobianUpload or None
        Rows of all accepted uploads, in random order; None if too few were accepted.
    rejected : dict of int to BadReply
        Index of a sealed upload, as handed over -> why it was dropped.
    accepted : int
        Number of uploads that could be used.
    message : str
        Why there is no upload; empty if there is one.
    """

    upload: JacobianUpload | None
    rejected: dict[int, BadReply]
    accepted: int
    message: str = ""

    def to_bytes(self) -> bytes:
        """Write all of it: JSON, then the upload's arrays."""
        head = {
            "rejected": [[i, bad.reason, bad.detail] for i, bad in sorted(self.rejected.items())],
            "accepted": self.accepted,
            "message": self.message,
        }
        arrays = [] if self.upload is None else self.upload.to_arrays()
        return frame([json.dumps(head).encode(), *map(to_npy, arrays)])

    @classmethod
    def from_bytes(cls, data: bytes, *, parameters: Mapping[str, Sequence[int]]) -> Self:
        """Read and check what :meth:`to_bytes` wrote.

        Raises
        ------
        ValueError
            If these are not such bytes, or the upload does not fit the model's `parameters`.
        """
        head, *arrays = unframe(data)
        fields = json.loads(head)
        return cls(
            JacobianUpload.from_arrays([from_npy(array) for array in arrays], parameters=parameters)
            if arrays
            else None,
            {int(i): BadReply(reason, detail) for i, reason, detail in fields["rejected"]},
            int(fields["accepted"]),
            str(fields["message"]),
        )


def seal_upload(
    arrays: Sequence[NDArray[Any]], public_key: bytes, *, run: str, server_round: int
) -> NDArray[np.uint8]:
    """Seal a client's upload for the shuffling server, for one run and round.

    Parameters
    ----------
    arrays : sequence of ndarray
        Of a :class:`~fedntk.ntk.CompressedUpload`.
    public_key : bytes
        The shuffling server's, 32 raw bytes, from a source other than the aggregation server.
    run : str
        Name of the run, 1 to 255 bytes.
    server_round : int
        The round.

    Returns
    -------
    ndarray of uint8
        One array, which travels as any other.

    Raises
    ------
    SealError
        If key or run are malformed, or the arrays take 2 GiB or more.
    """
    sealed = seal(frame(map(to_npy, arrays)), public_key, _binding(run, server_round))
    return np.frombuffer(sealed, np.uint8)


class ShufflingServer:
    """The third party that pools the uploads of a round and permutes their rows.

    Parameters
    ----------
    private_key : X25519PrivateKey, optional
        A new one by default.
    min_clients : int
        With fewer good uploads nothing is given out: among one client's rows there is nothing to
        hide in.

    Attributes
    ----------
    public_key : bytes
        32 raw bytes, for :func:`seal_upload`.

    Raises
    ------
    ValueError
        If `min_clients` is less than 2.
    """

    def __init__(
        self, private_key: X25519PrivateKey | None = None, *, min_clients: int = 2
    ) -> None:
        if min_clients < 2:
            raise ValueError(f"min_clients: expected at least 2, got {min_clients}")
        self._private_key = private_key or new_key()
        self.public_key = public_bytes(self._private_key)
        self.min_clients = min_clients
        self._given_out: set[bytes] = set()  # rounds
        self._one_at_a_time = Lock()

    def shuffle(
        self,
        sealed: Sequence[bytes],
        *,
        limits: UploadLimits,
        run: str,
        server_round: int,
        num_examples: Sequence[int] | None = None,
    ) -> Shuffled:
        """Open the uploads of a round and return all their rows, permuted.

        Uploads that cannot be used are dropped, whatever they hold.

        Parameters
        ----------
        sealed : sequence of bytes
            From :func:`seal_upload`, one for each client.
        limits : UploadLimits
            Of what a client may send.
        run : str
            Name of the run.
        server_round : int
            The round.
        num_examples : sequence of int, optional
            How many examples each client claims to have sent: uploads of another number are
            dropped.

        Returns
        -------
        Shuffled
            Rejected uploads have the reason ``"sealed"`` (does not open), ``"replayed"`` (came
            twice), ``"arrays"`` (holds something else),
            ``"num-examples"``, ``"memory"``, ``"malformed"``, or one of
            :meth:`fedntk.ntk.CompressedUpload.from_arrays` or ``screen_uploads``.

        Raises
        ------
        SealError
            If the name of the run is malformed.
        """
        info = _binding(run, server_round)
        with self._one_at_a_time:
            if info in self._given_out:
                return Shuffled(
                    None,
                    {},
                    0,
                    f"round {server_round} of {run!r} was given out before, once for all",
                )
            uploads, rejected = self._accepted(sealed, num_examples, info, limits)
            if len(uploads) < self.min_clients:
                return Shuffled(
                    None,
                    rejected,
                    len(uploads),
                    f"nothing was shuffled: expected the good uploads of {self.min_clients} "
                    f"clients or more, got {len(uploads)}; sample more clients a round",
                )
            pooled = JacobianUpload.concatenate(list(uploads.values()))
            order = list(range(len(pooled.outputs)))
            secrets.SystemRandom().shuffle(order)
            shuffled = Shuffled(pooled.rows(torch.tensor(order)), rejected, len(uploads))
            self._given_out.add(info)
        return shuffled

    def _accepted(
        self,
        sealed: Sequence[bytes],
        num_examples: Sequence[int] | None,
        info: bytes,
        limits: UploadLimits,
    ) -> tuple[dict[int, JacobianUpload], dict[int, BadReply]]:
        """Open the uploads; those that can be used, and why others cannot, by their index."""
        uploads: dict[int, JacobianUpload] = {}
        rejected: dict[int, BadReply] = {}
        budget, seen = MemoryBudget(), set[bytes]()
        for i, data in enumerate(sealed):
            try:
                if data in seen:
                    raise BadReply("replayed", "the same sealed bytes came before")
                seen.add(data)
                upload = self._opened(data, info, limits)
                if num_examples is not None and num_examples[i] != upload.jacobian.num_examples:
                    raise BadReply("num-examples", "claims another number of examples than it has")
                uploads[i] = budget.hold(upload)
            except BadReply as error:
                rejected[i] = error
        for i, verdict in zip(list(uploads), screen_uploads(list(uploads.values())), strict=True):
            if verdict is not None:
                rejected[i] = verdict
                del uploads[i]
        return uploads, rejected

    def _opened(self, data: bytes, info: bytes, limits: UploadLimits) -> JacobianUpload:
        try:
            opened = unseal(data, self._private_key, info)
        except SealError as error:
            raise BadReply("sealed", str(error)) from None
        try:
            arrays = [from_npy(part) for part in unframe(opened)]
        except Exception as error:  # whatever hostile bytes provoke
            raise BadReply("arrays", f"the sealed bytes hold no arrays: {error}") from error
        try:
            return CompressedUpload.from_arrays(arrays, limits)
        except BadReply:
            raise
        except Exception as error:  # whatever hostile bytes provoke
            reason = "memory" if isinstance(error, NotEnoughMemory) else "malformed"
            raise BadReply(reason, str(error)) from error


def _binding(run: str, server_round: int) -> bytes:
    check_run(run)
    return json.dumps(["fedntk upload 1", run, server_round]).encode()
