"""SCAFFOLD against algorithm 1 on least squares, where fixed points are known, and under attack."""

import numpy as np
import pytest

from fedntk.clients import LocalSGD, SCAFFOLDClient, SGDClient
from fedntk.strategies import SCAFFOLD, Sampling, SeededFedAvg
from fedntk.strategies.core.strategy import round_of

from .federation import (
    SIZES,
    SLOPES,
    Contract,
    Grid,
    app,
    as_record,
    assert_near,
    bits,
    damaged,
    descend,
    in_rounds,
    initial_bits,
    lost,
    network,
    run_as_if_lost,
    scalar,
    start,
)

ALL = {"fraction_evaluate": 0.0}
CLIENTS = app(SCAFFOLDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
PLAIN = app(SGDClient, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
CONTRACT = {"SCAFFOLD": Contract(SCAFFOLD, CLIENTS)}


def control_of(strategy):
    return strategy.control(round_of(strategy, 99, "train", strategy.global_arrays, {}))


def test_scaffold_ends_in_the_pooled_optimum():
    """Three clients of 2, 2 and 6 examples, two a round: (2 + 4 + 9) / (2 + 8 + 13.5) = 0.638.

    Sums over the round's clients alone would leave c apart from the mean of the c_i for ever.
    """
    sampling = {"fraction_train": 0.1, "min_train_nodes": 2, "min_available_nodes": 3, **ALL}
    strategy = SCAFFOLD(server_learning_rate=1.5, **sampling)
    clients = scalar(SCAFFOLDClient, sgd=LocalSGD(learning_rate=0.05, epochs=4, batch_size=10))
    assert descend(strategy, clients, 60) == pytest.approx(15 / 23.5, rel=1e-10)
    assert control_of(strategy) == pytest.approx([0.0], abs=1e-10)  # c is the pooled gradient there


@pytest.mark.parametrize("option", ["I", "II"])
def test_algorithm_1_by_hand(option):
    """Means are weighted by examples; in rounds 2 and 4 the reply of the second client is lost."""
    local_rate, steps, global_rate = 0.1, 3, 0.7
    x, c, c_k = 0.3, 0.0, np.zeros(3)
    strategy = SCAFFOLD(server_learning_rate=global_rate, **ALL)
    clients = scalar(
        SCAFFOLDClient,
        option=option,
        sgd=LocalSGD(learning_rate=local_rate, epochs=steps, batch_size=10),
    )
    changes = {1: in_rounds(strategy, [2, 4], lost)}
    weight = descend(strategy, clients, 5, first=x, changes=changes)
    for number in range(1, 6):
        chosen, moved, new = [0, 2] if number in (2, 4) else [0, 1, 2], [], c_k.copy()
        for i in chosen:
            y, slope = x, SLOPES[i]
            for _ in range(steps):
                y -= local_rate * (slope * (slope * y - 1) - c_k[i] + c)
            at_x, by_steps = slope * (slope * x - 1), c_k[i] - c + (x - y) / (steps * local_rate)
            new[i] = at_x if option == "I" else by_steps
            moved.append(y - x)
        x += global_rate * np.average(moved, weights=[SIZES[i] for i in chosen])
        c_k = new
        c = np.average(c_k, weights=SIZES)
    numbers = [weight, *control_of(strategy), *(float(strategy.controls[i][0]) for i in range(3))]
    assert numbers == pytest.approx([x, c, *c_k], rel=1e-12)


def test_clients_not_heard_of_count_with_zero_and_those_held_out_not():
    """c = (|S| / N) mean over S of (c_i+ - 0); at w = 0 these are a (a w - 1) = -a."""
    for options, silent, control in (
        ({}, (1, 2), -1 / 3),
        ({"sampling": Sampling(held_out=[2])}, (), -3 / 2),
    ):
        strategy = SCAFFOLD(min_completed=1, **options, **ALL)
        changes = dict.fromkeys(silent, lost)
        descend(strategy, scalar(SCAFFOLDClient), 1, changes=changes)
        assert control_of(strategy) == pytest.approx([control])


def test_the_first_round_is_fedavgs_and_other_server_rates_step_only_parameters():
    """All c_i are zero then: with eta_g = 1 bit for bit. Corrections are of float32."""
    mean = start(SCAFFOLD(**ALL), grid := Grid(CLIENTS, order=3))
    assert bits(mean) == bits(start(SeededFedAvg(**ALL), Grid(PLAIN)))
    wanted = dict(mean)
    for name, parameter in network().named_parameters():
        first = parameter.detach().numpy()
        wanted[name] = first + 2 * (mean[name] - first)
        if name != "0.bias":  # BatchNorm takes it off: it moves by rounding, or not at all
            assert (mean[name] != first).any()
            assert (wanted[name] != mean[name]).any()
    stepped = start(SCAFFOLD(server_learning_rate=2.0, **ALL), Grid(CLIENTS))
    assert_near(stepped, wanted, 1e-7, 1e-6)
    assert [array.dtype for array in stepped.values()] == [array.dtype for array in mean.values()]
    sent = [m.content["corrections"] for way, m in grid.seen if way == "down"]
    assert {array.dtype for record in sent for array in record.values()} == {"float32"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged(0, lambda a: np.full_like(a, np.nan), "controls"), "non-finite"),
        (damaged(0, lambda a: np.full_like(a, 1e5), "controls"), "scale"),
        (damaged(0, lambda a: a.T, "controls"), "shape"),
        (damaged(0, lambda a: a + 1e4), "scale"),  # a good control beside weights far off
    ],
)
def test_a_reply_with_a_bad_control_is_as_if_it_were_lost(change, reason):
    attacked, without = run_as_if_lost(lambda: SCAFFOLD(**ALL), CLIENTS, change, reason, rounds=2)
    assert sorted(attacked.controls) == [0, 1, 3, 4, 5]
    for partition, control in attacked.controls.items():
        assert control.tobytes() == without.controls[partition].tobytes()


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_weights_that_overflow_in_the_step_leave_the_model_and_too_few_replies_the_controls():
    strategy = SCAFFOLD(server_learning_rate=1e30, **ALL)
    change = damaged(0, lambda a: np.full_like(a, 9e11))
    after = start(strategy, Grid(CLIENTS, changes=dict.fromkeys(range(6), change)))
    assert bits(after) == initial_bits()
    assert not strategy.controls
    strategy = SCAFFOLD(min_completed=4, **ALL)
    start(strategy, Grid(CLIENTS, changes=dict.fromkeys(range(3), lost)))
    assert not strategy.controls


def test_a_state_keeps_controls_by_placeholder_ids_and_refuses_another_networks():
    """Nodes 1 and 4 claim partition 0: node 4 is client -5."""
    grid, again = Grid(CLIENTS), SCAFFOLD(**ALL)
    grid.contexts[4].node_config["partition-id"] = 0
    start(strategy := SCAFFOLD(**ALL), grid)
    again.load_state_dict(strategy.state_dict())
    assert sorted(again.controls) == [-5, 0, 1, 2, 4, 5]
    for client, control in strategy.controls.items():
        assert again.controls[client].tobytes() == control.tobytes()
    with pytest.raises(ValueError, match="the model has 1 numbers, the controls of 99 are of"):
        again.start(grid, as_record({"weight": np.zeros((1, 1))}), num_rounds=3)
