"""Lost and late clients, over-selection and deadlines: the bits of a run with the same arrivals."""

from collections import Counter

import pytest

from fedntk.clients import SGDClient
from fedntk.simulations.engine.faults import LossyGrid
from fedntk.strategies import FedEnsemble, Sampling, SeededFedAvg
from fedntk.strategies.core.round import timeout_of

from .federation import NUM_CLIENTS, Grid, app, asked_first, bits, failed, lost, start, with_metrics
from .test_contract import STRATEGIES, richest

CLIENTS, ROUNDS = 10, 3
SOON = 1e-9  # s, in which a round looks for replies once


@richest(lambda _: True)
def test_with_30_percent_lost_and_30_late_every_method_has_the_bits_of_the_rest(name):
    """Lost clients do not train here. In the other run all train, errors come in place of their
    replies, nothing comes from late ones, and the order of the replies is another.
    """
    make, clients = STRATEGIES[name]
    strategy, other, grid = make(), make(), Grid(clients)
    lossy = LossyGrid(grid, asked_first(strategy, grid), 4, 0.3, 0.3)
    found = start(strategy, lossy, ROUNDS)
    fates = {(k, n): lossy.fate(k, n) for k in range(NUM_CLIENTS) for n in range(1, ROUNDS + 1)}
    assert Counter(fates.values()) == {"lost": 6, "late": 5, "in time": 7}
    answers = {"lost": failed, "late": lost, "in time": lambda reply: reply}

    def answered(k):
        return lambda reply: answers[fates[k, other.server_round]](reply)

    changes = {k: answered(k) for k in range(NUM_CLIENTS)}
    expected = start(other, Grid(clients, order=1, changes=changes), ROUNDS)
    assert bits(found) == bits(expected)
    in_time = sum(fates[k, 1] == "in time" for k in range(NUM_CLIENTS))
    assert strategy.train_metrics[1]["replies-accepted"] == in_time


class Arriving(Grid):
    """Replies come in an order; the first is not valid, or only those `of_nodes` come at all."""

    used: list[int]  # nodes of the first five valid ones
    of_nodes: list[int] | None = None

    def push_messages(self, messages):
        messages = list(messages)
        replies = list(self.send_and_receive(messages))
        if self.of_nodes is None:
            with_metrics(num_examples=0)(replies[0])
            self.used = [reply.metadata.src_node_id for reply in replies[1:6]]
        else:
            replies = [reply for reply in replies if reply.metadata.src_node_id in self.of_nodes]
        self._replies |= {reply.metadata.reply_to_message_id: reply for reply in replies}
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        asked = set(message_ids)
        return [self._replies.pop(number) for number in list(self._replies) if number in asked]


def over_selected(make, clients, **options):
    """Weights after a round for which five of ten are wanted, the round's metrics, and the grid."""
    half = {"fraction_train": 0.5, "min_available_nodes": CLIENTS, "round_deadline": SOON}
    strategy = make(**half, sampling=Sampling(over_selection=1.6))
    grid = Arriving(clients, num_clients=CLIENTS)
    vars(grid).update(options)
    return bits(start(strategy, grid)), strategy.train_metrics[1], grid


@richest(lambda case: not case.once)
def test_over_selection_uses_the_first_valid_replies(name):
    """The first of eight is not valid. In the other run only the replies of the five come.

    Fed-ensemble counts what is no error, as its models' strategies check replies afterwards.
    """
    count = 4 if isinstance(STRATEGIES[name][0](), FedEnsemble) else 5
    found, metrics, grid = over_selected(*STRATEGIES[name], order=3)
    assert grid.exchanges.count(("train", 8)) == 1
    assert (metrics["replies-accepted"], metrics["rejected-num-examples"]) == (count, 1)
    expected, metrics, _ = over_selected(*STRATEGIES[name], of_nodes=grid.used[:count])
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (count, 0)
    assert found == expected


@pytest.mark.parametrize(("deadline", "expected"), [(0, (3600, 600)), (20, (20, 20))])
def test_each_exchange_of_a_round_ends_at_the_deadline(deadline, expected):
    strategy = SeededFedAvg(round_deadline=deadline)
    found = [timeout_of(strategy, stage) for stage in ("train", "evaluate", "query")]
    assert found == [expected[0], *expected]


def test_over_selection_waits_for_no_more_than_it_wants_and_no_longer_than_the_deadline():
    """No client has answered at the first look, and all have at the second."""
    looks = []

    class Slow(Grid):
        def pull_messages(self, message_ids):
            looks.append(len(list(message_ids := list(message_ids))))
            return super().pull_messages(message_ids) if len(looks) > 1 else []

    half = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "round_deadline": 60}
    strategy = SeededFedAvg(**half, sampling=Sampling(over_selection=2.0))
    start(strategy, Slow(app(SGDClient)))
    assert looks == [6, 6]
    assert strategy.train_metrics[1]["replies-accepted"] == 3
