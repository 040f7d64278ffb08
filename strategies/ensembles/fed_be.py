"""Server of FedBE: an ensemble of models drawn from a distribution over the clients' models.

Source: Chen and Chao, *FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning*,
ICLR 2021, algorithm 1. In each round

    clients train the global model w, and send w_i                  as in FedAvg
    fit a Gaussian or a Dirichlet distribution to the w_i
    ensemble = the mean of the w_i, M models drawn from it, and the w_i
    p(x) = the mean of the ensemble's probabilities

Without distillation the mean is the next global model. With it, the mean is trained on the server's
unlabelled examples towards the sharpened p(x), its weights averaged on the way (Izmailov et al.
2018), and the result is the next global model.
"""

import copy
from collections.abc import Iterator
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import EnsemblePredictor, NetworkPredictor, Predictor, loss_value
from fedntk.ntk.averages import are_finite, convex_combination, weighted_mean
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.predictors.network import arrays_of, load_arrays

from ..core.averaging import Learned, cast_like, differing, named_arrays
from ..core.channel import Rounds
from ..core.replies import accuracy_of, check_weights, screen_accuracies
from ..core.round import Round
from ..core.strategy import Strategy, architecture_of
from ..core.uploads import Update, Uploads
from .distillation import Distillation, distil, sharpen
from .model_samples import (
    Distribution,
    dirichlet_shares,
    gaussian_model,
    mean_probabilities,
    standard_deviation,
)

logger = getLogger("flwr")
Weights = dict[str, NDArray[Any]]


class FedBE(Strategy):
    """FedBE: samples models around the clients' and averages their predictions.

    Clients are FedAvg's, receive and send one model, and evaluate it, not the ensemble.

    Without distillation the result is the newest round's ensemble, as
    :class:`~fedntk.ntk.payloads.ensemble_arrays.EnsembleArrays`: model 0 is the mean, which the
    next round's clients are sent; then come the M that were drawn, then the clients' own, by
    client. Before the first round it is only the initial network. With distillation the result is
    one network.

    Examples
    --------
    >>> import torch
    >>> strategy = FedBE(num_samples=5)
    >>> x = torch.randn(20, 4)  # without labels
    >>> strategy = FedBE(distill=Distillation(torch.nn.Linear(4, 3), x, epochs=5))
    """

    distribution: Distribution = option("from which models are drawn", default="gaussian")
    num_samples: int = option("M: models drawn a round", default=10, at_least=0)
    alpha: float = option(
        "concentration of distribution = dirichlet: many clients share a model if it is large",
        default=1.0,
        at_least=1e-6,
        at_most=1e12,
    )
    client_models: bool = option(
        "the clients' own models are in the ensemble, the Result and checkpoints", default=True
    )
    distill: Distillation | None = argument(
        "the server's examples, network and rates of the distillation; None: none", default=None
    )

    def check(self) -> None:
        """Refuse what is no distillation."""
        if self.distill is not None and not isinstance(self.distill, Distillation):
            kind = type(self.distill).__name__
            raise ValueError(f"distill: expected a Distillation(network, examples), got {kind}")

    def further_settings(self) -> dict[str, Any]:
        """Return those of the distillation."""
        return {"distill": None if self.distill is None else self.distill.settings()}

    @property
    def learned(self) -> str:
        """What the newest global arrays hold: ``"ensemble"``, or the distilled ``"network"``."""
        return "ensemble" if self.distill is None else "network"

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the global model, which clients are sent: model 0 of an ensemble."""
        if self.distill is None and EnsembleArrays.are_in(arrays):
            return ArrayRecord(EnsembleArrays.from_arrays(arrays).models[0])
        return arrays

    def predictor(self, arrays: Learned, network: nn.Module | None = None) -> Predictor:
        """Make the predictor of the ensemble, or of the distilled network."""
        whole = architecture_of(self, network)
        if self.distill is not None:
            return NetworkPredictor.from_arrays(whole, named_arrays(arrays), loss="cross-entropy")
        models = EnsembleArrays.from_arrays(named_arrays(arrays)).models
        return EnsemblePredictor(NetworkPredictor.from_arrays(whole, model) for model in models)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Begin with an ensemble of only the initial network, unless given an ensemble."""
        if self.distill is None:
            if EnsembleArrays.are_in(initial_arrays):
                return initial_arrays
            return ArrayRecord(EnsembleArrays((dict(initial_arrays),)).to_arrays())
        if names := differing(self.distill.network.state_dict(), initial_arrays):
            raise ValueError(
                "initial_arrays: expected those of the network that distill was given, which "
                f"differ in {', '.join(names[:5])[:200]}"
            )
        return initial_arrays

    def train_round(self, r: Round) -> Rounds[Update]:
        """Form the ensemble of the clients' weights, and distil it if there is distillation."""
        network = self.network_of(r.arrays)
        model = named_arrays(network)
        uploads = yield from r.ask(
            lambda reply: check_weights(reply.arrays(), model), arrays=network
        )
        uploads = self.screening.drop_outliers(uploads, model)
        if not self.enough(uploads):
            return Update(uploads)
        mean = cast_like(weighted_mean(uploads.values, uploads.counts), model)
        count = 1 + self.num_samples + (len(uploads) if self.client_models else 0)
        metrics: dict[str, Any] = {"ensemble-size": count}
        models = self.models_of(r, mean, uploads)
        if self.distill is not None:
            distilled, measured = self._distil(r, self.distill, mean, models)
            return Update(uploads, distilled, metrics | measured)
        arrays = ArrayRecord(EnsembleArrays(tuple(map(dict, models))).to_arrays())
        return Update(uploads, arrays, metrics)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate the global model."""
        uploads = yield from r.ask(accuracy_of, arrays=self.network_of(r.arrays))
        return self.screening.drop(uploads, screen_accuracies)

    def models_of(
        self, r: Round, mean: ArrayRecord, uploads: Uploads[Weights]
    ) -> Iterator[ArrayRecord]:
        """Yield the models of the ensemble; each is drawn when it is asked for."""
        centre = named_arrays(mean)
        clients, num_examples = uploads.values, uploads.counts
        yield mean
        gaussian = self.distribution == "gaussian"
        deviation = standard_deviation(clients, num_examples) if gaussian else {}
        for k in range(self.num_samples):
            generator = np.random.default_rng([self.sampling.seed, r.number, k, *b"models"])
            if gaussian:
                drawn = gaussian_model(centre, deviation, clients, generator)
            else:
                shares = dirichlet_shares(num_examples, self.alpha, generator)
                drawn = convex_combination(clients, shares.tolist())
            yield cast_like(drawn, centre)
        if self.client_models:
            for weights in clients:
                yield ArrayRecord({name: Array(weights[name]) for name in centre})

    def _distil(
        self, r: Round, options: Distillation, mean: ArrayRecord, models: Iterator[ArrayRecord]
    ) -> tuple[ArrayRecord, dict[str, Any]]:
        """Return the network that the ensemble is distilled into, or the mean, and metrics."""
        x, device = options.examples, options.device
        arrays = map(named_arrays, models)
        probabilities = mean_probabilities(options.network, arrays, x, device=device)
        labels = sharpen(probabilities, options.temperature)
        student = copy.deepcopy(options.network)
        load_arrays(student, named_arrays(mean))
        seeds = np.random.SeedSequence([self.sampling.seed, r.number, *b"distillation"])
        before = NetworkPredictor(student, device=device).predict(x)
        student = distil(student, labels, options, int(seeds.generate_state(1)[0]))
        after = NetworkPredictor(student, device=device).predict(x)
        distilled = arrays_of(student)
        losses = [loss_value(outputs, labels, "cross-entropy") for outputs in (before, after)]
        finite = are_finite(distilled, named_arrays(mean)) and bool(np.isfinite(losses).all())
        if not finite:
            logger.warning(
                "the distillation left finite numbers: the mean is the next global model; lower "
                "its learning_rate"
            )
            return mean, {"distilled": 0}
        metrics = {"distillation-loss-before": losses[0], "distillation-loss": losses[1]}
        return cast_like(distilled, named_arrays(mean)), {"distilled": 1, **metrics}
