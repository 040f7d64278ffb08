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
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import EnsemblePredictor, NetworkPredictor, Predictor, loss_value, require_memory
from fedntk.ntk.averages import are_finite, convex_combination, weighted_mean
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.ensemble_arrays import EnsembleArrays
from fedntk.ntk.predictors.network import arrays_of, load_arrays

from ..core.averaging import Learned, cast_like, differing, named_arrays
from ..core.base import BaseStrategy
from ..core.exchange import Aggregated, logger
from .distillation import Distillation, distil, sharpen
from .model_samples import (
    Distribution,
    dirichlet_shares,
    gaussian_model,
    mean_probabilities,
    standard_deviation,
)

Weights = dict[str, NDArray[Any]]


class FedBE(BaseStrategy):
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

    averages = False

    distribution: Distribution = option("from which models are drawn", default="gaussian")
    num_samples: int = option("M: models drawn a round", default=10, at_least=0)
    alpha: float = option(
        "concentration of distribution = dirichlet: many clients share a model if it is large",
        default=1.0,
        at_least=1e-6,
        at_most=1e12,
    )
    client_models: bool = option(
        "the clients' own models are in the ensemble, and so in the Result and in checkpoints",
        default=True,
    )
    distill: Distillation | None = argument(
        "the server's examples, network and rates of the distillation; None: none", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill is not None and not isinstance(self.distill, Distillation):
            raise ValueError(
                "distill: expected a Distillation(network, examples), got "
                f"{type(self.distill).__name__}"
            )

    def settings(self) -> dict[str, Any]:
        """Add those of the distillation."""
        distill = None if self.distill is None else self.distill.settings()
        return {**super().settings(), "distill": distill}

    @property
    def learned(self) -> str:
        """What the newest global arrays hold: ``"ensemble"``, or the distilled ``"network"``."""
        return "ensemble" if self.distill is None else super().learned

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the global model, which clients are sent: model 0 of an ensemble."""
        if self.distill is None and EnsembleArrays.are_in(arrays):
            return ArrayRecord(EnsembleArrays.from_arrays(arrays).models[0])
        return arrays

    def predictor(self, arrays: Learned, network: nn.Module | None = None) -> Predictor:
        """Make the predictor of the ensemble, or of the distilled network."""
        if self.distill is not None:
            return super().predictor(arrays, network)
        models = EnsembleArrays.from_arrays(named_arrays(arrays)).models
        whole = self.architecture(network)
        return EnsemblePredictor(NetworkPredictor.from_arrays(whole, own) for own in models)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Begin with an ensemble of only the initial network, unless given an ensemble."""
        initial_arrays = super().begin(initial_arrays, num_rounds, done)
        size = sum(len(array.data) for array in self.network_of(initial_arrays).values())
        models = 1 + self.num_samples + (self.min_train_nodes if self.client_models else 0)
        held = self.min_train_nodes + (2 if self.distill else models)
        require_memory(
            held * size,
            f"{held} models of {size / 1e6:.1f} MB",
            cure="sample fewer clients a round, or lower num_samples",
        )
        if self.distill is None:
            if EnsembleArrays.are_in(initial_arrays):
                return initial_arrays
            return ArrayRecord(EnsembleArrays((dict(initial_arrays),)).to_arrays())
        if odd := differing(self.distill.network.state_dict(), initial_arrays):
            raise ValueError(
                "initial_arrays: expected those of the network that distill was given, got "
                f"others: {', '.join(odd[:5])[:200]}; give both the same architecture"
            )
        return initial_arrays

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Send the global model, whatever the stage."""
        return super().content_for(client, stage, self.network_of(arrays), config)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Form the ensemble of the accepted weights, and distil it if there is distillation."""
        model = named_arrays(self.network_of(self.global_arrays))
        pairs, metrics = self.accept_weights(replies, model)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(pairs)):
            return None, metrics
        clients = [weights for _, weights in pairs]
        num_examples = [reply.num_examples for reply, _ in pairs]
        mean = cast_like(weighted_mean(clients, num_examples), model)
        own = len(clients) if self.client_models else 0
        metrics["ensemble-size"] = 1 + self.num_samples + own
        models = self._ensemble(server_round, mean, clients, num_examples)
        if self.distill is not None:
            return self._distil(server_round, self.distill, mean, models, metrics), metrics
        return ArrayRecord(EnsembleArrays(tuple(map(dict, models))).to_arrays()), metrics

    def _ensemble(
        self, server_round: int, mean: ArrayRecord, clients: list[Weights], num_examples: list[int]
    ) -> Iterator[ArrayRecord]:
        """Yield the models of the ensemble; each is drawn when it is asked for."""
        centre = named_arrays(mean)
        yield mean
        gaussian = self.distribution == "gaussian"
        deviation = standard_deviation(clients, num_examples) if gaussian else {}
        for k in range(self.num_samples):
            generator = np.random.default_rng([self.seed, server_round, k, *b"models"])
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
        self,
        server_round: int,
        options: Distillation,
        mean: ArrayRecord,
        models: Iterator[ArrayRecord],
        metrics: MetricRecord,
    ) -> ArrayRecord:
        """Return the network that the ensemble is distilled into, or the mean if that fails."""
        x, device = options.examples, options.device
        arrays = map(named_arrays, models)
        probabilities = mean_probabilities(options.network, arrays, x, device=device)
        labels = sharpen(probabilities, options.temperature)
        student = copy.deepcopy(options.network)
        load_arrays(student, named_arrays(mean))
        seeds = np.random.SeedSequence([self.seed, server_round, *b"distillation"])
        before = NetworkPredictor(student, device=device).predict(x)
        student = distil(student, labels, options, int(seeds.generate_state(1)[0]))
        after = NetworkPredictor(student, device=device).predict(x)
        distilled = arrays_of(student)
        losses = [loss_value(outputs, labels, "cross-entropy") for outputs in (before, after)]
        finite = are_finite(distilled, named_arrays(mean)) and bool(np.isfinite(losses).all())
        metrics["distilled"] = int(finite)
        if not finite:
            logger.warning(
                "the distillation left finite numbers: the mean is the next global model; lower "
                "its learning_rate"
            )
            return mean
        metrics["distillation-loss-before"], metrics["distillation-loss"] = losses
        return cast_like(distilled, named_arrays(mean))
