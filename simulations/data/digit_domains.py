"""Digits in five domains, made of MNIST and scikit-learn's digits: feature skew without a download.

Accuracies are not comparable with those on :mod:`fedntk.simulations.data.digits_five`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .parts import Domain, Part, join_domains, select_balanced

Pixels = NDArray[np.uint8]
SIDE = 28


def invert(x: Pixels) -> Pixels:
    """Turn white on black into black on white: 255 - x."""
    return 255 - x


def rotate(x: Pixels) -> Pixels:
    """Turn by 90 degrees, counter-clockwise: 180 degrees would turn a 6 into a 9."""
    return np.ascontiguousarray(np.rot90(x, axes=(-2, -1)))


def blur(x: Pixels) -> Pixels:
    """Blur by binomial weights of 17 pixels in each direction: a deviation of 2 pixels.

    In whole numbers, so that it is the same everywhere; black beyond the border.
    """
    from scipy.ndimage import convolve1d

    weights = [math.comb(16, k) for k in range(17)]  # sum 2^16, variance 16 / 4
    smooth: NDArray[np.int64] = x.astype(np.int64)
    for axis in (-2, -1):
        smooth = convolve1d(smooth, weights, axis, mode="constant")
    result: Pixels = ((smooth + 2**31) >> 32).astype(np.uint8)
    return result


def enlarge(x: NDArray[Any]) -> Pixels:
    """Enlarge pictures (n, 1, 8, 8) of 0 ... 16 to (n, 1, 28, 28) of 0 ... 255, bilinear."""
    from PIL import Image

    grey = np.rint(x[:, 0] * (255 / 16)).astype(np.uint8)
    how = Image.Resampling.BILINEAR
    large = [np.asarray(Image.fromarray(picture).resize((SIDE, SIDE), how)) for picture in grey]
    return np.stack(large)[:, None]


# no two domains have the same picture of MNIST
_OF_MNIST: dict[str, Callable[[Pixels], Pixels]] = {
    "mnist": lambda x: x,
    "inverted": invert,
    "rotated": rotate,
    "blurred": blur,
}
DOMAINS = (*_OF_MNIST, "enlarged")


def digit_domains(
    mnist: Domain, digits: Domain, num_examples: int = 0, num_test_examples: int = 0
) -> Domain:
    """Make the five domains, in the order of ``DOMAINS``, all of one size and balanced.

    `mnist` is white on black, uint8 of shape (n, 1, 28, 28); `digits` are scikit-learn's,
    (n, 1, 8, 8) of 0 ... 16. Numbers of examples are of each domain; 0: ten times the smallest
    class of scikit-learn's digits.
    """
    counts = dict(zip(("train", "test"), (num_examples, num_test_examples), strict=True))

    def make(source: Domain, name: str, change: Callable[[Any], Pixels], block: int) -> Domain:
        parts = []
        for source_part, smallest, (part, count) in zip(
            source, digits, counts.items(), strict=True
        ):
            number = count or 10 * int(np.bincount(smallest.y, minlength=10).min())
            chosen = select_balanced(source_part.y, number, part, name, block)
            parts.append(Part(change(source_part.x[chosen]), source_part.y[chosen]))
        return Domain(*parts)

    return join_domains(
        [
            *(make(mnist, "MNIST", change, i) for i, change in enumerate(_OF_MNIST.values())),
            make(digits, "scikit-learn's set of digits", enlarge, 0),
        ]
    )
