"""Clients whose examples contradict the others', found by leaving each out of the tangent kernel.

The kernel H of a round's examples (Yue et al., *Neural Tangent Kernel Empowered Federated
Learning*, ICML 2022, eq. (6) and (8)) has a block of rows for each client. Let P be the inverse of
K + r I, where K is H with its rows scaled to H_ii = 1 and each entry to the power of 4 (a kernel by
Schur's product theorem, in which only near examples count much), and Z the one-hot labels less 1/C.
Kernel ridge regression from all examples but those of a set S has on S the errors

    e_S = P_SS^-1 (P Z)_S

(leave-one-out in closed form; Rifkin and Lippert, *Notes on Regularized Least Squares*, MIT 2007,
for single examples). So what client j's examples lose by client i, predicted from all others' with
and without i's, takes one inverse and small blocks of it. The loss is the squared error, at most 2
per example; the harm of i is the mean over the other clients of the loss with i less that without.

K has no scale and labels are one-hot, so large numbers gain a client nothing. The most harmful f
are set aside one by one, then each is judged by those left: liars who agree with each other have no
say there. It is dropped if two things hold.

**It does as much harm as a liar.** If n clients have like examples, each has a share of 1/n in what
is predicted. One with false labels y' moves a prediction from y to y + (y' - y) / n, so that the
loss is 2 / n^2; it is more where the others err already or have fewer such examples.

**The others contradict its labels.** An honest client harms those who lack its classes if theirs
look alike, the more the noisier the data. Its own loss, predicted from the others' examples, is
then mostly below 1 - 1/C, that of predicting nothing; a liar's is above.

What does the others no harm is not found, such as a backdoor, nor a client with labels that are
mostly true.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..errors import BadReply
from ..support.memory import require_memory
from .jacobian_upload import JacobianUpload

RIDGE = 0.01
POWER = 4  # of the kernel; ridge and this are from trials on training examples
LARGEST_LOSS = 2.0  # squared distance of two one-hot labels
MATRICES = 4  # n x n in float64, held at a time


def screen_harmful(
    uploads: Sequence[JacobianUpload], liars: int, *, trusted: int = 0
) -> list[BadReply | None]:
    """Refuse at most so many clients, who harm the others' predictions and are contradicted.

    Jacobians have one form. The first uploads, as many as are `trusted`, are never refused. The
    reason is ``"leave-one-out"``.
    """
    require_memory(
        MATRICES * 8 * sum(len(upload.targets) for upload in uploads) ** 2,
        f"the judgement of {len(uploads)} clients by their kernel",
        cure="sample fewer clients a round or fewer examples on each",
    )
    every = ClientRidge.of(uploads)
    left, suspects = every, list[int]()
    while len(suspects) < liars and len(left.parts) > (1 if trusted else 2):
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
        own = self.parts[client]
        factor = torch.linalg.cholesky(self.inverse[own, own])
        rows = torch.cat([self.inverse[own], self.solution[own]], 1)
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
        return rows[:, : len(self.inverse)], rows[:, len(self.inverse) :]

    def without(self, client: int) -> Self:
        """Return the regression without a client; its rows of P are zero from there on."""
        rows, solution = self._eliminated(client)
        parts = {k: own for k, own in self.parts.items() if k != client}
        left = self.inverse - rows.T @ rows, self.solution - rows.T @ solution
        return type(self)(*left, parts)

    def loss(self, client: int) -> float:
        """Return the loss of a client's examples, predicted from all others'."""
        own = self.parts[client]
        return _loss(self.inverse[own, own], self.solution[own])

    def harm(self, client: int) -> float:
        """Return the mean over the other clients of their losses with a client less without it."""
        rows, solution = self._eliminated(client)
        harms = []
        for other, own in self.parts.items():
            if other != client:
                lost = rows[:, own]
                block = self.inverse[own, own] - lost.T @ lost
                without = _loss(block, self.solution[own] - lost.T @ solution)
                harms.append(self.loss(other) - without)
        return sum(harms) / len(harms)


def _loss(block: Tensor, solution: Tensor) -> float:
    """Return the mean loss of a client's examples, whose labels are not used to predict them."""
    errors = torch.cholesky_solve(solution, torch.linalg.cholesky(block))
    return float(errors.square().sum(1).clamp(max=LARGEST_LOSS).mean())
