"""A backend for laplace-torch (0.3): Gauss-Newton and empirical Fisher from fedntk's factors.

    la = Laplace(model, "classification", hessian_structure="diag", backend=FedntkGGN)

The diagonals never hold more than a few examples' factors. Anything else than tensors for inputs,
Monte-Carlo estimates, last layers and Jacobians to differentiate through are left to laplace-torch.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from laplace import DiagLaplace
from laplace.curvature import CurvatureInterface, EFInterface, GGNInterface
from torch import Tensor, nn

from fedntk.ntk import Jacobian, example_gradients, jacobian
from fedntk.ntk.losses import hessian_root

AT_A_TIME = 4  # examples


class FedntkInterface(CurvatureInterface):
    """Jacobians and gradients; the order of coordinates is that of the trainable parameters."""

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Jacobians (n, C, P) and outputs (n, C)."""
        if enable_backprop or isinstance(x, MutableMapping):
            return super().jacobians(x, enable_backprop)
        with torch.no_grad():
            return self._select(self._rows(jacobian(self.model, x))), self.model(x)

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (n, P) of each example's loss, and the sum of losses."""
        if isinstance(x, MutableMapping) or self.last_layer:
            return super().gradients(x, y)
        found = example_gradients(self.model, x, y, self._losses)
        with torch.no_grad():
            return self._select(self._rows(found)[:, 0]), self.lossfunc(self.model(x), y)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.likelihood == "regression":
            return (outputs - targets).square().flatten(1).sum(1)
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def _rows(self, jac: Jacobian) -> Tensor:
        """Return the dense Jacobian (n, C, P), made without a second copy of it."""
        dense, end = jac.dense(), 0
        shape = jac.num_examples, jac.num_outputs
        rows = torch.empty(*shape, self._size(), dtype=jac.dtype)
        for own in (dense.pop(n).reshape(*shape, -1) for n in self.params_dict):
            rows[..., end : (end := end + own.shape[2])] = own
        return rows.to(self.params[0].device)

    def _size(self) -> int:
        return sum(p.numel() for p in self.params)

    def _select(self, rows: Tensor) -> Tensor:
        return rows if self.subnetwork_indices is None else rows[..., self.subnetwork_indices]

    def _sum_of_diagonals(self, parts: Iterator[Jacobian]) -> Tensor:
        total = torch.zeros(self._size(), dtype=self.params[0].dtype)
        for part in parts:
            diagonal = part.normal_diagonal()
            total += torch.cat([diagonal[n].flatten() for n in self.params_dict])
        return self._select(total.to(self.params[0].device))


class FedntkGGN(FedntkInterface, GGNInterface):
    """Gauss-Newton matrix."""

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Sum of losses, and the matrix's diagonal (P,)."""
        if isinstance(x, MutableMapping) or self.last_layer or self.stochastic:
            return super().diag(x, y, **kwargs)
        loss = "mse" if self.likelihood == "regression" else "cross-entropy"
        with torch.no_grad():
            outputs = self.model(x)

        def parts() -> Iterator[Jacobian]:
            for own, made in zip(x.split(AT_A_TIME), outputs.split(AT_A_TIME), strict=True):
                yield jacobian(self.model, own).combine(hessian_root(made.cpu(), loss))

        return self.factor * self.lossfunc(outputs, y), self._sum_of_diagonals(parts())


class FedntkEF(FedntkInterface, EFInterface):
    """Empirical Fisher."""

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Sum of losses, and the matrix's diagonal (P,)."""
        if isinstance(x, MutableMapping) or self.last_layer:
            return super().diag(x, y, **kwargs)
        with torch.no_grad():
            loss = self.lossfunc(self.model(x), y)
        parts = (
            example_gradients(self.model, own, targets, self._losses)
            for own, targets in zip(x.split(AT_A_TIME), y.split(AT_A_TIME), strict=True)
        )
        return self.factor * loss, self.factor * self._sum_of_diagonals(parts)


class DiagLaplaceInParts(DiagLaplace):
    """A diagonal posterior; predictions hold one layer's Jacobian of few examples at a time."""

    _key = ("all", "diag-in-parts")  # laplace-torch's own keeps its name
    at_a_time = 1

    def _glm_predictive_distribution(
        self, x: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        if joint or self.enable_backprop or isinstance(x, MutableMapping):
            return super()._glm_predictive_distribution(x, joint, diagonal_output)
        sizes = {name: p.numel() for name, p in self.backend.params_dict.items()}
        pieces = self.posterior_variance.split(list(sizes.values()))
        of_parameters = dict(zip(sizes, pieces, strict=True))
        with torch.no_grad():
            means = self.model(x)
            parts = [self._variances(own, of_parameters) for own in x.split(self.at_a_time)]
        variances = torch.cat(parts)
        return means, variances.diagonal(dim1=1, dim2=2) if diagonal_output else variances

    def _variances(self, x: Tensor, of_parameters: Mapping[str, Tensor]) -> Tensor:
        """Covariances of the outputs (n, C, C), added up layer by layer."""
        found = torch.zeros((), device=x.device)
        for block in jacobian(self.model, x).blocks:
            for name, rows in block.dense().items():
                flat = rows.reshape(*rows.shape[:2], -1).to(self.backend.params[0])
                found = found + torch.bmm(flat * of_parameters[name], flat.transpose(1, 2))
        return found
