"""What a client of NTK-DFL sends a neighbour: Thompson et al., *NTK-DFL*, ICML 2025, eq. (2)."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..errors import BadReply
from ..support.arrays import ArrayDict, Arrays, require_array
from .compressed_upload import CompressedUpload
from .compression import UNQUANTISED
from .jacobian_upload import JacobianUpload
from .limits import UploadLimits

INPUTS = "inputs"  # name of an array beside an upload's


@dataclass(frozen=True, eq=False)
class JacobianParcel:
    """Rows of one client's examples at a neighbour's weights."""

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
        cls, arrays: Arrays, *, limits: UploadLimits, receiver: "JacobianParcel"
    ) -> Self:
        """Check what :meth:`to_arrays` made; form and inputs are like the `receiver`'s."""
        if (INPUTS in arrays) != (receiver.inputs is not None):
            raise BadReply("arrays", "expected inputs if the receiver sends some, else none")
        rows = {name: array for name, array in arrays.items() if name != INPUTS}
        mine = receiver.upload.jacobian
        if compresses(limits.sparsity, limits.bits):
            upload, mine = CompressedUpload.from_arrays(rows, limits), mine.expanded()
        else:
            shapes, weights = limits.parameters, mine.weights
            upload = JacobianUpload.from_arrays(rows, parameters=shapes, weights=weights)
        limits.require_examples(n := upload.jacobian.num_examples)
        if upload.jacobian.form != mine.form:
            raise BadReply("layout", "its Jacobian has another form than the receiver's")
        if receiver.inputs is None:
            return cls(upload)
        inputs, x = arrays[INPUTS], receiver.inputs
        shape = (n, *x.shape[1:])
        require_array(INPUTS, inputs, shape=shape, dtype=x.cpu().numpy().dtype)
        return cls(upload, torch.from_numpy(np.require(inputs, requirements=["C", "W"])))


def compresses(sparsity: float, bits: int) -> bool:
    """Whether rows are compressed: then all of a Jacobian is in them."""
    return sparsity > 0 or bits != UNQUANTISED
