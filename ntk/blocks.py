"""The blocks a Jacobian is made of: a layer's or parameter's columns, dense or in factors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Block", "DenseBlock", "LinearBlock"]


class Block(ABC):
    """Columns of a Jacobian that belong to one layer or parameter."""

    kind: str

    @property
    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """JSON-ready description: the kind and the names of the parameters."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[Tensor, ...]:
        """Tensors the block consists of, each with n rows."""

    @abstractmethod
    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:
        """Return the same block made of other tensors."""

    @abstractmethod
    def gram(self, other: Self) -> Tensor:
        """Inner products summed over outputs and parameters, shape (n, m)."""

    @abstractmethod
    def vjp(self, residual: Tensor) -> dict[str, Tensor]:
        """``J^T R`` for the block's parameters."""

    @abstractmethod
    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:
        """``J u`` from the block's parameters, shape (n, C)."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Diagonal of the gram matrix in float64, shape (n,)."""

    @abstractmethod
    def dense(self) -> dict[str, Tensor]:
        """Parameter name -> tensor of shape (n, C, *parameter shape)."""

    @abstractmethod
    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
        """Shapes that `arrays` must have, from the parameters' shapes, without the n rows.

        C is written as -1.
        """


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """Jacobian with respect to one parameter.

    Attributes
    ----------
    name : str
        The parameter's name in ``model.named_parameters()``.
    values : Tensor, shape (n, C, *parameter shape)
        d f_c(x_i) / d w.
    """

    name: str
    values: Tensor
    kind = "dense"

    @property
    def layout(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": self.kind, "name": self.name}

    @property
    def arrays(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.values,)

    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:  # noqa: D102
        return type(self)(self.name, *arrays)

    def gram(self, other: Self) -> Tensor:  # noqa: D102
        return self.values.flatten(1) @ other.values.flatten(1).T

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        flat = residual.flatten() @ self.values.reshape(residual.numel(), -1)
        return {self.name: flat.view(self.values.shape[2:])}

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        return self.values.reshape(*self.values.shape[:2], -1) @ update[self.name].flatten()

    def squared_norms(self) -> Tensor:  # noqa: D102
        return self.values.flatten(1).double().square().sum(1)

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        return {self.name: self.values}

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        return [(-1, *parameters[self.name])]


@dataclass(frozen=True, eq=False)
class LinearBlock(Block):
    """Jacobian with respect to a linear layer that is used once, in factors.

    Attributes
    ----------
    weight, bias : str or None
        Names of the layer's trainable parameters; None where there is none or it is frozen.
    inputs : Tensor, shape (n, d_in)
        The layer's input activations a.
    gradients : Tensor, shape (n, C, d_out)
        Gradients g of each network output with respect to the layer's outputs.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor
    gradients: Tensor
    kind = "linear"

    @property
    def layout(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": self.kind, "weight": self.weight, "bias": self.bias}

    @property
    def arrays(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.inputs, self.gradients)

    def with_arrays(self, arrays: Sequence[Tensor]) -> Self:  # noqa: D102
        return type(self)(self.weight, self.bias, *arrays)

    def gram(self, other: Self) -> Tensor:  # noqa: D102
        gradients = self.gradients.flatten(1) @ other.gradients.flatten(1).T
        if self.weight is None:
            return gradients
        inputs = self.inputs @ other.inputs.T
        return gradients.mul_(inputs if self.bias is None else inputs.add_(1.0))

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        weighted = torch.bmm(residual.unsqueeze(1), self.gradients).squeeze(1)
        update = {}
        if self.weight is not None:
            update[self.weight] = weighted.T @ self.inputs
        if self.bias is not None:
            update[self.bias] = weighted.sum(0)
        return update

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        change = self.gradients.new_zeros(len(self.gradients), self.gradients.shape[2])
        if self.weight is not None:
            change = change + self.inputs @ update[self.weight].T
        if self.bias is not None:
            change = change + update[self.bias]
        return torch.bmm(self.gradients, change.unsqueeze(2)).squeeze(2)

    def squared_norms(self) -> Tensor:  # noqa: D102
        gradients = self.gradients.flatten(1).double().square().sum(1)
        if self.weight is None:
            return gradients
        return gradients * (self.inputs.double().square().sum(1) + (self.bias is not None))

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        tensors = {}
        if self.weight is not None:
            tensors[self.weight] = self.gradients.unsqueeze(3) * self.inputs[:, None, None, :]
        if self.bias is not None:
            tensors[self.bias] = self.gradients
        return tensors

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        width_in, width_out = 0, 0
        if self.bias is not None:
            (width_out,) = parameters[self.bias]
            width_in = self.inputs.shape[1] if self.inputs.ndim == 2 else 0
        if self.weight is not None:
            width_out_of_weight, width_in = parameters[self.weight]
            if self.bias is not None and width_out_of_weight != width_out:
                raise ValueError("weight and bias are of different layers")
            width_out = width_out_of_weight
        return [(width_in,), (-1, width_out)]
