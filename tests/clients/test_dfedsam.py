"""DFedSAMClient against Foret et al.'s step by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import DFedSAMClient, LocalSGD
from fedntk.clients.gossip.relay import Message
from fedntk.clients.gossip.relay_memory import RelayMemory
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from ..strategies.federation import examples, network

MEMORY = RelayMemory(None, nn.Identity(), (0,), {"server-round": 1}, same_weights=True)
MESSAGE = Message({"server-round": 1}, {}, DFedAvgOptions(), MEMORY)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_dfedsam_steps_along_the_gradient_at_the_point_nearby(rho):
    """Float64, three full batches: 1e-12. The bias is a column of w, as the norm is of all."""
    x, y = examples(2)
    x, targets = x.double(), nn.functional.one_hot(y, 3).double()
    own = DFedSAMClient(
        nn.Linear(4, 3).double(),
        x,
        y,
        rho=rho,
        sgd=LocalSGD(
            epochs=3, learning_rate=0.2, momentum=0.9, weight_decay=0.01, batch_size=len(x)
        ),
    )
    rows = torch.cat([x, torch.ones(len(x), 1)], 1)

    def gradient(w):
        return (torch.softmax(rows @ w.T, 1) - targets).T @ rows / len(x)

    w = torch.linspace(-1, 1, 15).double().reshape(3, 5)
    first = {"weight": w[:, :4].numpy().copy(), "bias": w[:, 4].numpy().copy()}
    velocity = torch.zeros_like(w)
    for _ in range(3):
        slope = gradient(w)
        velocity = 0.9 * velocity + gradient(w + rho * slope / slope.norm()) + 0.01 * w
        w = w - 0.2 * velocity
    trained, metrics = own.train_from(first, MESSAGE)
    found = np.column_stack([trained["weight"], trained["bias"]])
    np.testing.assert_allclose(found, w.numpy(), rtol=0, atol=1e-12)
    assert metrics["train-loss"] > 0


def test_dfedsams_loss_and_batchnorms_statistics_are_those_of_the_first_pass():
    """One step: they do not depend on the radius, and its counter counts one pass."""
    x, y = examples(4)
    plain, sharp = (
        DFedSAMClient(network(), x, y, sgd=LocalSGD(learning_rate=0.1, batch_size=len(x)), rho=rho)
        for rho in (0, 0.5)
    )
    weights = plain.model_weights()
    (plain, loss), (sharp, same) = (own.train_from(weights, MESSAGE) for own in (plain, sharp))
    assert loss == same
    for name, _ in network().named_buffers():
        assert plain[name].tobytes() == sharp[name].tobytes()
    assert np.abs(plain["3.weight"] - sharp["3.weight"]).max() > 1e-4
    assert sharp["1.num_batches_tracked"] == 1


def test_no_gradient_means_no_point_nearby():
    """All outputs are 1 and so are the targets: the gradient of MSE is zero, the weights stay."""
    weights = {"weight": np.zeros((1, 4), np.float32), "bias": np.ones(1, np.float32)}
    targets = torch.zeros(5, dtype=torch.int64)
    own = DFedSAMClient(nn.Linear(4, 1), torch.ones(5, 4), targets, loss="mse")
    trained, _ = own.train_from(weights, MESSAGE)
    np.testing.assert_equal(trained, weights)
