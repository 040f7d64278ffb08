"""Learned models as objects: each predicts, is evaluated, saved and loaded in its method's way.

Files are safetensors, which is imported when it is needed.
"""

import copy
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..losses import Loss, check_loss, loss_value, one_hot
from ..support.arrays import ArrayDict, Arrays
from ..support.shared_arrays import unify
from .inputs import InputTransform
from .targets import TargetTransform, regression_metrics

BATCH_SIZE = 1024  # examples in a forward pass
Metric = Callable[[Tensor, Tensor], float | None]


def measure(metrics: Mapping[str, Metric], outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return those metrics of outputs (n, C) and labels that are defined; each gets copies."""
    measured = {name: metric(outputs.clone(), labels.clone()) for name, metric in metrics.items()}
    return {name: float(value) for name, value in measured.items() if value is not None}


class Evaluation(NamedTuple):
    """Loss and accuracy of a predictor on labelled examples, and other reports by name.

    Of real targets there is no accuracy; ``mae`` and ``r2`` are among the others.
    """

    loss: float
    accuracy: float | None
    more: Mapping[str, float] = MappingProxyType({})

    @property
    def score(self) -> float:
        """The accuracy, or R^2: the larger, the better."""
        return self.more.get("r2", math.nan) if self.accuracy is None else self.accuracy


class Predictor(nn.Module, ABC):
    """Gives each class a score; the class with the largest one is the prediction.

    `inputs` is what is done to raw examples first; None: they come as the network takes them. With
    `targets` scores are predictions of real targets, in the targets' units and float64.
    """

    loss: Loss
    inputs: InputTransform | None = None
    targets: TargetTransform | None = None
    # further metrics that evaluations report: functions of scores (n, C) and labels (n,), None
    # where there is no value
    metrics: Mapping[str, Metric] = MappingProxyType({})

    @abstractmethod
    def predict(self, x: Any) -> Tensor:
        """Return the scores of examples (n, ...): shape (n, C), float32 on the CPU, no gradient."""

    @abstractmethod
    def loss_of(self, outputs: Tensor, targets: Tensor) -> float:
        """Loss of scores (n, C) against one-hot targets (n, C), averaged over the examples."""

    @abstractmethod
    def _save(self, folder: Path) -> None: ...

    @classmethod
    @abstractmethod
    def _load(cls, folder: Path, network: nn.Module) -> Self: ...

    def save(self, folder: str | Path) -> None:
        """Write the predictor, and what it does to its inputs, into a folder, which is made."""
        if self.inputs is not None:
            self.inputs.save(folder)  # refuses a secret before anything is written
        else:
            (Path(folder) / InputTransform.FILE).unlink(missing_ok=True)  # of an earlier one
        self._save(Path(folder))

    @classmethod
    def load(cls, folder: str | Path, network: nn.Module) -> Self:
        """Read what :meth:`save` wrote, given a network of the architecture that was saved."""
        predictor = cls._load(Path(folder), network)
        predictor.inputs = InputTransform.load(folder)
        predictor.targets = None if predictor.inputs is None else predictor.inputs.targets
        return predictor

    def prepare(self, x: Any) -> Tensor:
        """Return examples as the network takes them."""
        return x if self.inputs is None else self.inputs(x)

    def predict_proba(self, x: Any) -> Tensor:
        """Return the probabilities of the classes (n, C), float64; ValueError for MSE."""
        if self.loss != "cross-entropy":
            raise ValueError(f"expected a model with cross-entropy, got {self.loss}")
        return self.predict(x).double().softmax(1)

    def predict_classes(self, x: Any) -> list[Any]:
        """Return the name of each example's class, or its number if classes have no names."""
        if self.targets is not None:
            raise ValueError("expected classes, got real targets; call predict")
        numbers = self.predict(x).argmax(1).tolist()
        names = () if self.inputs is None else self.inputs.classes
        return [names[i] for i in numbers] if names else numbers

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return a model's outputs (n, C); predictions of real targets in the targets' units."""
        return outputs if self.targets is None else self.targets.restore(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of examples (n, ...): shape (n, C), on the predictor's device.

        So a user's ``test(net, loader, device)`` takes a predictor for the network.
        """
        return self.predict(x)

    def evaluate(self, x: Any, y: Any) -> Evaluation:
        """Return loss and accuracy on examples (n, ...), n > 0, with labels (n,) in 0 ... C - 1.

        A predictor with `inputs` also takes names of classes as labels. Real targets (n, C) are in
        their units if there are `inputs`, else standardised, as is the loss.
        """
        if len(x) == 0 or len(x) != len(y):
            raise ValueError(
                f"expected at least one example and as many labels, got {len(x)} and {len(y)}"
            )
        y = torch.as_tensor(y).cpu() if self.inputs is None else self.inputs.labels(y)
        return self._evaluate(x, y)

    def _evaluate(self, x: Any, y: Tensor) -> Evaluation:
        return self._compare(self.predict(x), y)

    def _compare(self, outputs: Tensor, y: Tensor) -> Evaluation:
        accuracy, more = None, dict[str, float]()
        if self.targets is None:
            targets = one_hot(y, outputs.shape[1])
            accuracy = float((outputs.argmax(1) == targets.argmax(1)).double().mean())
            loss = self.loss_of(outputs, targets)
        else:
            scaled, y = self.targets.scale(outputs), y.double()
            loss, more = self.loss_of(scaled, y), regression_metrics(scaled, y, self.targets.std)
            y = self.targets.restore(y)
        more |= measure(self.metrics, outputs, y)
        return Evaluation(loss, accuracy, more)


class NetworkPredictor(Predictor):
    """A copy of a network: x (n, ...) -> (n, C). MSE is against one-hot targets.

    Examples
    --------
    >>> predictor = NetworkPredictor(nn.Linear(4, 3))
    >>> predictor.predict(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    FILE = "network.safetensors"

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: Loss = "cross-entropy",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).to(device)
        self.loss = check_loss(loss)

    @property
    def device(self) -> torch.device:
        """The network's device, also after ``to(device)``."""
        return next(self.network.parameters()).device

    @classmethod
    def from_arrays(cls, network: nn.Module, arrays: Arrays, **options: Any) -> Self:
        """Make the predictor from a network's arrays, by the names of its state dict.

        `network` is copied; other arrays are ignored. `options` are `loss` and `device`.
        """
        predictor = cls(network, **options)
        load_arrays(predictor.network, arrays)
        return predictor

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs (n, C), on its device and with gradients."""
        outputs: Tensor = self.network(self.prepare(x).to(self.device, copy=True))
        return self.in_units(outputs)

    def prepare(self, x: Any) -> Tensor:
        """Return examples as the network takes them, floats in its dtype."""
        dtype = dtype_of(self.network)
        ready = x if self.inputs is None else self.inputs(x, dtype=dtype)
        return ready.to(dtype) if ready.is_floating_point() else ready

    @torch.no_grad()
    def predict(self, x: Any) -> Tensor:  # noqa: D102
        self.network.eval()
        chunks = self.prepare(x).split(BATCH_SIZE)  # copied: a network may write into its input
        outputs = [self.network(c.to(self.device, copy=True)).cpu() for c in chunks]
        return self.in_units(torch.cat(outputs))

    def loss_of(self, outputs: Tensor, targets: Tensor) -> float:  # noqa: D102
        return loss_value(outputs, targets, self.loss)

    def _save(self, folder: Path) -> None:
        write_model(folder / self.FILE, arrays_of(self.network), {"loss": self.loss})

    @classmethod
    def _load(cls, folder: Path, network: nn.Module) -> Self:
        with reading_model(folder / cls.FILE, "network") as (arrays, described):
            loss = described["loss"]
        require_same_network(network, arrays, folder)
        return cls.from_arrays(network, arrays, loss=loss)


def dtype_of(network: nn.Module) -> torch.dtype:
    """Return the dtype of a network's first parameter of floating point, float32 without one."""
    floats = (p.dtype for p in network.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def write_model(path: Path, arrays: Arrays, described: Mapping[str, Any]) -> None:
    """Write arrays as safetensors, described in the metadata, into a folder that is made."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(arrays), path, {"fedntk": json.dumps(described)})


@contextmanager
def reading_model(path: Path, kind: str) -> Iterator[tuple[ArrayDict, dict[str, Any]]]:
    """Yield what :func:`write_model` wrote; ValueError if that, or the block, finds it damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {})["fedntk"])
            yield {name: file.get_tensor(name) for name in file.keys()}, described  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no {kind} that can be read: {error}") from error


def arrays_of(network: nn.Module) -> ArrayDict:
    """Name -> array of a network's state dict; copies, in C order."""
    state = network.state_dict()
    return {name: np.array(tensor.cpu().numpy(), order="C") for name, tensor in state.items()}


def load_arrays(network: nn.Module, arrays: Arrays) -> None:
    """Set a network's state from named arrays, which may be read-only and hold more."""
    state = unify(network, arrays)
    network.load_state_dict({name: torch.from_numpy(np.array(a)) for name, a in state.items()})


def require_same_network(
    network: nn.Module, arrays: Arrays, folder: str | Path, also: str = ""
) -> None:
    """Refuse arrays of another network, and name what differs."""
    expected = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    differing = [k for k in {**expected, **shapes} if shapes.get(k) != expected.get(k)]
    if differing or also:
        names = ", ".join(differing[:5]) or also
        raise ValueError(f"{folder} holds a model of another network: it differs in {names}")
