"""Tangent features, random projections and sketches against gradients of autograd."""

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from torch import nn

from fedntk.ntk import FeatureMap, NotEnoughMemory, entk_features, jacobian, random_projection
from fedntk.ntk.features import tangent
from fedntk.ntk.features.projection import low_frequencies, rotated_low_frequencies
from fedntk.ntk.support import memory as ntk_memory

from ...conftest import refused
from ..arithmetic import normal
from ..cases import CASES, make


def gradients(model, x, output=0):
    """One backward pass for each example: (n, P), in the order of the parameters."""
    parameters = [p for p in model.eval().parameters() if p.requires_grad]
    options = {"allow_unused": True, "materialize_grads": True}
    logits = (model(example[None]).flatten()[output] for example in x)
    rows = [torch.autograd.grad(logit, parameters, **options) for logit in logits]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize("name", sorted(CASES))
def test_features_are_coordinates_of_the_gradient_of_one_logit(name):
    """All P of them, in float64; then a few, which must be columns of the same matrix."""
    model, x = make(name)
    output = 0 if name in ("single-output", "no-outputs-axis") else 1
    expected = gradients(model, x, output)
    total = expected.shape[1]
    options = {"output": output, "dtype": torch.float64}
    every = entk_features(model, x, total, 0, chunk_size=4, **options)
    torch.testing.assert_close(every, expected, rtol=1e-10, atol=1e-12)
    some = entk_features(model, x, total // 2, 7, **options)
    nearest = [(every - column[:, None]).abs().sum(0).min() for column in some.T]
    assert max(nearest) < 1e-10


def test_float16_is_the_rounded_float32_and_overflow_is_refused():
    model, x = make("mlp")
    full = entk_features(model, x, 40, 0)
    half = entk_features(model, x, 40, 0, dtype=torch.float16)
    assert half.dtype == torch.float16
    assert torch.equal(half, full.half())
    refused("store them in float32", entk_features, model, 1e6 * x, 40, 0, dtype=torch.float16)


@pytest.mark.parametrize(
    ("method", "name"),
    [("sketch", name) for name in sorted(CASES)]
    + [("projection", name) for name in ("narrow-maps", "tokens-first", "mlp", "lstm")],
)
def test_projections_and_sketches_are_linear_in_the_gradient_and_the_same_in_any_chunks(
    method, name
):
    """An estimated inner product varies by 2/p of |x|^2 |x'|^2, by 8/p of an outer product's.

    There, with signs independent, the second moments 3 of both factors multiply: 9 - 1.
    """
    model, x = make(name)
    rows, p = gradients(model, x).detach(), 4000
    options = {"method": method, "dtype": torch.float64}
    actual = entk_features(model, x, p, 5, **options)
    assert actual.shape == (len(x), p)
    parts = [entk_features(model, part, p, 5, chunk_size=1, **options) for part in x.split(3)]
    torch.testing.assert_close(torch.cat(parts), actual, rtol=1e-9, atol=1e-10)
    norms = rows.norm(dim=1)
    error = (actual @ actual.T - rows @ rows.T) / (norms[:, None] * norms + 1e-30)
    assert float(error.abs().max()) < 6 * ((8 if method == "sketch" else 2) / p) ** 0.5
    # what depends linearly on the others among gradients does among their images
    combination = (rows[:1] - 2 * rows[-1:]).T
    mixed = torch.linalg.lstsq(rows.T, combination, rcond=1e-10, driver="gelsd").solution
    expected, atol = (actual[:1] - 2 * actual[-1:]).T, 1e-6 * float(norms.max())
    torch.testing.assert_close(actual.T @ mixed, expected, rtol=1e-6, atol=atol)


def test_projection_of_the_identity_is_a_gaussian_matrix_whatever_the_block(monkeypatch):
    """9,000 x 50 entries: mean within 5/sqrt(450,000) and variance within 5 sqrt(2/450,000).

    9,000 rows take three generators; their rows must not repeat.
    """
    entries = random_projection(torch.eye(9000), 50, seed=1)
    matrix = entries * 50**0.5
    count = matrix.numel()
    assert abs(float(matrix.mean())) < 5 / count**0.5
    assert abs(float(matrix.var()) - 1) < 5 * (2 / count) ** 0.5
    assert len(torch.unique(matrix, dim=0)) == 9000
    x = normal(3, 9000, seed=0)
    monkeypatch.setattr("fedntk.ntk.features.projection.BLOCK_BYTES", 4 * 50 * 16)
    actual = random_projection(x, 50, seed=1)
    torch.testing.assert_close(actual, x @ entries.double(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_features": 19}, "num_features: expected 1 ... 18"),
        ({"output": 3}, "outputs: expected some of 0 ... 2"),
        ({"method": "hash"}, "method: expected"),
        ({"dtype": torch.int8}, "dtype: expected"),
        ({"chunk_size": 0}, "chunk_size: expected"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    arguments = {"model": nn.Linear(5, 3), "x": torch.zeros(2, 5), "num_features": 4, "seed": 0}
    refused(message, entk_features, **arguments | change)


def test_what_does_not_fit_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr(ntk_memory, "available_memory", lambda device: 100)
    with pytest.raises(NotEnoughMemory, match="18 features of 2 examples needs"):
        entk_features(nn.Linear(5, 3), torch.zeros(2, 5), 18, 0)
    refused("random_projection: expected", random_projection, torch.zeros(3), 2, 0)


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


def test_the_whole_gradient_is_never_formed_of_a_linear_layer(monkeypatch):
    """A gradient of 10^6 numbers an example: neither dense blocks nor count sketches of them."""
    sizes = []
    original = tangent.CountSketch.__init__

    def counted(self, size, *rest):
        sizes.append(size)
        original(self, size, *rest)

    monkeypatch.setattr(tangent.CountSketch, "__init__", counted)
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


IMAGES = normal(5, 2, 6, 9, seed=0)


def test_they_are_the_coefficients_of_the_cosine_transform_from_the_lowest_on():
    whole = dctn(IMAGES.numpy(), axes=(2, 3), norm="ortho")
    actual = low_frequencies(IMAGES, 5).numpy()
    # (u / 6)^2 + (v / 9)^2: (0, 0), then (0, 1), then (1, 0); channels follow one another
    places = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0)]
    expected = np.stack([whole[:, c, u, v] for c, u, v in places], axis=1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", [10, IMAGES[0].numel()])
def test_the_rotation_hides_which_feature_is_which_and_no_more(count):
    """With all coefficients inner products are those of the images."""
    plain, rows = low_frequencies(IMAGES, count), IMAGES.flatten(1)
    one, again, other = (rotated_low_frequencies(IMAGES, count, seed) for seed in (1, 1, 2**100))
    assert torch.equal(one, again)
    exact = plain @ plain.T if count == 10 else rows @ rows.T
    for features in (plain, one, other):
        torch.testing.assert_close(features @ features.T, exact, rtol=0, atol=1e-11)
    for turned in (one - plain, other - plain, one - other):
        assert float(turned.norm() / plain.norm()) > 0.5


def test_rotations_are_uniform():
    """Over many seeds an entry of an orthogonal k x k matrix has mean 0 and variance 1/k.

    Without fixing the signs the diagonal of QR's factor is of one sign. 400 draws: the mean is
    within 5 standard errors, 5 / (20 sqrt(k)).
    """
    eye = torch.eye(4, dtype=torch.float64).reshape(4, 2, 2)
    drawn = torch.stack([rotated_low_frequencies(eye, 4, seed) for seed in range(400)])
    plain = low_frequencies(eye, 4)
    rotations = plain.T @ drawn  # plain is orthogonal
    assert float(rotations.mean(0).abs().max()) < 5 / (20 * 2)
    torch.testing.assert_close(
        (rotations**2).mean(0), torch.full((4, 4), 0.25).double(), rtol=0.35, atol=0
    )


@pytest.mark.parametrize(
    ("images", "count", "message"),
    [
        (torch.zeros(3, 16), 4, r"expected images of shape .* got \(3, 16\)"),
        (torch.zeros(3, 4, 4), 17, "expected 1 ... 16 features, the numbers in an image, got 17"),
        (torch.zeros(3, 2, 4, 4), 0, "expected 1 ... 32 features"),
    ],
)
def test_what_is_no_image_or_too_small_is_refused(images, count, message):
    refused(message, low_frequencies, images, count)
