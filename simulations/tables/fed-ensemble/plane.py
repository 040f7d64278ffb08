"""Loss on the plane through three models of an ensemble: Shi et al. 2021, figure 3."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedntk.simulations import Run, load_predictor
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

STEPS = np.arange(-4, 15)  # tenths of the way from the first model to another


@functools.lru_cache(maxsize=1)
def losses(run: Run) -> NDArray[np.float64]:
    """Return the log10 of the clients' training loss at w1 + a (w2 - w1) + b (w3 - w1), (b, a)."""
    data = load_data(run.config)
    x, y = data.train(np.concatenate(load_split(run.config, data).clients))
    predictor: Any = load_predictor(run.folder)
    networks = [model.network.eval() for model in predictor.models[:3]]
    first, *others = (parameters_to_vector(n.parameters()).detach() for n in networks)
    surface = np.empty((len(STEPS), len(STEPS)))
    with torch.no_grad():
        for place in np.ndindex(surface.shape):
            b, a = STEPS[list(place)] / 10
            weights = first + a * (others[0] - first) + b * (others[1] - first)
            vector_to_parameters(weights, networks[0].parameters())
            parts = zip(x.split(2000), y.split(2000), strict=True)
            total = sum(float(cross_entropy(networks[0](u), v, reduction="sum")) for u, v in parts)
            surface[place] = np.log10(total / len(y))
    return surface


def surface(run: Run) -> dict[int, float]:
    """Return the grid of losses, row by row."""
    return dict(enumerate(losses(run).flat))


def barrier(run: Run) -> dict[int, float]:
    """Return by how much the worst loss between two models exceeds that of the worse model."""
    grid, between = losses(run), slice(4, 15)  # from 0 to 1
    lines = [grid[4, between], grid[between, 4], np.fliplr(grid[between, between]).diagonal()]
    excess = [line.max() - line[[0, -1]].max() for line in lines]
    return {-1: float(np.mean(excess))}
