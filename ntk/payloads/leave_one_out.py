"""Clients whose examples contradict the others', found by leaving each out of the tangent kernel.

The kernel H of a round's examples (Yue et al., *Neural Tangent Kernel Empowered Federated
Learning*, ICML 2022, eq. (6) and (8)) has a block of rows for each client. Let P be the inverse of
K + r I, where K is H with its rows scaled to H_ii = 1 and each entry to the power of 4 (a kernel by
Schur's product theorem, in which only near examples count much), and Z the one-hot labels less 1/C.
Kernel ridge regression from all examples but those of a set S has on S the errors

    e_S = P_SS^-1 (P Z)_S

(Rifkin and Lippert, *Notes on Regularized Least Squares*, MIT 2007, for single examples). The loss
is the squared error, at most 2 per example; the harm of i is the mean over the other clients of the
loss with i less that without. The most harmful f are set aside one by one, then each is judged by
those left. It is dropped if

- its harm is above 2 / n^2 for n clients: one with false labels y' among n with like examples moves
  predictions from y to y + (y' - y) / n;
- its own loss, predicted from the others' examples, is above 1 - 1/C, that of predicting nothing.

A client that does the others no harm is not detected, such as one with a backdoor.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..errors import BadReply
from ..support.memory import require_memory
from .uploads import JacobianUpload

RIDGE = 0.01
POWER = 4  # of the kernel; ridge and this are from trials on training examples
LARGEST_LOSS = 2.0  # squared distance of two one-hot labels
MATRICES = 4  # n x n in float64, held at a time


def screen_harmful(
    uploads: Sequence[JacobianUpload], malicious: int, *, trusted: int = 0
) -> list[BadReply | None]:
    """Refuse at most so many clients, who harm the others' predictions and are contradicted.

    Jacobians have one form; the first uploads, as many as are `trusted`, are never refused.
    """
    require_memory(
        MATRICES * 8 * sum(len(upload.targets) for upload in uploads) ** 2,
        f"the judgement of {len(uploads)} clients by their kernel",
        cure="sample fewer clients a round or fewer examples on each",
    )
    every = ClientRidge.of(uploads)
    left, suspects = every, list[int]()
    while len(suspects) < malicious and len(left.parts) > (1 if trusted else 2):
        harms = {k: left.harm(k) for k in left.parts if k >= trusted}
        suspects.append(max(harms, key=lambda k: harms[k]))
        left = left.without(suspects[-1])
    verdicts: list[BadReply | None] = [None] * len(uploads)
    limit, nothing = LARGEST_LOSS / len(uploads) ** 2, 1 - 1 / every.solution.shape[1]
    for k in suspects:
        judged = every
        for other in suspects:
            judged = judged if other == k else judged.without(other)
        if (harm := judged.harm(k)) > limit and judged.loss(k) > nothing:
            message = f"the others' examples are predicted better without it, by {harm:.2g}"
            verdicts[k] = BadReply("leave-one-out", message)
    return verdicts


class ClientRidge(NamedTuple):
    """Kernel ridge regression on the examples of several clients, each of which can be left out."""

    inverse: Tensor  # P (n, n), float64
    solution: Tensor  # P Z (n, C), float64
    parts: dict[int, slice]  # client -> its rows

    @classmethod
    def of(cls, uploads: Sequence[JacobianUpload]) -> Self:
        """Build the kernel of all uploads; FloatingPointError if it is not finite."""
        whole = JacobianUpload.concatenate(uploads)
        kernel = whole.jacobian.gram().double()
        if not torch.isfinite(kernel).all():
            raise FloatingPointError("the kernel of the clients' Jacobians is not finite")
        norms = kernel.diagonal().sqrt()
        inverse_norms = torch.where(norms > 0, 1 / norms, 0)
        kernel *= inverse_norms * inverse_norms[:, None]
        kernel.pow_(POWER)
        kernel.diagonal().add_(RIDGE)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
        targets = whole.targets.to(inverse)
        ends = torch.tensor([len(upload.targets) for upload in uploads]).cumsum(0).tolist()
        parts = {k: slice(a, b) for k, (a, b) in enumerate(zip([0, *ends], ends, strict=False))}
        return cls(inverse, inverse @ (targets - 1 / targets.shape[1]), parts)

    def _eliminated(self, client: int) -> tuple[Tensor, Tensor]:
        """Return P_iS and (P Z)_i of a client i, both times the inverse Cholesky factor of P_ii."""
        rows_of = self.parts[client]
        factor = torch.linalg.cholesky(self.inverse[rows_of, rows_of])
        rows = torch.cat([self.inverse[rows_of], self.solution[rows_of]], 1)
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
        return rows[:, : len(self.inverse)], rows[:, len(self.inverse) :]

    def without(self, client: int) -> Self:
        """Return the regression without a client; its rows of P are zero from there on."""
        rows, solution = self._eliminated(client)
        parts = {k: part for k, part in self.parts.items() if k != client}
        left = self.inverse - rows.T @ rows, self.solution - rows.T @ solution
        return type(self)(*left, parts)

    def loss(self, client: int) -> float:
        """Return the loss of a client's examples, predicted from all others'."""
        rows = self.parts[client]
        return _loss(self.inverse[rows, rows], self.solution[rows])

    def harm(self, client: int) -> float:
        """Return the mean over the other clients of their losses with a client less without it."""
        rows, solution = self._eliminated(client)
        harms = []
        for other, part in self.parts.items():
            if other != client:
                lost = rows[:, part]
                block = self.inverse[part, part] - lost.T @ lost
                without = _loss(block, self.solution[part] - lost.T @ solution)
                harms.append(self.loss(other) - without)
        return sum(harms) / len(harms)


def _loss(block: Tensor, solution: Tensor) -> float:
    """Return the mean loss of a client's examples, whose labels are not used to predict them."""
    errors = torch.cholesky_solve(solution, torch.linalg.cholesky(block))
    return float(errors.square().sum(1).clamp(max=LARGEST_LOSS).mean())
