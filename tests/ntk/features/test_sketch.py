"""Sketches of gradients against the gradients that they never form."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.ntk import FeatureMap, entk_features, jacobian
from fedntk.ntk.features import sketch

from ...conftest import refused
from ..cases import CASES, make
from .test_tangent import gradients


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_sketch_is_linear_in_the_gradient_and_the_same_in_any_chunks(name):
    """The variance of an inner product's estimate is at most 8/p of |x|^2 |x'|^2.

    A count sketch has 2/p at most. Of an outer product the second moments of both factors multiply:
    with signs independent, 3 x 3 for each coincidence of buckets instead of the product itself,
    which leaves 9 - 1.
    """
    model, x = make(name)
    rows, p = gradients(model, x).detach(), 4000
    options = {"method": "sketch", "dtype": torch.float64}
    actual = entk_features(model, x, p, 5, **options)
    assert actual.shape == (len(x), p)
    parts = [entk_features(model, part, p, 5, chunk_size=1, **options) for part in x.split(3)]
    torch.testing.assert_close(torch.cat(parts), actual, rtol=1e-9, atol=1e-10)
    norms = rows.norm(dim=1)
    error = (actual @ actual.T - rows @ rows.T) / (norms[:, None] * norms + 1e-30)
    assert float(error.abs().max()) < 6 * (8 / p) ** 0.5
    # what depends linearly on the others among gradients does among sketches
    combination = (rows[:1] - 2 * rows[-1:]).T
    mixed = torch.linalg.lstsq(rows.T, combination, rcond=1e-10, driver="gelsd").solution
    torch.testing.assert_close(
        actual.T @ mixed,
        (actual[:1] - 2 * actual[-1:]).T,
        rtol=1e-6,
        atol=1e-6 * float(norms.max()),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_outer_products_sketch_is_the_count_sketch_of_summed_buckets(kind, bias):
    """Entry (i, j) of sum_s g_s a_s^T has bucket h(i) + h'(j) modulo p and sign s(i) s'(j)."""
    p, shape = 17, (30,) if kind == "linear" else (3, 4, 4)
    layer = nn.Linear(30, 20, bias=bias) if kind == "linear" else nn.Conv2d(3, 8, 3, bias=bias)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(1)).double()
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).double()
    model(x)
    model[3].requires_grad_(False)
    actual = entk_features(model, x, p, 3, method="sketch", dtype=torch.float64)

    whole = jacobian(model, x).dense()
    weight = whole["0.weight"][:, 0]  # (n, d_out, d_in), or (n, d_out, channels, 3, 3)
    matrix = weight if kind == "linear" else weight.movedim(2, -1).flatten(2)
    if bias:
        matrix = torch.cat([matrix, whole["0.bias"][:, 0, :, None]], 2)
    (rows, signs), (columns, column_signs) = (
        (drawn.integers(p, size=size), drawn.integers(2, size=size, dtype=np.int8) * 2 - 1)
        for side, size in enumerate(matrix.shape[1:], start=1)
        for drawn in [np.random.default_rng((3, 0, side))]
    )
    buckets = torch.from_numpy((rows[:, None] + columns) % p).flatten()
    signed = matrix * torch.from_numpy(signs[:, None] * column_signs)
    expected = torch.zeros(4, p).double().index_add_(1, buckets, signed.flatten(1))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_inner_products_are_right_on_average_over_seeds():
    """Their mean over m seeds within 5 of its standard errors, as those m seeds show them."""
    model, x = make("narrow-maps")
    rows = gradients(model, x)
    exact, m = rows @ rows.T, 50
    actual = torch.stack(
        [entk_features(model, x, 50, seed, method="sketch").double() for seed in range(m)]
    )
    products = actual @ actual.transpose(1, 2)
    error = products.mean(0) - exact
    assert bool((error.abs() <= 5 * products.std(0) / m**0.5).all())


def test_the_whole_gradient_is_never_formed_of_a_linear_layer(monkeypatch):
    """A gradient of 10^6 numbers an example: neither dense blocks nor count sketches of them."""
    sizes = []
    original = sketch.CountSketch.__init__

    def counted(self, size, *rest):
        sizes.append(size)
        original(self, size, *rest)

    monkeypatch.setattr(sketch.CountSketch, "__init__", counted)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
    entk_features(model, torch.randn(3, 1000), 64, 0, method="sketch")
    assert max(sizes) == 1001


@pytest.mark.parametrize("kind", ["entk-sketch", "fourier"])
def test_a_feature_map_gives_as_many_numbers_as_are_asked_for(kind):
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for p in (5, 200):  # of 49 coordinates, or of 8 inputs of the last layer
        assert FeatureMap(kind, num_features=p).width(network) == p
        z, again, other = (
            FeatureMap(kind, p, seed).extractor(network)(torch.ones(2, 4)) for seed in (0, 0, 1)
        )
        assert z.shape == (2, p)
        assert torch.equal(z, again)
        assert not torch.equal(z, other)
    refused(f"num_features: expected at least 1 for {kind}", FeatureMap, kind, num_features=0)
