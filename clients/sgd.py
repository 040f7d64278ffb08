"""Client of FedAvg and its relatives: local epochs of SGD.

Source: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, algorithm 1 (ClientUpdate).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import loss_value

from .base import ModelClient
from .randomness import own_randomness, round_seed
from .weights import Scalar, get_weights, set_weights

__all__ = ["SGDClient"]


class SGDClient(ModelClient):
    """Trains the received weights on the local examples and sends them back.

    Parameters
    ----------
    local_epochs : int
        E: passes over the local examples. 0 sends the received weights back.
    batch_size : int
        B: examples per step. Under BatchNorm, which cannot normalise a single example, a last batch
        of one joins the batch before it.
    learning_rate : float
        eta of plain SGD.
    momentum, weight_decay : float
        As in ``torch.optim.SGD``; 0 means none.
    **model_options
        Of :class:`ModelClient`: model, x, y, x_test, y_test, loss, device, batch_size_eval,
        sampling_rate, projection, seed (of the shuffling, too).
    """

    def __init__(
        self,
        *args: Any,
        local_epochs: int = 1,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **model_options: Any,
    ) -> None:
        super().__init__(*args, **model_options)
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Scalar]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Scalar]]:
        """Run E epochs of mini-batch SGD from the received weights.

        Parameters
        ----------
        parameters : list of ndarray
            The global model.
        config : dict
            ``"server-round"`` seeds the shuffling.

        Returns
        -------
        tuple of list of ndarray, int, dict
            New weights, number of examples, ``{"train-loss": ...}`` at the received weights.
        """
        set_weights(self.model, parameters)
        x, targets = self.training_examples(config)
        train_loss = loss_value(self.outputs(x), targets, self.loss)
        if self.local_epochs:
            entropy = np.random.SeedSequence(round_seed(self.seed, config))
            seed = int(entropy.generate_state(1)[0])
            with own_randomness(self.model, x[:2].to(self.device), seed) as generator:
                set_weights(self.model, parameters)  # the probe may have moved statistics
                self._train(x, targets, generator)
        return get_weights(self.model), len(x), {"train-loss": train_loss}

    def _train(self, x: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> None:
        optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        self.model.train()
        for _ in range(self.local_epochs):
            for batch in self._batches(torch.randperm(len(x), generator=generator)):
                optimizer.zero_grad()
                outputs = self.model(x[batch].to(self.device))
                self._batch_loss(outputs, targets[batch].to(self.device)).backward()
                optimizer.step()

    def _batches(self, order: torch.Tensor) -> Sequence[torch.Tensor]:
        batches = list(order.split(self.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1 and self._normalises_batches:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    @property
    def _normalises_batches(self) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules())

    def _batch_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.loss == "mse":
            return torch.nn.functional.mse_loss(outputs, targets) / 2
        return torch.nn.functional.cross_entropy(outputs, targets)
