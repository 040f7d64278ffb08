"""The masks of DisPFL, and what its parcels may hold."""

import numpy as np
import pytest

from fedntk.clients.gossip.dispfl import SparseWeights, first_masks, layer_densities, search
from fedntk.ntk import BadReply

from ..strategies.federation import network

CNN = {"c1": (6, 1, 5, 5), "c2": (16, 6, 5, 5), "f1": (120, 256), "f2": (10, 120), "b": (10,)}


@pytest.mark.parametrize("density", [0.5, 0.1])
def test_densities_are_those_of_erdos_renyi_kernels(density):
    """Layers below 1 share one factor, and those at 1 would exceed. Products of float64: 1e-12."""
    found = layer_densities(CNN, density)
    sizes = {name: int(np.prod(shape)) for name, shape in CNN.items()}
    total = sum(found[name] * sizes[name] for name in CNN)
    assert total == pytest.approx(density * sum(sizes.values()), rel=1e-12)
    ratio = {name: sum(shape) / sizes[name] for name, shape in CNN.items() if len(shape) > 1}
    scales = [found[name] / ratio[name] for name in ratio if found[name] < 1]
    assert max(scales) == pytest.approx(min(scales), rel=1e-12)
    assert all(ratio[n] * scales[0] > 1 for n in ratio if found[n] == 1)
    assert found["b"] == 1
    assert all(0 < share <= 1 for share in found.values())


def test_a_density_below_that_of_the_vectors_is_refused_and_1_is_whole():
    assert set(layer_densities(CNN, 1.0).values()) == {1.0}
    with pytest.raises(ValueError, match="sparsity: the network's vectors, which stay whole"):
        layer_densities({"w": (3, 3), "b": (10,)}, 0.5)


def test_the_smallest_weights_go_and_the_largest_gradients_come():
    """Half of four weights, by hand; one that went comes back, as its gradient is the largest."""
    mask = np.array([[True, True, True, True, False, False, False]])
    weights = np.array([[3.0, -0.1, 0.2, -4.0, 0.0, 0.0, 0.0]])
    gradient = np.array([[9.0, 8.0, 0.1, 9.0, 0.5, -0.7, 0.6]])
    new = search(mask, weights, gradient, 0.5)
    np.testing.assert_array_equal(new, [[True, True, False, True, False, True, False]])
    np.testing.assert_array_equal(search(mask, weights, gradient, 0.0), mask)
    full = np.ones((2, 3), bool)
    np.testing.assert_array_equal(search(full, np.ones((2, 3)), np.ones((2, 3)), 0.5), full)


def sparse():
    weights = {name: tensor.numpy().copy() for name, tensor in network().state_dict().items()}
    shapes = {name: tuple(p.shape) for name, p in network().named_parameters()}
    masks = first_masks(shapes, 0.5, np.random.default_rng(0))
    weights |= {n: weights[n] * mask.astype(np.float32) for n, mask in masks.items()}
    return SparseWeights(weights, masks, 7)


def parsed(own, **changed):
    arrays = {**own.to_arrays(), **changed}
    return SparseWeights.from_arrays(arrays, own.weights, 100, list(own.masks))


def test_a_parcel_comes_back_as_it_was():
    own, again = sparse(), parsed(sparse())
    assert again.num_examples == 7
    np.testing.assert_equal((again.weights, again.masks), (own.weights, own.masks))


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("0.weight", np.zeros(3, np.float32), "shape"),
        ("0.bias", np.full(8, np.nan, np.float32), "non-finite"),
        ("sparse-masks", np.full(7, 255, np.uint8), "shape"),
        ("sparse-masks", np.zeros(7, np.int8), "dtype"),
        ("another", np.zeros(1), "arrays"),
    ],
)
def test_a_damaged_parcel_is_refused(name, array, reason):
    with pytest.raises(BadReply, match=f"^{reason}:"):
        parsed(sparse(), **{name: array})
