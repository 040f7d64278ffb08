"""Local training: epochs of mini-batch SGD, with FedProx's term if wanted.

Sources: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, algorithm 1 (ClientUpdate); Li et al., *Federated Optimization in Heterogeneous
Networks*, MLSys 2020, eq. (2):

    h_k(w; w_t) = F_k(w) + (mu / 2) ||w - w_t||^2
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Loss, loss_value
from fedntk.ntk.class_prior import log_class_prior
from fedntk.ntk.options import Declared, option

from .base import ModelClient
from .model_probe import training_outputs
from .randomness import own_randomness, torch_seed
from .sgd_steps import (
    Adjust,
    BatchGradients,
    BatchLoss,
    SGDSteps,
    plain_gradients,
    proximal_term,
    trained_parameters,
)
from .weights import set_weights

SGD_KEYS = frozenset({"lr", "proximal-mu"})  # of a message's configuration


class LocalSGD(Declared, frozen=True):
    """Epochs of mini-batch SGD on a client's examples; momentum begins at zero in each round."""

    epochs: int = option(
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

    def require_loss(self, loss: Loss) -> None:
        """Refuse a class prior without cross-entropy."""
        if self.class_prior and loss != "cross-entropy":
            raise ValueError(f"class_prior: expected the loss cross-entropy, got {loss}")

    def refuse_proximal_term(self, reason: str) -> None:
        """Refuse FedProx's term for a method that cannot have it."""
        if self.proximal_mu:
            raise ValueError(f"proximal_mu: expected 0, got {self.proximal_mu}; {reason}")

    def train(
        self,
        client: ModelClient,
        weights: Sequence[NDArray[Any]],
        x: Tensor,
        targets: Tensor,
        config: Mapping[str, Any],
        batch_loss: BatchLoss | None = None,
    ) -> float:
        """Train from the received weights, with FedProx's term: see :meth:`descend`."""
        mu = self._resolve("proximal_mu", config, "proximal-mu")
        adjust = None
        if mu:
            set_weights(client.model, weights)
            adjust = proximal_term(trained_parameters(client.model), mu)
        return self.descend(client, weights, x, targets, config, adjust, batch_loss=batch_loss)

    def descend(
        self,
        client: ModelClient,
        weights: Sequence[NDArray[Any]],
        x: Tensor,
        targets: Tensor,
        config: Mapping[str, Any],
        adjust: Adjust | None = None,
        *,
        batch_loss: BatchLoss | None = None,
        gradients: BatchGradients | None = None,
    ) -> float:
        """Run E epochs of mini-batch SGD; the client's model holds the new weights then.

        Parameters
        ----------
        client : ModelClient
            Its model is trained, with its loss, on its device; its seed shuffles the examples.
        weights : sequence of ndarray
            Where to begin.
        x, targets : Tensor, shapes (n, ...) and (n, C)
            Examples, in the order before shuffling.
        config : dict
            ``"server-round"`` seeds the shuffling; ``"lr"`` replaces `learning_rate`.
        adjust : callable, optional
            Function from a step's gradients, by their parameters' names, to those that the step
            goes along. It changes none in place.
        batch_loss : callable, optional
            Function from positions (int64) of a batch's examples to their mean loss; by default
            that of :meth:`batch_loss`.
        gradients : callable, optional
            Function from a batch's loss and the parameters to that loss and its gradients.

        Returns
        -------
        float
            Mean loss of the examples as the steps met them, in training mode, each counting once in
            each epoch. Without epochs: in evaluation mode, at the weights received.
        """
        rate = self._resolve("learning_rate", config, "lr")
        model = client.model
        if not self.epochs:
            set_weights(model, weights)
            return loss_value(client.outputs(x), targets, client.loss)
        parameters = trained_parameters(model)
        loss_of = batch_loss or self.batch_loss(client, x, targets)
        gradients_of = gradients or plain_gradients
        losses, sizes = list[Tensor](), list[int]()
        seed = torch_seed(client.seed, config)
        with own_randomness(model, x[:2].to(client.device), seed) as generator:
            set_weights(model, weights)  # the probe may have moved statistics
            steps = SGDSteps(
                parameters,
                learning_rate=rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
            model.train()
            for _ in range(self.epochs):
                for batch in self.batches(model, torch.randperm(len(x), generator=generator)):
                    loss, slopes = gradients_of(partial(loss_of, batch), parameters)
                    steps.take(slopes if adjust is None else adjust(slopes))
                    losses.append(loss.detach())
                    sizes.append(len(batch))
            model.zero_grad()
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        return float(torch.stack(losses).cpu().double() @ shares)

    def batches(self, model: nn.Module, order: Tensor) -> Sequence[Tensor]:
        """Return positions of the examples of each batch, in the given order."""
        batches = list(order.split(self.batch_size))
        norm = nn.modules.batchnorm._BatchNorm
        normalises = any(isinstance(module, norm) for module in model.modules())
        if normalises and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def batch_loss(self, client: ModelClient, x: Tensor, targets: Tensor) -> BatchLoss:
        """Return the function from positions of a batch's examples to their mean loss.

        The model's outputs are those of training mode.
        """
        labels = targets if client.loss == "mse" else _class_numbers(targets)
        offset = log_class_prior(client.targets).to(client.device) if self.class_prior else None

        def loss(batch: Tensor) -> Tensor:
            inputs = x.index_select(0, batch).to(client.device)
            outputs = training_outputs(client.model, inputs, client.num_outputs)
            if offset is not None:
                outputs = outputs + offset
            expected = labels.index_select(0, batch).to(client.device)
            if client.loss == "mse":
                return nn.functional.mse_loss(outputs, expected) / 2
            return nn.functional.cross_entropy(outputs, expected)

        return loss

    def _resolve(self, name: str, config: Mapping[str, Any], key: str) -> float:
        return float(self.options()[name].check(config.get(key, getattr(self, name)), key))


def _class_numbers(targets: Tensor) -> Tensor:
    one_hot = (targets.amax(1) == 1) & (targets.count_nonzero(1) == 1)
    return targets.argmax(1) if bool(one_hot.all()) else targets
