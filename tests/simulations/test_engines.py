"""The local grid behaves as Flower's; the meter counts what is sent."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.simulation.ray_transport.ray_actor import BasicActorPool

from fedntk.simulations.engine._flower import outlive_workers
from fedntk.simulations.engine.engines import METER, LocalGrid, MeteredGrid, message_bytes, meter


def echo(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    partition = context.node_config["partition-id"]
    if partition == 2:
        raise RuntimeError("broken client")
    state = context.state.setdefault("seen", MetricRecord({"times": 0}))
    state["times"] += 1
    metrics = MetricRecord({"partition": partition, "times": state["times"]})
    return Message(RecordDict({"metrics": metrics, **message.content}), reply_to=message)


def grid(answer: Any = echo, **options: Any) -> LocalGrid:
    app = ClientApp()
    app.train()(answer)
    return LocalGrid(app, 7, {}, **options)


def messages(
    content: RecordDict | None = None, nodes: tuple[int, ...] = (3, 1, 4), kind: str = "train"
) -> list[Message]:
    return [Message(content or RecordDict(), node, kind) for node in nodes]


def test_replies_answer_their_messages_and_a_broken_client_is_an_error():
    """A node keeps its state from message to message; there is no node 99; threads are restored."""
    local, threads = grid(), torch.get_num_threads()
    torch.set_num_threads(3)
    for times in (1, 2):
        sent = messages(nodes=(3, 1, 99, 4))
        replies = list(local.send_and_receive(sent))
        asked, answered = [m.metadata for m in sent], [r.metadata for r in replies]
        assert [m.reply_to_message_id for m in answered] == [m.message_id for m in asked]
        assert [r.error.reason if r.has_error() else r.content["metrics"] for r in replies] == [
            "RuntimeError: broken client",
            {"partition": 0, "times": times},
            "there is no node 99",
            {"partition": 3, "times": times},
        ]
        assert [answered[i].src_node_id for i in (0, 1, 3)] == [3, 1, 4]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    ids = list(local.push_messages(messages()))
    assert [len(list(local.pull_messages(ids))) for _ in range(2)] == [3, 0]


def test_a_client_that_edits_its_message_does_not_change_anothers():
    def greedy(message: Message, context: Context) -> Message:
        seen = len(message.content)
        message.content["mine"] = MetricRecord()
        message.content["config"]["round"] = 99
        if context.node_id == 1:
            raise SystemExit
        return Message(RecordDict({"m": MetricRecord({"seen": seen})}), reply_to=message)

    content = RecordDict({"config": ConfigRecord({"round": 1})})
    replies = list(grid(greedy).send_and_receive(messages(content)))
    assert [r.content["m"]["seen"] for r in replies if r.has_content()] == [1, 1]
    assert content["config"]["round"] == 1
    assert [r.has_error() for r in replies] == [False, True, False]


def test_counted_bytes_are_flowers_own_sizes():
    """Arrays in their format for the wire and their names; other records as serialised."""
    arrays = {f"l.{i}": Array(np.random.default_rng(i).random((99, i))) for i in range(9)}
    metrics = MetricRecord({"loss": 0.5, "losses": [1.0, 2.0], "n": 3})
    config = ConfigRecord({"server-round": 1, "name": "", "raw": b"abc"})
    content = RecordDict({"a": ArrayRecord(arrays), "m": metrics, "c": config})
    expected = sum(len(name) + len(array.data) for name, array in arrays.items())
    expected += len(metrics.deflate()) + len(config.deflate())
    known: dict[int, int] = {}
    for message in messages(content):
        assert message_bytes(message, known) == expected
    assert len(known) == 3


def test_meter_counts_training_and_evaluation_apart():
    app = ClientApp(mods=[meter])
    for register in (app.train(), app.evaluate(), app.query(), app.query("partition")):
        register(echo)
    counting, array = MeteredGrid(LocalGrid(app, 4, {})), np.zeros(1000, dtype=np.float32)
    records = {"arrays": ArrayRecord({"w": Array(array)}), "config": ConfigRecord({"round": 1})}
    for kind in ("query.partition", "train", "evaluate"):
        sent = messages(RecordDict(records), kind=kind)
        replies = list(counting.send_and_receive(sent))
        assert not any(METER in reply.content for reply in replies if reply.has_content())
        costs = counting.take()
        down, up = sum(map(message_bytes, sent)), sum(map(message_bytes, replies))
        assert down > 3 * array.nbytes
        for prefix, own in (("", "train"), ("evaluation-", "evaluate")):
            counted = costs[f"{prefix}bytes-down"], costs[f"{prefix}bytes-up"]
            assert counted == ((down, up) if kind == own else (0, 0))
        assert 0 < costs["seconds-clients"] <= costs["seconds-waiting"]
        assert costs["peak-memory-clients"] > 1
    assert counting.take()["bytes-down"] == 0


@pytest.mark.parametrize(
    "claim",
    [
        MetricRecord({"seconds": [1.0], "peak-memory": -1.0}),
        MetricRecord({"seconds": float("inf"), "peak-memory": float("nan")}),
        ConfigRecord({"seconds": "long"}),
    ],
)
def test_a_false_meter_counts_nothing_and_ends_nothing(claim):
    counting = MeteredGrid(grid(lambda m, _: Message(RecordDict({METER: claim}), reply_to=m)))
    (reply,) = counting.send_and_receive(messages(nodes=(1,)))
    assert METER not in reply.content
    costs = counting.take()
    assert (costs["seconds-clients"], costs["peak-memory-clients"]) == (0, 0)


def test_a_task_that_cannot_be_sent_costs_no_worker_of_ray():
    outlive_workers()
    pool = object.__new__(BasicActorPool)
    pool.pool, pool._future_to_actor, pool.num_actors = ["worker"], {}, 1

    def send(actor, *job):
        return pickle.dumps((actor, *job))

    for _ in range(2):
        with pytest.raises(TypeError, match="cannot pickle"):
            pool.submit(send, (threading.Lock(), "message", "0", "context"))
    assert pool._future_to_actor[pool.submit(send, ("app", "message", "0", "context"))] == "worker"
    assert pool.pool == []
