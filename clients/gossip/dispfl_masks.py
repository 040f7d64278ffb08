"""The masks of DisPFL: how dense each layer is, the first draw, and what is pruned and regrown.

Sources: Dai et al., *DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training*, ICML 2022, and its authors' program; Evci et al., *Rigging the
Lottery: Making All Tickets Winners*, ICML 2020, section 3 (the densities, and regrowth by
gradients).
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Masks = dict[str, NDArray[np.bool_]]


def layer_densities(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """Return the density of each array by the rule of Erdos-Renyi kernels.

    Arrays of fewer than two axes, such as biases, are whole, and count. Any other array, of shape
    (a, b, ...), has a density in proportion to (a + b + ...) / (a b ...), at most 1, such that all
    together have the wanted `density`.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ratios = {name: sum(shape) / sizes[name] for name, shape in shapes.items() if len(shape) > 1}
    whole = shapes.keys() - ratios.keys()
    left = density * sum(sizes.values()) - sum(sizes[name] for name in whole)
    if ratios and left <= 0:
        raise ValueError(
            f"sparsity: the network's vectors, which stay whole, have more than {density:.3g} of "
            "its numbers; choose a lower one"
        )
    scale = 0.0
    while ratios:
        scale = left / sum(ratios[name] * sizes[name] for name in ratios)
        largest = max(ratios.values())
        if largest * scale <= 1:
            break
        for name in [name for name, ratio in ratios.items() if ratio == largest]:
            left -= sizes[name]
            del ratios[name]
    return {name: ratios[name] * scale if name in ratios else 1.0 for name in shapes}


def first_masks(
    shapes: Mapping[str, tuple[int, ...]], density: float, generator: np.random.Generator
) -> Masks:
    """Draw masks of the densities of :func:`layer_densities`, for arrays of two axes or more."""
    masks: Masks = {}
    for name, share in layer_densities(shapes, density).items():
        if len(shapes[name]) > 1:
            mask = np.zeros(math.prod(shapes[name]), bool)
            mask[generator.permutation(len(mask))[: max(1, round(share * len(mask)))]] = True
            masks[name] = mask.reshape(shapes[name])
    return masks


def search(
    mask: NDArray[np.bool_],
    weights: NDArray[np.floating],
    gradient: NDArray[np.floating],
    share: float,
) -> NDArray[np.bool_]:
    """Prune the smallest weights of a mask, and regrow as many by the largest gradients.

    ceil(share k) of the k weights in the mask go. As many come among all that are outside then,
    also those just pruned. All arrays have one shape; a `share` of 0 changes nothing.
    """
    count = math.ceil(share * int(mask.sum()))
    new = mask.ravel().copy()
    sizes = np.where(new, np.abs(weights).ravel(), np.inf)
    new[np.argsort(sizes, kind="stable")[:count]] = False
    slopes = np.where(new, -np.inf, np.abs(gradient).ravel())
    new[np.argsort(-slopes, kind="stable")[:count]] = True
    return new.reshape(mask.shape)
