"""Low frequencies of images against SciPy's transform, and their rotation."""

import numpy as np
import pytest
import torch
from scipy.fft import dctn

from fedntk.ntk.features.projection import low_frequencies, rotated_low_frequencies

from ...conftest import refused

IMAGES = torch.randn(5, 2, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


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
