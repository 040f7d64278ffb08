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


@pytest.mark.parametrize(
    ("count", "batches", "sizes"), [(9, 1, [9]), (9, 4, [3, 2, 2, 2]), (1, 2, [1, 1])]
)
def test_batches_leave_no_example_out_and_are_never_empty(count, batches, sizes, tmp_path):
    """Inputs that travel with the rows, by which t is chosen, say which examples a part has.

    Parts share none, unless there are fewer examples than parts.
    """
    own = NTKDFLClient(network(), X[:count], Y[:count], loss="mse", cache=tmp_path, seed=1)
    sent = []
    for batch in range(batches):
        task = {"selection": "true-loss", "batches": batches}
        parameters, config = message("jacobians", task, from_2=parcel(2))
        result, *_ = own.fit(parameters, {**config, "batch": batch})
        sent.append(result.records["to-2"]["inputs"])
    assert [len(part) for part in sent] == sizes
    rows = sorted(row.tobytes() for part in sent for row in part)
    assert rows == sorted(row.tobytes() for row in X[:count].numpy()) * (sum(sizes) // count)


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


@pytest.mark.parametrize(
    "bad",
    [
        {**parcel(2), "0.weight": parcel(2)["0.weight"][:-1]},
        {**parcel(2), "0.weight": np.full((5, 4), np.nan)},
        {name: array for name, array in parcel(2).items() if name != "2.bias"},
        {**parcel(2), "num-examples": np.array(0)},
    ],
    ids=["shape", "NaN", "missing", "count"],
)
def test_a_bad_parcel_is_dropped_and_counted(bad, tmp_path):
    result, _, metrics = client(tmp_path).fit(*message("average", from_2=bad, from_5=parcel(5, 9)))
    assert metrics["parcels-rejected"] == 1
    for name, array in weights().items():
        found = result.records["to-neighbours"][name]
        np.testing.assert_allclose(found, (array + weights(5)[name]) / 2)


SENT = EvolvedParcel(WeightsParcel(weights(2), 4), 4.0, 2).to_arrays()


def test_weights_of_a_hub_are_adopted_unless_they_cannot_be_used(tmp_path):
    """Then the client fails in the step, and so keeps the weights that it had."""

    def adopt(**records: Any) -> Any:
        parameters, config = message("adopt", **records)
        return client(tmp_path).fit(parameters, {**config, "hub": False})

    parameters, config = message("jacobians", from_2=parcel(2))
    client(tmp_path).fit(parameters, {**config, "hub": False})
    result, _, metrics = adopt(from_2=SENT)
    assert (metrics["t"], metrics["neighbours-heard"]) == (4.0, 2)
    for name, array in weights(2).items():
        np.testing.assert_array_equal(result.records["to-neighbours"][name], array)
    without_t = {name: array for name, array in SENT.items() if name != "metric-t"}
    for bad in (
        without_t,
        {**SENT, "metric-t": np.array(np.inf)},
        {**SENT, "0.bias": np.full(5, np.nan)},
        {**SENT, "metric-neighbours-heard": np.array(-1)},
        None,
    ):
        with pytest.raises(ValueError, match="no weights came from the cluster's hub"):
            adopt(**({} if bad is None else {"from_2": bad}))


def test_weights_under_the_names_of_metrics_come_back():
    """A network may call a parameter t."""
    own = {"t": np.array([2.0]), "neighbours-heard": np.array([3.0])}
    sent = EvolvedParcel(WeightsParcel(own, 7), 4.0, 2)
    found = EvolvedParcel.from_arrays(sent.to_arrays(), own, 9)
    assert (found.new.weights, found.t, found.heard) == (own, 4.0, 2)


@pytest.mark.parametrize("factor", [np.inf, 100.0])
def test_weights_at_which_rows_are_not_finite_are_refused(factor, tmp_path):
    """A deep network's outputs overflow at some weights; others still get their rows.

    With the factor 100 their norm tells before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])
    own = {name: t.numpy().copy() for name, t in deep.state_dict().items()}
    huge = WeightsParcel({name: a * np.float32(1e11) for name, a in own.items()}, 3).to_arrays()
    good = WeightsParcel(own, 3).to_arrays()
    _, config = message("jacobians", {"loss": "cross-entropy", "sparsity": 0.5, "bits": 6})
    records = NamedArrays({"arrays": own, "from-2": huge, "from-5": good})
    made = NTKDFLClient(deep, X.float(), Y % 3, cache=tmp_path, seed=1)
    result, _, metrics = made.fit(records, {**config, "outlier-factor": factor})
    assert list(result.records) == ["to-5"]
    assert metrics["parcels-rejected"] == 1


@pytest.mark.parametrize(
    ("step", "told", "reason"),
    [
        ("adopt", {"hub": True}, "the client has no Jacobian in this round"),
        ("adopt", {"hub": False}, "the client has no Jacobian in this round"),
        ("evolve", {}, "the weights of this round are lost"),
        ("dance", {}, "step: expected one of weights, average, jacobians"),
    ],
)
def test_a_step_that_is_unknown_or_comes_without_those_before_is_an_error(
    step, told, reason, tmp_path
):
    parameters, config = message(step)
    with pytest.raises(ValueError, match=reason):
        client(tmp_path).fit(parameters, {**config, **told})


def test_unknown_settings_are_refused(tmp_path):
    parameters, config = message("weights")
    del config["option-steps"]
    with pytest.raises(ValueError, match="expected option-steps"):
        client(tmp_path).fit(parameters, config)
