"""The two losses of the papers, averaged over examples: one normalisation for all of fedntk.

``"mse"`` is the halved mean-squared error of Yue et al. 2022, ``sum_ij (f_ij - y_ij)^2 / (2 n C)``;
``"cross-entropy"`` is ``-sum_ij y_ij log softmax(f_i)_j / n``. Either one's gradient by the outputs
is ``-output_scale(...) * residual(...)``. Outputs f and one-hot or soft targets Y are (n, C).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Loss = Literal["mse", "cross-entropy"]
OUTPUT_OFFSET = "output-offset"  # key of a message's configuration


def check_loss(loss: str) -> Loss:
    """Return `loss` if it names one of the two losses."""
    if loss not in get_args(Loss):
        raise ValueError(f"loss: expected one of {', '.join(get_args(Loss))}, got {loss!r}")
    return loss  # type: ignore[return-value]


def require_scores(outputs: Tensor, loss: Loss) -> None:
    """Refuse a network for cross-entropy, which takes scores, that ends in probabilities.

    Its `outputs` (n, C) are of a few examples, with their graph.
    """
    node: Any = outputs.grad_fn
    while node is not None and node.name().startswith(("View", "UnsafeView", "Squeeze")):
        node = node.next_functions[0][0]
    name, values = "" if node is None else node.name(), outputs.detach()
    total = (values if bool((values >= 0).all()) else values.exp()).sum(1)
    by_hand = name.startswith(("Div", "Exp", "Mul", "Sub", "Log"))
    by_hand = by_hand and torch.allclose(total, torch.ones_like(total), atol=1e-4)
    named = name.startswith(("Softmax", "LogSoftmax", "Sigmoid", "LogSigmoid"))
    if loss == "cross-entropy" and (named or by_hand):
        raise ValueError(
            "model: expected scores, which the loss cross-entropy turns into probabilities, got "
            "probabilities, or their logarithms; leave out its last softmax or sigmoid"
        )


def residual(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Targets minus predictions (n, C): ``Y - f`` for MSE, ``Y - softmax(f)`` for cross-entropy."""
    return targets - (outputs if loss == "mse" else _softmax(outputs))


def output_hessian(outputs: Tensor, vector: Tensor, loss: Loss) -> Tensor:
    """Multiply `vector` (n, C) by the loss's Hessian by the outputs, over its scale.

    That is the identity for MSE, ``diag(p) - p p^T`` for cross-entropy, p = softmax(f).
    """
    if loss == "mse":
        return vector
    p = _softmax(outputs)
    return p * (vector - (p * vector).sum(1, keepdim=True))


def hessian_root(outputs: Tensor, loss: Loss) -> Tensor:
    """L, shape (n, C, C), for which ``L L^T`` is the Hessian of :func:`output_hessian`.

    That is the identity for MSE, ``diag(s) - p s^T`` with s = sqrt(p) for cross-entropy.
    """
    if loss == "mse":
        return torch.eye(outputs.shape[1]).to(outputs).expand(len(outputs), -1, -1)
    p = _softmax(outputs)
    return torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)


def _softmax(outputs: Tensor) -> Tensor:
    """Softmax over the outputs, by columns: torch is several times slower by short rows."""
    return torch.softmax(outputs.T, dim=0).T


def output_scale(num_examples: int, num_outputs: int, loss: Loss) -> float:
    """Factor of the gradient: 1/(n C) for MSE, 1/n for cross-entropy."""
    return 1.0 / (num_examples * (num_outputs if loss == "mse" else 1))


def loss_value(outputs: Tensor, targets: Tensor, loss: Loss) -> float:
    """Loss averaged over the n examples, summed in float64.

    Examples
    --------
    >>> loss_value(torch.zeros(4, 10), one_hot(torch.arange(4), 10), "cross-entropy")
    2.302585092994046
    """
    outputs, targets = outputs.double(), targets.double()
    if loss == "mse":
        return float((outputs - targets).square().sum() / (2 * outputs.numel()))
    return float(-(targets * torch.log_softmax(outputs, dim=1)).sum() / len(outputs))


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One-hot rows, shape (n, num_classes), of integer labels in 0 ... num_classes - 1."""
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels: expected 0 ... {num_classes - 1}, "
            f"got {int(labels.min())} ... {int(labels.max())}; set the number of classes to match"
        )
    return torch.nn.functional.one_hot(labels.long(), num_classes).to(dtype)


def log_class_prior(targets: Tensor, counts: Tensor | None = None) -> Tensor:
    """Offset log(pi_c / rho_c), shape (C,), added to the outputs while a cross-entropy is reduced.

    Source: Menon et al., *Long-Tail Learning via Logit Adjustment*, ICLR 2021, eq. (10), with
    tau = 1. A network that fits the shares pi of some examples with the offset predicts,
    without it, as if the shares were rho: by default 1/C, otherwise those of `counts` (C,).

    One example that is spread over the classes smooths the shares of one-hot targets (n, C), n at
    least 1: pi_c = (n_c + 1/C) / (n + 1), and rho likewise.
    """
    shares = _shares(targets.sum(0, dtype=torch.float64))
    expected = 1 / targets.shape[1] if counts is None else _shares(counts.to(shares))
    return (shares / expected).log().to(targets.dtype)


def _shares(counts: Tensor) -> Tensor:
    return (counts + 1 / len(counts)) / (counts.sum() + 1)


def offset_of(config: Mapping[str, Any], num_classes: int) -> Tensor:
    """Return the offset of the outputs in a message's configuration; zeros without one."""
    offset = config.get(OUTPUT_OFFSET, [0.0] * num_classes)
    numbers = isinstance(offset, list) and all(isinstance(v, float) for v in offset)
    if not numbers or len(offset) != num_classes or not all(map(math.isfinite, offset)):
        raise ValueError(
            f"{OUTPUT_OFFSET}: expected {num_classes} finite numbers, got {str(offset)[:80]}"
        )
    return torch.tensor(offset)
