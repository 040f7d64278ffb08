"""Predictions of several models together, and how far they can be trusted.

Sources: Shi et al., *Fed-ensemble*, 2021, section 3.1 (the mean of K models); Lakshminarayanan et
al., *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*, NeurIPS 2017
(probabilities are averaged); Depeweg et al., *Decomposition of Uncertainty in Bayesian Deep
Learning*, ICML 2018, section 2 (entropy and variance split in two).
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from .network import Evaluation, NetworkPredictor, Predictor
from .tct_model import TCTModel


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainty of an ensemble about each of n examples, by cause; all of shape (n,), in nats.

    `entropy`, H(mean of p_k), is that of the prediction; `expected_entropy`, the mean of H(p_k),
    the part that all models share, such as noise in the labels; `mutual_information`, their
    difference, the models' disagreement: large for examples unlike those of training, 0 for K = 1.
    `variance` is the sum over the classes of the variance of p_k over the models (divided by K).
    """

    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    variance: Tensor


def entropy(probabilities: Tensor) -> Tensor:
    """Return -sum of p log p over the last axis, in nats; 0 log 0 is 0."""
    terms: Tensor = torch.special.xlogy(probabilities, probabilities)
    return -terms.sum(-1)


def uncertainty_of(probabilities: Tensor) -> Uncertainty:
    """Compute the uncertainty of K models about n examples, from probabilities (K, n, C)."""
    total, expected = entropy(probabilities.mean(0)), entropy(probabilities).mean(0)
    disagreement = (total - expected).clamp(min=0.0)
    variance = probabilities.var(0, unbiased=False).sum(-1)
    return Uncertainty(total, expected, disagreement, variance)


class EnsemblePredictor(Predictor):
    """The mean of several models' predictions.

    With the loss cross-entropy the mean is that of probabilities, and scores are its logarithm;
    with MSE it is that of outputs. Models of both losses together count as of cross-entropy, with
    the softmax of their scores.

    Evaluations also report ``model-accuracy-max``, ``-mean`` and ``-min`` over the models; with
    cross-entropy also ``model-entropy-mean`` (Shi et al. 2021, Table 4) and ``mutual-information``:
    the examples' means, in nats.

    Examples
    --------
    >>> members = [NetworkPredictor(nn.Linear(4, 3)) for _ in range(5)]
    >>> ensemble = EnsemblePredictor(members)
    >>> ensemble.predict(torch.ones(2, 4)).exp().sum(1).round(decimals=5)
    tensor([1., 1.])
    """

    FILE = "ensemble.json"

    def __init__(self, members: Iterable[Predictor]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        losses = {member.loss for member in self.models}
        if not losses:
            raise ValueError("members: expected at least one model")
        self.loss = losses.pop() if len(losses) == 1 else "cross-entropy"

    def __len__(self) -> int:
        return len(self.members)

    @property
    def models(self) -> list[Predictor]:
        """The K models."""
        return [cast(Predictor, member) for member in self.members]

    def scores(self, x: Any) -> Tensor:
        """Return each model's scores of examples (n, ...): shape (K, n, C), on the CPU."""
        x = self.prepare(x)
        return torch.stack([member.predict(x) for member in self.models])

    def probabilities(self, x: Any) -> Tensor:
        """Return each model's probabilities of the classes, (K, n, C); not for MSE."""
        if self.loss != "cross-entropy":
            raise ValueError(f"expected models with cross-entropy, got {self.loss}")
        return self.scores(x).softmax(-1)

    def predict(self, x: Any) -> Tensor:
        """Return log of the mean probabilities, or for MSE the mean outputs: shape (n, C)."""
        return self.together(self.scores(x))

    def together(self, scores: Tensor) -> Tensor:
        """Return the ensemble's scores (n, C), given each model's (K, n, C)."""
        if self.loss == "cross-entropy":
            return scores.log_softmax(-1).logsumexp(0) - math.log(len(scores))
        return scores.mean(0)

    def uncertainty(self, x: Any) -> Uncertainty:
        """Compute the uncertainty of the ensemble about examples (n, ...)."""
        return uncertainty_of(self.probabilities(x))

    def loss_of(self, outputs: Tensor, targets: Tensor) -> float:  # noqa: D102
        alike = (member for member in self.models if member.loss == self.loss)
        return next(alike).loss_of(outputs, targets)

    def _evaluate(self, x: Any, y: Tensor) -> Evaluation:
        scores = self.scores(x)
        accuracies = [m._compare(s, y).score for m, s in zip(self.models, scores, strict=True)]
        more = {
            "model-accuracy-max": max(accuracies),
            "model-accuracy-mean": sum(accuracies) / len(accuracies),
            "model-accuracy-min": min(accuracies),
        }
        if self.loss == "cross-entropy":
            uncertain = uncertainty_of(scores.double().softmax(-1))
            more["model-entropy-mean"] = float(uncertain.expected_entropy.mean())
            more["mutual-information"] = float(uncertain.mutual_information.mean())
        together = self._compare(self.together(scores), y)
        return together._replace(more={**together.more, **more})

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for k, member in enumerate(self.models):
            member.save(folder / f"model-{k}")
        described = {"format": 1, "kinds": [type(member).__name__ for member in self.models]}
        (folder / self.FILE).write_text(json.dumps(described, indent=2), encoding="utf-8")

    @classmethod
    def _load(cls, folder: Path, network: nn.Module) -> Self:
        path = folder / cls.FILE
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            by_name: dict[str, type[Predictor]] = {
                kind.__name__: kind for kind in (NetworkPredictor, TCTModel, cls)
            }
            kinds = [by_name[name] for name in described["kinds"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} describes no ensemble: {error!r}") from error
        members = [kind.load(path.parent / f"model-{k}", network) for k, kind in enumerate(kinds)]
        return cls(members)
