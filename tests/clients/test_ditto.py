"""DittoClient against algorithm 1 by hand, and in the limit of a strong pull."""

import numpy as np
import torch
from torch import nn

from fedntk.clients import DittoClient, LocalSGD, NamedArrays

from ..strategies.federation import examples


def linear():
    layer = nn.Linear(4, 3)
    layer.load_state_dict({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    return layer


def test_steps_are_the_papers_with_the_received_weights_as_the_centre():
    """Two rounds of client 0 by hand in float64; one step an epoch, three epochs of v.

    In round 2 v begins where it ended, which is not the centre. Numbers of size 1, a dozen steps of
    float32: 1e-5.
    """
    x, y = examples(0)
    rate, pull = 0.2, 0.7
    x64, targets = x.double(), nn.functional.one_hot(y, 3).double()

    def gradient(w, b):
        slope = (torch.softmax(x64 @ w.T + b, 1) - targets) / len(x)
        return slope.T @ x64, slope.sum(0)

    w, b = torch.zeros(3, 4).double(), torch.zeros(3).double()
    v, c = w, b
    own = DittoClient(
        linear(),
        x,
        y,
        sgd=LocalSGD(learning_rate=rate, batch_size=len(x)),
        pull=pull,
        personal_epochs=3,
    )
    for number in (1, 2):
        received = {"weight": w.float().numpy(), "bias": b.float().numpy()}
        config = {"server-round": number, "personal-run": "by-hand"}
        if number > 1:
            config["personal-round"] = number - 1
        result, count, metrics = own.fit(NamedArrays({"arrays": received}), config)
        assert (list(result.records), count) == (["arrays"], len(x))
        assert sorted(metrics) == ["personal-loss", "restarted", "train-loss"]
        for _ in range(3):
            dv, dc = gradient(v, c)
            v, c = v - rate * (dv + pull * (v - w)), c - rate * (dc + pull * (c - b))
        dw, db = gradient(w, b)
        w, b = w - rate * dw, b - rate * db
        sent = result.records["arrays"]
        np.testing.assert_allclose(sent["weight"], w.numpy(), atol=1e-5)
        kept = own.load_personal(config | {"personal-round": number})
        np.testing.assert_allclose(kept["weight"], v.numpy(), atol=1e-5)
        np.testing.assert_allclose(kept["bias"], c.numpy(), atol=1e-5)
    assert np.abs(kept["weight"] - sent["weight"]).max() > 0.01
