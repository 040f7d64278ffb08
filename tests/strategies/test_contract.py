"""What every strategy must do, whatever its method."""

import contextlib
import importlib
import inspect
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

import fedntk.strategies
from fedntk.clients import SGDClient
from fedntk.strategies import NoUsableReply, Sampling

from . import federation
from .federation import (
    DAMAGED_ARRAYS,
    DAMAGED_REPLIES,
    Grid,
    app,
    arrays_of,
    as_record,
    asked_first,
    bits,
    examples,
    failed,
    first_model,
    in_rounds,
    lost,
    run_damaged,
    start,
    with_metrics,
)

FEWER = 4  # clients, where so many show it
OPTIONS = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_available_nodes": 6}
OPTIONS |= {"min_completed": 1}  # one good reply among damaged ones is enough
MODULES = [
    importlib.import_module(f"{__package__}.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if "\nCONTRACT = " in path.read_text()
]
CONTRACTS = {n: c for module in MODULES for n, c in module.CONTRACT.items()}
STRATEGIES = {
    name: (lambda make=case.strategy, **o: make(**OPTIONS | o), case.clients)
    for name, case in CONTRACTS.items()
}
# the last case of each class, which has most to it, of those of one kind
RICHEST = {(type(case.strategy()), case[2:]): name for name, case in CONTRACTS.items()}.values()


def untouched(make):
    """What the strategy's run begins with: the network's arrays, and its own if it has any."""
    return start(make(), Grid(app(SGDClient)), rounds=0)


def richest(condition):
    """Parameter `name`: the richest cases that fulfil a condition."""
    names = sorted(name for name in RICHEST if condition(CONTRACTS[name]))
    return pytest.mark.parametrize("name", names)


# ---------------------------------------------------------------------------- rounds


def run(name, folder, *, ask=False, **options):
    """Strategy, grid, result and evaluated arrays of two rounds; client 2 fails in the first."""
    make, clients = STRATEGIES[name]
    strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=FEWER, min_available_nodes=FEWER)
    changes = {2: in_rounds(strategy, [1], failed)}
    grid = Grid(clients, num_clients=FEWER, changes=changes, **options)
    if ask:
        asked_first(strategy, grid)
    seen = []

    def evaluate(server_round, arrays):
        seen.append(arrays_of(arrays))
        return MetricRecord({"round": server_round})

    initial = ArrayRecord(dict(first_model(strategy).state_dict()))
    result = strategy.start(grid, initial, num_rounds=2, evaluate_fn=evaluate, checkpoint=folder)
    return strategy, grid, result, seen


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_a_run_learns_and_after_a_crash_goes_on_to_the_same_bits(name, tmp_path):
    """The run that crashes has other node ids and asks for partitions first; replies come in
    other orders. Its grid fails at the evaluation of round 2, and another process goes on.
    """
    case = CONTRACTS[name]
    strategy, grid, result, (first, once, last) = run(name, tmp_path / "straight")
    before = once if case.grows else first
    for arrays in (first, last):
        assert list(strategy.network_of(as_record(arrays))) == list(
            first_model(strategy).state_dict()
        )
    kinds = [[(n, a.dtype, a.shape) for n, a in arrays.items()] for arrays in (before, last)]
    assert kinds[1][: len(kinds[0]) if case.grows else None] == kinds[0]
    assert all(np.isfinite(array).all() for array in last.values())
    if case.personal:
        losses = [strategy.evaluate_metrics[number]["loss"] for number in (1, 2)]
    else:
        x, y = (torch.cat(parts) for parts in zip(*map(examples, range(FEWER)), strict=True))
        losses = [
            strategy.predictor(a, first_model(strategy)).evaluate(x, y).loss for a in (before, last)
        ]
    assert losses[1] < losses[0]
    assert np.isfinite(strategy.train_metrics[1 if case.once else 2]["train-loss"])
    metrics = strategy.evaluate_metrics[1]
    assert (metrics["replies-accepted"], metrics["num-examples"]) == (4, 5 + 6 + 7 + 8)
    assert 0 <= metrics["accuracy"] <= 1

    crash = {"node_ids": [90, 12, 55, 7], "order": 1, "ask": True}
    with pytest.raises(ConnectionError):
        run(name, tmp_path / "crashed", on_send=fail_at_evaluation_of_round_2, **crash)
    again, rest, resumed, _ = run(name, tmp_path / "crashed", node_ids=[7, 55, 90, 12], order=2)
    assert len(rest.trained) < len(grid.trained)  # of round 2 only
    assert bits(arrays_of(resumed.arrays)) == bits(arrays_of(result.arrays)) == bits(last)
    assert list(resumed.evaluate_metrics_serverapp) == [0, 1, 2]
    assert histories(resumed) == histories(result)
    assert frozen(again) == frozen(strategy)


def histories(result):
    """Metrics of clients by round."""
    both = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    return [{k: dict(v) for k, v in history.items()} for history in both]


def fail_at_evaluation_of_round_2(messages):
    for message in messages:
        rounds = [c.get("server-round") for c in message.content.config_records.values()]
        if message.metadata.message_type == "evaluate" and 2 in rounds:
            raise ConnectionError


@richest(lambda case: not case.once)
def test_state_saved_and_restored_mid_run_gives_the_same_bits(name):
    """What the first strategy does later does not change what was saved; it can begin anew."""
    make, clients = STRATEGIES[name]
    options = {
        "fraction_train": 0.5, "min_train_nodes": 3, "sampling": Sampling(seed=3),
        "fraction_evaluate": 0.5, "min_evaluate_nodes": 3,
    }  # fmt: skip
    straight, states = make(**options), []

    def after_one(server_round, arrays):
        if server_round == 1:
            states.append((straight.state_dict(), frozen(straight), arrays))

    expected = start(straight, whole := Grid(clients), rounds=2, evaluate_fn=after_one)
    ((state, saved, halfway),) = states
    second, ids = make(**options), [90, 12, 55, 7, 31, 68]
    second.load_state_dict(state)
    assert frozen(second) == saved
    result = second.start(grid := Grid(clients, node_ids=ids, order=2), halfway, num_rounds=2)
    assert bits(arrays_of(result.arrays)) == bits(expected)
    assert sorted(grid.trained) == sorted(whole.trained[len(whole.trained) // 2 :])
    assert len(set(grid.trained)) == 3
    assert dict(second.train_metrics[2]) == dict(straight.train_metrics[2])
    assert dict(second.evaluate_metrics[2]) == dict(straight.evaluate_metrics[2])
    anew = start(straight, Grid(clients), rounds=1)
    assert bits(anew) == bits(arrays_of(halfway))
    assert sorted(straight.train_metrics) == [1]


def frozen(strategy, *drawn):
    """Return the state, less what each run draws anew, its arrays as they are now."""
    drawn = {"run-key", "run_key", *drawn}
    state = {n: v for n, v in strategy.state_dict().items() if drawn.isdisjoint(n.split("."))}
    arrays = {n: v for n, v in state.items() if isinstance(v, np.ndarray)}
    plain = json.dumps({n: v for n, v in state.items() if n not in arrays})
    return {"plain": plain} | {n: (a.dtype.str, a.shape, a.tobytes()) for n, a in arrays.items()}


# ------------------------------------------------------------------ hostile replies


@richest(lambda case: case.sends_arrays)
def test_damaged_replies_leave_the_result_of_the_run_without_those_clients(name):
    """Clients 1 to 8 of ten reply with damaged arrays, each of another kind, and the others oddly:
    with a metric more or less, in another's name, and twice if one reply of theirs is expected.
    """
    make, clients = STRATEGIES[name]
    claim, bonus = with_metrics(partition_id=0, train_loss=None), with_metrics(bonus=1.0)
    twice = CONTRACTS[name].one_exchange
    others = {0: lambda reply: [bonus(reply), reply] if twice else bonus(reply), 9: claim}
    strategy = make(min_completed=2)
    attacked = run_damaged(strategy, clients, sorted(DAMAGED_ARRAYS), others)
    assert strategy.train_metrics[1].get("rejected-duplicate", 0) == twice
    silent = Grid(clients, changes=dict.fromkeys(range(1, 9), lost), num_clients=10)
    assert attacked == bits(start(make(), silent))
    assert (attacked == bits(untouched(make))) == CONTRACTS[name].needs_more


@richest(lambda _: True)
def test_damaged_replies_to_other_messages_do_not_end_the_run(name):
    """Four clients' answers are damaged, and one evaluation has an impossible accuracy."""
    make, clients = STRATEGIES[name]
    kinds = ["error", "no content", "NaN num-examples", "infinite num-examples"]
    damage = {k: DAMAGED_REPLIES[kind][0] for k, kind in enumerate(kinds, 1)}
    damage[5] = with_metrics(accuracy=1.1)
    grid = Grid(clients, changes=damage, changed_kind="evaluate query")
    strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=6, train_metrics_aggr_fn=largest)
    start(strategy, grid)
    assert grid.damaged >= (10 if CONTRACTS[name].sends_queries else 5)
    trained, evaluated = strategy.train_metrics[1], strategy.evaluate_metrics[1]
    assert trained["replies-accepted"] == 6
    assert trained["largest"] > 0
    assert "train-loss" not in trained
    assert sorted(strategy.client_evaluations) == [0]
    counted = {k: v for k, v in evaluated.items() if k.startswith("rejected")}
    assert evaluated["replies-rejected"] == 5
    assert counted == {"rejected-error": 1, "rejected-metrics": 2, "rejected-num-examples": 2}


NO_GOOD_REPLY = {
    "none comes": (lost, 0),
    "all are dropped": (with_metrics(num_examples=0), FEWER),
    "nobody is asked": (lost, None),
}


STAGES = [(name, "train") for name in sorted(RICHEST)]  # all evaluate alike, up to their logs
STAGES += [(name, "evaluate") for name in ("SeededFedAvg", "TCT, stage 2", "FedEnsemble of TCT")]


@pytest.mark.parametrize(("name", "stage"), STAGES)
@pytest.mark.parametrize("case", NO_GOOD_REPLY)
def test_a_stage_without_a_good_reply_has_its_counts_and_no_means(name, stage, case):
    """A stage that asks nobody has no metrics. Counts and Flower's result have one form."""
    (make, clients), (change, dropped) = STRATEGIES[name], NO_GOOD_REPLY[case]
    asked = {"fraction_train": 0.0, "fraction_evaluate": 0.0} | {
        f"fraction_{stage}": float(dropped is not None)
    }
    strategy = make(**asked, min_evaluate_nodes=FEWER, min_available_nodes=FEWER)
    changes = dict.fromkeys(range(FEWER), change)
    grid = Grid(clients, num_clients=FEWER, changes=changes, changed_kind=stage)
    initial = ArrayRecord(dict(first_model(strategy).state_dict()))
    results = []
    with contextlib.suppress(NoUsableReply):
        strategy.start(grid, initial, 1, should_stop=lambda _, result: results.append(result))
    metrics = getattr(strategy, f"{stage}_metrics").get(1)
    assert getattr(results[-1], f"{stage}_metrics_clientapp").get(1) == metrics
    counts = {"num-examples": 0, "replies-accepted": 0, "replies-rejected": dropped}
    if dropped:
        counts["rejected-num-examples"] = dropped
    assert (metrics is None) if dropped is None else (counts.items() <= metrics.items())
    assert not {"accuracy", "loss", "train-loss"} & {*(metrics or ())}


def largest(contents, _):
    return MetricRecord({"largest": max(float(c["metrics"]["train-loss"]) for c in contents)})


@richest(lambda case: case.sends_arrays)
def test_a_round_in_which_too_few_succeed_leaves_the_model(name):
    make, clients = STRATEGIES[name]
    strategy = make(min_available_nodes=FEWER, min_completed=2)
    changes = dict(enumerate([failed, lost, DAMAGED_ARRAYS["NaN"][0]]))
    after = start(strategy, Grid(clients, changes=changes, num_clients=FEWER))
    assert bits(after) == bits(untouched(make))
    assert strategy.train_metrics[1]["replies-accepted"] == 1


# --------------------------------------------------------------------------- classes


@richest(lambda _: True)
def test_a_state_of_another_strategy_or_seed_is_refused(name):
    make = partial(STRATEGIES[name][0], sampling=Sampling(seed=1))
    state = make().state_dict()
    other = state | {"settings": state["settings"] | {"strategy": "Other"}}
    for other_state, message in (
        (make(sampling=Sampling(seed=2)).state_dict(), r"expected sampling\.seed = 1, got 2"),
        (other, r"expected strategy = .*, got Other"),
        ({"sampling": Sampling(seed=1)}, r"state: expected .*, got"),
    ):
        with pytest.raises(ValueError, match=message):
            make().load_state_dict(other_state)


def test_every_strategy_is_listed():
    exported = (getattr(fedntk.strategies, name) for name in fedntk.strategies.__all__)
    classes = {c for c in exported if isinstance(c, type) and issubclass(c, Strategy)}
    names = {c.__name__ for c in classes if not inspect.isabstract(c)}
    assert names - {"ClosedFormStrategy", "PersonalStrategy"} == {
        type(make()).__name__ for make, _ in STRATEGIES.values()
    }


@pytest.mark.parametrize(
    "name", ["SeededFedAvg", "FromFlower", "SCAFFOLD", "DFedAvg", "DisPFL", "FedBE", "NTKFL"]
)
def test_what_no_client_trains_stays_to_the_bit(name, monkeypatch):
    """Also masks of infinity, with which training goes on, and whole numbers beyond 2^53."""
    plain = federation.network
    buffers = {
        "table": torch.randn(100, generator=torch.Generator().manual_seed(0)),
        "minus": torch.tensor([0.0, -torch.inf, -0.0, 0.1]),
        "nan": torch.tensor([torch.nan]),
        "hash": torch.tensor([2**53 + 1, 2**61 - 1, -(2**63)]),
        "mask": torch.tensor([True, False]),
        "rotary": torch.polar(torch.ones(5), torch.arange(5.0)),
        "empty": torch.zeros(0, 3),
    }

    def network(seed=0):
        model = plain(seed)
        for key, buffer in buffers.items():
            model.register_buffer(key, buffer.clone())
        return model

    monkeypatch.setattr(federation, "network", network)
    make, clients = STRATEGIES[name]
    strategy = make(min_available_nodes=FEWER, fraction_evaluate=1.0, min_evaluate_nodes=FEWER)
    before = {key: a.numpy() for key, a in first_model(strategy).state_dict().items()}
    after = start(strategy, Grid(clients, num_clients=FEWER), rounds=2)
    assert [metrics["replies-accepted"] for metrics in strategy.train_metrics.values()] == [
        FEWER
    ] * 2
    for key in buffers:
        copies = [array for full, array in after.items() if full == key or full.endswith(f".{key}")]
        assert {array.tobytes() for array in copies} == {before[key].tobytes()}, key
    trained = next(array for full, array in after.items() if full.endswith("3.weight"))
    assert (trained != before["3.weight"]).any()
