"""A client's reply, checked before any of it is used."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from logging import getLogger
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.averages import all_alike
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.npy import from_npy
from fedntk.ntk.payloads.screening import screen_sizes
from fedntk.ntk.support.arrays import require_array, take_arrays

logger = getLogger("flwr")
T = TypeVar("T")
UNUSABLE = (ArithmeticError, RuntimeError, ValueError, MemoryError)  # that numbers can cause
KNOWN_METRICS = (wire.TRAIN_LOSS, "loss", "accuracy")
MOST_METRICS = 64  # of a reply; others are left out
MOST_NUMBERS = 10_000  # in the metrics of a reply
LONGEST_NAME = 64  # characters of a metric's name
COUNTS = ("replies-", "rejected-")  # begin the names under which the server counts replies
LARGEST_WEIGHT = 1e12  # products of larger ones leave float32
INCOMPLETE = "replies-incomplete"  # counts accepted replies of which a metric is left out
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
LARGEST_INTEGER = 2**53  # a mean in float64 is exact up to it


class NoUsableReply(RuntimeError):  # noqa: N818
    """A run that is over, and in which not one reply of a client could be used."""


class Reply:
    """A reply with checked metrics.

    Attributes
    ----------
    message, node, client : Message, int, int
        The reply itself, and the ids of the node and of the client that sent it.
    num_examples : int
        Examples that its metrics count under `num_examples_key`: 1 ... `max_examples`.
    metrics : dict of str to int, float or list
        The other metrics: finite numbers, and lists without NaN. Of more than 64, or of more than
        10,000 numbers in all, some are left out, as are names of more than 64 characters, names
        that are no Unicode text, and those under which the server counts replies.
    left_out : list of str
        Names of metrics that are NaN or infinite.
    """

    def __init__(
        self, message: Message, client: int, num_examples_key: str, max_examples: int
    ) -> None:
        self.message, self.client = message, client
        self.node = message.metadata.src_node_id
        if (count := len(message.content.metric_records)) != 1:
            raise BadReply("metrics", f"expected one MetricRecord, got {count}")
        (record,) = message.content.metric_records.values()
        metrics: dict[str, Any] = dict(record)
        for name, value in metrics.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and abs(number) >= 2**63:
                    raise BadReply("metrics", f"metric {name[:80]!r} has more than 64 bits")
        examples = metrics.pop(num_examples_key, None)
        is_number = isinstance(examples, int | float)
        if not is_number or not 1 <= examples <= max_examples or examples != int(examples):
            alike = [n[:80] for n in metrics if _spelling(n) == _spelling(num_examples_key)]
            raise BadReply(
                "num-examples",
                f"expected a whole {num_examples_key!r} of 1 ... {max_examples}, "
                f"got {str(examples)[:80]}{f' and {alike[0]!r}: rename it' if alike else ''}",
            )
        self.num_examples = int(examples)
        metrics.pop("partition-id", None)
        self.left_out = [name for name, value in metrics.items() if not _is_number(value)]
        chosen, room = set[str](), MOST_NUMBERS
        for name in sorted(
            metrics.keys() - self.left_out, key=lambda n: (n not in KNOWN_METRICS, n)
        ):
            size = len(metrics[name]) if isinstance(metrics[name], list) else 1
            if _can_be_kept(name) and len(chosen) < MOST_METRICS and size <= room:
                chosen.add(name)
                room -= size
        self.metrics = {name: value for name, value in metrics.items() if name in chosen}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Name -> array of the reply's one ArrayRecord, whatever its name."""
        records = self.message.content.array_records
        if len(records) != 1:
            raise BadReply("arrays", f"expected one ArrayRecord, got {len(records)}")
        (record,) = records.values()
        return read_arrays(record)

    def ordered_arrays(self, *names: str) -> list[NDArray[Any]]:
        """Return the arrays of the one ArrayRecord, which has these names, in their order."""
        return take_arrays(self.arrays(), *names)

    def array_records(self, *names: str) -> list[dict[str, NDArray[Any]]]:
        """Name -> array of each of several ArrayRecords, which have these names."""
        records = self.message.content.array_records
        if records.keys() != set(names):
            got = ", ".join(sorted(records))[:80] or "none"
            raise BadReply("arrays", f"expected the ArrayRecords {', '.join(names)}, got {got}")
        return [read_arrays(records[name]) for name in names]


def kinds_of(metrics: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    """Names of metrics, with the length of those that are lists, else -1: equal ones have means."""
    return frozenset((k, len(v) if isinstance(v, list) else -1) for k, v in metrics.items())


def mean_metrics(contents: list[RecordDict], key: str) -> MetricRecord:
    """Average each metric over the clients that report it, weighted by their own `key`.

    Kinds of a metric, and of more than 64 names those, that most clients report count.
    """
    groups: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
    for content in contents:
        metrics: dict[str, Any] = dict(next(iter(content.metric_records.values())))
        for kind in kinds_of(metrics):
            groups.setdefault(kind, []).append((metrics[kind[0]], metrics[key]))
    mean = MetricRecord()
    for (name, _), pairs in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        if name == key or name in mean or len(mean) == MOST_METRICS:
            continue
        values = np.array([value for value, _ in pairs], np.float64)
        total = sum(weight for _, weight in pairs)
        shares = [weight / total for _, weight in pairs]
        summed = sum(value * share for value, share in zip(values, shares, strict=True))
        mean[name] = np.clip(summed, values.min(0), values.max(0)).tolist()
    return mean


def of_most(aggregate: Aggregate, contents: list[RecordDict], key: str) -> MetricRecord:
    """Call a user's function with the metrics that most have, of the replies that have them."""
    metrics: list[Any] = [dict(next(iter(c.metric_records.values()))) for c in contents]
    most = Counter(map(kinds_of, metrics)).most_common(1)[0][0]
    common = [
        MetricRecord({name: one[name] for name in one if name in dict(most)})
        for one in metrics
        if most <= kinds_of(one)
    ]
    return aggregate([RecordDict({"metrics": record}) for record in common], key)


def _spelling(name: str) -> str:
    return name.replace("_", "-").lower()


def _is_number(value: Any) -> bool:
    """Whether a metric is finite, or a list without NaN, in which infinity may have a meaning."""
    if isinstance(value, list):
        return not any(map(math.isnan, value))
    return math.isfinite(value)


def _can_be_kept(name: str) -> bool:
    """Whether a metric's name is short, text that any file can hold, and not the server's."""
    text = not any("\ud800" <= letter <= "\udfff" for letter in name)
    return text and len(name) <= LONGEST_NAME and not name.startswith(COUNTS)


def read_arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Name -> array of a client's record; BadReply if some of its bytes are no array."""
    arrays = {}
    for name, array in record.items():
        try:
            if array.stype != "numpy.ndarray":
                raise ValueError(f"serialised as {array.stype!r}")
            arrays[name] = from_npy(array.data)
        except Exception as error:  # whatever hostile bytes provoke
            raise BadReply("arrays", f"{name!r} cannot be read: {error}") from error
    return arrays


def check_weights(
    arrays: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    untrained: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """Check arrays against a model's: names, shapes, dtypes, ranges; `untrained` are as sent."""
    if arrays.keys() != expected.keys():
        names = sorted(arrays.keys() ^ expected.keys())
        raise BadReply("arrays", f"names differ from the model's in {str(names[:5])[:200]}")
    for name, array in arrays.items():
        require_like(name, array, expected[name])
        if name in untrained and not np.array_equal(array, expected[name]):
            raise BadReply("arrays", f"{name!r} is not what was sent; no client trains it")
    return dict(arrays)


def require_like(name: str, array: NDArray[Any], expected: NDArray[Any]) -> None:
    """Raise BadReply unless an array can be another's successor in a model.

    It must have the shape and dtype. If a bit of it changed, its numbers must be finite: of
    floating point up to 1e12, whole ones up to 2^53, so that means stay in range, and variances
    (``running_var``) of at least 0.
    """
    same_kind = (array.dtype, array.shape) == (expected.dtype, expected.shape)
    if same_kind and all_alike([array, expected]).all():
        return
    whole = np.issubdtype(expected.dtype, np.integer)
    require_array(
        name,
        array,
        shape=expected.shape,
        dtype=expected.dtype,
        limit=LARGEST_INTEGER if whole else LARGEST_WEIGHT,
        low=0.0 if name.endswith("running_var") else None,
    )


def is_like(message: Message, model: ArrayRecord) -> bool:
    """Whether a reply's arrays are those of a model, by names, shapes and dtypes."""
    records = (*message.content.array_records.values(), model)
    kinds = [{n: (a.dtype, tuple(a.shape)) for n, a in record.items()} for record in records]
    return kinds[1:] == kinds[:1]


def accuracy_of(reply: Reply) -> Any:
    """Return the accuracy that an evaluation reports, None if it reports none.

    Of real targets, refuse an R^2 above 1 and a mean absolute error below 0. A low R^2 cannot be
    refused: it has no bound.
    """
    metrics = reply.metrics
    if "accuracy" not in metrics:
        r2, mae = metrics.get("r2", 0.0), metrics.get("mae", 0.0)
        numbers = isinstance(r2, int | float) and isinstance(mae, int | float)
        if not (numbers and r2 <= 1 and mae >= 0):
            raise BadReply("metrics", f"expected r2 <= 1 and mae >= 0, got {r2} and {mae}")
    return metrics.get("accuracy")


def screen_own_sizes(parts: Sequence[Any], factor: float) -> list[BadReply | None]:
    """Refuse what would outweigh all others; what was parsed has its ``size``."""
    return screen_sizes([part.size for part in parts], factor)


def screen_accuracies(accuracies: Sequence[Any], _: float) -> list[BadReply | None]:
    """Refuse accuracies that cannot be: a share, or a percentage if most clients report one."""
    numbers = sorted(value for value in accuracies if isinstance(value, int | float))
    most = 100 if numbers and numbers[(len(numbers) - 1) // 2] > 1 else 1
    return [
        BadReply("metrics", f"expected an accuracy of 0 ... {most}, got {value}")
        if isinstance(value, int | float) and not 0 <= value <= most
        else None
        for value in accuracies
    ]


def result_of(make: Callable[[], T], what: str = "solution") -> T | None:
    """Return what `make` makes of clients' numbers; None, and say so, if they allow none."""
    try:
        return make()
    except UNUSABLE as error:
        logger.warning("no %s (%s): the model stays as it was", what, error)
        return None
