"""Methods with real targets: equal to pooled regression, and to classes where they should be."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn

from fedntk.clients import (
    ClosedFormClient,
    CPNTKFLClient,
    FedProtoClient,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
    WeightedFedAvgClient,
    client_app,
)
from fedntk.ntk import FeatureMap
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.features.target_columns import target_steps, with_targets
from fedntk.strategies import (
    AFL,
    NTKFL,
    SCAFFOLD,
    TCT,
    DeepAFL,
    FeatureSums,
    NoisySums,
    NoUsableReply,
    OneExchange,
    SeededFedAvg,
)
from fedntk.strategies.core.replies import accuracy_of

from ..conftest import refused
from .federation import Grid, assert_near, bits, examples, start

CLIENTS, P, C = 6, 4, 3
RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(90, P)).astype(np.float32))
Y = X @ torch.from_numpy(RNG.normal(size=(P, C)).astype(np.float32))
Y += 0.3 * torch.from_numpy(RNG.normal(size=(90, C)).astype(np.float32))
SIZES = [1, 5, 10, 20, 24, 30]
ALL = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS, "fraction_evaluate": 0.0}


def linear():
    return nn.Sequential(nn.Linear(P, C))


def network():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(P, 8), nn.ReLU(), nn.Linear(8, C))


def grid(make, order=None, model=linear, **options):
    """Clients with parts of the examples, in an order."""
    rows = torch.arange(90) if order is None else torch.from_numpy(order)
    parts = rows.split(SIZES)

    def client_fn(context: Context):
        i = int(context.node_config["partition-id"])
        common = {"real_targets": True, "loss": "mse", "seed": (0, i)}
        return make(model(), X[parts[i]], Y[parts[i]], **{**common, **options})

    return Grid(client_app(client_fn))


def joint(ridge, *, bias):
    """Pooled ridge regression in float64, by its normal equations; the bias is not shrunk."""
    z, y = X.double(), Y.double()
    counted = torch.cat([torch.ones(P), torch.zeros(int(bias))]).double()
    rho = ridge * float(z.square().sum()) / len(z)
    z = torch.cat([z, torch.ones(len(z), 1)], 1) if bias else z
    return torch.linalg.solve(z.T @ z + rho * counted.diag(), z.T @ y)


def sums(**options):
    return FeatureSums(**{"auto_ridge": False, "validation_share": 0.0, "ridge": 1e-3, **options})


def one_exchange(**options):
    given = sums(**{"validation": (X[:5], Y[:5]), **options.pop("sums", {})})
    return OneExchange(network=linear(), sums=given, real_targets=True, **ALL, **options)


@pytest.mark.parametrize("width", [8, 32])
def test_one_exchange_is_the_pooled_ridge_regression(width):
    """With 8 bits features are rounded to 2^-4 at most: errors of 2^-5 / sqrt(12 n) in means."""
    after = start(one_exchange(sums={"bits": width}), grid(ClosedFormClient), model=linear())
    expected = joint(1e-3, bias=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if width == 32 else {"rtol": 0, "atol": 0.02}
    np.testing.assert_allclose(after["0.weight"], expected[:P].T, **tolerance)
    np.testing.assert_allclose(after["0.bias"], expected[P], **tolerance)


def test_fixed_point_numbers_refuse_targets_that_they_cannot_hold():
    """Those of 6 bits lose a target's second digit; 63 is the largest of the first."""
    refused("expected 7 or 8 with real targets, or 32, got 6", one_exchange, sums={"bits": 6})
    steps = FixedPoint(np.concatenate([np.ones(P, np.float32), target_steps(C, 8)]), 8)
    far = Y.clone()
    far[3, 1] = 64.0
    refused("expected up to 63", lambda: [*with_targets([X], far, steps)])
    far[3, 1] = -63.0
    assert next(iter(with_targets([X], far, steps))).shape == (90, P + 2 * C)


def test_validation_targets_of_one_column_may_have_one_dimension():
    given = sums(validation=(X[:5], Y[:5, 0]), bits=32)
    strategy = OneExchange(network=nn.Linear(P, 1), sums=given, real_targets=True, **ALL)
    assert strategy.sums.validation[1].shape == (5, 1)


@pytest.mark.parametrize(
    ("metrics", "is_fine"),
    [
        *(({"r2": -1e9, "mae": 0.0}, True), ({"mae": 1.0}, True), ({"accuracy": 0.5}, True)),
        *(({"r2": 1.1, "mae": 0.0}, False), ({"r2": 0.5, "mae": -1.0}, False)),
        ({"r2": float("nan")}, False),
    ],
)
def test_metrics_of_real_targets_that_cannot_be_are_refused(metrics, is_fine):
    reply = SimpleNamespace(metrics=metrics)
    if is_fine:
        assert accuracy_of(reply) == metrics.get("accuracy")
    else:
        refused("expected r2 <= 1 and mae >= 0", accuracy_of, reply)


def test_every_order_and_masks_give_the_same_bits():
    plain = start(one_exchange(), grid(ClosedFormClient), model=linear())
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(90)
        other = start(one_exchange(), grid(ClosedFormClient, order), model=linear())
        assert bits(other) == bits(plain)
    masked = start(one_exchange(secure=True), grid(ClosedFormClient), model=linear())
    assert bits(masked) == bits(plain)


@pytest.mark.parametrize("width", [8, 32])
def test_a_ridge_chosen_on_held_out_examples_solves_all_of_them(width):
    strategy = one_exchange(sums={"auto_ridge": True, "validation_share": 0.3, "bits": width})
    after = start(strategy, grid(ClosedFormClient), model=linear())
    again = one_exchange(sums={"ridge": strategy.train_metrics[1]["ridge"], "bits": width})
    assert_near(after, start(again, grid(ClosedFormClient), model=linear()), rtol=1e-5, atol=1e-6)


def test_the_ridge_may_be_chosen_on_the_servers_examples():
    """Nearly without noise, and with as many examples, the least is the best."""
    strategy = one_exchange(sums={"auto_ridge": True, "validation": (X, Y)})
    start(strategy, grid(ClosedFormClient), model=linear())
    assert strategy.train_metrics[1]["ridge"] == 1e-4


def test_afl_is_the_pooled_least_squares():
    strategy = AFL(network=linear(), real_targets=True, **ALL)
    after = start(strategy, grid(ClosedFormClient), model=linear())
    expected = torch.linalg.lstsq(X.double(), Y.double()).solution
    np.testing.assert_allclose(after["0.weight"], expected.T, rtol=1e-5, atol=1e-6)


def tct(**options):
    given = {"bootstrap": None, "normalise": True, "bias": True, "real_targets": True}
    return TCT(network=network(), **ALL, **{**given, **options})


def predicted(strategy, arrays):
    return strategy.predictor(arrays).predict(X)


def test_tct_from_sums_is_the_pooled_ridge_regression_of_its_features():
    """Normalised, with a bias that the ridge does not count: centred targets, and their mean."""
    strategy = tct(sums=sums(bits=32))
    after = start(strategy, grid(TCTClient, model=network), model=network())
    z = FeatureMap().extractor(network())(X).double()
    varies = z.std(0, unbiased=False) > 0
    z = (z - z.mean(0))[:, varies] / z.std(0, unbiased=False)[varies]
    mean = Y.double().mean(0)
    rho = 1e-3 * float(z.square().sum()) / len(z)
    kernel = z @ z.T
    expected = kernel @ torch.linalg.solve(kernel + rho * torch.eye(90).double(), Y - mean) + mean
    assert_near({"f": predicted(strategy, after)}, {"f": expected}, rtol=1e-3, atol=1e-3)


def test_tct_steps_come_close_to_real_targets():
    strategy = tct(learning_rate=1e-2, local_steps=100)
    after = start(strategy, grid(TCTClient, model=network), model=network(), rounds=8)
    explained = 1 - (predicted(strategy, after) - Y).square().sum() / Y.square().sum()
    assert explained > 0.9


ONE_HOT = nn.functional.one_hot(torch.arange(90) % C, C)


@pytest.mark.parametrize(
    ("strategy", "client"),
    [
        (SeededFedAvg, SGDClient),
        (SCAFFOLD, partial(SCAFFOLDClient)),
        (partial(NTKFL, loss="mse", learning_rate=0.1, steps=(10, 20)), NTKFLClient),
    ],
)
def test_one_hot_targets_give_the_bits_of_their_classes(strategy, client):
    results = []
    for real in (False, True):
        more = {"real_targets": real} if strategy not in (SeededFedAvg, SCAFFOLD) else {}
        parts = torch.arange(90).split(SIZES)

        def client_fn(context: Context, real=real, parts=parts):
            i = int(context.node_config["partition-id"])
            y = ONE_HOT[parts[i]]
            y = y.float() if real else y.argmax(1)
            return client(network(), X[parts[i]], y, loss="mse", real_targets=real, seed=(0, i))

        made = strategy(**ALL, **more)
        results.append(start(made, Grid(client_app(client_fn)), model=network()))
    assert bits(results[0]) == bits(results[1])


def test_a_client_reports_errors_in_the_targets_unit():
    client = SGDClient(
        linear(), X, Y, loss="mse", real_targets=True, target_unit=[1.0, 10.0, 100.0]
    )
    weights = client.get_parameters({})
    loss, count, metrics = client.evaluate(weights, {})
    errors = (client.outputs(X) - Y).double()
    assert loss == pytest.approx(float(errors.square().mean() / 2), rel=1e-6)
    assert count == 90
    unit = torch.tensor([1.0, 10.0, 100.0])
    assert metrics["mae"] == pytest.approx(float((errors.abs() * unit).mean()), rel=1e-6)
    assert metrics.keys() == {"mae", "r2"}
    assert torch.equal(client.predictor(weights, {}).predict(X), client.outputs(X).double())


@pytest.mark.parametrize("make", [FedProtoClient, WeightedFedAvgClient, CPNTKFLClient])
def test_clients_that_need_classes_refuse_real_targets(make):
    refused("works with classes", make, linear(), X, Y, loss="mse", real_targets=True)


def test_what_has_no_mathematics_for_real_targets_is_refused():
    real = {"real_targets": True, "loss": "mse"}
    refused("expected the loss mse", SGDClient, linear(), X, Y, real_targets=True)
    refused("one for each of the model's outputs", SGDClient, linear(), X, Y[:, :2], **real)
    refused("finite targets", SGDClient, linear(), X, Y * np.nan, **real)
    refused("with noise", one_exchange, noise=NoisySums(epsilon=1.0))
    refused("are of classes", one_exchange, personal=True)
    refused("is of classes", DeepAFL, network=network(), real_targets=True)
    refused("balanced = False", tct, balanced=True, sums=sums(bits=32))
    refused("expected the loss mse", NTKFL, learning_rate=1.0, real_targets=True)


def test_clients_with_classes_do_not_enter_sums_of_real_targets():
    """Their sums have another size, and are dropped as bad replies."""

    def client_fn(context: Context):
        i = int(context.node_config["partition-id"])
        if i == 0:
            x, y = examples(i)
            return ClosedFormClient(linear(), x, y, seed=(0, i))
        return ClosedFormClient(
            linear(), X[i::6], Y[i::6], loss="mse", real_targets=True, seed=(0, i)
        )

    strategy = one_exchange(min_completed=3)
    start(strategy, Grid(client_app(client_fn)), model=linear())
    assert strategy.train_metrics[1]["replies-accepted"] == 5
    only_classes = one_exchange()
    with pytest.raises(NoUsableReply):
        start(only_classes, Grid(client_app(lambda c: ClosedFormClient(linear(), *examples(1)))))
