"""A fuzzer: liars change real replies of every strategy and stage, and the rules of replies hold.

A case is a reply with one or two lies of `LIES`. After each run with such replies, `check` requires:

- no exception; a run in which nothing could be used says so, by NoUsableReply;
- only finite numbers in the model, in the state and in the metrics;
- bounds on processor time and memory;
- honest clients that refuse what liars had them sent, if they do, and do not stumble over it;
- the bits of the run in which the dropped replies never came.

The last rule has exceptions: `LOUD` lies, which say more than silence does. An error has a client
sent again all that it may have lost; a client that says that it lost its state is sent it again,
or begins anew. These replies are lies in both runs.

    python -m tests.fuzz 100000 0  # number of cases, seed
"""

import argparse
import hashlib
import itertools
import logging
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)

from fedntk.clients import ClosedFormClient, DFedAvgClient, NTKFLClient, TCTClient
from fedntk.simulations.check import failed, from_node
from fedntk.simulations.engine._flower import own_copy
from fedntk.strategies import NTKFL, TCT, DFedAvg, NoUsableReply, OneExchange, Topology

from .strategies import test_fed_ensemble, test_tct
from .strategies.federation import Contract, Grid, app, arrays_of, bits, examples, network, start
from .strategies.test_contract import CONTRACTS, frozen

ROUNDS = 2
MOST_ANSWERS = 10_000  # of clients, in memory
SECONDS = 10  # of the processor, in a run that takes a tenth of one
MOST_BYTES = 2 * 2**30  # of address space that a run may add
ASYNCHRONOUS = "asynchronous OneExchange"
SECURE = {"bits": 8, "secure_aggregation": True, "validation": examples(7)}
LATE = {"asynchronous": True, "round_seconds": 1e-9, "validation": examples(7)}
SGD = {"learning_rate": 0.1, "batch_size": 4, "local_epochs": 1}
# what CONTRACTS lack: secure sums, sealed parcels, sums in any order, questions before the rounds
FEDERATIONS = CONTRACTS | {
    "secure OneExchange": Contract(
        partial(OneExchange, network=network(), **SECURE), app(ClosedFormClient)
    ),
    "secure TCT": Contract(
        partial(TCT, network=network(), solve="statistics", num_features=12, **SECURE),
        app(TCTClient, **SGD),
    ),
    ASYNCHRONOUS: Contract(
        partial(OneExchange, network=network(), **LATE),
        app(ClosedFormClient),
    ),
    "sealed DFedAvg": Contract(
        partial(DFedAvg, topology=Topology("ring"), seal=True), app(DFedAvgClient, **SGD)
    ),
}
ACCIDENTS = tuple("Type Key Attribute Index Assertion Runtime Memory Arithmetic".split())
ASIDE = {"query.partition", "query.keys"}  # asked while other replies are being read
RANDOM = {"secure OneExchange", "secure TCT", "sealed DFedAvg"}  # clients draw keys
CACHES = test_tct.CACHE.name, test_fed_ensemble.CACHE.name  # where some clients keep files

# -------------------------------------------------------------------------------- lies

Draw = np.random.Generator
Replies = list[Message]
NAN, INF = float("nan"), float("inf")
NUMBERS = [
    0, -1, 1, 2, 5, 10**7 + 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 10**20, 0.5, -0.5,
    1e-320, 1e-30, 1e11, 1e30, 1e39, 1e308, -1e308, NAN, INF, -INF,
]  # fmt: skip
DTYPES = ["f2", "f4", "f8", ">f4", "i1", "i4", "i8", "u1", "u8", "?", "c8", "U3", "M8[s]"]
NAMES = ["", "arrays", "train-loss", "lost-state", "accuracy", "replies-accepted", "x" * 99, "\ud800"]


class World(NamedTuple):
    """What a liar can take from: earlier replies of its run, and those of other runs."""

    earlier: Replies
    foreign: Callable[[Draw], Message]


def pick(draw: Draw, items: Iterable[Any], otherwise: Any = None) -> Any:
    """Draw one of some items, which need not be alike."""
    listed = list(items)
    return listed[draw.integers(len(listed))] if listed else otherwise


def in_array(change: Callable[[Draw, np.ndarray], Any]) -> Callable[..., Any]:
    """Make a lie of what becomes of one array: an array, Flower's Array, or bytes."""

    def lie(draw: Draw, reply: Message, _: World) -> None:
        record = pick(draw, reply.content.array_records.values(), {})
        if (name := pick(draw, record)) is None:
            return
        try:
            array = record[name].numpy()
        except Exception:  # another lie damaged it
            array = np.zeros(3, np.float32)
        with np.errstate(all="ignore"):
            new = change(draw, array)
        if isinstance(new, bytes):
            new = Array(str(array.dtype), array.shape, "numpy.ndarray", new)
        record[name] = new if isinstance(new, Array) else Array(np.asarray(new))

    return lie


def numbers(draw: Draw, array: np.ndarray) -> np.ndarray:
    """Put a number into one place, some or all."""
    new, value = array.copy(), pick(draw, NUMBERS)
    if array.dtype.kind not in "fiub" or not array.size:
        return new
    share = pick(draw, [0, 0.1, 0.5, 1])
    places = draw.random(array.size) < share
    places[draw.integers(array.size)] = True
    if array.dtype.kind != "f":
        limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else np.iinfo("u1")
        value = int(min(max(-(2**62) if value != value else value, limits.min), limits.max))
    new.reshape(-1)[places] = np.asarray(value, np.float64 if array.dtype.kind == "f" else None)
    return new


def shape(draw: Draw, array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return pick(draw, [
        flat, array[None], array[..., None], array.T, flat[:-1], flat[:0], flat[:1].reshape(()),
        np.concatenate([flat, flat]), array[:0] if array.ndim else flat, np.zeros((0, 2**40)),
        array[:-1] if array.ndim else flat, np.repeat(array, 2, -1) if array.ndim else flat,
    ])  # fmt: skip


def raw_bytes(draw: Draw, array: np.ndarray) -> bytes:
    data = bytearray(Array(array).data)
    kind = draw.integers(6)
    if kind < 3:  # in the header or after it
        for _ in range(1 + 4 * (kind == 1)):
            place = draw.integers(min(len(data), 128) if kind == 2 else len(data))
            data[place] ^= 1 << draw.integers(8)
    return [bytes(data), bytes(data), bytes(data), bytes(data[: draw.integers(len(data))]),
            bytes(data) + draw.bytes(9), draw.bytes(draw.integers(200))][kind]  # fmt: skip


def claim(draw: Draw, array: np.ndarray) -> bytes:
    """Claim a size that the bytes have not."""
    huge = (pick(draw, [2**20, 2**40, 2**62, 2**63, -1, -(2**40)]),)
    claimed = pick(draw, [huge, (*huge, 0), (2**32, 2**32), (*array.shape, 2**40), (1,) * 70])
    header = {"descr": pick(draw, ["<f4", "|V0", "|O", "<f8"]), "fortran_order": False}
    text = repr(header | {"shape": claimed}).encode() + b" " * 20 + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes()


def labels(draw: Draw, array: np.ndarray) -> Array:
    """Name a dtype, shape or serialisation that the bytes have not."""
    true = Array(array)
    claimed = (pick(draw, [true.dtype, "float64", "int8", "nonsense"]),
               pick(draw, [true.shape, (2**40,), (), (-1,)]),
               pick(draw, [true.stype, "numpy.ndarray", "pickle"]))  # fmt: skip
    return Array(*claimed, true.data)


def names(draw: Draw, reply: Message, _: World) -> None:
    """Take out, add, rename, swap or reorder arrays."""
    records = reply.content.array_records
    if (key := pick(draw, records)) is None:
        return
    items = list(records[key].items())
    other = pick(draw, NAMES[:-1])
    extra = (other, pick(draw, (array for _, array in items), Array(np.zeros(3, np.float32))))
    at = int(draw.integers(len(items))) if items else 0
    swapped = [*items[at:], *items[:at]]
    reply.content[key] = ArrayRecord(dict(pick(draw, [
        items[:at] + items[at + 1 :], [*items, extra], items[::-1], [],
        [*items[:at], (other, extra[1]), *items[at + 1 :]],
        [(name, array) for (name, _), (_, array) in zip(items, swapped, strict=True)],
    ])))  # fmt: skip


def records(draw: Draw, reply: Message, world: World) -> None:
    """Take out, add, rename or exchange whole records."""
    content = reply.content
    name, other = pick(draw, content), pick(draw, ["again", "", "to-0", "to-neighbours", "arrays"])
    foreign = pick(draw, [*world.earlier, world.foreign(draw)]).content
    kind = draw.integers(5)
    if kind == 0 and name is not None:
        del content[name]
    elif kind in (1, 2) and name is not None:
        content[other] = content[name]
        if kind == 2 and other != name:
            del content[name]
    elif kind == 3 and (taken := pick(draw, foreign)) is not None:
        content[pick(draw, [name, taken])] = foreign[taken]
    else:
        content[other] = pick(draw, [ArrayRecord(), MetricRecord(), ConfigRecord()])


def metrics(draw: Draw, reply: Message, _: World) -> None:
    """Change a metric, above all the number of examples, or take it out."""
    record = pick(draw, reply.content.metric_records.values())
    if record is None:
        return
    name = pick(draw, [*record, "num-examples", "partition-id", pick(draw, NAMES[:-1])])
    if draw.random() < 0.1:
        record.pop(name, None)
        return
    number = pick(draw, NUMBERS)
    many = [1.0] * int(pick(draw, [2, 3, 4, 5, 6, 20_000]))
    record[name] = pick(draw, [number, number, number, [], [float(number)], many])


def settings(draw: Draw, reply: Message, _: World) -> None:
    """Change what a client says besides arrays and numbers, such as its public key."""
    record = pick(draw, reply.content.config_records.values())
    if record is None:
        return
    value = pick(draw, ["text", 7, [1, 2], b"", draw.bytes(32), bytes(32), draw.bytes(10_000)])
    record[pick(draw, [*record, "public-key"])] = value


def contents(draw: Draw, reply: Message, world: World) -> None:
    """Answer with what was said before, by anybody, in this run or another."""
    other = pick(draw, [*world.earlier, world.foreign(draw), world.foreign(draw)])
    reply.content = own_copy(other).content


def without_content(_: Draw, reply: Message, __: World) -> None:
    reply.content = RecordDict()


def lose(_: Draw, reply: Message, __: World) -> None:
    """Say that the client's state is lost, with or without arrays."""
    for name in list(reply.content.array_records):
        del reply.content[name]
    for record in reply.content.metric_records.values():
        record["lost-state"] = 1 if _.random() < 0.5 else 0


def other_node(draw: Draw, reply: Message, _: World) -> Message:
    return from_node(reply, pick(draw, [77, 1, 0, -1]))


def other_message(draw: Draw, reply: Message, world: World) -> None:
    others = [m.metadata.reply_to_message_id for m in world.earlier]
    reply.metadata.__dict__["_reply_to_message_id"] = pick(draw, [*others[:-1], "none", "0"])


def twice(_: Draw, reply: Message, __: World) -> Replies:
    return [reply, own_copy(reply)]


def replayed(draw: Draw, reply: Message, world: World) -> Replies:
    """Send an earlier reply once more, as it was, after the new one."""
    own = [m for m in world.earlier if m.metadata.src_node_id == reply.metadata.src_node_id]
    return [reply, own_copy(pick(draw, own))]


LIES: dict[str, Callable[..., Any]] = {
    "numbers": in_array(numbers),
    "scale": in_array(
        lambda draw, a: a * np.asarray(-10.0 ** draw.integers(-40, 40)).astype(a.dtype)
        if a.dtype.kind in "fi" else a
    ),
    "noise": in_array(
        lambda draw, a: (a + draw.normal(size=a.shape)).astype(a.dtype)
        if a.dtype.kind in "fiu" else a
    ),
    "rows": in_array(lambda draw, a: draw.permutation(a) if a.ndim else a),
    "shape": in_array(shape),
    "dtype": in_array(lambda draw, a: a.astype(pick(draw, DTYPES)) if a.dtype.kind in "fiub" else a),
    "memory order": in_array(lambda _, a: np.asfortranarray(a)),
    "bytes": in_array(raw_bytes),
    "claim": in_array(claim),
    "labels": in_array(labels),
    "names": names,
    "records": records,
    "metrics": metrics,
    "settings": settings,
    "contents": contents,
    "no content": without_content,
    "lose": lose,
    "error": lambda _, reply, __: failed(reply),
    "other node": other_node,
    "other message": other_message,
    "twice": twice,
    "replayed": replayed,
}  # fmt: skip
LOUD = {"error", "lose"}
TWO = {"twice", "replayed"}  # two replies, of which the first is true


class Lie(NamedTuple):
    """What becomes of a client's n-th reply of a run, counted from 0."""

    client: int
    reply: int
    how: str
    seed: int


# -------------------------------------------------------------------------------- runs


class LiarsGrid(Grid):
    """A grid on which some clients lie; replies that are `lost` never come.

    `told` are the lies that were told, and `dropped` the replies (client, n) that the strategy
    dropped, with reasons.
    """

    def __init__(self, name: str, num_clients: int, lies: Iterable[Lie], lost: Iterable[Any]):
        lies = list(lies)
        liars = {k: partial(self._lie, k) for k in range(num_clients)}
        super().__init__(FEDERATIONS[name].clients, num_clients=num_clients, changes=liars)
        self.lies, self.lost, self.name = lies, set(lost), name
        self.told: list[Lie] = []
        self.dropped: dict[tuple[int, int], str] = {}
        self.earlier: Replies = []
        self.failed: list[str] = []  # of honest clients, why
        self._counts = [0] * num_clients
        self._newest: dict[int, tuple[int, int]] = {}  # node -> its newest reply
        self._impostors: dict[int, tuple[int, int]] = {}  # node -> newest reply in its name
        self._inbox: Replies = []
        self._heard: dict[int, Replies] = {node: [] for node in self.contexts}
        self._live = dict.fromkeys(self.contexts, 0)  # messages that real clients have answered

    def _answer(self, message: Message) -> Message:
        """Answer from memory if the client's answer to all that it was sent so far is known."""
        node = message.metadata.dst_node_id
        heard = self._heard[node]
        heard.append(own_copy(message))
        if self.name in RANDOM:
            return super()._answer(message)
        known = (self.name, node, *map(digest, heard))
        if known not in _answers:
            for earlier in heard[self._live[node] : -1]:
                super()._answer(earlier)
            self._live[node] = len(heard)
            if len(_answers) >= MOST_ANSWERS:
                _answers.clear()
            _answers[known] = super()._answer(message)
        answer = _answers[known]
        if answer.has_error():
            return Message(answer.error, reply_to=message)
        return Message(own_copy(answer).content, reply_to=message)

    def _lie(self, client: int, reply: Message) -> Replies:
        key = client, self._counts[client]
        self._counts[client] += 1
        if reply.has_error():
            self.failed += [reply.error.reason] * (client not in {lie.client for lie in self.lies})
        else:
            self.earlier.append(own_copy(reply))
        node, replies = reply.metadata.src_node_id, [reply]
        for lie in self.lies:
            if lie[:2] == key and not (reply.has_error() or key in self.lost):
                draw = np.random.default_rng(lie.seed)
                world = World(self.earlier, partial(foreign_reply, self.name))
                copied = own_copy(reply)
                found = LIES[lie.how](draw, copied, world)
                replies = found if isinstance(found, list) else [found or copied]
                reply = replies[0]
                self.told.append(lie)
        sender = reply.metadata.src_node_id
        if reply.metadata.message_type not in ASIDE:
            (self._newest if sender == node else self._impostors)[sender] = key
        if key in self.lost:
            return [failed(reply)] if self.name == ASYNCHRONOUS else []
        return replies

    def note(self, node: int, reason: str) -> None:
        """Note that the newest reply of a node was dropped."""
        impostor = self._impostors.pop(node, None) if reason == "not-asked" else None
        if key := impostor or self._newest.get(node):
            self.dropped[key] = reason

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Iterable[Message]:
        messages = sorted(messages, key=lambda m: m.metadata.dst_node_id)
        self.changed_kinds = sorted({m.metadata.message_type for m in messages})
        return super().send_and_receive(messages, **options)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._inbox += self.send_and_receive(messages)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids, inbox = set(message_ids), self._inbox
        self._inbox = [m for m in inbox if m.metadata.reply_to_message_id not in ids]
        return [m for m in inbox if m.metadata.reply_to_message_id in ids]


_answers: dict[tuple[Any, ...], Message] = {}


def digest(message: Message) -> bytes:
    """Return a short name of a message's contents."""
    parts = hashlib.sha256(message.metadata.message_type.encode())
    for name, record in message.content.items():
        parts.update(name.encode())
        for key, value in record.items():
            parts.update(repr((key, value)).encode() if not isinstance(value, Array) else value.data)
    return parts.digest()


class Drops(logging.Handler):
    """Hears from the log which nodes' replies were dropped, and why."""

    def __init__(self, grid: LiarsGrid) -> None:
        super().__init__(logging.WARNING)
        self.grid = grid

    def emit(self, record: logging.LogRecord) -> None:
        if "node %d" in str(record.msg) and isinstance(record.args, tuple):
            node, error = record.args
            self.grid.note(int(node), getattr(error, "reason", "other"))


@contextmanager
def bounded(grid: LiarsGrid) -> Any:
    """Listen to the log; bound the memory and seconds of a run."""
    logger, limits = logging.getLogger("flwr"), resource.getrlimit(resource.RLIMIT_AS)
    kept = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Drops(grid)], False
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    begun = time.process_time()
    try:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", folder)
            numbers = itertools.count(1)
            patch.setattr("secrets.token_hex", lambda n: f"{next(numbers):0{2 * n}x}")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        logger.handlers, logger.propagate = kept
        for folder in itertools.chain.from_iterable(Path(own).iterdir() for own in CACHES):
            shutil.rmtree(folder)
    seconds = time.process_time() - begun
    assert seconds < SECONDS, f"it took {seconds:.0f} s of the processor"


def run(
    name: str, num_clients: int, lies: Iterable[Lie], lost: Iterable[Any] = (), rounds: int = ROUNDS
) -> tuple[LiarsGrid, dict[Any, Any]]:
    """Run a strategy; return the grid, and what must have the same bits."""
    strategy = FEDERATIONS[name].strategy(
        min_available_nodes=num_clients, fraction_train=1.0, fraction_evaluate=1.0
    )
    grid, end = LiarsGrid(name, num_clients, lies, lost), ""
    with bounded(grid):
        try:
            arrays = start(strategy, grid, rounds)
        except NoUsableReply:
            arrays, end = arrays_of(strategy.global_arrays), "no usable reply"
    measured = {
        (stage, number, metric): np.asarray(value)
        for stage in ("train", "evaluate")
        for number, of in getattr(strategy, f"{stage}_metrics").items()
        for metric, value in of.items()
        if "replies-" not in metric and "rejected" not in metric
    }
    for what, array in [*arrays.items(), *measured.items(), *strategy.state_dict().items()]:
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            assert np.isfinite(array).all(), f"{what} is not finite"
    return grid, {
        "end": end,
        **bits(arrays),
        **{f"state {n}": own for n, own in frozen(strategy, "public_keys", "sent").items()},
        **{n: value.tobytes() for n, value in measured.items()},
    }


@cache
def foreign_replies() -> dict[str, Replies]:
    """Return what three honest clients reply in a round of each strategy."""
    return {name: run(name, 3, [], rounds=1)[0].earlier for name in sorted(FEDERATIONS)}


def foreign_reply(name: str, draw: Draw) -> Message:
    """Draw a reply of another strategy's run, or of another run of this one."""
    library = foreign_replies()
    return pick(draw, library[name if draw.random() < 0.3 else pick(draw, library)])


def check(name: str, *, num_clients: int, lies: Sequence[Lie]) -> int:
    """Require what the module's docstring lists of a run; return the number of cases in it."""
    foreign_replies()  # before this run: no run begins within another
    grid, found = run(name, num_clients, lies)
    accidents = [reason for reason in grid.failed if reason.startswith(ACCIDENTS)]
    assert not accidents, f"an honest client failed: {accidents[0]}"
    loud = {lie[:2] for lie in grid.told if lie.how in LOUD}
    second = {lie[:2] for lie in grid.told if lie.how in TWO}
    lost = grid.dropped.keys() - loud - second
    left = [lie for lie in grid.told if lie[:2] not in lost and not (
        lie[:2] in second and lie[:2] in grid.dropped)]  # fmt: skip
    if lost or left != grid.told:
        _, without = run(name, num_clients, left, lost)
        odd = [key for key in {**found, **without} if found.get(key) != without.get(key)]
        assert not odd, (
            f"dropped replies {sorted(grid.dropped.items())} left traces in {odd[:5]}: "
            f"{[(found.get(key), without.get(key)) for key in odd[:2]]!s:.400}"
        )
    return len({lie[:2] for lie in grid.told})


# ------------------------------------------------------------------------------- cases


def draw_lies(draw: Draw, num_clients: int) -> list[Lie]:
    """One or two liars, who lie in most of their replies."""
    lies = []
    for client in draw.permutation(num_clients)[: draw.integers(1, 3)]:
        for reply in range(40):
            for how in draw.permutation(sorted(LIES))[: pick(draw, [0, 1, 1, 1, 2])]:
                lies.append(Lie(int(client), reply, str(how), int(draw.integers(2**31))))
    alone = {lie[:2] for lie in lies if lie.how in TWO | {"error"}}
    return [
        lie for lie, next_ in itertools.zip_longest(lies, lies[1:])
        if lie[:2] not in alone or next_ is None or next_[:2] != lie[:2]
    ]  # fmt: skip


def shrink(name: str, num_clients: int, lies: list[Lie]) -> tuple[list[Lie], str]:
    """Return the fewest lies of these that still break a rule, and how."""
    said = ""
    size = len(lies)
    while size:
        for at in range(0, len(lies), size):
            fewer = lies[:at] + lies[at + size :]
            try:
                check(name, num_clients=num_clients, lies=fewer)
            except Exception as error:
                lies, said = fewer, f"{type(error).__name__}: {error}"
                break
        else:
            size //= 2
        size = min(size, len(lies))
    return lies, said


def program_for(name: str, num_clients: int, lies: Sequence[Lie]) -> str:
    told = "".join(f"    {lie},\n" for lie in lies)
    return (
        "from tests.fuzz import Lie, check\n\n"
        f"check({name!r}, num_clients={num_clients}, lies=[\n{told}])\n"
    )


def fuzz(count: int, seed: int, names: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Try so many cases, as many of each strategy; return their number, and programs that fail."""
    failures: list[str] = []
    cases = dict.fromkeys(names or sorted(FEDERATIONS), 0)
    for number in itertools.count():
        if (total := sum(cases.values())) >= count:
            return total, failures
        name = min(cases, key=cases.__getitem__)
        draw = np.random.default_rng([seed, number])
        num_clients = int(draw.choice([3, 3, 4, 6]))  # with few of them no majority hides a fault
        lies = draw_lies(draw, num_clients)
        try:
            cases[name] += check(name, num_clients=num_clients, lies=lies)
        except Exception as error:
            cases[name] += 1
            fewest, said = shrink(name, num_clients, lies)
            said = said or f"not again: {type(error).__name__}: {error}"
            failures.append(f"# {said}\n{program_for(name, num_clients, fewest)}")
            print(failures[-1], flush=True)


def main() -> None:
    """Fuzz from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=2_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("names", nargs="*", help="strategies, as FEDERATIONS has them")
    given = parser.parse_args()
    begun = time.process_time()
    cases, failures = fuzz(given.count, given.seed, given.names)
    seconds = time.process_time() - begun
    print(f"{cases} replies, {len(failures)} failures, {seconds:.0f} s of the processor")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
