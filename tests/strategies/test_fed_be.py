"""FedBE: the distributions over models, the distillation, and what it is in the limits."""

from typing import Any

import torch

from fedntk.clients import SGDClient
from fedntk.strategies import Distillation, FedBE

from .federation import Contract, app, network

OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0}
CLIENTS = app(SGDClient, learning_rate=0.1, batch_size=4)


def server_examples(n: int = 30) -> torch.Tensor:
    """Like the clients', of all three classes and without labels."""
    generator = torch.Generator().manual_seed(99)
    classes = torch.arange(n) % 3
    return torch.randn(n, 4, generator=generator) + 2 * torch.nn.functional.one_hot(classes, 4)


def distillation(**options: Any) -> Distillation:
    small = {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "final_learning_rate": 0.01}
    return Distillation(network(), server_examples(), **{**small, "cycle": 3, **options})


CONTRACT = {
    "FedBE": Contract(
        lambda **options: FedBE(num_samples=3, **options), CLIENTS, grows=True
    ),
    "FedBE without the clients' models": Contract(
        lambda **options: FedBE(
            num_samples=2, distribution="dirichlet", client_models=False, **options
        ),
        CLIENTS,
        grows=True,
    ),
    "FedBE with distillation": Contract(
        lambda **options: FedBE(num_samples=3, distill=distillation(), **options), CLIENTS
    ),
}
