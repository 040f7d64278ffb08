"""What the base does for every strategy, shown with FedAvg, the shortest of them."""

from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedntk.clients import SGDClient, client_app
from fedntk.ntk import BadReply
from fedntk.ntk.support.files import claimed
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NoUsableReply, SeededFedAvg

from .federation import (
    DAMAGED_ARRAYS,
    DAMAGED_REPLIES,
    ODD,
    SUPERLINK,
    Change,
    Grid,
    app,
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
DAMAGED = DAMAGED_ARRAYS | DAMAGED_REPLIES


# ------------------------------------------------------------------------- replies


@pytest.mark.parametrize("kind", sorted(DAMAGED))
def test_a_damaged_reply_is_dropped_and_counted_under_its_reason(kind, caplog):
    change, reasons = DAMAGED[kind]
    grid, strategy = Grid(CLIENTS, changes={2: change}), SeededFedAvg(**ALL)
    with caplog.at_level(WARNING, "flwr"):
        attacked = start(strategy, grid)
    assert grid.damaged == 1
    assert bits(attacked) == bits(start(SeededFedAvg(**ALL), Grid(CLIENTS, changes={2: lost})))
    metrics = strategy.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (5, 1)
    (reason,) = [k for k in metrics if k.startswith("rejected-")]
    assert reason.removeprefix("rejected-") in reasons.split()
    if "error" not in kind:
        assert any("dropped the reply" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", sorted(ODD))
def test_an_odd_reply_with_good_arrays_is_used(kind):
    grid = Grid(CLIENTS, changes={2: ODD[kind]})
    odd = start(asked_first(SeededFedAvg(**ALL), grid), grid)
    assert grid.damaged == 1
    assert bits(odd) == bits(start(SeededFedAvg(**ALL), Grid(CLIENTS)))


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


def test_a_parse_function_that_raises_anything_drops_the_reply():
    class Broken(SeededFedAvg):
        """Cannot read the replies of one client."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            def parse(reply: Any) -> int:
                if reply.client == 4:
                    raise KeyError("weight")
                return reply.client

            pairs, rejected = self.accepted(replies, parse, "train")
            seen.append([parsed for _, parsed in pairs])
            return None, self.round_metrics([r for r, _ in pairs], rejected)

    seen: list[list[int]] = []
    strategy = Broken(**ALL)
    start(strategy, Grid(CLIENTS, order=3))
    assert seen == [[0, 1, 2, 3, 5]]


# ------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("accuracy", [float("inf"), float("nan"), 1e6, -0.1])
def test_a_false_evaluation_counts_as_none(accuracy):
    results = []
    for change in (with_metrics(accuracy=accuracy), lost):
        strategy = SeededFedAvg(min_evaluate_nodes=6)
        start(strategy, Grid(CLIENTS, changes={2: change}, changed_kind="evaluate"))
        results.append(strategy)
    false, silent = results
    assert false.client_evaluations == silent.client_evaluations
    assert set(false.client_evaluations) == {0, 1, 3, 4, 5}
    for name in ("accuracy", "loss", "num-examples", "replies-accepted"):
        assert false.evaluate_metrics[1][name] == silent.evaluate_metrics[1][name]
    assert false.evaluate_metrics[1]["replies-rejected"] == 1


def test_accuracies_in_percent_are_taken_if_most_clients_have_them():
    """Five of six report 100 times their share; the sixth's 0.4 is a percentage like theirs."""
    percent = with_metrics(accuracy=37.5)
    results = {}
    for count in (5, 1):
        strategy = SeededFedAvg(min_evaluate_nodes=6)
        changes = dict.fromkeys(range(count), percent)
        start(strategy, Grid(CLIENTS, changes=changes, changed_kind="evaluate"))
        results[count] = strategy.evaluate_metrics[1]
    assert results[5]["replies-accepted"] == 6
    assert results[5]["accuracy"] > 20
    assert (results[1]["replies-accepted"], results[1]["rejected-metrics"]) == (5, 1)
    assert results[1]["accuracy"] <= 1


def test_clients_cannot_add_metrics_without_end():
    """Of 2,000 names 61 are kept beside the known one, and none that is longer than 64."""
    many = {f"name-{i:04}": 1.0 for i in range(2000)} | {"x" * 65: 1.0}
    strategy = SeededFedAvg(**ALL)
    grid = Grid(CLIENTS, changes=dict.fromkeys(range(6), with_metrics(**many)))
    start(strategy, grid)
    metrics = strategy.train_metrics[1]
    assert metrics["train-loss"] > 0
    own = [name for name in metrics if name.startswith("name-")]
    assert own == sorted(own)
    assert len(own) == 63
    assert "x" * 65 not in metrics


def test_nor_numbers_in_lists_without_end():
    """Of 19,000 numbers 10,000 are kept, the loss among them, and no list in part."""
    lists = {"a": [0.5] * 9_000, "b": [0.5] * 9_000, "c": [0.5] * 999, "d": [0.5]}
    grid = Grid(CLIENTS, changes=dict.fromkeys(range(6), with_metrics(**lists)))
    strategy = SeededFedAvg(**ALL)
    start(strategy, grid)
    kept = {k: v for k, v in strategy.train_metrics[1].items() if isinstance(v, list)}
    assert {name: len(numbers) for name, numbers in kept.items()} == {"a": 9_000, "c": 999}


def test_clients_cannot_write_the_servers_counts():
    counts = with_metrics(replies_accepted=99.0, replies_x=1, rejected_error=2, rejected_x=3.0)
    strategy, plain = SeededFedAvg(**ALL), SeededFedAvg(**ALL)
    start(strategy, Grid(CLIENTS, changes=dict.fromkeys(range(6), counts)))
    start(plain, Grid(CLIENTS))
    assert dict(strategy.train_metrics[1]) == dict(plain.train_metrics[1])


# ---------------------------------------------------------------- nodes and sampling


def test_nodes_that_cannot_tell_their_partition_go_by_their_node_id():
    class Silent(Grid):
        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "query.partition":
                return []
            return super().send_and_receive(messages, timeout=timeout)

    grid = Silent(CLIENTS, node_ids=[50, 20, 90, 10, 60, 30])
    strategy = asked_first(SeededFedAvg(**ALL), grid)
    start(strategy, grid)
    assert strategy.registry.clients() == {10, 20, 30, 50, 60, 90}


@pytest.fixture(params=["asked first", "with the first reply"])
def claiming(request):
    """Return what runs a round in which some nodes claim a partition, before it or in it."""

    def run(claims: dict[int, Change]) -> SeededFedAvg:
        strategy = SeededFedAvg(min_evaluate_nodes=6)
        if request.param == "asked first":
            grid = Grid(CLIENTS, changes=claims, changed_kind="query.partition")
            asked_first(strategy, grid)
        else:
            grid = Grid(CLIENTS, changes=claims)
        start(strategy, grid)
        assert grid.damaged == len(claims)
        return strategy

    return run


def test_two_nodes_that_claim_one_partition_are_two_clients(claiming):
    """Both are sampled and used; evaluations do not overwrite each other."""
    strategy = claiming({3: with_metrics(partition_id=0)})
    assert strategy.registry.clients() == {0, 1, 2, -5, 4, 5}  # node 4's placeholder
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    assert sorted(strategy.client_evaluations) == [-5, 0, 1, 2, 4, 5]


def test_no_node_can_claim_the_placeholder_of_another(claiming):
    """-5 is what node 4 gets once it claims a partition that another holds; no partition is it.

    A reply with that claim is followed by the question, which node 6 answers with its own.
    """
    strategy = claiming({3: with_metrics(partition_id=0), 5: with_metrics(partition_id=-5)})
    assert strategy.registry.client(4) == -5
    assert strategy.registry.client(6) in (5, 6)
    assert len(strategy.client_evaluations) == 6


def test_whoever_claims_a_partition_that_is_held_out_is_held_out():
    claims = {3: with_metrics(partition_id=0)}
    grid = Grid(CLIENTS, changes=claims, changed_kind="query.partition")
    start(SeededFedAvg(held_out=[0], min_train_nodes=1, **ALL), grid)
    assert sorted(grid.trained) == [1, 2, 4, 5]


@pytest.mark.parametrize("claimed", [-1, -5, 2**63, 2**64 - 1])
def test_a_partition_that_cannot_be_is_none(claimed):
    """Below zero are the placeholders, here node 4's; no table holds what is over 63 bits."""
    claims = {3: with_metrics(partition_id=0), 5: with_metrics(partition_id=claimed)}
    grid = Grid(CLIENTS, changes=claims, changed_kind="query.partition")
    strategy = asked_first(SeededFedAvg(min_evaluate_nodes=6), grid)
    start(strategy, grid)
    assert strategy.registry.clients() == {0, 1, 2, -5, 4, 6}  # node 6 goes by its id
    assert sorted(strategy.client_evaluations) == [-5, 0, 1, 2, 4, 6]


def kinds_of(grid: Grid) -> list[tuple[str, int]]:
    return [(kind, size) for kind, size in grid.exchanges if kind != "evaluate"]


def test_partitions_come_with_the_first_replies_where_all_are_asked():
    grid = Grid(CLIENTS, node_ids=[50, 20, 90, 10, 60, 30])
    strategy = SeededFedAvg(min_evaluate_nodes=6)
    start(strategy, grid, rounds=2)
    assert kinds_of(grid) == [("train", 6), ("train", 6)]
    assert strategy.registry.clients() == {0, 1, 2, 3, 4, 5}
    assert sorted(strategy.client_evaluations) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [{"fraction_train": 0.5}, {"held_out": [0]}])
def test_else_they_are_asked_for_once(options):
    grid = Grid(CLIENTS)
    start(SeededFedAvg(**ALL | {"min_train_nodes": 1} | options), grid, rounds=2)
    assert [kind for kind, _ in grid.exchanges] == ["query.partition", "train", "train"]
    assert grid.exchanges[0] == ("query.partition", 6)


def test_nodes_that_failed_in_the_first_round_are_asked_before_the_second():
    grid = Grid(CLIENTS, changes={2: failed, 4: lost})
    strategy = SeededFedAvg(**ALL)
    start(strategy, grid, rounds=2)
    assert kinds_of(grid) == [("train", 6), ("query.partition", 2), ("train", 6)]
    assert strategy.registry.clients() == {0, 1, 2, 3, 4, 5}
    assert strategy.registry.clients(departed=True) == {0, 1, 2, 3, 4, 5}


def test_nodes_whose_own_train_function_leaves_it_out_are_asked_at_once():
    grid = Grid(CLIENTS, changes={2: with_metrics(partition_id=None)}, node_ids=range(11, 17))
    strategy = SeededFedAvg(**ALL)
    weights = start(strategy, grid)
    assert kinds_of(grid) == [("train", 6), ("query.partition", 1)]
    assert strategy.registry.clients() == {0, 1, 2, 3, 4, 5}
    assert bits(weights) == bits(start(SeededFedAvg(**ALL), Grid(CLIENTS)))


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
    assert bits(weights) == bits(start(SeededFedAvg(), Grid(CLIENTS, changes={2: lost})))


def test_nodes_without_a_partition_say_so_with_their_first_replies():
    class Watched(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
            messages = list(messages)
            kinds.extend({message.metadata.message_type for message in messages})
            return super().send_and_receive(messages, timeout=timeout)

    def client_fn(context: Context) -> SGDClient:
        return SGDClient(network(), *examples(context.node_id), seed=(0, context.node_id))

    kinds: list[str] = []
    grid = Watched(client_app(client_fn), 3, {})
    for context in grid.contexts.values():
        context.node_config = {}
    strategy = SeededFedAvg(**ALL)
    initial = ArrayRecord(dict(network().state_dict()))
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=2)
    assert kinds == ["train", "train"]
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

    class Watching(Grid):
        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
            messages = list(messages)
            for message in messages:
                greeting = message.content.config_records.get("greeting")
                if greeting is not None:
                    node = message.metadata.dst_node_id
                    seen[node, str(greeting["stage"])] = int(greeting["client"])
            return super().send_and_receive(messages, timeout=timeout)

    grid = Watching(CLIENTS, node_ids=[50, 20, 90, 10, 60, 30])
    start(asked_first(Greeting(min_evaluate_nodes=6), grid), grid)
    order = [50, 20, 90, 10, 60, 30]
    expected = {(node, s): order.index(node) for node in order for s in ("train", "evaluate")}
    assert seen == expected


def test_an_exchange_within_a_round_is_checked_as_any_other():
    """Client 1 answers twice, 2 with an error, 4 with nothing that can be parsed."""

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
        return float(reply.metrics["loss"])

    found: list[Any] = []
    changes: dict[int, Change] = {1: lambda reply: [reply, reply], 2: failed}
    start(Asking(**ALL), Grid(CLIENTS, changes=changes, changed_kind="evaluate", order=2))
    ((pairs, rejected),) = found
    assert [reply.client for reply, _ in pairs] == [0, 1, 3, 5]
    assert rejected == {"duplicate": 1, "error": 1, "odd": 1}


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

    initial = ArrayRecord(dict(network().state_dict()))
    result = SeededFedAvg(**ALL).start(
        Grid(CLIENTS), initial, num_rounds=9, should_stop=stopping_at(2, seen),
        evaluate_fn=evaluate if evaluated else None,
    )  # fmt: skip
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert sorted(result.evaluate_metrics_serverapp) == ([0, 1, 2] if evaluated else [])
    expected = start(SeededFedAvg(**ALL), Grid(CLIENTS), rounds=2)
    assert bits({k: a.numpy() for k, a in result.arrays.items()}) == bits(expected)


def test_a_run_that_goes_on_is_asked_with_the_rounds_own_numbers():
    first = SeededFedAvg(**ALL)
    halfway = start(first, Grid(CLIENTS), rounds=2)
    second, seen = SeededFedAvg(**ALL), list[tuple[int, int]]()
    second.load_state_dict(first.state_dict())
    arrays = ArrayRecord({k: Array(a) for k, a in halfway.items()})
    result = second.start(Grid(CLIENTS), arrays, num_rounds=9, should_stop=stopping_at(4, seen))
    assert seen == [(2, 0), (3, 1), (4, 2)]
    expected = start(SeededFedAvg(**ALL), Grid(CLIENTS), rounds=4)
    assert bits({k: a.numpy() for k, a in result.arrays.items()}) == bits(expected)


def checkpointed(
    folder: Path, rounds: int = 2, net: nn.Module | None = None, **options: Any
) -> dict[str, np.ndarray]:
    strategy = SeededFedAvg(**ALL | options)
    initial = ArrayRecord(dict((net or network()).state_dict()))
    result = strategy.start(Grid(CLIENTS), initial, num_rounds=rounds, checkpoint=folder)
    return {name: array.numpy() for name, array in result.arrays.items()}


def test_a_checkpoint_of_other_settings_or_another_network_is_refused(tmp_path):
    checkpointed(tmp_path)
    with pytest.raises(ValueError, match=r"holds another run \(state: expected seed = 1, got 0; "):
        checkpointed(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"of another network, which differs in \['0.weight', "):
        checkpointed(tmp_path, net=nn.Linear(4, 3))
    assert bits(checkpointed(tmp_path, 3)) == bits(start(SeededFedAvg(**ALL), Grid(CLIENTS), 3))


def test_a_checkpoint_of_a_larger_network_or_another_configuration_is_refused(tmp_path):
    """The smaller network's names and shapes are all there."""

    def run(net: nn.Module, **config: float) -> None:
        initial = ArrayRecord(dict(net.state_dict()))
        own = ConfigRecord(config)
        grid = Grid(app(lambda model, *data, **o: SGDClient(net, *data, **o)))
        strategy = SeededFedAvg(**ALL)
        strategy.start(grid, initial, num_rounds=1, train_config=own, checkpoint=tmp_path)

    layers = [nn.Linear(4, 3), nn.Linear(3, 3)]
    run(nn.Sequential(*layers), lr=0.1)
    with pytest.raises(ValueError, match=r"of another network, which differs in \['1.weight', '1"):
        run(nn.Sequential(*layers[:1]), lr=0.1)
    with pytest.raises(ValueError, match=r"a run with train_config = {'lr': 0.1}, got {'lr': 0.2}"):
        run(nn.Sequential(*layers), lr=0.2)


def test_a_finished_run_and_other_first_weights_are_said(tmp_path, caplog):
    checkpointed(tmp_path, 2)
    with caplog.at_level(WARNING, "flwr"):
        checkpointed(tmp_path, 2, net=network(1))
    said = [m for m in caplog.messages if str(tmp_path) in m]
    assert "began with other weights than those given now, which are not used" in said[0]
    assert "all 2 rounds have been run before, and none is run now" in said[1]


def test_two_processes_do_not_share_a_checkpoint(tmp_path):
    with claimed(tmp_path, "checkpoint"), pytest.raises(BlockingIOError, match="another process"):
        checkpointed(tmp_path)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    checkpointed(tmp_path, 3)
    newest = max(tmp_path.glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-8])
    with caplog.at_level(INFO, "flwr"):
        again = checkpointed(tmp_path, 3)
    assert f"{tmp_path}: going on after round 2" in caplog.messages
    assert bits(again) == bits(start(SeededFedAvg(**ALL), Grid(CLIENTS), 3))


def test_a_checkpoint_that_cannot_be_written_is_said_before_the_first_round(tmp_path):
    (tmp_path / "file").write_text("no folder")
    grid = Grid(CLIENTS)
    with pytest.raises(ValueError, match="checkpoint: expected a folder, got the file"):
        SeededFedAvg(**ALL).start(
            grid, ArrayRecord(dict(network().state_dict())), checkpoint=tmp_path / "file"
        )
    assert grid.trained == []


def test_the_log_says_the_rounds_own_numbers_and_the_strategys_name(tmp_path, caplog):
    checkpointed(tmp_path, 2)
    caplog.clear()
    with caplog.at_level(INFO, "flwr"):
        checkpointed(tmp_path, 4)
    said = [message for message in caplog.messages if message.startswith("[ROUND")]
    assert said == ["[ROUND 3/4]", "[ROUND 4/4]"]
    assert "Starting SeededFedAvg strategy: rounds 3 to 4" in caplog.messages
    (results,) = [i for i, m in enumerate(caplog.messages) if m.startswith("Finished in ")]
    assert all(any(f"{r}: " in m for m in caplog.messages[results:]) for r in (1, 2, 3, 4))


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
            calls.append(
                ("evaluate", server_round, bits({n: a.numpy() for n, a in arrays.items()}))
            )

        initial = ArrayRecord(dict(network().state_dict()))
        options = {"min_train_nodes": 6, "min_evaluate_nodes": 6}
        strategy = Recorded(min_available_nodes=6, **options)
        result = run(
            strategy, grid=Grid(CLIENTS), initial_arrays=initial, num_rounds=3, evaluate_fn=evaluate
        )
        return calls, bits({n: a.numpy() for n, a in result.arrays.items()}), str(result)

    assert recorded(SeededFedAvg.start) == recorded(Strategy.start)


def test_a_run_whose_rounds_change_nothing_returns_what_it_began_with():
    """Five of six replies count, and six would be needed."""
    after = start(SeededFedAvg(min_completed=6, **ALL), Grid(CLIENTS, changes={1: lost}))
    assert bits(after) == bits({k: v.numpy() for k, v in network().state_dict().items()})


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


def test_what_was_learned_is_an_object_that_predicts():
    """In a user's evaluate_fn as after the run."""
    strategy, seen = SeededFedAvg(**ALL), []
    x, y = examples(3)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(strategy.predictor(arrays, network()).evaluate(x, y).accuracy)
        return MetricRecord({"round": server_round})

    initial = ArrayRecord(dict(network().state_dict()))
    result = strategy.start(Grid(CLIENTS), initial, num_rounds=1, evaluate_fn=evaluate)
    trained = network().eval()
    trained.load_state_dict({k: torch.tensor(a.numpy()) for k, a in result.arrays.items()})
    for model, accuracy in zip((network().eval(), trained), seen, strict=True):
        with torch.no_grad():
            assert accuracy == float((model(x).argmax(1) == y).double().mean())
    assert strategy.learned == "network"


def test_what_is_kept_for_many_clients_may_be_missing_from_a_state():
    """Names with a dot are one of a varying number; all others must be there."""
    state = SeededFedAvg().state_dict()
    SeededFedAvg().load_state_dict(state | {"controls.7": np.zeros(3)})
    del state["server-round"]
    with pytest.raises(ValueError, match=r"state: expected .*server-round.*, got"):
        SeededFedAvg().load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_completed": 0}, "min_completed: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"outlier_factor": 1.0}, "outlier_factor: expected more than 1, got 1.0"),
        ({"outlier_factor": float("nan")}, "outlier_factor: expected a finite number, got nan"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SeededFedAvg(**options)


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
            messages = list(messages)
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if messages and messages[0].metadata.message_type == "evaluate":
                return [kept[0], *replies[1:]]
            return replies

    strategy = SeededFedAvg(min_evaluate_nodes=6)
    start(strategy, Confusing(CLIENTS, changes={0: keep}))
    assert strategy.evaluate_metrics[1]["rejected-not-asked"] == 1
    assert sorted(strategy.client_evaluations) == [1, 2, 3, 4, 5]
