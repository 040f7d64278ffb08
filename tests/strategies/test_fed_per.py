"""FedPer: which arrays stay with the clients."""

from functools import partial

import pytest
from torch import nn

from fedntk.ntk.parts import head_arrays
from fedntk.strategies import FedPer

from .federation import Contract, network
from .test_personalised import CLIENTS

CONTRACT = {"FedPer": Contract(partial(FedPer, network=network()), CLIENTS, personal=True)}


def test_the_head_is_the_last_linear_layer_or_the_one_that_is_named():
    assert head_arrays(network()) == ("3.weight", "3.bias")
    assert head_arrays(network(), "0") == ("0.weight", "0.bias")
    assert head_arrays(nn.Linear(2, 3, bias=False)) == ("weight",)
    assert FedPer(network=network()).personal == ("3.weight", "3.bias")
    assert FedPer(network=network(), head="0").personal == ("0.weight", "0.bias")
    with pytest.raises(ValueError, match=r"head: expected the name of .*, got '1'"):
        FedPer(network=network(), head="1")
