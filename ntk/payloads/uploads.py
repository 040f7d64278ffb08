"""Uploads of Jacobians: plain, compressed, or for a neighbour; and what a client may send."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..jacobian.operator import Jacobian
from ..losses import one_hot
from ..support.arrays import ArrayDict, Arrays, require_array
from ..support.memory import require_memory
from .compression import UNQUANTISED, Encoded, check_compression, compress, num_kept
from .jacobian_format import block_arrays, jacobian_from_arrays, jacobian_of, jacobian_to_arrays

DECODING_BYTES = 40  # for each number that was sent, while they are unpacked
INPUTS = "inputs"  # name of an array beside an upload's


@dataclass(frozen=True)
class UploadLimits:
    """What a client may send; an upload that holds more is refused."""

    parameters: Mapping[str, Sequence[int]]  # shape of each array of the global model
    max_examples: int = 10_000_000
    sparsity: float = 0.0  # share of each tensor's numbers that is dropped, at least
    bits: int = UNQUANTISED  # of each of the others, at most

    def __post_init__(self) -> None:
        check_compression(self.sparsity, self.bits)

    def require_examples(self, num_examples: int) -> None:
        """Raise BadReply if a client has more examples than allowed."""
        if num_examples > self.max_examples:
            raise BadReply(
                "shape", f"expected at most {self.max_examples} examples, got {num_examples}"
            )

    def require(self, code: Encoded, num_examples: int) -> None:
        """Raise BadReply unless a tensor has so many examples, and is compressed enough."""
        size = code.size
        most = code.groups * num_kept(size // code.groups, self.sparsity)
        if not code.shape or code.shape[0] != num_examples:
            raise BadReply("shape", f"expected {num_examples} examples, got {code.shape}")
        if code.count > most:
            raise BadReply("compression", f"asked for {most} of {size} numbers, got {code.count}")
        if code.bits > self.bits:
            raise BadReply("compression", f"asked for {self.bits} bits a number, got {code.bits}")


@dataclass(frozen=True, eq=False)
class JacobianUpload:
    """What one client sends up in a round of NTK-FL (Yue et al. 2022, section 4.1, step 2).

    The Jacobian J_m is of the client's n examples, at the received weights. Outputs f(X_m) there
    and targets Y_m, one-hot or real, are (n, C), in the Jacobian's dtype (float32, or float64).
    """

    jacobian: Jacobian
    outputs: Tensor
    targets: Tensor

    def to_arrays(self) -> ArrayDict:
        """Return outputs, targets and the Jacobian's arrays, by name."""
        rows = {"outputs": self.outputs.cpu().numpy(), "targets": self.targets.cpu().numpy()}
        return rows | jacobian_to_arrays(self.jacobian)

    @classmethod
    def from_arrays(
        cls,
        arrays: Arrays,
        *,
        parameters: Mapping[str, Sequence[int]],
        weights: Mapping[str, Tensor] | None = None,
        real_targets: bool = False,
    ) -> Self:
        """Check what :meth:`to_arrays` made, for a global model with arrays of these shapes.

        With `weights`, those that the client got, layers may be in the form that needs them.
        `real_targets` are any finite numbers; others are one-hot rows.
        BadReply has the reason ``"labels"`` or one of :func:`jacobian_from_arrays`.
        """
        beside = ("outputs", "targets")
        jacobian = jacobian_from_arrays(arrays, *beside, parameters=parameters, weights=weights)
        shape = (jacobian.num_examples, jacobian.num_outputs)
        dtype = jacobian.blocks[-1].arrays[-1].numpy().dtype
        for name in beside:
            require_array(name, arrays[name], shape=shape, dtype=dtype)
        outputs, targets = (_tensor(arrays[name]) for name in beside)
        if real_targets:
            return cls(jacobian, outputs, targets)
        if ((targets != 0) & (targets != 1)).any() or (targets.sum(1) != 1).any():
            raise BadReply("labels", "targets: expected one-hot rows")
        return cls(jacobian, outputs, targets)

    def claimed(self, num_examples: int) -> Self:
        """Return itself if its client claims as many examples; else BadReply."""
        if (sent := self.jacobian.num_examples) != num_examples:
            raise BadReply("num-examples", f"claims {num_examples} and sends {sent}")
        return self

    @staticmethod
    def concatenate(uploads: Sequence["JacobianUpload"]) -> "JacobianUpload":
        """Stack the rows of several uploads, in their order: eq. (8)."""
        return JacobianUpload(
            Jacobian.concatenate([upload.jacobian for upload in uploads]),
            torch.cat([upload.outputs for upload in uploads]),
            torch.cat([upload.targets for upload in uploads]),
        )

    def rows(self, indices: Tensor) -> "JacobianUpload":
        """Return rows of Jacobian, outputs and targets together, in the order of `indices`."""
        jacobian = self.jacobian.mapped(lambda array: array[indices])
        return JacobianUpload(jacobian, self.outputs[indices], self.targets[indices])

    def canonical(self) -> "JacobianUpload":
        """Sort the rows by their bytes, so that their order on arrival does not matter."""
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


@dataclass(frozen=True, eq=False)
class CompressedUpload:
    """What one client sends up in a round of CP-NTK-FL (Yue et al. 2022, section 4.2).

    Outputs (n, C) are those of :class:`JacobianUpload`; labels (n,) are the classes, in the
    smallest unsigned integer that holds C - 1. The Jacobian's floating-point arrays are compressed
    by :func:`compress`, one by one.
    """

    outputs: NDArray[np.floating]
    labels: NDArray[np.unsignedinteger]
    jacobian: ArrayDict

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

        The tensors are the paper's dense ones (n, C, *w) if the Jacobian is dense, otherwise a
        layer's inputs and its output gradients: entries of the Jacobian are then zero if either
        factor is. With `by_row` each example's part is compressed by itself.
        """
        num_outputs = upload.targets.shape[1]
        labels = upload.targets.argmax(1).numpy().astype(np.min_scalar_type(num_outputs - 1))
        arrays = jacobian_to_arrays(upload.jacobian.expanded())
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                arrays[name] = compress(array, sparsity=sparsity, bits=bits, by_row=by_row)
        return cls(upload.outputs.cpu().numpy(), labels, arrays)

    def to_arrays(self) -> ArrayDict:
        """Return outputs, labels and the encoded Jacobian's arrays, by name."""
        return {"outputs": self.outputs, "labels": self.labels, **self.jacobian}

    @classmethod
    def from_arrays(cls, arrays: Arrays, limits: UploadLimits) -> JacobianUpload:
        """Check what :meth:`to_arrays` made against the limits, then decode it.

        Nothing is allocated whose size was not checked. BadReply has the reason ``"compression"``,
        or one of :meth:`JacobianUpload.from_arrays`.
        """
        received = block_arrays(arrays, "outputs", "labels")
        layout, *tensors = received.values()
        outputs, labels = arrays["outputs"], arrays["labels"]
        require_array("outputs", outputs, shape=(-1, -1), dtype=(np.float32, np.float64))
        n, num_outputs = outputs.shape
        limits.require_examples(n)
        require_array("labels", labels, shape=(n,), dtype="unsigned")
        if labels.max() >= num_outputs:
            raise BadReply("labels", f"expected 0 ... {num_outputs - 1}, got {labels.max()}")
        codes: list[Encoded | NDArray[Any]] = [
            tensor if tensor.dtype == np.int64 else Encoded.parse(tensor) for tensor in tensors
        ]
        numbers, meta = 0, []
        for code in codes:
            if isinstance(code, Encoded):
                limits.require(code, n)
                numbers += code.count
                meta.append(code.meta_tensor())
            else:
                meta.append(torch.from_numpy(code.copy()))
        size = _check_size(jacobian_of(layout, meta, limits.parameters), num_outputs)
        require_memory(
            2 * size + DECODING_BYTES * numbers, f"a client's Jacobian of {n} examples, decoded,"
        )
        decoded = [code.decode() if isinstance(code, Encoded) else code for code in codes]
        targets = one_hot(torch.from_numpy(labels.astype(np.int64)), num_outputs).numpy()
        rows = {"outputs": outputs, "targets": targets.astype(outputs.dtype)}
        rows |= zip(received, [layout, *decoded], strict=True)
        return JacobianUpload.from_arrays(rows, parameters=limits.parameters)


@dataclass(frozen=True, eq=False)
class JacobianParcel:
    """Rows of a client's examples at a neighbour's weights (Thompson et al., NTK-DFL, eq. (2))."""

    upload: JacobianUpload  # J_{i,j}, f(X_i; w_j) and Y_i
    inputs: Tensor | None = None  # X_i (n, ...), if the receiver compares the network's own losses

    def to_arrays(self, *, sparsity: float = 0.0, bits: int = UNQUANTISED) -> ArrayDict:
        """Return arrays by name: the upload, compressed if asked for, and the exact inputs."""
        upload: JacobianUpload | CompressedUpload = self.upload
        if compresses(sparsity, bits):
            upload = CompressedUpload.compress(self.upload, sparsity=sparsity, bits=bits)
        inputs = {} if self.inputs is None else {INPUTS: self.inputs.cpu().numpy()}
        return upload.to_arrays() | inputs

    @classmethod
    def from_arrays(
        cls,
        arrays: Arrays,
        *,
        limits: UploadLimits,
        receiver: "JacobianParcel",
        real_targets: bool = False,
    ) -> Self:
        """Check what :meth:`to_arrays` made; form and inputs are like the `receiver`'s."""
        if (INPUTS in arrays) != (receiver.inputs is not None):
            raise BadReply("arrays", "expected inputs if the receiver sends some, else none")
        rows = {name: array for name, array in arrays.items() if name != INPUTS}
        jacobian = receiver.upload.jacobian
        if compresses(limits.sparsity, limits.bits):
            upload, jacobian = CompressedUpload.from_arrays(rows, limits), jacobian.expanded()
        else:
            upload = JacobianUpload.from_arrays(
                rows,
                parameters=limits.parameters,
                weights=jacobian.weights,
                real_targets=real_targets,
            )
        limits.require_examples(n := upload.jacobian.num_examples)
        if upload.jacobian.form != jacobian.form:
            raise BadReply("layout", "its Jacobian has another form than the receiver's")
        if receiver.inputs is None:
            return cls(upload)
        x = receiver.inputs
        require_array(INPUTS, arrays[INPUTS], shape=(n, *x.shape[1:]), dtype=x.cpu().numpy().dtype)
        return cls(upload, _tensor(arrays[INPUTS]))


def compresses(sparsity: float, bits: int) -> bool:
    """Whether rows are compressed: then all of a Jacobian is in them."""
    return sparsity > 0 or bits != UNQUANTISED


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _check_size(jacobian: Jacobian, num_outputs: int) -> int:
    """Return the bytes of a Jacobian with C outputs, and no factors larger than dense blocks."""
    if jacobian.num_outputs != num_outputs:
        raise BadReply("shape", f"expected {num_outputs} outputs, got {jacobian.num_outputs}")
    for block in jacobian.blocks:
        if sum(array[0].numel() for array in block.arrays) > block.dense_size:
            raise BadReply("shape", f"{block.layout}: factors larger than what they make")
    return jacobian.nbytes
