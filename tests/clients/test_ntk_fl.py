"""NTKFLClient sends what section 4.1 says, in both forms."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import NTKFLClient, get_weights
from fedntk.ntk import JacobianUpload, jacobian, loss_value, one_hot

X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3


def network(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def parsed(arrays):
    shapes = {name: p.shape for name, p in network().state_dict().items()}
    return JacobianUpload.from_arrays(arrays.records["arrays"], parameters=shapes)


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_upload_is_jacobian_outputs_and_labels_at_the_received_weights(structure):
    sent = network()
    client = NTKFLClient(network(2), X, Y, structure=structure)
    arrays, count, metrics = client.fit(get_weights(sent), {})
    upload = parsed(arrays)
    assert count == 9
    assert torch.equal(upload.targets, one_hot(Y, 3))
    with torch.no_grad():
        assert torch.equal(upload.outputs, sent(X))
    assert ('"linear"' in upload.jacobian.layout) == (structure == "factored")
    expected = jacobian(sent, X).dense()
    for name, tensor in upload.jacobian.dense().items():
        assert torch.equal(tensor, expected[name])
    assert metrics["train-loss"] == loss_value(upload.outputs, upload.targets, "cross-entropy")


def test_both_forms_give_the_same_update():
    """That of float64, up to float32's rounding in sums of 27 terms of three products: 1e-5."""
    model = network()
    exact = jacobian(copy.deepcopy(model).double(), X.double())
    for structure in ("factored", "dense"):
        arrays, _, _ = NTKFLClient(model, X, Y, structure=structure).fit(get_weights(model), {})
        upload = parsed(arrays)
        residual = upload.targets - upload.outputs
        update, expected = upload.jacobian.vjp(residual), exact.vjp(residual.double())
        assert update.keys() == expected.keys()
        for name, tensor in update.items():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_query_returns_the_true_loss_of_each_candidate():
    models = [network(), network(2)]
    stacked = [np.stack(pair) for pair in zip(*map(get_weights, models), strict=True)]
    answer = NTKFLClient(network(), X, Y).query(stacked, {})
    with torch.no_grad():
        expected = [loss_value(model(X), one_hot(Y, 3), "cross-entropy") for model in models]
    assert answer == {"losses": expected, "num-examples": 9}


def test_query_with_ragged_candidates_is_refused():
    stacked = [np.stack([w, w]) for w in get_weights(network())]
    with pytest.raises(ValueError, match="one number of rows"):
        NTKFLClient(network(), X, Y).query([stacked[0][:1], *stacked[1:]], {})
