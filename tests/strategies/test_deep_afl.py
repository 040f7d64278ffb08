"""DeepAFL: one exchange a layer gives what two give, by the network that is learned."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from fedntk.clients import ClosedFormClient
from fedntk.ntk import FeatureMap, one_hot, with_residual_features
from fedntk.ntk.convex.ridge import sandwiched_ridge
from fedntk.strategies import AFL, DeepAFL

from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    bits,
    examples,
    failed,
    in_rounds,
    network,
    start,
)
from .test_afl import OPTIONS

LAYERS, WIDTH = 2, 5
deep = with_residual_features(network(), LAYERS, WIDTH, 0)
CLIENTS = app(lambda _, *args, **own: ClosedFormClient(copy.deepcopy(deep), *args, **own))
CONTRACT = {"DeepAFL": Contract(partial(DeepAFL, network=deep), CLIENTS, once=True)}
strategy = partial(DeepAFL, network=deep, **OPTIONS)
learn = partial(start, model=deep)
WEIGHT, BIAS, OMEGAS = "3.1.weight", "3.1.bias", ("3.0.omegas.0", "3.0.omegas.1")


def pooled():
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    return x, one_hot(y, 3).double()


def looped(ridge, block_ridge):
    """The paper's way: a classifier of Phi_t, then its residuals, a layer after the other."""
    x, y = pooled()
    phi = FeatureMap("last-layer").extractor(network())(x).double()
    blocks, omegas = deep[3][0].double(), []

    def classifier():
        rho = ridge * phi.square().sum(1).mean()
        return torch.linalg.solve(phi.T @ phi + rho * torch.eye(8).double(), phi.T @ y)

    for layer in range(LAYERS):
        w, f = classifier(), blocks.hidden(phi, layer)
        omegas.append(sandwiched_ridge(f.T @ f, f.T @ (y - phi @ w), w, block_ridge, len(x)))
        phi = phi + f @ omegas[-1]
    deep.float()
    return omegas, classifier()


def test_one_exchange_a_layer_gives_the_papers_two():
    """Features are float32, and each block's are of the last one's weights: 1e-4."""
    omegas, linear = looped(0.01, 0.01)
    after = learn(strategy(), Grid(CLIENTS), rounds=LAYERS)
    for name, omega in zip(OMEGAS, omegas, strict=True):
        np.testing.assert_allclose(after[name], omega, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after[WEIGHT].T, linear, rtol=1e-4, atol=1e-4)
    assert not after[BIAS].any()


def squared_error(after):
    (x, y), model = pooled(), with_residual_features(network(), LAYERS, WIDTH, 0)
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in after.items()})
    with torch.no_grad():
        return float((model.eval()(x) - y).square().sum())


def test_the_squared_error_on_training_examples_falls_with_each_layer():
    """Without a ridge of the classifier it can: Omega is at least as good as 0."""
    plain = start(AFL(network=network(), **OPTIONS), Grid(app(ClosedFormClient)))
    as_deep = learn(strategy(), Grid(CLIENTS), rounds=0)
    as_deep |= {WEIGHT: plain["3.weight"], BIAS: plain["3.bias"]}
    errors = [squared_error(as_deep)]
    for rounds in (1, 2):
        own = strategy(ridge=0.0, block_ridge=1e-3)
        errors.append(squared_error(learn(own, Grid(CLIENTS), rounds=rounds)))
    assert errors[0] > errors[1] > errors[2]


def test_with_much_ridge_of_the_blocks_it_is_afl():
    """Omega is about 1e-9."""
    after = learn(strategy(block_ridge=1e9, ridge=0.1), Grid(CLIENTS), rounds=2)
    plain = start(AFL(network=network(), ridge=0.1, **OPTIONS), Grid(app(ClosedFormClient)))
    np.testing.assert_allclose(after[WEIGHT], plain["3.weight"], rtol=1e-5, atol=1e-6)


def test_rounds_after_the_last_block_train_nobody_and_a_round_without_replies_is_made_up_for():
    """Blocks of a run before this one count for nothing."""
    own = strategy(min_completed=6)
    grid = Grid(CLIENTS, changes={2: in_rounds(own, [1], failed)})
    after = learn(own, grid, rounds=5)
    assert sorted(grid.trained) == sorted([*range(6)] * 3)
    expected = learn(strategy(), Grid(CLIENTS), rounds=2)
    assert bits(after) == bits(expected)
    used = with_residual_features(network(), LAYERS, WIDTH, 0)
    used.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in after.items()})
    assert bits(start(own, Grid(CLIENTS), 2, model=used)) == bits(expected)


def test_a_run_goes_on_from_a_saved_state_to_the_same_bits():
    """Blocks that are computed stay, and the next one is asked for."""
    own, states = strategy(), []

    def keep(server_round, arrays):
        if server_round == 1:
            states.append((own.state_dict(), arrays))

    expected = learn(own, Grid(CLIENTS), rounds=2, evaluate_fn=keep)
    ((state, halfway),) = states
    second = strategy()
    second.load_state_dict(state)
    result = second.start(grid := Grid(CLIENTS, order=2), halfway, num_rounds=3)
    assert bits(arrays_of(result.arrays)) == bits(expected)
    assert len(grid.trained) == 6


def test_a_network_without_blocks_is_refused():
    with pytest.raises(ValueError, match="network: expected one ResidualFeatures of 8 features"):
        DeepAFL(network=network())
