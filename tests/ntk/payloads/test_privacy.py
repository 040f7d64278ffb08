"""The mechanism's norm, noise and labels, against what the theorem is told of them."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fedntk.ntk import JacobianUpload, RowNoise, jacobian, one_hot
from fedntk.ntk.payloads.privacy import label_epsilon

CLIP = 2.0


def upload(n=300, scale=1.0, structure="factored"):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        x = scale * torch.randn(n, 6)
    rows = jacobian(model, x).expanded()
    rows = rows.to_dense() if structure == "dense" else rows
    return JacobianUpload(rows, model(x).detach(), one_hot(torch.arange(n) % 3, 3))


def row_of(payload):
    """All numbers that are sent for each example, but for its label: (n, k), float64."""
    arrays = [payload.outputs, *(a for b in payload.jacobian.blocks for a in b.arrays)]
    return torch.cat([array.double().flatten(1) for array in arrays], 1)


def noisy(payload, seed=0, **options):
    defaults = {"clip": CLIP, "noise_multiplier": 1e-12, "label_noise": 0.0}
    generator = None if seed is None else np.random.default_rng(seed)
    return RowNoise(**(defaults | options)).add(payload, generator)


@pytest.mark.parametrize("structure", ["factored", "dense"])
def test_rows_are_scaled_down_to_the_norm_and_no_further(structure):
    """Each by itself: replacing an example moves its own row, by at most twice the norm."""
    for scale in (1e-3, 1.0, 100.0):
        sent = upload(scale=scale, structure=structure)
        before, after = row_of(sent), row_of(noisy(sent))
        norms = before.norm(dim=1, keepdim=True)
        expected = before * (CLIP / norms).clamp(max=1)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
        assert after.norm(dim=1).max() <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize("seed", [0, None])
def test_noise_has_the_stated_deviation_and_no_correlation(seed):
    """300 rows of some 50 numbers: standard error of the deviation 0.6 %, of the mean 0.8 %."""
    quiet, loud = noisy(upload()), noisy(upload(), seed, noise_multiplier=1.5)
    noise = (row_of(loud) - row_of(quiet)) / (1.5 * CLIP)
    assert float(noise.std()) == pytest.approx(1, abs=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.03)
    covariance = noise.T @ noise / len(noise)
    off_diagonal = covariance - torch.diag(covariance.diag())
    assert float(off_diagonal.abs().max()) < 6 / math.sqrt(len(noise))
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-6


def test_labels_are_drawn_anew_with_the_stated_probability():
    """Of 3,000 labels p (C - 1) / C change: 5 standard deviations allowed."""
    clear = upload(n=3000)
    for p in (0.0, 0.3, 1.0):
        labels = noisy(clear, noise_multiplier=1.0, label_noise=p).targets.argmax(1)
        changed = float((labels != clear.targets.argmax(1)).double().mean())
        expected = p * 2 / 3
        assert abs(changed - expected) <= 5 * math.sqrt(expected * (1 - expected) / 3000)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_row_that_is_not_finite_becomes_noise_like_any_other(value):
    """Weights that the server chose may make it so; what is sent must not tell."""
    sent = upload(n=6)
    sent.outputs[2, 1] = value
    sent.jacobian.blocks[0].inputs[4, 0, 3] = value
    rows = row_of(noisy(sent, noise_multiplier=1.0))
    assert torch.isfinite(rows).all()
    assert rows.norm(dim=1).max() < CLIP * (1 + 3 * math.sqrt(rows.shape[1]))
    others = row_of(noisy(upload(n=6), noise_multiplier=1.0))
    assert torch.equal(rows[[0, 1, 3, 5]], others[[0, 1, 3, 5]])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("outputs", [2, 10])
def test_epsilon_of_a_label_is_the_largest_ratio_of_likelihoods(p, outputs):
    same, other = 1 - p + p / outputs, p / outputs
    assert label_epsilon(p, outputs) == pytest.approx(math.log(same / other))
    assert label_epsilon(0.0, outputs) == math.inf


def test_tokens_are_refused():
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))
    x = torch.arange(30).reshape(10, 3)
    sent = JacobianUpload(jacobian(model, x), model(x).detach(), one_hot(torch.arange(10) % 3, 3))
    with pytest.raises(ValueError, match="tokens take none"):
        noisy(sent, noise_multiplier=1.0)
