"""What the clients of all methods share: a model, local examples, and evaluation.

Examples may be sampled anew each round, and projected by a matrix that the server does not know:
Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Loss, loss_value, one_hot
from fedntk.ntk.losses import check_loss

from .projection import SealedProjection
from .randomness import round_seed
from .weights import Scalar, get_weights, set_weights

__all__ = ["ModelClient", "sample_size"]


def sample_size(num_examples: int, sampling_rate: float) -> int:
    """Examples that a client draws for a round: max(1, round(beta n))."""
    return max(1, round(sampling_rate * num_examples))


class ModelClient(NumPyClient):
    """A client that holds a PyTorch model and labelled examples.

    Parameters
    ----------
    model : nn.Module
        Maps (n, ...) to (n, C). Its weights are overwritten by the server's.
    x, y : Tensor, shapes (n, ...) and (n,)
        Local training examples and integer labels in 0 ... C - 1.
    x_test, y_test : Tensor, optional
        Local examples for evaluation; the training examples where there are none.
    loss : {"mse", "cross-entropy"}
        The loss trained and reported. MSE is against one-hot targets.
    device : torch.device or str
        Where the model runs.
    batch_size_eval : int
        Examples per forward pass when evaluating.
    sampling_rate : float
        beta: share of the training examples, drawn anew each round without replacement, that the
        round uses: see :func:`sample_size`. 1 means all.
    projection : SealedProjection, optional
        Projects each example before the model sees it; the model then takes its features.
    seed : tuple of int
        Seeds what is drawn, together with the round: (run's seed, partition).

    Raises
    ------
    ValueError
        If there are no examples, labels outside the model's outputs, an unknown loss, or a rate or
        projection out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        x_test: Tensor | None = None,
        y_test: Tensor | None = None,
        loss: Loss = "cross-entropy",
        device: torch.device | str = "cpu",
        batch_size_eval: int = 1024,
        sampling_rate: float = 1.0,
        projection: SealedProjection | None = None,
        seed: tuple[int, ...] = (0,),
    ) -> None:
        if len(x) == 0 or len(x) != len(y):
            raise ValueError(
                f"expected at least one example and as many labels, got {len(x)} and {len(y)}"
            )
        if not 0 < sampling_rate <= 1:
            raise ValueError(f"sampling_rate: expected 0 < rate <= 1, got {sampling_rate}")
        self.sampling_rate = sampling_rate
        self.projection = projection
        self.seed = seed
        self.model = model.to(device)
        self.loss = check_loss(loss)
        self.device = torch.device(device)
        self.batch_size_eval = batch_size_eval
        with torch.no_grad():
            model.eval()
            probe = x[:1] if projection is None else projection.probe(x)
            num_outputs = int(model(probe.to(device)).shape[-1])
        self.x, self.targets = x, one_hot(y, num_outputs)
        self.x_test, self.targets_test = self.x, self.targets
        if x_test is not None and y_test is not None and len(x_test):
            self.x_test, self.targets_test = x_test, one_hot(y_test, num_outputs)

    def get_parameters(self, config: dict[str, Scalar]) -> list[NDArray[Any]]:
        """Return the model's current weights."""
        return get_weights(self.model)

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return what the key server needs to seal the projection's seed; else nothing."""
        return {} if self.projection is None else dict(self.projection.keys.request())

    def training_examples(self, config: dict[str, Scalar]) -> tuple[Tensor, Tensor]:
        """Return this round's sample of the training examples, projected, and their targets.

        Parameters
        ----------
        config : dict
            ``"server-round"`` seeds the sample; ``"sealed-seed"`` holds the projection's seed.
        """
        x, targets = self.x, self.targets
        if self.sampling_rate < 1:
            size = sample_size(len(x), self.sampling_rate)
            generator = np.random.default_rng([*round_seed(self.seed, config), *b"sample"])
            chosen = torch.from_numpy(generator.choice(len(x), size=size, replace=False))
            x, targets = x[chosen], targets[chosen]
        return self._projected(x, config), targets

    def _projected(self, x: Tensor, config: dict[str, Scalar]) -> Tensor:
        return x if self.projection is None else self.projection(x, config)

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Loss and accuracy of the given weights on the local test examples.

        Returns
        -------
        tuple of float, int, dict
            Loss, number of examples, ``{"accuracy": ...}``.
        """
        set_weights(self.model, parameters)
        outputs = self.outputs(self._projected(self.x_test, config))
        hits = outputs.argmax(1) == self.targets_test.argmax(1)
        value = loss_value(outputs, self.targets_test, self.loss)
        return value, len(hits), {"accuracy": float(hits.double().mean())}

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """f(x) in evaluation mode, on the CPU: shape (n, C)."""
        self.model.eval()
        chunks = x.split(self.batch_size_eval)
        return torch.cat([self.model(chunk.to(self.device)).cpu() for chunk in chunks])

    def candidate_losses(
        self, candidates: Sequence[Sequence[NDArray[Any]]], x: Tensor, targets: Tensor
    ) -> list[float]:
        """Loss on the given examples of each of several weights.

        A loss that is not a number counts as infinite: such weights are never to be chosen.
        """
        losses = []
        for candidate in candidates:
            set_weights(self.model, candidate)
            losses.append(loss_value(self.outputs(x), targets, self.loss))
        return [value if not np.isnan(value) else float("inf") for value in losses]
