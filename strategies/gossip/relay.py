"""Decentralised learning over Flower's star: the strategy is the clock and the relay.

Clients send each other parcels of arrays. A parcel is addressed by a record's name, and handed on
as it came: the strategy reads neither its arrays nor their names. It knows the neighbours, the next
step, and the clients that have kept pace. With `seal` it could not read parcels either: clients
encrypt each for its receivers.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import all_alike, equal_mean, put_back
from fedntk.ntk.options import argument, option, part, state
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.gossip_options import ALL, FROM, REFUSED, TO, MixingMatrix
from fedntk.ntk.payloads.screening import screen_changes, screen_distances
from fedntk.ntk.support.arrays import ArrayDict, Arrays

from ..core.averaging import cast_like
from ..core.channel import Parse, Rounds
from ..core.registry import ClientRounds, SentParts
from ..core.replies import Reply, accuracy_of, check_weights, screen_accuracies
from ..core.round import Round, accept_any, timeout_of
from ..core.sampling import Population, Sample
from ..core.strategy import Strategy
from ..core.trust_protocols import VouchesForKeys, public_key_in
from ..core.uploads import Update, Uploads
from ..core.weight_average import WeightAverage
from .topology import Neighbours, Topology, mixing_matrix, spectral_gap

logger = getLogger("flwr")
FIRST = "first-weights"  # the part of what a client is sent that it keeps
MODEL = "evaluate.model"  # a message that asks for a client's model
AVERAGING = {"average", "step"}  # steps in which clients average with their neighbours
Records = dict[str, ArrayRecord]
T = TypeVar("T")


class Step(NamedTuple):
    """One exchange with all clients of a round: its name, and which batch of examples counts."""

    name: str
    batch: int = 0


@dataclass
class Progress:
    """Where a round stands."""

    steps: Sequence[Step] = ()
    graph: Neighbours = field(default_factory=dict)  # the topology's
    hubs: Collection[int] | None = None  # who averages and evolves, each for a cluster; None: all
    position: int = 0  # of the current step
    parcels: Mapping[int, Mapping[int, ArrayRecord]] = field(default_factory=dict)  # by receiver


class RelayStrategy(Strategy):
    """Rounds of a decentralised method, over a graph of the clients.

    In each step of a round every client gets the parcels that its neighbours sent in the step
    before, and replies with parcels for them. A client that fails is out for the rest of the round:
    its neighbours go on without it, and it begins the next round with the weights that it had.

    Clients keep their weights on disk. In rounds with an evaluation they are asked for them, and
    the bytes count as evaluation: the global arrays are the equal mean, without models whose norm
    is an outlier, and with a rule of `screening` without those far from most. A client that joins
    later begins with the global arrays. `fraction_train` of the clients take part in a round.

    Attributes
    ----------
    models : dict of int to dict of str to ndarray
        Client -> its weights, as it last sent them for evaluation.
    models_at : dict of str to such dicts
        The same by what was done last, ``"averaged"`` or ``"trained"``; with `collect_both` also as
        they were before that.
    neighbours : dict of int to tuple of int
        Who exchanged parcels with whom in the newest round.
    """

    replies = "parcels"
    takes_real_targets = True
    nests = "nowhere"

    topology: Topology = argument(
        "who is whose neighbour; by default five at random, drawn anew in each round",
        default=Topology(),
    )
    collect: bool = argument(
        "whether clients are asked for their models; else the global arrays stay what they were",
        default=True,
    )
    collect_both: bool = argument(
        "whether clients also send their models as they were before the round's last step",
        default=False,
    )
    seal: bool = option(
        "parcels are sealed for their receivers; what ends a round is then sent again as the next "
        "one begins, when its receivers are known: one exchange more. Models that are collected "
        "and metrics are not sealed",
        default=False,
    )
    vouching: VouchesForKeys | None = argument(
        "vouches for the clients' public keys, with which parcels are sealed", default=None
    )
    average: WeightAverage | None = part("average of the mean model over rounds", default=None)

    trained: ClientRounds = state(ClientRounds)
    sent: SentParts = state(SentParts)
    public_keys: dict[int, tuple[str, str]] = state(dict)  # client -> key, voucher in hexadecimal
    _drawn: set[int] = state(set)  # clients that were in a static graph
    models: dict[int, ArrayDict] = state(dict, saved=False)
    models_at: dict[str, dict[int, ArrayDict]] = state(dict, saved=False)
    neighbours: Neighbours = state(dict, saved=False)
    _ended: dict[int, Records] = state(dict, saved=False)  # what clients sent as a round ended
    progress: Progress = state(Progress, saved=False)

    def check(self) -> None:
        """Refuse vouchers for keys that nobody has."""
        if self.vouching is not None and not (self.seal and self.run):
            raise ValueError("vouching: expected seal = True and the name of the run, run=...")

    @property
    @abstractmethod
    def mixing(self) -> MixingMatrix:
        """How clients count in averages with their neighbours."""

    def plan(self, *, first: bool) -> list[Step]:
        """Return the steps of a round, the `first` or one that lacks the last round's parcels.

        By default one step, in which clients train and average what was sent before.
        """
        return [Step("weights"), Step("step")] if first else [Step("step")]

    @property
    def _has_hubs(self) -> bool:
        """Whether one member of each cluster averages and evolves for all."""
        return False

    def mean_of(self, models: Sequence[Arrays]) -> ArrayDict:
        """Return the model that stands for all."""
        return equal_mean(models)

    def further_settings(self) -> dict[str, Any]:
        """Return those of the topology."""
        return self.topology.settings()

    # ------------------------------------------------------------------------- rounds

    def train_round(self, r: Round) -> Rounds[Update]:
        """Hand parcels on, step by step; then ask for the models, if they are to be evaluated."""
        clients = r.sample(sent_alike=False)
        progress = self._begin_round(r, clients)
        uploads = yield from self._ask_step(r, clients)
        rejected, refused = uploads.rejected, count_refused(uploads)
        examples = dict(zip(uploads.clients, uploads.counts, strict=True))
        for position in range(1, len(progress.steps)):
            progress.position = position
            progress.parcels = self._sort(dict(zip(uploads.clients, uploads.values, strict=True)))
            uploads = yield from self._ask_step(r, uploads)
            rejected += uploads.rejected
            refused += count_refused(uploads)
        progress.parcels = {}
        uploads = uploads.with_rejected(rejected - uploads.rejected)
        metrics: dict[str, Any] = {REFUSED: refused}
        if any(step.name in AVERAGING for step in progress.steps):
            matrix = mixing_matrix(progress.graph, examples, self.mixing)
            metrics["spectral-gap"] = spectral_gap(matrix)
        if not self.enough(uploads):
            self._ended = {}
            return Update(uploads, None, metrics)
        self._ended = dict(zip(uploads.clients, uploads.values, strict=True))
        self.trained.set(uploads.clients, r.number)
        if not self.collect or not self.evaluates_in(r.number):
            return Update(uploads, None, metrics)
        arrays, measured = yield from self._mean_model(r)
        return Update(uploads, arrays, metrics | measured)

    def evaluate_round(self, r: Round) -> Rounds[Uploads[Any]]:
        """Have clients evaluate their models."""
        uploads = yield from self._ask(r, accuracy_of)
        uploads = self.screening.drop(uploads, screen_accuracies)
        if self.average is None:  # else it is of the mean over rounds, which nobody trains from
            self._mark(uploads)
        return uploads

    def graph(self, server_round: int, clients: Sequence[int]) -> Neighbours:
        """Draw the topology's graph; a client that misses a static one leaves a gap.

        That graph is one of all clients so far, if all are to take part in each round.
        """
        if self.topology.dynamic or self.fraction_train < 1:
            return self.topology.neighbours(server_round, clients)
        self._drawn |= set(clients)
        whole = self.topology.neighbours(server_round, self._drawn)
        return {client: tuple(j for j in whole[client] if j in clients) for client in clients}

    def _begin_round(self, r: Round, sample: Sample) -> Progress:
        """Draw the graph, and plan the steps; members exchange parcels only with their hub."""
        nodes = {r.registry.client(node): node for node in sample.nodes}
        if self.seal:
            self._ask_keys(r, nodes)
        graph, hubs = self.graph(r.number, list(nodes)), None
        self.neighbours = graph
        if self._has_hubs:
            stars = self.topology.hubs(r.number, graph)
            members = {k: (hub,) for hub, others in stars.items() for k in others}
            self.neighbours, hubs = stars | members, stars.keys()
        first = self.seal or not nodes.keys() <= self._ended.keys()
        parcels = {} if first else self._sort(self._ended)
        self.progress = Progress(self.plan(first=first), graph, hubs, 0, parcels)
        return self.progress

    def _ask_step(self, r: Round, clients: Sample | Uploads[Any]) -> Rounds[Uploads[Records]]:
        def require_parcels(message: Message) -> None:
            """Tell weights by the record's name, as arrays' names are not read here."""
            if r.owner.arrayrecord_key in message.content.array_records:
                raise BadReply(
                    "weights", f"weights came, not {self.replies}: is the client a {self.client}?"
                )

        uploads = yield from self._ask(
            r, self._parcels_in, training=True, clients=clients, require_kind=require_parcels
        )
        self._mark(uploads)
        return uploads

    def _ask(
        self, r: Round, parse: Parse[T], *, training: bool = False, **how: Any
    ) -> Rounds[Uploads[T]]:
        uploads = yield from r.ask(
            parse,
            contents=lambda client, config: self._content(r, client, config, training),
            sent=_Contacts(self.sent, self.public_keys),
            resends=False,
            **how,
        )
        return uploads

    def _mark(self, uploads: Uploads[Any]) -> None:
        for client in uploads.clients:
            self.sent.mark(client, FIRST)

    def _content(self, r: Round, client: int, config: ConfigRecord, training: bool) -> RecordDict:
        """Return the parcels for a client, and the first weights if it has none of its own."""
        progress, neighbours = self.progress, self.neighbours.get(client, ())
        both = self.collect and self.collect_both and self.evaluates_in(r.number)
        message = ConfigRecord({**config, **self.trained.config(client), wire.KEEP_BOTH: both})
        message[wire.OUTLIER_FACTOR] = self.screening.outlier_factor
        message[wire.MAX_EXAMPLES] = self.max_examples
        step = progress.steps[progress.position] if progress.steps else None
        if step is not None:
            message[wire.STEP] = step.name
            message[wire.BATCH] = step.batch
        content = RecordDict({r.owner.configrecord_key: message})
        if training and step is not None:
            message[wire.NEIGHBOURS] = list(neighbours)
            if self.seal:
                message.update(self._keys_for(client))
            if self.mixing == "metropolis":
                message[wire.DEGREES] = [len(self.neighbours[other]) for other in neighbours]
            is_hub = progress.hubs is None or client in progress.hubs
            if progress.hubs is not None:
                message[wire.HUB] = is_hub
            if is_hub or step.name != "average":  # others have nothing to average
                for sender, parcel in sorted(progress.parcels.get(client, {}).items()):
                    content[f"{FROM}{sender}"] = parcel
        if client not in self.trained and self.sent.lacks(client, FIRST):
            content[r.owner.arrayrecord_key] = r.arrays
        return content

    def _parcels_in(self, reply: Reply) -> Records:
        """Return a client's parcels by address; what they hold is for receivers to check."""
        records = dict(reply.message.content.array_records)
        addresses = {ALL, *(f"{TO}{other}" for other in self.neighbours.get(reply.client, ()))}
        if strangers := sorted(records.keys() - addresses):
            raise BadReply("arrays", f"parcels for clients that are no neighbours: {strangers[:5]}")
        return records

    def _sort(self, sent: Mapping[int, Records]) -> dict[int, dict[int, ArrayRecord]]:
        """Return receiver -> sender -> parcel, of what each client sent by address."""
        parcels: dict[int, dict[int, ArrayRecord]] = {}
        for receiver, others in self.neighbours.items():
            for sender in others:
                records = sent.get(sender, {})
                parcel = records.get(f"{TO}{receiver}", records.get(ALL))
                if parcel is not None:
                    parcels.setdefault(receiver, {})[sender] = parcel
        return parcels

    # -------------------------------------------------------------------- public keys

    def _ask_keys(self, r: Round, nodes: Mapping[int, int]) -> None:
        clients = [client for client in nodes if client not in self.public_keys]
        if not clients:
            return
        stage, key = "query.public_key", r.owner.configrecord_key
        common = r.common_config(stage)
        configs = [ConfigRecord({**common, **self.trained.config(client)}) for client in clients]
        replies = r.channel.query(
            [nodes[client] for client in clients],
            stage,
            [RecordDict({key: config}) for config in configs],
            timeout_of(self, stage),
        )
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                public_key = public_key_in(reply, self.vouching, self.run)
                self.public_keys[r.registry.client(node)] = public_key
            except Exception as error:  # a reply may hold anything; none may end the run
                logger.warning("node %d has no public key: %s", node, error)

    def _keys_for(self, client: int) -> dict[str, Any]:
        """Return the receivers' keys; the last step has none, as next round's are not known yet."""
        progress = self.progress
        is_last = progress.position == len(progress.steps) - 1
        receivers = () if is_last else self.neighbours.get(client, ())
        keys = {j: self.public_keys[j] for j in receivers if j in self.public_keys}
        return {
            wire.PARCEL_RUN: self.trained.run_key,
            wire.PARCEL_EXCHANGE: progress.position,
            wire.PARCEL_SENDER: client,
            wire.PARCEL_OWN_KEY: bytes.fromhex(self.public_keys.get(client, ("", ""))[0]),
            wire.PARCEL_RECEIVERS: list(keys),
            wire.PARCEL_KEYS: [bytes.fromhex(key) for key, _ in keys.values()],
            wire.PARCEL_VOUCHERS: [bytes.fromhex(voucher) for _, voucher in keys.values()],
        }

    # ------------------------------------------------------------------- mean model

    def _mean_model(self, r: Round) -> Rounds[tuple[ArrayRecord | None, dict[str, Any]]]:
        """Ask all clients for their models; return the equal mean of what came, and metrics."""

        def models_in(reply: Reply) -> dict[str, ArrayDict]:
            both = self.collect_both and wire.BEFORE in reply.message.content.array_records
            names = ("arrays", wire.BEFORE) if both else ("arrays",)
            records = zip(names, reply.array_records(*names), strict=True)
            return {name: check_weights(arrays, r.model) for name, arrays in records}

        population = Population(1.0, 1, 0, self.min_available_nodes, self.sampling.held_out)
        everyone = self.sampling.draw(r, population, sent_alike=False)
        uploads = yield from self._ask(
            r,
            models_in,
            stage=MODEL,
            clients=everyone._replace(wanted=None),
            require_kind=accept_any,
        )
        zero = {name: np.zeros_like(array) for name, array in r.model.items()}
        uploads = self.screening.drop(  # by norms: how far they moved says how often they trained
            uploads,
            lambda models, factor: screen_changes(zero, [m["arrays"] for m in models], factor),
        )
        if self.screening.is_robust and uploads:
            uploads = uploads.judge(screen_distances([m["arrays"] for m in uploads.values]))
        self._mark(uploads)
        metrics: dict[str, Any] = {"models-collected": len(uploads)}
        if uploads.rejected:
            logger.warning("%d clients' models could not be used", uploads.rejected.total())
        if not uploads:
            return None, metrics
        pairs = list(zip(uploads.clients, uploads.values, strict=True))
        self.models = {client: arrays["arrays"] for client, arrays in pairs}
        before = {k: arrays[wire.BEFORE] for k, arrays in pairs if wire.BEFORE in arrays}
        points = ("trained", "averaged")
        if self.progress.steps[-1].name == "average":
            points = ("averaged", "trained")
        self.models_at = dict(zip(points, (self.models, before), strict=True))
        models = list(self.models.values())
        metrics["inter-client-deviation"] = deviation(models)
        return cast_like(self.mean_of(models), r.model), metrics


class _Contacts:
    """What clients have of the first weights, and which public keys are theirs."""

    def __init__(self, sent: SentParts, keys: dict[int, tuple[str, str]]) -> None:
        self._sent, self._keys = sent, keys

    def forget(self, client: int) -> None:
        """Have a client sent the first weights again, and asked for its key."""
        self._sent.forget(client)
        self._keys.pop(client, None)

    doubt = forget  # of a client that failed: it may have lost them


def count_refused(uploads: Uploads[Any]) -> int:
    """Return how many parcels clients say that they refused in a step; at most all they got."""
    counts = [upload.metrics.get(REFUSED, 0) for upload in uploads]
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
            arrays = [np.asarray(model[name], np.float64) for model in models]
            with np.errstate(invalid="ignore"):  # of infinite numbers, on which all agree
                distances = np.asarray(np.sqrt(sum((array - centre) ** 2 for array in arrays)))
            total += float(put_back(distances, np.zeros(centre.shape), all_alike(arrays)).sum())
            count += np.size(centre)
    return total / max(count, 1)
