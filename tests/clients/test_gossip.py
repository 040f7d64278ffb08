"""Clients of decentralised methods without a strategy: their steps by hand, and bad parcels."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.clients import (
    DFedAvgClient,
    DFedSAMClient,
    DisPFLClient,
    DPSGDClient,
    LocalSGD,
    NTKDFLClient,
)
from fedntk.clients.gossip.dispfl import SparseWeights, first_masks, layer_densities, search
from fedntk.clients.gossip.ntk_dfl import EvolvedParcel
from fedntk.clients.gossip.relay import Message, RelayMemory, WeightsParcel
from fedntk.ntk import BadReply
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions, GossipOptions, NTKDFLTask

from ..conftest import refused
from ..strategies.federation import assert_near, examples, network
from .problem import named, weights_of

X, Y = examples(4)


def message_to(client, options, **config):
    """What a client that keeps nothing is told in round 1."""
    config = {"server-round": 1, **config}
    memory = RelayMemory(None, client.model, client.seed, config, same_weights=True)
    return Message(config, {}, options, memory)


def weights(seed=0):
    return weights_of(network(seed))


def parcel(seed, count=4):
    return WeightsParcel(weights(seed), count).to_arrays()


# ------------------------------------------------------------------ averages


@pytest.mark.parametrize(("lost", "heard"), [(False, True), (False, False), (True, True)])
def test_dpsgd_adds_what_training_moved_to_the_average(lost, heard):
    """The neighbour's weights are 1 larger, so the average is 0.5 larger. In float64: 1e-12."""
    first = weights_of(network().double())
    larger = {name: array + array.dtype.type(1) for name, array in first.items()}
    config = {
        "server-round": 1 + lost, "personal-run": f"moved-{lost}-{heard}", "step": "step",
        "personal-round": int(lost), "neighbours": [8], **GossipOptions().to_config(),
    }  # fmt: skip
    x, y = examples(3)
    parcels = {"from-8": WeightsParcel(larger, len(x)).to_arrays()} if heard else {}
    client, single = (
        kind(network().double(), x, y, sgd=LocalSGD(learning_rate=0.1, batch_size=4))
        for kind in (DPSGDClient, DFedAvgClient)
    )
    sent, _, metrics = client.fit(named(arrays=first, **parcels), config)
    trained, _ = single.train_from(first, message_to(single, GossipOptions(), **config))
    expected = {name: array + 0.5 * heard for name, array in trained.items()}
    if heard:
        expected |= {n: (trained[n] + larger[n]) / 2 for n, _ in network().named_buffers()}
    expected["1.num_batches_tracked"] = np.rint(expected["1.num_batches_tracked"])
    assert_near(sent.records["to-neighbours"] | {"num-examples": 0},
                (larger if lost else expected) | {"num-examples": 0}, 1e-12)  # fmt: skip
    assert [metrics[kind] for kind in ("neighbours-heard", "restarted")] == [heard, lost]


def test_a_neighbour_that_was_not_heard_leaves_its_share():
    """The client has 8 examples and three neighbours; two are heard, which have one and five."""
    client, heard = DFedAvgClient(network(), *examples(3)), [(1, 2), (7, 10)]
    for rule, expected in (
        ("examples", [8 / 20, 2 / 20, 10 / 20]),
        ("metropolis", [1 - 1 / 4 - 1 / 6, 1 / 4, 1 / 6]),
    ):
        message = message_to(client, DFedAvgOptions(mixing=rule), degrees=[1, 2, 5])
        shares = client.shares(heard, message._replace(neighbours=(1, 4, 7)))
        assert shares == pytest.approx(expected, abs=1e-15)


def test_an_average_without_training_a_global_model_to_be_near_to_and_adam_are_refused():
    config = {"step": "average", "server-round": 3, **DFedAvgOptions().to_config()}
    client, near = DFedAvgClient(network(), *examples(3)), LocalSGD(proximal_mu=0.1)
    refused("the weights of this round are lost", client.fit, named(), config)
    for kind in (DFedAvgClient, DFedSAMClient, DisPFLClient, DPSGDClient):
        refused(f"mu: .*; {kind.__name__} has no global", kind, network(), X, Y, sgd=near)
        adam = LocalSGD(optimizer="adam")
        refused(f"expected sgd with {kind.strategy}, got", kind, network(), X, Y, sgd=adam)


# ------------------------------------------------------------------ DFedSAM


def sam_trained(client, first):
    return client.train_from(first, message_to(client, DFedAvgOptions()))


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_dfedsam_steps_along_the_gradient_at_the_point_nearby(rho):
    """Float64, three full batches: 1e-12. The bias is a column of w, as the norm is of all."""
    x, y = examples(2)
    x, targets = x.double(), nn.functional.one_hot(y, 3).double()
    steps = {"epochs": 3, "learning_rate": 0.2, "momentum": 0.9, "weight_decay": 0.01}
    client = DFedSAMClient(
        nn.Linear(4, 3).double(), x, y, rho=rho, sgd=LocalSGD(batch_size=len(x), **steps)
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
    trained, metrics = sam_trained(client, first)
    actual = np.column_stack([trained["weight"], trained["bias"]])
    np.testing.assert_allclose(actual, w.numpy(), rtol=0, atol=1e-12)
    assert metrics["train-loss"] > 0


def test_dfedsams_loss_and_batchnorms_statistics_are_those_of_the_first_pass():
    """One step: they do not depend on the radius, and its counter counts one pass."""
    sgd = LocalSGD(learning_rate=0.1, batch_size=len(X))
    (plain, loss), (sharp, same) = (
        sam_trained(DFedSAMClient(network(), X, Y, sgd=sgd, rho=rho), weights()) for rho in (0, 0.5)
    )
    assert loss == same
    for name, _ in network().named_buffers():
        assert plain[name].tobytes() == sharp[name].tobytes()
    assert np.abs(plain["3.weight"] - sharp["3.weight"]).max() > 1e-4
    assert sharp["1.num_batches_tracked"] == 1


def test_no_gradient_means_no_point_nearby():
    """All outputs are 1 and so are the targets: the gradient of MSE is zero, the weights stay."""
    first = {"weight": np.zeros((1, 4), np.float32), "bias": np.ones(1, np.float32)}
    targets = torch.zeros(5, dtype=torch.int64)
    client = DFedSAMClient(nn.Linear(4, 1), torch.ones(5, 4), targets, loss="mse")
    np.testing.assert_equal(sam_trained(client, first)[0], first)


# ------------------------------------------------------------------ DisPFL

CNN = {"c1": (6, 1, 5, 5), "c2": (16, 6, 5, 5), "f1": (120, 256), "f2": (10, 120), "b": (10,)}


@pytest.mark.parametrize("density", [0.5, 0.1])
def test_densities_are_those_of_erdos_renyi_kernels(density):
    """Layers below 1 share one factor, and those at 1 would exceed. Products of float64: 1e-12."""
    shares = layer_densities(CNN, density)
    sizes = {name: int(np.prod(shape)) for name, shape in CNN.items()}
    total = sum(shares[name] * sizes[name] for name in CNN)
    assert total == pytest.approx(density * sum(sizes.values()), rel=1e-12)
    ratio = {name: sum(shape) / sizes[name] for name, shape in CNN.items() if len(shape) > 1}
    scales = [shares[name] / ratio[name] for name in ratio if shares[name] < 1]
    assert max(scales) == pytest.approx(min(scales), rel=1e-12)
    assert all(ratio[n] * scales[0] > 1 for n in ratio if shares[n] == 1)
    assert shares["b"] == 1
    assert all(0 < share <= 1 for share in shares.values())


def test_a_density_below_that_of_the_vectors_is_refused_and_1_is_whole():
    assert set(layer_densities(CNN, 1.0).values()) == {1.0}
    vectors = {"w": (3, 3), "b": (10,)}
    refused("sparsity: the network's vectors, which stay whole", layer_densities, vectors, 0.5)


def test_the_smallest_weights_go_and_the_largest_gradients_come():
    """Half of four weights, by hand; one that went comes back, as its gradient is the largest."""
    mask = np.array([[True, True, True, True, False, False, False]])
    values = np.array([[3.0, -0.1, 0.2, -4.0, 0.0, 0.0, 0.0]])
    gradient = np.array([[9.0, 8.0, 0.1, 9.0, 0.5, -0.7, 0.6]])
    new = search(mask, values, gradient, 0.5)
    np.testing.assert_array_equal(new, [[True, True, False, True, False, True, False]])
    np.testing.assert_array_equal(search(mask, values, gradient, 0.0), mask)
    full = np.ones((2, 3), bool)
    np.testing.assert_array_equal(search(full, np.ones((2, 3)), np.ones((2, 3)), 0.5), full)


def sparse():
    shapes = {name: tuple(p.shape) for name, p in network().named_parameters()}
    masks = first_masks(shapes, 0.5, np.random.default_rng(0))
    masked = {n: weights()[n] * mask.astype(np.float32) for n, mask in masks.items()}
    return SparseWeights(weights() | masked, masks, 7)


def parsed_sparse(changes):
    own = sparse()
    return SparseWeights.from_arrays(own.to_arrays() | changes, own.weights, 100, list(own.masks))


# ------------------------------------------------------------------ NTK-DFL


def ntk_client(tmp_path, count=9, **options):
    return NTKDFLClient(network(), X[:count], Y[:count], loss="mse", cache=tmp_path, **options)


def ntk_message(step, *, options=(), config=(), **records):
    task = {"learning_rate": 0.1, "steps": (1.0, 4.0), "loss": "mse", **dict(options)}
    config = {
        "server-round": 1, "step": step, "batch": 0, "neighbours": [2, 5], "personal-run": "r",
        "personal-round": 0, **NTKDFLTask(**task).to_config(), **dict(config),
    }  # fmt: skip
    return named(arrays=weights(), **records), config


def test_batches_are_never_empty_and_inputs_travel_only_if_t_is_chosen_by_them(tmp_path):
    client, task = ntk_client(tmp_path, 1), {"selection": "true-loss", "batches": 2}
    for batch in (0, 1):
        asked = ntk_message("jacobians", options=task, config={"batch": batch}, from_2=parcel(2))
        np.testing.assert_array_equal(client.fit(*asked)[0].records["to-2"]["inputs"], X[:1])
    result, *_ = client.fit(*ntk_message("jacobians", from_2=parcel(2)))
    assert "inputs" not in result.records["to-2"]


def test_weights_that_would_not_be_finite_are_not_taken(tmp_path):
    """One neighbour, so nothing to compare with; its outputs are near the largest of float32."""
    first, second = (ntk_client(tmp_path, seed=seed) for seed in (1, 2))
    task = {"learning_rate": 100.0}
    first.fit(*ntk_message("average", options=task))
    asked = ntk_message("jacobians", options=task, from_1=parcel(0, 9))
    rows = second.fit(*asked)[0].records["to-1"]
    huge = {**rows, "outputs": np.full_like(rows["outputs"], 3e38)}
    for heard, t in ((rows, 4.0), (huge, 0.0)):
        result, _, metrics = first.fit(*ntk_message("evolve", options=task, from_2=heard))
        new = result.records["to-neighbours"]
        assert (metrics["t"], metrics["neighbours-heard"]) == (t, 1)
        assert all(np.isfinite(a).all() for a in new.values())
        assert all((new[name] == a).all() for name, a in weights().items()) == (t == 0)


GOOD = EvolvedParcel(WeightsParcel(weights(2), 4), 4.0, 2).to_arrays()


def test_weights_of_a_hub_are_adopted_unless_they_cannot_be_used(tmp_path):
    """Then the client fails in the step, and so keeps the weights that it had."""
    client, member = ntk_client(tmp_path), {"hub": False}
    client.fit(*ntk_message("jacobians", config=member, from_2=parcel(2)))
    result, _, metrics = client.fit(*ntk_message("adopt", config=member, from_2=GOOD))
    assert (metrics["t"], metrics["neighbours-heard"]) == (4.0, 2)
    new = result.records["to-neighbours"]
    assert all((new[name] == array).all() for name, array in weights(2).items())
    bad = ntk_message("adopt", config=member, from_2=parcel(2))
    refused("no weights came from the cluster's hub", client.fit, *bad)


# ------------------------------------------------------------------ parcels


def parsed_evolved(changes):
    return EvolvedParcel.from_arrays(GOOD | changes, weights(), 20)


def test_parcels_come_back_as_they_were():
    own, again = sparse(), parsed_sparse({})
    assert again.num_examples == 7
    np.testing.assert_equal((again.weights, again.masks), (own.weights, own.masks))
    evolved = parsed_evolved({})
    assert (evolved.t, evolved.heard, evolved.new.num_examples) == (4.0, 2, 4)
    np.testing.assert_equal(evolved.new.weights, weights(2))


@pytest.mark.parametrize(
    ("parse", "name", "array", "reason"),
    [
        (parsed_sparse, "0.weight", np.zeros(3, np.float32), "shape"),
        (parsed_sparse, "0.bias", np.full(8, np.nan, np.float32), "non-finite"),
        (parsed_sparse, "sparse-masks", np.full(7, 255, np.uint8), "shape"),
        (parsed_sparse, "sparse-masks", np.zeros(7, np.int8), "dtype"),
        (parsed_sparse, "another", np.zeros(1), "arrays"),
        (parsed_evolved, "0.weight", GOOD["0.weight"][:-1], "shape"),
        (parsed_evolved, "0.bias", np.full(8, np.nan, np.float32), "non-finite"),
        (parsed_evolved, "1.running_var", -GOOD["1.running_var"], "range"),
        (parsed_evolved, "another", np.zeros(1), "arrays"),
        (parsed_evolved, "num-examples", np.array(0), "range"),
        (parsed_evolved, "num-examples", np.array(21), "range"),
        (parsed_evolved, "metric-t", np.array(-1.0), "range"),
        (parsed_evolved, "metric-neighbours-heard", np.array(-1), "range"),
    ],
)
def test_a_damaged_parcel_is_refused(parse, name, array, reason):
    refused(f"^{reason}:", parse, {name: array}, error=BadReply)
