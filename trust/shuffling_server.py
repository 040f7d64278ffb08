"""The shuffling server, which hides from the aggregation server who sent which row.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2 and
figure 2: rows of the Jacobians, network states and labels are permuted in synchronisation, across
clients, so that the update J^T R, eq. (9b), stays the same. The paper leaves the rest open; this
module's choices:

* An upload opens only in its run and round. It begins with its sender's enrolled public key, and is
  sealed with what only sender and shuffling server can compute, as in HPKE's authenticated mode.
  Each sender counts once.
* A round's rows are given out once, and none of an earlier round after it: a second time, without
  one client, would show which rows are that client's.
* Clients compress row by row: a common scale or threshold would show which rows belong together.

It does not hide the length of a sealed upload, nor which uploads were refused. It trusts the
enrolled clients. After a restart it has forgotten which rounds were given out.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Self

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedntk.ntk import BadReply, CompressedUpload, JacobianUpload, NotEnoughMemory, UploadLimits
from fedntk.ntk.payloads.screening import MemoryBudget, screen_uploads
from fedntk.ntk.support.arrays import Arrays

from .key_server import Enrolment
from .sealing import KEY_BYTES, SealError, agree, check_run, new_key, public_bytes, seal, unseal
from .wire import frame_arrays, pack, unframe_arrays, unpack


@dataclass(frozen=True, eq=False)
class Shuffled:
    """What the shuffling server gives out for a round."""

    upload: JacobianUpload | None  # rows of all accepted uploads, in random order; None if too few
    rejected: dict[int, BadReply]  # index of a sealed upload, as handed over -> why it was dropped
    accepted: int  # number of uploads
    message: str = ""  # why there is no upload

    def to_bytes(self) -> bytes:
        """Write all of it, the upload as arrays."""
        rejected = [[i, bad.reason, bad.detail] for i, bad in sorted(self.rejected.items())]
        parts = [] if self.upload is None else [frame_arrays(self.upload.to_arrays())]
        head = {"rejected": rejected, "accepted": self.accepted, "message": self.message}
        return pack(head, parts)

    @classmethod
    def from_bytes(cls, data: bytes, *, parameters: Mapping[str, Sequence[int]]) -> Self:
        """Read what :meth:`to_bytes` wrote; check the upload against the model's `parameters`."""
        head, parts = unpack(data)
        arrays = unframe_arrays(parts[0]) if parts else {}
        return cls(
            JacobianUpload.from_arrays(arrays, parameters=parameters) if arrays else None,
            {int(i): BadReply(str(reason), str(detail)) for i, reason, detail in head["rejected"]},
            int(head["accepted"]),
            str(head["message"]),
        )


def seal_upload(
    arrays: Arrays, public_key: bytes, private_key: X25519PrivateKey, run: str, server_round: int
) -> NDArray[np.uint8]:
    """Seal the arrays of a client's :class:`~fedntk.ntk.CompressedUpload`, less than 2 GiB in all.

    They open only for the shuffling server, whose `public_key` must not be from the aggregation
    server. The client's public half, enrolled there, comes first and shows who sent them.
    """
    info = _binding(run, server_round) + agree(private_key, public_key)
    sealed = seal(frame_arrays(arrays), public_key, info)
    return np.frombuffer(public_bytes(private_key) + sealed, np.uint8)


class ShufflingServer(Enrolment):
    """The third party that pools the uploads of a round and permutes their rows.

    Uploads of others than the `enrolled` clients, by public keys of 32 raw bytes, are dropped.
    `public_key` is the public half of its key, for :func:`seal_upload`. With fewer than
    `min_clients` good uploads, 2 at least, nothing is given out: one client's rows cannot hide.
    """

    def __init__(
        self,
        enrolled: Iterable[bytes],
        private_key: X25519PrivateKey | None = None,
        *,
        min_clients: int = 2,
    ) -> None:
        self.enrol(enrolled)
        if min_clients < 2:
            raise ValueError(f"min_clients: expected at least 2, got {min_clients}")
        self._private_key = private_key or new_key()
        self.public_key = public_bytes(self._private_key)
        self.min_clients = min_clients
        self._given_out: dict[str, int] = {}  # run -> its newest round
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

        `sealed` are from :func:`seal_upload`, one of each client, for this `run` and
        `server_round`. Uploads beyond the `limits` are dropped, and those of another number of
        examples than its client claims in `num_examples`. Other reasons are ``"not-enrolled"``,
        ``"replayed"`` (its sender's came before), ``"sealed"`` (does not open), ``"arrays"`` (holds
        something else), ``"memory"``, ``"malformed"``, and those of
        :meth:`fedntk.ntk.CompressedUpload.from_arrays` and ``screen_uploads``.
        """
        if num_examples is not None and len(num_examples) != len(sealed):
            counts = f"{len(sealed)} uploads, got {len(num_examples)}"
            raise SealError(f"num_examples: expected one for each of {counts}")
        info = _binding(run, server_round)
        with self._one_at_a_time:
            if server_round <= self._given_out.get(run, -1):
                message = f"round {server_round} of {run!r}, or a later one, was given out before"
                return Shuffled(None, {}, 0, message)
            uploads, rejected = self._accept(sealed, num_examples, info, limits)
            if (count := len(uploads)) < self.min_clients:
                message = (
                    f"nothing was shuffled: expected the good uploads of {self.min_clients} "
                    f"clients or more, got {count}; sample more clients a round"
                )
                return Shuffled(None, rejected, count, message)
            pooled = JacobianUpload.concatenate(list(uploads.values()))
            order = list(range(len(pooled.outputs)))
            secrets.SystemRandom().shuffle(order)
            rows = pooled.rows(torch.tensor(order))
            self._given_out[run] = server_round
            return Shuffled(rows, rejected, count)

    def _accept(
        self,
        sealed: Sequence[bytes],
        num_examples: Sequence[int] | None,
        info: bytes,
        limits: UploadLimits,
    ) -> tuple[dict[int, JacobianUpload], dict[int, BadReply]]:
        uploads, rejected = dict[int, JacobianUpload](), dict[int, BadReply]()
        budget, senders = MemoryBudget(), set[bytes]()
        for i, data in enumerate(sealed):
            try:
                upload = self._open(data, info, limits, senders)
                if num_examples is not None:
                    upload.claimed(num_examples[i])
                uploads[i] = budget.hold(upload)
            except BadReply as error:
                rejected[i] = error
        for i, verdict in zip(list(uploads), screen_uploads(list(uploads.values())), strict=True):
            if verdict is not None:
                rejected[i] = verdict
                del uploads[i]
        return uploads, rejected

    def _open(
        self, data: bytes, info: bytes, limits: UploadLimits, senders: set[bytes]
    ) -> JacobianUpload:
        reason, sender = "not-enrolled", data[:KEY_BYTES]
        try:
            self.require_enrolled(sender)
            reason = "sealed"
            info += agree(self._private_key, sender)
            opened = unseal(data[KEY_BYTES:], self._private_key, info)
            if sender in senders:
                raise BadReply("replayed", "an upload of the same sender came before")
            senders.add(sender)
            reason = "arrays"
            arrays = unframe_arrays(opened)
            reason = "malformed"
            return CompressedUpload.from_arrays(arrays, limits)
        except BadReply:
            raise
        except Exception as error:  # whatever hostile bytes provoke
            reason = "memory" if isinstance(error, NotEnoughMemory) else reason
            raise BadReply(reason, str(error)) from error


def _binding(run: str, server_round: int) -> bytes:
    check_run(run)
    return json.dumps(["fedntk upload 1", run, server_round]).encode()
