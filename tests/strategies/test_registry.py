"""Which node is which client, what was sent, and which reply answers which message."""

import pytest
from flwr.app import Message, RecordDict

from fedntk.ntk import BadReply
from fedntk.simulations.engine._flower import become_server, stamp
from fedntk.strategies.core.registry import ClientRegistry, Exchange, SentParts

from .federation import from_node


def registry(partitions):
    made = ClientRegistry()
    made.add(partitions)
    made.set_present(partitions)
    return made


def test_a_client_goes_by_its_partition_or_its_node():
    known = registry({50: 3, 60: None})
    assert (known.client(50), known.client(60), known.client(99)) == (3, 60, 99)
    assert known.unknown([50, 70]) == [70]
    known.add({9: 60})  # a node that reports a partition has it before one that reports none
    known.set_present([50, 60, 9])
    assert known.clients() == {3, 60, -61}
    assert known.client(9) == 60


def test_of_two_live_nodes_that_claim_one_partition_the_first_keeps_it():
    """The second gets -1 - node, and the partition once the first has left."""
    known = registry({50: 3, 40: 3})
    assert (known.client(40), known.client(50)) == (3, -51)
    assert known.clients(without=[3]) == set()  # whoever claims a partition that is held out
    known.set_present([50])
    assert (known.client(50), known.clients()) == (3, {3})
    known.set_present([40, 50])
    assert (known.client(40), known.client(50)) == (-41, 3)
    assert known.nodes_of([3]) == [40, 50]


def test_a_node_that_registers_anew_is_the_client_it_was_and_clients_that_left_count_if_asked():
    known = registry({50: 3, 60: 4})
    known.set_present([60])
    assert (known.clients(), known.clients(departed=True)) == ({4}, {3, 4})
    assert known.clients(departed=True, without=[3]) == {4}
    known.add({70: 3})
    known.set_present([60, 70])
    assert (known.client(70), known.clients()) == (3, {3, 4})


def test_what_was_sent_is_forgotten_and_restored():
    sent, again = SentParts(), SentParts()
    for client in (3, 4, -62):
        sent.mark(client, "network", "linear")
    sent.forget(3)
    assert sent.lacks(3, "network") == ["network"]
    again.load_state_dict(sent.state_dict())
    assert sent.state_dict() == again.state_dict() == {"4": ["linear", "network"]}


# ------------------------------------------------------------------------ exchange


def asked(*nodes):
    become_server()
    return [Message(RecordDict(), node, "train") for node in nodes]


def reply(message):
    return Message(RecordDict(), reply_to=message)


@pytest.mark.parametrize("stamped", [True, False])
def test_each_message_is_answered_once_by_its_node(stamped):
    """Messages get their ids after they were noted: Flower's grid sets them when it sends."""
    earlier, messages = stamp(asked(7)[0]), asked(7, 8)
    sent = Exchange(messages)
    if stamped:
        messages = [stamp(message) for message in messages]
        with pytest.raises(BadReply, match="answers an earlier message") as refused:
            sent.take(reply(earlier))
        assert refused.value.reason == "not-asked"
    assert [sent.take(reply(message)) for message in messages[::-1]] == [8, 7]
    with pytest.raises(BadReply, match="node 8 has answered this message before") as refused:
        sent.take(reply(messages[1]))
    assert refused.value.reason == "duplicate"
    with pytest.raises(BadReply, match="node 9 was not asked"):
        sent.take(from_node(reply(messages[0]), 9))
