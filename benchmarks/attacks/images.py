"""Rebuilt images of Fashion-MNIST, 28 x 28 pixels in [0, 1]: their scores and pictures."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from common import RESULTS
from numpy.typing import NDArray
from skimage.metrics import structural_similarity
from torch import Tensor

MEAN, STD = 0.286, 0.353  # of pixels, as common.py has them
Images = NDArray[np.float32]


def pixels(x: Tensor) -> Images:
    """Undo the standardisation; what is beyond black and white is cut off."""
    return (x.float() * STD + MEAN).clamp(0, 1).numpy()


def ssim(image: Images, original: Images) -> float:
    a, b = (np.float64(i).reshape(28, 28) for i in (image, original))
    return float(structural_similarity(a, b, data_range=1.0))


def scores(images: Images, originals: Images) -> dict[str, float]:
    """Return the mean, least and largest SSIM of images (n, 784), and their mean squared error."""
    each = [ssim(a, b) for a, b in zip(images, originals, strict=True)]
    error = float(((images - originals) ** 2).mean())
    return {
        "ssim": float(np.mean(each)), "ssim-min": min(each), "ssim-max": max(each), "mse": error,
    }  # fmt: skip


def draw(_: Any, lines: Mapping[str, Images], stem: str) -> None:
    """Draw the first images of each source, a named line for each, with their SSIM to the first."""
    figure, axes = plt.subplots(len(lines), 10, figsize=(6, 0.75 * len(lines)))
    originals = next(iter(lines.values()))
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for axis, image, original in zip(line, images, originals, strict=False):
            axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            score = "" if images is originals else f"{ssim(image, original):.2f}"
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(score, fontsize=7, labelpad=1)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)
    figure.savefig(RESULTS / f"{stem}.png", dpi=90, bbox_inches="tight")
