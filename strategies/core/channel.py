"""Exchanges with clients: messages out, replies checked whole before any is used.

A reply counts if it answers a message of its exchange, comes from the node that was asked, is the
first to do so, and can be parsed. All others are dropped, logged and counted; none ends the run.
A round of a strategy is a generator that yields an :class:`Ask` for each exchange, and is sent the
:class:`~.uploads.Uploads`; a :class:`Conversation` drives it from Flower's two hooks.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any, Generic, NamedTuple, TypeVar, cast

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedntk.ntk import BadReply
from fedntk.trust import SEALED_SEED

from .registry import ClientRegistry, Exchange
from .replies import Reply
from .trust_protocols import SealedSeeds
from .uploads import WRITE, Upload, Uploads

logger = getLogger("flwr")
T = TypeVar("T")
Parse = Callable[[Reply], T]  # or BadReply; it changes nothing: the reply may yet be dropped
POLL = 1.0  # seconds between two looks for replies
REPLIES_AT_ONCE = 100  # that are taken from a grid together
TRACEBACK = "Traceback (most recent call last)"
Late = Any  # such as asynchrony.Asynchrony: has replies to earlier rounds' messages count
Forgets = Any  # such as registry.SentParts: knows what clients keep of what they were sent


class Fold(NamedTuple, Generic[T]):
    """Takes the values of some replies at a time, so that few of them are in memory."""

    at_once: int
    take: Callable[[Uploads[T]], Uploads[Any]]


@dataclass(frozen=True)
class Ask(Generic[T]):
    """One exchange: who is asked what, and how replies are read."""

    stage: str  # type of the messages: "train", "evaluate", or one like "query.losses"
    nodes: tuple[int, ...]
    content: Callable[[int], RecordDict]  # client -> what it is sent
    parse: Parse[T]
    timeout: float  # seconds to wait for replies
    max_examples: int  # that a reply may claim
    require_kind: Callable[[Message], None]  # BadReply for a reply of another method's client
    of_weights: bool = False  # whether replies are one set of weights
    sent: Forgets | None = None  # what clients keep of earlier messages; in doubt after an error
    wanted: int | None = None  # number of valid replies that are used, the first; None: all
    sampled: int = 0  # number of clients whose replies the round wants
    late: Late | None = None
    fold: Fold[T] | None = None


@dataclass(frozen=True)
class JointAsk:
    """Several exchanges at once, with different clients; it is sent :class:`JointUploads`."""

    asks: tuple[Ask[Any], ...]
    wanted: int | None = None  # replies after which the others are not waited for; None: all
    # this ask, replies of each exchange -> verdicts of each, before they are parsed
    screen: "JointScreen | None" = None


JointScreen = Callable[[JointAsk, Sequence[Sequence[Message]]], Sequence[Sequence[BadReply | None]]]


class JointUploads(NamedTuple):
    """The replies to a :class:`JointAsk`, and the counts of those that answer none of it."""

    parts: list[Uploads[Any]]
    rejected: Counter[str]


AnyAsk = Ask[Any] | JointAsk
Rounds = Generator[AnyAsk, Any, T]  # what a round is: it asks, and returns a T


class Posted(NamedTuple):
    """An exchange whose messages are made: to be sent, and answered."""

    ask: AnyAsk
    messages: list[Message]
    exchanges: list[Exchange]  # one for each ask


@dataclass(eq=False)
class Channel:
    """What a run's messages and replies go through."""

    weighted_by_key: str = "num-examples"
    configrecord_key: str = "config"
    seeds: SealedSeeds | None = None  # of clients, which go with each message
    query_timeout: float = 600  # seconds to wait for answers to questions without content
    timeout: float = 3600  # seconds to wait for replies to training and evaluation
    registry: ClientRegistry = field(default_factory=ClientRegistry)
    grid: Grid | None = None  # of the current round; None between rounds
    conversation: "Conversation[Any] | None" = None  # between two hooks
    last_refusal: str = ""  # why the newest reply of training was dropped
    last_failure: str = ""  # the newest one of another's strategy
    claimants: set[int] = field(default_factory=set)  # nodes with claims that are not settled
    _untold: set[int] = field(default_factory=set)  # unknown ones that do not tell a partition

    def begin(self, rounds: Rounds[Any], grid: Grid) -> list[Message]:
        """Begin a round; return the messages of its first exchange."""
        self.grid = grid
        try:
            conversation = Conversation(rounds, self)
            messages = conversation.begin()
        except BaseException:
            self.grid = None
            raise
        self.conversation = conversation
        return messages

    def finish(self, replies: Iterable[Message]) -> Any:
        """Return what the round that was begun makes of the replies; None if none was."""
        conversation, self.conversation = self.conversation, None
        try:
            return None if conversation is None else conversation.finish(replies)
        finally:
            self.grid = None

    # ----------------------------------------------------------------- sending

    def post(self, ask: AnyAsk) -> Posted:
        """Make the messages of an exchange, with sealed seeds if there is a key server."""
        if isinstance(ask, JointAsk):
            parts = [self.post(part) for part in ask.asks]
            messages = [message for part in parts for message in part.messages]
            return Posted(ask, messages, [part.exchanges[0] for part in parts])
        contents = [ask.content(self.registry.client(node)) for node in ask.nodes]
        if self.seeds is not None:
            sealed = self.seeds.fetch(ask.nodes, lambda new: self.query(new, "query.keys"))
            for k, node in enumerate(ask.nodes):
                if node in sealed:
                    contents[k] = self._with_seed(contents[k], sealed[node])
        messages = _messages(ask.stage, ask.nodes, contents)
        exchange = Exchange(messages)
        if ask.late is not None:
            ask.late.join(exchange)
        return Posted(ask, messages, [exchange])

    def _with_seed(self, content: RecordDict, sealed: bytes) -> RecordDict:
        config = dict(content.config_records.get(self.configrecord_key, {}))
        record = ConfigRecord({**config, SEALED_SEED: sealed})
        return RecordDict({**content, self.configrecord_key: record})

    def exchange(self, ask: AnyAsk) -> Any:
        """Make one more exchange within a round."""
        asks = ask.asks if isinstance(ask, JointAsk) else (ask,)
        timeout = max((one.timeout for one in asks), default=0.0)
        posted = self.post(ask)
        return self.receive(posted, self._send(posted.messages, timeout))

    def _send(self, messages: Sequence[Message], timeout: float) -> Iterable[Message]:
        if self.grid is None:
            raise RuntimeError("call configure_train first, which sets the grid")
        return self.grid.send_and_receive(messages, timeout=timeout)

    def query(
        self,
        nodes: Sequence[int],
        stage: str,
        contents: Sequence[RecordDict] = (),
        timeout: float | None = None,
    ) -> list[Message]:
        """Ask nodes a question, by default without content; return the answers, not parsed."""
        messages = _messages(stage, nodes, contents or [RecordDict()] * len(nodes))
        exchange, answers = Exchange(messages), []
        for reply in self._send(messages, self.query_timeout if timeout is None else timeout):
            try:
                exchange.take(reply)
                answers.append(reply)
            except BadReply as error:
                node = reply.metadata.src_node_id
                logger.warning("dropped an answer to %s, of node %s: %s", stage, node, error)
        return answers

    def collect(self, grid: Grid, messages: Iterable[Message], timeout: float) -> Iterable[Message]:
        """Send a round's first messages, and return the replies, as they come if some may miss."""
        posted = None if self.conversation is None else self.conversation.posted
        ask = None if posted is None else posted.ask
        if isinstance(ask, Ask) and ask.late is not None:
            at_once = REPLIES_AT_ONCE if ask.fold is None else ask.fold.at_once
            late: Iterable[Message] = ask.late.receive(self, grid, messages, timeout, at_once)
            return late
        if ask is None or ask.wanted is None:
            return grid.send_and_receive(messages, timeout=timeout)
        waiting = push(grid, messages)
        return poll(grid, waiting, timeout, lambda: not waiting)

    # --------------------------------------------------------------- receiving

    def receive(self, posted: Posted, replies: Iterable[Message]) -> Any:
        """Check the replies to an exchange; Uploads of an Ask, JointUploads of a JointAsk."""
        if isinstance(posted.ask, JointAsk):
            return self._receive_joint(posted.ask, posted.exchanges, replies)
        return self._receive(posted.ask, posted.exchanges[0], replies)

    def _receive(
        self, ask: Ask[Any], exchange: Exchange, replies: Iterable[Message]
    ) -> Uploads[Any]:
        if ask.fold is None:
            return self._accept(ask, exchange, replies)
        uploads: Uploads[Any] = Uploads(self, sampled=ask.sampled)
        for part in in_parts(replies, ask.fold.at_once):
            uploads = uploads.merge(ask.fold.take(self._accept(ask, exchange, part)))
            _release(part)
        return uploads

    def _receive_joint(
        self, joint: JointAsk, exchanges: Sequence[Exchange], replies: Iterable[Message]
    ) -> JointUploads:
        rejected, came = Counter[str](), 0
        place = {node: k for k, ask in enumerate(joint.asks) for node in ask.nodes}
        parts: list[list[Message]] = [[] for _ in joint.asks]
        stranger = BadReply("not-asked", "it answers no message of this round")
        for reply in replies:
            asked = (exchange.node_asked(reply) for exchange in exchanges)
            node = next((node for node in asked if node is not None), None)
            if node is None:
                self.log_drop(reply.metadata.src_node_id, stranger)
                rejected[stranger.reason] += 1
            else:
                parts[place[node]].append(reply)
                came += reply.has_content()
            if came == joint.wanted:  # the strategies have yet to check these
                break
        screened = joint.screen(joint, parts) if joint.screen is not None else ()
        for k, verdicts in enumerate(screened):
            good = list[Message]()
            for reply, bad in zip(parts[k], verdicts, strict=True):
                if bad is None:
                    good.append(reply)
                else:
                    self.log_drop(reply.metadata.src_node_id, bad)
                    rejected[bad.reason] += 1
            parts[k] = good
        triples = zip(joint.asks, exchanges, parts, strict=True)
        return JointUploads([self._receive(*triple) for triple in triples], rejected)

    def _accept(self, ask: Ask[T], exchange: Exchange, replies: Iterable[Message]) -> Uploads[T]:
        """Parse replies, and drop what cannot be used; of more than are wanted, use the first.

        Only replies that are used claim a partition.
        """
        uploads, rejected = list[Upload[T]](), Counter[str]()
        training_refusal = self.last_refusal

        def take(message: Message) -> None:
            try:
                client = self.registry.client(exchange.take(message))
                reply = Reply(message, client, self.weighted_by_key, ask.max_examples)
                ask.require_kind(message)
                uploads.append(
                    Upload(client, reply.node, reply.num_examples, reply.metrics, reply.left_out,
                           ask.parse(reply))
                )  # fmt: skip
            except Exception as error:  # a reply may hold anything; none may end the run
                bad = error if isinstance(error, BadReply) else BadReply("malformed", str(error))
                self.log_drop(message.metadata.src_node_id, bad)
                rejected[bad.reason] += 1

        if ask.wanted is not None:  # all that were asked have said before who they are
            came, every = list[Message](), iter(replies)
            while len(uploads) < ask.wanted and (message := next(every, None)) is not None:
                came.append(message)
                if message.has_content():
                    take(message)
            replies = came
        contents, errors = _split(replies, ask.stage)
        if errors:
            rejected["error"] = len(errors)
        self._identify(contents, exchange)
        for message in errors:
            self._book_error(message, ask, exchange)
        if ask.wanted is None:
            for message in contents:
                take(message)
        if ask.stage.startswith(MessageType.EVALUATE):
            self.last_refusal = training_refusal
        unused = self.claimants - {upload.node for upload in uploads}
        return Uploads(self, self.settle(uploads, unused), rejected, sampled=ask.sampled)

    def _book_error(self, message: Message, ask: Ask[Any], exchange: Exchange) -> None:
        """Note why a client failed, and that it may have lost all that it was sent."""
        reason = f"{message.error.reason}"
        if TRACEBACK in reason:  # of a worker of Ray; its last line says what went wrong
            reason = reason.removesuffix("'>").rstrip().splitlines()[-1]
        self.last_refusal = reason
        if (node := exchange.node_asked(message)) is not None:
            if ask.sent is not None:
                ask.sent.doubt(self.registry.client(node))
            if self.seeds is not None:
                self.seeds.forget(node)

    def log_drop(self, node: int, bad: BadReply) -> None:
        """Log why a reply is not used."""
        self.last_refusal = f"node {node}: {bad}"
        logger.warning("dropped the reply of node %d: %s", node, bad)

    def _identify(self, replies: Iterable[Message], exchange: Exchange) -> None:
        """Take the partitions from the first replies of unknown nodes, as claims to be settled."""
        first: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if self.registry.unknown([node]) and exchange.node_asked(reply) == node:
                first.setdefault(node, reply)
        reported = _reported_partitions(first.values())
        self.claimants = set(reported)
        self._untold = first.keys() - reported.keys()
        if reported:
            self.registry.add(reported)

    def ask_partitions(self, nodes: Sequence[int]) -> dict[int, int | None]:
        """Ask nodes which partition each has; None of one that has none, or does not answer."""
        return dict.fromkeys(nodes) | _reported_partitions(self.query(nodes, "query.partition"))

    def settle(self, uploads: Sequence[Upload[T]], dropped: Collection[int]) -> list[Upload[T]]:
        """Give up the dropped nodes' claims to a partition; return uploads with clients' new ids.

        They are asked for it when clients are sampled next; nodes whose replies are used but do not
        tell it, such as a user's own, are asked now.
        """
        self.registry.expect(self.claimants & set(dropped))
        if silent := sorted(self._untold & {upload.node for upload in uploads}):
            self._untold -= set(silent)
            self.claimants |= set(silent)
            self.registry.add(self.ask_partitions(silent))
        return [replace(upload, client=self.registry.client(upload.node)) for upload in uploads]


class Conversation(Generic[T]):
    """A round's generator between Flower's two hooks; one that asks nobody has no messages."""

    def __init__(self, rounds: Rounds[T], channel: Channel) -> None:
        if not isinstance(rounds, Generator):
            kind = type(rounds).__name__
            raise TypeError(f"expected a round that asks clients, got {kind}; {WRITE}")
        self._rounds, self._channel = rounds, channel
        self.posted: Posted | None = None
        self._result: T | None = None

    def begin(self) -> list[Message]:
        """Return the messages of the first exchange."""
        if (ask := self._advance(None)) is None:
            return []
        posted = self._channel.post(ask)
        self.posted = posted._replace(messages=[])  # their contents may be large
        return posted.messages

    def finish(self, replies: Iterable[Message]) -> T:
        """Make all other exchanges; return what the round made of the replies."""
        posted, self.posted = self.posted, None
        if posted is None:
            return cast("T", self._result)
        return self.run(self._channel.receive(posted, replies))

    def run(self, uploads: Any = None) -> T:
        """Make all exchanges that remain after some uploads, and return what the round returns."""
        while (ask := self._advance(uploads)) is not None:
            uploads = self._channel.exchange(ask)
        return cast("T", self._result)

    def _advance(self, value: Any) -> AnyAsk | None:
        try:
            ask = self._rounds.send(value)
        except StopIteration as end:
            self._result = end.value
            return None
        except (TypeError, AttributeError) as error:
            if "generator" not in str(error) or WRITE in str(error):
                raise
            raise TypeError(f"{error}; {WRITE}") from error
        if not isinstance(ask, Ask | JointAsk):
            raise TypeError(f"expected an exchange, got {type(ask).__name__}; {WRITE}")
        return ask


def together(
    rounds: Sequence[Rounds[T]], *, wanted: int | None = None, screen: JointScreen | None = None
) -> Rounds[tuple[list[T], Counter[str]]]:
    """Run several rounds whose first exchanges are one; the rest follow one after another.

    Returns what each returned, and the counts of replies that answer none of them.
    """
    asks, results, rejected = dict[int, Any](), dict[int, T](), Counter[str]()
    for k, one in enumerate(rounds):
        try:
            asks[k] = next(one)
        except StopIteration as end:  # it asks nobody
            results[k] = end.value
    if asks:
        joint: JointUploads = yield JointAsk(tuple(asks.values()), wanted, screen)
        rejected = joint.rejected
        for k, uploads in zip(asks, joint.parts, strict=True):
            results[k] = yield from _resume(rounds[k], uploads)
    return [results[k] for k in range(len(rounds))], rejected


def _resume(rounds: Rounds[T], uploads: Any) -> Rounds[T]:
    """Go on with a round that waits for some uploads."""
    while True:
        try:
            ask = rounds.send(uploads)
        except StopIteration as end:
            result: T = end.value
            return result
        uploads = yield ask


def in_parts(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield values as they come, some at a time."""
    left = iter(values)
    while part := list(itertools.islice(left, size)):
        yield part


def push(grid: Grid, messages: Iterable[Message]) -> dict[str, Any]:
    """Send messages; return the metadata of those that the grid took, by id."""
    messages = list(messages)
    taken = set(grid.push_messages(messages))
    return {m.metadata.message_id: m.metadata for m in messages if m.metadata.message_id in taken}


def poll(
    grid: Grid,
    waiting: dict[str, Any],
    timeout: float,
    is_over: Callable[[], bool],
    at_once: int = REPLIES_AT_ONCE,
) -> Iterator[Message]:
    """Yield replies as they come; take the messages that they answer out of those `waiting`."""
    end = time.monotonic() + timeout
    while True:
        for part in in_parts(list(waiting), at_once):
            for reply in list(grid.pull_messages(part)):
                waiting.pop(reply.metadata.reply_to_message_id, None)
                yield reply
        seconds = end - time.monotonic()
        if seconds <= 0 or is_over():
            return
        time.sleep(min(POLL, seconds))


def _messages(stage: str, nodes: Sequence[int], contents: Sequence[RecordDict]) -> list[Message]:
    pairs = zip(nodes, contents, strict=True)
    return [Message(content, dst_node_id=node, message_type=stage) for node, content in pairs]


def _release(messages: Iterable[Message]) -> None:
    """Let go of arrays that are needed no more, whoever holds the messages."""
    for message in messages:
        for name in list(message.content.array_records) if message.has_content() else ():
            del message.content[name]


def _split(replies: Iterable[Message], stage: str) -> tuple[list[Message], list[Message]]:
    """Return the replies with content, and those that report an error, which are logged."""
    contents, errors = list[Message](), list[Message]()
    for reply in replies:
        (errors if reply.has_error() else contents).append(reply)
    if contents or errors:
        logger.info("%s: %d replies and %d errors", stage, len(contents), len(errors))
    for reply in errors:
        logger.info("\t> node %d failed: %s", reply.metadata.src_node_id, reply.error.reason)
    return contents, errors


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
