"""What liars make of real replies, drawn from a generator: see :mod:`tests.fuzz`."""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedntk.simulations.check import failed, from_node
from fedntk.simulations.engine._flower import own_copy

Draw = np.random.Generator
Replies = list[Message]
NAN, INF = float("nan"), float("inf")
NUMBERS = [
    0, -1, 1, 2, 5, 10**7 + 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 10**20, 0.5, -0.5,
    1e-320, 1e-30, 1e11, 1e30, 1e39, 1e308, -1e308, NAN, INF, -INF,
]  # fmt: skip
DTYPES = ["f2", "f4", "f8", ">f4", "i1", "i4", "i8", "u1", "u8", "?", "c8", "U3", "M8[s]"]
NAMES = ["", "arrays", "train-loss", "lost-state", "accuracy", "replies-accepted", "x" * 99]


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
        if (name := pick(draw, record)) is not None:
            change_array(draw, record, name, change)

    return lie


def change_array(draw: Draw, record: ArrayRecord, name: str, change: Callable[..., Any]) -> None:
    """Put what becomes of an array in its place."""
    array = np.zeros(3, np.float32)  # if another lie damaged it, or left 2**30 empty rows
    with contextlib.suppress(Exception):
        if max((read := record[name].numpy()).shape, default=0) < 2**30:
            array = read
    with np.errstate(all="ignore"):
        new = change(draw, array)
    if isinstance(new, bytes):
        new = Array(str(array.dtype), array.shape, "numpy.ndarray", new)
    record[name] = new if isinstance(new, Array) else Array(np.asarray(new))


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
    """Claim a size that the bytes lack."""
    huge = (pick(draw, [2**20, 2**40, 2**62, 2**63, -1, -(2**40)]),)
    claimed = pick(draw, [huge, (*huge, 0), (2**32, 2**32), (*array.shape, 2**40), (1,) * 70])
    header = {"descr": pick(draw, ["<f4", "|V0", "|O", "<f8"]), "fortran_order": False}
    text = repr(header | {"shape": claimed}).encode() + b" " * 20 + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes()


def labels(draw: Draw, array: np.ndarray) -> Array:
    """Name a dtype, shape or serialisation other than that of the bytes."""
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
    other = pick(draw, NAMES)
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
        content[pick(draw, [name or taken, taken])] = foreign[taken]
    else:
        content[other] = pick(draw, [ArrayRecord(), MetricRecord(), ConfigRecord()])


def metrics(draw: Draw, reply: Message, _: World) -> None:
    """Change a metric, above all the number of examples, or take it out."""
    record = pick(draw, reply.content.metric_records.values())
    if record is None:
        return
    name = pick(draw, [*record, "num-examples", "partition-id", pick(draw, NAMES)])
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


def lose(draw: Draw, reply: Message, _: World) -> None:
    """Say that the client's state is lost."""
    for name in list(reply.content.array_records):
        del reply.content[name]
    for record in reply.content.metric_records.values():
        record["lost-state"] = int(draw.integers(2))


def other_node(draw: Draw, reply: Message, _: World) -> Message:
    return from_node(reply, pick(draw, [77, 1, 0, -1]))


def other_message(draw: Draw, reply: Message, world: World) -> None:
    others = [m.metadata.reply_to_message_id for m in world.earlier]
    reply.metadata.__dict__["_reply_to_message_id"] = pick(draw, [*others[:-1], "none", "0"])


def twice(_: Draw, reply: Message, __: World) -> Replies:
    return [reply, own_copy(reply)]


def replayed(draw: Draw, reply: Message, world: World) -> Replies:
    """Send an earlier reply once more, as it was, after the new one."""
    earlier = [m for m in world.earlier if m.metadata.src_node_id == reply.metadata.src_node_id]
    return [reply, own_copy(pick(draw, earlier, reply))]


CHANGES: dict[str, Callable[[Draw, np.ndarray], Any]] = {  # of one array
    "numbers": numbers,
    "scale": lambda draw, a: (
        a * np.asarray(-(10.0 ** draw.integers(-40, 40))).astype(a.dtype)
        if a.dtype.kind in "fi"
        else a
    ),
    "noise": lambda draw, a: (
        (a + draw.normal(size=a.shape)).astype(a.dtype) if a.dtype.kind in "fiu" else a
    ),
    "rows": lambda draw, a: draw.permutation(a) if a.ndim else a,
    "shape": shape,
    "dtype": lambda draw, a: a.astype(pick(draw, DTYPES)) if a.dtype.kind in "fiub" else a,
    "memory order": lambda _, a: np.asfortranarray(a),
    "bytes": raw_bytes,
    "claim": claim,
    "labels": labels,
}


def together(draw: Draw, reply: Message, _: World) -> None:
    """Change two arrays or more, in agreement: by one rule and the same draws."""
    every = [(record, name) for record in reply.content.array_records.values() for name in record]
    change, seed = CHANGES[pick(draw, sorted(CHANGES))], int(draw.integers(2**31))
    for at in draw.permutation(len(every))[: pick(draw, [2, 2, 3, len(every)])]:
        change_array(np.random.default_rng(seed), *every[at], change)


def as_if_more(draw: Draw, reply: Message, _: World) -> None:
    """Claim more examples: the metric and the counts agree, and no, one or all other arrays."""
    times = pick(draw, [2, 9, 1000, 10**8, 10**9, 2**31, 2**62])
    wide = (times > 1000) != (draw.random() < 0.1)  # as whole numbers of such a size travel
    heap, share, told = draw.random() < 0.3, pick(draw, [0, 0.3, 1]), draw.random() < 0.5

    def more(draw: Draw, array: np.ndarray, *, is_counts: bool = False) -> np.ndarray:
        if array.dtype.kind not in "iu":
            return array * np.asarray(times, array.dtype) if draw.random() < share else array
        array = array.astype("i8") if wide else array
        if not is_counts:
            return array * np.asarray(times).astype(array.dtype) if draw.random() < share else array
        counts = [times * count for count in array.tolist()]
        if heap:
            counts = [sum(counts) * (at == counts.index(max(counts))) for at in range(len(counts))]
        return np.array([min(count, 2**63 - 1) for count in counts], array.dtype)

    for metric in reply.content.metric_records.values():
        if told and isinstance(number := metric.get("num-examples"), int):
            metric["num-examples"] = min(times * number, 2**63 - 1)
    for record in reply.content.array_records.values():
        for name in record:
            with contextlib.suppress(Exception):  # if another lie damaged it
                change_array(draw, record, name, partial(more, is_counts=name.endswith("counts")))


LIES: dict[str, Callable[..., Any]] = {
    **{name: in_array(change) for name, change in CHANGES.items()},
    "together": together,
    "as if more": as_if_more,
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
TWO = {"twice", "replayed"}  # two replies; the first is true


class Lie(NamedTuple):
    """What becomes of a client's n-th reply of a run: 1, 2, ...; asked who it is, -1, -2, ..."""

    client: int
    reply: int
    how: str
    seed: int
