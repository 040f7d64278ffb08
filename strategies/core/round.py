"""What a round of a strategy sees of its clients: whom it may ask, and how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from logging import getLogger
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.payloads import wire

from .averaging import named_arrays
from .centre import untrained_by
from .channel import Ask, Channel, Fold, Forgets, Late, Parse, Rounds
from .registry import ClientRegistry
from .replies import Reply, check_weights, is_like
from .sampling import Population, Sample
from .uploads import Uploads

logger = getLogger("flwr")
T = TypeVar("T")
Strategy = Any  # that of strategy.py, which imports this file
PerClient = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
Records = Callable[[int], Mapping[str, Any]]  # client -> records of its own, by name
Contents = Callable[[int, ConfigRecord], RecordDict]  # client, configuration -> what it is sent
Clients = Sample | Uploads[Any] | Sequence[int]  # of some uploads; or node ids


@dataclass(frozen=True)
class LostState:
    """What a reply without arrays says with the metric ``lost-state``."""

    final: bool  # the client also lost what it made itself, which the server cannot send again


@dataclass(eq=False)
class Round:
    """One round of training or of evaluation.

    Attributes
    ----------
    number, stage : int, str
        From 1 on; ``"train"`` or ``"evaluate"``.
    arrays : ArrayRecord
        The global ones; `model` has them by name.
    config : dict
        The user's configuration of the stage.
    channel : Channel
        What messages and replies go through.
    """

    strategy: Strategy  # the one that runs this round, whose options count
    number: int
    stage: str
    arrays: ArrayRecord
    config: Mapping[str, Any]
    population: Population
    owner: Strategy = None  # the outermost one: samples clients, and waits for replies
    speaker: Strategy = None  # with whom clients are to agree; by default the strategy
    shown: Sample | None = None  # the clients, within another one's round
    sampled: int = field(default=0, init=False)  # clients whose replies this round wants

    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.owner or self.strategy
        self.speaker = self.speaker or self.strategy
        self.channel = self.owner.channel

    @cached_property
    def model(self) -> dict[str, NDArray[Any]]:
        """The global arrays by name."""
        return named_arrays(self.arrays)

    @property
    def registry(self) -> ClientRegistry:
        """Which node is which client."""
        return self.channel.registry

    @property
    def held_out(self) -> Sequence[int]:
        """Partitions that never train."""
        held_out: Sequence[int] = self.owner.sampling.held_out
        return held_out

    @property
    def clients(self) -> set[int]:
        """Ids of the live clients that may train."""
        return self.registry.clients(without=self.held_out)

    def sample(self, *, fraction: float | None = None, sent_alike: bool = True) -> Sample:
        """Draw the round's clients, by default the strategy's fraction of them.

        `sent_alike` says that all clients are sent the same in the first round, so that they need
        not say before who they are.
        """
        sample = self.shown
        if sample is None:
            population = self.population
            if fraction is not None:
                population = population._replace(fraction=fraction)
            sample = self.strategy.sampling.draw(self, population, sent_alike=sent_alike)
        self.sampled = sample.num_clients
        return sample

    def everyone(self, *, sent_alike: bool = True) -> Sample:
        """Return all clients that may take part."""
        return self.sample(fraction=1.0, sent_alike=sent_alike)

    def within(
        self,
        strategy: Strategy,
        arrays: ArrayRecord,
        clients: Sample | Sequence[int],
        *,
        speaker: Strategy = None,
        config: Mapping[str, Any] | None = None,
    ) -> "Round":
        """Return this round for another strategy, with some of its clients.

        They are to agree with the `speaker`, by default that strategy.
        """
        if not isinstance(clients, Sample):
            clients = Sample(tuple(clients), None, 0)
        nodes = sorted(clients.nodes, key=lambda node: (self.registry.client(node), node))
        shown = clients._replace(nodes=tuple(nodes))
        config = {**self.config, **(config or {})}
        return replace(
            self, strategy=strategy, arrays=arrays, config=config, speaker=speaker, shown=shown
        )

    def ask(
        self,
        parse: Parse[T],
        *,
        stage: str | None = None,
        clients: Clients | None = None,
        arrays: ArrayRecord | None = None,
        config: PerClient | None = None,
        records: Records | None = None,
        contents: Contents | None = None,
        sent: Forgets | None = None,
        resends: bool = True,
        late: Late | None = None,
        fold: Fold[T] | None = None,
        require_kind: Callable[[Message], None] | None = None,
    ) -> Rounds[Uploads[T]]:
        """Make one exchange: write ``uploads = yield from r.ask(parse)``.

        Parameters
        ----------
        parse : callable
            Reply -> T, or BadReply. It must change nothing: the reply may yet be dropped.
        stage : str, optional
            Type of the messages; by default the round's.
        clients : Sample, Uploads or sequence of int, optional
            Who is asked: a sample, the clients of some uploads, or node ids; by default
            :meth:`sample`.
        arrays : ArrayRecord, optional
            What is sent to all; by default the global arrays.
        config : dict, or callable client -> dict, optional
            Added to the user's configuration, the round's number, and what clients must agree with.
        records, contents : callable, optional
            Client -> further records by name; or (client, configuration) -> all that it is sent.
        sent : SentParts, optional
            What clients keep of earlier messages. After an error a client's is in doubt; one that
            replies that it lost this is asked once more if the exchange `resends`.
        late, fold, require_kind : optional
            See :class:`~.channel.Ask`; by default weights are refused unless they are what the
            strategy's clients reply with.
        """
        stage, sample, owner = stage or self.stage, self._sample_of(clients), self.owner
        sent_to_all = self.arrays if arrays is None else arrays
        common = self.common_config(stage)
        shared = ConfigRecord(common)  # by clients with nothing of their own

        def content(client: int) -> RecordDict:
            extra = config(client) if callable(config) else config
            told = ConfigRecord({**common, **extra}) if extra else shared
            if contents is not None:
                return contents(client, told)
            made = RecordDict({owner.arrayrecord_key: sent_to_all, owner.configrecord_key: told})
            for name, record in (records(client) if records else {}).items():
                made[name] = record
            return made

        ask: Ask[Any] = Ask(
            stage=stage,
            nodes=sample.nodes,
            content=content,
            parse=_parse_or_lost(parse) if sent is not None and resends else parse,
            timeout=timeout_of(owner, stage, self.strategy),
            max_examples=self.strategy.max_examples,
            require_kind=require_kind or self._require_kind(stage),
            of_weights=self.strategy.replies == wire.WEIGHTS,
            sent=sent,
            wanted=sample.wanted,
            sampled=self.sampled,
            late=late,
            fold=fold,
        )
        uploads: Uploads[Any] = yield ask
        if sent is not None and resends:
            uploads = yield from self._ask_losers_again(ask, uploads, sent)
        return uploads

    def _ask_losers_again(
        self, ask: Ask[Any], uploads: Uploads[Any], sent: Forgets
    ) -> Rounds[Uploads[Any]]:
        """Send clients again what they lost, and ask them once more; drop the others."""
        channel, nodes = self.channel, set(uploads.nodes)
        lost = [upload for upload in uploads if isinstance(upload.value, LostState)]
        if not lost:
            return uploads
        claimants = set(channel.claimants)
        for upload in lost:
            sent.forget(upload.client)
        if again := [upload.node for upload in lost if not upload.value.final]:
            logger.warning("%d clients lost what they kept: it is sent again", len(again))
            more: Uploads[Any] = yield replace(ask, nodes=tuple(again), wanted=None)
            uploads = uploads.keep(nodes - set(again)).merge(more)
        channel.claimants |= claimants  # the second exchange had none
        final = [u.client for u in uploads if isinstance(u.value, LostState) and u.value.final]
        bad = BadReply(wire.LOST_STATE, "it lost what it kept")
        verdicts = [bad if isinstance(value, LostState) else None for value in uploads.values]
        uploads = uploads.judge(verdicts)
        return uploads.settled(nodes - set(uploads.nodes), lost=final)

    def _sample_of(self, clients: Clients | None) -> Sample:
        if clients is None:
            return self.sample()
        if isinstance(clients, Sample):
            return clients
        nodes = clients.nodes if isinstance(clients, Uploads) else clients
        return Sample(tuple(nodes), None, len(nodes))

    def common_config(self, stage: str) -> dict[str, Any]:
        """Return what all messages of a stage tell: the round, the agreement, options."""
        agreement = replace(
            self.speaker.agreement(),
            projected=self.channel.seeds is not None,
            schema=self.speaker.schema or self.owner.schema,
        )
        return {
            **(self.config if stage == self.stage else {}),
            "server-round": self.number,
            **agreement.to_config(),
            **self.strategy.told_options(),
            **self.speaker.told_options(),
        }

    def weights(self, reply: Reply) -> dict[str, NDArray[Any]]:
        """Return a reply's one set of weights, checked against the global arrays."""
        return check_weights(reply.arrays(), self.model, untrained_by(self.strategy))

    def _require_kind(self, stage: str) -> Callable[[Message], None]:
        """Return what refuses weights where something else is taken, and says what to do."""
        strategy = self.strategy
        if stage != MessageType.TRAIN or strategy.replies == wire.WEIGHTS:
            return accept_any

        def require(message: Message) -> None:
            if is_like(message, strategy.network_of(self.arrays)):
                raise BadReply(
                    "weights",
                    f"weights came, not {strategy.replies}: is the client a {strategy.client}?",
                )

        return require


def accept_any(message: Message) -> None:
    """Refuse no reply for what it is of."""


def timeout_of(owner: Strategy, stage: str, asker: Strategy = None) -> float:
    """Return the seconds that an exchange waits, of a strategy or of one that works within it."""
    limit: float = owner.channel.timeout
    if stage not in (MessageType.TRAIN, MessageType.EVALUATE):  # a question
        limit = (asker or owner).query_timeout
    return min(limit, owner.round_deadline or limit)


def _parse_or_lost(parse: Callable[[Reply], Any]) -> Callable[[Reply], Any]:
    """Return what parses a reply, or reads that its client lost its state."""

    def read(reply: Reply) -> Any:
        if wire.LOST_STATE not in reply.metrics:
            return parse(reply)
        value = reply.metrics[wire.LOST_STATE]
        if value not in (0, 1) or any(map(len, reply.message.content.array_records.values())):
            raise BadReply(wire.LOST_STATE, "expected 0 or 1, and no arrays beside it")
        return LostState(final=value == 1)

    return read
