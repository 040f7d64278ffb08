"""FedBN: which arrays stay with the clients."""

from functools import partial

import pytest
from torch import nn

from fedntk.ntk.parts import batch_norm_arrays
from fedntk.strategies import FedBN

from .federation import Contract, network
from .test_personalised import CLIENTS, NORM

CONTRACT = {"FedBN": Contract(partial(FedBN, network=network()), CLIENTS, personal=True)}


def test_batch_norm_is_what_stays_whatever_its_name_and_depth():
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    whole = nn.ModuleDict({"body": inner, "norm": nn.BatchNorm1d(3, affine=False)})
    whole["group"] = nn.GroupNorm(1, 2)
    assert batch_norm_arrays(whole) == (
        "body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var",
        "body.1.num_batches_tracked", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked",
    )  # fmt: skip
    assert batch_norm_arrays(nn.BatchNorm1d(2))[:2] == ("weight", "bias")
    assert FedBN(network=network()).personal == NORM
    with pytest.raises(ValueError, match="expected one with BatchNorm layers"):
        FedBN(network=nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))
