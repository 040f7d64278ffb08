"""What every strategy must do, whatever its method."""

import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from fedntk.clients import SGDClient
from fedntk.strategies import (
    BaseStrategy,
    GossipStrategy,
    KeepingStrategy,
    PersonalStrategy,
    ResendingStrategy,
)

from .federation import (
    DAMAGED_ARRAYS,
    DAMAGED_REPLIES,
    HALVES,
    ODD,
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    asked_first,
    bits,
    examples,
    failed,
    lost,
    network,
    replayed,
    run_damaged,
    start,
    start_in_vain,
    with_metrics,
)

FEWER = 4  # clients, where so many show it
OPTIONS = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_available_nodes": 6}
FILES = [
    path
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if "\nCONTRACT = " in path.read_text()
]


def listed() -> dict[str, Contract]:
    """Each strategy's own test file names the cases under which the contract runs it."""
    modules = [importlib.import_module(f"{__package__}.{p.stem}") for p in FILES]
    return {name: c for module in modules for name, c in module.CONTRACT.items()}


CONTRACTS = listed()
STRATEGIES = {
    name: (lambda make=case.strategy, **o: make(**OPTIONS | o), case.clients)
    for name, case in CONTRACTS.items()
}
EXCHANGES = [
    (name, exchange)
    for name, case in sorted(CONTRACTS.items())
    for exchange in (["evaluate", "query"] if case.sends_queries else ["evaluate"])
]


ODD_CLIENTS = {
    0: with_metrics(bonus=1.0, partition_id=-1),
    2: ODD["another's partition"],
    3: ODD["missing metric"],
}
OTHER_DAMAGE = {  # client -> what becomes of its answers to other messages than those of training
    k: DAMAGED_REPLIES[kind][0]
    for k, kind in enumerate(["error", "no content", "NaN metric", "infinite metric"], 1)
}


def untouched(make: Callable[..., BaseStrategy]) -> dict[str, np.ndarray]:
    """What the strategy's run begins with: the network's arrays, and its own if it has any."""
    return start(make(), Grid(app(SGDClient)), rounds=0)


@functools.cache
def after_one_round(
    make: Callable[..., BaseStrategy], clients: ClientApp, *silent: int
) -> dict[str, bytes]:
    """What the strategy's run learns in one round in which some clients' replies are lost."""
    return bits(start(make(), Grid(clients, changes=dict.fromkeys(silent, lost))))


def without_random_names(state: dict[str, Any]) -> dict[str, Any]:
    """What each run draws anew."""
    return {
        name: value for name, value in state.items() if not name.endswith(("run-key", "run_key"))
    }


def before_learning(name: str) -> dict[str, np.ndarray]:
    """What has the names, shapes and dtypes of all that the strategy's run learns later."""
    make, clients = STRATEGIES[name]
    return start(make(), Grid(clients)) if CONTRACTS[name].grows else untouched(make)


def over(condition: Callable[[Contract], bool]) -> Any:
    """Fixture of the strategies whose case fulfils a condition."""

    @pytest.fixture(params=sorted(name for name, case in CONTRACTS.items() if condition(case)))
    def chosen(request: pytest.FixtureRequest) -> tuple[Callable[..., BaseStrategy], Any]:
        return STRATEGIES[request.param]

    return chosen


method = over(lambda _: True)
repeating = over(lambda case: not case.once)  # samples clients in each round
single = over(lambda case: case.one_exchange and not case.once)
sender = over(lambda case: case.sends_arrays)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_rounds_learn_keep_the_arrays_and_average_the_clients_evaluations(name):
    make, clients = STRATEGIES[name]
    personal, once = CONTRACTS[name].personal, CONTRACTS[name].once
    before = before_learning(name)
    strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=6)
    for arrays in (untouched(make), before):
        assert list(strategy.network_of(as_record(arrays))) == list(network().state_dict())
    after = start(strategy, Grid(clients, order=4), rounds=2)
    assert list(after) == list(before)
    for name, array in after.items():
        assert (array.dtype, array.shape) == (before[name].dtype, before[name].shape)
        assert np.isfinite(array).all()
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    if personal:
        losses = [strategy.evaluate_metrics[number]["loss"] for number in (1, 2)]
    else:
        losses = [
            strategy.predictor(arrays, network()).evaluate(x, y).loss for arrays in (before, after)
        ]
    assert losses[1] < losses[0]
    assert np.isfinite(strategy.train_metrics[1 if once else 2]["train-loss"])
    metrics = strategy.evaluate_metrics[1]
    assert metrics["replies-accepted"] == 6
    assert metrics["num-examples"] == sum(len(examples(p)[1]) for p in range(6))
    assert 0 <= metrics["accuracy"] <= 1


def test_same_seed_same_bits_whatever_the_node_ids_and_the_order_of_replies(repeating):
    """Three of six clients are sampled, by their fraction, or as so many have to complete."""
    make, clients = repeating
    by_fraction = {"fraction_train": 0.5, "min_train_nodes": 3}
    by_completed = {"fraction_train": 0.1, "min_train_nodes": 1, "min_completed": 3}
    results, trained = [], []
    for sampling, node_ids, order in (
        (by_fraction, range(1, 7), None),
        (by_completed, [90, 12, 55, 7, 31, 68], 1),
    ):
        grid, strategy = Grid(clients, node_ids=node_ids, order=order), make(seed=3, **sampling)
        results.append(bits(start(strategy, grid, rounds=2)))
        trained.append([sorted(grid.trained[:3]), sorted(grid.trained[3:])])
        assert [len(set(grid.trained[i : i + 3])) for i in (0, 3)] == [3, 3]
        total = sum(len(examples(p)[1]) for p in grid.trained[:3])
        assert strategy.train_metrics[1]["num-examples"] == total
    assert results[0] == results[1]
    assert trained[0] == trained[1]
    other = make(seed=0).sample(Grid(clients), 1, "train", 0.5, 3)
    assert [node - 1 for node in other] != trained[0][0]


def test_same_bits_whether_clients_were_asked_who_they_are_or_told_it_with_their_replies(method):
    """Nodes' ids and replies are in other orders than partitions; one fails in the first round."""
    make, clients = method
    results: list[Any] = []

    def failed_at_first(reply: Message) -> Message:
        return failed(reply) if strategy.server_round == 1 else reply

    for asked in (False, True):
        strategy = make(min_available_nodes=FEWER)
        ids, order = [90, 12, 55, 7], 1 if asked else None
        changes: Any = {2: failed_at_first}
        grid = Grid(clients, node_ids=ids, order=order, changes=changes, num_clients=FEWER)
        weights = start(asked_first(strategy, grid) if asked else strategy, grid, rounds=2)
        state = without_random_names(strategy.state_dict())
        results.append((bits(weights), json.dumps(state, default=repr)))
        assert not asked or grid.exchanges[0] == ("query.partition", FEWER)
    assert results[0] == results[1]


@pytest.mark.parametrize("kinds", HALVES, ids=" and ".join)
def test_damaged_replies_leave_the_result_of_the_run_without_those_clients(sender, kinds, caplog):
    """Four of six clients reply with damaged arrays, each of another kind."""
    make, clients = sender
    with caplog.at_level(WARNING, "flwr"):
        attacked = run_damaged(make(min_completed=2), clients, kinds)
    assert attacked == after_one_round(make, clients, 1, 2, 3, 4)
    assert attacked != bits(untouched(make))
    dropped = [m for m in caplog.messages if m.startswith("dropped the reply")]
    assert len(dropped) == 4


def test_odd_replies_with_good_arrays_are_used_as_any_other(method):
    """The first has a metric more, another one less, and one claims another's partition."""
    make, clients = method
    strategy, plain = make(min_available_nodes=FEWER), make(min_available_nodes=FEWER)
    grid = Grid(clients, changes=ODD_CLIENTS, num_clients=FEWER)
    odd = start(asked_first(strategy, grid), grid)
    assert grid.damaged == sum(grid.trained.count(k) for k in ODD_CLIENTS) >= 3
    assert bits(odd) == bits(start(plain, Grid(clients, num_clients=FEWER)))
    assert strategy.train_metrics[1]["replies-accepted"] == FEWER
    assert np.isfinite(strategy.train_metrics[1]["train-loss"])


def test_a_reply_counts_once_and_in_its_round(single):
    """In round 2 a client answers with its reply of round 1; another gives each reply twice."""
    make, clients = single
    strategy, silent = make(min_available_nodes=FEWER), make(min_available_nodes=FEWER)
    changes = {2: replayed(), 3: lambda reply: [reply, reply]}
    grid = Grid(clients, changes=changes, num_clients=FEWER)
    after = start(strategy, grid, rounds=2)
    assert grid.damaged == 4
    metrics = strategy.train_metrics[2]
    assert (metrics["rejected-duplicate"], metrics["rejected-not-asked"]) == (1, 1)
    missing = {2: lambda reply: None if silent.server_round == 2 else reply}
    assert bits(after) == bits(start(silent, Grid(clients, changes=missing, num_clients=FEWER), 2))


@pytest.mark.parametrize(("name", "exchange"), EXCHANGES)
def test_damaged_replies_to_other_messages_do_not_end_the_run(name, exchange):
    """Four clients' answers are damaged, and one evaluation has an impossible accuracy."""
    make, clients = STRATEGIES[name]
    evaluates = exchange == "evaluate"
    damage = OTHER_DAMAGE | ({5: with_metrics(accuracy=1.1)} if evaluates else {})
    grid = Grid(clients, changes=damage, changed_kind=exchange)
    strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=6, train_metrics_aggr_fn=largest)
    start(strategy, grid, rounds=2)
    assert grid.damaged == 2 * len(damage)
    newest = max(strategy.train_metrics)
    assert newest == (1 if CONTRACTS[name].once else 2)
    assert strategy.train_metrics[newest]["replies-accepted"] == 6
    assert strategy.train_metrics[1]["largest"] > 0
    assert "train-loss" not in strategy.train_metrics[1]
    assert sorted(strategy.client_evaluations) == ([0] if evaluates else list(range(6)))
    evaluated = strategy.evaluate_metrics[2]
    assert (evaluated["replies-rejected"]) == (5 if evaluates else 0)
    if evaluates:
        counted = {k: v for k, v in evaluated.items() if k.startswith("rejected-")}
        expected = {"rejected-error": 1, "rejected-metrics": 2, "rejected-non-finite": 2}
        assert counted == expected


def largest(contents: list[RecordDict], _: str) -> MetricRecord:
    """A user's own aggregation of metrics."""
    return MetricRecord({"largest": max(float(c["metrics"]["train-loss"]) for c in contents)})


def test_a_round_in_which_all_fail_leaves_the_model_and_says_so(sender, caplog):
    make, clients = sender
    strategy = make(min_available_nodes=3)
    changes = dict(enumerate([failed, lost, DAMAGED_ARRAYS["NaN"][0]]))
    with caplog.at_level(WARNING, "flwr"):
        after = start_in_vain(strategy, Grid(clients, changes=changes, num_clients=3))
    assert bits(after) == bits(untouched(make))
    assert strategy.train_metrics[1]["replies-accepted"] == 0
    assert any("the model stays as it was" in record.getMessage() for record in caplog.records)
    few = make(min_available_nodes=FEWER, min_completed=2)  # and one good reply is not enough
    after = start(few, Grid(clients, changes=changes, num_clients=FEWER))
    assert bits(after) == bits(untouched(make))
    assert few.train_metrics[1]["replies-accepted"] == 1


def test_state_saved_and_restored_mid_run_gives_the_same_bits(repeating):
    """Through JSON and copies of arrays, into a new strategy, on a grid with other node ids.

    What the first strategy does later does not change what was saved, and it can begin anew.
    """
    make, clients = repeating
    options = {
        "fraction_train": 0.5, "min_train_nodes": 3, "seed": 3,
        "fraction_evaluate": 0.5, "min_evaluate_nodes": 3,
    }  # fmt: skip
    straight, states = make(**options), []

    def after_two(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 2:
            states.append((straight.state_dict(), saved(straight.state_dict()), arrays))
        return MetricRecord()

    expected = start(straight, Grid(clients), rounds=3, evaluate_fn=after_two)
    ((state, kept, halfway),) = states
    assert saved(state) == kept

    second = make(**options)
    second.load_state_dict(restored(kept))
    grid = Grid(clients, node_ids=[90, 12, 55, 7, 31, 68], order=2)
    result = second.start(grid, halfway, num_rounds=3, evaluate_fn=round_number)
    assert bits(arrays_of(result.arrays)) == bits(expected)
    assert sorted(result.evaluate_metrics_serverapp) == [2, 3]
    for name in ("train_metrics", "evaluate_metrics"):
        assert list(getattr(result, f"{name}_clientapp")) == [3]
        assert dict(getattr(second, name)[3]) == dict(getattr(straight, name)[3])
    ends = [without_random_names(strategy.state_dict()) for strategy in (second, straight)]
    assert saved(ends[0]) == saved(ends[1])
    anew = start(straight, Grid(clients), rounds=2)
    assert bits(anew) == bits(arrays_of(halfway))
    assert sorted(straight.train_metrics) == [1, 2]


def round_number(server_round: int, _: ArrayRecord) -> MetricRecord:
    return MetricRecord({"round": server_round})


def test_a_run_with_checkpoints_that_crashed_goes_on_to_the_same_bits(repeating, tmp_path):
    """The grid fails in round 2 at training, then at evaluation, with all clients.

    Each time another process makes the same call again, on other node ids.
    """
    make, clients = repeating
    options = {"fraction_train": 1.0, "fraction_evaluate": 0.5, "min_available_nodes": FEWER}
    initial = ArrayRecord(dict(network().state_dict()))

    def run(grid: Grid, folder: Path) -> Any:
        return make(**options).start(
            grid, initial, num_rounds=2, evaluate_fn=round_number, checkpoint=folder
        )

    whole = Grid(clients, num_clients=FEWER)
    straight = run(whole, tmp_path / "straight")
    for stage in ("train", "evaluate"):
        failing = Grid(clients, num_clients=FEWER, on_send=failing_in_round_2(stage))
        with pytest.raises(ConnectionError):
            run(failing, tmp_path / "crashed")
    grid = Grid(clients, node_ids=[90, 12, 55, 7], order=2, num_clients=FEWER)
    again = run(grid, tmp_path / "crashed")
    assert 0 < len(grid.trained) < len(whole.trained)  # of round 2 only
    assert bits(arrays_of(again.arrays)) == bits(arrays_of(straight.arrays))
    assert list(again.evaluate_metrics_serverapp) == [0, 1, 2]
    for history in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        metrics, expected = getattr(again, history), getattr(straight, history)
        assert {k: dict(v) for k, v in metrics.items()} == {k: dict(v) for k, v in expected.items()}
    grid = Grid(clients, num_clients=FEWER)
    over = run(grid, tmp_path / "crashed")  # which is finished
    assert grid.trained == []
    assert over.train_metrics_clientapp.keys() == again.train_metrics_clientapp.keys()


def failing_in_round_2(stage: str) -> Callable[[list[Message]], None]:
    def fail(messages: list[Message]) -> None:
        for message in messages:
            rounds = [c.get("server-round") for c in message.content.config_records.values()]
            if message.metadata.message_type == stage and 2 in rounds:
                raise ConnectionError

    return fail


def saved(state: dict[str, Any]) -> tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """As a file would hold it: JSON, and arrays by name."""
    arrays = {k: v for k, v in state.items() if isinstance(v, np.ndarray)}
    plain = json.dumps({k: v for k, v in state.items() if k not in arrays})
    return plain, {k: (str(a.dtype), a.shape, a.tobytes()) for k, a in arrays.items()}


def restored(
    file: tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]],
) -> dict[str, Any]:
    plain, arrays = file
    return json.loads(plain) | {
        k: np.frombuffer(data, dtype).reshape(shape) for k, (dtype, shape, data) in arrays.items()
    }


def test_a_state_of_another_strategy_or_seed_is_refused(method):
    make, _ = method
    state = make(seed=1).state_dict()
    with pytest.raises(ValueError, match="expected seed = 2, got 1"):
        make(seed=2).load_state_dict(state)
    settings = state["settings"] | {"strategy": "Other"}
    with pytest.raises(ValueError, match=r"expected strategy = .*, got Other"):
        make(seed=1).load_state_dict(state | {"settings": settings})
    with pytest.raises(ValueError, match=r"expected fraction_train = .*, got 0.125; it is of a st"):
        make(seed=1).load_state_dict(make(seed=1, fraction_train=0.125).state_dict())
    with pytest.raises(ValueError, match=r"state: expected .*, got"):
        make(seed=1).load_state_dict({"seed": 1})


def test_every_argument_and_hook_is_described_and_the_paper_cited(method):
    make, _ = method
    kind = type(make())
    text = "\n".join(base.__doc__ or "" for base in kind.__mro__)
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in kind.options():
            assert kind.options()[name].meaning, name
            continue
        shown = f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name
        described = re.search(rf"^ *(.*, )?{re.escape(shown)}(,.*)?( :.*)?$", text, re.M)
        assert described, f"{kind.__name__}: {shown} is not described"
    cited = kind.__doc__ + sys.modules[kind.__module__].__doc__
    assert re.search(r"[A-Z]\w+ et al\.", cited)
    for hook in ("state_dict", "load_state_dict", "aggregate_train", "configure_train"):
        assert getattr(kind, hook).__doc__, hook


def test_every_strategy_is_listed():
    import fedntk.strategies

    exported = (getattr(fedntk.strategies, name) for name in fedntk.strategies.__all__)
    classes = {c for c in exported if isinstance(c, type) and issubclass(c, Strategy)}
    bases = {c for c in classes if inspect.isabstract(c)} | {
        BaseStrategy, GossipStrategy, KeepingStrategy, PersonalStrategy, ResendingStrategy,
    }  # fmt: skip
    assert {c.__name__ for c in classes - bases} == {
        type(make()).__name__ for make, _ in STRATEGIES.values()
    }
