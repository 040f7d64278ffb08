"""Local training: epochs of mini-batch SGD, with FedProx's term if wanted.

Sources: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, algorithm 1 (ClientUpdate); Li et al., *Federated Optimization in Heterogeneous
Networks*, MLSys 2020, eq. (2):

    h_k(w; w_t) = F_k(w) + (mu / 2) ||w - w_t||^2

Adam may take the steps of SGD: Kingma and Ba, *Adam: A Method for Stochastic Optimization*, ICLR
2015, algorithm 1, with alpha the learning rate:

    m <- beta_1 m + (1 - beta_1) g
    v <- beta_2 v + (1 - beta_2) g^2
    w <- w - alpha (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

Steps have the bits of ``torch.optim.SGD`` and ``torch.optim.Adam``. A first optimizer of torch's
imports its compiler: 0.6 s in each of the processes that Flower starts, one for each message to a
client. Gradients go by the name of their parameter. A parameter that the loss does not know has
none.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk import Loss, loss_value
from fedntk.ntk.losses import log_class_prior
from fedntk.ntk.options import Declared, option
from fedntk.ntk.payloads import wire

from .base import ModelClient
from .model_probe import training_outputs
from .randomness import own_randomness, torch_seed
from .weights import set_weights

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # of Adam
SGD_KEYS = frozenset({"lr", wire.PROXIMAL_MU})  # of a message's configuration
Gradients = dict[str, Tensor]
Adjust = Callable[[Gradients], Gradients]  # what is stepped along instead; changes none in place
BatchLoss = Callable[[Tensor], Tensor]  # positions of a batch's examples -> their mean loss
BatchGradients = Callable[
    [Callable[[], Tensor], Mapping[str, nn.Parameter]], tuple[Tensor, Gradients]
]  # a batch's loss, parameters -> loss, gradients


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that are trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def only_trained(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Have no parameter trained but those of some names; ValueError if none of these is."""
    trained = trained_parameters(model)
    if not trained.keys() & names:
        raise ValueError(f"model: nothing is trained of {sorted(names)[:5]}; expected a parameter")
    fixed = [parameter for name, parameter in trained.items() if name not in names]
    try:
        for parameter in fixed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(True)


def plain_gradients(
    batch_loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]
) -> tuple[Tensor, Gradients]:
    """Return a batch's loss and its gradients; the parameters hold them until the next call."""
    for parameter in parameters.values():
        parameter.grad = None
    loss = batch_loss()
    loss.backward()
    return loss, held_gradients(parameters)


def held_gradients(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Return the gradients that parameters hold; those of sparse embeddings are made dense."""
    held = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in held.items()}


def proximal_term(
    parameters: Mapping[str, nn.Parameter], mu: float, centre: Mapping[str, Tensor] | None = None
) -> Adjust:
    """Return what adds mu (w - centre) to gradients of w, by default from w as it is now."""
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    if centre is not None:
        centre = {name: centre[name].to(weight) for name, weight in weights.items()}
    centres = {name: weight.clone() for name, weight in (centre or weights).items()}

    def adjust(gradients: Gradients) -> Gradients:
        if not gradients:
            return gradients
        moved = torch._foreach_sub(
            [weights[name] for name in gradients], [centres[name] for name in gradients]
        )
        pulled = torch._foreach_add(list(gradients.values()), moved, alpha=mu)
        return dict(zip(gradients, pulled, strict=True))

    return adjust


def sgd_steps(
    parameters: Mapping[str, nn.Parameter], rate: float, momentum: float, decay: float
) -> Callable[[Gradients], None]:
    """Return what takes a step along gradients: v <- momentum v + g + decay w, w <- w - rate v."""
    held = {name: parameter.detach() for name, parameter in parameters.items()}
    velocities: Gradients = {}

    def take(gradients: Gradients) -> None:
        weights, steps = [held[name] for name in gradients], list(gradients.values())
        if not weights:
            return
        if decay:
            steps = list(torch._foreach_add(steps, weights, alpha=decay))
        if momentum:
            for name in gradients.keys() - velocities.keys():
                velocities[name] = torch.zeros_like(held[name])
            moving = [velocities[name] for name in gradients]
            torch._foreach_mul_(moving, momentum)
            torch._foreach_add_(moving, steps)
            steps = moving
        torch._foreach_add_(weights, steps, alpha=-rate)

    return take


def adam_steps(
    parameters: Mapping[str, nn.Parameter], rate: float, decay: float
) -> Callable[[Gradients], None]:
    """Return what takes a step of Adam; t counts the gradients of each parameter by itself."""
    held = {name: parameter.detach() for name, parameter in parameters.items()}
    means, squares, counts = Gradients(), Gradients(), Counter[str]()

    def take(gradients: Gradients) -> None:
        weights, slopes = [held[name] for name in gradients], list(gradients.values())
        if not weights:
            return
        if decay:
            slopes = list(torch._foreach_add(slopes, weights, alpha=decay))
        for name in gradients.keys() - means.keys():
            means[name], squares[name] = torch.zeros_like(held[name]), torch.zeros_like(held[name])
        counts.update(gradients.keys())
        first, second = [means[name] for name in gradients], [squares[name] for name in gradients]
        torch._foreach_lerp_(first, slopes, 1 - BETA_1)
        torch._foreach_mul_(second, BETA_2)
        torch._foreach_addcmul_(second, slopes, slopes, value=1 - BETA_2)
        scales = torch._foreach_sqrt(second)
        torch._foreach_div_(scales, [(1 - BETA_2 ** counts[name]) ** 0.5 for name in gradients])
        torch._foreach_add_(scales, EPSILON)
        steps = [-rate / (1 - BETA_1 ** counts[name]) for name in gradients]
        torch._foreach_addcdiv_(weights, first, scales, steps)

    return take


class LocalSGD(Declared, frozen=True):
    """Epochs of mini-batch SGD or Adam on a client's examples.

    Momentum, and Adam's moments, begin at zero in each round.
    """

    epochs: int = option(
        "E: passes over the local examples; 0: weights return as received", default=1, at_least=0
    )
    batch_size: int = option(
        "B: examples per step; under BatchNorm a last batch of one joins the one before it",
        default=32,
        at_least=1,
    )
    learning_rate: float = option(
        "eta of SGD; config['lr'] of a round replaces it", default=0.01, above=0
    )
    optimizer: Literal["sgd", "adam"] = option(
        "what takes the steps; adam has betas of 0.9 and 0.999, epsilon 1e-8 and no momentum",
        default="sgd",
    )
    rate_decay: float = option(
        "in round k the learning rate is multiplied by rate_decay^max(0, k - rate_decay_after); "
        "1: it never falls",
        default=1.0,
        above=0,
        at_most=1,
    )
    rate_decay_after: int = option(
        "rounds that have the whole learning rate, before it falls", default=1, at_least=0
    )
    momentum: float = option("momentum of SGD; 0: none", default=0.0, at_least=0)
    weight_decay: float = option("weight decay of SGD; 0: none", default=0.0, at_least=0)
    proximal_mu: float = option(
        "mu of FedProx's term; config['proximal-mu'] replaces it; 0: none", default=0.0, at_least=0
    )
    class_prior: bool = option(
        "for cross-entropy, add the logarithm of the shares of the client's classes to the outputs "
        "in each step's loss (Zhang et al., ICML 2022, in the form of Menon et al. 2021)",
        default=False,
    )
    class_weights: tuple[float, ...] = option(
        "for cross-entropy, factors w_c of the losses of each class's examples, in the order of "
        "the classes: a step's loss is sum_i w_{y_i} l_i / B; none: 1",
        default=(),
        above=0,
    )

    def check(self) -> None:
        """Refuse momentum with Adam."""
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(f"momentum: expected 0 with optimizer = adam, got {self.momentum}")

    def require_loss(self, loss: Loss, num_outputs: int) -> None:
        """Refuse a class prior and class weights that do not go with the loss or the C outputs."""
        for name in ("class_prior", "class_weights"):
            if getattr(self, name) and loss != "cross-entropy":
                raise ValueError(f"{name}: expected the loss cross-entropy, got {loss}")
        if len(self.class_weights) not in (0, num_outputs):
            raise ValueError(
                f"class_weights: expected a factor for each of {num_outputs} classes, got "
                f"{len(self.class_weights)}"
            )

    def refuse_proximal_term(self, reason: str) -> None:
        """Refuse FedProx's term for a method that cannot have it."""
        if self.proximal_mu:
            raise ValueError(f"proximal_mu: expected 0, got {self.proximal_mu}; {reason}")

    def refuse_adam(self, method: str) -> None:
        """Refuse another optimizer than SGD for a method that is of SGD."""
        if self.optimizer != "sgd":
            raise ValueError(f"optimizer: expected sgd with {method}, got {self.optimizer}")

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
        mu = self._resolve("proximal_mu", config, wire.PROXIMAL_MU)
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

        Examples `x` (n, ...) with `targets` (n, C) are in the order before shuffling, which the
        client's seed and ``config["server-round"]`` seed; ``config["lr"]`` replaces
        `learning_rate`, and `rate_decay` multiplies either. `adjust` makes the gradients that a
        step goes along of those of its batch, `batch_loss` is by default that of
        :meth:`batch_loss`, `gradients` :func:`plain_gradients`.

        Returns the mean loss of the examples as the steps met them, in training mode, each counting
        once in each epoch. Without epochs: in evaluation mode, at the weights received.
        """
        rounds_of_decay = max(0, int(config.get("server-round", 0)) - self.rate_decay_after)
        rate = self._resolve("learning_rate", config, "lr") * self.rate_decay**rounds_of_decay
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
            if self.optimizer == "adam":
                take = adam_steps(parameters, rate, self.weight_decay)
            else:
                take = sgd_steps(parameters, rate, self.momentum, self.weight_decay)
            model.train()
            for _ in range(self.epochs):
                for batch in self.batches(model, torch.randperm(len(x), generator=generator)):
                    loss, slopes = gradients_of(partial(loss_of, batch), parameters)
                    take(slopes if adjust is None else adjust(slopes))
                    losses.append(loss.detach())
                    sizes.append(len(batch))
            model.zero_grad()
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        return float(torch.stack(losses).cpu().double() @ shares)

    def batches(self, model: nn.Module, order: Tensor) -> Sequence[Tensor]:
        """Return positions of the examples of each batch, in an order."""
        batches = list(order.split(self.batch_size))
        norm = nn.modules.batchnorm._BatchNorm
        normalises = any(isinstance(module, norm) for module in model.modules())
        if normalises and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def batch_loss(self, client: ModelClient, x: Tensor, targets: Tensor) -> BatchLoss:
        """Return the function from a batch's positions to its mean loss, in training mode."""
        one_hot = bool(((targets.amax(1) == 1) & (targets.count_nonzero(1) == 1)).all())
        labels = targets.argmax(1) if one_hot and client.loss != "mse" else targets
        offset = log_class_prior(client.targets).to(client.device) if self.class_prior else None
        weights = torch.tensor(self.class_weights, dtype=x.dtype).to(client.device)

        def loss(batch: Tensor) -> Tensor:
            inputs = x.index_select(0, batch).to(client.device)
            outputs = training_outputs(client.model, inputs, client.num_outputs)
            if offset is not None:
                outputs = outputs + offset
            expected = labels.index_select(0, batch).to(client.device)
            if client.loss == "mse":
                return nn.functional.mse_loss(outputs, expected) / 2
            if not len(weights):
                return nn.functional.cross_entropy(outputs, expected)
            losses = nn.functional.cross_entropy(outputs, expected, weight=weights, reduction="sum")
            return losses / len(batch)

        return loss

    def _resolve(self, name: str, config: Mapping[str, Any], key: str) -> float:
        return float(self.options()[name].check(config.get(key, getattr(self, name)), key))
