"""What travels between clients and server, as frozen dataclasses of named arrays."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compression import UNQUANTISED, Encoded, check_compression, compress, kept
from .errors import BadReply
from .jacobian import Jacobian
from .losses import one_hot
from .memory import require_memory

DECODING_BYTES = 40  # for each number that was sent, while they are unpacked

__all__ = [
    "Asked",
    "CompressedUpload",
    "JacobianUpload",
    "stack_candidates",
    "unstack_candidates",
]


@dataclass(frozen=True, eq=False)
class JacobianUpload:
    """What one client sends up in a round of NTK-FL (Yue et al. 2022, section 4.1, step 2).

    Attributes
    ----------
    jacobian : Jacobian
        J_m of the client's n examples, at the received weights.
    outputs : Tensor, shape (n, C)
        f(X_m) at the received weights, in the Jacobian's dtype (float32, or float64).
    targets : Tensor, shape (n, C)
        Y_m, one-hot, in the same dtype.
    """

    jacobian: Jacobian
    outputs: Tensor
    targets: Tensor

    def to_arrays(self) -> list[NDArray[Any]]:
        """Wire format: outputs, targets, then the Jacobian's arrays."""
        return [self.outputs.cpu().numpy(), self.targets.cpu().numpy(), *self.jacobian.to_arrays()]

    @classmethod
    def from_arrays(
        cls, arrays: Sequence[NDArray[Any]], *, parameters: Mapping[str, Sequence[int]]
    ) -> Self:
        """Parse and check what :meth:`to_arrays` made.

        Parameters
        ----------
        arrays : sequence of ndarray
            As received.
        parameters : mapping of str to sequence of int
            Shape of each array of the global model.

        Raises
        ------
        BadReply
            With the reason ``"shape"``, ``"dtype"``, ``"non-finite"``, ``"scale"``, ``"labels"``
            or ``"layout"``.
        """
        if len(arrays) < 3:
            raise BadReply("shape", f"expected at least 3 arrays, got {len(arrays)}")
        jacobian = Jacobian.from_arrays(arrays[2:], parameters=parameters)
        shape = (jacobian.num_examples, jacobian.num_outputs)
        dtype = arrays[-1].dtype  # the Jacobian's
        checked = []
        for name, array in zip(("outputs", "targets"), arrays, strict=False):
            if array.shape != shape:
                raise BadReply("shape", f"{name}: expected {shape}, got {array.shape}")
            if array.dtype != dtype:
                raise BadReply("dtype", f"{name}: expected {dtype}, got {array.dtype}")
            if not np.isfinite(array).all():
                raise BadReply("non-finite", f"{name} hold NaN or infinity")
            checked.append(torch.from_numpy(np.require(array, requirements=["C", "W"])))
        outputs, targets = checked
        if ((targets != 0) & (targets != 1)).any() or (targets.sum(1) != 1).any():
            raise BadReply("labels", "targets: expected one-hot rows")
        return cls(jacobian, outputs, targets)

    @staticmethod
    def concatenate(uploads: Sequence["JacobianUpload"]) -> "JacobianUpload":
        """Stack the rows of several uploads, in their order: eq. (8).

        Raises
        ------
        ValueError
            If there are none, or their Jacobians differ in form.
        """
        return JacobianUpload(
            Jacobian.concatenate([upload.jacobian for upload in uploads]),
            torch.cat([upload.outputs for upload in uploads]),
            torch.cat([upload.targets for upload in uploads]),
        )

    def rows(self, indices: Tensor) -> "JacobianUpload":
        """Return rows of Jacobian, outputs and targets together, in the order of `indices`."""
        blocks = self.jacobian.blocks
        return JacobianUpload(
            Jacobian(tuple(b.with_arrays([a[indices] for a in b.arrays]) for b in blocks)),
            self.outputs[indices],
            self.targets[indices],
        )

    def canonical(self) -> "JacobianUpload":
        """Sort the rows by their bytes: the same order, whatever order they were in."""
        outputs, targets = self.outputs.cpu().numpy(), self.targets.cpu().numpy()
        keys = [(f.tobytes(), y.tobytes()) for f, y in zip(outputs, targets, strict=True)]
        counts = Counter(keys)
        arrays = [a.cpu().numpy() for b in self.jacobian.blocks for a in b.arrays]

        def key(i: int) -> tuple[bytes, ...]:
            if counts[keys[i]] == 1:
                return keys[i]
            row = b"".join(array[i].tobytes() for array in arrays)  # let the Jacobians decide
            return (*keys[i], hashlib.sha256(row).digest())

        return self.rows(torch.tensor(sorted(range(len(keys)), key=key)))


@dataclass(frozen=True)
class Asked:
    """What a server asks its clients for; an upload that holds more is refused.

    Attributes
    ----------
    parameters : mapping of str to sequence of int
        Shape of each array of the global model.
    max_examples : int
        Of one client.
    sparsity : float
        Share of each tensor's numbers that is to be dropped, at least.
    bits : int
        Of each number that stays, at most.

    Raises
    ------
    ValueError
        If sparsity or bits are out of range.
    """

    parameters: Mapping[str, Sequence[int]]
    max_examples: int = 10_000_000
    sparsity: float = 0.0
    bits: int = UNQUANTISED

    def __post_init__(self) -> None:
        check_compression(self.sparsity, self.bits)

    def to_json(self) -> str:
        """Write all of it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If it is something else.
        """
        try:
            fields = json.loads(text)
            return cls(
                {str(k): [int(n) for n in shape] for k, shape in fields["parameters"].items()},
                int(fields["max_examples"]),
                float(fields["sparsity"]),
                int(fields["bits"]),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"expected what is asked for, as JSON, got {text[:80]!r}") from error


@dataclass(frozen=True, eq=False)
class CompressedUpload:
    """What one client sends up in a round of CP-NTK-FL (Yue et al. 2022, section 4.2).

    Attributes
    ----------
    outputs : ndarray of float32 or float64, shape (n, C)
        f(X'_m), as in :class:`JacobianUpload`.
    labels : ndarray of uint8, or a larger unsigned integer for many classes, shape (n,)
        Whose one-hot rows the targets are.
    layout : ndarray of uint8
        Of the Jacobian.
    tensors : tuple of ndarray
        The arrays of its blocks, each compressed by :func:`compress`; tokens as they are.
    """

    outputs: NDArray[np.floating]
    labels: NDArray[np.unsignedinteger]
    layout: NDArray[np.uint8]
    tensors: tuple[NDArray[Any], ...]

    @classmethod
    def compress(
        cls,
        upload: JacobianUpload,
        *,
        sparsity: float = 0.0,
        bits: int = UNQUANTISED,
        by_row: bool = False,
    ) -> Self:
        """Sparsify and quantise each tensor of the Jacobian; outputs and labels stay exact.

        What is sparsified is what the Jacobian is made of: the paper's dense tensors (n, C, *w) if
        it is dense; if it is in factors, a layer's inputs and its output gradients, each by itself.
        Their products, the entries of the Jacobian, are then zero where either factor is. A tensor
        is compressed as one, or, with `by_row`, each example's part of it by itself.
        """
        layout, *arrays = upload.jacobian.to_arrays()
        num_outputs = upload.targets.shape[1]
        labels = upload.targets.argmax(1).numpy()
        return cls(
            upload.outputs.cpu().numpy(),
            labels.astype(np.min_scalar_type(num_outputs - 1)),
            layout,
            tuple(
                compress(a, sparsity=sparsity, bits=bits, by_row=by_row)
                if a.dtype.kind == "f"
                else a
                for a in arrays
            ),
        )

    def to_arrays(self) -> list[NDArray[Any]]:
        """Wire format: outputs, labels, layout, then the tensors."""
        return [self.outputs, self.labels, self.layout, *self.tensors]

    @classmethod
    def parse(cls, arrays: Sequence[NDArray[Any]], asked: Asked) -> JacobianUpload:
        """Check what :meth:`to_arrays` made against what was asked for, then decode it.

        Sizes are compared with the model, with the outputs' rows and with `asked` before anything
        of these sizes is allocated.

        Raises
        ------
        BadReply
            With the reason ``"compression"``, or one of :meth:`JacobianUpload.from_arrays`.
        NotEnoughMemory
            If the decoded Jacobian would not fit.
        """
        if len(arrays) < 4:
            raise BadReply("shape", f"expected at least 4 arrays, got {len(arrays)}")
        outputs, labels, layout, *tensors = arrays
        if outputs.dtype not in (np.float32, np.float64):
            raise BadReply("dtype", f"outputs: expected float32 or float64, got {outputs.dtype}")
        if outputs.ndim != 2 or not 0 < len(outputs) <= asked.max_examples or not outputs.shape[1]:
            raise BadReply(
                "shape",
                f"outputs: expected (n, C), n at most {asked.max_examples}, got {outputs.shape}",
            )
        n, num_outputs = outputs.shape
        if labels.shape != (n,):
            raise BadReply("shape", f"labels: expected {(n,)}, got {labels.shape}")
        if labels.dtype.kind != "u":
            raise BadReply("dtype", f"labels: expected unsigned integers, got {labels.dtype}")
        if labels.max() >= num_outputs:
            raise BadReply("labels", f"expected 0 ... {num_outputs - 1}, got {labels.max()}")
        expected = Jacobian.count_arrays(layout, asked.parameters)
        if len(tensors) != expected:
            raise BadReply("shape", f"expected {expected} tensors, got {len(tensors)}")
        codes = [t if t.dtype == np.int64 else Encoded.parse(t) for t in tensors]
        for code in codes:
            if isinstance(code, Encoded):
                require_asked(code, n, asked)
        hollow = [
            code.hollow() if isinstance(code, Encoded) else torch.from_numpy(code.copy())
            for code in codes
        ]
        size = Jacobian.require_form(layout, hollow, asked.parameters, num_outputs)
        numbers = sum(code.count for code in codes if isinstance(code, Encoded))
        require_memory(
            2 * size + DECODING_BYTES * numbers, f"a client's Jacobian of {n} examples, decoded,"
        )
        decoded = [code.decode() if isinstance(code, Encoded) else code for code in codes]
        targets = one_hot(torch.from_numpy(labels.astype(np.int64)), num_outputs).numpy()
        return JacobianUpload.from_arrays(
            [outputs, targets.astype(outputs.dtype), layout, *decoded],
            parameters=asked.parameters,
        )


def require_asked(code: Encoded, num_examples: int, asked: Asked) -> None:
    """Raise BadReply unless a tensor is of so many examples, and compressed as was asked."""
    size = code.size
    most = code.groups * kept(size // code.groups, asked.sparsity)
    if not code.shape or code.shape[0] != num_examples:
        raise BadReply("shape", f"expected {num_examples} examples, got a tensor of {code.shape}")
    if code.count > most:
        raise BadReply("compression", f"asked for {most} of {size} numbers, got {code.count}")
    if code.bits > asked.bits:
        raise BadReply("compression", f"asked for {asked.bits} bits a number, got {code.bits}")


def stack_candidates(
    weights: Mapping[str, NDArray[Any]], updates: Sequence[Mapping[str, Tensor]]
) -> dict[str, NDArray[Any]]:
    """Candidate weights w + update for each of several updates, stacked by parameter.

    Parameters
    ----------
    weights : mapping of str to ndarray
        The global model, buffers included.
    updates : sequence of mapping of str to Tensor
        For each candidate, the change of the parameters; arrays that an update leaves out stay.

    Returns
    -------
    dict of str to ndarray of shape (number of candidates, *array shape)
        In the weights' order and dtypes.
    """
    stacked = {}
    for name, array in weights.items():
        rows = np.repeat(array[None], len(updates), axis=0)
        for row, update in enumerate(updates):
            if name in update:
                rows[row] += update[name].cpu().numpy().astype(array.dtype)
        stacked[name] = rows
    return stacked


def unstack_candidates(arrays: Sequence[NDArray[Any]]) -> list[list[NDArray[Any]]]:
    """Return lists of weights, one for each candidate, from arrays stacked as above.

    Raises
    ------
    ValueError
        If the arrays do not agree on the number of candidates.
    """
    counts = {array.shape[0] if array.ndim else 0 for array in arrays}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"candidates: expected one number of rows, got {sorted(counts)}")
    return [[array[row, ...] for array in arrays] for row in range(counts.pop())]
