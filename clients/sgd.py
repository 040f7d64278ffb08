"""Client of FedAvg and its relatives: local epochs of SGD, with FedProx's term if wanted.

Sources: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, algorithm 1 (ClientUpdate); Li et al., *Federated Optimization in Heterogeneous
Networks*, MLSys 2020, eq. (2):

    h_k(w; w_t) = F_k(w) + (mu / 2) ||w - w_t||^2
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import loss_value
from fedntk.ntk.class_prior import log_class_prior
from fedntk.ntk.options import option

from .core.base import WEIGHTS, ModelClient
from .core.model_probe import training_outputs
from .core.randomness import own_randomness, round_seed
from .core.sgd_steps import Adjust, Gradients, SGDSteps, gradients_of, proximal_term
from .core.weights import Config, Fit, Parameters, get_weights, set_weights


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
        above=0,
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

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Run E epochs of mini-batch SGD from the received weights: see :meth:`descend`.

        Metrics are ``train-loss``, which it returns.
        """
        mu = self._resolve("proximal_mu", config, "proximal-mu")
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
        x: Tensor,
        targets: Tensor,
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
            ``"server-round"`` seeds the shuffling; ``"lr"`` replaces `learning_rate`.
        adjust : callable, optional
            Function from a step's gradients, by their parameters' names, to those that the step
            goes along. It changes none in place.
        epochs : int, optional
            E; `local_epochs` by default.

        Returns
        -------
        float
            Mean loss of the examples as the steps met them, in training mode, each counting once in
            each epoch. Without epochs: in evaluation mode, at the weights received.
        """
        rate = self._resolve("learning_rate", config, "lr")
        epochs = self.local_epochs if epochs is None else epochs
        if not epochs:
            return loss_value(self.outputs(x), targets, self.loss)
        trainable, targets = self.trainable, self._compact(targets)
        losses, sizes = list[Tensor](), list[int]()
        with own_randomness(self.model, x[:2].to(self.device), self._draws(config)) as drawn:
            set_weights(self.model, weights)  # the probe may have moved statistics
            steps = SGDSteps(
                trainable,
                learning_rate=rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
            self.model.train()
            for _ in range(epochs):
                for batch in self._batches(torch.randperm(len(x), generator=drawn)):
                    loss, gradients = self.batch_gradients(x, targets, batch, trainable)
                    steps.take(gradients if adjust is None else adjust(gradients))
                    losses.append(loss.detach())
                    sizes.append(len(batch))
            self.model.zero_grad()
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        return float(torch.stack(losses).cpu().double() @ shares)

    def _resolve(self, name: str, config: Mapping[str, Any], key: str) -> float:
        """Return an option, or what a message has in its place."""
        return float(self.options()[name].check(config.get(key, getattr(self, name)), key))

    def _draws(self, config: Mapping[str, Any]) -> int:
        entropy = np.random.SeedSequence(round_seed(self.seed, config))
        return int(entropy.generate_state(1)[0])

    def batch_gradients(
        self, x: Tensor, targets: Tensor, batch: Tensor, trainable: Mapping[str, nn.Parameter]
    ) -> tuple[Tensor, Gradients]:
        """Return a batch's loss, and the gradients that a step goes along.

        `batch` are positions (int64) among the round's examples `x` and `targets`.
        """
        loss = self._batch_loss(x, targets, batch)
        return loss, gradients_of(loss, trainable)

    def _batches(self, order: Tensor) -> Sequence[Tensor]:
        batches = list(order.split(self.batch_size))
        norm = nn.modules.batchnorm._BatchNorm
        normalises = any(isinstance(module, norm) for module in self.model.modules())
        if normalises and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def _compact(self, targets: Tensor) -> Tensor:
        """Return class numbers for one-hot targets if the loss takes them: that is faster."""
        if self.loss == "mse":
            return targets
        one_hot = (targets.amax(1) == 1) & (targets.count_nonzero(1) == 1)
        return targets.argmax(1) if bool(one_hot.all()) else targets

    @functools.cached_property
    def _class_offset(self) -> Tensor:
        return log_class_prior(self.targets).to(self.device)

    def _batch_loss(self, x: Tensor, targets: Tensor, batch: Tensor) -> Tensor:
        own_x = x.index_select(0, batch).to(self.device)
        outputs = training_outputs(self.model, own_x, self._num_outputs)
        if self.class_prior:
            outputs = outputs + self._class_offset
        own = targets.index_select(0, batch).to(self.device)
        if self.loss == "mse":
            return nn.functional.mse_loss(outputs, own) / 2
        return nn.functional.cross_entropy(outputs, own)
