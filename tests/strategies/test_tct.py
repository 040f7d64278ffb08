"""TCT against algorithm 1 of its paper, its limits, and what clients may do to it."""

import shutil
import tempfile
from collections.abc import Callable
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from torch import Tensor, nn

from fedntk.clients import SGDClient, TCTClient, client_app
from fedntk.clients.core.disk_store import example_digests
from fedntk.ntk import FeatureMap, Moments, NetworkPredictor, Normaliser, one_hot
from fedntk.strategies import TCT, SeededFedAvg

from .federation import (
    HALVES,
    Change,
    Contract,
    Grid,
    InOrder,
    app,
    arrays_of,
    as_record,
    bits,
    damaged,
    examples,
    failed,
    initial_bits,
    lost,
    network,
    run_as_if_lost,
    run_damaged,
    start,
    with_metrics,
)

LINEAR = "tct.linear"
OPTIONS: dict[str, Any] = {
    "fraction_train": 1.0, "fraction_evaluate": 0.0, "num_features": 12, "learning_rate": 0.02,
    "local_steps": 20,
}  # fmt: skip
CACHE = tempfile.TemporaryDirectory()  # removed when the tests end
CONTRACT = {
    "TCT, stage 1": Contract(
        lambda **options: TCT(network=network(), bootstrap=flowers_own(), **options),
        app(TCTClient, learning_rate=0.1, batch_size=4, local_epochs=1, cache=CACHE.name),
    ),
    "TCT, stage 2": Contract(
        lambda **options: TCT(
            **{"network": network(), "normalise": False, "learning_rate": 0.05, "local_steps": 5}
            | options
        ),
        app(TCTClient, cache=CACHE.name),
    ),
}


def flowers_own() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)


def make(clients: int = 6, **options: Any) -> TCT:
    return TCT(network=network(), **OPTIONS | {"min_available_nodes": clients} | options)


@pytest.fixture
def clients(tmp_path: Path) -> Any:
    return app(TCTClient, cache=tmp_path, learning_rate=0.1, batch_size=4, local_epochs=1)


def features(partitions: int, *, normalise: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Z_k and centred Y_k of each client, float64, normalised over all of them at once."""
    extract = FeatureMap(num_features=12).extractor(network())
    raw = [extract(examples(k)[0]).double() for k in range(partitions)]
    pooled = torch.cat(raw)
    mean, std = pooled.mean(0), pooled.std(0, unbiased=False)
    std[std < 1e-9] = torch.inf
    if not normalise:
        mean, std = torch.zeros(12).double(), torch.ones(12).double()
    targets = [one_hot(examples(k)[1], 3).double() - 1 / 3 for k in range(partitions)]
    return [((z - mean) / std, y) for z, y in zip(raw, targets, strict=True)]


def algorithm_1(
    data: list[tuple[Tensor, Tensor]], rounds: int, *, eta: float = 0.02, steps: int = 20
) -> Tensor:
    """The paper's loops to the letter, with full-batch gradients and weights n_k / n."""
    total = sum(len(z) for z, _ in data)
    theta = torch.zeros(data[0][0].shape[1], 3, dtype=torch.float64)
    h = [torch.zeros_like(theta) for _ in data]
    local = [theta.clone() for _ in data]
    for _ in range(rounds):
        for k, (z, y) in enumerate(data):
            h[k] = h[k] + (theta - local[k]) / (steps * eta)  # eq. (2)
            w = theta.clone()
            for _ in range(steps):
                w = w - eta * (z.T @ (z @ w - y) / len(z) - h[k])  # eq. (3)
            local[k] = w
        theta = sum(len(z) / total * w for (z, _), w in zip(data, local, strict=True))
    return theta


def distance(linear: np.ndarray, reference: Tensor) -> float:
    return float((torch.from_numpy(linear).double() - reference).norm() / reference.norm())


# ------------------------------------------------------------------------- theory


@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_full_participation_is_algorithm_1(clients, rounds):
    """The moments take a round of their own, so the first model comes in round 2."""
    after = start(make(), Grid(clients), rounds=rounds + 1)
    assert distance(after[LINEAR], algorithm_1(features(6), rounds)) < 1e-5


def test_without_normalisation_every_round_is_algorithm_1s(clients):
    after = start(make(normalise=False), Grid(clients), rounds=3)
    assert distance(after[LINEAR], algorithm_1(features(6, normalise=False), 3)) < 1e-5
    assert (after["tct.mean"] == 0).all()
    assert (after["tct.scale"] == 1).all()


def test_the_normaliser_is_that_of_the_pooled_examples(clients):
    after = start(make(), Grid(clients), rounds=1)
    extract = FeatureMap(num_features=12).extractor(network())
    pooled = torch.cat([extract(examples(k)[0]) for k in range(6)])
    expected = Normaliser.of(Moments.of(pooled))
    np.testing.assert_allclose(after["tct.mean"], expected.mean, rtol=1e-6)
    np.testing.assert_allclose(after["tct.scale"], expected.inv_std, rtol=1e-6)
    assert not after[LINEAR].any()


def test_one_client_is_gradient_descent(clients):
    """4 rounds of 20 steps are 80 steps: with one client h = c_1 - c = 0."""
    ((z, y),) = features(1)
    w = torch.zeros(12, 3).double()
    for _ in range(80):
        w = w - 0.02 * z.T @ (z @ w - y) / len(z)
    after = start(make(1, min_train_nodes=1), Grid(clients, num_clients=1), rounds=5)
    assert distance(after[LINEAR], w) < 1e-5


def test_gradient_descent_is_one_step_a_round_on_the_pooled_loss(clients):
    data = features(6)
    z, y = torch.cat([z for z, _ in data]), torch.cat([y for _, y in data])
    w = torch.zeros(12, 3).double()
    for _ in range(6):
        w = w - 0.02 * z.T @ (z @ w - y) / len(z)
    after = start(make(optimizer="gd"), Grid(clients), rounds=7)
    assert distance(after[LINEAR], w) < 1e-5


def pooled_optimum(data: list[tuple[Tensor, Tensor]]) -> Tensor:
    z, y = torch.cat([z for z, _ in data]), torch.cat([y for _, y in data])
    return torch.linalg.lstsq(z, y, driver="gelsd").solution


def test_corrected_steps_find_the_pooled_optimum_and_uncorrected_ones_another_point(clients):
    """12 features of 45 examples: one optimum (on the features that vary)."""
    optimum = pooled_optimum(features(6))
    errors = {}
    for optimizer in ("scaffold", "fedavg"):
        after = start(make(optimizer=optimizer, learning_rate=0.1), Grid(clients), rounds=61)
        errors[optimizer] = distance(after[LINEAR], optimum)
    assert errors["scaffold"] < 0.003
    assert errors["fedavg"] > 0.3


def test_partial_participation_finds_it_too_and_c_stays_the_mean_of_the_clients(clients, tmp_path):
    """c = sum_k n_k c_k / n with c_k = -Z_k^T A_k from the clients' own files (SCAFFOLD's rule)."""
    options = {"fraction_train": 0.5, "min_train_nodes": 3, "learning_rate": 0.1}
    strategy = make(**options)
    after = start(strategy, Grid(clients), rounds=71)
    assert distance(after[LINEAR], pooled_optimum(features(6))) < 0.02
    assert_mean_of_clients(strategy, tmp_path)


def assert_mean_of_clients(strategy: TCT, cache: Path) -> None:
    data = features(6)
    total = sum(len(z) for z, _ in data)
    mean = torch.zeros(12, 3).double()
    for k, (z, _) in enumerate(data):
        newest = strategy.control.rounds.get(k, 0)
        if newest:
            (folder,) = cache.glob(f"run-*-client-{k}")
            with np.load(folder / f"state-{newest:06}.npz") as saved:
                x, y = examples(k)
                order = np.lexsort(example_digests(x, one_hot(y, 3)).T)  # a client's own
                mean -= len(z) / total * z[order].T @ torch.from_numpy(saved["coefficients"])
    scale = float(mean.norm()) + 0.1
    assert float((torch.from_numpy(strategy.control.value) - mean).norm()) < 2e-4 * scale


def test_a_reply_that_never_came_does_not_change_c(clients, tmp_path):
    """Client 2 takes its steps in rounds 3 and 5, but the server never hears of them."""
    strategy = make()
    grid = Grid(clients)
    rounds = {3: lost, 5: failed}

    def sometimes(reply: Message) -> Message | None:
        return rounds.get(strategy.server_round, lambda r: r)(reply)

    grid.changes = {2: sometimes}
    start(strategy, grid, rounds=6)
    assert strategy.train_metrics[3]["replies-accepted"] == 5
    assert strategy.control.rounds[2] == 6
    assert_mean_of_clients(strategy, tmp_path)


@pytest.mark.parametrize("bias", [False, True])
def test_the_server_solves_the_ridge_regression_of_the_pooled_features(clients, bias):
    """In the primal: (Z^T Z + rho I) W = Z^T Y, rho = 1e-2 times the mean of |z_i|^2.

    Features travel in float16, 2^-11 of each feature's largest magnitude.
    """
    data = features(6)
    z, y = torch.cat([z for z, _ in data]), torch.cat([y for _, y in data])
    if bias:
        z = torch.cat([z, torch.ones(len(z), 1).double()], 1)
    rho = 1e-2 * float((z * z).sum(1).mean())
    expected = torch.linalg.solve(z.T @ z + rho * torch.eye(z.shape[1]).double(), z.T @ y)
    grid = Grid(clients)
    after = start(make(solve="server", ridge=1e-2, bias=bias), grid, rounds=3)
    assert distance(after[LINEAR], expected) < 5e-3
    assert [kind for kind, _ in grid.exchanges].count("train") == 1  # then it is solved


def test_stage_2_approaches_the_servers_solution(clients):
    """To within what float16 and the ridge leave: 1e-4 of |z|^2 = 9, against eigenvalues of 3.3 up.

    A smaller ridge would fit the rounding of features that depend on each other.
    """
    exact = start(make(solve="server", ridge=1e-4), Grid(clients), rounds=1)[LINEAR]
    reference = torch.from_numpy(exact).double()
    errors = [
        distance(start(make(learning_rate=0.1), Grid(clients), rounds=r)[LINEAR], reference)
        for r in (2, 11, 41)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 < 0.2 < errors[0]


@pytest.mark.parametrize("sparsity_and_bits", [(0.0, 8), (0.5, 16)])
def test_compressed_features_solve_nearly_the_same_problem(clients, sparsity_and_bits):
    sparsity, bits_ = sparsity_and_bits
    whole = start(make(solve="server", ridge=0.1), Grid(clients))[LINEAR]
    small = start(make(solve="server", ridge=0.1, sparsity=sparsity, bits=bits_), Grid(clients))[
        LINEAR
    ]
    error = np.linalg.norm(small - whole) / np.linalg.norm(whole)
    assert 0 < error < (0.1 if sparsity == 0 else 0.7)


def test_no_bootstrap_and_no_rounds_leave_zero_weights(clients):
    for strategy in (make(), make(bootstrap=None, bootstrap_rounds=7)):
        after = start(strategy, Grid(clients), rounds=0)
        assert after[LINEAR].shape == (12, 3)
        assert not after[LINEAR].any()
        assert bits({k: after[k] for k in network().state_dict()}) == initial_bits()


# ------------------------------------------------------------------------ stage 1

BOOTSTRAPS: dict[str, Callable[..., FedAvg]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda **o: FedProx(proximal_mu=0.5, **o),
    "FedAdam": lambda **o: FedAdam(eta=0.05, **o),
    "SeededFedAvg": SeededFedAvg,
}


@pytest.mark.parametrize("name", sorted(BOOTSTRAPS))
def test_stage_1_is_the_bootstrap_strategy_run_by_itself(clients, name):
    """Bit for bit, as replies come by partition, the order in which Flower then adds them up.

    FedAdam makes weights of float64, which stay float32 here from round to round.
    """

    options = {"fraction_evaluate": 0.0, "min_available_nodes": 6}
    alone = app(SGDClient, learning_rate=0.1, batch_size=4, weight_decay=1e-5)
    expected = start(BOOTSTRAPS[name](**options), InOrder(alone), rounds=3)
    strategy = make(bootstrap=BOOTSTRAPS[name](**options), bootstrap_rounds=3)
    after = start(strategy, Grid(clients), rounds=3)
    for key, tensor in network().state_dict().items():
        assert after[key].dtype == tensor.numpy().dtype
        if tensor.is_floating_point():  # Flower makes fractions of a count, which stays whole here
            np.testing.assert_allclose(after[key], expected[key], rtol=1e-5, atol=1e-6)
            assert name == "FedAdam" or (after[key] == expected[key]).all()
    assert strategy.train_metrics[3]["replies-accepted"] == 6


def test_features_are_of_the_bootstrapped_network(clients):
    strategy = make(bootstrap=SeededFedAvg(fraction_evaluate=0.0), bootstrap_rounds=2)
    after = start(strategy, Grid(clients), rounds=4)
    trained = network()
    trained.load_state_dict({k: torch.tensor(after[k]) for k in trained.state_dict()})
    extract = FeatureMap(num_features=12).extractor(trained)
    pooled = torch.cat([extract(examples(k)[0]) for k in range(6)])
    np.testing.assert_allclose(after["tct.mean"], pooled.mean(0), rtol=1e-4, atol=1e-6)


def test_a_bootstraps_own_aggregation_of_metrics_gets_what_all_clients_report(clients):
    def loss_of(contents: list[RecordDict], _: str) -> MetricRecord:
        return MetricRecord({"worst": max(float(c["metrics"]["train-loss"]) for c in contents)})

    bootstrap = FedAvg(
        fraction_evaluate=0.0, train_metrics_aggr_fn=loss_of, weighted_by_key="num-examples"
    )
    strategy = make(bootstrap=bootstrap, bootstrap_rounds=1)
    start(strategy, Grid(clients), rounds=1)
    assert strategy.train_metrics[1]["worst"] > strategy.train_metrics[1]["train-loss"]


def test_a_bootstrap_that_raises_leaves_the_network(clients, caplog):
    class Broken(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            raise KeyError("nothing")

    strategy = make(bootstrap=Broken(fraction_evaluate=0.0), bootstrap_rounds=1)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(clients), rounds=2)
    assert any("Broken failed" in record.getMessage() for record in caplog.records)
    assert bits({k: after[k] for k in network().state_dict()}) == initial_bits()


def test_min_completed_counts_in_stage_1_too(clients):
    bootstrap = SeededFedAvg(fraction_evaluate=0.0)
    strategy = make(bootstrap=bootstrap, bootstrap_rounds=1, min_completed=6)
    after = start(strategy, Grid(clients, changes={2: lost}), rounds=1)
    assert bits({k: after[k] for k in network().state_dict()}) == initial_bits()


def test_a_bootstrap_that_would_wait_for_ever_is_refused(clients):
    bootstrap = FedAvg(fraction_evaluate=0.0, min_available_nodes=6)
    strategy = make(bootstrap=bootstrap, fraction_train=0.5, min_train_nodes=3)
    with pytest.raises(ValueError, match="waits for min_available_nodes = 6, and 3 nodes"):
        start(strategy, Grid(clients))


# ------------------------------------------------------------------- what travels


def test_only_the_linear_model_travels_once_clients_have_the_rest(clients):
    strategy, sent = make(), []

    def note(messages: list[Message]) -> None:
        for message in messages:
            records = message.content.array_records.items()
            names = tuple((part, *record) for part, record in records)
            sent.append((strategy.server_round, names))

    def answered(reply: Message) -> Message:
        for record in reply.content.array_records.values():
            sent.append((strategy.server_round, tuple(a.shape for a in record.values())))
        return reply

    grid = Grid(clients, changes=dict.fromkeys(range(6), answered), on_send=note)
    start(strategy, grid, rounds=5)
    normaliser, linear = ("normaliser", "tct.mean", "tct.scale"), ("linear", LINEAR)
    both = {(p, c) for p, c in sent}
    assert {c for r, c in both if r == 1} == {(("network", *network().state_dict()),), ((12,),) * 2}
    assert {c for r, c in both if r == 2} == {(normaliser, linear), ((12, 3),)}
    for number in (3, 4, 5):
        assert {c for r, c in both if r == number} == {(linear,), ((12, 3),)}


def test_c_travels_where_the_last_round_was_not_all_of_them(clients):
    grid = Grid(clients)
    strategy = make(fraction_train=0.5, min_train_nodes=3)
    start(strategy, grid, rounds=3)
    messages = list(strategy.configure_train(4, strategy.global_arrays, ConfigRecord(), grid))
    assert len(messages) == 3
    for message in messages:
        assert message.content["config"]["option-control"] == "sent"
        assert list(message.content.array_records)[-2:] == ["linear", "control"]
        (control,) = message.content["control"].values()
        assert control.numpy().tobytes() == strategy.control.value.tobytes()


# ------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("who", [[1], range(6)])
def test_clients_that_lost_everything_get_it_again(clients, tmp_path, who, caplog):
    """All corrections begin anew, and the optimum is the same.

    In round 10 they are sent the network at once; then they find that c_k is lost, too.
    """
    strategy = make(learning_rate=0.1)
    grid = Grid(clients)
    original = strategy.configure_train

    def lose(server_round: int, *arguments: Any) -> Any:
        if server_round == 10:
            for k in who:
                shutil.rmtree(*tmp_path.glob(f"run-*-client-{k}"))
        return original(server_round, *arguments)

    strategy.configure_train = lose  # type: ignore[method-assign]
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, grid, rounds=61)
    lost_in = [strategy.train_metrics[r].get("rejected-lost-state", 0) for r in range(9, 13)]
    assert lost_in == [0, len(who), 0, 0]
    assert grid.exchanges.count(("train", len(who))) == (61 if len(who) == 6 else 0) + 1
    assert strategy.train_metrics[11]["replies-accepted"] == 6
    assert any("all corrections start again" in r.getMessage() for r in caplog.records)
    assert distance(after[LINEAR], pooled_optimum(features(6))) < 0.02


def test_a_client_that_lost_the_network_evaluates_all_the_same(clients, tmp_path):
    """It is sent it again with the same configuration, and counts in the same round."""
    strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=6)
    grid, seen = Grid(clients), []
    original = strategy.configure_evaluate

    def lose(server_round: int, *arguments: Any) -> Any:
        if server_round == 4:
            shutil.rmtree(*tmp_path.glob("run-*-client-2"))
        return original(server_round, *arguments)

    def watch(client: int, stage: str, arrays: Any, config: Any) -> Any:
        seen.append((strategy.server_round, client, stage, config.get("colour")))
        return TCT.content_for(strategy, client, stage, arrays, config)

    strategy.configure_evaluate = lose  # type: ignore[method-assign]
    strategy.content_for = watch  # type: ignore[method-assign]
    start(strategy, grid, rounds=4, evaluate_config=ConfigRecord({"colour": "blue"}))
    assert strategy.evaluate_metrics[4]["replies-accepted"] == 6
    assert strategy.evaluate_metrics[4]["replies-rejected"] == 0
    assert seen[-1] == (4, 2, "evaluate", "blue")
    assert grid.exchanges[-2:] == [("evaluate", 6), ("evaluate", 1)]


def restless(cache: Path, change: Callable[[Tensor, Tensor], Any], **options: Any) -> ClientApp:
    """Clients whose client_fn gives other tensors in each message, as shuffling loaders do."""

    def client_fn(context: Context) -> TCTClient:
        partition = int(context.node_config["partition-id"])
        return TCTClient(network(), *change(*examples(partition)), cache=cache, **options)

    return client_app(client_fn)


def test_clients_whose_loaders_shuffle_learn_as_those_whose_do_not(tmp_path):
    """All replies count in all rounds, in one folder a client, to the same bits."""
    generator = torch.Generator().manual_seed(0)

    def shuffle(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(x), generator=generator)
        return x[order], y[order]

    results = []
    for name, change in (("still", lambda x, y: (x, y)), ("shuffled", shuffle)):
        strategy = make(fraction_evaluate=1.0, min_evaluate_nodes=6)
        results.append(start(strategy, Grid(restless(tmp_path / name, change)), rounds=6))
        accepted = [strategy.train_metrics[r]["replies-accepted"] for r in range(1, 7)]
        assert accepted == [6] * 6
        assert len(list((tmp_path / name).iterdir())) == 6
    assert bits(results[0]) == bits(results[1])


def test_two_runs_at_once_with_equal_settings_do_not_disturb_each_other(tmp_path):
    """Of other examples, in one cache, round by round in turns."""

    def run(cache: Path, shift: float, alone: bool) -> Any:
        clients = restless(cache, lambda x, y: (x + shift, y))
        strategy = make()
        if alone:
            return bits(start(strategy, Grid(clients), rounds=5))
        original = strategy.configure_train

        def other_first(server_round: int, *arguments: Any) -> Any:
            if server_round == 3:
                others.append(run(cache, 1.0 - shift, True))
            return original(server_round, *arguments)

        strategy.configure_train = other_first  # type: ignore[method-assign]
        return bits(start(strategy, Grid(clients), rounds=5))

    others: list[Any] = []
    expected = [run(tmp_path / str(shift), shift, True) for shift in (0.0, 1.0)]
    assert [run(tmp_path / "both", 0.0, False), *others] == expected


def test_a_client_with_more_examples_than_before_counts_as_before(tmp_path, caplog):
    calls: dict[int, int] = {}

    def grow(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls[len(x)] = calls.get(len(x), 0) + 1
        more = calls[len(x)]
        return torch.cat([x, x[:1] + torch.arange(more)[:, None]]), torch.cat(
            [y, y[:1].repeat(more)]
        )

    strategy = make()
    with caplog.at_level(WARNING, "flwr"):
        start(strategy, Grid(restless(tmp_path, grow)), rounds=5)
    assert [strategy.train_metrics[r]["replies-accepted"] for r in range(1, 6)] == [6] * 5
    assert "client 0 had 6 examples before and has 7 now; it counts with 6" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (FedProx(proximal_mu=0.1), FedProx(proximal_mu=10.0), "proximal_mu"),
        (FedAvg(fraction_train=1.0), FedAvg(fraction_train=0.5), "fraction_train"),
        (SeededFedAvg(), SeededFedAvg(seed=3), "seed"),
        (FedAvg(), FedAdam(), "strategy"),
    ],
)
def test_a_state_with_another_bootstrap_is_refused(before, after, name):
    with pytest.raises(ValueError, match=f"expected bootstrap = .*{name}"):
        make(bootstrap=after).load_state_dict(make(bootstrap=before).state_dict())


def test_an_evaluation_that_takes_all_arrays_for_the_networks_is_told_what_to_use(clients):
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        network().load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({})

    with pytest.raises(RuntimeError, match=r"TCT passes it .* use strategy.predictor\(arrays\)"):
        start(make(), Grid(clients), evaluate_fn=evaluate)


@pytest.mark.parametrize("keep", ["features", "nothing"])
def test_clients_that_augment_anew_in_each_message_are_told_and_still_learn(tmp_path, caplog, keep):
    generator = torch.Generator().manual_seed(0)

    def augment(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 0.1 * torch.randn(x.shape, generator=generator), y

    strategy = make(learning_rate=0.05)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(restless(tmp_path, augment, keep=keep)), rounds=20)
    for number in range(2, 21):
        metrics = strategy.train_metrics[number]
        assert (metrics["replies-accepted"], metrics["examples-changed"]) == (6, 1.0)
    assert len(list(tmp_path.iterdir())) == 6
    assert "6 clients have other examples than before (0 ...)" in caplog.text
    # near the optimum of the examples without noise, whose distance to zero is 1
    assert distance(after[LINEAR], pooled_optimum(features(6))) < 0.3


def test_a_client_without_the_network_after_an_error_is_sent_it_again(clients):
    strategy = make()
    start(strategy, Grid(clients, changes={2: failed}), rounds=3)
    assert strategy.sent.lacks(2, "network", "normaliser") == ["network", "normaliser"]
    assert not strategy.sent.lacks(1, "network", "normaliser")


@pytest.mark.parametrize("options", [{}, {"solve": "server"}], ids=["moments", "features"])
@pytest.mark.parametrize("kinds", HALVES, ids=" and ".join)
def test_damaged_answers_leave_the_result_without_those_clients(clients, options, kinds):
    attacked = run_damaged(make(**options), clients, kinds)
    without = Grid(clients, changes=dict.fromkeys(range(1, 5), lost))
    assert attacked == bits(start(make(**options), without))


STAGE_1 = {"bootstrap": flowers_own(), "bootstrap_rounds": 2}


@pytest.mark.parametrize(
    ("options", "change", "reason", "rounds"),
    [
        (STAGE_1, damaged(0, lambda a: a + 1e4), "scale", 2),  # Flower's FedAvg would average them
        ({"normalise": False}, damaged(0, lambda a: a + 1e3), "scale", 2),
        ({"normalise": False}, damaged(0, lambda a: np.full_like(a, 3e38)), "scale", 2),  # c, too
        # the moments' means and squared deviations: all normalised features would be 0
        ({}, damaged(0, lambda a: (a + 1) * 1e30), "scale", 1),
        ({}, damaged(1, lambda a: (a + 1) * 1e30), "scale", 1),
        ({}, damaged(1, lambda a: -np.abs(a) - 1), "range", 1),
        ({"solve": "server"}, damaged(1, lambda a: (a + 1) * 1e30), "scale", 1),  # features' scale
    ],
)
def test_what_is_far_beyond_the_others_is_dropped(clients, options, change, reason, rounds):
    run_as_if_lost(lambda: make(**options), clients, change, reason, rounds)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"lost_state": 1}, "lost-state"),
        ({"lost_state": 0}, "lost-state"),
        ({"diverged": 1, "rate_times_lambda": 1e300}, "diverged"),
    ],
)
def test_a_good_model_with_a_claim_of_trouble_is_dropped_and_does_nothing(clients, claims, reason):
    """It neither resets the corrections, nor has parts sent again, nor writes a metric."""
    attacked, silent = make(learning_rate=0.05), make(learning_rate=0.05)

    def claim(reply: Message) -> Message:
        return with_metrics(**claims)(reply) if attacked.server_round == 4 else reply

    def say_nothing(reply: Message) -> Message | None:
        return None if silent.server_round == 4 else reply

    after = start(attacked, grid := Grid(clients, changes={2: claim}), rounds=8)
    assert attacked.train_metrics[4][f"rejected-{reason}"] == 1
    assert attacked.train_metrics[4]["rate-times-lambda"] < 2
    assert grid.exchanges.count(("train", 6)) == 8
    expected = start(silent, Grid(clients, changes={2: say_nothing}), rounds=8)
    assert bits(after) == bits(expected)
    assert attacked.control.value.tobytes() == silent.control.value.tobytes()


def test_a_client_that_never_had_a_c_k_loses_none(clients):
    """In its first round on the linear model; the corrections of the others are kept."""
    attacked, silent = make(), make()

    def claim(reply: Message) -> Message:
        if attacked.server_round == 2:
            reply.content = RecordDict(
                {"metrics": MetricRecord({"lost-state": 1, "num-examples": 1})}
            )
        return reply

    def say_nothing(reply: Message) -> Message | None:
        return None if silent.server_round == 2 else reply

    after = start(attacked, Grid(clients, changes={2: claim}), rounds=4)
    assert attacked.train_metrics[2]["rejected-lost-state"] == 1
    assert bits(after) == bits(start(silent, Grid(clients, changes={2: say_nothing}), rounds=4))
    assert attacked.control.value.tobytes() == silent.control.value.tobytes()


def test_what_a_client_keeps_of_another_network_is_not_used(clients, tmp_path):
    """Same run, seed and data, and so the same folder: the task's key tells the networks apart."""
    start(make(normalise=False), Grid(clients), rounds=2)
    same_folder, fresh = (
        bits(start(make(normalise=False), Grid(app(TCTClient, cache=cache)), 2, network(1)))
        for cache in (tmp_path, tmp_path / "fresh")
    )
    assert same_folder == fresh


def test_another_number_of_examples_than_before_gives_no_more_weight(clients):
    """c holds n_k c_k, with the n_k that came first: a boast changes nothing."""
    strategy = make()

    def boasts(reply: Message) -> Message:
        return with_metrics(num_examples=100)(reply) if strategy.server_round == 3 else reply

    after = start(strategy, Grid(clients, changes={0: boasts}), rounds=5)
    assert strategy.train_metrics[3]["replies-accepted"] == 6
    assert bits(after) == bits(start(make(), Grid(clients), rounds=5))


def test_more_examples_than_can_be_solved_for_are_left_out(clients, monkeypatch):
    """24 n^2 bytes: 9 + 8 + 7 + 6 + 5 = 35 examples take 29,400, client 5's 10 more 48,600."""
    monkeypatch.setattr("fedntk.strategies.tct.phases.available_memory", lambda: 30_000)
    strategy = make(solve="server")
    start(strategy, Grid(clients))
    assert strategy.train_metrics[1]["rejected-too-large"] == 1
    assert strategy.train_metrics[1]["replies-accepted"] == 5
    assert strategy.phase is None
    assert strategy.linear_rounds == 1


def test_divergence_is_reported_and_is_the_loops_own(tmp_path, caplog):
    """eta lambda_max / n = 2.1 on the worst client: its M = 20 steps grow 1.1^20-fold."""
    lambdas = [float(torch.linalg.eigvalsh(z @ z.T)[-1]) / len(z) for z, _ in features(6)]
    eta = 2.1 / max(lambdas)
    results = []
    with caplog.at_level(WARNING, "flwr"):
        for solver in ("closed", "loop"):
            strategy = make(learning_rate=eta)
            clients = app(TCTClient, cache=tmp_path / solver, local_solver=solver)
            results.append(start(strategy, Grid(clients), rounds=3)[LINEAR])
            if solver == "closed":
                rate = strategy.train_metrics[2]["rate-times-lambda"]
                assert rate == pytest.approx(2.1, rel=1e-4)
    assert any("its steps diverge" in record.getMessage() for record in caplog.records)
    assert distance(results[0], torch.from_numpy(results[1]).double()) < 1e-3
    assert distance(results[0], algorithm_1(features(6), 2, eta=eta)) < 1e-3


def test_what_overflows_is_said_and_does_not_end_the_run(clients, caplog):
    strategy = make(learning_rate=1e3, local_steps=500)
    with caplog.at_level(WARNING, "flwr"):
        after = start(strategy, Grid(clients), rounds=3)
    assert strategy.train_metrics[2]["rejected-diverged"] == 6
    lambdas = [float(torch.linalg.eigvalsh(z @ z.T)[-1]) / len(z) for z, _ in features(6)]
    assert "rate-times-lambda" not in strategy.train_metrics[2]  # of dropped replies, in the log
    assert not after[LINEAR].any()
    said = [r.getMessage() for r in caplog.records if "its steps overflow" in r.getMessage()]
    rates = [float(line.rpartition(" ")[2]) for line in said]
    assert max(rates) == pytest.approx(1e3 * max(lambdas), rel=1e-4)


# ---------------------------------------------------------------------- other ways


def test_clients_evaluate_the_network_and_then_the_linear_model(clients):
    strategy = make(
        fraction_evaluate=1.0, min_evaluate_nodes=6, bootstrap_rounds=1,
        bootstrap=FedAvg(fraction_evaluate=0.0),
    )  # fmt: skip
    after = start(strategy, Grid(clients), rounds=4)
    x, y = (torch.cat(parts) for parts in zip(*map(examples, range(6)), strict=True))
    predictor = strategy.predictor(after)
    accuracy = float((predictor.predict(x).argmax(1) == y).double().mean())
    assert strategy.evaluate_metrics[4]["accuracy"] == pytest.approx(accuracy)
    net = predictor.network.eval()
    with torch.no_grad():
        accuracy = float((net(x).argmax(1) == y).double().mean())
    before = make(bootstrap_rounds=1, bootstrap=FedAvg(fraction_evaluate=0.0))
    assert before.learned == "network"
    assert isinstance(before.predictor(after), NetworkPredictor)
    assert strategy.learned == "linear-model"
    for number in (1, 2):  # round 2 is for the moments
        assert strategy.evaluate_metrics[number]["accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_an_interrupted_run_goes_on_to_the_same_bits_in_either_stage(clients, done):
    def fresh() -> TCT:
        bootstrap = SeededFedAvg(fraction_evaluate=0.0, min_available_nodes=3)
        return make(
            bootstrap=bootstrap, bootstrap_rounds=1, fraction_train=0.5, min_train_nodes=3, seed=4
        )

    expected = start(fresh(), Grid(clients), rounds=5)
    first = fresh()
    halfway = start(first, Grid(clients), rounds=done)
    state = first.state_dict()
    start(fresh(), Grid(clients), rounds=5)  # clients are further than the state
    second = fresh()
    second.load_state_dict(state)
    arrays = as_record(halfway)
    assert second.begin(arrays, 5, done) is arrays  # so that a round that changes nothing shows
    result = second.start(Grid(clients, node_ids=[9, 8, 7, 6, 5, 4]), arrays, num_rounds=5)
    assert bits(arrays_of(result.arrays)) == bits(expected)


VARIANTS = {
    "cross-entropy": {"loss": "cross-entropy", "learning_rate": 0.2},
    "last layer": {"features": "last-layer"},
    "all coordinates": {"num_features": 0},
    "bias": {"bias": True},
    "not normalised": {"normalise": False, "learning_rate": 0.2},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_variants_learn_from_round_to_round(clients, variant):
    strategy = make(**VARIANTS[variant])
    start(strategy, Grid(clients), rounds=6)
    losses = [strategy.train_metrics[r]["train-loss"] for r in range(2, 7)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


def test_arrays_of_another_network_are_refused(clients):
    with pytest.raises(ValueError, match="initial_arrays: not those of the network"):
        start(make(), Grid(clients), 1, nn.Linear(4, 3))


CHANGES: dict[str, Change] = {"error": failed, "lost": lost}


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("step", [1, 2])
def test_a_round_without_enough_answers_is_tried_again(clients, change, step):
    """Moments or features that too few sent are asked for once more in the next round."""
    options = {"min_completed": 6} | ({"solve": "server"} if step == 2 else {})
    strategy = make(**options)
    grid = Grid(clients)
    grid.changes = {
        2: lambda reply: CHANGES[change](reply) if strategy.server_round == 1 else reply
    }
    after = start(strategy, grid, rounds=2)
    assert strategy.train_metrics[1]["replies-accepted"] == 5
    assert strategy.train_metrics[2]["replies-accepted"] == 6
    whole = start(make(**options), Grid(clients), rounds=1)
    assert bits(after) == bits(whole)
