"""Similarity-weighted FedAvg: a model for each client, mixed from those of clients like it.

Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning through
Feature Learning Theory*, ICLR 2024, section 6.2:

    s_kk' = exp(cos(p_k, p_k') / tau) / sum over i of exp(cos(p_k, p_i) / tau)
    W_k <- sum over k' of s_kk' W_k'

with p_k the concatenated prototypes of client k after its local training. (The paper's last line
has W_k on its right, without the prime.) The sums run over the clients of a round, of which the
paper samples a half; or, by option, over all that were ever heard of, as they were last known.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedntk.ntk import BadReply, FeatureMap
from fedntk.ntk.averages import mixtures
from fedntk.ntk.options import option, state
from fedntk.ntk.parts import batch_norm_arrays
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.payloads.screening import change_size, screen_sizes
from fedntk.ntk.robust_averages import bound_changes
from fedntk.ntk.similarity import Absent, cosine_similarities, similarity_weights
from fedntk.ntk.support.arrays import Arrays

from ..core.exchange import Pairs
from ..core.features import FeatureStrategy
from ..core.replies import Reply, check_weights
from .client_models import ClientModels
from .personalised import PersonalStrategy

PROTOTYPES = "prototypes"  # record of a reply


class Mixing(NamedTuple):
    """The weights by which a round's models were mixed."""

    clients: tuple[int, ...]  # ids of the K clients, in order
    similarities: NDArray[np.float64]  # cosines of their prototypes: (K, K)
    weights: NDArray[np.float64]  # s_kk', each row sums to 1: (K, K)
    server_round: int


class _Upload(NamedTuple):
    client: int
    weights: dict[str, NDArray[Any]]
    prototypes: Prototypes


class WeightedFedAvg(FeatureStrategy, PersonalStrategy):
    """Similarity-weighted FedAvg (Huang et al. 2024, section 6.2).

    Clients are :class:`~fedntk.clients.WeightedFedAvgClient`. Each trains a model of its own, which
    the server mixes from those of the clients like it. With ``over="round"`` a client is sent the
    W_k of its last round; with ``over="all"`` a mixture of what all clients last sent, formed when
    the client is asked. A new client is sent the global model, which the Result holds: the mean of
    the round's models weighted by examples, as in FedAvg. :meth:`model_of` returns a client's own,
    ``mixing`` the weights of the newest round that changed the models.
    """

    client = "WeightedFedAvgClient"
    replies = "weights and prototypes"
    defences = ("none", "norm-bound")

    similarity: Literal["prototypes", "entk"] = option(
        "by what clients are compared: class means of the last layer's inputs, as by Huang et al. "
        "2024, or of tangent features (ours): clients are alike if their models would learn the "
        "same next",
        default="prototypes",
    )
    temperature: float = option(
        "tau of the softmax over similarities", default=1.0, above=0, at_most=float("inf")
    )
    absent: Absent = option(
        "a class that a client lacks: zero: counts as zeros, as by Huang et al. 2024; common: "
        "pairs are compared over the classes that both have",
        default="zero",
    )
    over: Literal["round", "all"] = option(
        "whose models are mixed: round: those of the round's clients; all: those that all clients "
        "last sent",
        default="round",
    )
    by_examples: bool = option(
        "weights also grow with a client's examples; the paper's do not", default=False
    )
    personal_batch_norm: bool = option(
        "BatchNorm stays with the clients, as in FedBN", default=False
    )
    num_features: int = option(
        "p of similarity = entk; 0: all coordinates", default=1000, at_least=0
    )
    feature_seed: int = option(
        "seed of similarity = entk, shared by all clients", default=123, at_least=0
    )
    memory_budget: float = option(
        "GB of clients' models in the server's memory, beside the replies of a round; more are "
        "kept on disk",
        default=4.0,
        at_least=0,
        at_most=float("inf"),
        compared=False,
    )
    mixing: Mixing | None = state(lambda: None, saved=False)
    # W_k; with over="all", what each last sent, and the mixtures of it that were asked for
    _models: ClientModels = state(ClientModels)
    _mixed: ClientModels = state(ClientModels, saved=False)
    # prototypes that each client last sent; with over="round" they are not needed later
    _means: dict[int, NDArray[Any]] = state(dict)
    _counts: dict[int, NDArray[Any]] = state(dict)
    _examples: dict[int, int] = state(dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.personal = batch_norm_arrays(self.network) if self.personal_batch_norm else ()
        if self.personal_batch_norm and not self.personal:
            raise ValueError("personal_batch_norm: the network has no BatchNorm layers")
        if self.similarity == "entk":
            self.feature_map = FeatureMap("entk", self.num_features, self.feature_seed, self.head)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Divide the budget of memory."""
        initial_arrays = super().begin(initial_arrays, num_rounds, done)
        both = (self._models, self._mixed) if self.over == "all" else (self._models,)
        for models in both:
            models.limit_to(self.memory_budget * 2**30 / len(both))
        return initial_arrays

    def shared_for(self, client: int, shared: ArrayRecord) -> ArrayRecord:
        """Return a client's own model, without what stays with it."""
        model = self.model_of(client)
        return shared if model is None else ArrayRecord({n: Array(model[n]) for n in shared})

    def model_of(self, client: int) -> Arrays | None:
        """Return the shared arrays of a client's model W_k; None if nothing is known of it.

        `client` is its id in the registry: its partition.
        """
        if client not in self._models:
            return None
        if self.over == "round":
            return self._models[client]
        if client not in self._mixed:
            known = sorted(self._means)
            _, weights = self._compare([client], known)
            self._mixed[client] = next(mixtures(weights, [self._models[k] for k in known]))
        return self._mixed[client]

    def parse(self, reply: Reply) -> _Upload:
        """Check weights and prototypes."""
        weights, prototypes = reply.array_records(self.arrayrecord_key, PROTOTYPES)
        checked = check_weights(weights, self.shared)
        return _Upload(reply.client, checked, self.check_prototypes(prototypes))

    def screen(self, own: Sequence[_Upload], most: float) -> list[BadReply | None]:
        """Refuse weights that are much farther from what was sent than those of others."""
        shared = self.shared
        sizes = [change_size(self.model_of(k) or shared, weights) for k, weights, _ in own]
        return screen_sizes(sizes, most)

    def merge(self, pairs: Pairs[Any]) -> Mapping[str, NDArray[Any]]:
        """Mix a model for each client, and return the mean of what came."""
        for reply, own in pairs:
            self._means[reply.client] = own.prototypes.means
            self._counts[reply.client] = own.prototypes.counts
            self._examples[reply.client] = reply.num_examples
        clients = [reply.client for reply, _ in pairs]
        sent = [own.weights for _, own in pairs]
        everyone = sorted(self._means) if self.over == "all" else clients
        if self.defence == "norm-bound":
            sent = bound_changes([self.model_of(k) or self.shared for k in clients], sent)
        similarities, weights = self._compare(everyone, everyone)
        if self.over == "all":
            self._mixed = ClientModels(self._mixed.budget)
            self._models.update(zip(clients, sent, strict=True))
        else:
            self._means, self._counts = {}, {}
            self._models.update(zip(clients, mixtures(weights, sent), strict=True))
        self.mixing = Mixing(tuple(everyone), similarities, weights, self.server_round)
        others = ~np.eye(len(everyone), dtype=bool)
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(1)
        metrics = self.train_metrics[self.server_round]
        metrics["similarity-mean"] = float(similarities[others].mean()) if others.any() else 1.0
        metrics["own-weight-mean"] = float(np.diag(weights).mean())
        metrics["effective-clients"] = float(np.exp(entropy).mean())
        return super().merge([(reply, own.weights) for reply, own in pairs])

    def _compare(
        self, clients: Sequence[int], others: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return similarities and weights of clients (rows) and others (columns)."""
        own, their = (
            [Prototypes(self._means[k], self._counts[k]) for k in each]
            for each in (clients, others)
        )
        similarities = cosine_similarities(own, their, absent=self.absent)
        for row, client in enumerate(clients):
            similarities[row, [k == client for k in others]] = 1.0
        examples = [self._examples[k] for k in others] if self.by_examples else None
        weights = similarity_weights(similarities, temperature=self.temperature, examples=examples)
        return similarities, weights
