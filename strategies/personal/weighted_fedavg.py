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
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, MessageType
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.averages import change_size, mixtures
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.parts import batch_norm_arrays
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.payloads.screening import screen_sizes
from fedntk.ntk.robust_averages import bound_changes
from fedntk.ntk.similarity import Absent, cosine_similarities, similarity_weights
from fedntk.ntk.support.arrays import ArrayDict, Arrays

from ..core.averaging import cast_like, named_arrays
from ..core.channel import Parse, Rounds
from ..core.registry import ClientRounds
from ..core.replies import Reply, accuracy_of, check_weights, screen_accuracies
from ..core.round import Round
from ..core.sampling import Sample
from ..core.strategy import Strategy
from ..core.uploads import Update, Uploads
from .client_models import ClientModels
from .personalised import ask_personal, split

Both = tuple[ArrayDict, Prototypes]
T = TypeVar("T")


class Mixing(NamedTuple):
    """The weights by which a round's models were mixed."""

    clients: tuple[int, ...]  # ids of the K clients, in order
    similarities: NDArray[np.float64]  # cosines of their prototypes: (K, K)
    weights: NDArray[np.float64]  # s_kk', each row sums to 1: (K, K)
    server_round: int


class WeightedFedAvg(Strategy):
    """Similarity-weighted FedAvg (Huang et al. 2024, section 6.2).

    Clients are :class:`~fedntk.clients.WeightedFedAvgClient`. Each trains a model of its own, which
    the server mixes from those of the clients like it. With ``over="round"`` a client is sent the
    W_k of its last round; with ``over="all"`` a mixture of what all clients last sent, formed when
    the client is asked. A client that never trained is sent the global model, which the Result
    holds: the mean of the round's models weighted by examples, as in FedAvg. With
    ``first_model="prototypes"`` it is first asked for its prototypes under that model, and sent a
    mixture by these. :meth:`model_of` returns a client's own, ``mixing`` the weights of the newest
    round that changed the models.
    """

    client = "WeightedFedAvgClient"
    replies = "weights and prototypes"
    rules = ("none", "norm-bound")
    nests = "nowhere"

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    head: str = option(
        "layer before which features are taken; the last linear one by default", default=""
    )

    similarity: Literal["prototypes", "entk"] = option(
        "by what clients are compared: class means of the last layer's inputs, as by Huang et al. "
        "2024, or of tangent features (ours): would their models learn the same next?",
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
        "whose models are mixed: those of the round's clients, or those that all last sent",
        default="round",
    )
    first_model: Literal["mean", "prototypes"] = option(
        "of a client that never trained: mean: the global one; prototypes: a mixture of all "
        "clients' models by the similarity of its prototypes under the global one (ours)",
        default="mean",
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
        "GB of clients' models in the server's memory; more are kept on disk",
        default=4.0,
        at_least=0,
        at_most=float("inf"),
        compared=False,
    )
    mixing: Mixing | None = state(lambda: None, saved=False)
    trained: ClientRounds = state(ClientRounds)
    # W_k; with over="all", what each last sent, and the mixtures of it that were asked for
    models: ClientModels = state(ClientModels)
    mixed: ClientModels = state(ClientModels, saved=False)
    first: ClientModels = state(ClientModels)  # of clients that never trained, by first_model
    # what else each last sent: its class means and their counts, and its number of examples
    profiles: ClientModels = state(ClientModels)

    def prepare(self) -> None:
        """Find the arrays that stay with the clients, and the features to compare them by."""
        self.personal = frozenset[str]()
        if self.personal_batch_norm:
            self.personal = frozenset(batch_norm_arrays(self.network))
            if not self.personal:
                raise ValueError("personal_batch_norm: the network has no BatchNorm layers")
        self.feature_map = FeatureMap("last-layer", head=self.head)
        self.num_classes = self.feature_map.last_layer(self.network)[1].out_features
        if self.similarity == "entk":
            self.feature_map = FeatureMap("entk", self.num_features, self.feature_seed, self.head)

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Divide the budget of memory."""
        stores = (self.models, self.mixed) if self.over == "all" else (self.models,)
        for store in stores:
            store.limit_to(self.memory_budget * 2**30 / len(stores))
        return initial_arrays

    def train_round(self, r: Round) -> Rounds[Update]:
        """Mix a model for each client; the global one is the mean of what came."""
        shared = named_arrays(split(r.arrays, self.personal)[0])

        def parse(reply: Reply) -> Both:
            weights, prototypes = reply.array_records(r.owner.arrayrecord_key, wire.PROTOTYPES)
            return check_weights(weights, shared), self._read(prototypes)

        uploads = yield from self._ask(r, parse)
        changes = [
            change_size(self.model_of(upload.client) or shared, upload.value[0])
            for upload in uploads
        ]
        uploads = uploads.judge(screen_sizes(changes, self.screening.outlier_factor))
        if not self.enough(uploads):
            return Update(uploads)
        metrics = self._mix(r, uploads, shared)
        self.trained.set(uploads.clients, r.number)
        weights = uploads.with_values(weights for weights, _ in uploads.values)
        mean = self.screening.mean(weights, shared) if shared else {}
        return Update(uploads, ArrayRecord({**r.arrays, **cast_like(mean, shared)}), metrics)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate their own models."""
        uploads = yield from self._ask(r, accuracy_of)
        return self.screening.drop(uploads, screen_accuracies)

    def _ask(self, r: Round, parse: Parse[T]) -> Rounds[Uploads[T]]:
        """Send each client its model, without what stays with it."""

        def shared_for(client: int, shared: ArrayRecord) -> ArrayRecord:
            model = self.model_of(client)
            return shared if model is None else ArrayRecord({n: Array(model[n]) for n in shared})

        config, sample = self.feature_map.to_config(), r.sample()
        if self.first_model == "prototypes" and self.models:
            yield from self._mix_first(r, sample, config)
        return (
            yield from ask_personal(
                *(r, parse, self.personal, self.trained),
                config=config,
                shared_for=shared_for,
                clients=sample,
            )
        )

    def _mix_first(self, r: Round, sample: Sample, config: Mapping[str, Any]) -> Rounds[None]:
        """Mix a model for each client that never trained, by its prototypes."""
        new = [node for node in sample.nodes if r.registry.client(node) not in self.trained]
        if not new:
            return
        uploads = yield from ask_personal(
            *(r, lambda reply: self._read(reply.arrays()), self.personal, self.trained),
            config={**config, wire.STEP: "prototypes"},
            clients=new,
            stage=MessageType.TRAIN,
        )
        others = [k for k in self.profiles if k in self.models]
        for upload in uploads:
            self.first.pop(upload.client, None)
            profiles = {k: self.profiles[k] for k in others}
            profiles[upload.client] = _profile_of(upload.value, upload.num_examples)
            _, weights = self._compare([upload.client], others, profiles)
            self.first[upload.client] = next(mixtures(weights, [self.models[k] for k in others]))

    def _read(self, prototypes: Arrays) -> Prototypes:
        return Prototypes.from_arrays(
            prototypes,
            num_classes=self.num_classes,
            width=self.feature_map.width(self.network),
            max_examples=self.max_examples,
            num_examples=None,
        )

    def model_of(self, client: int) -> Arrays | None:
        """Return the shared arrays of a client's model W_k; None if nothing is known of it.

        `client` is its id in the registry: its partition.
        """
        if client not in self.models:
            return self.first.get(client)
        if self.over == "round":
            return self.models[client]
        if client not in self.mixed:
            others = list(self.profiles)
            _, weights = self._compare([client], others, self.profiles)
            self.mixed[client] = next(mixtures(weights, [self.models[k] for k in others]))
        return self.mixed[client]

    def _mix(self, r: Round, uploads: Uploads[Both], shared: Arrays) -> dict[str, float]:
        """Mix a model for each client; return metrics of the mixing."""
        for upload in uploads:
            self.profiles[upload.client] = _profile_of(upload.value[1], upload.num_examples)
            self.first.pop(upload.client, None)
        clients = uploads.clients
        sent = [weights for weights, _ in uploads.values]
        if self.screening.rule == "norm-bound":
            sent = bound_changes([self.model_of(k) or shared for k in clients], sent)
        everyone = list(self.profiles) if self.over == "all" else clients
        similarities, weights = self._compare(everyone, everyone, self.profiles)
        if self.over == "all":
            self.mixed = ClientModels(self.mixed.budget)
            self.models.update(zip(clients, sent, strict=True))
        else:
            if self.first_model == "mean":
                self.profiles.clear()  # they are not needed later
            self.models.update(zip(clients, mixtures(weights, sent), strict=True))
        self.mixing = Mixing(tuple(everyone), similarities, weights, r.number)
        others = ~np.eye(len(everyone), dtype=bool)
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(1)
        return {
            "similarity-mean": float(similarities[others].mean()) if others.any() else 1.0,
            "own-weight-mean": float(np.diag(weights).mean()),
            "effective-clients": float(np.exp(entropy).mean()),
        }

    def _compare(
        self, clients: Sequence[int], others: Sequence[int], of_clients: Mapping[int, Arrays]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return similarities and weights of clients (rows) and others (columns)."""
        profiles = {k: of_clients[k] for k in {*clients, *others}}
        prototypes = {k: Prototypes(p["means"], p["counts"]) for k, p in profiles.items()}
        rows, columns = ([prototypes[k] for k in ids] for ids in (clients, others))
        similarities = cosine_similarities(rows, columns, absent=self.absent)
        for row, client in enumerate(clients):
            similarities[row, [k == client for k in others]] = 1.0
        examples = [int(profiles[k]["examples"]) for k in others] if self.by_examples else None
        weights = similarity_weights(similarities, temperature=self.temperature, examples=examples)
        return similarities, weights


def _profile_of(prototypes: Prototypes, num_examples: int) -> ArrayDict:
    """Return what a client is compared by, as arrays."""
    means, counts = prototypes.means, prototypes.counts
    return {"means": means, "counts": counts, "examples": np.array(num_examples)}
