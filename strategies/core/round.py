"""What a round of a strategy sees of its clients: whom it may ask, and how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from typing import Any, Protocol, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.agreement import Agreement

from .averaging import named_arrays
from .channel import Ask, Channel, Fold, Forgets, Late, Parse, Rounds
from .lost import LostState, parse_or_lost
from .registry import ClientRegistry
from .replies import Reply, check_weights, is_like
from .sampling import Population, Sample, Sampling
from .screening import Screening
from .uploads import Uploads

logger = getLogger("flwr")
T = TypeVar("T")
PerClient = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
Records = Callable[[int], Mapping[str, Any]]  # client -> records of its own, by name


class _Strategy(Protocol):
    """What a round asks of a strategy: see :class:`~.strategy.Strategy`."""

    arrayrecord_key: str
    configrecord_key: str
    weighted_by_key: str
    max_examples: int
    query_timeout: float
    round_deadline: float
    timeout: float
    run: str
    schema: str
    sampling: Sampling
    screening: Screening

    @property
    def client(self) -> str: ...
    @property
    def replies(self) -> str: ...
    @property
    def untrained(self) -> tuple[str, ...]: ...
    def agreement(self) -> Agreement: ...
    def told_options(self) -> dict[str, Any]: ...
    def network_of(self, arrays: ArrayRecord) -> ArrayRecord: ...
    def enough(self, uploads: Uploads[Any]) -> bool: ...


class Round:
    """One round of training or of evaluation.

    Attributes
    ----------
    number : int
        From 1 on.
    stage : str
        ``"train"`` or ``"evaluate"``.
    arrays : ArrayRecord
        The global arrays.
    config : dict
        The user's configuration of the stage.
    channel : Channel
        What messages and replies go through.
    strategy : Strategy
        Whose options count: the one that runs this round.
    population : Population
        How many clients are sampled, and which never are.
    """

    def __init__(
        self,
        strategy: _Strategy,
        number: int,
        stage: str,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        population: Population,
        *,
        channel: Channel,
        owner: _Strategy | None = None,
        shown: Sample | None = None,
        speaker: _Strategy | None = None,
    ) -> None:
        self.strategy, self.number, self.stage = strategy, number, stage
        self.arrays, self.config, self.population = arrays, dict(config), population
        self.channel = channel
        self.owner = owner or strategy  # the outermost: samples clients, and waits for replies
        self.sampled = 0  # clients whose replies this round wants; 0 before they are sampled
        self._speaker = speaker or strategy
        self._shown = shown

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
        return self.owner.sampling.held_out

    @property
    def clients(self) -> set[int]:
        """Ids of the live clients that may train."""
        return self.registry.clients(without=self.held_out)

    # ------------------------------------------------------------------ who is asked

    def sample(self, *, fraction: float | None = None, sent_alike: bool = True) -> Sample:
        """Draw the round's clients, by default the strategy's fraction of them.

        A round within another one's has the clients that it is shown. `sent_alike` says that all
        clients are sent the same in the first round, so that they need not say before who they are.
        """
        if self._shown is not None:
            self.sampled = self._shown.num_clients
            return self._shown
        population = self.population
        if fraction is not None:
            population = replace(population, fraction=fraction)
        sample = self.strategy.sampling.draw(self, population, sent_alike=sent_alike)
        self.sampled = sample.num_clients
        return sample

    def everyone(self, *, sent_alike: bool = True) -> Sample:
        """Return all clients that may take part."""
        return self.sample(fraction=1.0, sent_alike=sent_alike)

    def within(
        self,
        strategy: _Strategy,
        arrays: ArrayRecord,
        clients: Sample | Sequence[int],
        *,
        speaker: _Strategy | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> "Round":
        """Return this round for another strategy, which works with some of its clients.

        These are a sample, or node ids. They are to agree with the `speaker`, by default with that
        strategy.
        """
        if not isinstance(clients, Sample):
            clients = Sample(tuple(clients), None, 0)
        nodes = sorted(clients.nodes, key=lambda node: (self.registry.client(node), node))
        return Round(
            strategy,
            self.number,
            self.stage,
            arrays,
            {**self.config, **(config or {})},
            self.population,
            channel=self.channel,
            owner=self.owner,
            shown=clients._replace(nodes=tuple(nodes)),
            speaker=speaker,
        )

    # ------------------------------------------------------------------------ asking

    def ask(
        self,
        parse: Parse[T],
        *,
        stage: str | None = None,
        clients: "Sample | Uploads[Any] | Sequence[int] | None" = None,
        arrays: ArrayRecord | None = None,
        config: PerClient | None = None,
        records: Records | None = None,
        contents: Callable[[int, ConfigRecord], RecordDict] | None = None,
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
            Added to the configuration: the user's, if it is of the round's stage, the round's
            number, what clients must agree with, and the options that travel to clients.
        records : callable, optional
            Client -> further records by name.
        contents : callable, optional
            (client, configuration) -> all that the client is sent, in place of the above.
        sent : SentParts, optional
            What clients keep of earlier messages. After an error a client's is in doubt.
        resends : bool
            Whether a client that replies that it lost this is asked once more: `config`, `records`
            and `contents` are then called again.
        late, fold, require_kind : optional
            See :class:`~.channel.Ask`; by default weights are refused unless they are what the
            strategy's clients reply with.

        Returns
        -------
        Uploads of T
            The replies that can be used, sorted by client.
        """
        stage = stage or self.stage
        sample = self._sample_of(clients)
        read: Parse[Any] = parse_or_lost(parse) if sent is not None and resends else parse
        ask: Ask[Any] = Ask(
            stage=stage,
            nodes=sample.nodes,
            content=self._content_of(stage, arrays, config, records, contents),
            parse=read,
            timeout=timeout_of(self.owner, stage, self.strategy),
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
        if sent is None or not resends:
            return uploads
        return (yield from self._ask_losers_again(ask, uploads, sent))

    def _ask_losers_again(
        self, ask: Ask[Any], uploads: Uploads[Any], sent: Forgets
    ) -> Rounds[Uploads[Any]]:
        """Send clients again what they lost, and ask them once more.

        A client that lost what the server cannot send is dropped, as is one that loses again.
        """
        channel, nodes = self.channel, set(uploads.nodes)
        lost = [upload for upload in uploads if isinstance(upload.value, LostState)]
        if not lost:
            return uploads
        claims = channel.claims()
        for upload in lost:
            sent.forget(upload.client)
        if again := [upload.node for upload in lost if not upload.value.final]:
            logger.warning("%d clients lost what they kept: it is sent again", len(again))
            more: Uploads[Any] = yield replace(ask, nodes=tuple(again), wanted=None)
            uploads = uploads.keep(nodes - set(again)).merge(more)
        channel.add_claims(claims)  # the second exchange had none
        values = uploads.values
        final = [u.client for u in uploads if isinstance(u.value, LostState) and u.value.final]
        bad = BadReply(wire.LOST_STATE, "it lost what it kept")
        uploads = uploads.judge(bad if isinstance(v, LostState) else None for v in values)
        return uploads.settled(nodes - set(uploads.nodes), lost=final)

    def _sample_of(self, clients: "Sample | Uploads[Any] | Sequence[int] | None") -> Sample:
        if clients is None:
            return self.sample()
        if isinstance(clients, Sample):
            return clients
        nodes = clients.nodes if isinstance(clients, Uploads) else clients
        return Sample(tuple(nodes), None, len(nodes))

    def _content_of(
        self,
        stage: str,
        arrays: ArrayRecord | None,
        config: PerClient | None,
        records: Records | None,
        contents: Callable[[int, ConfigRecord], RecordDict] | None,
    ) -> Callable[[int], RecordDict]:
        """Return what makes a client's message; clients with equal ones share the records."""
        common = self.common_config(stage)
        shared = ConfigRecord(common)
        arrays = self.arrays if arrays is None else arrays

        def content(client: int) -> RecordDict:
            extra = config(client) if callable(config) else config
            told = ConfigRecord({**common, **extra}) if extra else shared
            if contents is not None:
                return contents(client, told)
            strategy = self.owner
            made = RecordDict({strategy.arrayrecord_key: arrays, strategy.configrecord_key: told})
            for name, record in (records(client) if records else {}).items():
                made[name] = record
            return made

        return content

    def common_config(self, stage: str) -> dict[str, Any]:
        """Return what all messages of a stage tell: the round, the agreement, options."""
        user = self.config if stage == self.stage else {}
        agreement = self._speaker.agreement()
        agreement = replace(
            agreement,
            projected=self.channel.seeds is not None,
            schema=self._speaker.schema or self.owner.schema,
        )
        told = {"server-round": self.number, **agreement.to_config()}
        options = {**self.strategy.told_options(), **self._speaker.told_options()}
        return {**user, **told, **options}

    # ----------------------------------------------------------------------- reading

    def weights(self, reply: Reply) -> dict[str, NDArray[Any]]:
        """Return a reply's one set of weights, checked against the global arrays."""
        return check_weights(reply.arrays(), self.model, self.strategy.untrained)

    def _require_kind(self, stage: str) -> Callable[[Message], None]:
        """Return what refuses weights where something else is taken, and says what to do."""
        strategy = self.strategy

        def require(message: Message) -> None:
            if is_like(message, strategy.network_of(self.arrays)):
                raise BadReply(
                    "weights",
                    f"weights came, not {strategy.replies}: is the client a {strategy.client}?",
                )

        takes_weights = stage != MessageType.TRAIN or strategy.replies == wire.WEIGHTS
        return accept_any if takes_weights else require


def accept_any(message: Message) -> None:
    """Refuse no reply for what it is of."""


def timeout_of(owner: _Strategy, stage: str, asker: _Strategy | None = None) -> float:
    """Return the seconds that an exchange waits, of a strategy or of one that works within it."""
    is_question = stage not in (MessageType.TRAIN, MessageType.EVALUATE)
    limit = (asker or owner).query_timeout if is_question else owner.timeout
    return min(limit, owner.round_deadline or limit)
