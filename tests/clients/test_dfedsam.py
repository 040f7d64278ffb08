"""DFedSAMClient against Foret et al.'s step by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import DFedAvgClient, DFedSAMClient
from fedntk.clients.gossip.relay import Message
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from ..strategies.federation import examples, network

MESSAGE = Message({"server-round": 1}, {}, DFedAvgOptions())


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_steps_are_along_the_gradient_at_the_point_nearby(rho):
    """Three full batches with momentum and weight decay, by hand: float64, 1e-12."""
    x, y = examples(2)
    x, rate, momentum, decay = x.double(), 0.2, 0.9, 0.01
    targets = nn.functional.one_hot(y, 3).double()
    own = DFedSAMClient(
        nn.Linear(4, 3).double(), x, y, rho=rho, learning_rate=rate, momentum=momentum,
        weight_decay=decay, batch_size=len(x), local_epochs=3,
    )  # fmt: skip

    def gradient(w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope = (torch.softmax(x @ w.T + b, 1) - targets) / len(x)
        return slope.T @ x, slope.sum(0)

    w, b = torch.linspace(-1, 1, 12).double().reshape(3, 4), torch.arange(3).double()
    first = {"weight": w.numpy().copy(), "bias": b.numpy().copy()}
    velocity = [torch.zeros_like(w), torch.zeros_like(b)]
    for _ in range(3):
        dw, db = gradient(w, b)
        norm = float((dw.square().sum() + db.square().sum()).sqrt())
        dw, db = gradient(w + rho * dw / norm, b + rho * db / norm)
        velocity = [momentum * v + g + decay * p
                    for v, g, p in zip(velocity, (dw, db), (w, b), strict=True)]  # fmt: skip
        w, b = w - rate * velocity[0], b - rate * velocity[1]
    trained, metrics = own.train_from(first, MESSAGE)
    np.testing.assert_allclose(trained["weight"], w.numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(trained["bias"], b.numpy(), rtol=0, atol=1e-12)
    assert metrics["train-loss"] > 0


def test_the_loss_and_batchnorms_statistics_are_those_of_the_first_pass():
    """One step: they do not depend on the radius, and its counter counts one pass."""
    x, y = examples(4)
    clients = [
        kind(network(), x, y, learning_rate=0.1, batch_size=len(x), **options)
        for kind, options in ((DFedAvgClient, {}), (DFedSAMClient, {"rho": 0.5}))
    ]
    weights = clients[0].model_weights()
    (plain, loss), (sharp, same) = (own.train_from(weights, MESSAGE) for own in clients)
    assert loss == same
    for name, _ in network().named_buffers():
        assert plain[name].tobytes() == sharp[name].tobytes()
    assert np.abs(plain["3.weight"] - sharp["3.weight"]).max() > 1e-4
    assert sharp["1.num_batches_tracked"] == 1


def test_no_gradient_means_no_point_nearby():
    """All targets alike and certain: the gradient of MSE is zero, and the weights stay."""
    model = nn.Linear(4, 1)
    model.load_state_dict({"weight": torch.zeros(1, 4), "bias": torch.ones(1)})
    own = DFedSAMClient(model, torch.ones(5, 4), torch.zeros(5, dtype=torch.int64), loss="mse")
    weights = own.model_weights()
    trained, _ = own.train_from(weights, MESSAGE)
    for name, array in trained.items():
        np.testing.assert_array_equal(array, weights[name])
