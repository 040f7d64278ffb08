"""SCAFFOLD against algorithm 1 on least squares, where fixed points are known, and under attack."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from fedntk.clients import SCAFFOLDClient, SGDClient, client_app
from fedntk.strategies import SCAFFOLD, SeededFedAvg

from .federation import (
    Change,
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    damaged,
    examples,
    initial_bits,
    lost,
    network,
    run_as_if_lost,
    start,
)

ALL = {"fraction_evaluate": 0.0}
OPTIONS = pytest.mark.parametrize("option", ["I", "II"])
CLIENTS = app(SCAFFOLDClient, learning_rate=0.1, batch_size=4)
CONTRACT = {"SCAFFOLD": Contract(SCAFFOLD, CLIENTS)}

# Client i's examples are x = a_i with target 1: F_i(w) = (a_i w - 1)^2 / 2, of curvature a_i^2 and
# minimum 1 / a_i. That of sum of n_i F_i is w* = sum(n_i a_i) / sum(n_i a_i^2).
SLOPES, COUNTS = (1.0, 2.0, 1.5), (2, 2, 6)


def scalar(kind: type[SGDClient], **options: Any) -> ClientApp:
    """Clients of one weight in float64, with full batches."""

    def client_fn(context: Context) -> NumPyClient:
        partition = int(context.node_config["partition-id"])
        x = torch.full((COUNTS[partition], 1), SLOPES[partition], dtype=torch.float64)
        model = nn.Linear(1, 1, bias=False).double()
        own = kind(
            model, x, torch.zeros(len(x), dtype=torch.int64), loss="mse", batch_size=10, **options
        )
        own.targets = own.targets.double()
        return own

    return client_app(client_fn)


def descend(
    strategy: SeededFedAvg, clients: ClientApp, rounds: int, count: int = 2, first: float = 0.0
) -> float:
    """Weight after some rounds of the first `count` clients."""
    initial = ArrayRecord({"weight": Array(np.array([[first]]))})
    result = strategy.start(Grid(clients, num_clients=count), initial, num_rounds=rounds)
    return float(result.arrays["weight"].numpy()[0, 0])


def optimum(count: int) -> float:
    a, n = np.array(SLOPES[:count]), np.array(COUNTS[:count])
    return float((n * a).sum() / (n * a**2).sum())


@OPTIONS
def test_fedavg_ends_beside_the_pooled_optimum_and_scaffold_in_it(option):
    """Two clients of slopes 1 and 2, equal in size, K = 5 full-batch steps of eta = 0.1.

    A client's steps multiply its distance to its own minimum by (1 - eta a^2)^5: r_1 = 0.9^5 =
    0.59049 and r_2 = 0.6^5 = 0.07776. FedAvg stands still where (1 - r_1)(w - 1) +
    (1 - r_2)(w - 1/2) = 0: at w = (0.40951 + 0.46112) / 1.33175 = 0.65375. The pooled optimum is
    (1 + 2) / (1 + 4) = 0.6. Float64, and 60 rounds contract by far less than 1e-12.
    """
    local = {"learning_rate": 0.1, "local_epochs": 5}
    biased = descend(SeededFedAvg(**ALL), scalar(SGDClient, **local), 60)
    assert biased == pytest.approx((0.40951 + 0.46112) / 1.33175, rel=1e-12)
    exact = descend(SCAFFOLD(**ALL), scalar(SCAFFOLDClient, option=option, **local), 60)
    assert exact == pytest.approx(0.6, rel=1e-12)


@OPTIONS
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
def test_partial_participation_and_unequal_clients_end_in_the_pooled_optimum_too(option, rate):
    """Three clients of 2, 2 and 6 examples, two a round: (2 + 4 + 9) / (2 + 8 + 13.5) = 0.638.

    Sums over the round's clients alone would leave c apart from the mean of the c_i for ever. At
    the smallest rate the distance halves in three rounds: 2^-67 after 200.
    """
    strategy = SCAFFOLD(
        fraction_train=0.1, min_train_nodes=2, min_available_nodes=3, server_learning_rate=rate,
        **ALL,
    )  # fmt: skip
    clients = scalar(SCAFFOLDClient, option=option, learning_rate=0.05, local_epochs=4)
    assert descend(strategy, clients, 200, count=3) == pytest.approx(optimum(3), rel=1e-10)
    assert optimum(3) == pytest.approx(15 / 23.5)
    assert strategy.control() == pytest.approx([0.0], abs=1e-10)  # c is the pooled gradient there


@pytest.mark.parametrize("rate", [0.5, 1.0])
@OPTIONS
def test_one_local_step_is_gradient_descent_on_the_pooled_loss(option, rate):
    """K = 1: corrections cancel in the mean from the start, w <- w - eta_g eta_l sum p_i F_i'."""
    strategy = SCAFFOLD(server_learning_rate=rate, **ALL)
    clients = scalar(SCAFFOLDClient, option=option, learning_rate=0.1)
    a, p = np.array(SLOPES), np.array(COUNTS) / sum(COUNTS)
    weight = 2.0
    for _ in range(4):
        weight -= rate * 0.1 * float((p * a * (a * weight - 1)).sum())
    assert descend(strategy, clients, 4, count=3, first=2.0) == pytest.approx(weight, rel=1e-13)


@OPTIONS
def test_algorithm_1_by_hand(option):
    """Full and then partial participation, equal clients, the paper's recursion for c: 1e-12.

    Slopes 1 and 2, two examples each; in the rounds 2 and 4 the reply of the second is lost.
    """
    local_rate, steps, global_rate = 0.1, 3, 0.7
    x, c, own = 0.3, 0.0, [0.0, 0.0]
    strategy = SCAFFOLD(server_learning_rate=global_rate, **ALL)
    clients = scalar(SCAFFOLDClient, option=option, learning_rate=local_rate, local_epochs=steps)
    changes = {1: lambda reply: reply if strategy.server_round % 2 else None}
    grid = Grid(clients, num_clients=2, changes=changes)
    initial = ArrayRecord({"weight": Array(np.array([[x]]))})
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=5)
    for number in range(1, 6):
        moved, changed = [], []
        for i in range(1 if number in (2, 4) else 2):
            y, slope = x, SLOPES[i]
            for _ in range(steps):
                y -= local_rate * (slope * (slope * y - 1) - own[i] + c)
            new = (
                slope * (slope * x - 1)
                if option == "I"
                else own[i] - c + (x - y) / (steps * local_rate)
            )
            moved.append(y - x)
            changed.append(new - own[i])
            own[i] = new
        x += global_rate * float(np.mean(moved))
        c += len(changed) / 2 * float(np.mean(changed))
    assert float(result.arrays["weight"].numpy()[0, 0]) == pytest.approx(x, rel=1e-12)
    assert strategy.control() == pytest.approx([c], rel=1e-12)
    for i in range(2):
        assert strategy.controls[i] == pytest.approx([own[i]], rel=1e-12)


def test_clients_not_heard_of_count_with_controls_of_zero():
    """One of three answers: c = c_1 / 3, as (|S| / N) mean over S of (c_i+ - 0)."""
    strategy = SCAFFOLD(**ALL)
    grid = Grid(scalar(SCAFFOLDClient), num_clients=3, changes={1: lost, 2: lost})
    initial = ArrayRecord({"weight": Array(np.array([[0.0]]))})
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=1)
    assert strategy.controls[0] == pytest.approx([-1.0])  # a (a w - 1) at w = 0
    assert strategy.control() == pytest.approx([-1 / 3])


def test_clients_held_out_are_not_counted():
    strategy = SCAFFOLD(held_out=[2], **ALL)
    descend(strategy, scalar(SCAFFOLDClient), 1, count=3)
    assert strategy.control() == pytest.approx([(-1 - 2) / 2])


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_c_is_the_mean_of_all_controls_after_rounds_of_all(rounds):
    """Weighted by examples 5 ... 10; sums in float64 of float32 numbers: 1e-12."""
    strategy = SCAFFOLD(**ALL)
    start(strategy, Grid(CLIENTS), rounds=rounds)
    assert sorted(strategy.controls) == list(range(6))
    sizes = [len(examples(p)[1]) for p in range(6)]
    rows = np.stack([strategy.controls[p] for p in range(6)]).astype(np.float64)
    np.testing.assert_allclose(
        strategy.control(), np.average(rows, axis=0, weights=sizes), rtol=1e-9, atol=1e-12
    )
    assert np.abs(strategy.control()).max() > 0.01


def central(rounds: int) -> dict[str, NDArray[Any]]:
    """SGD of client 0 alone, round by round."""
    arrays = [v.numpy() for v in network().state_dict().values()]
    for number in range(1, rounds + 1):
        own = SGDClient(network(), *examples(0), learning_rate=0.1, batch_size=4, seed=(0, 0))
        arrays, _, _ = own.fit(arrays, {"server-round": number})
    return dict(zip(network().state_dict(), arrays, strict=True))


@OPTIONS
def test_one_client_is_central_sgd_bit_for_bit(option):
    """c_i = c, so that there is nothing to correct."""
    strategy = SCAFFOLD(min_available_nodes=1, min_train_nodes=1, **ALL)
    clients = app(SCAFFOLDClient, learning_rate=0.1, batch_size=4, option=option)
    assert bits(start(strategy, Grid(clients, num_clients=1), rounds=3)) == bits(central(3))


def alike(kind: type[SGDClient], **options: Any) -> ClientApp:
    def client_fn(context: Context) -> NumPyClient:
        return kind(network(), *examples(0), learning_rate=0.1, batch_size=4, **options)

    return client_app(client_fn)


@OPTIONS
def test_identical_clients_are_fedavg(option):
    """c = c_i but for the rounding of shares of 1/6 in float64, 1e-16 of a gradient of order 1."""
    ours = start(SCAFFOLD(**ALL), Grid(alike(SCAFFOLDClient, option=option)), rounds=3)
    theirs = start(SeededFedAvg(**ALL), Grid(alike(SGDClient)), rounds=3)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_first_round_is_that_of_fedavg_bit_for_bit():
    """All controls are zero, and eta_g is 1."""
    ours = start(SCAFFOLD(**ALL), Grid(CLIENTS))
    theirs = start(SeededFedAvg(**ALL), Grid(app(SGDClient, learning_rate=0.1, batch_size=4)))
    assert bits(ours) == bits(theirs)


def test_server_learning_rate_steps_parameters_and_leaves_statistics_and_counters():
    first = {name: v.numpy() for name, v in network().state_dict().items()}
    mean = start(SCAFFOLD(**ALL), Grid(CLIENTS))
    twice = start(SCAFFOLD(server_learning_rate=2.0, **ALL), Grid(CLIENTS))
    trained = dict(network().named_parameters())
    for name, array in twice.items():
        assert array.dtype == first[name].dtype
        if name in trained:
            wanted = first[name] + 2 * (mean[name] - first[name])
            np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-7)
            assert not np.array_equal(array, mean[name])
        else:
            np.testing.assert_array_equal(array, mean[name])


def test_each_client_is_sent_the_model_and_its_own_correction():
    strategy = SCAFFOLD(**ALL)
    seen: dict[int, dict[str, NDArray[Any]]] = {}

    def note(messages: list[Message]) -> None:
        if strategy.server_round < 2:
            return
        for message in messages:
            records = message.content.array_records
            client = strategy.registry.client(message.metadata.dst_node_id)
            assert list(records) == ["arrays", "corrections"]
            assert list(records["arrays"]) == names
            seen[client] = arrays_of(records["corrections"])
            kept[client] = strategy.controls[client].copy()

    kept: dict[int, NDArray[Any]] = {}
    names = list(network().state_dict())
    start(strategy, Grid(CLIENTS, order=3, on_send=note), rounds=2)
    floating = {n: v.numpy() for n, v in network().state_dict().items() if v.is_floating_point()}
    sizes = np.array([len(examples(p)[1]) for p in range(6)])
    control = np.average([kept[p].astype(np.float64) for p in range(6)], axis=0, weights=sizes)
    assert sorted(seen) == list(range(6))
    for partition, arrays in seen.items():
        assert list(arrays) == list(floating)
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        np.testing.assert_allclose(flat, control - kept[partition], rtol=1e-5, atol=1e-7)
        for name, array in floating.items():
            assert (arrays[name].shape, arrays[name].dtype) == (array.shape, array.dtype)


# ------------------------------------------------------------------ hostile controls


def bad_control(position: int, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return damaged(position, change, record="controls")


BAD = {
    "NaN": (bad_control(0, lambda a: np.full_like(a, np.nan)), "non-finite"),
    "infinity": (bad_control(-1, lambda a: np.full_like(a, np.inf)), "non-finite"),
    "huge": (bad_control(0, lambda a: np.full_like(a, -3e38)), "scale"),
    "far beyond the others'": (bad_control(0, lambda a: np.full_like(a, 1e5)), "scale"),
    "shape": (bad_control(0, lambda a: a.T), "shape"),
    "dtype": (bad_control(0, lambda a: a.astype(np.float64)), "dtype"),
    "beside weights far beyond the others'": (damaged(0, lambda a: a + 1e4), "scale"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_reply_with_a_bad_control_is_as_if_it_were_lost(kind):
    attacked, without = run_as_if_lost(lambda: SCAFFOLD(**ALL), CLIENTS, *BAD[kind], rounds=2)
    assert sorted(attacked.controls) == [0, 1, 3, 4, 5]
    for partition, control in attacked.controls.items():
        assert control.tobytes() == without.controls[partition].tobytes()


def test_the_largest_controls_that_pass_overflow_nothing(recwarn):
    """Of both signs, in all clients but one, which goes on training."""
    changes = {
        p: bad_control(0, lambda a, s=(-1) ** p: np.full_like(a, s * 9e11)) for p in range(1, 6)
    }
    strategy = SCAFFOLD(**ALL)
    after = start(strategy, Grid(CLIENTS, changes=changes), rounds=2)
    assert all(np.isfinite(array).all() for array in after.values())
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    assert not [w for w in recwarn if "overflow" in str(w.message)]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_weights_that_overflow_in_the_step_leave_the_model():
    strategy = SCAFFOLD(server_learning_rate=1e30, **ALL)
    change = damaged(0, lambda a: np.full_like(a, 9e11))
    after = start(strategy, Grid(CLIENTS, changes=dict.fromkeys(range(6), change)))
    assert bits(after) == initial_bits()
    assert not strategy.controls


def test_too_few_replies_leave_the_controls():
    strategy = SCAFFOLD(min_completed=4, **ALL)
    start(strategy, Grid(CLIENTS, changes=dict.fromkeys(range(3), lost)), rounds=2)
    assert not strategy.controls


def test_a_lost_reply_leaves_the_clients_control_as_it_was():
    strategy = SCAFFOLD(**ALL)
    kept: list[bytes] = []

    def lose_second(reply: Message) -> Message | None:
        if strategy.server_round == 1:
            return reply
        kept.append(strategy.controls[2].tobytes())
        return None

    start(strategy, Grid(CLIENTS, changes={2: lose_second}), rounds=2)
    assert kept == [strategy.controls[2].tobytes()]


# ------------------------------------------------------------------ arguments and state


def test_a_client_with_a_placeholder_id_keeps_its_control_when_a_run_goes_on():
    """Nodes 1 and 4 claim partition 0: node 4 is client -5."""

    def grid() -> Grid:
        made = Grid(CLIENTS)
        made.contexts[4].node_config["partition-id"] = 0
        return made

    straight, first, again = SCAFFOLD(**ALL), SCAFFOLD(**ALL), SCAFFOLD(**ALL)
    expected = start(straight, grid(), rounds=2)
    halfway = start(first, grid())
    again.load_state_dict(first.state_dict())
    result = again.start(grid(), as_record(halfway), num_rounds=2)
    assert sorted(again.controls) == [-5, 0, 1, 2, 4, 5]
    assert bits(arrays_of(result.arrays)) == bits(expected)


def test_controls_of_mixed_precision_keep_their_bits():
    """float16 and float32 fit into float32, so a saved state is exact."""
    strategy = SCAFFOLD(**ALL)
    narrow = np.array([1.0, 1 / 3], np.float16)
    wide = np.array([1 / 3, 1e30], np.float32)
    strategy.controls = {4: np.concatenate([narrow, wide])}
    strategy.examples = {4: 7}
    again = SCAFFOLD(**ALL)
    again.load_state_dict(strategy.state_dict())
    assert again.controls[4].dtype == np.float32
    assert again.controls[4].tobytes() == strategy.controls[4].tobytes()
    assert again.examples == {4: 7}


def test_controls_of_another_model_are_refused():
    strategy = SCAFFOLD(**ALL)
    start(strategy, Grid(CLIENTS))
    again = SCAFFOLD(**ALL)
    again.load_state_dict(strategy.state_dict())
    arrays = ArrayRecord({"weight": Array(np.zeros((1, 1)))})
    with pytest.raises(ValueError, match="the model has 1 numbers, the controls of 99 are of"):
        again.start(grid=Grid(CLIENTS), initial_arrays=arrays, num_rounds=2)


def test_a_state_before_any_reply_is_a_state():
    strategy = SCAFFOLD(**ALL)
    strategy.load_state_dict(SCAFFOLD(**ALL).state_dict())
    assert strategy.controls == {}
    expected = start(SCAFFOLD(**ALL), Grid(CLIENTS))
    assert bits(start(strategy, Grid(CLIENTS))) == bits(expected)
