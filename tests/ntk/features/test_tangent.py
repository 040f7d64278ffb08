"""Tangent features against autograd, and random projections against the matrix they never store."""

import pytest
import torch
from torch import nn

from fedntk.ntk import NotEnoughMemory, entk_features, random_projection
from fedntk.ntk.support import memory as ntk_memory

from ...conftest import refused
from ..cases import CASES, make


def gradients(model, x, output=0):
    """One backward pass for each example: (n, P), in the order of the parameters."""
    parameters = [p for p in model.eval().parameters() if p.requires_grad]
    rows = [
        torch.autograd.grad(
            model(example[None]).flatten()[output],
            parameters,
            allow_unused=True,
            materialize_grads=True,
        )
        for example in x
    ]
    return torch.stack([torch.cat([g.flatten() for g in grads]) for grads in rows])


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


def test_the_seed_alone_decides_which_coordinates():
    model, x = make("narrow-maps")
    first, again, other = (entk_features(model, x, 20, seed) for seed in (3, 3, 4))
    apart = [entk_features(model, part, 20, 3) for part in x.split(2)]
    assert torch.equal(first, again)
    torch.testing.assert_close(torch.cat(apart), first, rtol=1e-6, atol=1e-7)
    assert not torch.equal(first, other)


def test_float16_is_the_rounded_float32_and_overflow_is_refused():
    model, x = make("mlp")
    full = entk_features(model, x, 40, 0)
    half = entk_features(model, x, 40, 0, dtype=torch.float16)
    assert half.dtype == torch.float16
    assert torch.equal(half, full.half())
    refused("store them in float32", entk_features, model, 1e6 * x, 40, 0, dtype=torch.float16)


@pytest.mark.parametrize("name", ["narrow-maps", "tokens-first", "mlp", "lstm"])
def test_projected_features_are_the_gradient_times_one_fixed_matrix(name):
    """Linear in the gradient, the same in any chunks, and of the right size on average.

    With entries of variance 1/p the squared norm of a projected row has mean |g|^2 and a relative
    standard deviation of sqrt(2/p): 3.2 % for p = 2,000, so that 6 rows stay within 5 of them.
    """
    model, x = make(name)
    rows = gradients(model, x)
    p = 2000
    options = {"method": "projection", "dtype": torch.float64}
    projected = entk_features(model, x, p, 5, **options)
    parts = [entk_features(model, part, p, 5, chunk_size=1, **options) for part in x.split(4)]
    torch.testing.assert_close(torch.cat(parts), projected, rtol=1e-9, atol=1e-10)
    sizes = projected.square().sum(1) / rows.square().sum(1)
    assert ((sizes - 1).abs() < 5 * (2 / p) ** 0.5).all()
    dependence = torch.linalg.lstsq(rows.T, (rows[:1] + 2 * rows[-1:]).T).solution
    torch.testing.assert_close(projected.T @ dependence, (projected[:1] + 2 * projected[-1:]).T)


def test_projection_of_the_identity_is_a_gaussian_matrix():
    """9,000 x 50 entries: mean within 5/sqrt(450,000) and variance within 5 sqrt(2/450,000).

    9,000 rows take three generators; their rows must not repeat.
    """
    matrix = random_projection(torch.eye(9000), 50, seed=1) * 50**0.5
    count = matrix.numel()
    assert abs(float(matrix.mean())) < 5 / count**0.5
    assert abs(float(matrix.var()) - 1) < 5 * (2 / count) ** 0.5
    assert len(torch.unique(matrix, dim=0)) == 9000


def test_projection_is_its_matrix_whatever_the_block(monkeypatch):
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = random_projection(torch.eye(5000, dtype=torch.float64), 64, seed=2)
    whole = random_projection(x, 64, seed=2)
    torch.testing.assert_close(whole, x @ matrix, rtol=1e-10, atol=1e-10)
    monkeypatch.setattr("fedntk.ntk.features.projection.BLOCK_BYTES", 4 * 64 * 16)
    torch.testing.assert_close(random_projection(x, 64, seed=2), whole, rtol=1e-10, atol=1e-10)


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
