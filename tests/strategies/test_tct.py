"""TCT against algorithm 1 of its paper, its limits, and what clients may do to it."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedntk.clients import BootstrapSGD, LocalSGD, SGDClient, TCTClient, received
from fedntk.clients.tct import feature_store
from fedntk.ntk import FeatureMap, one_hot
from fedntk.ntk.convex.pooled_statistics import RIDGES
from fedntk.ntk.payloads.compression import UNQUANTISED
from fedntk.strategies import TCT, FeatureSums, Sampling, SeededFedAvg

from ..conftest import refused
from .federation import (
    Contract,
    Grid,
    InOrder,
    app,
    bits,
    damaged,
    examples,
    failed,
    in_rounds,
    lost,
    network,
    run_as_if_lost,
    start,
    told,
    with_metrics,
)

LINEAR = "tct.linear"
OPTIONS = {
    "fraction_train": 1.0, "fraction_evaluate": 0.0, "num_features": 12, "learning_rate": 0.02,
    "local_steps": 20,
}  # fmt: skip


def make(clients=6, **options):
    return TCT(network=network(), **OPTIONS | {"min_available_nodes": clients} | options)


def sums(clients=6, **options):
    """Solve from float64 sums; options of the sums may stand beside the strategy's."""
    of_sums = {"bits": UNQUANTISED, "validation_share": 0.0, "auto_ridge": False}
    of_sums |= {name: options.pop(name) for name in FeatureSums.options().keys() & options.keys()}
    return make(clients, sums=FeatureSums(**of_sums), **options)


def served(cache, kind=TCTClient, **options):
    sgd = BootstrapSGD(epochs=1, learning_rate=0.1, batch_size=4)
    return app(kind, cache=cache, sgd=sgd, **options)


def pooled(partitions=range(6)):
    return tuple(torch.cat(parts) for parts in zip(*map(examples, partitions), strict=True))


def held():
    """Examples that no client has."""
    return pooled(range(10, 14))


FIXED = {"bits": 8, "validation": held()}


def rows(x):
    """Features of the first weights."""
    return FeatureMap(num_features=12).extractor(network())(x).double()


def targets(y):
    return one_hot(y, 3).double() - 1 / 3


def normalised(z, by, weights=None):
    w = torch.ones(len(by)).double() if weights is None else weights
    mean = w @ by / w.sum()
    std = (w @ (by - mean) ** 2 / w.sum()).sqrt()
    std[std < 1e-6] = torch.inf
    return (z - mean) / std


def with_ones(z):
    return torch.cat([z, torch.ones(len(z), 1).double()], 1)


def features(partitions=6, *, normalise=True):
    """Z_k, the bias's 1 last, and centred Y_k of each client, normalised over all at once."""
    by, parts = rows(pooled(range(partitions))[0]), []
    for x, y in map(examples, range(partitions)):
        z = normalised(rows(x), by) if normalise else rows(x)
        parts.append((with_ones(z), targets(y)))
    return parts


def first(partitions=6, *, normalise=True):
    """The model that stage 2 begins with: the bias is the classes' shares minus 1/C."""
    theta = torch.zeros(13, 3).double()
    theta[12] = targets(pooled(range(partitions))[1]).mean(0) * normalise
    return theta


def solved(ridge=1e-2, *, bias=True, normalise=True, weights=None, data=None):
    """Weighted ridge regression on all clients' rows; the ridge is over the mean of |z_i|^2.

    It leaves the bias out, and grows with the weights' own mean by weight.
    """
    x, y = data or pooled()
    w = torch.ones(len(y)).double() if weights is None else weights
    z = normalised(rows(x), rows(x), w) if normalise else rows(x)
    rho = ridge * (w @ z.square().sum(1) / w.sum()) * (w @ w / w.sum())
    z = with_ones(z) if bias else z
    gram = z.T @ (w[:, None] * z)
    gram[:12, :12] += rho * torch.eye(12).double()
    return torch.linalg.solve(gram, z.T @ (w[:, None] * targets(y)))


def errors(fit, others, of_class):
    """Weighted squared errors on other examples of each ridge's solution, in float64."""
    weights, result = of_class[fit[1]], {}
    z = normalised(rows(others[0]), rows(fit[0]), weights)
    for ridge in RIDGES:
        misses = with_ones(z) @ solved(ridge, weights=weights, data=fit) - targets(others[1])
        result[ridge] = float((of_class[others[1], None] * misses.square()).sum())
    return result


def distance(array, reference):
    return float(np.linalg.norm(array - np.asarray(reference)) / np.linalg.norm(reference))


CACHE = tempfile.TemporaryDirectory()  # removed when the tests end
FLOWERS = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
STAGE_1 = {"bootstrap": FLOWERS, "bootstrap_rounds": 2}


def contract(once=False, **fixed):
    clients = served(Path(CACHE.name))
    return Contract(lambda **options: TCT(network=network(), **fixed | options), clients, once=once)


FLOAT64 = FeatureSums(bits=UNQUANTISED, validation_share=0.0, auto_ridge=False)
SHARE = {"sums": FeatureSums(bits=UNQUANTISED, validation_share=0.25)}
CONTRACT = {
    "TCT, stage 1": contract(bootstrap=FLOWERS),
    "TCT, stage 2": contract(normalise=False, learning_rate=0.05, local_steps=5),
    "TCT, statistics with a share held out": contract(once=True, num_features=12, **SHARE),
}


@pytest.fixture
def clients(tmp_path):
    return served(tmp_path)


def scaffold(sampled, *, eta=0.02, reset=-1, corrected=True, normalise=True):
    """SCAFFOLD's option II, 20 steps; all c_k are zero after round `reset`. Else algorithm 1."""
    data = features(normalise=normalise)
    sizes = [len(z) for z, _ in data]
    theta = first(normalise=normalise)
    controls, mean = [torch.zeros_like(theta)] * 6, torch.zeros_like(theta)
    for number, chosen in enumerate(sampled):
        local, new = [], list(controls)
        for k in chosen:
            (z, y), w = data[k], theta
            for _ in range(20):
                w = w - eta * (z.T @ (z @ w - y) / len(z) - (controls[k] - mean))
            local.append(w)
            if corrected:
                new[k] = controls[k] - mean + (theta - w) / (20 * eta)
        parts = [sizes[k] * w for k, w in zip(chosen, local, strict=True)]
        theta = sum(parts) / sum(sizes[k] for k in chosen) if parts else theta
        controls = [0 * c for c in controls] if number == reset else new
        mean = sum(n * c for n, c in zip(sizes, controls, strict=True)) / sum(sizes)
    return theta


def descent(partitions, steps):
    z, y = (torch.cat(parts) for parts in zip(*features(partitions), strict=True))
    w = first(partitions)
    for _ in range(steps):
        w = w - 0.02 * z.T @ (z @ w - y) / len(z)
    return w


ALL = [range(6)] * 3


@pytest.mark.parametrize(
    ("number", "options", "expected"),
    [
        (6, {}, lambda: scaffold(ALL)),
        (6, {"normalise": False}, lambda: scaffold(ALL, normalise=False)),
        (6, {"optimizer": "fedavg"}, lambda: scaffold(ALL, corrected=False)),
        (6, {"optimizer": "gd"}, lambda: descent(6, 3)),
        (1, {}, lambda: descent(1, 60)),  # h = c_1 - c = 0
    ],
)
def test_rounds_of_all_clients_are_algorithm_1_and_its_limits(clients, number, options, expected):
    strategy = make(number, min_train_nodes=1, **options)
    grid = Grid(clients, num_clients=number)
    after = start(strategy, grid, rounds=3 + strategy.normalise)
    assert distance(after[LINEAR], expected()) < 1e-5
    assert strategy.normalise or (after["tct.scale"] == 1).all()


def test_with_some_clients_a_round_it_is_scaffold_and_c_travels(clients):
    grid = Grid(clients)
    after = start(make(fraction_train=0.5, min_train_nodes=3), grid, rounds=7)
    chosen = [sorted(grid.trained[i : i + 3]) for i in range(6, 24, 3)]
    assert len({*map(tuple, chosen)}) > 2
    assert distance(after[LINEAR], scaffold(chosen)) < 1e-4


def test_a_reply_that_never_came_does_not_change_c(clients):
    strategy, grid = make(), Grid(clients)
    grid.changes = {k: in_rounds(strategy, [3], change) for k, change in ((2, lost), (4, failed))}
    after = start(strategy, grid, rounds=5)
    expected = scaffold([range(6), [0, 1, 3, 5], range(6), range(6)])
    assert distance(after[LINEAR], expected) < 1e-4


def test_a_client_whose_replies_are_lost_for_long_goes_on_from_its_last_c_k(clients, monkeypatch):
    """More rounds in a row than states are kept: no correction starts again."""
    monkeypatch.setattr(feature_store, "STATES", 2)
    strategy, grid = make(normalise=False), Grid(clients)
    grid.changes = {2: in_rounds(strategy, range(3, 6), lost)}
    after = start(strategy, grid, rounds=7)
    sampled = [range(6)] * 2 + [[0, 1, 3, 4, 5]] * 3 + [range(6)] * 2
    assert distance(after[LINEAR], scaffold(sampled, normalise=False)) < 1e-4
    assert "rejected-lost-state" not in strategy.train_metrics[6]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FedProx, {"proximal_mu": 0.5}), (FedAdam, {"eta": 0.05}), (SeededFedAvg, {})],
)
def test_stage_1_is_the_bootstrap_strategy_run_by_itself(tmp_path, kind, options):
    """FedAdam makes float64, which stays float32 here from round to round. Else the first round is
    the same bit for bit, but for numbers on which all clients agree, whose mean Flower rounds.

    Clients train as in section 5.1 by default: 5 epochs, batches of 64, weight decay 1e-5.
    """
    options = {"fraction_evaluate": 0.0, "min_available_nodes": 6} | options
    sgd = LocalSGD(epochs=5, batch_size=64, learning_rate=0.01, weight_decay=1e-5)
    assert make(3, bootstrap=kind(**options)).min_available_nodes == 6
    for rounds in (1, 2):
        expected = start(kind(**options), InOrder(app(SGDClient, sgd=sgd)), rounds)
        strategy = make(bootstrap=kind(**options), bootstrap_rounds=2)
        after = start(strategy, Grid(app(TCTClient, cache=tmp_path)), rounds)
        for key, tensor in network().state_dict().items():
            assert after[key].dtype == tensor.numpy().dtype
            if tensor.is_floating_point():  # Flower makes fractions of a count, whole here
                np.testing.assert_allclose(after[key], expected[key], rtol=1e-5, atol=1e-6)
                exact = rounds == 1 and kind is not FedAdam and key != "0.bias"
                assert not exact or (after[key] == expected[key]).all()


def test_other_arrays_than_those_of_the_network_are_refused(clients):
    said = "initial_arrays: not those of the network"
    refused(said, start, make(), Grid(clients), 1, nn.Linear(4, 3))


@pytest.mark.parametrize(("who", "stage"), [([1], "train"), (range(6), "train"), ([2], "evaluate")])
def test_clients_that_lost_everything_get_it_again(clients, tmp_path, who, stage):
    """They are sent it in the same round, and all corrections begin anew as a c_k is lost."""
    strategy, number = make(fraction_evaluate=1.0), 4 if stage == "train" else 3

    def lose(messages):
        kinds = {message.metadata.message_type for message in messages}
        if (strategy.server_round, kinds) == (number, {stage}):
            for k in who if not asked else ():
                (folder,) = tmp_path.glob(f"client-{k}/run-*")
                shutil.rmtree(folder)
            asked.append(len(messages))

    asked = []
    grid = Grid(clients, on_send=lose)
    after = start(strategy, grid, rounds=6)
    assert asked == [6, len(who)]
    assert strategy.train_metrics[4]["rejected-lost-state"] == len(who)
    assert strategy.evaluate_metrics[3]["replies-accepted"] == 6
    others = [k for k in range(6) if k not in who]
    expected = scaffold([range(6), range(6), others, range(6), range(6)], reset=2)
    assert distance(after[LINEAR], expected) < 1e-4


@pytest.mark.parametrize(
    ("options", "change", "reason", "rounds"),
    [
        (STAGE_1, damaged(0, lambda a: a + 1e4), "scale", 2),  # Flower's FedAvg would average them
        ({"normalise": False}, damaged(0, lambda a: np.full_like(a, 3e38)), "scale", 2),  # c, too
        ({}, damaged(0, lambda a: (a + 1) * 1e30), "scale", 1),
        ({}, damaged(1, lambda a: -np.abs(a) - 1), "range", 1),
    ],
)
def test_what_is_far_beyond_the_others_is_dropped(clients, options, change, reason, rounds):
    run_as_if_lost(lambda: make(**options), clients, change, reason, rounds)


def never_had(reply):
    reply.content = RecordDict({"metrics": MetricRecord({"lost-state": 1, "num-examples": 1})})
    return reply


@pytest.mark.parametrize(
    ("number", "claim", "reason"),
    [
        (3, with_metrics(lost_state=1), "lost-state"),
        (3, with_metrics(lost_state=0), "lost-state"),
        (3, with_metrics(diverged=1, rate_times_lambda=1e300), "diverged"),
        (2, never_had, "lost-state"),
    ],
)
def test_claims_of_trouble_that_cannot_be_do_nothing(clients, number, claim, reason):
    """Beside a good model, or from a client without a c_k: corrections go on."""
    results = []
    for change in (claim, lost):
        strategy, grid = make(), Grid(clients)
        grid.changes = {2: in_rounds(strategy, [number], change)}
        after = start(strategy, grid, rounds=4)
        results.append((bits(after), strategy.control.value.tobytes()))
        if change is claim:
            assert strategy.train_metrics[number][f"rejected-{reason}"] == 1
            assert strategy.train_metrics[number]["rate-times-lambda"] < 2
            assert grid.exchanges.count(("train", 6)) == 4  # no client is asked again
    assert results[0] == results[1]


def test_what_clients_say_of_their_examples_gives_no_more_weight(clients):
    strategy, grid = make(), Grid(clients)
    claims = {0: with_metrics(num_examples=100), 1: with_metrics(examples_changed=1)}
    grid.changes = {k: in_rounds(strategy, [3], claim) for k, claim in claims.items()}
    after = start(strategy, grid, rounds=4)
    assert strategy.train_metrics[3]["replies-accepted"] == 6
    assert bits(after) == bits(start(make(), Grid(clients), rounds=4))


def test_divergence_is_reported_and_is_the_loops_own_until_it_overflows(clients):
    """eta lambda_max / n = 2.1 on the worst client: its M = 20 steps grow 1.1^20-fold."""
    worst = max(float(torch.linalg.eigvalsh(z @ z.T)[-1]) / len(z) for z, _ in features())
    strategy, beyond = make(learning_rate=2.1 / worst), make(learning_rate=1e3, local_steps=500)
    after = start(strategy, Grid(clients), rounds=3)
    stays = start(beyond, Grid(clients), rounds=2)
    assert strategy.train_metrics[2]["rate-times-lambda"] == pytest.approx(2.1, rel=1e-4)
    assert distance(after[LINEAR], scaffold([range(6)] * 2, eta=2.1 / worst)) < 1e-3
    assert beyond.train_metrics[2]["rejected-diverged"] == 6
    assert not stays[LINEAR][:-1].any()  # all but the bias


def test_clients_evaluate_the_network_and_then_the_linear_model_of_its_features(clients):
    x, y = pooled()
    strategy = make(fraction_evaluate=1.0, **STAGE_1 | {"bootstrap_rounds": 1})
    after = start(strategy, Grid(clients), rounds=3)
    predictor = strategy.predictor(after)
    trained = predictor.network.eval()
    with torch.no_grad():
        scores = [trained(x), trained(x), predictor.predict(x)]
    accuracies = [strategy.evaluate_metrics[number]["accuracy"] for number in (1, 2, 3)]
    assert accuracies == pytest.approx([float((s.argmax(1) == y).double().mean()) for s in scores])
    mean = FeatureMap(num_features=12).extractor(trained)(x).mean(0)
    np.testing.assert_allclose(after["tct.mean"], mean, rtol=1e-4, atol=1e-6)


def own_test(net, partition):
    """What Flower's quickstart has: sums the loss over batches."""
    net.eval()
    loss, (x, y) = 0.0, examples(partition)
    with torch.no_grad():
        for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True):
            loss += nn.functional.cross_entropy(net(inputs), labels, reduction="sum").item()
    return loss / len(y)


def test_a_users_own_evaluation_is_given_a_module_in_every_round(clients, tmp_path):
    """On clients by the predictor that their client makes, and on the server."""

    @clients.evaluate()
    def evaluate(message, context):
        k = int(context.node_config["partition-id"])
        client = TCTClient(network(), *examples(k), seed=(0, k), cache=tmp_path)
        loss = own_test(client.predictor(*received(message, context)), k)
        values = MetricRecord({"eval_loss": loss, "num-examples": 5 + k})
        return Message(RecordDict({"metrics": values}), reply_to=message)

    kinds = []
    strategy, (x, y) = make(fraction_evaluate=1.0, **STAGE_1), examples(2)

    def evaluate_fn(_, arrays):
        predictor = strategy.predictor(arrays)
        loss = float(nn.functional.cross_entropy(predictor.predict(x), y))
        assert own_test(predictor, 2) == pytest.approx(loss, rel=1e-5)
        kinds.append(type(predictor).__name__)

    after = start(strategy, Grid(clients), rounds=5, evaluate_fn=evaluate_fn)
    assert kinds == 4 * ["NetworkPredictor"] + 2 * ["TCTModel"]
    assert [strategy.evaluate_metrics[n]["replies-accepted"] for n in range(1, 6)] == 5 * [6]
    losses = [own_test(strategy.predictor(after), k) for k in range(6)]
    expected = np.average(losses, weights=range(5, 11))
    assert strategy.evaluate_metrics[5]["eval_loss"] == pytest.approx(expected, rel=1e-5)


HALF = {"fraction_train": 0.5, "min_train_nodes": 3, "sampling": Sampling(seed=4)}


@pytest.mark.parametrize(
    ("options", "done"), [(HALF, 1), (HALF, 3), ({"sums": FLOAT64, "balanced": True}, 2)]
)
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(clients, tmp_path, options, done):
    """In a new object after a round of the bootstrap, after counts, and in stage 2."""

    def run(num_rounds, folder, **grid):
        bootstrap = SeededFedAvg(fraction_evaluate=0.0, min_available_nodes=3)
        strategy = make(bootstrap=bootstrap, bootstrap_rounds=1, **options)
        grid = Grid(clients, **grid)
        return bits(start(strategy, grid, num_rounds, checkpoint=tmp_path / folder))

    expected = run(4, "straight")
    run(done, "cut")
    assert run(4, "cut", node_ids=[9, 8, 7, 6, 5, 4]) == expected


@pytest.mark.parametrize(("change", "options"), [(failed, {}), (lost, {"sums": FLOAT64})])
def test_a_round_without_enough_answers_is_tried_again(clients, change, options):
    strategy, grid = make(min_completed=6, **options), Grid(clients)
    grid.changes = {2: in_rounds(strategy, [1], change)}
    after = start(strategy, grid, rounds=2)
    assert told(strategy) == [5, 6]
    assert bits(after) == bits(start(make(min_completed=6, **options), Grid(clients), rounds=1))
