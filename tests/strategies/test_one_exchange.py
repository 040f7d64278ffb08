"""OneExchange: the joint ridge regression, in the same bits for every split, order and mask."""

import functools
import operator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from sklearn.linear_model import Ridge
from torch import nn

from fedntk.clients import ClosedFormClient, MaskedSums, PrivacyLedger, client_app
from fedntk.clients.core.adapter import unpack_content
from fedntk.ntk import FeatureMap, NotEnoughMemory, with_fourier_features
from fedntk.ntk.convex.pooled_statistics import personal_model
from fedntk.ntk.convex.private_sums import SumNoise, bound_rows, solve_noisy
from fedntk.ntk.features.fixed_point import FixedPoint
from fedntk.ntk.payloads import feature_statistics
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.ntk.payloads.split_statistics import SplitStatistics, draw_held_out
from fedntk.ntk.payloads.sum_task import SumTask
from fedntk.strategies import (
    FeatureSums,
    KeptSums,
    Ledger,
    NoisySums,
    NoUsableReply,
    OneExchange,
    SecureAggregation,
)

from ..conftest import refused
from .federation import (
    Contract,
    Grid,
    app,
    arrays_of,
    as_record,
    bits,
    damaged,
    examples,
    lost,
    network,
    owned,
    run_as_if_lost,
    start,
    start_in_vain,
    told,
    with_arrays,
)


def features():
    return with_fourier_features(network(), 20, 0)


def clients_of(parts, limits=None, cache=None, **masks):
    """Clients with these parts, whose owners have limits and ledgers."""

    def client_fn(context: Context):
        i = int(context.node_config["partition-id"])
        privacy = None if limits is None else owned(cache, i, **limits)
        secure = MaskedSums(cache=cache and cache / str(i), privacy=privacy, **masks)
        return ClosedFormClient(features(), *parts[i], seed=(0, i), secure=secure)

    return client_app(client_fn)


PARTS = list(map(examples, range(6)))
CLIENTS = clients_of(PARTS)
WEIGHT, BIAS = "3.1.weight", "3.1.bias"
OPTIONS = {"min_available_nodes": 6, "fraction_evaluate": 0.0}


def make(**options):
    """Make a strategy; options of its sums and of their noise may stand beside its own."""
    for name, kind in (("sums", FeatureSums), ("noise", NoisySums)):
        if names := kind.options().keys() & options.keys():
            options[name] = kind(**{name: options.pop(name) for name in names})
    return OneExchange(**{"network": features(), **OPTIONS, **options})


fixed = partial(make, auto_ridge=False, validation_share=0.0, ridge=0.01)
private = partial(fixed, epsilon=3.0)
run = partial(start, model=features())
both = pytest.mark.parametrize("masked", [False, True])
each_width = pytest.mark.parametrize("width", [8, 32])  # of the sums' numbers, in bits
CONTRACT = {
    name: Contract(partial(make, network=network(), **options), app(ClosedFormClient), once=True)
    for name, options in {
        "OneExchange": {"validation": examples(7)},
        "OneExchange of float64 sums": {"bits": 32},
        "OneExchange with models for each client": {"bits": 32, "personal": True},
    }.items()
}


@pytest.fixture
def in_usual_network(monkeypatch):
    """Have the helpers of all strategies' tests begin with this network."""
    monkeypatch.setattr("tests.strategies.federation.network", features)


@each_width
def test_the_layer_is_the_joint_ridge_regression_on_centred_labels(width):
    """float64 on the rounded features; the layer is float32.

    All features are computed client by client: beside other examples the last bit may differ.
    """
    extract = FeatureMap("last-layer").extractor(features())
    z, y = torch.cat([extract(x) for x, _ in PARTS]), torch.cat([y for _, y in PARTS])
    if width == 8:
        bound = (2 / 20) ** 0.5
        step = FixedPoint.within(bound, 20, 8)
        assert z.abs().max() <= bound <= 127 * step.step[0] < 2 * bound
        z = step(z) * torch.from_numpy(step.step)
    z = torch.cat([z.double(), torch.ones(len(z), 1).double()], 1)
    targets = nn.functional.one_hot(y, 3).double() - 1 / 3
    rho = 0.01 * z.square().sum(1).mean()
    expected = torch.linalg.solve(z.T @ z + rho * torch.eye(21).double(), z.T @ targets)
    after = run(fixed(bits=width), Grid(CLIENTS))
    np.testing.assert_allclose(after[WEIGHT], expected[:20].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[BIAS], expected[20], rtol=1e-5, atol=1e-6)


WEIGHTS = (1.0, 3.0, 2.0)


@each_width
def test_weights_of_classes_are_those_of_the_pooled_ridge_regressions_rows(width):
    """scikit-learn's in float64, by a ridge with Kish's factor; the layer is float32."""
    extract = FeatureMap("last-layer").extractor(features())
    z, y = torch.cat([extract(x) for x, _ in PARTS]), torch.cat([y for _, y in PARTS])
    if width == 8:
        step = FixedPoint.within((2 / 20) ** 0.5, 20, 8)
        z = step(z) * torch.from_numpy(step.step)
    z = torch.cat([z.double(), torch.ones(len(z), 1).double()], 1).numpy()
    w = np.array(WEIGHTS)[y]
    rho = 0.01 * (w @ np.square(z).sum(1)) / w.sum() * np.square(w).sum() / w.sum()
    solver = Ridge(rho, fit_intercept=False, solver="cholesky", tol=0)
    expected = solver.fit(z, np.eye(3)[y] - 1 / 3, sample_weight=w).coef_
    after = run(fixed(bits=width, class_weights=WEIGHTS), Grid(CLIENTS))
    np.testing.assert_allclose(after[WEIGHT], expected[:, :20], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[BIAS], expected[:, 20], rtol=1e-5, atol=1e-6)


def test_weights_of_classes_leave_sums_exact(tmp_path):
    """The bits are those of another split, of masked sums, and of a run without two clients."""
    weighted = partial(make, class_weights=WEIGHTS)
    x, y = (torch.cat(parts) for parts in zip(*PARTS, strict=True))
    parts = [(x[k::6], y[k::6]) for k in range(6)]
    whole = run(fixed(class_weights=WEIGHTS), Grid(CLIENTS))
    assert bits(whole) == bits(run(fixed(class_weights=WEIGHTS), Grid(clients_of(parts))))
    masked = clients_of(PARTS, cache=tmp_path, only_masked=True, allow_repeats=True)
    changes = {2: lost}
    after = run(weighted(secure=True), Grid(masked, changes=changes))
    assert bits(after) == bits(run(weighted(), Grid(CLIENTS, changes=changes)))
    strategy = weighted(storage=KeptSums(tmp_path / "sums"), personal=True, fraction_evaluate=1.0)
    run(strategy, Grid(CLIENTS))
    assert "personal-weight" in strategy.evaluate_metrics[1]
    after = arrays_of(strategy.without([2, 4], strategy.global_arrays))
    assert bits(after) == bits(run(weighted(), Grid(CLIENTS, changes={2: lost, 4: lost})))


def test_weights_of_classes_that_sums_cannot_have_are_refused():
    """Also by a client whose server asks for noise that does not cover them."""
    of = {"class_weights": WEIGHTS}
    refused("class_weights: expected whole numbers", make, class_weights=[1, 2.5, 1])
    assert make(bits=32, class_weights=[1, 2.5, 1]).class_weights == (1.0, 2.5, 1.0)
    refused("class_weights: with noise only what its epsilon covers", private, **of)
    ledger = {"storage": KeptSums("unused"), "ledger": Ledger(), "validation": examples(7)}
    refused("class_weights: the ledger judges", make, **of, **ledger)
    client = ClosedFormClient(features(), *PARTS[0], seed=(0, 0))
    config = private().task() | {"option-class-weights": list(WEIGHTS)}
    weights = list(arrays_of(ArrayRecord(features().state_dict())).values())
    refused("class_weights: noise is for rows that count once", client.fit, weights, config)
    refused("real_targets: personal, ledger and class_weights", make, real_targets=True, **of)


@pytest.mark.parametrize("seed", range(5))
def test_every_split_and_order_gives_the_same_bits(seed, monkeypatch):
    """Also if replies are added one at a time, and some clients have few examples or one."""
    x, y = (torch.cat(parts) for parts in zip(*PARTS, strict=True))
    generator = np.random.default_rng(seed)
    order = torch.from_numpy(generator.permutation(len(y)))
    cuts = np.sort(generator.choice(np.arange(1, len(y)), 5, replace=False)).tolist()
    parts = [(x[rows], y[rows]) for rows in order.tensor_split(cuts)]
    monkeypatch.setattr("fedntk.strategies.closed_form.one_exchange.AT_ONCE", 1)
    after = run(fixed(), Grid(clients_of(parts), order=seed))
    assert bits(after) == bits(run(fixed(), Grid(CLIENTS)))


def test_the_ridge_is_chosen_on_held_out_examples_and_all_of_them_are_used():
    """A model of the chosen ridge, solved without holding out, has the same bits."""
    strategy = make(validation_share=0.3)
    after = run(strategy, Grid(CLIENTS))
    ridge = strategy.train_metrics[1]["ridge"]
    assert bits(after) == bits(run(fixed(ridge=ridge), Grid(CLIENTS)))


def test_masks_leave_the_bits_also_if_a_client_is_lost(tmp_path):
    """Held-out sums are masked, too."""
    masked = clients_of(PARTS, cache=tmp_path, only_masked=True, allow_repeats=True)
    changes = {2: lost}
    for kind in (fixed, make):
        after = run(kind(secure=True), Grid(masked, changes=changes))
        assert bits(after) == bits(run(kind(), Grid(CLIENTS, changes=changes)))


@each_width
def test_without_a_client_it_is_the_model_of_a_run_that_never_had_it(width, tmp_path):
    strategy = make(storage=KeptSums(tmp_path), bits=width)
    run(strategy, Grid(CLIENTS))
    after = strategy.without([2, 4], strategy.global_arrays)
    never = run(make(bits=width), Grid(CLIENTS, changes={2: lost, 4: lost}))
    assert bits(arrays_of(after)) == bits(never)


def sums_of(client, fixed_point):
    x, y = PARTS[client]
    z = FeatureMap("last-layer").extractor(features())(x)
    held = draw_held_out(y, 0.3, [0, client, *b"held-out"])
    parts = (FeatureStatistics.of([z[k]], y[k], 3, fixed_point=fixed_point) for k in (~held, held))
    return SplitStatistics(*parts)


@each_width
def test_clients_have_the_models_of_the_sums_and_their_own_examples(width):
    """Also of one whose sums are not in the total; after a checkpoint as before it."""
    personal = partial(make, personal=True, validation_share=0.3, bits=width)
    strategy, again = personal(), personal(fraction_evaluate=1.0)
    after = run(strategy, Grid(CLIENTS, changes={2: lost}))
    again.load_state_dict(strategy.state_dict())
    fixed_point = strategy.sums.fixed_point
    sums = [sums_of(k, fixed_point) for k in range(6)]
    total = functools.reduce(operator.add, [sums[k] for k in (0, 1, 3, 4, 5)])
    if width == 8:
        total, *sums = (part.scaled(fixed_point) for part in (total, *sums))
    grid = Grid(CLIENTS, node_ids=range(6))
    messages = again.configure_evaluate(1, as_record(after), ConfigRecord(), grid)
    contents = {message.metadata.dst_node_id: message.content for message in messages}
    for k in (1, 2):
        client = ClosedFormClient(features(), *PARTS[k], seed=(0, k))
        layer = client.predictor(*unpack_content(contents[k], str(k))).network[3][1]
        linear, weight = personal_model(total, sums[k], strategy.ridge_used, bias=True)
        np.testing.assert_allclose(layer.weight.detach(), linear[:20].T, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(layer.bias.detach(), linear[20], rtol=1e-5, atol=1e-7)
        *_, metrics = client.evaluate(*unpack_content(contents[k], str(k)))
        assert metrics["personal-weight"] == weight


SMALL = clients_of([(x[:5], y[:5]) for x, y in PARTS])
LATE = {"asynchrony": True, "round_deadline": 60.0, "min_train_nodes": 1}
JUDGED = {"ledger": Ledger(0.2), "validation": examples(40)}
WAYS = {
    "one sum": fixed,
    "two sums": partial(make, validation_share=0.3),
    "at any time": partial(fixed, **LATE),
    "with a ledger": partial(make, **JUDGED),
    "models for each client": partial(make, validation_share=0.3, personal=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_few_examples_sums_have_fewer_bytes_and_give_the_same_bits(way, tmp_path, monkeypatch):
    """Roots travel and are kept; taken out again, a client leaves the bits of whole numbers."""
    results, kept_bytes = [], []
    for few in (True, False):
        if not few:
            monkeypatch.setattr(feature_statistics, "_are_few", lambda *_: False)
        strategy = WAYS[way](storage=KeptSums(tmp_path / str(few)))
        after, storage = run(strategy, Grid(SMALL)), strategy.storage
        left = strategy.without([storage.summed[0]], strategy.global_arrays)
        removed = () if strategy.ledger is None else strategy.ledger.removed
        models = bits(after), bits(arrays_of(left))
        results.append((models, storage.summed, removed, told(strategy)))
        files = [path for path in storage.run_folder.rglob("*") if path.is_file()]
        kept_bytes.append(sum(path.stat().st_size for path in files))
    assert results[0] == results[1]
    assert kept_bytes[0] < kept_bytes[1]


@both
def test_no_bytes_tell_how_many_examples_are_in_sums_with_noise_or_masks(
    masked, tmp_path, monkeypatch
):
    """Of 1, 5 and 10 examples, with 20 features."""
    monkeypatch.setattr("fedntk.strategies.core.channel._release", lambda messages: None)
    parts = [(x[:n], y[:n]) for (x, y), n in zip(PARTS, (1, 5, 5, 5, 9, 10), strict=True)]
    clients = clients_of(parts, cache=tmp_path, only_masked=masked, allow_repeats=True)
    run(make(secure=True) if masked else private(), grid := Grid(clients))
    replies = [m.content["arrays"] for way, m in grid.seen if way == "up" and "arrays" in m.content]
    sizes = [tuple((k, v.numpy().nbytes) for k, v in r.items()) for r in replies if r]
    assert {sizes.count(one) for one in sizes} == {6}


def solve_directly(parts, variance):
    """Solution from rows of norm 127, without a federation."""
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    z = bound_rows(FeatureMap("last-layer").extractor(features())(x), 127).double()
    targets = nn.functional.one_hot(y, 3).double()
    return 127 * solve_noisy(z.T @ z, z.T @ targets, variance).T


@both
def test_with_hardly_any_noise_the_layer_is_that_of_the_exact_sums(masked, tmp_path):
    """Epsilon 10^16: the variance is below 1e-7, so that a whole number of the noise is 0.

    A client that is lost is not in the sums, and its share of the noise is missing.
    """
    strategy = private(epsilon=1e16, secure=masked)
    clients = clients_of(PARTS, {"epsilon": 1e16}, cache=tmp_path, only_masked=masked)
    after = run(strategy, Grid(clients, changes={2: lost}))
    noise = SumNoise.of(strategy.noise, 20, 3, 4 if masked else 0)
    variance = float(noise.variances(5 if masked else None)[0])
    assert variance < 1e-7
    expected = solve_directly([part for i, part in enumerate(PARTS) if i != 2], variance)
    np.testing.assert_allclose(after[WEIGHT], expected, rtol=1e-4, atol=1e-5)
    assert not after[BIAS].any()
    metrics = strategy.train_metrics[1]
    assert (metrics["num-examples"], metrics["delta"]) == (5, 1e-5)
    assert "train-loss" not in metrics
    assert metrics["epsilon"] == pytest.approx(noise.epsilon(1e-5, 4 if masked else None))


@both
def test_sums_with_noise_are_released_once(masked, tmp_path, monkeypatch, in_usual_network):
    """The server asks no second time, and a client answers another strategy of the run no more."""
    strategy = private(secure=masked)
    limits = {"epsilon": 7.0, "delta": 1e-3}  # of two releases
    clients = clients_of(PARTS, limits, cache=tmp_path, only_masked=masked)
    first, key = run(strategy, Grid(clients)), strategy.sums.run_key
    refused("a second release adds to epsilon", run, strategy, Grid(clients))
    assert bits(run(private(secure=masked), Grid(clients))) != bits(first)
    monkeypatch.setattr("secrets.token_hex", lambda _: key)
    third = private(secure=masked)
    if masked:  # the run's name is the server's
        start_in_vain(third, Grid(clients))
        assert "epsilon and delta of [9.0" in third.channel.last_refusal
    else:  # who has the exact sums, and is trusted with them, may get them again
        run(third, Grid(clients))


@both
def test_after_a_crash_sums_with_noise_are_not_released_again(masked, tmp_path):
    """The clients have the model of a round that no checkpoint has; epsilon would be said once."""
    clients = clients_of(PARTS, cache=tmp_path / "cache", only_masked=masked, allow_repeats=True)

    def cut_off(server_round, arrays):
        if server_round:
            raise RuntimeError("cut off")

    strategy, options = private(secure=masked), {"checkpoint": tmp_path, "evaluate_fn": cut_off}
    refused("cut off", run, strategy, Grid(clients), **options, error=RuntimeError)
    assert strategy.noise.released
    said = "or may have before its run was cut off"
    refused(said, run, private(secure=masked), Grid(clients), checkpoint=tmp_path)


class Losing(Grid):
    """Loses replies of some clients, `gone`, to some exchanges of round 1."""

    gone: dict[str, tuple[int, ...]]  # by step

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        config = messages[0].content["config"] if messages else {}
        first = config.get("server-round") == 1
        gone = self.gone.get(config.get("option-step"), ()) if first else ()
        replies = super().send_and_receive(messages)
        return [r for r in replies if r.metadata.src_node_id not in gone]


def losing(clients, **gone):
    grid = Losing(clients, node_ids=range(6))
    grid.gone = gone
    return grid


five_of_six = partial(fixed, secure=SecureAggregation(threshold=0.8))


def in_vain(said, strategy, grid):
    refused(said, run, strategy, grid, error=NoUsableReply)


@pytest.mark.parametrize(
    ("gone", "opens"),
    [
        ({}, True),
        ({"reveal": (1, 4)}, False),  # the others have given their shares
        ({"masked": (1, 4), "void": (0, 1, 3, 4)}, False),  # one of two may lie, and five open it
    ],
)
def test_a_client_gives_one_sum_of_its_data_in_all_runs(gone, opens, tmp_path):
    """Else a server asks again without client 2, and subtracts."""
    clients = clients_of(PARTS, {}, cache=tmp_path, only_masked=True)
    first, grid = five_of_six(), losing(clients, **gone)
    if opens:
        run(first, grid)
    else:
        in_vain("4 clients are left, 5 are needed", first, grid)
    assert {release.spent for release in given_in(tmp_path)} == {opens or "reveal" in gone}
    again = Grid(clients, changes={2: lost})
    in_vain("only its owner can allow another", five_of_six(), again)
    if opens:
        allowed = clients_of(PARTS, {}, cache=tmp_path, only_masked=True, allow_repeats=True)
        run(fixed(secure=True), Grid(allowed, changes={2: lost}))


def given_in(folder):
    ledgers = sorted(folder.glob("*.ledger"))
    return [release for path in ledgers for release in PrivacyLedger(path).releases()]


def test_a_sum_that_clients_gave_up_is_not_counted(tmp_path):
    """They give another in another run, or in the same one."""
    clients = clients_of(PARTS, {}, cache=tmp_path, only_masked=True)
    closed = losing(clients, masked=(1, 4))
    in_vain("4 clients are left, 5 are needed", five_of_six(), closed)
    again = five_of_six()
    after = run(again, losing(clients, confirm=(0, 3), free=range(6)), rounds=2)
    assert told(again) == [0, 6]
    assert bits(after) == bits(run(fixed(), Grid(CLIENTS)))
    assert [release.spent for release in given_in(tmp_path)] == [True] * 6


def test_a_budget_is_not_spent_on_a_sum_that_clients_gave_up(tmp_path):
    """But those who do not hear from enough others that it was given up have spent it."""
    limits = {"epsilon": 3.0, "delta": 1e-5}
    clients = clients_of(PARTS, limits, cache=tmp_path, only_masked=True)
    closed = private(secure=SecureAggregation(threshold=0.8))
    in_vain("4 clients are left", closed, losing(clients, masked=(1, 4), void=(1,)))
    run(again := private(secure=True), Grid(clients))
    assert told(again) == [5]
    assert "privacy: this client's sums" in again.channel.last_refusal
    assert again.noise.epsilon_reached <= 3.0


def test_what_is_spent_or_of_another_sum_is_not_freed(tmp_path):
    """Nor is what a trusted server was sent, whose run may have the name of an exchange."""
    limits = owned(tmp_path, 0, epsilon=9.0, delta=0.5)
    secure = MaskedSums(cache=tmp_path, privacy=limits)
    client = ClosedFormClient(features(), *PARTS[0], seed=(0, 0), secure=secure)
    task = SumTask(bits=8, epsilon=1.0, run_key="a run")
    for name in ("55", "66", "77"):
        client.secure.reserve(client.sum_request(replace(task, run_key=name), {}), name)
    limits.settle("66", opened=True)
    for name in ("55", "66", "88", "a run"):
        limits.settle(name, opened=False)
    assert {r.exchange: r.spent for r in given_in(tmp_path)} == {"66": True, "77": False}
    run(strategy := private(), Grid(clients_of(PARTS, {"epsilon": 9.0}, cache=tmp_path / "b")))
    names = {f"sums of {strategy.sums.run_key} by {client}" for client in range(6)}
    assert {r.exchange for r in given_in(tmp_path / "b")} == names


@both
def test_a_clients_budget_is_of_all_its_runs(masked, tmp_path):
    """Epsilon 1 and delta 1e-5 a run: two runs of them are within 2.5 and 2e-5, three are not."""
    of = partial(clients_of, PARTS, cache=tmp_path, only_masked=masked)
    clients = of({"epsilon": 2.0, "delta": 2e-5})
    make_private = partial(private, epsilon=1.0, secure=masked)
    for _ in range(2):
        run(strategy := make_private(), Grid(clients))
        assert told(strategy) == [6]
    for epsilon, delta in ((2.5, 2.1e-5), (9.0, 2.1e-5), (2.5, 1e-3)):
        limited = Grid(of({"epsilon": epsilon, "delta": delta}))
        in_vain(r"epsilon and delta of \[3.0, 3", make_private(), limited)
    raised = of({"epsilon": 9.0, "delta": 1e-3})
    run(make_private(), Grid(raised))
    if masked:  # exact sums leave no room for any noise to help
        run(fixed(secure=True), Grid(of({}, allow_repeats=True)))
        in_vain(r"delta of \[inf", make_private(), Grid(raised))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"auto_ridge": True, "validation_share": 0.1}, "validation_share: .* expected 0.0, got"),
        ({"auto_ridge": True}, "auto_ridge: .* expected False, got True"),
        ({"validation": examples(7)}, "validation: .* expected None, got"),
        ({"storage": KeptSums("folder")}, "storage: .* expected None, got KeptSums"),
        ({"bits": 32}, "bits: .* expected 2 or 3 or .* or 8, got 32"),
        ({"ledger": Ledger(0.1)}, "ledger: .* expected None, got Ledger"),
        ({"asynchrony": True}, "asynchrony: .* expected None, got Asynchrony"),
    ],
)
def test_what_would_tell_more_than_the_sums_with_noise_is_refused(options, said):
    refused(said, private, **options)


def test_clients_refuse_less_noise_than_they_agree_to(tmp_path, in_usual_network):
    """Also no noise at all, and evaluation on the examples of the sums."""
    clients = clients_of(PARTS, {"epsilon": 1.0}, cache=tmp_path)
    for kind in (fixed, private, partial(private, epsilon=1.0, delta=1e-4)):
        start_in_vain(kind(), Grid(clients))
    strategy = private(epsilon=1.0, fraction_evaluate=1.0)
    run(strategy, Grid(clients))
    assert told(strategy) == [6]
    assert strategy.evaluate_metrics[1]["replies-accepted"] == 0


def times(factor, **others):
    """Arrays as of so many times the examples; of some names, other numbers."""
    changed = {name.replace("_", "-"): np.array(array) for name, array in others.items()}
    return with_arrays(lambda a: {n: np.int64(factor) * array for n, array in a.items()} | changed)


@pytest.mark.parametrize(
    ("change", "reason", "options"),
    [
        (damaged(0, lambda gram: 2 * gram), "range", {}),
        (damaged(1, lambda sums: np.roll(sums, 1, 0)), "range", {}),  # of other classes
        (damaged(2, lambda counts: np.array([counts.sum() - 1, 0, 1])), "range", {}),
        (times(10**8), "num-examples", {}),
        (times(1, counts=[2**63 - 1] * 3), "num-examples", {}),
        (times(1, counts=[2**63 - 1, 0, 0], class_sums=np.zeros((3, 20), int)), "num-examples", {}),
        (  # who has more draws 4
            with_arrays(lambda arrays: {n: 2 * array for n, array in arrays.items()}),
            "num-examples",
            {"client_examples": 4},
        ),
        (damaged(0, lambda gram: gram * 1e6), "scale", {"noise": None, "bits": 32}),
        (damaged(1, lambda sums: sums * 100), "range", {"noise": None}),
        (damaged(2, lambda counts: counts + 1), "num-examples", {"noise": None}),
    ],
)
def test_sums_of_no_rows_that_a_client_may_have_are_dropped(
    change, reason, options, monkeypatch, in_usual_network
):
    """Before there is noise, if any; also in agreement, and beyond what int64 can add up."""
    monkeypatch.setattr("secrets.randbits", lambda n: 2**n // 3)  # the same noise
    kind = fixed if "noise" in options else private
    strategy, _ = run_as_if_lost(partial(kind, **options), CLIENTS, change, reason)
    assert strategy.noise is None or strategy.noise.released


@pytest.mark.parametrize(("where", "burnt"), [("require_memory", False), ("solve_noisy", True)])
def test_what_fails_before_the_noise_is_no_release_and_after_it_is_one(where, burnt, monkeypatch):
    module = SumNoise.__module__ if where == "require_memory" else NoisySums.__module__
    raised = []

    def fail(*_, **__):
        raised.append(monkeypatch.undo())
        raise NotEnoughMemory

    monkeypatch.setattr(f"{module}.{where}", fail)
    strategy = private()
    if burnt:
        refused("a second release adds to epsilon", run, strategy, Grid(CLIENTS), 2)
    else:
        run(strategy, Grid(CLIENTS), 2)
    assert len(raised) == 1
    assert strategy.solved is not burnt


def test_features_of_unknown_size_need_examples_on_the_server_or_float64():
    strategy = OneExchange(network=network(), **OPTIONS)
    said = "bits = 8: pass validation, examples on the server, or a"
    refused(said, start, strategy, Grid(CLIENTS))
    strategy = make(network=network(), validation=examples(7))
    assert (strategy.choose_steps(ArrayRecord(network().state_dict())) > 0).all()
    refused("personal: expected a sums.validation_share above 0", fixed, personal=True)
    refused("auto_ridge = True: pass sums.validation, .*, or set vali", make, validation_share=0.0)


def test_whole_numbers_are_added_as_they_come_so_many_clients_need_memory_for_few():
    many, said = {"min_available_nodes": 10**12}, "20 features from 1000000000000 clients"
    make(**many).require_memory()
    for options in ({"bits": 32}, {"secure": True}):
        refused(said, make(**many, **options).require_memory, error=NotEnoughMemory)
