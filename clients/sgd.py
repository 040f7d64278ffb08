"""Client of FedAvg and its relatives: local epochs of SGD, with FedProx's term if wanted.

Sources: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, algorithm 1 (ClientUpdate); Li et al., *Federated Optimization in Heterogeneous
Networks*, MLSys 2020, eq. (2):

    h_k(w; w_t) = F_k(w) + (mu / 2) ||w - w_t||^2
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedntk.ntk import loss_value
from fedntk.ntk.class_prior import log_class_prior
from fedntk.ntk.options import option

from .core.base import WEIGHTS, ModelClient
from .core.randomness import own_randomness, round_seed
from .core.sgd_steps import Adjust, Gradients, SGDSteps, gradients_of, proximal_term
from .core.weights import Scalar, get_weights, set_weights

__all__ = ["SGDClient"]


class SGDClient(ModelClient):
    """Trains the received weights on the local examples and sends them back."""

    strategy = "SeededFedAvg"
    replies = WEIGHTS
    config_keys: ClassVar[frozenset[str]] = frozenset({"lr", "proximal-mu"})

    local_epochs: int = option(
        "E: passes over the local examples; 0 sends the received weights back",
        default=1,
        at_least=0,
    )
    batch_size: int = option(
        "B: examples per step; under BatchNorm, which cannot normalise a single example, a last "
        "batch of one joins the batch before it",
        default=32,
        at_least=1,
    )
    learning_rate: float = option(
        "eta of SGD; config['lr'], from a strategy's train_config, replaces it in its round",
        default=0.01,
        at_least=0,
    )
    momentum: float = option("momentum of SGD; 0: none", default=0.0, at_least=0)
    weight_decay: float = option("weight decay of SGD; 0: none", default=0.0, at_least=0)
    proximal_mu: float = option(
        "mu of FedProx's proximal term; 0: none; config['proximal-mu'], which Flower's FedProx "
        "sends, replaces it",
        default=0.0,
        at_least=0,
    )
    class_prior: bool = option(
        "take the shares of the client's classes out of what is learned from them, for "
        "cross-entropy: their logarithm is added to the outputs in each step's loss (Zhang et al., "
        "ICML 2022, in the form of Menon et al. 2021)",
        default=False,
    )

    def check(self) -> None:
        """Refuse a class prior without cross-entropy."""
        super().check()
        if self.class_prior and self.loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {self.loss}")

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Scalar]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Scalar]]:
        """Run E epochs of mini-batch SGD from the received weights.

        Parameters
        ----------
        parameters : list of ndarray
            The global model.
        config : dict
            ``"server-round"`` seeds the shuffling; ``"proximal-mu"`` and ``"lr"``, where they are
            there, count instead of the client's own.

        Returns
        -------
        tuple of list of ndarray, int, dict
            New weights, number of examples, ``{"train-loss": ...}``: see :meth:`descend`.

        Raises
        ------
        ValueError
            If the message's ``"proximal-mu"`` is no number of at least 0, or ``"lr"`` is no number
            above 0.
        """
        mu = _checked_mu("proximal-mu", config.get("proximal-mu", self.proximal_mu))
        set_weights(self.model, parameters)
        x, targets = self.training_examples(config)
        adjust = proximal_term(self.trainable, mu) if mu else None
        train_loss = self.descend(parameters, x, targets, config, adjust)
        return get_weights(self.model), len(x), {"train-loss": train_loss}

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of those that are trained."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def descend(
        self,
        weights: Sequence[NDArray[Any]],
        x: torch.Tensor,
        targets: torch.Tensor,
        config: Mapping[str, Any],
        adjust: Adjust | None = None,
        *,
        epochs: int | None = None,
    ) -> float:
        """Run E epochs of mini-batch SGD; the model holds the new weights then.

        Parameters
        ----------
        weights : sequence of ndarray
            Where to begin; the model holds them already.
        x, targets : Tensor, shapes (n, ...) and (n, C)
            Examples, in the order before shuffling.
        config : dict
            ``"server-round"`` seeds the shuffling; ``"lr"`` counts instead of the client's own.
        adjust : callable, optional
            Is given each step's gradients, by their parameters' names, and returns those along
            which the step is to go. It changes none in place.
        epochs : int, optional
            E; the client's ``local_epochs`` by default.

        Returns
        -------
        float
            Mean loss of the examples as the steps met them, each counting once in each epoch: in
            training mode, and at weights that move on. Without epochs: in evaluation mode, at the
            weights where they would begin.
        """
        rate = config.get("lr", self.learning_rate)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise ValueError(f"lr: expected a finite number above 0, got {rate!r}")
        epochs = self.local_epochs if epochs is None else epochs
        if not epochs:
            return loss_value(self.outputs(x), targets, self.loss)
        with own_randomness(self.model, x[:2].to(self.device), self._draws(config)) as drawn:
            set_weights(self.model, weights)  # the probe may have moved statistics
            return self._train(x, targets, rate, drawn, adjust, epochs)

    def _draws(self, config: Mapping[str, Any]) -> int:
        entropy = np.random.SeedSequence(round_seed(self.seed, config))
        return int(entropy.generate_state(1)[0])

    def _train(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        learning_rate: float,
        generator: torch.Generator,
        adjust: Adjust | None,
        epochs: int,
    ) -> float:
        trainable, targets = self.trainable, self._compact(targets)
        steps = SGDSteps(
            trainable,
            learning_rate=learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        losses, sizes = list[torch.Tensor](), list[int]()
        self.model.train()
        for _ in range(epochs):
            for batch in self._batches(torch.randperm(len(x), generator=generator)):
                loss, gradients = self.batch_gradients(x, targets, batch, trainable)
                steps.take(gradients if adjust is None else adjust(gradients))
                losses.append(loss.detach())
                sizes.append(len(batch))
        self.model.zero_grad()
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        return float(torch.stack(losses).cpu().double() @ shares)

    def batch_gradients(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        batch: torch.Tensor,
        trainable: Mapping[str, nn.Parameter],
    ) -> tuple[torch.Tensor, Gradients]:
        """Return the loss of a batch, and the gradients that a step is taken along.

        Parameters
        ----------
        x, targets : Tensor
            All examples of the round, and their targets.
        batch : Tensor of int64
            Positions of the batch's.
        trainable : mapping of str to nn.Parameter
            Of the model: what is differentiated.
        """
        loss = self._batch_loss(x, targets, batch)
        return loss, gradients_of(loss, trainable)

    def _batches(self, order: torch.Tensor) -> Sequence[torch.Tensor]:
        batches = list(order.split(self.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1 and self._normalises_batches:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    @property
    def _normalises_batches(self) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules())

    def _compact(self, targets: torch.Tensor) -> torch.Tensor:
        """Return class numbers for one-hot targets, where the loss takes them: that is faster."""
        if self.loss == "mse":
            return targets
        one_hot = (targets.amax(1) == 1) & (targets.count_nonzero(1) == 1)
        return targets.argmax(1) if bool(one_hot.all()) else targets

    @functools.cached_property
    def _class_offset(self) -> torch.Tensor:
        return log_class_prior(self.targets).to(self.device)

    def _batch_loss(
        self, x: torch.Tensor, targets: torch.Tensor, batch: torch.Tensor
    ) -> torch.Tensor:
        """Mean loss of the examples at these positions."""
        outputs = self.model(x.index_select(0, batch).to(self.device))
        if self.class_prior:
            outputs = outputs + self._class_offset
        own = targets.index_select(0, batch).to(self.device)
        if self.loss == "mse":
            return torch.nn.functional.mse_loss(outputs, own) / 2
        return torch.nn.functional.cross_entropy(outputs, own)


def _checked_mu(name: str, mu: Any) -> float:
    if isinstance(mu, bool) or not isinstance(mu, int | float) or not 0 <= mu < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {mu!r}")
    return float(mu)
