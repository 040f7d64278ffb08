"""A client of NTK-DFL without a strategy around it: what it sends to whom, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import NamedArrays, NTKDFLClient
from fedntk.clients.gossip.ntk_dfl import EvolvedParcel
from fedntk.clients.gossip.relay import WeightsParcel
from fedntk.ntk import JacobianUpload, jacobian
from fedntk.ntk.payloads.gossip_options import NTKDFLOptions

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(9) % 3
TASK: dict[str, Any] = {"learning_rate": 0.1, "steps": (1.0, 4.0), "loss": "mse"}


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    return {name: t.numpy().copy() for name, t in network(seed).state_dict().items()}


def client(tmp_path: Any, **options: Any) -> NTKDFLClient:
    return NTKDFLClient(network(), X, Y, loss="mse", cache=tmp_path, seed=1, **options)


def message(
    step: str, options: dict[str, Any] | None = None, **records: Any
) -> tuple[NamedArrays, Any]:
    config = {
        "server-round": 1, "step": step, "batch": 0, "neighbours": [2, 5], "personal-run": "r",
        "personal-round": 0, **NTKDFLOptions(**{**TASK, **(options or {})}).to_config(),
    }  # fmt: skip
    named = {name.replace("_", "-"): record for name, record in records.items()}
    return NamedArrays({"arrays": weights(), **named}), config


def parcel(seed: int, count: int = 4) -> dict[str, np.ndarray]:
    return WeightsParcel(weights(seed), count).to_arrays()


def test_each_neighbour_gets_the_rows_at_its_own_weights(tmp_path):
    own = client(tmp_path)
    result, *_ = own.fit(*message("jacobians", from_2=parcel(2), from_5=parcel(5)))
    assert isinstance(result, NamedArrays)
    assert list(result.records) == ["to-2", "to-5"]
    for neighbour in (2, 5):
        arrays = result.records[f"to-{neighbour}"]
        assert "inputs" not in arrays
        upload = JacobianUpload.from_arrays(
            arrays, parameters={n: a.shape for n, a in weights().items()}
        )
        expected = jacobian(network(neighbour), X).dense()
        for name, rows in upload.jacobian.dense().items():
            torch.testing.assert_close(rows, expected[name])
        with torch.no_grad():
            torch.testing.assert_close(upload.outputs, network(neighbour)(X))


def test_inputs_travel_only_where_t_is_chosen_by_them(tmp_path):
    task = {"selection": "true-loss"}
    result, *_ = client(tmp_path).fit(*message("jacobians", task, from_2=parcel(2)))
    assert isinstance(result, NamedArrays)
    np.testing.assert_array_equal(result.records["to-2"]["inputs"], X)


def test_batches_share_no_example_and_leave_none_out(tmp_path):
    """Inputs that travel with the rows say which examples a part has."""
    task = {"selection": "true-loss", "batches": 4}
    sent = []
    for batch in range(4):
        parameters, config = message("jacobians", task, from_2=parcel(2))
        result, *_ = client(tmp_path).fit(parameters, {**config, "batch": batch})
        sent.append(result.records["to-2"]["inputs"])
    assert [len(part) for part in sent] == [3, 2, 2, 2]
    rows = sorted(row.tobytes() for part in sent for row in part)
    assert rows == sorted(row.tobytes() for row in X.numpy())


def test_a_client_with_one_example_uses_it_in_each_of_two_batches(tmp_path):
    own = NTKDFLClient(network(), X[:1], Y[:1], loss="mse", cache=tmp_path)
    for batch in range(2):
        task = {"selection": "true-loss", "batches": 2}
        parameters, config = message("jacobians", task, from_2=parcel(2))
        result, *_ = own.fit(parameters, {**config, "batch": batch})
        np.testing.assert_array_equal(result.records["to-2"]["inputs"], X[:1])


def test_weights_that_would_not_be_finite_are_not_taken(tmp_path):
    """One neighbour, so nothing to compare with; its outputs are near the largest of float32."""
    task = {"learning_rate": 100.0}
    ours = {name: a.astype(np.float32) for name, a in weights().items()}
    first, second = (
        NTKDFLClient(network().float(), X.float(), Y, loss="mse", cache=tmp_path, seed=seed)
        for seed in (1, 2)
    )

    def asked(step: str, **records: Any) -> tuple[NamedArrays, Any]:
        parameters, config = message(step, task, **records)
        parameters.records["arrays"] = ours
        return parameters, config

    first.fit(*asked("average"))
    near = WeightsParcel(ours, 9).to_arrays()
    rows = second.fit(*asked("jacobians", from_1=near))[0].records["to-1"]
    for factor, t in ((1.0, 4.0), (np.inf, 0.0)):
        outputs = rows["outputs"] if factor == 1 else np.full_like(rows["outputs"], 3e38)
        result, _, metrics = first.fit(*asked("evolve", from_2={**rows, "outputs": outputs}))
        new = result.records["to-neighbours"]
        assert (metrics["t"], metrics["neighbours-heard"]) == (t, 1)
        assert all(np.isfinite(a).all() for a in new.values())
        assert all((new[name] == a).all() for name, a in ours.items()) == (t == 0)


@pytest.mark.parametrize("damage", ["shape", "NaN", "missing", "count", "not arrays"])
def test_a_bad_parcel_is_dropped_and_counted(damage, tmp_path):
    bad = parcel(2)
    if damage == "shape":
        bad["0.weight"] = bad["0.weight"][:-1]
    elif damage == "NaN":
        bad["0.weight"] = np.full_like(bad["0.weight"], np.nan)
    elif damage == "missing":
        del bad["2.bias"]
    elif damage == "count":
        bad["num-examples"] = np.array(0)
    else:
        bad = {"sealed": np.frombuffer(b"\\x00\\x01", np.uint8)}
    result, _, metrics = client(tmp_path).fit(*message("average", from_2=bad, from_5=parcel(5, 9)))
    assert isinstance(result, NamedArrays)
    assert metrics["parcels-rejected"] == 1
    for name, array in result.records["to-neighbours"].items():
        if name != "num-examples":
            np.testing.assert_allclose(array, (weights()[name] + weights(5)[name]) / 2)


@pytest.mark.parametrize("damage", ["no t", "t", "NaN", "heard", "none"])
def test_weights_of_a_hub_that_cannot_be_used_are_not_adopted(damage, tmp_path):
    """The client fails in the step, and so keeps the weights that it had."""
    own = client(tmp_path)
    parameters, config = message("jacobians", from_2=parcel(2))
    own.fit(parameters, {**config, "hub": False})
    sent = EvolvedParcel(WeightsParcel.from_arrays(parcel(2), weights(), 9), 4.0, 2).to_arrays()
    good, config = message("adopt", from_2=sent)
    result, _, metrics = client(tmp_path).fit(good, {**config, "hub": False})
    assert (metrics["t"], metrics["neighbours-heard"]) == (4.0, 2)
    for name, array in weights(2).items():
        np.testing.assert_array_equal(result.records["to-neighbours"][name], array)
    if damage == "no t":
        del sent["metric-t"]
    elif damage == "t":
        sent["metric-t"] = np.array(np.inf)
    elif damage == "NaN":
        sent["0.bias"] = np.full_like(sent["0.bias"], np.nan)
    elif damage == "heard":
        sent["metric-neighbours-heard"] = np.array(-1)
    bad, config = message("adopt", **({} if damage == "none" else {"from_2": sent}))
    with pytest.raises(ValueError, match="no weights came from the cluster's hub"):
        client(tmp_path).fit(bad, {**config, "hub": False})


def test_weights_under_the_names_of_metrics_come_back():
    """A network may call a parameter t."""
    own = {"t": np.array([2.0]), "neighbours-heard": np.array([3.0])}
    sent = EvolvedParcel(WeightsParcel(own, 7), 4.0, 2)
    found = EvolvedParcel.from_arrays(sent.to_arrays(), own, 9)
    assert (found.new.weights, found.t, found.heard) == (own, 4.0, 2)


@pytest.mark.parametrize("compression", [{}, {"sparsity": 0.5, "bits": 6}])
def test_weights_at_which_rows_are_not_finite_are_refused(compression, tmp_path):
    """A deep network's outputs overflow at some weights; others still get their rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])
    own = {name: t.numpy().copy() for name, t in deep.state_dict().items()}
    task = {"loss": "cross-entropy", **compression}
    huge = WeightsParcel({name: a * np.float32(1e11) for name, a in own.items()}, 3).to_arrays()
    _, config = message("jacobians", task)
    config["outlier-factor"] = np.inf
    good = WeightsParcel(own, 3).to_arrays()
    records = NamedArrays({"arrays": own, "from-2": huge, "from-5": good})
    made = NTKDFLClient(deep, X.float(), Y % 3, cache=tmp_path, seed=1)
    result, _, metrics = made.fit(records, config)
    assert list(result.records) == ["to-5"]
    assert metrics["parcels-rejected"] == 1
    config["outlier-factor"] = 100.0  # then the norm tells
    records = NamedArrays({"arrays": own, "from-2": huge, "from-5": good})
    assert list(made.fit(records, config)[0].records) == ["to-5"]


@pytest.mark.parametrize("hub", [True, False])
def test_a_client_that_made_no_rows_adopts_nothing(hub, tmp_path):
    parameters, config = message("adopt")
    with pytest.raises(ValueError, match="the client has no Jacobian in this round"):
        client(tmp_path).fit(parameters, {**config, "hub": hub})


def test_an_average_that_is_lost_within_a_round_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the weights of this round are lost"):
        client(tmp_path).fit(*message("evolve"))


def test_unknown_steps_and_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="step: expected one of weights, average, jacobians"):
        client(tmp_path).fit(*message("dance"))
    parameters, config = message("weights")
    del config["option-steps"]
    with pytest.raises(ValueError, match="expected option-steps"):
        client(tmp_path).fit(parameters, config)
