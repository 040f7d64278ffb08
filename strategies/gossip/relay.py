"""Decentralised learning over Flower's star: the strategy is the clock and the relay.

Clients send each other parcels of arrays. A parcel is addressed by a record's name, and handed on
as it came: the strategy reads neither its arrays nor their names. It knows the neighbours, the next
step, and the clients that have kept pace. With `seal` it could not read parcels either: clients
encrypt each for its receivers.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import all_alike, equal_mean, put_back
from fedntk.ntk.options import argument, option, state
from fedntk.ntk.payloads.gossip_options import ALL, FROM, REFUSED, TO, RelayOptions
from fedntk.ntk.payloads.screening import screen_changes, screen_distances

from ..core.averaging import cast_like, named_arrays
from ..core.exchange import Accepted, Aggregated, Pairs, Parse, Screen, logger
from ..core.kept_rounds import KeepingStrategy
from ..core.registry import SentParts
from ..core.replies import Reply, check_weights
from ..core.trust_protocols import public_key_in
from .topology import Topology, spectral_gap

FIRST = "first-weights"  # the part of what a client is sent that it keeps
MODEL = "evaluate.model"  # a message that asks for a client's model
Parcels = dict[int, dict[int, ArrayRecord]]  # receiver -> sender -> what was sent
Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class Step(NamedTuple):
    """One exchange with all clients of a round."""

    name: str  # under which clients know it
    batch: int = 0  # part of its examples that a client is to use


class RelayStrategy(RelayOptions, KeepingStrategy):
    """Rounds of a decentralised method, over a graph of the clients.

    In each step of a round every client gets the parcels that its neighbours sent in the step
    before, and replies with parcels for them. A client that fails is out for the rest of the round:
    its neighbours go on without it, and it begins the next round with the weights that it had.

    Clients keep their weights on disk. In rounds with an evaluation they are asked for them, and
    the bytes count as evaluation: the global arrays are the equal mean, without models whose norm
    is an outlier (see `outlier_factor`), and with a `defence` without those far from most. A client
    that joins later begins with the global arrays as they are then. `fraction_train` is the share
    of the clients that take part in a round.

    Attributes
    ----------
    models, models_before : dict of int to dict of str to ndarray
        Client -> its weights, as it last sent them for evaluation; and, with `collect_both`, as
        they were before the round's last training or average.
    neighbours : dict of int to tuple of int
        Graph of the newest round.
    """

    topology: Topology = argument(
        "who is whose neighbour; by default five random neighbours each, drawn anew in each round",
        default=Topology(),
    )
    collect: bool = argument(
        "whether clients are asked for their models; else the global arrays stay what they were, "
        "and only the clients' own evaluations show how good the models are",
        default=True,
    )
    collect_both: bool = argument(
        "whether clients also send their models as they were before the round's last step, as "
        "averaged or as trained, so that methods can be compared at one point",
        default=False,
    )
    seal: bool = option(
        "parcels are sealed for their receivers; what ends a round is then sent again as the next "
        "one begins, when its receivers are known: one exchange more. Models that are collected "
        "and metrics are not sealed",
        default=False,
    )
    sent: SentParts = state(SentParts)
    public_keys: dict[int, tuple[str, str]] = state(dict)  # client -> key, voucher in hexadecimal
    models: dict[int, Arrays] = state(dict, saved=False)
    models_before: dict[int, Arrays] = state(dict, saved=False)
    neighbours: dict[int, tuple[int, ...]] = state(dict, saved=False)
    _begun: set[int] = state(set, saved=False)  # clients that the newest replies say have them
    _drawn: set[int] = state(set)  # clients that were in a static graph
    _sent_last: dict[int, dict[str, ArrayRecord]] = state(dict, saved=False)  # as a round ended
    _parcels: Parcels = state(dict, saved=False)
    _planned: list[Step] = state(list, saved=False)
    _position: int = state(int, saved=False)  # in the planned steps

    replies = "parcels"
    key_option = "seal"
    ends_with: ClassVar[Literal["trained", "averaged"]] = "trained"  # what a round's models are
    _is_first_sample: ClassVar[bool] = False  # clients tell who they are first: parcels go by it

    @abstractmethod
    def plan(self, *, first: bool) -> Sequence[Step]:
        """Return the steps of a round, the `first` or one that lacks the last round's parcels."""

    @abstractmethod
    def averages_of(self, examples: Mapping[int, int]) -> NDArray[np.float64] | None:
        """Return W of the round, given the clients' numbers of examples; None without averages."""

    def settings(self) -> dict[str, Any]:
        """Add the topology."""
        return {**super().settings(), **self.topology.settings()}

    def prepare_round(self, server_round: int, nodes: list[int], grid: Grid) -> None:
        """Draw the graph, and plan the steps."""
        clients = {self.registry.client(node): node for node in nodes}
        if self.seal:
            self._ask_keys(grid, clients)
        self.neighbours = self.graph(server_round, list(clients))
        first = self.seal or not clients.keys() <= self._sent_last.keys()
        self._planned, self._position = list(self.plan(first=first)), 0
        self._parcels = {} if first else self._sort_parcels(self._sent_last)

    def graph(self, server_round: int, clients: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return who exchanges parcels with whom; a client that misses a static graph leaves a gap.

        That graph is one of all clients so far, if all are to take part in each round.
        """
        if self.topology.dynamic or self.fraction_train < 1:
            return self.topology.neighbours(server_round, clients)
        self._drawn |= set(clients)
        whole = self.topology.neighbours(server_round, self._drawn)
        return {client: tuple(j for j in whole[client] if j in clients) for client in clients}

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add the step."""
        super().prepare_config(config, server_round)
        config["outlier-factor"], config["max-examples"] = self.outlier_factor, self.max_examples
        both = self.collect and self.collect_both
        config["keep-both"] = both and self.evaluates_in(server_round)
        if self._planned:
            config["step"], config["batch"] = self._step

    @property
    def _step(self) -> Step:
        return self._planned[self._position]

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return the parcels for a client, and the first weights if it has none of its own."""
        own = self.config_for(client, config)
        content = RecordDict({self.configrecord_key: own})
        if stage == MessageType.TRAIN:
            own["neighbours"] = list(self.neighbours.get(client, ()))
            if self.seal:
                self._add_keys(own, client)
            for sender, parcel in sorted(self._parcels.get(client, {}).items()):
                content[f"{FROM}{sender}"] = parcel
        if client not in self.trained and self.sent.lacks(client, FIRST):
            content[self.arrayrecord_key] = arrays
        return content

    def accepted(self, replies: Iterable[Message], parse: Parse[T], stage: str) -> Accepted[T]:
        """Note besides that clients with accepted replies have the first weights.

        They do not after an evaluation of the mean over rounds, which nobody trains from.
        """
        pairs, rejected = super().accepted(replies, parse, stage)
        self._begun = set()
        if stage != MessageType.EVALUATE or self.averaged is None:
            self._begun = {r.client for r, _ in pairs if self.sent.lacks(r.client, FIRST)}
        for client in self._begun:
            self.sent.mark(client, FIRST)
        return pairs, rejected

    def apply_screen(self, pairs: Pairs[T], rejected: Counter[str], screen: Screen[T]) -> Pairs[T]:
        """Take back that clients have the first weights if the reply that says so is dropped."""
        kept = super().apply_screen(pairs, rejected, screen)
        for client in self._begun - {reply.client for reply, _ in kept}:
            self.sent.forget(client)
        return kept

    def forget_sent(self, client: int) -> None:
        """Forget the client's key as well."""
        super().forget_sent(client)
        self.public_keys.pop(client, None)

    def _ask_keys(self, grid: Grid, nodes: Mapping[int, int]) -> None:
        """Ask clients for public keys that are not known; `nodes` has their nodes."""
        asked, stage = [k for k in nodes if k not in self.public_keys], "query.public_key"
        if not asked:
            return
        config = ConfigRecord()
        super().prepare_config(config, self.server_round)
        contents = [
            RecordDict({self.configrecord_key: self.config_for(client, config)}) for client in asked
        ]
        messages = self.address([nodes[client] for client in asked], contents, stage)
        for reply in grid.send_and_receive(messages, timeout=self.timeout_of(stage)):
            node = reply.metadata.src_node_id
            try:
                client = self.registry.client(self._exchanges[stage].take(reply))
                self.public_keys[client] = public_key_in(reply, self.vouching, self.run)
            except Exception as error:  # a reply may hold anything; none may end the run
                logger.warning("node %d has no public key: %s", node, error)

    def _add_keys(self, config: ConfigRecord, client: int) -> None:
        """Add the receivers' keys; the last step has none, as next round's are not known yet."""
        last = self._position == len(self._planned) - 1
        others = () if last else self.neighbours.get(client, ())
        known = {j: self.public_keys[j] for j in others if j in self.public_keys}
        config["parcel-run"] = self.run_key
        config["parcel-exchange"] = self._position
        config["parcel-sender"] = client
        config["parcel-own-key"] = bytes.fromhex(self.public_keys.get(client, ("", ""))[0])
        config["parcel-receivers"] = list(known)
        config["parcel-keys"] = [bytes.fromhex(key) for key, _ in known.values()]
        config["parcel-vouchers"] = [bytes.fromhex(voucher) for _, voucher in known.values()]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Hand parcels on, step by step; then ask for the models, if they are to be evaluated."""
        pairs, rejected = self.accepted(replies, self._parse, MessageType.TRAIN)
        refused = count_refused(pairs)
        examples = {reply.client: reply.num_examples for reply, _ in pairs}
        for position in range(1, len(self._planned)):
            self._position = position
            self._parcels = self._sort_parcels({reply.client: sent for reply, sent in pairs})
            nodes = [reply.node for reply, _ in pairs]
            pairs, more = self.exchange(nodes, MessageType.TRAIN, self.global_arrays, self._parse)
            rejected += more
            refused += count_refused(pairs)
        self._parcels = {}
        metrics = self.round_metrics([reply for reply, _ in pairs], rejected)
        metrics[REFUSED] = refused
        if (matrix := self.averages_of(examples)) is not None:
            metrics["spectral-gap"] = spectral_gap(matrix)
        self.train_metrics[server_round] = metrics
        if not self.enough(len(pairs)):
            self._sent_last = {}
            return None, metrics
        self._sent_last = {reply.client: sent for reply, sent in pairs}
        self.trained |= {reply.client: server_round for reply, _ in pairs}
        if not self.collect or not self.evaluates_in(server_round):
            return None, metrics
        return self._mean_model(metrics), metrics

    def _require_kind(self, message: Message, stage: str) -> None:
        """Tell weights by the record's name, as arrays' names are not read here."""
        if stage == MessageType.TRAIN and self.arrayrecord_key in message.content.array_records:
            raise BadReply(
                "weights", f"weights came, not {self.replies}: is the client a {self.client}?"
            )

    def _parse(self, reply: Reply) -> dict[str, ArrayRecord]:
        """Return a client's parcels by address; what is in them is the receivers' to check."""
        records = dict(reply.message.content.array_records)
        known = {ALL, *(f"{TO}{other}" for other in self.neighbours.get(reply.client, ()))}
        if odd := sorted(records.keys() - known):
            raise BadReply("arrays", f"parcels for clients that are no neighbours: {odd[:5]}")
        return records

    def _sort_parcels(self, sent: Mapping[int, Mapping[str, ArrayRecord]]) -> Parcels:
        parcels: Parcels = {}
        for receiver, others in self.neighbours.items():
            for sender in others:
                own = sent.get(sender, {})
                parcel = own.get(f"{TO}{receiver}", own.get(ALL))
                if parcel is not None:
                    parcels.setdefault(receiver, {})[sender] = parcel
        return parcels

    def _mean_model(self, metrics: MetricRecord) -> ArrayRecord | None:
        """Ask all clients for their models; return the equal mean of what came."""
        network = named_arrays(self.global_arrays)
        if self._grid is None:
            raise RuntimeError("call configure_train first, which sets the grid")
        nodes = self.sample(self._grid, self.server_round, MODEL, 1.0, 1, self.held_out)
        pairs, rejected = self.exchange(
            nodes, MODEL, self.global_arrays, lambda reply: self._models_of(reply, network)
        )
        zero = {name: np.zeros_like(array) for name, array in network.items()}
        pairs = self.apply_screen(  # by norms: how far they moved says how often they were sampled
            pairs,
            rejected,
            lambda models, factor: screen_changes(zero, [m["arrays"] for m in models], factor),
        )
        if self.defence != "none" and pairs:
            pairs = self.apply_screen(
                pairs, rejected, lambda own, _: screen_distances([m["arrays"] for m in own])
            )
        metrics["models-collected"] = len(pairs)
        if rejected:
            logger.warning("%d clients' models could not be used", rejected.total())
        if not pairs:
            return None
        self.models = {reply.client: own["arrays"] for reply, own in pairs}
        self.models_before = {r.client: own["before"] for r, own in pairs if "before" in own}
        models = list(self.models.values())
        metrics["inter-client-deviation"] = deviation(models)
        return cast_like(self.mean_of(models), network)

    def _models_of(self, reply: Reply, network: Arrays) -> dict[str, Arrays]:
        both = self.collect_both and "before" in reply.message.content.array_records
        names = ("arrays", "before") if both else ("arrays",)
        found = zip(names, reply.array_records(*names), strict=True)
        return {name: check_weights(arrays, network) for name, arrays in found}

    @property
    def models_at(self) -> dict[str, dict[int, Arrays]]:
        """Clients' models by what was done last: ``"averaged"`` and ``"trained"``."""
        other = "averaged" if self.ends_with == "trained" else "trained"
        return {self.ends_with: self.models, other: self.models_before}

    def mean_of(self, models: Sequence[Mapping[str, NDArray[Any]]]) -> Arrays:
        """Return the model that stands for all."""
        return equal_mean(models)


def count_refused(pairs: Sequence[tuple[Reply, Any]]) -> int:
    """Return how many parcels clients say that they refused in a step; at most all they got."""
    counts = [reply.metrics.get(REFUSED, 0) for reply, _ in pairs]
    return sum(min(n, len(counts)) for n in counts if isinstance(n, int) and n > 0)


def deviation(models: Sequence[Mapping[str, NDArray[Any]]]) -> float:
    """Inter-client model deviation V: eq. (12) of Thompson et al. 2025.

    The mean over the d weights of the root of the sum over the M clients of their squared distance
    from the mean weight. It grows with the root of M; over M clients of equal spread s it is
    s sqrt(M).
    """
    mean, total, count = equal_mean(models), 0.0, 0
    for name, centre in mean.items():
        if models[0][name].dtype.kind == "f":
            each = [np.asarray(own[name], np.float64) for own in models]
            with np.errstate(invalid="ignore"):  # of infinite numbers, on which all agree
                distances = np.asarray(np.sqrt(sum((own - centre) ** 2 for own in each)))
            total += float(put_back(distances, np.zeros(centre.shape), all_alike(each)).sum())
            count += np.size(centre)
    return total / max(count, 1)
