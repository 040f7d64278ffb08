"""What the base does for every strategy, shown with FedAvg, the shortest of them."""

from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedntk.clients import SGDClient, client_app
from fedntk.ntk import BadReply
from fedntk.ntk.support.files import claimed
from fedntk.strategies import NoUsableReply, SeededFedAvg
from fedntk.strategies.core.replies import screen_accuracies

from .federation import (
    DAMAGED_REPLIES,
    ODD,
    SUPERLINK,
    Change,
    Grid,
    app,
    arrays_of,
    asked_first,
    bits,
    damaged,
    examples,
    failed,
    lost,
    network,
    start,
    unavailable,
    with_metrics,
)

CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)
ALL: dict[str, Any] = {"fraction_evaluate": 0.0}
IDS = [50, 20, 90, 10, 60, 30]


def after(rounds: int = 1, **options: Any) -> dict[str, bytes]:
    """What FedAvg learns."""
    return bits(start(SeededFedAvg(**ALL), Grid(CLIENTS, **options), rounds))


# ------------------------------------------------------------------------- replies


@pytest.mark.parametrize("kind", sorted(DAMAGED_REPLIES))
def test_a_damaged_reply_is_dropped_and_counted_under_its_reason(kind):
    """The contract has damaged arrays, for each strategy."""
    change, reasons = DAMAGED_REPLIES[kind]
    attacked = SeededFedAvg(**ALL)
    weights = start(attacked, Grid(CLIENTS, changes={2: change}))
    assert bits(weights) == after(changes={2: lost})
    metrics = attacked.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (5, 1)
    (reason,) = [k for k in metrics if k.startswith("rejected-")]
    assert reason.removeprefix("rejected-") in reasons.split()


@pytest.mark.parametrize("kind", sorted(ODD))
def test_an_odd_reply_with_good_arrays_is_used(kind):
    grid = Grid(CLIENTS, changes={2: ODD[kind]})
    odd = start(asked_first(SeededFedAvg(**ALL), grid), grid)
    assert grid.damaged == 1
    assert bits(odd) == after()


ON_ARRAYS = {"zip archive", "other serialisation", "header without data"}


@pytest.mark.parametrize("kind", sorted(DAMAGED_REPLIES.keys() - ON_ARRAYS))
def test_no_answer_about_a_partition_ends_the_run(kind):
    """The node then goes by its id, unless the partition came beside the damage.

    Here its id, 3, is the partition that node 4 reports and keeps.
    """
    grid = Grid(CLIENTS, changes={2: DAMAGED_REPLIES[kind][0]}, changed_kind="query.partition")
    strategy = asked_first(SeededFedAvg(**ALL), grid)
    start(strategy, grid)
    assert grid.damaged == 1
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    assert strategy.registry.client(3) in (2, -4)
    assert {strategy.registry.client(n) for n in (1, 2, 4, 5, 6)} == {0, 1, 3, 4, 5}


@pytest.mark.parametrize("error", [failed, unavailable])
def test_an_error_is_booked_to_the_client_that_was_asked(error: Change):
    strategy = SeededFedAvg(**ALL)
    for client in range(6):
        strategy.sent.mark(client, "network")
    grid = Grid(CLIENTS, changes={2: error})
    start(asked_first(strategy, grid), grid)
    lacking = [k for k in range(6) if strategy.sent.lacks(k, "network")]
    assert lacking == [2]
    assert SUPERLINK not in strategy.registry.partitions


# ------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("accuracies", "refused"),
    [
        ([0.2, None, 0.4], []),
        ([0.2, -0.1, 0.4, 1e6, 1.1], [1, 3, 4]),
        ([20.0, 35.0, 0.4], []),  # in percent, as most of them are
        ([20.0, 101.0, 35.0, 0.4], [1]),
        ([0.2, 0.3, 37.5], [2]),
    ],
)
def test_accuracies_that_cannot_be_are_refused(accuracies, refused):
    verdicts = screen_accuracies(accuracies, 100.0)
    assert [i for i, bad in enumerate(verdicts) if bad is not None] == refused


@pytest.mark.parametrize(
    ("added", "kept"),
    [
        # of 2,000 names 63 are kept beside the known one, and none of more than 64 letters
        (
            {f"name-{i:04}": 1.0 for i in range(2000)} | {"x" * 65: 1.0},
            {f"name-{i:04}": 1.0 for i in range(63)},
        ),
        # of 19,000 numbers 10,000 are, the loss among them, and no list in part
        (
            {"a": [0.5] * 9_000, "b": [0.5] * 9_000, "c": [0.5] * 999, "d": [0.5]},
            {"a": [0.5] * 9_000, "c": [0.5] * 999},
        ),
        # the server's own counts
        ({"replies_accepted": 99.0, "replies_x": 1, "rejected_error": 2, "rejected_x": 3.0}, {}),
    ],
)
def test_clients_metrics_are_limited(added, kept):
    strategy, plain = SeededFedAvg(**ALL), SeededFedAvg(**ALL)
    start(strategy, Grid(CLIENTS, changes=dict.fromkeys(range(6), with_metrics(**added))))
    start(plain, Grid(CLIENTS))
    assert dict(strategy.train_metrics[1]) == dict(plain.train_metrics[1]) | kept


# ---------------------------------------------------------------- nodes and sampling


def test_nodes_that_cannot_tell_their_partition_go_by_their_node_id():
    silent = {"changes": dict.fromkeys(range(6), lost), "changed_kind": "query.partition"}
    grid = Grid(CLIENTS, node_ids=IDS, **silent)
    strategy = asked_first(SeededFedAvg(**ALL), grid)
    start(strategy, grid)
    assert strategy.registry.clients() == {10, 20, 30, 50, 60, 90}


def test_whoever_claims_a_partition_that_is_held_out_is_held_out():
    claims = {3: with_metrics(partition_id=0)}
    grid = Grid(CLIENTS, changes=claims, changed_kind="query.partition")
    start(SeededFedAvg(held_out=[0], min_train_nodes=1, **ALL), grid)
    assert sorted(grid.trained) == [1, 2, 4, 5]


@pytest.mark.parametrize("kind", ["query.partition", "train"])
@pytest.mark.parametrize("claimed", [-1, -5, 2**63, 2**64 - 1])
def test_a_partition_that_cannot_be_is_none(claimed, kind):
    """Below zero are the placeholders, here node 4's; no table holds what is over 63 bits.

    A first reply with that claim is followed by the question, which node 6 answers with its own.
    """
    claims = {3: with_metrics(partition_id=0), 5: with_metrics(partition_id=claimed)}
    grid = Grid(CLIENTS, changes=claims, changed_kind=kind)
    strategy = SeededFedAvg(min_evaluate_nodes=6)
    start(asked_first(strategy, grid) if kind == "query.partition" else strategy, grid)
    last = 5 if kind == "train" and claimed != -1 else 6  # or its id
    assert strategy.registry.clients() == {0, 1, 2, -5, 4, last}
    assert sorted(strategy.client_evaluations) == [-5, 0, 1, 2, 4, last]


ASKED = ("query.partition", 6)


@pytest.mark.parametrize(
    ("options", "changes", "exchanges"),
    [
        ({}, {}, [("train", 6), ("train", 6)]),  # they come with the first replies
        ({"fraction_train": 0.5}, {}, [ASKED, ("train", 3), ("train", 3)]),
        ({"held_out": [0]}, {}, [ASKED, ("train", 5), ("train", 5)]),
        # those that failed are asked before the second round
        ({}, {2: failed, 4: lost}, [("train", 6), ("query.partition", 2), ("train", 6)]),
        # whoever leaves it out, as a user's own function may, is asked at once
        (
            {},
            {2: with_metrics(partition_id=None)},
            [("train", 6), ("query.partition", 1), ("train", 6)],
        ),
    ],
)
def test_partitions_are_asked_for_once_if_they_do_not_come_with_replies(
    options, changes, exchanges
):
    grid = Grid(CLIENTS, changes=changes, node_ids=IDS)
    strategy = SeededFedAvg(**ALL | {"min_train_nodes": 1} | options)
    start(strategy, grid, rounds=2)
    assert grid.exchanges == exchanges
    assert strategy.registry.clients(departed=True) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("damage", ["metrics", "arrays", "outlier"])
def test_a_refused_reply_claims_no_partition(damage):
    """Node 3 claims node 6's partition in a reply that is refused: both keep their own places."""
    changes = {
        "metrics": with_metrics(num_examples=-5),
        "arrays": damaged(0, lambda a: np.full_like(a, np.nan)),
        "outlier": damaged(0, lambda a: a + np.float32(1e6)),
    }
    claim = with_metrics(partition_id=5)
    grid = Grid(CLIENTS, changes={2: lambda reply: changes[damage](claim(reply))})
    strategy = SeededFedAvg(min_evaluate_nodes=6)
    weights = start(strategy, grid)
    assert strategy.train_metrics[1]["replies-accepted"] == 5
    assert strategy.registry.clients() == {0, 1, 2, 3, 4, 5}
    assert sorted(strategy.client_evaluations) == [0, 1, 2, 3, 4, 5]
    assert bits(weights) == after(changes={2: lost})


def test_nodes_without_a_partition_say_so_with_their_first_replies():
    def client_fn(context: Context) -> SGDClient:
        return SGDClient(network(), *examples(context.node_id), seed=(0, context.node_id))

    grid = Grid(client_app(client_fn), num_clients=3)
    for context in grid.contexts.values():
        context.node_config = {}
    strategy = SeededFedAvg(**ALL)
    start(strategy, grid, rounds=2)
    assert grid.exchanges == [("train", 3), ("train", 3)]
    assert strategy.registry.clients() == {1, 2, 3}


def test_each_client_is_sent_its_own_content():
    """What ``content_for`` returns, and no other client's."""

    class Greeting(SeededFedAvg):
        """Sends each client its id."""

        def content_for(self, client: int, stage: str, arrays: Any, config: Any) -> Any:
            content = super().content_for(client, stage, arrays, config)
            content["greeting"] = ConfigRecord({"client": client, "stage": stage})
            return content

    seen: dict[tuple[int, str], int] = {}

    def note(messages: list[Message]) -> None:
        for message in messages:
            if (greeting := message.content.config_records.get("greeting")) is not None:
                node = message.metadata.dst_node_id
                seen[node, str(greeting["stage"])] = int(greeting["client"])

    grid = Grid(CLIENTS, node_ids=IDS, on_send=note)
    start(asked_first(Greeting(min_evaluate_nodes=6), grid), grid)
    expected = {(node, s): IDS.index(node) for node in IDS for s in ("train", "evaluate")}
    assert seen == expected


def test_an_exchange_within_a_round_is_checked_as_any_other():
    """Client 1 answers twice, 2 with an error, 4 and 5 with nothing that can be parsed."""

    class Asking(SeededFedAvg):
        """Has the clients evaluate the mean before it is taken."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            nodes = [1, 2, 3, 4, 5, 6]
            found.append(self.exchange(nodes, "evaluate", arrays, parse))
            return arrays, metrics

    def parse(reply: Any) -> float:
        if reply.client == 4:
            raise BadReply("odd", "not this one")
        if reply.client == 5:
            raise KeyError("weight")
        return float(reply.metrics["loss"])

    found: list[Any] = []
    changes: dict[int, Change] = {1: lambda reply: [reply, reply], 2: failed}
    start(Asking(**ALL), Grid(CLIENTS, changes=changes, changed_kind="evaluate", order=2))
    ((pairs, rejected),) = found
    assert [reply.client for reply, _ in pairs] == [0, 1, 3]
    assert rejected == {"duplicate": 1, "error": 1, "odd": 1, "malformed": 1}


# ------------------------------------------------------------------- rounds and state


def stopping_at(last: int, seen: list[tuple[int, int]]) -> Callable[[int, Result], bool]:
    def should_stop(server_round: int, result: Result) -> bool:
        seen.append((server_round, len(result.train_metrics_clientapp)))
        return server_round >= last

    return should_stop


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_that_is_stopped_is_the_shorter_run(evaluated):
    """Flower 1.43's argument, on any version; the result so far is what it is given."""
    seen: list[tuple[int, int]] = []

    def evaluate(server_round: int, _: ArrayRecord) -> MetricRecord:
        return MetricRecord({"round": server_round})

    options = {"should_stop": stopping_at(2, seen), "evaluate_fn": evaluate if evaluated else None}
    initial = ArrayRecord(dict(network().state_dict()))
    first = SeededFedAvg(**ALL)
    result = first.start(Grid(CLIENTS), initial, num_rounds=9, **options)
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert sorted(result.evaluate_metrics_serverapp) == ([0, 1, 2] if evaluated else [])
    assert bits(arrays_of(result.arrays)) == after(2)

    second = SeededFedAvg(**ALL)  # which goes on, and is asked with the rounds' own numbers
    second.load_state_dict(first.state_dict())
    seen.clear()
    options["should_stop"] = stopping_at(4, seen)
    result = second.start(Grid(CLIENTS), result.arrays, num_rounds=9, **options)
    assert seen == [(2, 0), (3, 1), (4, 2)]
    assert bits(arrays_of(result.arrays)) == after(4)


def checkpointed(
    folder: Path, rounds: int = 1, net: nn.Module | None = None, lr: float = 0.1, **options: Any
) -> dict[str, np.ndarray]:
    config = {"checkpoint": folder, "train_config": ConfigRecord({"lr": lr})}
    return start(SeededFedAvg(**ALL | options), Grid(CLIENTS), rounds, net, **config)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"seed": 1}, r"holds another run \(state: expected seed = 1, got 0; "),
        ({"net": nn.Linear(4, 3)}, r"of another network, which differs in \['0.weight', "),
        # its names and shapes are all there
        ({"net": network()[:1]}, r"of another network, which differs in \['1.weight', "),
        ({"lr": 0.2}, r"holds a run with train_config = {'lr': 0.1}, got {'lr': 0.2}"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(own, message, tmp_path):
    checkpointed(tmp_path)
    with pytest.raises(ValueError, match=message):
        checkpointed(tmp_path, **own)


def test_what_became_of_a_checkpoint_is_said(tmp_path, caplog):
    """A run that goes on; then one that is over, and began with other weights."""
    checkpointed(tmp_path)
    caplog.clear()
    with caplog.at_level(INFO, "flwr"):
        checkpointed(tmp_path, 2)
    said = [message for message in caplog.messages if message.startswith("[ROUND")]
    assert said == ["[ROUND 2/2]"]
    assert f"{tmp_path}: going on after round 1" in caplog.messages
    assert "Starting SeededFedAvg strategy: rounds 2 to 2" in caplog.messages
    (results,) = [i for i, m in enumerate(caplog.messages) if m.startswith("Finished in ")]
    assert all(any(f"{r}: " in m for m in caplog.messages[results:]) for r in (1, 2))
    caplog.clear()
    with caplog.at_level(WARNING, "flwr"):
        checkpointed(tmp_path, 2, net=network(1))
    said = [m for m in caplog.messages if str(tmp_path) in m]
    assert "began with other weights than those given now, which are not used" in said[0]
    assert "all 2 rounds have been run before, and none is run now" in said[1]


def test_two_processes_do_not_share_a_checkpoint(tmp_path):
    with claimed(tmp_path, "checkpoint"), pytest.raises(BlockingIOError, match="another process"):
        checkpointed(tmp_path)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    checkpointed(tmp_path, 2)
    newest = max(tmp_path.glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-8])
    with caplog.at_level(INFO, "flwr"):
        again = checkpointed(tmp_path, 2)
    assert f"{tmp_path}: going on after round 1" in caplog.messages
    assert bits(again) == after(2)


def test_a_checkpoint_that_cannot_be_written_is_said_before_the_first_round(tmp_path):
    (tmp_path / "file").write_text("no folder")
    grid = Grid(CLIENTS)
    with pytest.raises(ValueError, match="checkpoint: expected a folder, got the file"):
        start(SeededFedAvg(**ALL), grid, checkpoint=tmp_path / "file")
    assert grid.trained == []


def test_rounds_are_those_of_flower():
    """Flower's own loop calls the same hooks in the same order, and ends with the same weights."""

    def recorded(run):
        calls = []

        class Recorded(SeededFedAvg):
            def __getattribute__(self, name):
                if name.startswith(("configure_", "aggregate_")) and not name.endswith("_fn"):
                    calls.append(name)
                return super().__getattribute__(name)

        def evaluate(server_round, arrays):
            calls.append(("evaluate", server_round, bits(arrays_of(arrays))))

        initial = ArrayRecord(dict(network().state_dict()))
        options = {"num_rounds": 2, "evaluate_fn": evaluate}
        result = run(Recorded(), grid=Grid(CLIENTS), initial_arrays=initial, **options)
        return calls, bits(arrays_of(result.arrays)), str(result)

    assert recorded(SeededFedAvg.start) == recorded(Strategy.start)


def test_a_run_in_which_no_client_succeeded_does_not_end_as_if_it_had():
    """One good reply in any round is enough, and so is one before a restart."""
    with pytest.raises(NoUsableReply, match=r"3 rounds no .* the last refused: out of memory"):
        start(SeededFedAvg(**ALL), Grid(CLIENTS, changes=dict.fromkeys(range(6), failed)), 3)
    strategy = SeededFedAvg(**ALL)
    failing = dict.fromkeys(
        range(6), lambda reply: reply if strategy.server_round == 2 else failed(reply)
    )
    start(strategy, Grid(CLIENTS, changes=failing), 3)
    assert [strategy.train_metrics[r]["replies-accepted"] for r in (1, 2, 3)] == [0, 6, 0]
    arrays = ArrayRecord(dict(network().state_dict()))
    again = SeededFedAvg(**ALL)
    again.load_state_dict(strategy.state_dict())
    again.start(Grid(CLIENTS, changes=dict.fromkeys(range(6), failed)), arrays, num_rounds=4)
    assert again.train_metrics[4]["replies-accepted"] == 0


def test_what_is_kept_for_many_clients_may_be_missing_from_a_state():
    """Names with a dot are one of a varying number; that others must be there, the contract has."""
    SeededFedAvg().load_state_dict(SeededFedAvg().state_dict() | {"controls.7": np.zeros(3)})


def test_a_further_exchange_before_any_round_is_refused():
    with pytest.raises(RuntimeError, match="call configure_train first"):
        SeededFedAvg().exchange([1], "evaluate", ArrayRecord(), lambda reply: reply)


def test_messages_are_made_anew_for_each_stage():
    """A train reply is no answer to an evaluate message of the same round."""
    kept: list[Message] = []

    def keep(reply: Message) -> Message:
        kept.append(reply)
        return reply

    class Confusing(Grid):
        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
            replies = list(super().send_and_receive(messages, timeout=timeout))
            return [kept[0], *replies[1:]] if self.exchanges[-1][0] == "evaluate" else replies

    strategy = SeededFedAvg(min_evaluate_nodes=6)
    start(strategy, Confusing(CLIENTS, changes={0: keep}))
    assert strategy.evaluate_metrics[1]["rejected-not-asked"] == 1
    assert sorted(strategy.client_evaluations) == [1, 2, 3, 4, 5]
