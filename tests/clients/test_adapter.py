"""client_app: any NumPyClient answers the messages of today's strategies."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client import NumPyClient
from numpy.typing import NDArray

from fedntk.clients import client_app
from fedntk.simulations._flower import become_server


class Echo(NumPyClient):
    """Adds 1 to what it gets and reports all kinds of values."""

    made = 0

    def __init__(self) -> None:
        Echo.made += 1

    def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        extra = config.get("extra", 0)
        arrays = [p + 1 for p in parameters] + [np.zeros(1)] * extra
        for p in parameters:
            p += 100  # must not reach the shared record
        return arrays, 7, {"f32": np.float32(0.5), "flag": True, "text": "hello", "raw": b"x"}

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        return float(parameters[0].sum()), 3, {"accuracy": 0.25}

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"memory": 8}

    def query(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> dict[str, Any]:
        return {"losses": np.array([1.0, 2.0])}


ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(4, dtype=np.int64)}


def ask(kind: str, *, arrays: bool = True, client: Any = Echo, **config: Any) -> RecordDict:
    become_server()
    content = RecordDict({"config": ConfigRecord(config)})
    if arrays:
        content["arrays"] = ArrayRecord({k: ArrayRecord([v])["0"] for k, v in ARRAYS.items()})
    context = Context(1, 2, {"partition-id": 5}, RecordDict(), {})
    reply = client_app(lambda _: client())(Message(content, 2, kind), context)
    if arrays:
        for name, array in content["arrays"].items():
            np.testing.assert_array_equal(array.numpy(), ARRAYS[name])
    return reply.content


def test_train_returns_weights_under_their_own_names_and_dtypes():
    content = ask(MessageType.TRAIN)
    assert list(content["arrays"]) == ["w", "n"]
    for name, array in content["arrays"].items():
        np.testing.assert_array_equal(array.numpy(), ARRAYS[name] + 1)
        assert array.numpy().dtype == ARRAYS[name].dtype
    assert dict(content["metrics"]) == {
        "partition-id": 5,
        "num-examples": 7,
        "f32": 0.5,
        "flag": 1,
    }
    assert dict(content["properties"]) == {"text": "hello", "raw": b"x"}


def test_train_numbers_arrays_that_are_not_the_weights():
    assert list(ask(MessageType.TRAIN, extra=2)["arrays"]) == ["0", "1", "2", "3"]


def test_evaluate_and_queries():
    assert dict(ask(MessageType.EVALUATE)["metrics"]) == {
        "partition-id": 5,
        "loss": 15.0,
        "num-examples": 3,
        "accuracy": 0.25,
    }
    assert ask(MessageType.QUERY)["metrics"]["losses"] == [1.0, 2.0]
    assert ask(MessageType.QUERY, arrays=False)["metrics"]["memory"] == 8


def test_partition_is_told_without_making_a_client():
    before = Echo.made
    content = ask("query.partition", arrays=False)
    assert dict(content["metrics"]) == {"partition-id": 5}
    assert Echo.made == before


def test_a_client_without_a_query_of_its_own_tells_its_properties():
    class Plain(NumPyClient):
        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"cores": 2}

    assert ask(MessageType.QUERY, client=Plain)["metrics"]["cores"] == 2


def test_an_exception_of_the_client_reaches_flower():
    class Broken(NumPyClient):
        def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        ask(MessageType.TRAIN, client=Broken)
