"""Arrays under several names: found, loaded, differentiated; the check of what others sent."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import NTKFLClient, PersonalisedClient, SGDClient, get_weights, set_weights
from fedntk.clients.core.weights import NamedArrays
from fedntk.ntk import BadReply, NetworkPredictor, jacobian
from fedntk.ntk.evolution.candidates import Candidates
from fedntk.ntk.evolution.gradient_flow import GradientFlow
from fedntk.ntk.parts import batch_norm_arrays, head_arrays
from fedntk.ntk.payloads.jacobian_format import jacobian_from_arrays, jacobian_to_arrays
from fedntk.ntk.support.arrays import require_array
from fedntk.ntk.support.shared_arrays import first_names, require_separate
from fedntk.strategies import AFL, FedBN, FedPer

from ..conftest import refused

TOKENS = torch.randint(0, 6, (8, 4), generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """An embedding whose matrix is that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(6, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.embedding(x))).mean(1))


def test_the_first_name_of_an_array_is_that_of_its_parameter():
    norm = nn.BatchNorm1d(3)
    network = nn.ModuleDict({"a": norm, "b": nn.ModuleList([norm])})
    network.register_buffer("scale", norm.weight)
    assert first_names(network) == {
        "scale": "a.weight",
        **{f"{place}.{name}": f"a.{name}" for place in ("a", "b.0") for name in norm.state_dict()},
    }


def test_an_update_has_the_sum_of_all_uses_under_all_names():
    """Sent and read again, at two t; against an untied copy, by autograd in float64."""
    network = Tied().double()
    rows = jacobian(network, TOKENS)
    shapes = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    read = jacobian_from_arrays(jacobian_to_arrays(rows), parameters=shapes)
    weights = {name: t.detach().numpy() for name, t in network.state_dict().items()}
    outputs, targets = network(TOKENS).detach(), torch.eye(6, dtype=torch.float64)[TOKENS[:, 0]]
    weights["head.weight"] = np.zeros((6, 5))  # of a network that was not tied yet
    flow = GradientFlow(learning_rate=0.1, steps=(1, 5), kernel="full")
    candidates = Candidates.of(weights, read.to_dense().expanded(), outputs, targets, flow)
    untied = copy.deepcopy(network)
    untied.head.weight = nn.Parameter(untied.embedding.weight.detach().clone())
    for k, residual in enumerate(candidates.evolution.residuals):
        untied.zero_grad()
        (untied(TOKENS) * residual).sum().backward()
        total = (untied.embedding.weight.grad + untied.head.weight.grad).numpy()
        for name in ("embedding.weight", "head.weight"):
            moved = candidates.weights_at(k)[name] - weights["embedding.weight"]
            np.testing.assert_allclose(moved, total, rtol=1e-10, atol=1e-12)
            assert abs(moved).max() > 1e-3


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "head.weight", "of": "middle.weight"},  # another shape
        {"name": "middle.bias", "of": "embedding.weight"},  # a block holds it
        {"name": "head.weight", "of": "head.weight"},
        {"name": "nothing", "of": "embedding.weight"},
        {"name": "head.weight"},
        {"name": ["head.weight"], "of": {}},
    ],
)
def test_a_layout_that_claims_another_name_is_refused(entry):
    network = Tied()
    arrays = jacobian_to_arrays(jacobian(network, TOKENS))
    shapes = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    entries = [b for b in json.loads(arrays["layout"].tobytes()) if b["kind"] != "shared"]
    layout = json.dumps([*entries, {"kind": "shared", **entry}]).encode()
    arrays["layout"] = np.frombuffer(layout, np.uint8)
    with pytest.raises(BadReply, match=r"by another name|JSON list"):
        jacobian_from_arrays(arrays, parameters=shapes)


def test_what_comes_under_the_first_name_counts():
    """As it must where a method changes one name only, in clients and in predictors."""
    network = Tied()
    arrays = dict(zip(network.state_dict(), get_weights(network), strict=True))
    arrays["embedding.weight"] = arrays["embedding.weight"] + 1
    set_weights(network, list(arrays.values()))
    loaded = NetworkPredictor.from_arrays(Tied(), arrays).network
    for tied in (network, loaded):
        np.testing.assert_array_equal(tied.head.weight.detach(), arrays["embedding.weight"])
        np.testing.assert_array_equal(tied.embedding.weight.detach(), arrays["embedding.weight"])


def over_one_memory(change):
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    change(network)
    return network


def same(network):
    network[1].weight.data = network[0].weight.data


def transposed(network):
    network[1].weight = nn.Parameter(network[0].weight.detach().T)


def part(network):
    network[2].weight.data = network[0].weight.data[1:]


def columns(network):
    network[1].weight.data = network[0].weight.data.repeat(1, 2)[:, ::2]
    network[2].bias.data = network[1].weight.data[:3, 1]


def of_a_buffer(network):
    network.register_buffer("kept", network[0].weight.detach())


@pytest.mark.parametrize("change", [same, transposed, part, columns, of_a_buffer])
@pytest.mark.parametrize("client", [SGDClient, NTKFLClient])
def test_different_tensors_over_one_memory_are_refused(change, client):
    with pytest.raises(ValueError, match=r"but \d\.\w+ shares memory .*one nn\.Parameter"):
        client(over_one_memory(change), torch.ones(3, 4), torch.arange(3))


def test_parts_of_one_memory_that_do_not_meet_are_taken():
    """As recurrent layers have them on a GPU, and columns of one matrix."""

    def apart(network):
        memory = torch.rand(8, 4)
        network[0].weight.data, network[1].weight.data = memory[:4], memory[4:]
        columns = torch.rand(3, 8)
        network[2].weight.data = columns[:, ::2]
        network.register_buffer("others", columns[:, 1::2])

    require_separate(over_one_memory(apart))


def test_an_array_that_is_shared_and_personal_is_refused():
    """By the strategies that know the network, and by clients."""
    tied = Tied()
    refused(r"embedding\.weight and head\.weight are one array", FedPer, network=tied)
    refused(r"embedding\.weight and head\.weight are one array", AFL, network=tied)
    client = PersonalisedClient(tied, TOKENS, torch.arange(8) % 6)
    arrays = dict(zip(tied.state_dict(), get_weights(tied), strict=True))
    personal = {"head.weight": arrays.pop("head.weight")}
    with pytest.raises(ValueError, match=r"to be shared, or none; embedding\.weight and head"):
        client.fit(NamedArrays({"arrays": arrays, "personal": personal}), {})


def test_a_layer_under_two_names_is_personal_under_both():
    norm, last = nn.BatchNorm1d(4), nn.Linear(4, 3)
    network = nn.ModuleDict({"a": nn.Linear(4, 4), "b": norm, "c": norm, "d": last, "e": last})
    assert {name[0] for name in batch_norm_arrays(network)} == {"b", "c"}
    assert set(FedBN(network=network).personal) == set(batch_norm_arrays(network))
    assert head_arrays(network) == ("d.weight", "d.bias", "e.weight", "e.bias")


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (ONES, {"shape": (2, 3), "dtype": np.float32}),
        (ONES, {"shape": (-1, 3), "dtype": (np.float16, np.float32)}),
        (ONES, {"limit": 1.0, "low": 1.0, "high": 1.0}),
        (np.array([0, 255], np.uint8), {"dtype": "unsigned", "high": 255}),
        (np.zeros((0, 3)), {"shape": (0, 3), "low": 1.0}),
        (np.array([True, False]), {"dtype": bool}),  # a model's mask
    ],
)
def test_what_was_expected_passes(array, expected):
    require_array("w", array, **expected)


@pytest.mark.parametrize(
    ("array", "expected", "message"),
    [
        (ONES, {"shape": (3, 2)}, r"shape: w: expected \(3, 2\), got \(2, 3\)"),
        (ONES[:0], {"shape": (-1, 3)}, r"shape: w: expected \(any, 3\), got \(0, 3\)"),
        (ONES, {"dtype": (np.float16, np.float64)}, "dtype: w: expected float16 or float64, got"),
        (ONES, {"dtype": "unsigned"}, "dtype: w: expected unsigned integers, got float32"),
        (ONES.astype(bool), {}, "dtype: w: expected numbers, got bool"),
        (ONES * np.nan, {}, "non-finite: w: expected finite numbers, got NaN or infinity"),
        (ONES * -np.inf, {}, "non-finite"),
        (ONES * -2, {"limit": 1.0}, "scale: w: expected magnitudes up to 1, got -2.0 ... -2.0"),
        (np.array([-(2**63)]), {"limit": 2.0**53}, "scale"),  # whose absolute value overflows
        (ONES, {"low": 2.0}, "range: w: expected at least 2, got 1.0 ... 1.0"),
        (ONES, {"low": 0.0, "high": 0.5}, "range: w: expected 0 ... 0.5, got 1.0 ... 1.0"),
    ],
)
def test_anything_else_is_refused_under_its_reason(array, expected, message):
    refused(message, require_array, "w", array, error=BadReply, **expected)
