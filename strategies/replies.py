"""A client's reply, checked before any of it is used."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fedntk.ntk import BadReply
from fedntk.ntk.payloads import from_npy

__all__ = ["Reply", "agreeing", "check_like", "checked_accuracy", "checked_weights"]

T = TypeVar("T")


class Reply:
    """A reply whose metrics have been checked.

    Parameters
    ----------
    message : Message
        The reply.
    num_examples_key : str
        Under which its metrics count the examples.
    max_examples : int
        More than so many are refused.

    Attributes
    ----------
    node : int
        Id of the node that sent it.
    num_examples : int
        Between 1 and `max_examples`.
    metrics : dict of str to int, float or list
        The other metrics: finite numbers, and lists without NaN.
    message : Message
        The reply itself.

    Raises
    ------
    BadReply
        If there is not one MetricRecord, or a metric is not finite or the examples out of range.
    """

    def __init__(self, message: Message, num_examples_key: str, max_examples: int) -> None:
        self.message = message
        self.node = message.metadata.src_node_id
        if len(message.content.metric_records) != 1:
            raise BadReply(
                "metrics", f"expected one MetricRecord, got {len(message.content.metric_records)}"
            )
        (record,) = message.content.metric_records.values()
        self.metrics: dict[str, Any] = dict(record)
        for key, value in self.metrics.items():
            for number in value if isinstance(value, list) else [value]:
                infinite = math.isinf(number) and not isinstance(value, list)
                if math.isnan(number) or infinite:
                    raise BadReply("non-finite", f"metric {key!r} is {number}")
                if isinstance(number, int) and abs(number) >= 2**63:
                    raise BadReply("metrics", f"metric {key!r} has more than 64 bits")
        examples = self.metrics.pop(num_examples_key, None)
        if (
            not isinstance(examples, int | float)
            or not 1 <= examples <= max_examples
            or examples != int(examples)
        ):
            raise BadReply(
                "num-examples",
                f"expected a whole {num_examples_key!r} of 1 ... {max_examples}, got {examples!r}",
            )
        self.num_examples = int(examples)
        self.metrics.pop("partition-id", None)

    @property
    def metric_names(self) -> frozenset[tuple[str, int]]:
        """Names of the other metrics, with the length of those that are lists, else -1."""
        return frozenset(
            (key, len(value) if isinstance(value, list) else -1)
            for key, value in self.metrics.items()
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Name -> array of the reply's one ArrayRecord.

        Raises
        ------
        BadReply
            If there is not exactly one, or its bytes are no arrays.
        """
        records = self.message.content.array_records
        if len(records) != 1:
            raise BadReply("arrays", f"expected one ArrayRecord, got {len(records)}")
        (record,) = records.values()
        arrays = {}
        for name, array in record.items():
            try:
                if array.stype != "numpy.ndarray":
                    raise ValueError(f"serialised as {array.stype!r}")
                arrays[name] = from_npy(array.data)
            except Exception as error:  # whatever hostile bytes provoke
                raise BadReply("arrays", f"{name!r} cannot be read: {error}") from error
        return arrays


def agreeing(
    pairs: list[tuple[Reply, T]], key: Callable[[Reply, T], Any]
) -> tuple[list[tuple[Reply, T]], list[Reply]]:
    """Split replies into those with the most common `key` and the others; the first wins ties."""
    if not pairs:
        return [], []
    keys = [key(*pair) for pair in pairs]
    common, _ = Counter(keys).most_common(1)[0]
    kept = [pair for pair, own in zip(pairs, keys, strict=True) if own == common]
    others = [pair[0] for pair, own in zip(pairs, keys, strict=True) if own != common]
    return kept, others


def checked_weights(reply: Reply, expected: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Check a reply's arrays against the global model: names, shapes, dtypes, finiteness."""
    arrays = reply.arrays()
    if arrays.keys() != expected.keys():
        odd = sorted(arrays.keys() ^ expected.keys())
        raise BadReply("arrays", f"names differ from the model's in {odd[:5]}")
    for name, array in arrays.items():
        check_like(name, array, expected[name])
    return arrays


def check_like(name: str, array: NDArray[Any], expected: NDArray[Any]) -> None:
    """Raise BadReply unless an array has the shape and dtype of another, and is finite."""
    if array.shape != expected.shape:
        raise BadReply("shape", f"{name}: expected {expected.shape}, got {array.shape}")
    if array.dtype != expected.dtype:
        raise BadReply("dtype", f"{name}: expected {expected.dtype}, got {array.dtype}")
    if not np.isfinite(array).all():
        raise BadReply("non-finite", f"{name} holds NaN or infinity")


def checked_accuracy(reply: Reply) -> None:
    """Check that an accuracy, where a client reports one, is between 0 and 1."""
    accuracy = reply.metrics.get("accuracy", 0.0)
    if isinstance(accuracy, int | float) and not 0 <= accuracy <= 1:
        raise BadReply("metrics", f"expected an accuracy of 0 ... 1, got {accuracy}")
