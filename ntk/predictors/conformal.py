"""Split-conformal prediction: sets of classes, or intervals, with a stated coverage.

Sources: Vovk et al., *Algorithmic Learning in a Random World*, 2005; Angelopoulos and Bates, *A
Gentle Introduction to Conformal Prediction*, 2021, section 1 (score 1 - p_y) and appendix D
(coverage given the calibration examples); Lei et al., *Distribution-Free Predictive Inference for
Regression*, JASA 2018, algorithm 2 (absolute residuals); Romano et al., *Classification with Valid
and Adaptive Coverage*, NeurIPS 2020, section 2 (adaptive sets).

With n calibration scores and the coverage 1 - alpha, the threshold q is the k-th smallest score,
k = ceil((n + 1)(1 - alpha)), and a set holds each class with a score of at most q. If calibration
examples and the new one are exchangeable, the set holds the true class with probability at least
1 - alpha, over both; it is not a coverage for each class or client. Given the calibration examples,
the coverage follows Beta(k, n + 1 - k) if no two scores are the same. The score of a real target y
with the prediction f is |y - f|, and the interval f - q ... f + q.
"""

import math
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from ..losses import one_hot

Score = Literal["threshold", "adaptive"]


def rank(num_examples: int, coverage: float) -> int:
    """Return k = ceil((n + 1) coverage), the rank of the threshold among n scores; n + 1 is none.

    The coverage counts as the decimal number that it is written as, so that 0.7 of 10 is 7.

    Examples
    --------
    >>> rank(9, 0.7), rank(9, 0.9), rank(8, 0.9)
    (7, 9, 9)
    """
    return math.ceil((num_examples + 1) * _decimal(coverage))


def examples_needed(coverage: float) -> int:
    """Return the smallest n with ceil((n + 1) coverage) <= n: the fewest calibration examples.

    Examples
    --------
    >>> [examples_needed(coverage) for coverage in (0.5, 0.9, 0.99)]
    [1, 9, 99]
    """
    return math.ceil(_decimal(coverage) / (1 - _decimal(coverage)))


def _decimal(coverage: float) -> Fraction:
    if not 0 < coverage < 1:
        raise ValueError(f"coverage: expected a number between 0 and 1, got {coverage}")
    return Fraction(repr(float(coverage)))


def conformal_scores(
    probabilities: Tensor, *, score: Score = "threshold", draws: Tensor | None = None
) -> Tensor:
    """Score how badly each class fits each example: shape (n, C), float64, in 0 ... 1.

    `probabilities` (n, C) are rows that add up to 1. The score ``"threshold"``, 1 - p_y, has the
    smallest sets on average. ``"adaptive"`` is the probability of all classes that are more
    probable than y (the first of equal ones), and `draws` times p_y; the coverage differs less from
    one kind of example to another. `draws` (n,) are uniform in 0 ... 1, by default 1, which may
    give an empty set where the model is nearly certain.
    """
    p = probabilities.double()
    if p.ndim != 2 or p.shape[1] < 2:
        raise ValueError(
            f"probabilities: expected shape (n, C), C at least 2, got {tuple(p.shape)}"
        )
    off = (p.sum(1) - 1).abs() > 1e-6 * p.shape[1]  # C roundings of float32
    if not bool(torch.isfinite(p).all()) or bool((p < 0).any()) or bool(off.any()):
        raise ValueError(
            "probabilities: expected rows of numbers from 0 that add up to 1; take the softmax of "
            "a network's outputs first"
        )
    if score not in get_args(Score):
        raise ValueError(f"score: expected one of {', '.join(get_args(Score))}, got {score!r}")
    if score == "threshold":
        if draws is not None:
            raise ValueError("draws: expected none with the score threshold; leave them out")
        return 1 - p
    draws = torch.ones(len(p)) if draws is None else draws
    if draws.shape != (len(p),) or bool(((draws < 0) | (draws > 1)).any()):
        raise ValueError(
            f"draws: expected {len(p)} numbers between 0 and 1, got shape {tuple(draws.shape)}"
        )
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    above = torch.cat([torch.zeros(len(p), 1, dtype=p.dtype), ordered.cumsum(1)[:, :-1]], 1)
    ordered_scores = above + draws.double()[:, None] * ordered
    return torch.empty_like(ordered_scores).scatter_(1, order, ordered_scores).clamp(max=1.0)


def calibrate(
    probabilities: Tensor,
    labels: Tensor,
    coverage: float,
    *,
    score: Score = "threshold",
    draws: Tensor | None = None,
) -> float:
    """Return the threshold q of the sets' scores: see the module for what it guarantees.

    Probabilities (n, C) are of examples with labels (n,) that were not used in training. The
    coverage is 1 - alpha, between 0 and 1; `score` and `draws` are as in :func:`conformal_scores`.

    Examples
    --------
    >>> p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]])
    >>> q = calibrate(p, torch.tensor([0, 0, 0, 1]), 0.6)  # the third of 0.1, 0.2, 0.4, 0.7
    >>> round(q, 6)
    0.4
    >>> prediction_sets(torch.tensor([[0.55, 0.45], [0.35, 0.65]]), q)
    tensor([[False, False],
            [False,  True]])
    """
    k = _require_rank(len(labels), coverage)
    scores = conformal_scores(probabilities, score=score, draws=draws)
    if labels.shape != (len(scores),) or labels.is_floating_point():
        raise ValueError(
            f"labels: expected {len(scores)} whole numbers, one for each example, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}"
        )
    true_scores = scores[one_hot(labels, scores.shape[1], torch.bool)]
    return float(true_scores.kthvalue(k).values)


def _require_rank(num_examples: int, coverage: float) -> int:
    k = rank(num_examples, coverage)
    if k > num_examples:
        raise ValueError(
            f"a coverage of {coverage:g} needs at least {examples_needed(coverage)} calibration "
            f"examples, got {num_examples}; hold out more, or lower the coverage"
        )
    return k


def calibrate_intervals(predictions: Tensor, targets: Tensor, coverage: float) -> Tensor:
    """Return the half width q (C,) of each real target's intervals, float64, in its unit.

    Predictions and targets (n, C) are of examples that were not used in training. The coverage,
    between 0 and 1, is of each target by itself. The interval of a prediction f is f - q ... f + q.

    Examples
    --------
    >>> y = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> calibrate_intervals(torch.zeros(4, 1), y, 0.6)
    tensor([3.], dtype=torch.float64)
    """
    k = _require_rank(len(targets), coverage)
    if predictions.shape != targets.shape or predictions.ndim != 2:
        shapes = f"{tuple(predictions.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"expected predictions and targets of one shape (n, C), got {shapes}")
    scores = (targets.double() - predictions.double()).abs()
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("expected finite predictions and targets, got NaN or infinity")
    return scores.kthvalue(k, dim=0).values


def prediction_sets(
    probabilities: Tensor,
    threshold: float,
    *,
    score: Score = "threshold",
    draws: Tensor | None = None,
) -> Tensor:
    """Return the set of classes, possibly empty, of each new example: bool, shape (n, C).

    `threshold` is the result of :func:`calibrate` with the same score.
    """
    return conformal_scores(probabilities, score=score, draws=draws) <= threshold
