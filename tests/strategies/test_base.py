"""What the base does for every strategy, shown with FedAvg, the shortest of them."""

import errno
from functools import partial

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedntk.clients import LocalSGD, SGDClient
from fedntk.ntk import BadReply
from fedntk.ntk.support.files import claimed
from fedntk.simulations.engine._flower import become_server, stamp
from fedntk.simulations.engine.engines import LocalGrid, MeteredGrid
from fedntk.simulations.engine.faults import LossyGrid
from fedntk.strategies import NoUsableReply, Sampling, Screening, SecureAggregation, SeededFedAvg
from fedntk.strategies.core import sampling
from fedntk.strategies.core.channel import Conversation
from fedntk.strategies.core.registry import ClientRegistry, Exchange, SentParts
from fedntk.strategies.core.replies import screen_accuracies
from fedntk.strategies.core.sampling import NotEnoughNodes
from fedntk.strategies.core.strategy import round_of

from .federation import (
    DAMAGED_REPLIES,
    ODD,
    Grid,
    app,
    asked_first,
    bits,
    damaged,
    failed,
    from_node,
    in_rounds,
    initial_bits,
    lost,
    network,
    run_damaged,
    start,
    told,
    with_metrics,
)

CLIENTS = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
ALL = {"fraction_evaluate": 0.0}
IDS = [50, 20, 90, 10, 60, 30]
KINDS = sorted(DAMAGED_REPLIES)
ALL_FAIL = dict.fromkeys(range(6), failed)


def run(rounds=1, options=ALL, *, ask=False, **of_grid):
    """Weights by FedAvg, and how; with `ask` all clients have told their partitions before."""
    strategy, grid = SeededFedAvg(**options), Grid(CLIENTS, **of_grid)
    if ask:
        asked_first(strategy, grid)
    return bits(start(strategy, grid, rounds)), strategy, grid


# ------------------------------------------------------------------------- replies


def test_damaged_replies_are_dropped_and_counted_under_their_reasons():
    weights = run_damaged(SeededFedAvg(**ALL), CLIENTS, KINDS)
    silent = dict.fromkeys(range(1, len(KINDS) + 1), lost)
    options = ALL | {"min_completed": 1}
    assert weights == run(options=options, changes=silent, num_clients=len(KINDS) + 2)[0]


def test_odd_replies_with_good_arrays_are_used():
    clients, changes = len(ODD) + 1, dict(enumerate(ODD, 1))
    weights, strategy, grid = run(ask=True, changes=changes, num_clients=clients)
    assert grid.damaged == len(ODD)
    assert np.isfinite(strategy.train_metrics[1]["train-loss"])
    assert weights == run(num_clients=clients)[0]


def test_no_answer_about_a_partition_ends_the_run():
    """The node then goes by its id, unless the partition came beside the damage."""
    kinds = [k for k in KINDS if "arrays" not in DAMAGED_REPLIES[k][1]]
    changes = {k: DAMAGED_REPLIES[kind][0] for k, kind in enumerate(kinds, 1)}
    ids = range(100, 102 + len(kinds))
    options = {"num_clients": len(ids), "changed_kind": "query.partition"}
    strategy = run(ask=True, changes=changes, node_ids=ids, **options)[1]
    assert strategy.train_metrics[1]["replies-accepted"] == len(ids)
    clients = list(map(strategy.channel.registry.client, ids))
    assert all(client in (k, ids[k]) for k, client in enumerate(clients))
    assert (clients[0], clients[-1]) == (0, len(kinds) + 1)
    assert max(clients) >= 100


# ------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("accuracies", "refused"),
    [
        ([0.2, None, 0.4], []),
        ([0.2, -0.1, 0.4, 1e6, 1.1], [1, 3, 4]),
        ([20.0, 101.0, 35.0, 0.4], [1]),  # in percent, as most of them are
        ([0.2, 0.3, 37.5], [2]),
    ],
)
def test_accuracies_that_cannot_be_are_refused(accuracies, refused):
    verdicts = screen_accuracies(accuracies, 100.0)
    assert [i for i, bad in enumerate(verdicts) if bad is not None] == refused


NAMES = {f"name-{i:04}": 1.0 for i in range(2000)}
MANY = {"a": [0.5] * 9_000, "c": [0.5] * 999}


@pytest.mark.parametrize(
    ("added", "kept"),
    [
        # 63 are kept beside the known one, and no name of more than 64 letters
        (NAMES | {"x" * 65: 1.0}, dict(list(NAMES.items())[:63])),
        # of 19,000 numbers 10,000 are, the loss among them, and no list in part
        (MANY | {"b": [0.5] * 9_000, "d": [0.5]}, MANY),
        # the server's own counts
        ({"replies_accepted": 99.0, "replies_x": 1, "rejected_error": 2, "rejected_x": 3.0}, {}),
    ],
)
def test_clients_metrics_are_limited(added, kept):
    changes = dict.fromkeys(range(6), with_metrics(**added))
    (_, found, _), (_, plain, _) = run(changes=changes), run()
    assert found.train_metrics[1] == {**plain.train_metrics[1], **kept}


NAN, INF = float("nan"), float("inf")


def mean_of(values, weights):
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs)


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_each_metric_is_the_mean_over_the_clients_that_report_it(stage):
    """Clients have 5 to 10 examples; what one leaves out, or has as NaN, costs it nothing else."""
    reported = {
        "auc": [0.6, NAN, 0.9, 0.3, INF, None],
        "f1": [0.3, 0.5, None, None, None, None],  # fewer than half have it
        "only": [None, None, None, 0.7, None, None],
        "count": [1, 0.5, 2, 1.5, 3, 2],  # whole numbers among others
        "shape": [[1.0], [1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [NAN, 0.0], [INF, 1.0]],
        "equal": [0.1] * 6,
        "never": [NAN, INF, -INF, NAN, NAN, [NAN]],
    }
    changes = {
        k: with_metrics(**{name: values[k] for name, values in reported.items()}) for k in range(6)
    }
    options = {"min_evaluate_nodes": 6}
    plain, strategy = (
        run(options=options, changes=replies, changed_kind=stage)[1] for replies in ({}, changes)
    )
    found, usual = (dict(getattr(one, f"{stage}_metrics")[1]) for one in (strategy, plain))
    shape = [mean_of(v, [6, 7, 8]) for v in ([1, 3, 5], [2, 4, 6])]
    assert found.pop("replies-incomplete") == 6  # "never"
    for name, left in {"auc": {1, 4}, "f1": (), "only": (), "count": ()}.items():
        values = [None if k in left else v for k, v in enumerate(reported[name])]
        assert found.pop(name) == pytest.approx(mean_of(values, range(5, 11)), rel=1e-12)
    assert found.pop("shape") == pytest.approx(shape)
    assert found.pop("equal") == 0.1
    assert found == usual  # all replies, and their other metrics


def test_names_that_few_report_do_not_squeeze_out_those_of_most():
    few = {k: {f"a-{k}-{i}": 1.0 for i in range(60)} for k in range(3)}
    changes = {k: with_metrics(zeal=1.0, **few.get(k, {})) for k in range(6)}
    metrics = run(changes=changes)[1].train_metrics[1]
    assert metrics["zeal"] == 1.0
    assert len(metrics) <= 64 + 3


def test_a_function_is_given_the_metrics_that_most_have():
    """Not the reply without a loss; of the one with a metric more, what the others have."""
    received = []

    def aggregate(contents, key):
        received.extend(dict(content["metrics"]) for content in contents)
        return MetricRecord({"n": len(contents)})

    changes = {1: with_metrics(train_loss=NAN), 4: with_metrics(bonus=1.0)}
    strategy = run(options={**ALL, "train_metrics_aggr_fn": aggregate}, changes=changes)[1]
    assert strategy.train_metrics[1]["n"] == 5
    assert [metrics["num-examples"] for metrics in received] == [5, 7, 8, 9, 10]
    assert all(metrics.keys() == {"train-loss", "num-examples"} for metrics in received)


# ---------------------------------------------------------------- nodes and sampling


def test_the_same_clients_are_sampled_by_fraction_or_by_number_whatever_their_nodes():
    """Three of six, in each of two rounds; another seed draws others."""
    by_number = {"fraction_train": 0.1, "min_train_nodes": 1, "min_completed": 3}

    def sampled(options, **of_grid):
        weights, _, grid = run(2, ALL | options, **of_grid)
        return weights, {*grid.trained[:3]}, {*grid.trained[3:]}

    seed = {"sampling": Sampling(seed=3)}
    first = sampled(seed | {"fraction_train": 0.5, "min_train_nodes": 3})
    assert first == sampled(seed | by_number, node_ids=IDS, order=1) != sampled(by_number)
    assert (len(first[1]), len(first[2])) == (3, 3)
    assert first[1] != first[2]


WANTED = [
    ({"min_available_nodes": 7}, "min_available_nodes = 7"),
    ({"min_train_nodes": 7}, "min_train_nodes = 7"),
    ({"min_completed": 7}, "min_completed = 7"),
    (
        {"min_completed": 5, "sampling": Sampling(held_out=[0, 1])},
        "min_comp.* beside 2 held out = 7",
    ),
    ({"screening": Screening(rule="krum", malicious=2)}, "screening.rule = krum = 7"),
    ({"fraction_evaluate": 0.1, "min_evaluate_nodes": 7}, "min_evaluate_nodes = 7"),
    ({"min_available_nodes": 9, "min_train_nodes": 8}, "min_available_nodes = 9, min_train"),
]


@pytest.mark.parametrize(("options", "message"), WANTED)
@pytest.mark.parametrize("kind", [LocalGrid, MeteredGrid, LossyGrid])
def test_more_nodes_than_there_will_ever_be_are_refused_before_any_work(options, message, kind):
    """Also behind grids that meter or lose messages."""
    shown = grid = Grid(CLIENTS)
    strategy = SeededFedAvg(**ALL | options)
    if kind is not LocalGrid:
        shown = kind(grid, *([strategy, 0, 0.1, 0.0] if kind is LossyGrid else []))
    refused = rf"^{message}.*: this grid has 6 nodes.* give the grid"
    with pytest.raises(NotEnoughNodes, match=refused):
        start(strategy, shown)
    assert not grid.exchanges


def test_sums_under_masks_need_three_clients_and_what_is_not_done_needs_none():
    with pytest.raises(NotEnoughNodes, match="secure = 3: this grid has 2 nodes"):
        start(SeededFedAvg(secure=SecureAggregation(), **ALL), Grid(CLIENTS, num_clients=2))
    parts = {"sampling": Sampling(over_selection=3), "screening": Screening(malicious=9)}
    _, strategy, _ = run(options={**ALL, "min_evaluate_nodes": 50, **parts})
    assert strategy.train_metrics[1]["replies-accepted"] == 6


def test_where_nodes_may_come_the_log_says_once_what_is_waited_for(monkeypatch, caplog):
    """After five seconds, and again when the number changes; the last node comes after 90."""
    now = [0.0]

    class Growing(Grid):
        patience = float("inf")

        def get_node_ids(self):
            return sorted(self.contexts)[: 4 + (now[0] > 40) + (now[0] > 90)]

    monkeypatch.setattr(sampling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sampling.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(sampling.logger, "propagate", True)
    with caplog.at_level("INFO"):
        start(SeededFedAvg(min_available_nodes=6, **ALL), Growing(CLIENTS))
    said = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert said == [
        f"waiting for nodes: {n} of 6 are there (min_available_nodes = 6)" for n in (4, 5)
    ]


@pytest.mark.parametrize(
    ("least", "lost_clients", "changes"),
    [(0.5, 3, True), (0.5, 4, False), (1, 5, True), (5, 2, False), (0.9, 1, False), (0.8, 1, True)],
)
def test_a_round_changes_the_model_if_half_of_the_replies_came(least, lost_clients, changes):
    """By default; of six clients, with another share, or a number."""
    options = ALL | ({} if least == 0.5 else {"min_completed": least})
    weights, strategy, _ = run(options=options, changes=dict.fromkeys(range(lost_clients), lost))
    assert strategy.train_metrics[1]["replies-accepted"] == 6 - lost_clients
    assert (weights != initial_bits()) == changes


def test_whoever_claims_a_partition_that_is_held_out_is_held_out():
    claims = {"changes": {3: with_metrics(partition_id=0)}, "changed_kind": "query.partition"}
    options = {"sampling": Sampling(held_out=[0]), "min_train_nodes": 1}
    assert sorted(run(options=ALL | options, **claims)[2].trained) == [1, 2, 4, 5]


@pytest.mark.parametrize("kind", ["query.partition", "train"])
@pytest.mark.parametrize("claimed", [-1, -5, 2**63])
def test_a_partition_that_cannot_be_is_none(claimed, kind):
    """Placeholders are below zero, here node 4's. Node 6 is asked after a reply with that claim."""
    claims = {3: with_metrics(partition_id=0), 5: with_metrics(partition_id=claimed)}
    ask, options = kind == "query.partition", {"min_evaluate_nodes": 6}
    _, strategy, _ = run(options=options, ask=ask, changes=claims, changed_kind=kind)
    last = 5 if kind == "train" and claimed != -1 else 6  # or its id
    assert strategy.channel.registry.clients() == {0, 1, 2, -5, 4, last}
    assert sorted(strategy.client_evaluations) == [-5, 0, 1, 2, 4, last]


ASKED, SILENT = ("query.partition", 6), with_metrics(partition_id=None)


@pytest.mark.parametrize(
    ("options", "changes", "exchanges"),
    [
        ({}, {}, [("train", 6), ("train", 6)]),  # they come with the first replies
        ({"fraction_train": 0.5}, {}, [ASKED, ("train", 3), ("train", 3)]),
        ({"sampling": Sampling(held_out=[0])}, {}, [ASKED, ("train", 5), ("train", 5)]),
        # those that failed are asked before the second round
        ({}, {2: failed, 4: lost}, [("train", 6), ("query.partition", 2), ("train", 6)]),
        # whoever leaves it out, as a user's own function may, is asked at once
        ({}, {2: SILENT}, [("train", 6), ("query.partition", 1), ("train", 6)]),
    ],
)
def test_partitions_that_come_with_no_reply_are_asked_for_once(options, changes, exchanges):
    options = ALL | {"min_train_nodes": 1} | options
    _, strategy, grid = run(2, options, changes=changes, node_ids=IDS)
    assert grid.exchanges == exchanges
    assert strategy.channel.registry.clients(departed=True) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    "damage", [with_metrics(num_examples=-5), damaged(0, lambda a: a + np.float32(1e6))]
)
def test_a_refused_reply_claims_no_partition(damage):
    """Node 3 claims node 6's partition in a reply that is refused: both keep their own places."""
    claim = with_metrics(partition_id=5)
    changes = {2: lambda reply: damage(claim(reply))}
    weights, strategy, _ = run(options={"min_evaluate_nodes": 6}, changes=changes)
    assert strategy.train_metrics[1]["replies-accepted"] == 5
    assert strategy.channel.registry.clients() == {0, 1, 2, 3, 4, 5}
    assert weights == run(changes={2: lost})[0]


def test_of_a_traceback_in_place_of_a_reply_the_last_line_is_told():
    """As Flower sends it if a worker of Ray cannot load the app."""
    said = "RayTaskError:<'ray::run()\nTraceback (most recent call last):\n  File\nKeyError: 'w''>"
    changes = dict.fromkeys(range(6), partial(failed, reason=said))
    with pytest.raises(NoUsableReply, match=r"the last refused: KeyError: 'w'$"):
        run(changes=changes)


def test_an_exchange_within_a_round_is_checked_as_any_other():
    """Client 1 answers twice, 2 with an error, 4 and 5 with nothing that can be parsed."""

    def parse(reply):
        if reply.client == 4:
            raise BadReply("odd", "not this one")
        if reply.client == 5:
            raise KeyError("weight")
        return float(reply.metrics["loss"])

    changes = {1: lambda reply: [reply, reply], 2: failed}
    _, strategy, grid = run(changes=changes, changed_kind="evaluate", order=2)
    strategy.channel.grid = grid
    r = round_of(strategy, 2, "evaluate", strategy.global_arrays, {})
    uploads = Conversation(r.ask(parse, clients=range(1, 7)), strategy.channel).run()
    assert uploads.clients == [0, 1, 3]
    assert uploads.rejected == {"duplicate": 1, "error": 1, "odd": 1, "malformed": 1}
    assert not strategy.channel.last_refusal  # in training, which is what a run in vain names


# ------------------------------------------------------------------- rounds and state


def test_a_run_that_is_stopped_is_the_shorter_run():
    """Flower 1.43's argument, on any version; it is given the round and the result so far."""
    seen = []

    def should_stop(server_round, result):
        seen.append((server_round, len(result.train_metrics_clientapp)))
        return len(seen) == 3

    after = start(SeededFedAvg(**ALL), Grid(CLIENTS), 9, should_stop=should_stop)
    assert bits(after) == run(2)[0]
    assert seen == [(0, 0), (1, 1), (2, 2)]


def checkpointed(folder, rounds=1, net=None, lr=0.1, **options):
    config = {"checkpoint": folder, "train_config": ConfigRecord({"lr": lr})}
    return bits(start(SeededFedAvg(**ALL | options), Grid(CLIENTS), rounds, net, **config))


OTHER = [
    ({"sampling": Sampling(seed=1)}, r"another run \(state: expected sampling\.seed = 1, got 0; "),
    # its names and shapes are all there
    ({"net": network()[:1]}, r"of another network, which differs in \['1.weight', "),
    ({"lr": 0.2}, r"holds a run with train_config = {'lr': 0.1}, got {'lr': 0.2}"),
]


@pytest.mark.parametrize(("options", "message"), OTHER)
def test_a_checkpoint_of_another_run_is_refused(options, message, tmp_path):
    checkpointed(tmp_path)
    with pytest.raises(ValueError, match=message):
        checkpointed(tmp_path, **options)


def test_a_misspelt_argument_is_refused_and_the_callers_configuration_stays():
    config = ConfigRecord({"lr": 0.1})
    start(SeededFedAvg(**ALL), Grid(CLIENTS), 1, train_config=config)
    assert dict(config) == {"lr": 0.1}
    with pytest.raises(TypeError, match="start: unknown arguments num_round"):
        start(SeededFedAvg(**ALL), Grid(CLIENTS), 1, num_round=3)


def test_a_run_that_is_over_is_not_run_again(tmp_path):
    first = checkpointed(tmp_path, 2)
    assert checkpointed(tmp_path, 2, net=network(1)) == first


def test_a_checkpoint_is_one_process_own_folder(tmp_path):
    with claimed(tmp_path, "checkpoint"), pytest.raises(BlockingIOError, match="another process"):
        checkpointed(tmp_path)


@pytest.mark.parametrize("full_from", [1, 3])
def test_a_disk_that_is_full_ends_a_run_only_before_its_first_round(
    full_from, tmp_path, monkeypatch, caplog
):
    """Later the log says it, and the same call goes on from the checkpoint before."""
    saves = []

    def fsync(_):
        saves.append(len(saves) + 1)
        if saves[-1] >= full_from:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        if full_from == 1:
            with pytest.raises(OSError, match="No space left"):
                checkpointed(tmp_path, 3)
            assert saves == [1]
        else:
            assert checkpointed(tmp_path, 3) == run(3)[0]
            assert "no checkpoint of round 3: [Errno 28] No space left" in caplog.text
    names = [path.name for path in tmp_path.glob("round-*")]
    assert sorted(names) == [f"round-{r:06}.safetensors" for r in range(full_from - 1)]
    assert checkpointed(tmp_path, 3) == run(3)[0]


def test_a_run_in_which_no_client_succeeded_does_not_end_as_if_it_had(tmp_path):
    """The same call then begins anew. One good reply is enough, also one before a restart."""
    with pytest.raises(NoUsableReply, match=r"3 rounds no .* the last refused: out of memory"):
        start(SeededFedAvg(**ALL), Grid(CLIENTS, changes=ALL_FAIL), 3, checkpoint=tmp_path)
    again = start(SeededFedAvg(**ALL), Grid(CLIENTS), 3, checkpoint=tmp_path)
    assert bits(again) == run(3)[0]
    strategy, again = SeededFedAvg(**ALL), SeededFedAvg(**ALL)
    at_times = dict.fromkeys(range(6), in_rounds(strategy, [1, 3], failed))
    start(strategy, Grid(CLIENTS, changes=at_times), 3)
    assert told(strategy) == [0, 6, 0]
    again.load_state_dict(strategy.state_dict())
    start(again, Grid(CLIENTS, changes=ALL_FAIL), 4)
    assert told(again) == [0]


# --------------------------------------------------------- registry and exchanges


def registry(partitions):
    made = ClientRegistry()
    made.add(partitions)
    made.set_present(partitions)
    return made


def test_a_client_goes_by_its_partition_or_its_node():
    nodes = registry({50: 3, 60: None})
    assert list(map(nodes.client, [50, 60, 99])) == [3, 60, 99]
    assert nodes.unknown([50, 70]) == [70]
    nodes.add({9: 60})  # a node that reports a partition has it before one that reports none
    nodes.set_present([50, 60, 9])
    assert nodes.clients() == {3, 60, -61}
    assert nodes.client(9) == 60


def test_of_two_live_nodes_that_claim_one_partition_the_first_keeps_it():
    """The second gets -1 - node, and the partition once the first has left."""
    nodes = registry({50: 3, 40: 3})
    assert (nodes.client(40), nodes.client(50)) == (3, -51)
    assert nodes.clients(without=[3]) == set()  # whoever claims a partition that is held out
    nodes.set_present([50])
    assert (nodes.client(50), nodes.clients()) == (3, {3})
    nodes.set_present([40, 50])
    assert (nodes.client(40), nodes.client(50)) == (-41, 3)
    assert nodes.nodes_of([3]) == [40, 50]


def test_a_node_that_registers_anew_is_the_client_it_was_and_clients_that_left_count_if_asked():
    nodes = registry({50: 3, 60: 4})
    nodes.set_present([60])
    assert (nodes.clients(), nodes.clients(departed=True)) == ({4}, {3, 4})
    assert nodes.clients(departed=True, without=[3]) == {4}
    nodes.add({70: 3})
    nodes.set_present([60, 70])
    assert (nodes.client(70), nodes.clients()) == (3, {3, 4})


def test_what_was_sent_is_forgotten_and_restored():
    sent, again = SentParts(), SentParts()
    for client in (3, 4, -62):
        sent.mark(client, "network", "linear")
    sent.forget(3)
    assert sent.lacks(3, "network") == ["network"]
    again.load_state_dict(sent.state_dict())
    assert sent.state_dict() == again.state_dict() == {"4": ["linear", "network"]}


@pytest.mark.parametrize("stamped", [True, False])
def test_each_message_is_answered_once_by_its_node(stamped):
    """Messages get their ids after they were noted: Flower's grid sets them when it sends."""
    become_server()
    earlier, *messages = (Message(RecordDict(), node, "train") for node in (7, 7, 8))
    sent = Exchange(messages)

    def refused(message, match, reason, node=None):
        reply = Message(RecordDict(), reply_to=message)
        with pytest.raises(BadReply, match=match) as caught:
            sent.take(reply if node is None else from_node(reply, node))
        assert caught.value.reason == reason

    if stamped:
        earlier, *messages = map(stamp, [earlier, *messages])
        refused(earlier, "answers an earlier message", "not-asked")
    for message, node in zip(messages, (7, 8), strict=True):
        assert sent.take(Message(RecordDict(), reply_to=message)) == node
    refused(messages[1], "node 8 has answered this message before", "duplicate")
    refused(messages[0], "node 9 was not asked", "not-asked", node=9)
