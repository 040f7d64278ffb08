"""How good predicted probabilities are, and how good a measure of their uncertainty is.

Sources: Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017, section 2 (expected
calibration error, reliability diagram); Lakshminarayanan et al., *Simple and Scalable Predictive
Uncertainty Estimation using Deep Ensembles*, NeurIPS 2017, section 3 (Brier score; another data set
as unfamiliar examples; accuracy of the examples that the model is certain of).
"""

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS = 15  # of confidence, of equal width, as by Guo et al. 2017
SHARES = np.arange(100) / 100  # of the examples that are rejected


def calibration(log_probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, NLL, Brier score and ECE of predictions (n, C) of the classes `labels` (n,).

    Logarithms are in nats, since a probability of 1e-400 is 0 in float64. All are means over the
    examples: ``brier`` of the squared distance to the one-hot label, in 0 ... 2; ``ece`` of the
    distance between accuracy and mean confidence in 15 bins of confidence of equal width.
    """
    log_p = log_probabilities.double()
    p, targets = log_p.exp(), torch.nn.functional.one_hot(labels, log_p.shape[1])
    bins = reliability(p, labels)
    return {
        "accuracy": float((log_p.argmax(1) == labels).double().mean()),
        "nll": float(torch.nn.functional.nll_loss(log_p, labels)),
        "brier": float((p - targets).square().sum(1).mean()),
        "ece": float(np.average((bins.confidence - bins.accuracy).abs(), weights=bins.examples)),
    }


def reliability(probabilities: Tensor, labels: Tensor) -> pd.DataFrame:
    """Return bin, examples, confidence and accuracy of each of 15 equal bins that has examples."""
    confidence, prediction = probabilities.double().max(1)
    number = (BINS * confidence).long().clamp(max=BINS - 1)
    columns = {"bin": number, "confidence": confidence, "accuracy": (prediction == labels).double()}
    table = pd.DataFrame({name: column.numpy() for name, column in columns.items()})
    grouped = table.groupby("bin")
    means = grouped[["confidence", "accuracy"]].mean()
    means.insert(0, "examples", grouped.size())
    return means.reset_index()


def rejection_curve(
    uncertainty: NDArray[np.float64], correct: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the accuracy of what is left when the most uncertain examples are rejected.

    Of `uncertainty` and `correct` (n,): the accuracy (100,) with 0, 1, ... 99 % rejected, rounded
    down to whole examples. Of equally uncertain examples it is the mean over their orders.
    """
    values, group = np.unique(uncertainty, return_inverse=True)
    sizes = np.bincount(group, minlength=len(values))
    right = np.bincount(group, weights=correct, minlength=len(values))
    expected = np.repeat(right / sizes, sizes)  # from the most certain example on
    left = len(correct) - np.arange(100) * len(correct) // 100
    accuracies: NDArray[np.float64] = np.cumsum(expected) / np.arange(1, len(correct) + 1)
    return accuracies[left - 1]


def auroc(familiar: NDArray[np.float64], unfamiliar: NDArray[np.float64]) -> float:
    """Return the probability that an unfamiliar example is more uncertain than a familiar one."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([0, 1], [len(familiar), len(unfamiliar)])
    return float(roc_auc_score(truth, np.concatenate([familiar, unfamiliar])))
