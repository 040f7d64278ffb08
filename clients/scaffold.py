"""Client of SCAFFOLD: local SGD with gradients corrected for the client's own drift.

Source: Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*,
ICML 2020, algorithm 1, for client i with g_i the gradient of a mini-batch:

    y_i <- x
    y_i <- y_i - eta_l (g_i(y_i) - c_i + c)                 K times
    c_i+ <- gradient of all the client's examples at x      option I
    c_i+ <- c_i - c + (x - y_i) / (K eta_l)                 option II

By the steps, option II is the mean of the gradients met on the way, and is taken as that: a
difference of weights would lose digits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedntk.ntk.options import option, part
from fedntk.ntk.payloads import wire
from fedntk.ntk.support.shared_arrays import first_names

from .core.base import ModelClient
from .core.local_sgd import Gradients, LocalSGD, held_gradients, trained_parameters
from .core.randomness import own_randomness, torch_seed
from .core.weights import Config, Fit, NamedArrays, Parameters, records_of, set_weights


class SCAFFOLDClient(ModelClient):
    """Trains on corrected gradients; sends weights and its new control (algorithm 1).

    The client keeps nothing: its control c_i lives on the server, which sends c - c_i with the
    model. Arrays that are not trained (BatchNorm's statistics, frozen parameters) are not
    corrected and have controls of zero. A control tells the server what a gradient tells.

    Weight decay counts as part of the gradient in both options. Momentum is of the corrected
    gradients; the paper has none: option II's control is then still the mean of the gradients.
    """

    strategy = "SCAFFOLD"
    replies = "weights and controls"
    config_keys = frozenset({"lr"})
    takes_real_targets = True

    sgd: LocalSGD = part("local training", default=LocalSGD)
    option: Literal["I", "II"] = option(
        "new control: II: the mean gradient of the steps, which costs nothing; I: that of all "
        "examples at the received weights, one more pass, in mini-batches and training mode",
        default="II",
    )

    def check(self) -> None:
        """Refuse what has no place in SCAFFOLD."""
        self.sgd.refuse_proximal_term("SCAFFOLD has no proximal term")
        self.sgd.refuse_adam("SCAFFOLD")
        if self.sgd.epochs < 1:
            raise ValueError(f"epochs: expected at least 1 with SCAFFOLD, got {self.sgd.epochs}")

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Run E epochs of corrected SGD from the received weights: see :meth:`LocalSGD.descend`.

        Beside the model come ``corrections``: c - c_i of each array of floating point. The reply
        has the new weights, ``controls`` of the c_i+, and ``train-loss``.
        """
        records = records_of(parameters, wire.CORRECTIONS, strategy=self.strategy)
        corrections = self._read_corrections(records[wire.CORRECTIONS])
        others = [name for name in records if name != wire.CORRECTIONS]
        if (count := len(others)) != 1:
            raise ValueError(f"expected one record of weights beside corrections, got {count}")
        weights = list(records[others[0]].values())
        x, targets = self.training_examples(config)
        trained = trained_parameters(self.model)
        corrected = _Corrected(trained, corrections, self.sgd.weight_decay)
        train_loss = self.sgd.descend(self, weights, x, targets, config, corrected)
        new_weights, control = self.model_weights(), corrected.mean_gradients()
        if self.option == "I":
            control = self._gradient(weights, x, targets, config)
        first = first_names(self.model)
        controls = {
            key: control.get(first[key], torch.zeros_like(tensor)).cpu().numpy()
            for key, tensor in _floating_arrays(self.model).items()
        }
        reply = NamedArrays({others[0]: new_weights, wire.CONTROLS: controls})
        return reply, len(x), {wire.TRAIN_LOSS: train_loss}

    def _read_corrections(self, corrections: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Check the corrections; return them on the model's device."""
        floating = _floating_arrays(self.model)
        expected = {name: tuple(tensor.shape) for name, tensor in floating.items()}
        shapes = {name: array.shape for name, array in corrections.items()}
        if shapes != expected:
            names = [n for n in {**expected, **shapes} if expected.get(n) != shapes.get(n)]
            raise ValueError(
                f"corrections: expected one for each floating-point array of the model, differing "
                f"in {names[:5]}; the strategy's initial arrays must be of the client's network"
            )
        return {n: torch.from_numpy(corrections[n].copy()).to(t) for n, t in floating.items()}

    def _gradient(
        self, weights: Sequence[NDArray[Any]], x: Tensor, targets: Tensor, config: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        parameters = trained_parameters(self.model)
        batch_loss = self.sgd.batch_loss(self, x, targets)
        seed = torch_seed(self.seed, config)
        with own_randomness(self.model, x[:2].to(self.device), seed):
            set_weights(self.model, weights)
            self.model.train()
            self.model.zero_grad()
            for batch in self.sgd.batches(self.model, torch.arange(len(x))):
                (batch_loss(batch) * (len(batch) / len(x))).backward()
        gradients = held_gradients(parameters)
        return _decay(_all(gradients, parameters), parameters, self.sgd.weight_decay)


def _floating_arrays(model: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in model.state_dict().items() if t.is_floating_point()}


class _Corrected:
    """Adds up each step's gradients, and returns them corrected by c - c_i."""

    def __init__(
        self,
        trainable: Mapping[str, nn.Parameter],
        corrections: Mapping[str, Tensor],
        weight_decay: float,
    ) -> None:
        self._trainable = trainable
        self._corrections = [corrections[name] for name in trainable]
        self._weight_decay = weight_decay
        self._sums = {name: torch.zeros_like(p.detach()) for name, p in trainable.items()}
        self._steps = 0

    def __call__(self, gradients: Gradients) -> Gradients:
        whole = _all(gradients, self._trainable)
        decayed = _decay(whole, self._trainable, self._weight_decay)
        torch._foreach_add_(list(self._sums.values()), list(decayed.values()))
        self._steps += 1
        corrected = torch._foreach_add(list(whole.values()), self._corrections)
        return dict(zip(whole, corrected, strict=True))

    def mean_gradients(self) -> Gradients:
        return {name: total / self._steps for name, total in self._sums.items()}


def _all(gradients: Gradients, trainable: Mapping[str, nn.Parameter]) -> Gradients:
    """Return the gradients of all parameters: zero for one that the loss does not know."""
    return {
        name: gradients[name] if name in gradients else torch.zeros_like(parameter.detach())
        for name, parameter in trainable.items()
    }


def _decay(
    gradients: Gradients, trainable: Mapping[str, nn.Parameter], weight_decay: float
) -> Gradients:
    if not weight_decay:
        return gradients
    weights = [parameter.detach() for parameter in trainable.values()]
    decayed = torch._foreach_add(list(gradients.values()), weights, alpha=weight_decay)
    return dict(zip(gradients, decayed, strict=True))
