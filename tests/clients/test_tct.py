"""TCT's client: what it sends, what it keeps, and that all ways to compute it agree."""

import dataclasses
import os
import shutil
import time
from collections import namedtuple
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import NamedArrays, SGDClient, TCTClient, get_weights, shrink
from fedntk.clients.core.disk_store import example_digests
from fedntk.clients.tct import feature_store
from fedntk.ntk import FeatureMap, Moments, Normaliser, NotEnoughMemory, one_hot
from fedntk.ntk.convex import looped_steps
from fedntk.ntk.features import FixedPoint, tangent
from fedntk.ntk.jacobian import differentiate
from fedntk.ntk.payloads import ConvexTask, FeatureStatistics, FeatureUpload

from .damage import WAYS, damaged

MAP = FeatureMap(num_features=20)
MOMENTS = ConvexTask(step="moments", network_key="k", num_features=20)
MEAN, SCALE = "tct.mean", "tct.scale"


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def in_order(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order in which a client keeps them: by their digests."""
    order = np.lexsort(example_digests(x, one_hot(y, 3)).T)
    return x[order], y[order]


X, Y = in_order(
    torch.randn(11, 5, generator=torch.Generator().manual_seed(1)), torch.arange(11) % 3
)


def client(cache: Path, *, data: Any = (X, Y), **options: Any) -> TCTClient:
    return TCTClient(network(), *data, cache=cache, seed=(0, 7), **options)


def folder(who: TCTClient) -> Path:
    return who.folder(MOMENTS, {})


def normaliser() -> Normaliser:
    return Normaliser.of(Moments.of(MAP.extractor(network())(X)))


def linear_task(**changes: Any) -> ConvexTask:
    values = {
        "step": "linear", "network_key": "k", "num_features": 20, "learning_rate": 0.05,
        "local_steps": 30, "control": "sent",
    } | changes  # fmt: skip
    return ConvexTask(**values)  # type: ignore[arg-type]


Records = dict[str, dict[str, np.ndarray]]


def bootstrapped() -> Records:
    """The record of the network alone."""
    own = network()
    return {"network": dict(zip(own.state_dict(), get_weights(own), strict=True))}


def message(width: int = 20, seed: int = 3) -> Records:
    """All records that a task can need."""
    generator = np.random.default_rng(seed)
    own = normaliser()
    theta, control = generator.standard_normal((2, width, 3)).astype(np.float32)
    return {
        **bootstrapped(),
        "normaliser": {MEAN: own.mean, SCALE: own.inv_std},
        "linear": {"tct.linear": theta},
        "control": {"tct.control": 0.1 * control},
    }


def uncorrected() -> Records:
    """The same without the server's control."""
    records = message()
    del records["control"]
    return records


def linear(theta: np.ndarray | None = None) -> Records:
    """The record of the linear model alone."""
    return {"linear": {"tct.linear": theta} if theta is not None else message()["linear"]}


def step(who: TCTClient, task: ConvexTask, records: Records, server_round: int = 4) -> Any:
    config = {"server-round": server_round, **task.to_config()}
    return who.fit(NamedArrays(records), config)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ------------------------------------------------------------------------ stage 1


def test_stage_1_is_local_sgd_with_the_papers_defaults(tmp_path):
    """Section 5.1: 5 epochs, batches of 64, weight decay 1e-5."""
    sgd = SGDClient(
        network(), X, Y, seed=(0, 7), local_epochs=5, batch_size=64, learning_rate=0.01,
        weight_decay=1e-5,
    )  # fmt: skip
    weights, config = get_weights(network()), {"server-round": 3}
    expected, _, _ = sgd.fit(weights, dict(config))
    found, count, _ = client(tmp_path).fit(weights, dict(config))
    assert count == 11
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------ stage 2


def test_moments_and_features_do_not_depend_on_the_chunks(tmp_path, monkeypatch):
    """Whatever the chunks, features are those of float64, rounded in sums of up to 8 products.

    That is 1e-6 of a feature's largest; a sum of 11 squares' deviations doubles it.
    """
    whole, count, metrics = step(client(tmp_path / "a"), MOMENTS, bootstrapped())
    assert count == 11
    assert metrics["train-loss"] == pytest.approx(1 / 2 * (1 - 1 / 3))  # ||e_y - 1/3||^2 / 2
    monkeypatch.setattr(feature_store, "CHUNK_BYTES", 3 * 20 * 4)
    parts = step(client(tmp_path / "b"), MOMENTS, bootstrapped())[0]
    exact = MAP.extractor(network().double())(X.double())
    largest = exact.abs().amax(0).double().numpy()
    expected = Moments.of(exact)
    for name, (mean, sum_sq_dev) in zip("ab", (whole, parts), strict=True):
        raw = np.load(folder(client(tmp_path / name)) / "raw-train.npy")
        assert (np.abs(raw - exact.numpy()) <= 1e-6 * largest).all()
        assert (np.abs(mean - expected.mean) <= 1e-6 * largest).all()
        assert (np.abs(sum_sq_dev - expected.sum_sq_dev) <= 11 * 4e-6 * largest**2).all()


def test_features_for_the_server_are_the_clients_in_float16(tmp_path):
    task = ConvexTask(step="features", network_key="k", num_features=20)
    arrays, count, _ = step(client(tmp_path), task, bootstrapped())
    upload = FeatureUpload(*arrays)
    z = MAP.extractor(network())(X)
    assert upload.features.dtype == np.float16
    assert (upload.labels == Y.numpy()).all()
    assert count == 11
    error = (upload.rows(0, 11) - z).abs().max(0).values
    assert (error <= z.abs().max(0).values * 2**-11 * 1.01).all()


@pytest.mark.parametrize("way", ["float64", "fixed-point", "balanced"])
def test_sums_are_of_the_clients_features(tmp_path, way):
    """Nothing is kept on disk but the network; steps and weights come with the message."""
    z = MAP.extractor(network())(X)
    fixed, weights = FixedPoint.of(2 * z, 8), np.array([1.0, 0.5, 3.0])
    task = ConvexTask(
        step="statistics", network_key="k", num_features=20, bits=8 if way == "fixed-point" else 32,
        balanced=way == "balanced",
    )  # fmt: skip
    records = bootstrapped() | {
        "steps": {"tct.step": fixed.step}, "class-weights": {"tct.class-weights": weights},
    }  # fmt: skip
    assert step(client(tmp_path), task, {})[2] == {"lost-state": 0}  # asked for the network again
    arrays, count, metrics = step(client(tmp_path), task, records)
    options = {"fixed-point": {"fixed_point": fixed}, "balanced": {"weights": weights}}
    own = options.get(way, {})
    found = FeatureStatistics.from_arrays(
        arrays.records["arrays"], 20, 3, num_examples=count, **own
    )
    expected = FeatureStatistics.of([z], Y, 3, **own)
    # features are computed in other chunks: float32 rounding, or now and then one step of 127
    scale = np.abs(expected.gram).max()
    np.testing.assert_allclose(found.gram, expected.gram, rtol=0, atol=1e-5 * scale)
    assert np.array_equal(found.counts, expected.counts)
    assert metrics["train-loss"] == pytest.approx(1 / 3)
    assert not [path for path in folder(client(tmp_path)).iterdir() if "raw" in path.name]


def test_counts_take_no_network(tmp_path):
    task = ConvexTask(step="counts", network_key="k", num_features=20)
    arrays, count, _ = step(client(tmp_path), task, {})
    assert [a.tolist() for a in arrays] == [[4, 4, 3]]
    assert (arrays[0].dtype, count) == (np.int64, 11)


SOLVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loop": {"local_solver": "loop"},
    "half precision": {"dtype": "float16"},
    "nothing kept": {"keep": "nothing"},
    "loop, nothing kept": {"local_solver": "loop", "keep": "nothing"},
    "differentiated one by one": {"chunk_size": 1},
}


@pytest.mark.parametrize(("loss", "bias"), [("mse", False), ("cross-entropy", True)])
@pytest.mark.parametrize("way", sorted(SOLVERS))
def test_all_ways_take_the_same_steps(tmp_path, way, bias, loss):
    """Over two rounds, the second corrected by what the first left behind: those of float64.

    A step of float32 rounds some 20 products to 6e-8 each, and 60 steps add up: 1e-4; float16 keeps
    features to 5e-4, and normalising divides by spreads under their size: 5e-3.
    """
    records = message(21 if bias else 20)
    exact = exact_rounds(records, bias=bias, loss=loss)
    assert relative(exact[1][0], exact[0][0]) > 1e-3
    tolerance, theta = 5e-3 if way == "half precision" else 1e-4, linear()
    for number, task in (
        (4, linear_task(bias=bias, loss=loss)),
        (5, linear_task(bias=bias, loss=loss, state_round=4, control="last")),
    ):
        who = client(tmp_path, **SOLVERS[way])  # made anew for each message
        ((found,), _, _) = step(who, task, records if number == 4 else theta, number)
        expected, residuals = exact[number - 4]
        assert relative(found, expected) < tolerance
        kept = np.load(folder(who) / f"state-{number:06}.npz")["coefficients"]
        assert relative(kept, residuals) < tolerance
        theta = linear(found)


def exact_rounds(records: Records, *, bias: bool, loss: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Algorithm 1's two rounds, step by step in float64: models, and mean residuals over n.

    c_k = -Z^T A_k, the mean gradient of M steps; h_k = c_k - c is added to minus the gradient.
    """
    z = MAP.extractor(network().double())(X.double()).double()
    mean, inv_std = map(torch.from_numpy, records["normaliser"].values())
    z = (z - mean) * inv_std
    z = torch.cat([z, torch.ones(11, 1)], 1) if bias else z
    theta = torch.from_numpy(records["linear"]["tct.linear"]).double()
    control = torch.from_numpy(records["control"]["tct.control"]).double()
    targets = torch.eye(3, dtype=torch.float64)[Y] - (1 / 3 if loss == "mse" else 0)
    options = {"learning_rate": 0.05, "local_steps": 30, "loss": loss}
    first, total = looped_steps(z, theta, targets, -control, **options)
    own, mean = -z.T @ total / (11 * 30), (theta - first) / (30 * 0.05)
    second, more = looped_steps(z, first, targets, own - mean, **options)
    return [(w.numpy(), sums.numpy() / (11 * 30)) for w, sums in ((first, total), (second, more))]


def test_what_is_kept_and_how_large_it_is(tmp_path):
    """Features 4 n p bytes, kernel 4 n^2, eigenvectors 8 n^2, A_k 8 n C; raw features go."""
    who = client(tmp_path)
    step(who, MOMENTS, bootstrapped())
    step(who, linear_task(), message())
    found = {path.name: path.stat().st_size for path in folder(who).iterdir()}
    assert set(found) == {
        "key.json", "network.npz", "normaliser.npz", "examples-train.npz", "features-train.npy",
        "kernel.npz", "spectrum.npz", "state-000004.npz", "sent-000004.npz",
    }  # fmt: skip
    assert 4 * 11 * 20 <= found["features-train.npy"] <= 4 * 11 * 20 + 128
    who = client(tmp_path / "nothing", keep="nothing")
    step(who, MOMENTS, bootstrapped())
    step(who, linear_task(), message())
    assert not list(folder(who).glob("*.npy"))


def test_one_step_a_round_needs_no_kernel(tmp_path):
    """Gradient descent: W - eta Z^T (Z W - Y) / n."""
    who = client(tmp_path)
    task = linear_task(optimizer="fedavg", control="zero", local_steps=1)
    records = uncorrected()
    ((result,), _, _) = step(who, task, records)
    theta = records["linear"]["tct.linear"]
    z = normaliser()(MAP.extractor(network())(X)).double().numpy()
    targets = np.eye(3)[Y] - 1 / 3
    expected = theta - 0.05 * z.T @ (z @ theta - targets) / 11
    assert relative(result, expected) < 1e-6
    assert not list(folder(who).glob("kernel*"))
    assert not list(folder(who).glob("state-*"))


def test_evaluation_is_of_the_linear_model_on_the_test_examples(tmp_path):
    x_test, y_test = X.flip(0)[:6] + 0.3, Y.flip(0)[:6]
    who = client(tmp_path, x_test=x_test, y_test=y_test)
    records = uncorrected()
    task = linear_task(control="zero")
    loss, count, metrics = who.evaluate(NamedArrays(records), task.to_config())
    z = normaliser()(MAP.extractor(network())(x_test)).double().numpy()
    scores = z @ records["linear"]["tct.linear"]
    targets = np.eye(3)[y_test] - 1 / 3
    assert count == 6
    assert loss == pytest.approx(float(((scores - targets) ** 2).sum(1).mean() / 2), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((scores.argmax(1) == y_test.numpy()).mean())


# ------------------------------------------------------------------------- trouble


def test_another_network_empties_the_folder(tmp_path):
    step(client(tmp_path), MOMENTS, bootstrapped())
    step(client(tmp_path), linear_task(), message())
    task = linear_task(network_key="other", control="zero")
    arrays, _, metrics = step(client(tmp_path), task, linear())
    assert arrays == []
    assert metrics == {"lost-state": 0}
    assert [p.name for p in folder(client(tmp_path)).iterdir()] == ["key.json"]


def shuffled(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    return X[order], Y[order]


@pytest.mark.parametrize(("solver", "keep"), [("closed", "features"), ("loop", "nothing")])
def test_examples_may_come_in_another_order_in_each_message(tmp_path, solver, keep):
    """To the same bits, in one folder, with features computed once; two examples are equal."""
    twice = torch.cat([X[:1], X[:10]])
    results = []
    for order in (None, 1):
        sent = []
        for i, (task, records, number) in enumerate(
            [
                (MOMENTS, bootstrapped(), 3),
                (linear_task(), message(), 4),
                (linear_task(state_round=4, control="last"), linear(), 5),
            ]
        ):
            own = torch.arange(11)
            if order is not None:
                own = torch.randperm(11, generator=torch.Generator().manual_seed(i))
            data = (twice[own], torch.cat([Y[:1], Y[:10]])[own])
            who = client(tmp_path / str(order), data=data, keep=keep, local_solver=solver)
            arrays, _, metrics = step(who, task, records, number)
            assert metrics["examples-changed"] == 0
            sent.append([array.tobytes() for array in arrays])
            evaluated = who.evaluate(NamedArrays(message()), linear_task().to_config())
            sent.append(repr(evaluated))
        results.append(sent)
        assert len(list((tmp_path / str(order)).iterdir())) == 1
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "options", [{}, {"local_solver": "loop"}, {"keep": "nothing"}], ids=["closed", "loop", "anew"]
)
def test_examples_that_changed_are_said_and_the_correction_stays(tmp_path, caplog, options):
    """The steps are those of eq. (3) on the new examples, with c_k of the old ones.

    Against float64; float32 features and their products err by 1e-6 of theta.
    """
    records = message()
    step(client(tmp_path, **options), linear_task(), records)
    kept = np.load(folder(client(tmp_path)) / "state-000004.npz")["coefficients"]
    x, y = in_order(X + 0.5, Y)
    old, new = (normaliser()(MAP.extractor(network())(own)).double() for own in (X, x))
    changed = client(tmp_path, data=(X + 0.5, Y), **options)
    with caplog.at_level(WARNING, "flwr"):
        ((result,), _, metrics) = step(changed, linear_task(state_round=4), records, 5)
    assert metrics["examples-changed"] == 1
    assert "client-0-7: 0 of its 11 examples are the same as before" in caplog.text
    theta, control = (
        torch.from_numpy(records[k][f"tct.{k}"]).double() for k in ("linear", "control")
    )
    own, targets = -old.T @ torch.from_numpy(kept), torch.from_numpy(np.eye(3)[y] - 1 / 3)
    steps = {"learning_rate": 0.05, "local_steps": 30}
    expected, total = looped_steps(new, theta, targets, own - control, **steps)
    assert relative(result, expected.numpy()) < 1e-5
    # and what it keeps now is of the new ones
    kept = np.load(folder(changed) / "state-000005.npz")["coefficients"]
    assert relative(kept, (total / (11 * 30)).numpy()) < 1e-5
    assert step(changed, linear_task(state_round=5), records, 6)[2]["examples-changed"] == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_an_evaluation_on_other_examples_leaves_what_training_keeps(tmp_path):
    step(client(tmp_path), linear_task(), message())
    before = {p: p.read_bytes() for p in folder(client(tmp_path)).iterdir()}
    for data in ((X + 1, Y), shuffled(1), (X - 1, Y)):
        alone = client(tmp_path / "alone", data=data)
        config = linear_task().to_config()
        found = client(tmp_path, data=data).evaluate(NamedArrays(message()), dict(config))
        assert found == alone.evaluate(NamedArrays(message()), dict(config))
        shutil.rmtree(tmp_path / "alone")
    assert {p: p.read_bytes() for p in before} == before


def test_folders_of_a_clients_other_runs_go_when_nobody_used_them_for_a_day(tmp_path):
    def begin(run: str, config: dict[str, Any]) -> Path:
        task = dataclasses.replace(MOMENTS, run_key=run)
        client(tmp_path).fit(
            NamedArrays(bootstrapped()), {**config, **task.to_config(), "server-round": 1}
        )
        return client(tmp_path).folder(task, config)

    own, other = {"client-id": "7"}, {"client-id": "17"}
    folders = {
        ("a", "7"): begin("a", own),
        ("b", "7"): begin("b", own),
        ("a", "17"): begin("a", other),
    }
    assert len(set(folders.values())) == 3
    old = time.time() - 25 * 3600
    for name in (("a", "7"), ("a", "17")):
        os.utime(folders[name] / "key.json", (old, old))
    empty = tmp_path / "run-d-client-7"  # of a run that ended in stage 1
    empty.mkdir()
    os.utime(empty, (old, old))
    begin("c", own)
    assert not empty.exists()
    there = {name for name, path in folders.items() if path.exists()}
    assert there == {("b", "7"), ("a", "17")}  # used today; another client's


@pytest.mark.parametrize(
    ("name", "state"), [("network", 0), ("normaliser", 0), ("sent-000004", 0), ("state-000004", 1)]
)
def test_what_is_lost_is_said(tmp_path, name, state):
    """1 if only the client itself had it: all corrections must begin anew."""
    step(client(tmp_path), linear_task(), message())
    damaged(folder(client(tmp_path)) / f"{name}.npz", WAYS[0])
    task = linear_task(state_round=4, control="last")
    arrays, _, metrics = step(client(tmp_path), task, linear(), 5)
    assert (arrays, metrics) == ([], {"lost-state": state})


@pytest.mark.parametrize("name", ["features-train.npy", "kernel.npz", "spectrum.npz"])
def test_what_can_be_made_again_is(tmp_path, name):
    who = client(tmp_path)
    expected, _, _ = step(who, linear_task(), message())
    damaged(folder(who) / name, WAYS[0])
    found, _, _ = step(client(tmp_path), linear_task(), message())
    assert (found[0] == expected[0]).all()


@pytest.mark.parametrize("change", ["normaliser", "bias", "dtype"])
def test_what_was_made_with_another_setting_is_not_used(tmp_path, change):
    """The same folder, network and data: the second must be as in a folder of its own."""
    step(client(tmp_path / "a"), linear_task(), message())
    records = message(21 if change == "bias" else 20)
    options = {"dtype": "float16"} if change == "dtype" else {}
    if change == "normaliser":
        records["normaliser"][SCALE] = records["normaliser"][SCALE] / 2
    task = linear_task(bias=change == "bias")
    used, _, _ = step(client(tmp_path / "a", **options), task, records)
    fresh, _, _ = step(client(tmp_path / "b", **options), task, records)
    assert (used[0] == fresh[0]).all()


def test_only_so_many_rounds_of_state_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "STATES", 3)
    who = client(tmp_path)
    for server_round in range(4, 10):
        step(who, linear_task(), message(), server_round)
    assert sorted(p.name for p in folder(who).glob("state-*")) == [
        f"state-{n:06}.npz" for n in (7, 8, 9)
    ]
    shrink(tmp_path)
    assert sorted(p.name for p in folder(who).iterdir()) == [
        "examples-train.npz", "key.json", "state-000008.npz", "state-000009.npz",
    ]  # fmt: skip


def test_round_1_refuses_what_stage_2_could_not_do(tmp_path, monkeypatch):
    """The last nn.Linear in order of the modules is not the one that gives the logits."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(8, 3), nn.Linear(5, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x)))

    task = ConvexTask(step="bootstrap", num_features=0)
    odd = TCTClient(Odd(), X, Y, cache=tmp_path)
    with pytest.raises(ValueError, match="has 8 outputs and the network 3; name the layer"):
        odd.fit(get_weights(Odd()), {"server-round": 1, **task.to_config()})
    named = dataclasses.replace(task, head="head")
    odd.fit(get_weights(Odd()), {"server-round": 1, **named.to_config()})
    usage = shutil.disk_usage(tmp_path)._replace(free=11 * 72 * 8 - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    own = client(tmp_path)
    whole = dataclasses.replace(task, num_features=72)
    with pytest.raises(NotEnoughMemory, match="72 features of 11 examples need"):
        own.fit(get_weights(network()), {"server-round": 1, **whole.to_config()})
    own.fit(get_weights(network()), {"server-round": 2, **whole.to_config()})
    (tmp_path / "file").touch()
    nowhere = client(tmp_path / "file" / "cache")
    with pytest.raises(NotADirectoryError):
        nowhere.fit(get_weights(network()), {"server-round": 1, **task.to_config()})


def test_the_last_model_must_be_of_the_round_before(tmp_path):
    step(client(tmp_path), linear_task(), message())
    task = linear_task(state_round=4, control="last")
    assert step(client(tmp_path), task, linear(), 6)[2] == {"lost-state": 0}


def test_features_that_do_not_fit_on_the_disk_are_refused_with_their_size(tmp_path, monkeypatch):
    """11 examples of 20 features in 4 bytes are 880 bytes."""
    usage = namedtuple("usage", "free")(879)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NotEnoughMemory, match="20 features of 11 examples need"):
        step(client(tmp_path), MOMENTS, bootstrapped())
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize(
    ("task", "options", "what"),
    [
        (linear_task(), {}, "the kernel of 11 examples"),
        (linear_task(), {"local_solver": "loop"}, "20 features of 11 examples"),
        (
            ConvexTask(step="features", network_key="k", num_features=20),
            {},
            "sending 20 features of 11",
        ),
    ],
)
def test_what_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch, task, options, what):
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda device="cpu": 100)
    monkeypatch.setattr(tangent, "require_memory", lambda *a, **o: None)
    monkeypatch.setattr(differentiate, "require_memory", lambda *a, **o: None)
    records = message() if task.step == "linear" else bootstrapped()
    with pytest.raises(NotEnoughMemory, match=f"{what}.* needs 0.0 GB"):
        step(client(tmp_path, **options), task, records)


def test_features_too_large_for_float16_are_kept_in_float32(tmp_path, caplog):
    """Normalised by 1e-9 instead of the standard deviation; 10 over 1e-38 nothing holds."""
    records, task = message(), linear_task(learning_rate=1e-20)
    records["normaliser"][SCALE] = np.full(20, 1e9, np.float32)
    half = client(tmp_path / "half", dtype="float16")
    with caplog.at_level(WARNING, "flwr"):
        found, _, _ = step(half, task, records)
    assert "does not fit in float16: these examples' are kept in float32" in caplog.text
    expected, _, _ = step(client(tmp_path / "full"), task, records)
    assert (found[0] == expected[0]).all()
    records["normaliser"] = {
        MEAN: np.full(20, 10, np.float32), SCALE: np.full(20, 3e38, np.float32)
    }  # fmt: skip
    for who in (half, client(tmp_path / "full")):
        with pytest.raises(OverflowError, match="does not fit in float32"):
            step(who, task, records)
        assert not list(folder(who).glob("features-*"))


def test_runs_and_clients_have_folders_of_their_own(tmp_path):
    folders = {
        TCTClient(network(), X, Y, cache=tmp_path, seed=(0, seed)).folder(
            dataclasses.replace(MOMENTS, run_key=run), config
        )
        for run in ("a", "b/../c", "")
        for seed in (1, 2)
        for config in ({}, {"client-id": "1"}, {"client-id": "node1"}, {"client-id": "../x"})
    }
    assert len(folders) == 3 * (2 + 3)  # the seed counts where no id came
    assert all(path.parent == tmp_path and ".." not in path.name for path in folders)


@pytest.mark.parametrize("has_network", [True, False])
@pytest.mark.parametrize("missing", ["linear", "control"])
def test_a_message_without_its_records_is_refused(tmp_path, missing, has_network):
    """Whether or not the client holds the network: else it would ask for that in vain."""
    if has_network:
        step(client(tmp_path), linear_task(), message())
    records = message()
    del records[missing]
    with pytest.raises(ValueError, match=f"records linear, control, got .*; {missing} .* TCT"):
        step(client(tmp_path), linear_task(), records)
    if missing == "linear":
        with pytest.raises(ValueError, match="linear comes from the strategy TCT"):
            client(tmp_path).evaluate(NamedArrays(records), linear_task().to_config())


@pytest.mark.parametrize(
    ("name", "count", "text"),
    [
        ("linear", 0, "record linear: expected 1 array, got 0"),
        ("control", 2, "record control: expected 1 array, got 2"),
        ("normaliser", 1, "record normaliser: expected mean and scale, got 1"),
        ("normaliser", 3, "record normaliser: expected mean and scale, got 3"),
    ],
)
def test_too_few_or_too_many_arrays_in_a_record_are_refused(tmp_path, name, count, text):
    records = message()
    array = next(iter(records[name].values()))
    records[name] = {str(i): array for i in range(count)}
    with pytest.raises(ValueError, match=text):
        step(client(tmp_path), linear_task(), records)


def test_arrays_without_names_are_refused(tmp_path):
    for task in (MOMENTS, linear_task()):
        with pytest.raises(ValueError, match=r"expected NamedArrays with the records of .* TCT"):
            client(tmp_path).fit(list(NamedArrays(message())), task.to_config())


def test_half_precision_is_for_normalised_features(tmp_path):
    records = message()
    records["normaliser"] = {MEAN: np.zeros(20, np.float32), SCALE: np.ones(20, np.float32)}
    with pytest.raises(ValueError, match="float16 would lose small features"):
        step(client(tmp_path, dtype="float16"), linear_task(), records)
