"""A small transformer, trained on MNIST, with adapters on scikit-learn's digits."""

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from fedntk.simulations import Config, run
from fedntk.simulations.data.load import load_data

EPOCHS, BATCH, WIDTH, PATCH = 5, 100, 32, 2


class Transformer(nn.Module):
    """Two encoder layers on the 16 patches of a picture of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (n, 10)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        scores: Tensor = self.head(self.encoder(tokens + self.places).mean(1))
        return scores


@functools.cache
def pretrained(data_dir: str) -> nn.Module:
    """Train on the first 10,000 images of MNIST, made as small as the digits; always the same."""
    data = load_data(Config(dataset="mnist", data_dir=data_dir))
    x = avg_pool2d(torch.from_numpy(data.x_train[:10_000, :, 2:-2, 2:-2]).float(), 3)
    x, y = (x - x.mean()) / x.std(), torch.from_numpy(data.y_train[:10_000])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Transformer()
        optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
        for rows in torch.cat([torch.randperm(len(y)) for _ in range(EPOCHS)]).split(BATCH):
            optimiser.zero_grad()
            cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return network


def figures(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield the mean of the last five accuracies, and the bytes of all rounds."""
    network = pretrained(settings["data-dir"])
    with tempfile.TemporaryDirectory() as folder:
        done = run(settings, model=network, seed=seed, out=folder, progress=False)
    yield "accuracy", None, 100 * done.curve("accuracy").iloc[-5:].mean()
    yield "up", None, 1e-6 * done.summary["bytes-up"]
    yield "down", None, 1e-6 * done.summary["bytes-down"]
