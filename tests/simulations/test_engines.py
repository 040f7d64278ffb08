"""The local grid behaves as Flower's; the meter counts what is sent."""

from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedntk.simulations.engines import LocalGrid, MeteredGrid, message_bytes


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


def test_meter_counts_the_content_of_every_message_both_ways():
    metered = MeteredGrid(grid())
    array = np.zeros(1000, dtype=np.float32)
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(array)}), "config": ConfigRecord({"round": 1})}
    )
    sent = messages(content)
    replies = list(metered.send_and_receive(sent))
    assert metered.bytes_down == sum(map(message_bytes, sent))
    assert metered.bytes_up == sum(map(message_bytes, replies))
    assert metered.bytes_up > 2 * array.nbytes  # of two replies; the third is an error
    ids = metered.push_messages(messages(content))
    list(metered.pull_messages(ids))
    assert metered.bytes_down == 2 * sum(map(message_bytes, sent))


def test_counted_bytes_are_the_serialised_size_within_one_per_cent():
    """Against Flower's own serialisation of the whole content, for a message of a model's size."""
    from flwr.common.serde import recorddict_to_proto

    arrays = {str(i): Array(np.ones(20_000, dtype=np.float32)) for i in range(10)}
    content = RecordDict({"arrays": ArrayRecord(arrays), "m": MetricRecord({"loss": 0.5})})
    message = Message(content, 1, "train")
    wire = recorddict_to_proto(content).ByteSize()
    assert abs(message_bytes(message) - wire) < 0.01 * wire
