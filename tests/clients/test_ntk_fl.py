"""NTKFLClient sends what section 4.1 says, in both forms."""

import numpy as np
import pytest
import torch

from fedntk.clients import NTKFLClient, get_weights
from fedntk.ntk import JacobianUpload, jacobian, loss_value, one_hot

from ..strategies.federation import network

X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_upload_is_jacobian_outputs_and_labels_at_the_received_weights(structure):
    sent = network().eval()
    client = NTKFLClient(network(2), X, Y, structure=structure)
    arrays, count, metrics = client.fit(get_weights(sent), {})
    shapes = {name: p.shape for name, p in sent.named_parameters()}
    upload = JacobianUpload.from_arrays(arrays.records["arrays"], parameters=shapes)
    assert count == 9
    assert torch.equal(upload.targets, one_hot(Y, 3))
    with torch.no_grad():
        assert torch.equal(upload.outputs, sent(X))
    assert ('"linear"' in upload.jacobian.layout) == (structure == "factored")
    found, expected = upload.jacobian.dense(), jacobian(sent, X).dense()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert metrics["train-loss"] == loss_value(upload.outputs, upload.targets, "cross-entropy")


def test_candidates_of_different_numbers_are_refused():
    first, *others = (np.stack([array, array]) for array in get_weights(network()))
    with pytest.raises(ValueError, match="one number of rows"):
        NTKFLClient(network(), X, Y).query([first[:1], *others], {})
