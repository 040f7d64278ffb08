"""Clients whose model is on another device: examples go there, what is sent comes back.

The fake device computes on the CPU, in float32, with operators that may add in another order: 1e-5.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedntk.clients import (
    CPNTKFLClient,
    NamedArrays,
    NTKDFLClient,
    NTKFLClient,
    SCAFFOLDClient,
    SealedProjection,
    SGDClient,
    TCTClient,
    get_weights,
)
from fedntk.clients.gossip.relay import WeightsParcel
from fedntk.ntk import FeatureMap, Moments, NetworkPredictor, Normaliser, TCTModel
from fedntk.ntk.evolution.candidates import stack_candidates
from fedntk.ntk.payloads import ConvexTask
from fedntk.ntk.payloads.gossip_options import NTKDFLOptions
from fedntk.trust import SEALED_SEED

from ..fake_device import NAME, FakeDevice
from .keys import enrolled

X = torch.randn(7, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(7) % 3
ROUND = {"server-round": 1}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
        )


def same(run: Callable[[str], tuple[Any, ...]]) -> None:
    """Whether a client on the device sends and reports what one on the CPU does."""
    arrays, count, metrics = run("cpu")
    with FakeDevice():
        own_arrays, own_count, own_metrics = run(NAME)
    assert own_count == count
    assert own_metrics == pytest.approx(metrics, rel=1e-5)
    assert len(own_arrays) == len(arrays)
    for own, expected in zip(own_arrays, arrays, strict=True):
        assert isinstance(own, np.ndarray)
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def named_weights() -> dict[str, np.ndarray]:
    return {name: v.numpy().copy() for name, v in network().state_dict().items()}


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_evaluation_and_steps_of_sgd(loss):
    """Evaluation in batches; steps with momentum, weight decay and FedProx's term."""
    options = {"momentum": 0.9, "weight_decay": 1e-2, "proximal_mu": 0.1, "local_epochs": 2}

    def work(device: str) -> tuple[Any, ...]:
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
        client = SGDClient(
            network(), loader, loss=loss, device=device, batch_size=4, batch_size_eval=5, **options
        )
        assert next(client.model.parameters()).device.type == device
        outputs = client.outputs(X)
        assert outputs.device.type == "cpu"
        value, _, found = client.evaluate(get_weights(network()), {})
        sent, count, metrics = client.fit(get_weights(network()), ROUND)
        arrays = [outputs.numpy(), *client.get_parameters({}), *sent]
        return arrays, count, {"evaluated": value, **found, **metrics}

    same(work)


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_upload_and_query_of_ntk_fl(structure):
    def upload(device: str) -> tuple[Any, ...]:
        client = NTKFLClient(network(), X, Y, structure=structure, device=device, sampling_rate=0.7)
        return client.fit(get_weights(network()), ROUND)

    def query(device: str) -> tuple[Any, ...]:
        client = NTKFLClient(network(), X, Y, device=device)
        moved = [{"4.weight": s * torch.ones(3, 8)} for s in (0.0, 0.1)]
        answer = client.query(list(stack_candidates(named_weights(), moved).values()), {})
        return [np.array(answer["losses"])], answer["num-examples"], {}

    same(upload)
    same(query)


@pytest.mark.parametrize(
    "tools",
    [
        {"sparsity": 0.5, "bits": 8},
        {"clip": 1.0, "noise_multiplier": 0.5, "label_noise": 0.2, "noise_seed": (0, 1)},
    ],
)
def test_upload_of_cp_ntk_fl(tools):
    """The same random numbers are drawn on the CPU, wherever the model is."""
    keys, sealed = enrolled()

    def upload(device: str) -> tuple[Any, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))
        projection = SealedProjection(10, keys)
        client = CPNTKFLClient(model, X, Y, device=device, projection=projection, **tools)
        return client.fit(get_weights(model), {"server-round": 1, SEALED_SEED: sealed})

    same(upload)


@pytest.mark.parametrize("option", ["I", "II"])
def test_steps_of_scaffold(option):
    def fit(device: str) -> tuple[Any, ...]:
        weights = named_weights()
        floating = {k: a for k, a in weights.items() if a.dtype.kind == "f"}
        corrections = {k: 0.1 * np.ones_like(a) for k, a in floating.items()}
        client = SCAFFOLDClient(
            network(), X, Y, option=option, device=device, batch_size=4, weight_decay=1e-2
        )
        records = NamedArrays({"arrays": weights, "corrections": corrections})
        return client.fit(records, ROUND)

    same(fit)


@pytest.mark.parametrize("solver", ["closed", "loop"])
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_rounds_of_tct(loss, solver, tmp_path):
    """Statistics, a corrected round, and evaluation of the linear model."""
    chosen = FeatureMap(num_features=12)
    first = ConvexTask(step="moments", network_key="k", num_features=12)
    common = {"step": "linear", "network_key": "k", "num_features": 12, "loss": loss}
    second = ConvexTask(**common, learning_rate=0.05, local_steps=3, control="sent")
    evaluated = ConvexTask(**common, control="zero")
    normal = Normaliser.of(Moments.of(chosen.extractor(network())(X)))
    theta, control = np.random.default_rng(0).standard_normal((2, 12, 3)).astype(np.float32)
    records = {
        "network": named_weights(),
        "normaliser": {"tct.mean": normal.mean, "tct.scale": normal.inv_std},
        "linear": {"tct.linear": theta},
        "control": {"tct.control": 0.1 * control},
    }

    def rounds(device: str) -> tuple[Any, ...]:
        cache = tmp_path / device
        client = TCTClient(network(), X, Y, cache=cache, device=device, local_solver=solver)
        only, everything = NamedArrays({"network": named_weights()}), NamedArrays(records)
        moments, *_ = client.fit(only, {"server-round": 1, **first.to_config()})
        arrays, count, metrics = client.fit(everything, {"server-round": 2, **second.to_config()})
        rest = {name: own for name, own in records.items() if name != "control"}
        value, _, found = client.evaluate(NamedArrays(rest), evaluated.to_config())
        return [*moments, *arrays], count, {**metrics, "loss": value, **found}

    same(rounds)


@pytest.mark.parametrize("kernel", ["mean", "corrected", "full"])
def test_a_round_of_ntk_dfl(kernel, tmp_path):
    """Rows that it sends are used as a neighbour's, too."""

    def work(device: str) -> tuple[Any, ...]:
        client = NTKDFLClient(network(), X, Y, device=device, cache=tmp_path / device, seed=1)
        task = NTKDFLOptions(learning_rate=0.1, steps=(1.0, 4.0), kernel=kernel, selection="own")
        config = {
            "server-round": 1, "batch": 0, "neighbours": [2], "personal-run": "r",
            "personal-round": 0, **task.to_config(),
        }  # fmt: skip
        heard = WeightsParcel({k: 1.1 * a for k, a in floats().items()}, 5).to_arrays()
        heard |= {k: a for k, a in named_weights().items() if k not in floats()}
        sent, told = [], {}
        for step in ("weights", "average", "jacobians", "evolve"):
            records = {"arrays": named_weights(), "from-2": heard}
            found, count, metrics = client.fit(NamedArrays(records), {**config, "step": step})
            told |= metrics
            sent += [a for record in found.records.values() for a in record.values()]
            heard = found.records.get("to-2", heard)
        assert count == len(X)
        assert told["neighbours-heard"] == 1
        return [a.astype(float) for a in sent], count, told

    same(work)


def floats() -> dict[str, np.ndarray]:
    return {name: a for name, a in named_weights().items() if a.dtype.kind == "f"}


@pytest.mark.parametrize("kind", [NetworkPredictor, TCTModel])
def test_a_predictor_goes_where_its_module_goes(kind):
    """As in ``test(net, loader, device)``: scores are where the labels are."""

    def scores(device: str) -> tuple[Any, ...]:
        chosen = FeatureMap(num_features=12)
        linear = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
        predictor = (
            NetworkPredictor(network())
            if kind is NetworkPredictor
            else TCTModel(network(), chosen, Normaliser.identity(12), linear)
        )
        with torch.no_grad():
            found = predictor.to(device).eval()(X.to(device))
        predicted = predictor.predict(X)
        assert (found.device.type, predicted.device.type) == (device, "cpu")
        return [found.cpu().numpy(), predicted.numpy()], len(X), {}

    same(scores)
