"""The Jacobian of a linear layer that a linear layer reads out, after an activation.

If ``z = W a + b`` enters the outputs only by ``f_c = sum over d of V_cd phi_d(z_d) + constant``,

    d f_c / d W = (V_c * m) a^T,        d f_c / d b = V_c * m,        m_d = phi_d'(z_d),

so that d numbers m an example replace C d gradients. V are weights of the network, which who has
sent them knows. The kernel's sum over outputs is taken first:

    <J_i, J_j> = (a_i . a_j + 1) sum over d of s_d m_id m_jd,        s_d = sum over c of V_cd^2.

The last layer is of this form too: V is the identity and m is 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from .blocks import LayerBlock, tile_size, tiles
from .factors import LinearBlock

# operations whose derivative is a number for each number
NAMES = (
    *("Relu", "Tanh", "Sigmoid", "Gelu", "Silu", "Elu", "Celu", "LeakyRelu", "Softplus", "Mish"),
    *("Hardtanh", "Hardswish", "Hardsigmoid", "Threshold"),
)
ELEMENTWISE = {f"{name}Backward0" for name in NAMES}


@dataclass(frozen=True, eq=False)
class ReadoutBlock(LayerBlock):
    """Jacobian of a linear layer's weight, and of its bias if it has one."""

    readout: str  # name of the parameter V; "" if the layer's outputs are the network's
    matrix: Tensor | None  # V, (C, d_out), not sent; None for the identity
    inputs: Tensor  # a, (n, d_in)
    slopes: Tensor  # m, (n, d_out)
    kind, settings = "readout", ("weight", "bias", "readout")
    fields = ("inputs", "slopes")

    @property
    def path(self) -> str:  # noqa: D102
        return f"linear, read out by {self.readout}" if self.readout else "linear, the outputs"

    @property
    def num_outputs(self) -> int:  # noqa: D102
        return super().num_outputs if self.matrix is None else len(self.matrix)

    @property
    def dense_size(self) -> int:  # noqa: D102
        width_out, width_in = self.slopes.shape[1], self.inputs.shape[1]
        return self.num_outputs * width_out * (width_in + (self.bias is not None))

    def weights(self) -> Tensor:
        """Return V."""
        matrix = self.matrix
        return torch.eye(self.slopes.shape[1]).to(self.slopes) if matrix is None else matrix

    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:  # noqa: D102
        inputs, slopes = arrays
        matrix = None if self.matrix is None else self.matrix.to(slopes.device, slopes.dtype)
        return replace(self, inputs=inputs, slopes=slopes, matrix=matrix)

    def of_output(self, output: int) -> Self:  # noqa: D102
        return replace(self, matrix=self.weights()[output : output + 1])

    def expanded(self) -> LinearBlock:  # noqa: D102
        gradients = (self.slopes.unsqueeze(1) * self.weights()).unsqueeze(2)
        return LinearBlock(self.weight, self.bias, self.inputs.unsqueeze(1), gradients)

    def add_gram(self, kernel: Tensor, other: Self) -> None:  # noqa: D102
        left, right = self.inputs, other.inputs
        scale = (self.weights() * other.weights()).sum(0)
        scaled, slopes = self.slopes * scale, other.slopes
        size = tile_size(kernel.device)
        for rows, cols in tiles(*kernel.shape, symmetric=other is self, size=size):
            inner = left[rows] @ right[cols].T
            if self.bias is not None:
                inner.add_(1.0)
            kernel[rows, cols].addcmul_(inner, scaled[rows] @ slopes[cols].T)

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        weighted = (residual @ self.weights()) * self.slopes
        update = {self.weight: weighted.T @ self.inputs}
        return update if self.bias is None else update | {self.bias: weighted.sum(0)}

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        moved = self.inputs @ update[self.weight].T
        if self.bias is not None:
            moved = moved + update[self.bias]
        return (moved * self.slopes) @ self.weights().T

    def squared_norms(self) -> Tensor:  # noqa: D102
        inner = self.inputs.double().square().sum(1) + (self.bias is not None)
        return inner * (self.slopes.double().square() @ self.weights().double().square().sum(0))

    def squares(self) -> dict[str, Tensor]:  # noqa: D102
        return self.expanded().squares()

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        return self.expanded().dense()

    def write_columns(self, name: str, indices: Tensor, out: Tensor) -> None:  # noqa: D102
        self.expanded().write_columns(name, indices, out)

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        width_out, width_in = parameters[self.weight]
        self.check_bias(width_out, parameters)
        if self.matrix is not None and self.matrix.shape[1:] != (width_out,):
            raise ValueError(f"{self.readout!r} does not read out {width_out} numbers")
        return [(width_in,), (width_out,)]
