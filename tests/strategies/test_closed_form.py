"""Last layers in closed form, by the equations of AFL, SAFLe, DeepAFL, Fed3R, FedNCM and FedCOF."""

import copy
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from sklearn.linear_model import Ridge
from torch import nn

from fedntk.clients import ClosedFormClient, SAFLeClient
from fedntk.ntk import FeatureMap, one_hot, with_overlap_codes, with_residual_features
from fedntk.ntk.convex.pooled_statistics import sandwiched_ridge
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.strategies import AFL, DeepAFL, Fed3R, FedCOF, FedNCM, SAFLe
from fedntk.strategies.closed_form.fed_cof import deviations

from ..conftest import refused
from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    bits,
    damaged,
    examples,
    failed,
    in_rounds,
    initial_bits,
    network,
    run_as_if_lost,
    start,
    told,
    with_metrics,
)

LAYERS, WIDTH = 2, 5
DEEP = with_residual_features(network(), LAYERS, WIDTH, 0)
CLIENTS = app(ClosedFormClient)
DEEP_CLIENTS = app(lambda _, *data, **own: ClosedFormClient(copy.deepcopy(DEEP), *data, **own))
LIMITS, GROUP = 2, 3  # 16 bits of 8 features: 5 tables of 8 rows, and one of 2
CODED = with_overlap_codes(network(), LIMITS, GROUP, 0)
CODED_CLIENTS = app(lambda _, *data, **own: SAFLeClient(copy.deepcopy(CODED), *data, **own))
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
CONTRACT = {
    "AFL with a ridge": Contract(
        partial(AFL, network=network(), ridge=0.1, head="3"), CLIENTS, once=True
    ),
    "DeepAFL": Contract(partial(DeepAFL, network=DEEP), DEEP_CLIENTS, once=True),
    "SAFLe": Contract(partial(SAFLe, network=CODED), CODED_CLIENTS, once=True, sends_queries=True),
    **{
        kind.__name__: Contract(partial(kind, network=network()), CLIENTS, once=True)
        for kind in (Fed3R, FedNCM, FedCOF)
    },
}
WEIGHT, BIAS, OMEGAS = "3.weight", "3.bias", ("3.0.omegas.0", "3.0.omegas.1")
afl, fed3r, fed_ncm, fed_cof = (
    partial(kind, network=network(), **OPTIONS) for kind in (AFL, Fed3R, FedNCM, FedCOF)
)
deep_afl = partial(DeepAFL, network=DEEP, **OPTIONS)
safle = partial(SAFLe, network=CODED, **OPTIONS)


def learn(strategy, rounds=1, grid=None, model=None):
    """Arrays that a strategy learns, DeepAFL's under the names of the others' last layer."""
    deep = isinstance(strategy, DeepAFL)
    grid = grid or Grid(DEEP_CLIENTS if deep else CLIENTS)
    after = start(strategy, grid, rounds, model or (DEEP if deep else None))
    return after | {name: after[f"3.1.{name[2:]}"] for name in (WEIGHT, BIAS) if deep}


def pooled():
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    z = FeatureMap("last-layer").extractor(network())(x)
    return x, z.double(), one_hot(y, 3).double()


def sums_of(z, y):
    return FeatureStatistics.of([z], y.argmax(1), y.shape[1])


def unit_rows(weight):
    return weight / np.linalg.norm(weight, axis=1, keepdims=True)


def aggregated(parts, gamma):
    """AFL's way: local solutions, aggregated two at a time, then without K gamma.

    W = (I - R_1 C_2 (I - (C_1 + C_2)^{-1} C_2)) W_1 + the same with 1 and 2 exchanged, R = C^{-1}.
    """
    one = torch.eye(parts[0][0].shape[1]).double()

    def share(matrix, other, solution):
        inner = one - torch.linalg.solve(matrix + other, other)
        return solution - torch.linalg.solve(matrix, other @ inner @ solution)

    total = joint = torch.empty(0)
    for z, y in parts:
        matrix = z.T @ z + gamma * one
        local = torch.linalg.solve(matrix, z.T @ y)
        if not len(total):
            total, joint = matrix, local
            continue
        joint = share(total, matrix, joint) + share(matrix, total, local)
        total = total + matrix
    return torch.linalg.solve(total - len(parts) * gamma * one, total @ joint)


CLASS_WEIGHTS = (1.0, 2.5, 4.0)


def weighted_ridge(z, labels, targets, ridge):
    """scikit-learn's, of rows with the weights of their classes; the ridge by Kish's factor."""
    w = np.array(CLASS_WEIGHTS)[labels]
    scale = (w @ np.square(z).sum(1)) / w.sum() * (np.square(w).sum() / w.sum())
    solver = Ridge(ridge * scale, fit_intercept=False, solver="cholesky", tol=0)
    return solver.fit(z, targets, sample_weight=w).coef_


@pytest.mark.parametrize("kind", [AFL, Fed3R, SAFLe])
def test_weights_of_classes_are_those_of_a_pooled_ridge_regressions_rows(kind):
    """Weights of the same ratios give one layer; SAFLe's is AFL's without codes.

    Features, and the layer, are rounded to float32: by 1e-7, here times up to 10.
    """
    _, z, y = pooled()
    z, labels = z.numpy(), y.argmax(1).numpy()
    rows = z if kind is not Fed3R else np.concatenate([z, np.ones((len(z), 1))], 1)
    expected = weighted_ridge(rows, labels, y.numpy(), 0.1)
    weight, bias = expected[:, :8], expected[:, 8:].ravel() if kind is Fed3R else np.zeros(3)
    if kind is Fed3R:
        norm = np.linalg.norm(weight, axis=1)
        weight, bias = weight / norm[:, None], bias / norm
    options = {"network": network(), **OPTIONS, "ridge": 0.1}
    clients = app(SAFLeClient) if kind is SAFLe else CLIENTS
    for factor in (1.0, 2.0, 0.1):
        weights = [factor * w for w in CLASS_WEIGHTS]
        after = learn(kind(**options, class_weights=weights), grid=Grid(clients))
        np.testing.assert_allclose(after[WEIGHT], weight, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(after[BIAS], bias, rtol=2e-6, atol=1e-6)
    plain = learn(kind(**options), grid=Grid(clients))
    assert np.abs(after[WEIGHT] - plain[WEIGHT]).max() > 1e-3
    ones = learn(kind(**options, class_weights=[1, 1, 1]), grid=Grid(clients))
    np.testing.assert_array_equal(ones[WEIGHT], plain[WEIGHT])


def test_blocks_depend_only_on_the_ratios_of_weights():
    """Products of float64 differ by roundings, which blocks multiply by up to 100."""
    plain, same, other = (
        learn(deep_afl(class_weights=w), LAYERS) for w in ([], [3, 3, 3], [1, 9, 2])
    )
    for name in OMEGAS:
        np.testing.assert_allclose(same[name], plain[name], rtol=1e-4, atol=1e-6)
        assert np.abs(other[name] - plain[name]).max() > 1e-3


def test_sums_of_codes_are_rounded_with_whole_weights_only():
    """Weights of 1, 2.5 give no whole sums: a model of rounded ones would be off by 1e-2."""
    grid = partial(Grid, CODED_CLIENTS)
    halves, whole = (
        start(safle(ridge=0.1, class_weights=weights), grid(), 1, CODED)["3.1.weight"]
        for weights in ([1.0, 2.5, 1.0], [2.0, 5.0, 2.0])
    )
    np.testing.assert_allclose(halves, whole, rtol=1e-5, atol=1e-6)


def test_weights_of_classes_that_have_no_meaning_are_refused():
    """Class means do not change by them."""
    refused("class_weights: expected one for each of 3 classes, got 2", afl, class_weights=[1, 2])
    refused("class_weights: expected more than 0", fed3r, class_weights=[1, 2, 0])
    words = "class_weights: real targets have no classes"
    refused(words, afl, class_weights=[1, 2, 3], real_targets=True)
    refused("class_weights", fed_ncm, class_weights=[1, 2, 3], error=TypeError)


@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_sums_give_what_afls_aggregation_gives(gamma):
    """Three clients have fewer examples than features.

    Condition numbers are below 1e4, so that 1e-9 is above 100 times float64's rounding.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(len(x), 8, generator=generator).double(), one_hot(y, 3).double())
        for x, y in map(examples, range(6))
    ]
    weight, bias = afl().last_layer([sums_of(*part) for part in parts])
    np.testing.assert_allclose(weight.T, aggregated(parts, gamma), rtol=1e-9, atol=1e-9)
    assert not bias.any()


@pytest.mark.parametrize("ridge", [0, 0.1])
def test_a_run_of_afl_gives_the_joint_solution(ridge):
    """The ridge is over the mean squared norm; weights are rounded to float32."""
    _, z, y = pooled()
    rho = ridge * z.square().sum(1).mean()
    rows = torch.cat([z, rho.sqrt() * torch.eye(8).double()])
    expected = torch.linalg.pinv(rows) @ torch.cat([y, torch.zeros(8, 3).double()])
    after = learn(afl(ridge=ridge))
    np.testing.assert_allclose(after[WEIGHT].T, expected, rtol=1e-6, atol=1e-7)
    assert not after[BIAS].any()
    before = arrays_of(ArrayRecord(network().state_dict()))
    assert bits(after | {n: before[n] for n in (WEIGHT, BIAS)}) == initial_bits()


@pytest.mark.parametrize(("make", "exchanges"), [(afl, 1), (deep_afl, LAYERS)])
def test_all_clients_are_asked_in_the_first_rounds_and_again_if_too_few_replied(make, exchanges):
    """Rounds after the last exchange train nobody; blocks of a run before count for nothing."""
    strategy, used = make(min_completed=6, fraction_train=0.5), None
    grid = Grid(DEEP_CLIENTS if make is deep_afl else CLIENTS)
    grid.changes = {2: in_rounds(strategy, [1], failed)}
    after, expected = learn(strategy, 5, grid), learn(make(), exchanges)
    assert sorted(grid.trained) == sorted([*range(6)] * (1 + exchanges))
    assert told(strategy) == [5, *[6] * exchanges]
    assert bits(after) == bits(expected)
    if make is deep_afl:
        used = copy.deepcopy(DEEP)
        used.load_state_dict({n: torch.tensor(after[n]) for n in DEEP.state_dict()})
    assert bits(learn(strategy, exchanges, model=used)) == bits(expected)


def test_networks_without_the_layer_or_without_blocks_are_refused():
    said = r"initial_arrays: expected 3.weight of shape \(3, 8\)"
    refused(said, start, afl(), Grid(CLIENTS), 1, nn.Linear(4, 3))
    refused("network: expected one ResidualFeatures of 8 features", DeepAFL, network=network())


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [  # the mean square of features 1,000 times as large; sums too large beside it
        (afl, damaged(0, lambda gram: gram * 1e6), "scale"),
        (afl, damaged(1, lambda sums: sums * 100), "range"),
        (fed_ncm, damaged(0, lambda means: means * 1000), "scale"),
        (fed_ncm, damaged(1, lambda counts: counts * 2), "num-examples"),
    ],
)
def test_features_of_another_size_false_sums_and_false_counts_are_dropped(make, change, reason):
    run_as_if_lost(make, CLIENTS, change, reason)


# ------------------------------------------------------------------------------ DeepAFL


def test_one_exchange_a_layer_gives_deep_afls_two():
    """A classifier of Phi_t, then its residuals, a layer after the other.

    Features are float32, and each block's are of the last one's weights: 1e-4.
    """
    (x, phi, y), blocks = pooled(), copy.deepcopy(DEEP)[3][0].double()
    after = learn(deep_afl(), LAYERS)

    def classifier():
        rho = 0.01 * phi.square().sum(1).mean()
        return torch.linalg.solve(phi.T @ phi + rho * torch.eye(8).double(), phi.T @ y)

    for layer, name in enumerate(OMEGAS):
        w, f = classifier(), blocks.hidden(phi, layer)
        omega = sandwiched_ridge(f.T @ f, f.T @ (y - phi @ w), w, 0.01, len(x))
        np.testing.assert_allclose(after[name], omega, rtol=1e-4, atol=1e-4)
        phi = phi + f @ omega
    np.testing.assert_allclose(after[WEIGHT].T, classifier(), rtol=1e-4, atol=1e-4)
    assert not after[BIAS].any()


def test_the_squared_error_on_training_examples_falls_with_each_layer_of_deep_afl():
    """Without a ridge of the classifier it can: Omega is at least as good as 0."""
    x, _, y = pooled()
    plain, first = learn(afl()), learn(deep_afl(), rounds=0)
    results = [first | {f"3.1.{name[2:]}": plain[name] for name in (WEIGHT, BIAS)}]
    results += [learn(deep_afl(ridge=0.0, block_ridge=1e-3), rounds) for rounds in (1, 2)]
    errors = []
    for arrays in results:
        model = copy.deepcopy(DEEP).eval()
        model.load_state_dict({name: torch.tensor(arrays[name]) for name in DEEP.state_dict()})
        errors.append(float((model(x).detach() - y).square().sum()))
    assert errors[0] > errors[1] > errors[2]


def test_with_much_ridge_of_the_blocks_deep_afl_is_afl():
    """Omega is about 1e-9."""
    after, plain = learn(deep_afl(block_ridge=1e9, ridge=0.1), 2), learn(afl(ridge=0.1))
    np.testing.assert_allclose(after[WEIGHT], plain[WEIGHT], rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------- SAFLe


def table_rows(z, limits, order):
    """One-hot rows (n, p) of features z (n, d), float64, by loops over bits and tables."""
    rows = np.zeros((len(z), 5 * 2**GROUP + 2))
    for i, example in enumerate(z.tolist()):
        pairs = zip(example, limits.tolist(), strict=True)
        bits = [x > limit for x, of_x in pairs for limit in of_x]
        for j in range(6):
            group = [bits[k] for k in order[j * GROUP : (j + 1) * GROUP]]
            rows[i, j * 2**GROUP + sum(bit << k for k, bit in enumerate(group))] = 1
    return rows


def test_a_run_of_safle_is_least_squares_on_table_rows_of_pooled_features():
    """Limits 0.43 deviations beside the mean cut a normal variable in thirds; float32 ones: 1e-6.

    Weights are of least norm, rounded to float32, from a matrix of condition number below 1e4.
    """
    (_, z, y), after = pooled(), start(safle(), Grid(CODED_CLIENTS))
    third = 0.4307272992954576
    expected = np.stack([z.mean(0) - third * z.std(0, False), z.mean(0) + third * z.std(0, False)])
    np.testing.assert_allclose(after["3.0.limits"], expected.T, rtol=1e-6, atol=1e-6)
    rows = table_rows(z, after["3.0.limits"], CODED[3][0].order.tolist())
    solution = np.linalg.pinv(rows.T @ rows, rcond=1e-10, hermitian=True) @ rows.T @ y.numpy()
    np.testing.assert_allclose(after["3.1.weight"].T, solution, rtol=1e-5, atol=1e-6)
    assert not after["3.1.bias"].any()


def test_safle_of_a_network_without_codes_is_afl_to_the_bit():
    plain = partial(SAFLe, network=network(), ridge=0.1, **OPTIONS)
    assert bits(learn(plain())) == bits(learn(afl(ridge=0.1)))


@pytest.mark.parametrize("ridge", [0, 0.1])
def test_for_given_limits_each_split_gives_safle_the_same_bits(ridge):
    """Sums are whole numbers, also of clients with few examples, whose roots are rounded.

    A run that asks for no moments has the network's limits.
    """
    _, z, y = pooled()
    codes = CODED[3][0](z.float())
    strategy = safle(fit=False, ridge=ridge)
    whole, _ = strategy.solution([sums_of(codes, y)])
    for sizes in ([1] * len(y), [len(y) // 2, len(y) - len(y) // 2]):
        parts = zip(codes.split(sizes), y.split(sizes), strict=True)
        assert np.array_equal(strategy.solution([sums_of(*part) for part in parts])[0], whole)
    grid = Grid(CODED_CLIENTS)
    after = start(strategy, grid)
    assert np.array_equal(after["3.1.weight"], whole.astype(np.float32))
    assert np.array_equal(after["3.0.limits"], CODED[3][0].limits)
    assert "query" not in dict(grid.exchanges)


def test_groups_of_one_bit_give_the_scores_of_least_squares_on_bits_and_a_bias():
    """A table of two rows is linear in its bit: both have one span, so one fit; float64."""
    _, z, y = pooled()
    single = with_overlap_codes(network(), LIMITS, 1, 0)
    rows = single[3][0](z.float()).double().numpy()
    weight, _ = SAFLe(network=single).last_layer([sums_of(torch.from_numpy(rows), y)])
    with_bias = np.concatenate([rows[:, 1::2], np.ones((len(rows), 1))], 1)
    solution, *_ = np.linalg.lstsq(with_bias, y.numpy(), rcond=1e-10)
    np.testing.assert_allclose(rows @ weight.T, with_bias @ solution, rtol=0, atol=1e-8)


def test_more_features_than_a_reply_tells_moments_of_are_refused():
    wide = with_overlap_codes(nn.Linear(5001, 2), 1, 1, 0)
    refused("fit: expected codes of at most 5000 features, got 5001", SAFLe, network=wide)
    SAFLe(network=wide, fit=False)


BAD_MOMENTS = {
    "none": {"mean": None},
    "too few": {"mean": [0.0] * 7},
    "not numbers": {"sum_sq_dev": [float("nan")] * 8},
    "negative": {"sum_sq_dev": [-1.0] * 8},
    "one number": {"mean": 1.0},
    "of another size": {"mean": [1e9] * 8},
}


@pytest.mark.parametrize("bad", BAD_MOMENTS.values(), ids=BAD_MOMENTS)
def test_moments_that_cannot_be_count_for_nothing(bad):
    """Limits are as if client 2 had not told its moments; its sums are used."""
    attacked, without = (
        start(safle(), Grid(CODED_CLIENTS, changes={2: change}, changed_kind="query"))
        for change in (with_metrics(**bad), failed)
    )
    assert bits(attacked) == bits(without) != bits(start(safle(), Grid(CODED_CLIENTS)))


# -------------------------------------------------------------------------------- Fed3R


@pytest.mark.parametrize("ridge", [1e-4, 1.0])
def test_fed3r_is_the_papers_recursion_over_clients_with_lambda_once(ridge):
    _, z, y = pooled()
    z = torch.cat([z, torch.ones(len(z), 1).double()], 1)
    a, b = ridge * z.square().sum(1).mean() * torch.eye(9).double(), torch.zeros(9, 3).double()
    for row, label in zip(z, y, strict=True):
        a, b = a + row.outer(row), b + row.outer(label)
    linear = torch.linalg.solve(a, b)
    norm = linear[:-1].norm(dim=0)
    after = learn(fed3r(ridge=ridge))
    np.testing.assert_allclose(after[WEIGHT].T, linear[:-1] / norm, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[BIAS], linear[-1] / norm, rtol=1e-5, atol=1e-6)


def test_without_a_bias_fed3r_is_afl_with_the_same_ridge_and_normalised_classes():
    """Nobody has the fourth class: its weights are 0."""
    head, (_, z, y) = nn.Linear(8, 4, bias=False), pooled()
    sums = [sums_of(z, nn.functional.pad(y, (0, 1)))]
    expected, _ = AFL(network=head, ridge=0.1).last_layer(sums)
    weight, bias = Fed3R(network=head, ridge=0.1).last_layer(sums)
    np.testing.assert_allclose(weight[:3], unit_rows(expected[:3]), rtol=1e-10)
    assert not weight[3].any()
    assert not bias.any()


# ------------------------------------------------------------------------- FedNCM, FedCOF


def test_weights_of_fed_ncm_are_the_class_means_over_all_examples_divided_by_their_norms():
    """Means travel in float32: 1e-6. Client 0 has two of three classes."""
    _, z, labels = (part.numpy() for part in pooled())
    after = learn(fed_ncm())
    means = np.stack([z[labels[:, c] == 1].mean(0) for c in range(3)])
    np.testing.assert_allclose(after[WEIGHT], unit_rows(means), rtol=1e-6, atol=1e-7)
    assert not after[BIAS].any()
    of_one = fed_ncm(min_available_nodes=1, min_train_nodes=1)
    weight = learn(of_one, grid=Grid(CLIENTS, num_clients=1))[WEIGHT]
    assert not weight[2].any()
    np.testing.assert_allclose(np.linalg.norm(weight[:2], axis=1), 1, rtol=1e-6)


def prototypes(z, y, num_classes=3):
    return Prototypes.of(lambda x: x, torch.as_tensor(z), torch.as_tensor(y), num_classes)


def of_all_clients():
    extract = FeatureMap("last-layer").extractor(network())
    return [prototypes(extract(x), y) for x, y in map(examples, range(6))]


def test_the_mean_over_all_ways_to_deal_examples_is_their_covariance():
    """Means travel in float32: 1e-6. All 120 orders of five examples, dealt 2, 2, 1."""
    z = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    total, orders = np.zeros((3, 3)), [np.array(order) for order in permutations(range(5))]
    for order in orders:
        hands = [z[hand] for hand in np.split(order, [2, 4])]
        rows = deviations([prototypes(hand, [0] * len(hand), 1) for hand in hands])
        total += rows.T @ rows
    np.testing.assert_allclose(total / len(orders), 4 * np.cov(z.T), rtol=1e-5, atol=1e-6)


def test_fed_cof_is_the_program_of_the_paper_class_by_class():
    """Pooled means are float32: 1e-5 through a system of condition number below 100."""
    gamma, p, of_class = 0.3, 8, []
    for c in range(3):
        of_class.append(
            [(k.counts[c], k.means[c].astype(float)) for k in of_all_clients() if k.counts[c]]
        )
    counts = np.array([sum(n for n, _ in pairs) for pairs in of_class])
    rights = np.stack([sum(n * mean for n, mean in pairs) for pairs in of_class])
    square = (rights**2 / counts[:, None]).sum() / (counts.sum() * p)
    mean = rights.sum(0) / counts.sum()
    gram = counts.sum() * np.outer(mean, mean)
    for pairs, count, right in zip(of_class, counts, rights, strict=True):
        away = [(n, mean - right / count) for n, mean in pairs]
        covariance = sum(n * np.outer(d, d) for n, d in away) / (len(pairs) - 1)
        gram += (count - 1) * (covariance + gamma * square * np.eye(p))
    after = learn(fed_cof(shrinkage=gamma))
    expected = unit_rows(np.linalg.solve(gram, rights.T).T)
    np.testing.assert_allclose(after[WEIGHT], expected, rtol=1e-5, atol=1e-5)
    assert not after[BIAS].any()


def test_with_much_shrinkage_fed_cof_is_fed_ncm():
    """1e9 times the features' mean square: weights differ by about 1e-9, below float32."""
    clients = of_all_clients()
    (weight, _), (expected, _) = (
        strategy.last_layer(clients) for strategy in (fed_cof(shrinkage=1e9), fed_ncm())
    )
    np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 1)])
def test_a_class_of_one_client_and_classes_of_one_example_have_only_gamma(sizes):
    """No spread is seen: G is a multiple of I, plus m m^T. A class that nobody has gets 0."""
    generator = np.random.default_rng(1)
    clients = [
        prototypes(generator.standard_normal((n, 8)).astype(np.float32), np.full(n, c % 2))
        for c, n in enumerate(sizes)
    ]
    assert not deviations(clients[:2]).any()
    weight, _ = fed_cof().last_layer(clients)
    assert np.isfinite(weight).all()
    assert not weight[2].any()
