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
from logging import INFO
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.averages import mixtures
from fedntk.ntk.features import FeatureKind
from fedntk.ntk.parts import batch_norm_arrays
from fedntk.ntk.payloads import Prototypes, screen_changes
from fedntk.ntk.similarity import Absent, cosine_similarities, similarity_weights

from ..core.array_archive import under
from ..core.exchange import Pairs, logger
from ..core.replies import Reply, checked_weights
from .client_models import Arrays, ClientModels
from .personalised import PersonalisedStrategy

__all__ = ["Mixing", "Similarity", "WeightedFedAvg"]

Similarity = Literal["prototypes", "entk"]
PROTOTYPES = "prototypes"  # record of a reply
MODELS, KNOWN = "models", "known"  # begin the names of arrays in the state


class Mixing(NamedTuple):
    """Who was mixed from whom in a round.

    Attributes
    ----------
    clients : tuple of int
        Ids of the K clients, in order.
    similarities : ndarray of float64, shape (K, K)
        Cosines of their prototypes.
    weights : ndarray of float64, shape (K, K)
        s_kk'; each row sums to 1.
    server_round : int
        Number of the round.
    """

    clients: tuple[int, ...]
    similarities: NDArray[np.float64]
    weights: NDArray[np.float64]
    server_round: int


class _Upload(NamedTuple):
    """What came from one client."""

    weights: dict[str, NDArray[Any]]
    prototypes: Prototypes


class WeightedFedAvg(PersonalisedStrategy):
    """Similarity-weighted FedAvg (Huang et al. 2024, section 6.2).

    Clients are :class:`~fedntk.clients.WeightedFedAvgClient`. Each trains a model of its own, which
    the server mixes from those of the clients like it. What a client is sent: with
    ``over="round"`` the W_k of the last round it took part in; with ``over="all"`` a mixture that
    is formed when it is asked, from what all clients last sent. A client of which nothing is known
    is sent the global model: the mean of the round's models weighted by examples, as in FedAvg.
    That is what the Result holds, too; :meth:`model_of` returns a client's own.

    Parameters
    ----------
    network : nn.Module
        Of the clients' architecture; its weights do not matter.
    similarity : {"prototypes", "entk"}
        By what clients are compared: class means of the features before the last linear layer, as
        in the paper; or of the network's tangent features (ours): two clients are alike if their
        models would learn the same next. Their coordinates are chosen by a seed that all share.
    temperature : float
        tau of the softmax, above 0.
    absent : {"zero", "common"}
        What stands for a class that a client lacks: see
        :func:`~fedntk.ntk.similarity.cosine_similarities`.
    over : {"round", "all"}
        Whose models are mixed.
    by_examples : bool
        Whether a client's weight also grows with its examples. The paper's does not.
    head : str
        Name of the last linear layer, before which features are taken; by default the last
        ``nn.Linear``.
    num_features : int
        p of the tangent features.
    feature_seed : int
        Of the tangent features: their coordinates, and the last layer they are taken with.
    personal_batch_norm : bool
        Whether BatchNorm stays with the clients, as in :class:`FedBN`.
    memory_budget : float
        Bytes of clients' models in the server's memory, beside the replies of the round at work;
        models beyond it are kept on disk.
    **options
        Of :class:`~fedntk.strategies.BaseStrategy` (seed, min_completed) and of Flower's
        FedAvg.

    Attributes
    ----------
    mixing : Mixing or None
        Of the newest round that changed the models.

    Raises
    ------
    ValueError
        If an argument is out of range, or the network lacks what it names.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> WeightedFedAvg(network=network, temperature=0.1).temperature
    0.1
    """

    client = "WeightedFedAvgClient"
    replies = "weights and prototypes"

    def __init__(
        self,
        *,
        network: nn.Module,
        similarity: Similarity = "prototypes",
        temperature: float = 1.0,
        absent: Absent = "zero",
        over: Literal["round", "all"] = "round",
        by_examples: bool = False,
        head: str = "",
        num_features: int = 1000,
        feature_seed: int = 123,
        personal_batch_norm: bool = False,
        memory_budget: float = 2**32,
        **options: Any,
    ) -> None:
        personal = batch_norm_arrays(network) if personal_batch_norm else ()
        if personal_batch_norm and not personal:
            raise ValueError("personal_batch_norm: the network has no BatchNorm layers")
        super().__init__(personal=personal, **options)
        for name, value, known in (
            ("similarity", similarity, get_args(Similarity)),
            ("absent", absent, get_args(Absent)),
            ("over", over, ("round", "all")),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        if not temperature > 0:
            raise ValueError(f"temperature: expected more than 0, got {temperature}")
        kind: FeatureKind = "last-layer" if similarity == "prototypes" else "entk"
        self.feature_map = FeatureMap(kind, num_features, feature_seed, head)
        _, last = self.feature_map.last_layer(network)
        self.num_classes, self.width = last.out_features, self.feature_map.width(network)
        self.similarity, self.temperature, self.absent = similarity, temperature, absent
        self.over, self.by_examples = over, by_examples
        self.mixing: Mixing | None = None
        # W_k; with over="all", what each last sent, and the mixtures of it that were asked for
        self.memory_budget = memory_budget
        self._models, self._mixed = self._empty(), self._empty()
        self._known: dict[int, Prototypes] = {}
        self._examples: dict[int, int] = {}

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        logger.log(
            INFO,
            "\t└──> Weighted FedAvg: similarity of %s, temperature %g, over %s",
            self.similarity,
            self.temperature,
            "the round's clients" if self.over == "round" else "all clients heard of",
        )

    # ------------------------------------------------------------------- state

    def settings(self) -> dict[str, Any]:
        """Add how clients are compared and mixed."""
        return {
            **super().settings(),
            **self.feature_map.to_config(),
            "temperature": self.temperature,
            "absent": self.absent,
            "over": self.over,
            "by_examples": self.by_examples,
        }

    def state_dict(self) -> dict[str, Any]:
        """Add each client's model, and what it last sent if that is still needed."""
        state = super().state_dict()
        state["examples"] = {str(k): n for k, n in sorted(self._examples.items()) if k >= 0}
        for client, model in self._models.items():
            if client >= 0:
                state |= {f"{MODELS}.{client}.{name}": a for name, a in model.items()}
        for client, own in sorted(self._known.items()):
            if client >= 0:
                state[f"{KNOWN}.{client}.means"] = own.means
                state[f"{KNOWN}.{client}.counts"] = own.counts
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._forget()
        self._examples = {int(client): int(n) for client, n in state["examples"].items()}
        for client in self._examples:
            self._models[client] = under(f"{MODELS}.{client}.", state)
            if own := under(f"{KNOWN}.{client}.", state):
                self._known[client] = Prototypes(own["means"], own["counts"])

    def _empty(self) -> ClientModels:
        return ClientModels(self.memory_budget / (2 if self.over == "all" else 1))

    def _forget(self) -> None:
        self._models, self._mixed = self._empty(), self._empty()
        self._known, self._examples, self.mixing = {}, {}, None

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int, done: int) -> ArrayRecord:
        """Begin with the initial arrays for all, unless a state was loaded."""
        if not done:
            self._forget()
        return super().begin(initial_arrays, num_rounds, done)

    # ----------------------------------------------------------------- sending

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add which features clients are compared by."""
        super().prepare_config(config, server_round)
        for key, value in self.feature_map.to_config().items():
            config[key] = value

    def shared_for(self, client: int, shared: ArrayRecord) -> ArrayRecord:
        """Return a client's own model, without what stays with it."""
        model = self.model_of(client)
        return shared if model is None else ArrayRecord({n: Array(model[n]) for n in shared})

    def model_of(self, client: int) -> Arrays | None:
        """Return a client's own model W_k; None if nothing is known of it.

        Parameters
        ----------
        client : int
            Its id in the registry: its partition.

        Returns
        -------
        dict of str to ndarray, or None
            The shared arrays, by name.
        """
        if client not in self._models:
            return None
        if self.over == "round":
            return self._models[client]
        if client not in self._mixed:
            known = sorted(self._known)
            _, weights = self._compared([client], known)
            self._mixed[client] = next(mixtures(weights, [self._models[k] for k in known]))
        return self._mixed[client]

    # ------------------------------------------------------------- aggregation

    def parse(self, reply: Reply) -> _Upload:
        """Check weights and prototypes."""
        weights, prototypes = reply.array_records(self.arrayrecord_key, PROTOTYPES)
        return _Upload(
            checked_weights(weights, self.shared),
            Prototypes.from_arrays(
                prototypes,
                num_classes=self.num_classes,
                width=self.width,
                max_examples=self.max_examples,
            ),
        )

    def weights_of(self, parsed: Any) -> dict[str, NDArray[Any]]:
        """Return the weights of an upload."""
        weights: dict[str, NDArray[Any]] = parsed.weights
        return weights

    def sound(self, pairs: Pairs[Any], rejected: Any) -> Pairs[Any]:
        """Drop weights that moved much farther from what their client was sent than others did."""
        shared = {n: a for n, a in self.shared.items() if a.dtype.kind == "f"}
        zeros = {name: np.zeros_like(array) for name, array in shared.items()}
        started = {r.client: self.model_of(r.client) or shared for r, _ in pairs}
        moved = {
            reply.client: {n: own.weights[n] - started[reply.client][n] for n in shared}
            for reply, own in pairs
        }

        def screen(_: Sequence[Any], most: float) -> Any:
            return screen_changes(zeros, [moved[reply.client] for reply, _ in pairs], most)

        return self.screened(pairs, rejected, screen)

    def merged(self, pairs: Pairs[Any]) -> Mapping[str, NDArray[Any]]:
        """Mix a model for each client, and return the mean of what came."""
        clients = [reply.client for reply, _ in pairs]
        for reply, own in pairs:
            self._known[reply.client] = own.prototypes
            self._examples[reply.client] = reply.num_examples
        if self.over == "all":
            self._mixed = self._empty()
            for reply, own in pairs:
                self._models[reply.client] = own.weights
            clients = sorted(self._known)
            similarities, weights = self._compared(clients, clients)
        else:
            similarities, weights = self._compared(clients, clients)
            sums = mixtures(weights, [own.weights for _, own in pairs])
            for client, model in zip(clients, sums, strict=True):
                self._models[client] = model
            self._known = {}
        self.mixing = Mixing(tuple(clients), similarities, weights, self.server_round)
        self.train_metrics[self.server_round].update(_metrics_of(self.mixing))
        return super().merged(pairs)

    def _compared(
        self, clients: Sequence[int], others: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return similarities and weights of clients (rows) and others (columns)."""
        own, their = ([self._known[k] for k in each] for each in (clients, others))
        similarities = cosine_similarities(own, their, absent=self.absent)
        for row, client in enumerate(clients):
            similarities[row, [k == client for k in others]] = 1.0
        examples = [self._examples[k] for k in others] if self.by_examples else None
        weights = similarity_weights(similarities, temperature=self.temperature, examples=examples)
        return similarities, weights


def _metrics_of(mixing: Mixing) -> dict[str, float]:
    """Return what a round reports of its weights."""
    weights, count = mixing.weights, len(mixing.clients)
    others = ~np.eye(count, dtype=bool)
    entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(1)
    return {
        "similarity-mean": float(mixing.similarities[others].mean()) if count > 1 else 1.0,
        "own-weight-mean": float(np.diag(weights).mean()),
        "effective-clients": float(np.exp(entropy).mean()),
    }
