"""Replies in any round and order: the same bits, nobody counted twice, nobody waited for."""

from functools import partial
from logging import CRITICAL

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fedntk.simulations.check import failed
from fedntk.simulations.engine._flower import log_from
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import Asynchrony, KeptSums

from .federation import Grid, arrays_of, bits, lost, with_arrays, with_metrics
from .test_one_exchange import CLIENTS, fixed, run

SOON = 1e-9  # s, in which a round looks for replies once
open_strategy = partial(
    fixed, asynchrony=True, round_deadline=SOON, min_available_nodes=1, min_train_nodes=1
)
ROUNDS, EVERYONE = 4, range(6)
_contents: dict[int, RecordDict] = {}  # partition -> what its client always answers


class LateGrid(LocalGrid):
    """A grid whose nodes come and go by round, and whose replies come some rounds later.

    `live`: round -> node -> partition; `delay` is given each message of training and returns the
    rounds until its answer, None for an error at once.
    """

    def __init__(self, strategy, live, delay=lambda message: 0):
        super().__init__(CLIENTS, 1, {})
        self.strategy, self.live, self.delay, self.contexts = strategy, live, delay, {}
        self.asked: list[int] = []
        self.due: dict[str, int] = {}

    def get_node_ids(self):
        nodes = self.live(self.strategy.server_round)
        for node, partition in nodes.items():
            if node not in self.contexts:
                config = {"partition-id": partition, "num-partitions": 6}
                self.contexts[node] = Context(1, node, config, RecordDict(), {})
        return list(nodes)

    def partition_of(self, message):
        return self.contexts[message.metadata.dst_node_id].node_config["partition-id"]

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        for message in messages:
            number, delay = message.metadata.message_id, self.delay(message)
            self.asked.append(self.partition_of(message))
            self.due[number] = self.strategy.server_round + (delay or 0)
            if delay is None:
                self._replies[number] = failed(self._replies[number])
        return ids

    def pull_messages(self, message_ids):
        now = self.strategy.server_round
        return super().pull_messages(i for i in message_ids if self.due[i] <= now)

    def _answer(self, message):
        if message.metadata.message_type != "train":
            return super()._answer(message)
        partition = self.partition_of(message)
        if partition not in _contents:
            _contents[partition] = super()._answer(message).content
        return Message(RecordDict({**_contents[partition]}), reply_to=message)


@pytest.fixture(scope="module")
def bits_of():
    """Bits of a run in which these clients all answer at once."""
    known = {}

    def expected(clients):
        key = frozenset(clients)
        if key not in known:
            changes = {k: lost for k in EVERYONE if k not in key}
            known[key] = bits(run(fixed(min_completed=1), Grid(CLIENTS, changes=changes)))
        return known[key]

    return expected


def all_present(_):
    """Return the node and the partition of each client, in any round."""
    return {k + 10: k for k in EVERYONE}


def schedule(strategy, generator):
    """Random presence and delays until all live clients can answer; who returns may be new."""
    node_of, numbers, lives = {}, iter(range(1, 1000)), {}
    for number in range(1, ROUNDS + 1):
        there = [k for k in EVERYONE if generator.random() < 0.6] or [0]
        if number >= ROUNDS - 1:
            there = EVERYONE
        before = set(lives.get(number - 1, {}).values())
        for k in there:
            if k not in node_of or (k not in before and generator.random() < 0.5):
                node_of[k] = next(numbers)
        lives[number] = {node_of[k]: k for k in there}

    def delay(_):
        left = ROUNDS - strategy.server_round
        return None if left and generator.random() < 0.1 else int(generator.integers(left + 1))

    return LateGrid(strategy, lambda number: lives[max(number, 1)], delay)


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 900), (True, 100))]


@pytest.mark.parametrize(("leave", "count"), [(False, 50), (True, 12), *SLOW])
def test_random_orders_delays_joins_and_leaves_give_the_same_bits(leave, count, bits_of, tmp_path):
    """A client is asked again after an error, under a new node id, or once its sums went."""
    asked = 0
    for seed in range(count):
        generator = np.random.default_rng([seed, count])
        gone = [k for k in EVERYONE if leave and generator.random() < 0.4][:5]
        strategy = open_strategy(storage=KeptSums(tmp_path) if leave else None)
        when = generator.integers(ROUNDS)

        def evaluate(server_round, _, strategy=strategy, gone=gone, when=when):
            if server_round == when:
                strategy.leave(gone)

        with log_from(CRITICAL):
            grid, left = schedule(strategy, generator), set(EVERYONE) - set(gone)
            found = bits(run(strategy, grid, rounds=ROUNDS, evaluate_fn=evaluate))
        assert found == bits_of(left), seed
        assert strategy.asynchrony.counted == left
        asked += len(grid.asked)
    assert asked > (4 if leave else 6) * count


def test_sums_that_rounding_alone_lets_through_end_no_run():
    """Liars found them by search: each passes the Cauchy-Schwarz inequality, and all five do not.

    The honest client comes after them, and the total is then read again.
    """
    gram, counts = np.zeros(210, np.int64), np.array([10**7, 0, 0])
    gram[[0, 1, 20]] = 11750938289, 17049578827, 24737440622

    def lie(reply):
        sums = {"gram": gram, "class-sums": np.zeros((3, 20), np.int64), "counts": counts}
        return with_metrics(num_examples=10**7)(with_arrays(lambda _: sums)(reply))

    class Lying(LateGrid):
        def _answer(self, message):
            reply = super()._answer(message)
            of_training = message.metadata.message_type == "train"
            return lie(reply) if of_training and not _is_of({5}, message) else reply

    strategy = open_strategy()
    late = Lying(strategy, all_present, lambda m: int(_is_of({5}, m)))
    run(strategy, late, rounds=2)
    assert strategy.asynchrony.counted == set(EVERYONE)


def test_nobody_waits_for_two_stragglers_in_six(bits_of):
    """After one round there is the model of those in time; nobody is asked twice."""
    strategy, slow, seen = open_strategy(), {1, 4}, []
    grid = LateGrid(strategy, all_present, lambda m: 2 * _is_of(slow, m))

    def evaluate(server_round, arrays):
        seen.append(bits(arrays_of(arrays)))

    run(strategy, grid, rounds=4, evaluate_fn=evaluate, timeout=3600)
    assert seen[1] == seen[2] == bits_of(set(EVERYONE) - slow)
    assert seen[3] == seen[4] == bits_of(EVERYONE)
    assert sorted(grid.asked) == [*EVERYONE]


def _is_of(clients, message):
    return message.metadata.dst_node_id - 10 in clients


def test_after_a_crash_who_was_counted_is_not_asked_again(bits_of, tmp_path):
    """Open messages are lost; nodes have other ids, and say which clients they are."""

    def run_from(first, crash):
        strategy = open_strategy()
        nodes = {k + first: k for k in EVERYONE}
        grid = LateGrid(
            strategy, lambda _: nodes, lambda m: 9 * (crash and m.metadata.dst_node_id > 12)
        )

        def evaluate(server_round, arrays):
            if crash and server_round == 2:
                raise ConnectionError

        found = bits(run(strategy, grid, 3, checkpoint=tmp_path, evaluate_fn=evaluate))
        return found, grid.asked

    with pytest.raises(ConnectionError):
        run_from(10, crash=True)
    assert run_from(20, crash=False) == (bits_of(EVERYONE), [3, 4, 5])


def test_a_client_may_leave_and_the_run_ends_at_a_number(bits_of, tmp_path):
    strategy = open_strategy(storage=KeptSums(tmp_path), asynchrony=Asynchrony(stop_at_clients=6))
    nodes = {k + 10: k for k in EVERYONE}
    grid = LateGrid(
        strategy, lambda number: {n: k for n, k in nodes.items() if k < max(number, 1) + 2}
    )

    def evaluate(server_round, arrays):
        if server_round == 2:
            strategy.leave([1])
        if server_round == 3:
            strategy.asynchrony.left.clear()

    found = bits(run(strategy, grid, rounds=9, evaluate_fn=evaluate))
    assert found == bits_of(EVERYONE)
    assert (strategy.server_round, grid.asked.count(1)) == (4, 2)
    assert strategy.train_metrics[3]["clients"] == 4


def test_a_late_reply_answers_its_own_message_once():
    strategy, forged = open_strategy(), []

    class Hostile(LateGrid):
        """Node 10 answers another's message, and its own twice, in each round."""

        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            forged.extend(reply for reply in replies if reply.metadata.src_node_id == 10)
            return [*forged, *replies]

    grid = Hostile(strategy, all_present, lambda m: _is_of({2, 3}, m))
    run(strategy, grid, rounds=3)
    assert strategy.total["counts"].sum() == sum(5 + k for k in EVERYONE)
    assert strategy.train_metrics[1]["rejected-duplicate"] == 1
    assert strategy.train_metrics[2]["replies-rejected"] == 1
