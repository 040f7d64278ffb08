"""DittoClient against algorithm 1 by hand, and in the limit of a strong pull."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import DittoClient, NamedArrays

from ..strategies.federation import examples


def linear() -> nn.Module:
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

    def gradient(w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope = (torch.softmax(x64 @ w.T + b, 1) - targets) / len(x)
        return slope.T @ x64, slope.sum(0)

    w, b = torch.zeros(3, 4).double(), torch.zeros(3).double()
    v, c = w, b
    own = DittoClient(
        linear(), x, y, learning_rate=rate, batch_size=len(x), pull=pull, personal_epochs=3
    )
    for number in (1, 2):
        received = {"weight": w.float().numpy(), "bias": b.float().numpy()}
        config = {"server-round": number, "personal-run": "by-hand"}
        if number > 1:
            config["personal-round"] = number - 1
        result, _, _ = own.fit(NamedArrays({"arrays": received}), config)
        for _ in range(3):
            dv, dc = gradient(v, c)
            v, c = v - rate * (dv + pull * (v - w)), c - rate * (dc + pull * (c - b))
        dw, db = gradient(w, b)
        w, b = w - rate * dw, b - rate * db
        sent = result.records["arrays"]
        np.testing.assert_allclose(sent["weight"], w.numpy(), atol=1e-5)
        kept = own.kept(config | {"personal-round": number})
        np.testing.assert_allclose(kept["weight"], v.numpy(), atol=1e-5)
        np.testing.assert_allclose(kept["bias"], c.numpy(), atol=1e-5)
    assert np.abs(kept["weight"] - sent["weight"]).max() > 0.01


@pytest.mark.parametrize("pull", [0.0, 10.0, 100.0])
def test_a_strong_pull_leads_to_the_received_weights(pull):
    """v is 3 from w everywhere; ten steps are d <- (1 - rate pull) d - rate g, d = v - w.

    A softmax's residual is at most 1, so |g| <= G = 2 max(1, |x|). What is left is then at most
    3 (1 - rate pull)^10 + G / pull; without a pull it is at least 3 - 10 rate G.
    """
    x, y = examples(3)
    rate, largest = 0.01, 2 * max(1.0, float(x.norm(dim=1).max()))
    own = DittoClient(
        linear(), x, y, learning_rate=rate, batch_size=len(x), pull=pull, personal_epochs=10
    )
    zeros = {name: tensor.numpy() for name, tensor in linear().state_dict().items()}
    config = {"server-round": 1, "personal-run": f"pull-{pull}"}
    own.keep({name: array + np.float32(3) for name, array in zeros.items()}, config)
    own.fit(NamedArrays({"arrays": zeros}), {**config, "server-round": 2, "personal-round": 1})
    kept = own.kept({**config, "personal-round": 2})
    left = [np.abs(array) for array in kept.values()]
    if not pull:
        assert min(array.min() for array in left) >= 3 - 10 * rate * largest > 1
    else:
        assert max(array.max() for array in left) <= 3 * (1 - rate * pull) ** 10 + largest / pull


def test_nothing_of_the_own_model_is_in_the_reply(tmp_path: Path):
    x, y = examples(3)
    weights = {name: tensor.numpy() for name, tensor in linear().state_dict().items()}
    config: dict[str, Any] = {"server-round": 1, "personal-run": "a"}
    own = DittoClient(linear(), x, y, cache=tmp_path, learning_rate=0.1, personal_epochs=4)
    result, count, metrics = own.fit(NamedArrays({"arrays": weights}), config)
    assert list(result.records) == ["arrays"]
    assert list(result.records["arrays"]) == list(weights)
    assert count == len(x)
    assert sorted(metrics) == ["personal-loss", "restarted", "train-loss"]
    kept = own.kept({**config, "personal-round": 1})
    assert np.abs(kept["weight"] - result.records["arrays"]["weight"]).max() > 1e-3
