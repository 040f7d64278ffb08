"""Class shares as an offset of the outputs, so that rare classes are learned like common ones."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OUTPUT_OFFSET = "output-offset"  # key of a message's configuration


def log_class_prior(targets: Tensor, counts: Tensor | None = None) -> Tensor:
    """Offset log(pi_c / rho_c), shape (C,), added to the outputs while a cross-entropy is reduced.

    Source: Menon et al., *Long-Tail Learning via Logit Adjustment*, ICLR 2021, eq. (10), with
    tau = 1. A network that fits the shares pi of some examples with the offset predicts,
    without it, as if the shares were rho: by default 1/C, otherwise those of `counts` (C,).

    One example that is spread over the classes smooths the shares of one-hot targets (n, C),
    n at least 1: pi_c = (n_c + 1/C) / (n + 1), and rho likewise.
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
