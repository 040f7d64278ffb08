"""Inputs centred by their mean over all clients, against clients whose inputs were centred before.

All is float64, so that the sums' order may differ: bounds are 1e-9.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from fedntk.clients import NTKFLClient, SCAFFOLDClient, SGDClient, client_app
from fedntk.ntk import CentredInputs, jacobian
from fedntk.ntk.features import CENTRE
from fedntk.simulations import Config
from fedntk.simulations import run as simulate
from fedntk.simulations.deploy.simulated_trust import projected
from fedntk.simulations.engine.building import load_setup
from fedntk.strategies import (
    NTKFL,
    SCAFFOLD,
    BaseStrategy,
    NoUsableReply,
    SeededFedAvg,
)
from fedntk.strategies.core.array_archive import load_tensors

from .federation import (
    NUM_CLIENTS,
    Change,
    Grid,
    bits,
    examples,
    failed,
    renamed,
    start,
    with_arrays,
    with_metrics,
)

BOUND = 1e-9
NTK = {"learning_rate": 0.1, "steps": [5, 20, 50]}
SGD = {"learning_rate": 0.1, "batch_size": 4}
METHODS: dict[str, tuple[Callable[..., BaseStrategy], Callable[..., NumPyClient], dict[str, Any]]]
METHODS = {
    "NTKFL": (lambda **options: NTKFL(**NTK, **options), NTKFLClient, {}),
    "SeededFedAvg": (SeededFedAvg, SGDClient, SGD),
    "SCAFFOLD": (SCAFFOLD, SCAFFOLDClient, SGD),
}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def centred() -> nn.Module:
    return CentredInputs(network(), (4,)).double()


def far(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's examples, far from zero."""
    x, y = examples(partition)
    return x.double() + torch.tensor([3.0, -2.0, 0.0, 7.0]) + partition / 10, y


def pooled_mean() -> torch.Tensor:
    return torch.cat([far(p)[0] for p in range(NUM_CLIENTS)]).mean(0)


def clients(
    make: Callable[..., NumPyClient], *, by_hand: bool = False, **options: Any
) -> ClientApp:
    def client_fn(context: Context) -> NumPyClient:
        partition = int(context.node_config["partition-id"])
        x, y = far(partition)
        if by_hand:
            return make(network(), x - pooled_mean(), y, seed=(0, partition), **options)
        return make(centred(), x, y, seed=(0, partition), **options)

    return client_app(client_fn)


def run(
    strategy: BaseStrategy, grid: Grid, model: nn.Module, rounds: int = 2, **options: Any
) -> dict[str, np.ndarray]:
    return start(strategy, grid, rounds, model, **options)


@pytest.mark.parametrize("method", METHODS)
def test_it_is_training_on_inputs_that_were_centred_before(method):
    make, client, options = METHODS[method]
    common = {"fraction_evaluate": 0.0, "fraction_train": 0.5, "min_available_nodes": NUM_CLIENTS}
    grid = Grid(clients(client, **options))
    found = run(make(centre_inputs=True, **common), grid, centred())
    expected = run(make(**common), Grid(clients(client, by_hand=True, **options)), network())
    np.testing.assert_allclose(found.pop(CENTRE), pooled_mean(), rtol=BOUND)
    assert len(found) == len(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[f"network.{name}"], array, rtol=BOUND, atol=BOUND)
    # all clients are asked, once
    asked = [exchange for exchange in grid.exchanges if exchange[0] == "query.input_sums"]
    assert asked == [("query.input_sums", NUM_CLIENTS)]


def test_a_jacobian_of_centred_inputs_holds_them_in_factors():
    model, (x, _) = centred(), far(0)
    model.centre.copy_(pooled_mean())
    plain = jacobian(network(), x - pooled_mean())
    found = jacobian(model, x)
    assert [block.kind for block in found.blocks] == [block.kind for block in plain.blocks]
    torch.testing.assert_close(found.gram(), plain.gram(), rtol=BOUND, atol=BOUND)
    assert CENTRE not in found.dense()


@pytest.mark.parametrize(
    "change",
    [
        failed,
        with_arrays(lambda arrays: {}),
        with_arrays(lambda arrays: {"sums": arrays["input-sums"]}),
        with_arrays(lambda arrays: arrays | {"more": np.zeros(4)}),
        with_arrays(lambda arrays: {"input-sums": arrays["input-sums"][:2]}),
        with_arrays(lambda arrays: {"input-sums": arrays["input-sums"].astype(np.float32)}),
        with_arrays(lambda arrays: {"input-sums": np.array([1.0, 2.0, np.inf, 4.0])}),
        with_arrays(lambda arrays: {"input-sums": np.array([1e9, 0.0, 0.0, 0.0])}),
        with_metrics(num_examples=-1),
        with_metrics(num_examples=100_000),
    ],
)
def test_sums_that_cannot_be_right_are_left_out(change: Change):
    grid = Grid(clients(NTKFLClient), changes={2: change}, changed_kind="query.input_sums")
    strategy = NTKFL(**NTK, centre_inputs=True, fraction_evaluate=0.0)
    found = run(strategy, grid, centred(), rounds=1)
    others = torch.cat([far(p)[0] for p in range(NUM_CLIENTS) if p != 2]).mean(0)
    assert grid.damaged == 1
    np.testing.assert_allclose(found[CENTRE], others, rtol=BOUND)


def test_inputs_of_more_numbers_than_metrics_may_have_are_centred():
    def client_fn(context: Context) -> NumPyClient:
        _, y = examples(int(context.node_config["partition-id"]))
        return SGDClient(make(), torch.full((len(y), 3, 64, 64), 2.0), y, learning_rate=0.1)

    def make() -> nn.Module:
        return CentredInputs(nn.Sequential(nn.Flatten(), nn.Linear(12288, 3)), (3, 64, 64))

    strategy = SeededFedAvg(centre_inputs=True, fraction_evaluate=0.0)
    found = run(strategy, Grid(client_app(client_fn)), make(), rounds=1)
    np.testing.assert_array_equal(found[CENTRE], np.full((3, 64, 64), 2.0))


huge = with_arrays(lambda arrays: {"input-sums": np.full(4, 1e308)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"changes": dict.fromkeys(range(3, NUM_CLIENTS), failed)},
            f"3 of {NUM_CLIENTS} clients gave a sum",
        ),
        ({"changes": {1: huge}, "num_clients": 2}, "input-sums"),  # no others to compare with
    ],
)
def test_with_half_the_answers_nothing_is_begun(options, message):
    grid = Grid(clients(NTKFLClient), changed_kind="query.input_sums", **options)
    strategy = NTKFL(**NTK, centre_inputs=True, fraction_evaluate=0.0)
    with pytest.raises(NoUsableReply, match=message):
        run(strategy, grid, centred(), rounds=1)
    assert "train" not in dict(grid.exchanges)


def test_clients_held_out_are_not_in_the_mean_and_a_second_run_asks_anew():
    strategy = SeededFedAvg(centre_inputs=True, held_out=[1, 4], fraction_evaluate=0.0)
    mean = torch.cat([far(p)[0] for p in range(NUM_CLIENTS) if p not in (1, 4)]).mean(0)
    for _ in range(2):
        grid = Grid(clients(SGDClient, **SGD))
        found = run(strategy, grid, centred(), rounds=1)
        np.testing.assert_allclose(found[CENTRE], mean, rtol=BOUND)
        assert dict(grid.exchanges)["query.input_sums"] == 4


moved = with_arrays(lambda arrays: arrays | {CENTRE: arrays[CENTRE] + 0.5})


@pytest.mark.parametrize("method", ["SeededFedAvg", "SCAFFOLD"])
@pytest.mark.parametrize("renames", [False, True])
def test_a_reply_with_another_mean_is_dropped_under_any_name(method, renames):
    make, client, options = METHODS[method]

    def change(reply: Message) -> Message:
        return renamed("arrays")(moved(reply)) if renames else moved(reply)

    grid = Grid(clients(client, **options), changes={2: change})
    strategy = make(centre_inputs=True, fraction_evaluate=0.0)
    found = run(strategy, grid, centred(), rounds=1)
    assert strategy.train_metrics[1]["rejected-arrays"] == 1
    np.testing.assert_allclose(found[CENTRE], pooled_mean(), rtol=BOUND)


def test_a_client_without_the_projection_that_is_expected_tells_no_sums(monkeypatch):
    strategy = SeededFedAvg(centre_inputs=True)
    agreement = replace(strategy.agreement(), projected=True)  # as with a key server
    monkeypatch.setattr(strategy, "agreement", lambda: agreement)
    with pytest.raises(NoUsableReply, match=r"0 of 6 clients gave .* projection"):
        run(strategy, Grid(clients(SGDClient, **SGD)), centred(), rounds=1)


def test_a_run_that_goes_on_asks_nobody_again_and_has_the_same_bits(tmp_path):
    def fresh() -> tuple[NTKFL, Grid]:
        options = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "average_decay": 0.5}
        return NTKFL(**NTK, centre_inputs=True, **options), Grid(clients(NTKFLClient))

    whole = run(*fresh(), centred(), rounds=4)
    np.testing.assert_allclose(whole[CENTRE], pooled_mean(), rtol=BOUND)
    run(*fresh(), centred(), rounds=2, checkpoint=tmp_path / "run")
    strategy, grid = fresh()
    found = run(strategy, grid, centred(), rounds=4, checkpoint=tmp_path / "run")
    assert bits(found) == bits(whole)
    assert "query.input_sums" not in dict(grid.exchanges)
    plain = NTKFL(**NTK, fraction_train=0.5, fraction_evaluate=0.0, average_decay=0.5)
    with pytest.raises(ValueError, match="centre_inputs"):
        run(plain, Grid(clients(NTKFLClient)), centred(), checkpoint=tmp_path / "run")


def test_a_model_without_the_array_is_an_error_that_says_what_to_do():
    strategy = SeededFedAvg(centre_inputs=True, fraction_evaluate=0.0)
    with pytest.raises(ValueError, match=r"'centre' in the model, got .*wrap the network as Centr"):
        run(strategy, Grid(clients(SGDClient, by_hand=True, **SGD)), network(), rounds=1)


def test_a_client_whose_model_centres_nothing_tells_no_sums():
    app = clients(NTKFLClient, by_hand=True)
    strategy = NTKFL(**NTK, centre_inputs=True, fraction_evaluate=0.0)
    with pytest.raises(NoUsableReply):
        run(strategy, Grid(app), centred(), rounds=1)
    client = NTKFLClient(network(), *far(0))
    with pytest.raises(ValueError, match="its model is no CentredInputs"):
        client.input_sums({})


def test_within_another_strategy_it_is_refused():
    strategy = SeededFedAvg(centre_inputs=True)
    with pytest.raises(ValueError, match="centre_inputs: expected False within a NTKFL"):
        strategy.work_within(NTKFL(**NTK), everyone=False)


@pytest.mark.parametrize("method", ["cp-ntk-fl", "fedavg", "scaffold"])
def test_in_a_simulation_the_mean_is_of_what_was_projected(method, tmp_path):
    config = Config(
        method=method, projection=20, centre_inputs=True, num_clients=4, clients_per_round=2,
        clients_per_evaluation=0, rounds=1, sampling_rate=0.5, out=str(tmp_path / "run"),
    )  # fmt: skip
    finished = simulate(config, progress=False)
    setup = load_setup(config)
    x = torch.cat([setup.examples(p).train[0] for p in range(4)])
    found, _ = load_tensors(finished.folder / "model.safetensors")
    # the sum's rounding, and that of 20 features in float32
    np.testing.assert_allclose(found[CENTRE], projected(config, x).double().mean(0), atol=1e-6)
    assert np.abs(found[CENTRE]).max() > 0.1
