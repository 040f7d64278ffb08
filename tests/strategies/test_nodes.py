"""Which client a node is, and what it has been sent."""

from fedntk.strategies.nodes import Nodes


def test_of_two_nodes_that_claim_a_partition_the_first_goes_by_it_while_it_is_here():
    partitions = {10: 0, 11: 1, 12: 1}
    nodes = Nodes(partitions)
    nodes.register([10, 11, 12])
    assert [nodes.client(node) for node in partitions] == [0, 1, -13]
    assert nodes.clients() == {0, 1, -13}
    partitions[13] = 1  # a third comes, and the first is gone
    nodes.register([10, 12, 13])
    assert [nodes.client(node) for node in (12, 13)] == [1, -14]
    assert nodes.clients() == {0, 1, -14}


def test_a_node_goes_by_its_id_until_it_tells_a_partition():
    assert Nodes({}).client(7) == 7


def test_what_a_node_lacks_is_what_it_was_not_sent_or_has_lost():
    nodes = Nodes({1: 1, 2: 2})
    nodes.now_hold([1, 2], "network")
    nodes.now_hold([1], "normaliser")
    assert nodes.lacks(1, "network", "normaliser") == []
    assert nodes.lacks(2, "network", "normaliser") == ["normaliser"]
    nodes.forget(2)
    assert nodes.lacks(2, "network", "normaliser") == ["network", "normaliser"]
    assert nodes.lacks(1, "network") == []
    nodes.forget_all()
    assert nodes.lacks(1, "network") == ["network"]
