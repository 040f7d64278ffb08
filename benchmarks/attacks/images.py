"""Rebuilt images of Fashion-MNIST, 28 x 28 pixels in [0, 1]: their SSIM and pictures."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import matplotlib.pyplot as plt
from common import RESULTS
from torch import Tensor

leakage = import_module("fedntk.simulations.tables.ntk-fl.leakage")
MEAN, STD = 0.286, 0.353  # of pixels, as common.py has them


def pixels(x: Tensor) -> Tensor:
    """Undo the standardisation; what is beyond black and white is cut off."""
    return (x.float() * STD + MEAN).clamp(0, 1)


def ssim(images: Tensor, originals: Tensor) -> Tensor:
    """Return the SSIM of each image (n, 784)."""
    return leakage.ssim(*(i.double().view(-1, 1, 28, 28) for i in (images, originals)))


def draw(_: Any, lines: Mapping[str, Tensor], stem: str) -> None:
    """Draw the first images of each source, a named line for each, with their SSIM to the first."""
    figure, axes = plt.subplots(len(lines), 10, figsize=(6, 0.75 * len(lines)))
    originals = next(iter(lines.values()))
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        scores = ssim(images[:10], originals[:10])
        for axis, image, score in zip(line, images, scores, strict=False):
            axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel("" if images is originals else f"{score:.2f}", size=7, labelpad=1)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)
    figure.savefig(RESULTS / f"{stem}.png", dpi=90, bbox_inches="tight")
