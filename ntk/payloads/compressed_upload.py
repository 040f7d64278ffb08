"""Uploads of CP-NTK-FL."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import BadReply
from ..jacobian.operator import Jacobian
from ..losses import one_hot
from ..support.arrays import ArrayDict, Arrays, require_array
from ..support.memory import require_memory
from .compression import UNQUANTISED, Encoded, compress
from .jacobian_format import jacobian_of, jacobian_to_arrays, own_arrays
from .jacobian_upload import JacobianUpload
from .limits import UploadLimits, require_labels

DECODING_BYTES = 40  # for each number that was sent, while they are unpacked


@dataclass(frozen=True, eq=False)
class CompressedUpload:
    """What one client sends up in a round of CP-NTK-FL (Yue et al. 2022, section 4.2).

    Outputs (n, C) are those of :class:`JacobianUpload`; labels (n,) are the classes, in the
    smallest unsigned integer that holds C - 1. Of the Jacobian's arrays each of floating point is
    compressed by :func:`compress`.
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
        layer's inputs and its output gradients, each by itself: their products, the entries of the
        Jacobian, are then zero if either factor is. With `by_row` each example's part is compressed
        by itself.
        """
        num_outputs = upload.targets.shape[1]
        labels = upload.targets.argmax(1).numpy()
        return cls(
            upload.outputs.cpu().numpy(),
            labels.astype(np.min_scalar_type(num_outputs - 1)),
            {
                name: compress(array, sparsity=sparsity, bits=bits, by_row=by_row)
                if array.dtype.kind == "f"
                else array
                for name, array in jacobian_to_arrays(upload.jacobian.expanded()).items()
            },
        )

    def to_arrays(self) -> ArrayDict:
        """Return outputs, labels and the encoded Jacobian's arrays, by name."""
        return {"outputs": self.outputs, "labels": self.labels, **self.jacobian}

    @classmethod
    def from_arrays(cls, arrays: Arrays, limits: UploadLimits) -> JacobianUpload:
        """Check what :meth:`to_arrays` made against the limits, then decode it.

        Sizes are compared with the model, with the outputs' rows and with `limits` before anything
        of these sizes is allocated. BadReply has the reason ``"compression"``, or one of
        :meth:`JacobianUpload.from_arrays`.
        """
        tensors_by_name = own_arrays(arrays, "outputs", "labels")
        layout, *tensors = tensors_by_name.values()
        outputs, labels = arrays["outputs"], arrays["labels"]
        require_array("outputs", outputs, shape=(-1, -1), dtype=(np.float32, np.float64))
        n, num_outputs = outputs.shape
        limits.require_examples(n)
        require_labels(labels, n, num_outputs)
        codes = [t if t.dtype == np.int64 else Encoded.parse(t) for t in tensors]
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
        rows |= zip(tensors_by_name, [layout, *decoded], strict=True)
        return JacobianUpload.from_arrays(rows, parameters=limits.parameters)


def _check_size(jacobian: Jacobian, num_outputs: int) -> int:
    """Return the bytes of a Jacobian with C outputs, and no factors larger than dense blocks."""
    if jacobian.num_outputs != num_outputs:
        raise BadReply("shape", f"expected {num_outputs} outputs, got {jacobian.num_outputs}")
    for block in jacobian.blocks:
        if sum(array[0].numel() for array in block.arrays) > block.dense_size:
            raise BadReply("shape", f"{block.layout}: factors larger than what they make")
    return jacobian.nbytes
