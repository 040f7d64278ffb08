"""Clients whose model is on another device: examples go there, what is sent comes back.

The fake device computes on the CPU, in float32, with operators that may add in another order: 1e-5.
"""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord

from fedntk.clients import (
    ClosedFormClient,
    CPNTKFLClient,
    FedProtoClient,
    LocalSGD,
    NTKDFLClient,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
)
from fedntk.ntk import FeatureMap, NetworkPredictor, Normaliser, TCTModel
from fedntk.strategies import AFL, CPNTKFL, NTKDFL, NTKFL, SCAFFOLD, TCT, FedProto, SeededFedAvg

from ..fake_device import NAME, FakeDevice
from ..strategies.federation import Grid, app, arrays_of, network, start

STEPS = {"learning_rate": 0.1, "steps": [1, 4]}
COMPRESSED = {"sparsity": 0.5, "bits": 8}
STEP = {"momentum": 0.9, "weight_decay": 1e-2, "batch_size": 4}
SGD = {"sgd": LocalSGD(**STEP), "batch_size_eval": 5}
CONVEX = {"num_features": 12, "learning_rate": 0.05, "local_steps": 3}
tct = partial(TCT, network=network(), **CONVEX)
# strategy, client, options of the client
CASES = {
    "SGD": (SeededFedAvg, SGDClient, SGD | {"sgd": LocalSGD(**STEP, proximal_mu=0.1, epochs=2)}),
    "SGD, mse": (SeededFedAvg, SGDClient, SGD | {"loss": "mse"}),
    "NTK-FL": (partial(NTKFL, **STEPS), NTKFLClient, {}),
    "NTK-FL, dense": (partial(NTKFL, **STEPS), NTKFLClient, {"structure": "dense"}),
    "compressed": (partial(CPNTKFL, **STEPS, **COMPRESSED), CPNTKFLClient, COMPRESSED),
    "SCAFFOLD I": (SCAFFOLD, SCAFFOLDClient, SGD | {"option": "I"}),
    "SCAFFOLD II": (SCAFFOLD, SCAFFOLDClient, SGD),
    "TCT": (tct, TCTClient, {}),
    "NTK-DFL": (partial(NTKDFL, **STEPS, kernel="corrected", selection="own"), NTKDFLClient, {}),
    "NTK-DFL, full": (partial(NTKDFL, **STEPS, kernel="full"), NTKDFLClient, {}),
    "FedProto": (partial(FedProto, network=network()), FedProtoClient, {}),
    "AFL": (partial(AFL, network=network()), ClosedFormClient, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_replies_are_those_of_a_client_on_the_cpu(name, tmp_path, monkeypatch):
    """To training, to evaluation, and to TCT's moments and two convex rounds."""
    strategy, kind, options = CASES[name]

    def replies(device):
        def client(*arguments, seed, **options):
            own = kind(*arguments, seed=seed, device=device, **options)
            assert next(own.model.parameters()).device.type == device
            return own

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / device))
        grid = Grid(app(client, **options), num_clients=2)
        start(strategy(min_available_nodes=2), grid, rounds=3 if kind is TCTClient else 1)
        return [message.content for way, message in grid.seen if way == "up"]

    here = replies("cpu")
    with FakeDevice():
        there = replies(NAME)
    for own, expected in zip(there, here, strict=True):
        assert own.keys() == expected.keys()
        for name, record in expected.items():
            if isinstance(record, MetricRecord):
                assert dict(own[name]) == pytest.approx(dict(record), rel=1e-5)
                continue
            own_arrays, arrays = arrays_of(own[name]), arrays_of(record)
            assert list(own_arrays) == list(arrays)
            for key, array in arrays.items():
                np.testing.assert_allclose(own_arrays[key], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [NetworkPredictor, TCTModel])
def test_a_predictor_goes_where_its_module_goes(kind):
    """As in ``test(net, loader, device)``: scores are where the labels are."""
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    linear = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    rest = (FeatureMap(num_features=12), Normaliser.identity(12), linear)

    def scores(device):
        predictor = kind(network(), *(rest if kind is TCTModel else ()))
        with torch.no_grad():
            moved = predictor.to(device).eval()(x.to(device))
        predicted = predictor.predict(x)
        assert (moved.device.type, predicted.device.type) == (device, "cpu")
        return torch.stack([moved.cpu(), predicted])

    expected = scores("cpu")
    with FakeDevice():
        torch.testing.assert_close(scores(NAME), expected, rtol=1e-4, atol=1e-5)
