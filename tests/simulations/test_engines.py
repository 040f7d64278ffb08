"""The local grid behaves as Flower's; the meter counts what is sent."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedntk.simulations.engine.engines import LocalGrid, MeteredGrid, message_bytes
from fedntk.simulations.engine.meter import METER, meter


def echo(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    if context.node_config["partition-id"] == 2:
        raise RuntimeError("broken client")
    state = context.state.setdefault("seen", MetricRecord({"times": 0}))
    state["times"] += 1
    metrics = MetricRecord(
        {"partition": context.node_config["partition-id"], "times": state["times"]}
    )
    return Message(RecordDict({"metrics": metrics, **message.content}), reply_to=message)


def grid(run_config: dict[str, Any] | None = None) -> LocalGrid:
    app = ClientApp()
    app.train()(echo)
    return LocalGrid(app, 4, run_config or {})


def messages(content: RecordDict) -> list[Message]:
    return [Message(content, node, "train") for node in (3, 1, 4)]


def test_replies_answer_their_messages_and_a_broken_client_is_an_error():
    local = grid()
    sent = messages(RecordDict())
    replies = list(local.send_and_receive(sent))
    assert [r.metadata.reply_to_message_id for r in replies] == [
        m.metadata.message_id for m in sent
    ]
    assert [r.metadata.src_node_id for r in replies] == [3, 1, 4]
    assert [r.has_error() for r in replies] == [True, False, False]
    assert replies[0].error.reason == "RuntimeError: broken client"
    assert [r.content["metrics"]["partition"] for r in replies[1:]] == [0, 3]


def test_a_message_to_a_node_that_does_not_exist_is_an_error():
    local = grid()
    sent = [Message(RecordDict(), node, "train") for node in (1, 99, 2)]
    replies = list(local.send_and_receive(sent))
    assert [r.has_error() for r in replies] == [False, True, False]
    assert replies[1].error.reason == "there is no node 99"
    assert replies[1].metadata.reply_to_message_id == sent[1].metadata.message_id


@pytest.mark.parametrize("answer", [None, 3, RecordDict()])
def test_an_app_that_returns_no_message_is_an_error(answer):
    app = ClientApp()
    app.train()(lambda message, context: answer)
    replies = list(LocalGrid(app, 4, {}).send_and_receive(messages(RecordDict())))
    assert [r.has_error() for r in replies] == [True, True, True]
    name = type(answer).__name__
    assert replies[0].error.reason == f"TypeError: the app returned {name}, expected a Message"


def test_state_stays_with_its_node_between_messages():
    local = grid()
    for times in (1, 2):
        *_, last = local.send_and_receive(messages(RecordDict()))
        assert last.content["metrics"]["times"] == times


def test_a_client_that_edits_its_message_does_not_change_anothers():
    def greedy(message: Message, context: Context) -> Message:
        seen = len(message.content)
        message.content["mine"] = MetricRecord()
        message.content["config"]["round"] = 99
        if context.node_id == 1:
            raise SystemExit
        return Message(RecordDict({"m": MetricRecord({"seen": seen})}), reply_to=message)

    app = ClientApp()
    app.train()(greedy)
    content = RecordDict({"config": ConfigRecord({"round": 1})})
    replies = list(LocalGrid(app, 4, {}).send_and_receive(messages(content)))
    assert [r.content["m"]["seen"] for r in replies if r.has_content()] == [1, 1]
    assert content["config"]["round"] == 1
    assert [r.has_error() for r in replies] == [False, True, False]


def test_threads_are_restored():
    before = torch.get_num_threads()
    list(grid().send_and_receive(messages(RecordDict())))
    assert torch.get_num_threads() == before


def test_replies_are_pulled_once():
    local = grid()
    ids = list(local.push_messages(messages(RecordDict())))
    assert len(list(local.pull_messages(ids))) == 3
    assert list(local.pull_messages(ids)) == []


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_replies(workers):
    def slow(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        time.sleep(0.02 * (partition % 3))
        return Message(RecordDict({"m": MetricRecord({"p": partition})}), reply_to=message)

    app = ClientApp()
    app.train()(slow)
    told = []
    with LocalGrid(
        app, 7, {}, workers=workers, on_answer=lambda *answer: told.append(answer)
    ) as local:
        sent = [Message(RecordDict(), node, "train") for node in (5, 1, 7, 2, 4)]
        replies = list(local.send_and_receive(sent))
    assert [reply.content["m"]["p"] for reply in replies] == [4, 0, 6, 1, 3]
    assert told == [("train", i, 5) for i in range(1, 6)]
    assert not any(thread.name.startswith("client") for thread in threading.enumerate())


def test_counted_bytes_are_flowers_own_sizes():
    """Arrays in their format for the wire and their names; other records as serialised."""
    arrays = {f"l.{i}": Array(np.random.default_rng(i).random((99, i))) for i in range(9)}
    metrics = MetricRecord({"loss": 0.5, "losses": [1.0, 2.0], "n": 3})
    config = ConfigRecord({"server-round": 1, "name": "", "raw": b"abc"})
    content = RecordDict({"a": ArrayRecord(arrays), "m": metrics, "c": config})
    expected = sum(len(name) + len(array.data) for name, array in arrays.items())
    expected += len(metrics.deflate()) + len(config.deflate())
    known: dict[int, int] = {}
    assert message_bytes(Message(content, 1, "train"), known) == expected
    assert message_bytes(Message(content, 2, "train"), known) == expected
    assert len(known) == 3
    assert message_bytes(Message(RecordDict(), 1, "train")) == 0


def test_meter_counts_training_and_evaluation_apart():
    metered = MeteredGrid(LocalGrid(training_app(), 4, {}))
    array = np.zeros(1000, dtype=np.float32)
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(array)}), "config": ConfigRecord({"round": 1})}
    )
    for kind in ("query.partition", "train", "evaluate"):
        sent = [Message(content, node, kind) for node in (3, 1, 4)]
        replies = list(metered.send_and_receive(sent))
        assert len(replies) == 3
        assert not any(METER in reply.content for reply in replies if reply.has_content())
        costs = metered.take()
        down, up = sum(map(message_bytes, sent)), sum(map(message_bytes, replies))
        assert down > 3 * array.nbytes
        training = (down, up) if kind == "train" else (0, 0)
        evaluation = (down, up) if kind == "evaluate" else (0, 0)
        assert (costs["bytes-down"], costs["bytes-up"]) == training
        assert (costs["evaluation-bytes-down"], costs["evaluation-bytes-up"]) == evaluation
        assert 0 < costs["seconds-clients"] <= costs["seconds-waiting"]
        assert costs["peak-memory-clients"] > 1
    assert metered.take()["bytes-down"] == 0


def test_a_reply_counts_as_what_was_asked_for_whatever_it_calls_itself():
    """Bytes of training that go as those of a question would not be counted."""

    def app(message: Message, context: Context) -> Message:
        reply = training_app()(message, context)
        reply.metadata.__dict__["_message_type"] = "query.partition"
        return reply

    costs = []
    for own in (training_app(), app):
        metered = MeteredGrid(LocalGrid(own, 4, {}))
        list(metered.send_and_receive([Message(RecordDict(), 2, "train")]))
        costs.append(metered.take()["bytes-up"])
    assert costs[0] == costs[1] > 0


def training_app() -> ClientApp:
    app = ClientApp(mods=[meter])
    for register in (app.train(), app.evaluate(), app.query(), app.query("partition")):
        register(echo)
    return app


@pytest.mark.parametrize(
    "claim",
    [
        MetricRecord(),
        MetricRecord({"seconds": [1.0], "peak-memory": float("nan")}),
        MetricRecord({"seconds": float("inf"), "peak-memory": -1.0}),
        ConfigRecord({"seconds": "long"}),
    ],
)
def test_a_false_meter_counts_nothing_and_ends_nothing(claim):
    app = ClientApp()
    app.train()(lambda message, _: Message(RecordDict({METER: claim}), reply_to=message))
    metered = MeteredGrid(LocalGrid(app, 4, {}))
    (reply,) = metered.send_and_receive([Message(RecordDict(), 1, "train")])
    assert METER not in reply.content
    costs = metered.take()
    assert (costs["seconds-clients"], costs["peak-memory-clients"]) == (0, 0)
