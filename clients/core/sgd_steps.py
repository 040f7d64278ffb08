"""Steps of SGD on all parameters at a time, with the bits of ``torch.optim.SGD``.

A first optimizer of torch's imports its compiler: 0.6 s in each of the processes that Flower
starts, one for each message to a client. An optimizer's bookkeeping also takes a tenth of a small
network's step.

Gradients go by the name of their parameter. A parameter that the loss does not know has none. They
are dense, also those of sparse embeddings.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]
Adjust = Callable[[Gradients], Gradients]  # what is stepped along instead; changes none in place
BatchLoss = Callable[[Tensor], Tensor]  # positions of a batch's examples -> their mean loss
BatchGradients = Callable[
    [Callable[[], Tensor], Mapping[str, nn.Parameter]], tuple[Tensor, Gradients]
]  # a batch's loss, parameters -> loss, gradients


def gradients_of(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Return the gradients of a loss; the parameters also hold them until the next call."""
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward()
    return held_gradients(parameters)


def plain_gradients(
    batch_loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]
) -> tuple[Tensor, Gradients]:
    """Return a batch's loss and its gradients."""
    loss = batch_loss()
    return loss, gradients_of(loss, parameters)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that are trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def held_gradients(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Return the gradients that parameters hold."""
    held = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in held.items()}


class SGDSteps:
    """Trains parameters in place, from the weights that they have; begins without momentum.

    `learning_rate`, `momentum` and `weight_decay` are as in ``torch.optim.SGD``; 0 means none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        learning_rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self.weight_decay = weight_decay
        self._weights = _detach(parameters)
        self._velocities: Gradients = {}

    def take(self, gradients: Gradients) -> None:
        """Take one step: v <- momentum v + g + weight_decay w, w <- w - learning_rate v."""
        weights, steps = [self._weights[name] for name in gradients], list(gradients.values())
        if not weights:
            return
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, weights, alpha=self.weight_decay))
        if self.momentum:
            for name, weight in zip(gradients, weights, strict=True):
                if name not in self._velocities:
                    self._velocities[name] = torch.zeros_like(weight)
            velocities = [self._velocities[name] for name in gradients]
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, steps)
            steps = velocities
        torch._foreach_add_(weights, steps, alpha=-self.learning_rate)


def proximal_term(
    parameters: Mapping[str, nn.Parameter], mu: float, centre: Mapping[str, Tensor] | None = None
) -> Adjust:
    """Return what adds mu (w - centre) to the gradients of parameters w, trained in place.

    By default the centre is w as it is now. It is copied, and may hold more than w has.
    """
    weights = _detach(parameters)
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


def _detach(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}
