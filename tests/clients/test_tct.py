"""TCT's client: what it sends, what it keeps, and that all ways to compute it agree."""

import dataclasses
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch

from fedntk.clients import BootstrapSGD, LocalSGD, NamedArrays, TCTClient, shrink
from fedntk.clients.core.disk_store import example_digests
from fedntk.clients.tct import feature_store
from fedntk.ntk import FeatureMap, Moments, Normaliser, NotEnoughMemory, one_hot
from fedntk.ntk.features import tangent
from fedntk.ntk.jacobian import differentiate
from fedntk.ntk.payloads.convex_task import ConvexTask

from ..conftest import refused
from ..ntk.arithmetic import looped_steps
from ..strategies.federation import network
from ..strategies.test_tct import distance
from .problem import weights_of

MAP = FeatureMap(num_features=20)
MOMENTS = ConvexTask(step="moments", network_key="k", num_features=20, bias=False)
MEAN, SCALE = "tct.mean", "tct.scale"


def in_order(x, y):
    """The examples in the order in which a client keeps them."""
    order = np.lexsort(example_digests(x, one_hot(y, 3)).T)
    return x[order], y[order]


X, Y = in_order(
    torch.randn(11, 4, generator=torch.Generator().manual_seed(1)), torch.arange(11) % 3
)
OTHERS = in_order(X + 0.5, Y)
NORMALISER = Normaliser.of(Moments.of(MAP.extractor(network())(X)))


def client(cache, *, data=(X, Y), **options):
    return TCTClient(network(), *data, cache=cache, seed=(0, 7), **options)


def folder(who):
    return who.folder(MOMENTS, {})


def linear_task(**changes):
    values = {
        "step": "linear", "network_key": "k", "num_features": 20, "learning_rate": 0.05,
        "local_steps": 30, "control": "sent", "bias": False,
    } | changes  # fmt: skip
    return ConvexTask(**values)


LAST = linear_task(state_round=4, control="last")  # of the round after the first


def message(*names, width=20):
    """Records of these names, or all that a task can need."""
    theta, control = np.random.default_rng(3).standard_normal((2, width, 3)).astype(np.float32)
    records = {
        "network": weights_of(network()),
        "normaliser": {MEAN: NORMALISER.mean, SCALE: NORMALISER.inv_std},
        "linear": {"tct.linear": theta},
        "control": {"tct.control": 0.1 * control},
    }
    return {name: records[name] for name in names or records}


def step(who, task, records, server_round=4):
    return who.fit(NamedArrays(records), {"server-round": server_round, **task.to_config()})


def test_moments_and_features_do_not_depend_on_the_chunks(tmp_path, monkeypatch):
    """Sums of up to 8 products: 1e-6 of a feature's largest; twice that in each of 11 squares."""
    exact = MAP.extractor(network().double())(X.double())
    largest, expected = exact.abs().amax(0).double().numpy(), Moments.of(exact)
    for name in "ab":
        (mean, sum_sq_dev), count, metrics = step(
            client(tmp_path / name), MOMENTS, message("network")
        )
        raw = np.load(folder(client(tmp_path / name)) / "raw-train.npy")
        assert (np.abs(raw - exact.numpy()) <= 1e-6 * largest).all()
        assert (np.abs(mean - expected.mean) <= 1e-6 * largest).all()
        assert (np.abs(sum_sq_dev - expected.sum_sq_dev) <= 11 * 4e-6 * largest**2).all()
        assert count == 11
        assert metrics["train-loss"] == pytest.approx(1 / 3)  # ||e_y - 1/3||^2 / 2
        (*_, counts), *_ = step(
            client(tmp_path / name), dataclasses.replace(MOMENTS, bias=True), message("network")
        )
        assert counts.tolist() == [4, 4, 3]
        monkeypatch.setattr(feature_store, "CHUNK_BYTES", 3 * 20 * 4)


SOLVERS = {
    "plain": {},
    "half precision": {"dtype": "float16"},
    "differentiated one by one": {"chunk_size": 1},
}


@pytest.mark.parametrize(("loss", "bias"), [("mse", False), ("cross-entropy", True)])
@pytest.mark.parametrize("way", sorted(SOLVERS))
@pytest.mark.parametrize("changed", [False, True])
def test_all_ways_take_the_same_steps(tmp_path, way, bias, loss, changed):
    """In float64 over two rounds, the second on other examples if these have changed.

    A step of float32 rounds some 20 products to 6e-8 each, and 60 steps add up: 1e-4; float16 keeps
    features to 5e-4, and normalising divides by spreads under their size: 5e-3.
    """
    records, tolerance = message(width=20 + bias), 5e-3 if way == "half precision" else 1e-4
    sets = [(X, Y), OTHERS if changed else (X, Y)]
    exact = exact_rounds(records, sets, bias=bias, loss=loss)
    for number, task in enumerate((linear_task(bias=bias, loss=loss), LAST), 4):
        expected, residuals = exact[number - 4]
        who = client(tmp_path, data=sets[number - 4], **SOLVERS[way])
        own = dataclasses.replace(task, bias=bias, loss=loss)
        ((actual,), _, metrics) = step(who, own, records, number)
        assert distance(actual, expected) < tolerance
        saved = np.load(folder(who) / f"state-{number:06}.npz")["coefficients"]
        assert distance(saved, residuals) < tolerance
        records = {"linear": {"tct.linear": actual}}
    assert metrics["examples-changed"] == changed


def exact_rounds(records, sets, *, bias, loss):
    """Algorithm 1's two rounds, step by step in float64: models, and mean residuals over n.

    c_k = -Z^T A_k, the mean gradient of M steps; h_k = c_k - c is added to minus the gradient.
    """
    theta = torch.from_numpy(records["linear"]["tct.linear"]).double()
    correction = -torch.from_numpy(records["control"]["tct.control"]).double()
    actual = []
    for x, y in sets:
        z = exact_features(x, bias=bias)
        targets = one_hot(y, 3).double() - (loss == "mse") / 3
        options = {"learning_rate": 0.05, "local_steps": 30, "loss": loss}
        after, total = looped_steps(z, theta, targets, correction, **options)
        actual.append((after.numpy(), total.numpy() / (11 * 30)))
        correction = -z.T @ total / (11 * 30) - (theta - after) / (30 * 0.05)
        theta = after
    return actual


def exact_features(x, *, bias=False):
    z = MAP.extractor(network().double())(x.double()).double()
    z = (z - torch.from_numpy(NORMALISER.mean)) * torch.from_numpy(NORMALISER.inv_std)
    return torch.cat([z, torch.ones(len(z), 1)], 1) if bias else z


def test_evaluation_is_of_the_linear_model_and_leaves_what_training_keeps(tmp_path):
    records = message()
    step(client(tmp_path), linear_task(), records)
    before = {p: p.read_bytes() for p in folder(client(tmp_path)).iterdir()}
    for x, y in ((X.flip(0)[:6] + 0.3, Y.flip(0)[:6]), (X - 1, Y)):
        who = client(tmp_path, x_test=x, y_test=y)
        loss, count, metrics = who.evaluate(NamedArrays(records), linear_task().to_config())
        scores = exact_features(x).numpy() @ records["linear"]["tct.linear"]
        expected = ((scores - np.eye(3)[y] + 1 / 3) ** 2).sum(1).mean() / 2
        assert (count, loss) == (len(y), pytest.approx(float(expected), rel=1e-5))
        assert metrics["accuracy"] == pytest.approx((scores.argmax(1) == y.numpy()).mean())
    assert {p: p.read_bytes() for p in before} == before


def test_only_the_newest_states_are_kept_and_no_raw_features(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "STATES", 3)
    who = client(tmp_path)
    step(who, MOMENTS, message("network"))
    for server_round in range(4, 10):
        step(who, linear_task(), message(), server_round)
    made = ["features-train.npy", "kernel.npz", "spectrum.npz", "network.npz", "normaliser.npz"]
    states = {"key.json", "examples-train.npz", "state-000008.npz", "state-000009.npz"}
    models = {"state-000007.npz", "sent-000008.npz", "sent-000009.npz"}
    assert {path.name for path in folder(who).iterdir()} == states | models | {*made}
    shrink(tmp_path)
    assert {path.name for path in folder(who).iterdir()} == states


def test_examples_may_come_in_another_order_in_each_message(tmp_path):
    x, y, results = torch.cat([X[:1], X[:10]]), torch.cat([Y[:1], Y[:10]]), []
    steps = [(MOMENTS, message("network")), (linear_task(), message()), (LAST, message("linear"))]
    for name in ("as they are", "shuffled"):
        for number, (task, records) in enumerate(steps, 3):
            order = torch.randperm(11, generator=torch.Generator().manual_seed(number))
            order = order if name == "shuffled" else torch.arange(11)
            who = client(tmp_path / name, data=(x[order], y[order]))
            arrays, _, metrics = step(who, task, records, number)
            evaluated = who.evaluate(NamedArrays(message()), linear_task().to_config())
            assert metrics["examples-changed"] == 0
            results.append(([array.tobytes() for array in arrays], evaluated))
    assert results[:3] == results[3:]


@pytest.mark.parametrize(
    ("name", "state", "server_round"),
    [
        ("network", 0, 5), ("normaliser", 0, 5), ("sent-000004", 0, 5), ("state-000004", 1, 5),
        ("kernel", 0, 6),  # the model of round 5 never came
    ],
)  # fmt: skip
def test_what_is_lost_is_said(tmp_path, name, state, server_round):
    """1 if only the client had it."""
    step(client(tmp_path), linear_task(), message())
    (folder(client(tmp_path)) / f"{name}.npz").unlink()
    arrays, _, metrics = step(client(tmp_path), LAST, message("linear"), server_round)
    assert (arrays, metrics) == ([], {"lost-state": state})


@pytest.mark.parametrize(
    "change", ["normaliser", "bias", "dtype", "features-train.npy", "kernel.npz", "spectrum.npz"]
)
def test_what_can_be_made_again_is_and_nothing_of_another_setting_is_used(tmp_path, change):
    step(client(tmp_path / "a"), linear_task(), message())
    if "." in change:
        (folder(client(tmp_path / "a")) / change).unlink()
    records = message(width=20 + (change == "bias"))
    if change == "normaliser":
        records["normaliser"][SCALE] = records["normaliser"][SCALE] / 2
    options = {"dtype": "float16"} if change == "dtype" else {}
    task = linear_task(bias=change == "bias")
    used, _, _ = step(client(tmp_path / "a", **options), task, records)
    fresh, _, _ = step(client(tmp_path / "b", **options), task, records)
    assert (used[0] == fresh[0]).all()


@pytest.mark.parametrize(
    ("task", "options", "memory", "disk", "what"),
    [
        (linear_task(), {}, 100, 10**9, "the kernel of 11 examples"),
        (MOMENTS, {}, 10**9, 4 * 11 * 20 - 1, "20 features of 11 examples"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_size(
    tmp_path, monkeypatch, task, options, memory, disk, what
):
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda device="cpu": memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(disk))
    monkeypatch.setattr(tangent, "require_memory", lambda *a, **o: None)
    monkeypatch.setattr(differentiate, "require_memory", lambda *a, **o: None)
    records = message() if task.step == "linear" else message("network")
    own, text = client(tmp_path, **options), f"{what} needs? 0.0 GB"
    refused(text, step, own, task, records, 1, error=NotEnoughMemory)


IDENTITY = {MEAN: np.zeros(20, np.float32), SCALE: np.ones(20, np.float32)}


def test_raw_features_are_not_kept_in_float16(tmp_path):
    own, records = client(tmp_path, dtype="float16"), message() | {"normaliser": IDENTITY}
    refused("float16 would lose small features", step, own, linear_task(), records)


def test_stage_1_keeps_its_defaults_beside_an_option_of_ones_own(tmp_path):
    sgd = client(tmp_path, sgd=BootstrapSGD(learning_rate=0.1)).sgd
    assert (sgd.epochs, sgd.batch_size, sgd.weight_decay) == (5, 64, 1e-5)  # of the paper
    text = "sgd: expected BootstrapSGD, .* write sgd=BootstrapSGD"
    refused(text, client, tmp_path, sgd=LocalSGD(learning_rate=0.1))
