"""Messages to clients, and their replies, checked whole before any is used.

A reply counts if it answers a message of its stage, comes from the node that was asked, is the
first to do so, and can be parsed. All others are dropped, logged and counted; none ends the run.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from logging import getLogger
from typing import Any, ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedntk.ntk import BadReply
from fedntk.ntk.options import Declared, argument, option
from fedntk.ntk.payloads.agreement import Agreement
from fedntk.ntk.payloads.screening import OUTLIER_FACTOR
from fedntk.ntk.robust_averages import Defence, least_models
from fedntk.trust import SEALED_SEED

from .registry import ClientRegistry, Exchange, SentParts
from .replies import Reply, is_like, mean_metrics, of_most
from .trust_protocols import SealedSeeds, SealsSeeds

logger = getLogger("flwr")
# errors that well-formed numbers from clients can cause, and that must not end a run
UNUSABLE = (ArithmeticError, RuntimeError, ValueError, MemoryError)
T = TypeVar("T")
Pairs = list[tuple[Reply, T]]
Parse = Callable[[Reply], T]  # or BadReply
Screen = Callable[[Sequence[T], float], Sequence[BadReply | None]]
Accepted = tuple[Pairs[T], Counter[str]]  # what was parsed; reasons why others were rejected
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]  # new arrays and metrics, if any
POLL = 1.0  # seconds between two looks for replies
TRACEBACK = "Traceback (most recent call last)"


class Exchanges(Declared, FedAvg):
    """What a strategy sends its clients, and which replies it accepts."""

    fraction_train: float = option(
        "share of the available nodes that train in a round", default=1.0, at_least=0, at_most=1
    )
    fraction_evaluate: float = option(
        "share of them that evaluate", default=1.0, at_least=0, at_most=1, compared=False
    )
    min_train_nodes: int = option("fewest nodes that train", default=2, at_least=0)
    min_evaluate_nodes: int = option(
        "fewest nodes that evaluate", default=2, at_least=0, compared=False
    )
    min_available_nodes: int = option(
        "nodes to wait for before a round", default=2, at_least=0, compared=False
    )
    weighted_by_key: str = argument("metric that counts examples", default="num-examples")
    arrayrecord_key: str = argument("name of the record of arrays", default="arrays")
    configrecord_key: str = argument("name of the configuration's record", default="config")
    train_metrics_aggr_fn: Any = argument(
        "how metrics of training are aggregated: by default, each is averaged over the clients "
        "that report it, weighted by their examples; a function is given the replies that have "
        "all metrics that most have",
        default=None,
    )
    evaluate_metrics_aggr_fn: Any = argument("the same, for evaluation", default=None)
    min_completed: float = option(
        "fewer valid replies leave the model unchanged in a round: a number, and at least so many "
        "clients are sampled, or below 1 a share of the clients sampled, rounded up; "
        "asynchronous rounds, and strategies within others, know no share",
        default=0.5,
        above=0,
    )
    max_examples: int = option(
        "examples that a client may hold: a reply that claims more is dropped, as examples are the "
        "weight of a reply",
        default=10_000_000,
        at_least=1,
        at_most=2**32,
        compared=False,
    )
    query_timeout: float = option(
        "seconds to wait for answers to a method's questions between training and aggregation",
        default=600,
        above=0,
        compared=False,
    )
    round_deadline: float = option(
        "seconds after which each exchange of a round goes on with the replies that have come; "
        "late replies are dropped; 0: as long as the run's timeout",
        default=0.0,
        at_least=0,
        compared=False,
    )
    outlier_factor: float = option(
        "with three clients or more, a reply is dropped if its change of the weights, or what else "
        "a method compares, is this many times the median client's or more; raise it if clients "
        "take very different numbers of steps; infinity drops none",
        default=OUTLIER_FACTOR,
        above=1,
        at_most=float("inf"),
    )
    defence: Defence = option(
        "rule by which clients' models become one, so that few false ones move it little: see "
        "fedntk.ntk.robust_averages; some count clients alike, as numbers of examples are claims",
        default="none",
    )
    liars_expected: int = option(
        "f: most false models in a round that defence has to bear; rounds with too few replies "
        "for so many leave the model unchanged",
        default=1,
        at_least=1,
    )
    key_server: SealsSeeds | None = argument(
        "seals the seed of the random projection for each client, such as "
        "fedntk.trust.KeyServer or RemoteKeyServer: the strategy never learns the seed; clients "
        "have projection=SealedProjection(...)",
        default=None,
    )
    run: str = option(
        "name of the training run for the trusted third parties: a seed of one run opens in no "
        "other; a run that goes on after a restart keeps its name",
        default="",
    )
    schema: str = argument(
        "name or digest of what examples look like: columns, classes, units; clients with "
        "another one refuse to train and to evaluate",
        default="",
    )

    client: ClassVar[str] = "SGDClient"  # class of the clients that go with it
    replies: ClassVar[str] = "weights"  # what these reply with: see Agreement
    defences: ClassVar[tuple[str, ...]] = ("none",)  # values of `defence` that it can follow
    num_sampled = 0  # clients whose replies the current round wants
    num_false = 0  # replies of the newest exchange that `defence` dropped
    tells_options: ClassVar[bool] = True  # whether options declared to_clients are sent to them

    def __post_init__(self) -> None:
        super().__post_init__()
        flowers = FedAvg.__init__.__annotations__.keys() - {"return"}
        rules = {n: getattr(self, n) for n in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")}
        FedAvg.__init__(self, **{name: getattr(self, name) for name in flowers})
        for name, rule in rules.items():
            setattr(self, name, mean_metrics if rule is None else partial(of_most, rule))
        self.registry = ClientRegistry()
        self.sent = SentParts()
        self.global_arrays = ArrayRecord()
        self.server_round = 0
        self.last_refusal = ""
        self.last_failure = ""  # of a strategy that works within this one
        self._seeds = None if self.key_server is None else SealedSeeds(self.key_server, self.run)
        self._exchanges: dict[str, Exchange] = {}  # stage -> what its replies answer
        self._configs: dict[str, ConfigRecord] = {}  # stage -> of its last messages
        self._claimants: set[int] = set()  # nodes whose newest replies told their partitions
        self._untold: set[int] = set()  # unknown nodes whose replies do not tell it
        self._grid: Grid | None = None
        self._owner: Exchanges | None = None  # the strategy within which this one works
        self._wanted: int | None = None  # replies that end a round's training; None: all
        self._timeout: float = 3600

    def check(self) -> None:
        """Refuse a key server without the name of a run, and another method's defence."""
        super().check()
        if self.min_completed >= 1 and self.min_completed != int(self.min_completed):
            raise ValueError(
                "min_completed: expected a whole number, or a share below 1, got "
                f"{self.min_completed}"
            )
        if self.defence not in self.defences:
            raise ValueError(
                f"defence: expected {' or '.join(self.defences)} for {type(self).__name__}, got "
                f"{self.defence}"
            )
        if self.key_server is not None and not self.run:
            raise ValueError("key_server: name the training run with run=..., as its clients do")

    def agreement(self) -> Agreement:
        """Return what clients must agree with; each message has it."""
        return Agreement(
            strategy=type(self).__name__,
            client=self.client,
            replies=self.replies,
            projected=self._seeds is not None,
            schema=self._schema,
        )

    @property
    def _schema(self) -> str:
        return self.schema or ("" if self._owner is None else self._owner._schema)

    # ----------------------------------------------------------------- sending

    def content_for(
        self, client: int, stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one client is sent.

        Parameters
        ----------
        client : int
            Its id in the registry.
        stage : str
            Type of the message: ``"train"``, ``"evaluate"``, or what :meth:`exchange` is given.
        arrays : ArrayRecord
            The global arrays, or those of the exchange.
        config : ConfigRecord
            With ``"server-round"``. All clients share it: add to a copy.
        """
        return RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})

    def messages(
        self, nodes: Sequence[int], stage: str, arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """Make a message for each node; the replies of this stage will have to answer these."""
        self.prepare_config(config, self.server_round)
        self._configs[stage] = config
        contents = [
            self.content_for(self.registry.client(node), stage, arrays, config) for node in nodes
        ]
        return self.address(nodes, contents, stage)

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add what all messages of a round have: its number, and what must agree."""
        config["server-round"] = server_round
        config.update({**self.agreement().to_config(), **self.told_options})

    @property
    def told_options(self) -> dict[str, Any]:
        """Options that are sent to clients, as a configuration holds them."""
        return self.to_config() if self.tells_options else {}

    def address(
        self, nodes: Sequence[int], contents: Sequence[RecordDict], stage: str
    ) -> list[Message]:
        """Address contents to nodes, with their sealed seeds if there is a key server."""
        if self._seeds is not None:
            self._seeds.fetch(nodes, lambda new: self._ask(new, "query.keys"))
        messages: list[Message] = []
        for node, content in zip(nodes, contents, strict=True):
            sealed = None if self._seeds is None else self._seeds.of(node)
            if sealed is not None:
                own = dict(content.config_records.get(self.configrecord_key, {}))
                config = ConfigRecord({**own, SEALED_SEED: sealed})
                content = RecordDict({**content, self.configrecord_key: config})
            messages += self._construct_messages(content, [node], stage)
        self._exchanges[stage] = Exchange(messages)
        return messages

    def _ask(self, nodes: Sequence[int], kind: str) -> list[Message]:
        """Return the replies to a question without content that answer it."""
        asked = list(self._construct_messages(RecordDict(), list(nodes), kind))
        sent, answers = Exchange(asked), []
        for reply in self._sent(asked, self.query_timeout):
            try:
                sent.take(reply)
                answers.append(reply)
            except BadReply as error:
                node = reply.metadata.src_node_id
                logger.warning("dropped an answer to %s, of node %s: %s", kind, node, error)
        return answers

    def _sent(self, messages: list[Message], timeout: float) -> Iterable[Message]:
        if self._grid is None:
            raise RuntimeError("call configure_train first, which sets the grid")
        return self._grid.send_and_receive(messages, timeout=timeout)

    def timeout_of(self, stage: str) -> float:
        """Return the seconds that an exchange waits for replies."""
        first = self._owner or self
        asked = stage in (MessageType.TRAIN, MessageType.EVALUATE)
        limit = first._timeout if asked else self.query_timeout
        return min(limit, first.round_deadline or limit)

    def exchange(
        self, nodes: Sequence[int], stage: str, arrays: ArrayRecord, parse: Parse[T]
    ) -> Accepted[T]:
        """Make one more exchange within a round; parameters as above, result as :meth:`accepted`.

        A stage that was sent before has its configuration again. In a deployment an exchange costs
        seconds: prefer one a round.
        """
        config = self._configs.get(stage, ConfigRecord())
        messages = self.messages(nodes, stage, arrays, config)
        return self.accepted(self._sent(messages, self.timeout_of(stage)), parse, stage)

    # --------------------------------------------------------------- receiving

    def receive(self, grid: Grid, stage: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Send a round's messages of a stage, and return the replies, as they come if it can."""
        if stage != MessageType.TRAIN or self._wanted is None:
            return grid.send_and_receive(messages, timeout=self.timeout_of(stage))
        waiting = push(grid, messages)
        return self.poll(grid, waiting, lambda: not waiting)

    def poll(
        self, grid: Grid, waiting: dict[str, Any], is_over: Callable[[], bool]
    ) -> Iterator[Message]:
        """Yield replies to messages of training as they come, for as long as a round waits.

        Answered messages are taken out of those `waiting`, by id.
        """
        end = time.monotonic() + self.timeout_of(MessageType.TRAIN)
        while True:
            for part in in_parts(list(waiting), self.replies_at_once):
                for reply in list(grid.pull_messages(part)):
                    waiting.pop(reply.metadata.reply_to_message_id, None)
                    yield reply
            seconds = end - time.monotonic()
            if seconds <= 0 or is_over():
                return
            time.sleep(min(POLL, seconds))

    @property
    def replies_at_once(self) -> int:
        """Number of replies that are taken from the grid together."""
        return 100

    def accepted(self, replies: Iterable[Message], parse: Parse[T], stage: str) -> Accepted[T]:
        """Parse the replies of a stage, dropping those that cannot be used.

        Each message is answered once, by the node that was asked. After an error a client is sent
        again all that it may have lost. Only replies that are used claim a partition. If more
        clients were asked than are wanted, the first replies that can be parsed are used.

        `parse` turns a reply into what the method needs of it, or raises BadReply. It must not
        change anything: the reply may yet be dropped. What was parsed is sorted by client, and
        rejected replies are counted by reason.
        """
        self.num_false = 0
        sent = self._exchanges.get(stage, Exchange())
        is_train = not stage.startswith(MessageType.EVALUATE)
        wanted = self._wanted if stage == MessageType.TRAIN else None
        parsed, rejected = list[tuple[Reply, T]](), Counter[str]()
        of_training = self.last_refusal

        def take(message: Message) -> None:
            try:
                client = self.registry.client(sent.take(message))
                reply = Reply(message, client, self.weighted_by_key, self.max_examples)
                self._require_kind(message, stage)
                parsed.append((reply, parse(reply)))
            except Exception as error:  # a reply may hold anything; none may end the run
                bad = error if isinstance(error, BadReply) else BadReply("malformed", str(error))
                self.drop(message.metadata.src_node_id, bad, rejected)

        if wanted is not None:  # all that were asked have said before who they are
            came, every = list[Message](), iter(replies)
            while len(parsed) < wanted and (message := next(every, None)) is not None:
                came.append(message)
                if message.has_content():
                    take(message)
            replies = came
        contents, errors = self._check_and_log_replies(replies, is_train, validate=False)
        rejected.update({"error": len(errors)} if errors else {})
        self._identify(contents, sent)
        for message in errors:
            reason = f"{message.error.reason}"
            if TRACEBACK in reason:  # of a worker of Ray; its last line says what went wrong
                reason = reason.removesuffix("'>").rstrip().splitlines()[-1]
            self.last_refusal = reason
            if (node := sent.node_asked(message)) is not None:
                self.forget_sent(self.registry.client(node))
                if self._seeds is not None:
                    self._seeds.forget(node)
        for message in contents if wanted is None else ():
            take(message)
        if not is_train:
            self.last_refusal = of_training
        used = {reply.node for reply, _ in parsed}
        return self._remaining(parsed, self._claimants - used), rejected

    def forget_sent(self, client: int) -> None:
        """Have a client sent all parts again."""
        self.sent.forget(client)

    def _require_kind(self, message: Message, stage: str) -> None:
        """Refuse weights where something else is taken, with what to do."""
        expected = stage != MessageType.TRAIN or self.takes_weights
        if not expected and is_like(message, self.network_of(self.global_arrays)):
            raise BadReply(
                "weights", f"weights came, not {self.replies}: is the client a {self.client}?"
            )

    @property
    def takes_weights(self) -> bool:
        """Whether clients reply to the current round with weights."""
        return self.replies == Exchanges.replies

    def network_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the network's own arrays among the global ones."""
        return arrays

    def drop(self, node: int, bad: BadReply, rejected: Counter[str]) -> None:
        """Count a reply that is not used, and log why."""
        rejected[bad.reason] += 1
        self.num_false += bad.reason == self.defence
        self.last_refusal = f"node {node}: {bad}"
        logger.warning("dropped the reply of node %d: %s", node, bad)

    def apply_screen(self, pairs: Pairs[T], rejected: Counter[str], screen: Screen[T]) -> Pairs[T]:
        """Drop the replies that a rule over all parsed ones, and `outlier_factor`, refuses."""
        kept: Pairs[T] = []
        verdicts = screen([parsed for _, parsed in pairs], self.outlier_factor)
        for pair, bad in zip(pairs, verdicts, strict=True):
            if bad is None:
                kept.append(pair)
            else:
                self.drop(pair[0].node, bad, rejected)
        used = {reply.node for reply, _ in kept}
        return self._remaining(kept, {reply.node for reply, _ in pairs} - used)

    def _identify(self, replies: Iterable[Message], sent: Exchange) -> None:
        """Take the partitions from the first replies of nodes that were not asked beforehand.

        Until the replies are accepted these are claims: see :meth:`_remaining`.
        """
        first: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if self.registry.unknown([node]) and sent.node_asked(reply) == node:
                first.setdefault(node, reply)
        reported = _reported_partitions(first.values())
        self._claimants = set(reported)
        self._untold = first.keys() - reported.keys()
        if reported:
            self.registry.add(reported)

    def _ask_partitions(self, nodes: Sequence[int]) -> dict[int, int | None]:
        return dict.fromkeys(nodes) | _reported_partitions(self._ask(nodes, "query.partition"))

    def _remaining(self, pairs: Pairs[T], dropped: Collection[int]) -> Pairs[T]:
        """Sort replies by client, after the dropped nodes' claims to a partition are given up.

        These nodes are asked for their partitions when clients are sampled next; those whose
        replies are used but do not tell it, such as a user's own, are asked now.
        """
        self.registry.expect(self._claimants & set(dropped))
        if silent := sorted(self._untold & {reply.node for reply, _ in pairs}):
            self._untold -= set(silent)
            self._claimants |= set(silent)
            self.registry.add(self._ask_partitions(silent))
        for reply, _ in pairs:
            reply.client = self.registry.client(reply.node)
        return sorted(pairs, key=lambda pair: (pair[0].client, pair[0].node))

    @property
    def fewest_replies(self) -> int:
        """Number of valid replies without which no round changes the model."""
        return max(int(self.min_completed), least_models(self.defence, self.liars_expected))

    @property
    def fewest_sampled(self) -> int:
        """Number of clients that are sampled for training at least."""
        return max(self.min_train_nodes, int(self.min_completed))

    def enough(self, completed: int) -> bool:
        """Whether this many valid replies may change the model; logs it if they may not.

        Those of the newest exchange that `defence` dropped as false count: it bears them.
        """
        completed += self.num_false
        share = self.min_completed if self.min_completed < 1 else 0
        needed = max(self.fewest_replies, math.ceil(share * self.num_sampled))
        if completed < needed:
            logger.warning(
                "%d valid replies and at least %d are needed: the model stays as it was",
                completed,
                needed,
            )
        return completed >= needed


def result_of(make: Callable[[], T], what: str = "solution") -> T | None:
    """Return what `make` makes of clients' numbers; None, and say so, if they allow none."""
    try:
        return make()
    except UNUSABLE as error:
        logger.warning("no %s (%s): the model stays as it was", what, error)
        return None


def in_parts(values: Iterable[T], size: int | None) -> Iterator[list[T]]:
    """Yield values as they come, some at a time; all at once without a size."""
    left = iter(values)
    while part := list(itertools.islice(left, size)):
        yield part


def push(grid: Grid, messages: Iterable[Message]) -> dict[str, Any]:
    """Send messages; return the metadata of those that the grid took, by id."""
    messages = list(messages)
    taken = set(grid.push_messages(messages))
    return {m.metadata.message_id: m.metadata for m in messages if m.metadata.message_id in taken}


def _reported_partitions(replies: Iterable[Message]) -> dict[int, int | None]:
    """Return the partition that each node reports, None for one that says that it has none."""
    reported: dict[int, int | None] = {}
    for reply in replies:
        if reply.has_error() or len(reply.content.metric_records) != 1:
            continue
        (record,) = reply.content.metric_records.values()
        partition = record.get("partition-id")
        if isinstance(partition, int) and -1 <= partition < 2**63:  # below 0: placeholders
            reported[reply.metadata.src_node_id] = None if partition == -1 else partition
    return reported
