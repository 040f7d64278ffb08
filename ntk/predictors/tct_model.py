"""The predictor that TCT learns: a network, its features, and a linear model of these.

Source: Yu et al., *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels*,
NeurIPS 2022, section 4.1, note 4, and algorithm 2.
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..convex.local_steps import centred_targets, convex_loss
from ..features.feature_map import FeatureMap
from ..features.normaliser import Normaliser
from ..losses import Loss, check_loss
from .network import (
    Predictor,
    arrays_of,
    load_arrays,
    reading_model,
    require_same_network,
    write_model,
)

LINEAR, MEAN, SCALE = "tct.linear", "tct.mean", "tct.scale"
CHUNK_BYTES = 256 * 2**20  # of the features of a chunk of examples


class TCTModel(Predictor):
    """Scores W^T z + b of the classes, for normalised features z of a bootstrapped network.

    The network has the bootstrapped weights; it is copied. `linear` is W, float32 (p, C), or
    (p + 1, C) with a last row b if the model has a bias. The loss is normalised as in stage 2:
    ``||z W - y||^2 / 2`` averaged over the examples, y one-hot minus 1/C; or the cross-entropy.

    Examples
    --------
    >>> network = nn.Linear(4, 3)
    >>> model = TCTModel(network, FeatureMap(), Normaliser.identity(5), np.zeros((5, 3), "f4"))
    >>> model.predict(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    FILE = "tct.safetensors"
    ARRAYS = (LINEAR, MEAN, SCALE)  # names of what joins the network's own
    linear: Tensor
    mean: Tensor
    inv_std: Tensor

    def __init__(
        self,
        network: nn.Module,
        feature_map: FeatureMap,
        normaliser: Normaliser,
        linear: NDArray[np.float32],
        *,
        loss: Loss = "mse",
    ) -> None:
        super().__init__()
        width = feature_map.width(network)
        if normaliser.mean.shape != (width,) or normaliser.inv_std.shape != (width,):
            raise ValueError(
                f"normaliser: expected {width} features, as the network gives, got "
                f"{normaliser.mean.shape} and {normaliser.inv_std.shape}"
            )
        if linear.ndim != 2 or linear.shape[0] not in (width, width + 1):
            raise ValueError(
                f"linear: expected {width} rows, or {width + 1} with a bias, got {linear.shape}"
            )
        self.network = copy.deepcopy(network)
        self.feature_map = feature_map
        self.loss = check_loss(loss)
        arrays = {"linear": linear, "mean": normaliser.mean, "inv_std": normaliser.inv_std}
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.array(array)))

    @property
    def normaliser(self) -> Normaliser:
        """The normaliser to features of mean 0 and variance 1."""
        return Normaliser(self.mean.cpu().numpy(), self.inv_std.cpu().numpy())

    @classmethod
    def from_arrays(
        cls,
        network: nn.Module,
        feature_map: FeatureMap,
        arrays: Mapping[str, NDArray[Any]],
        *,
        loss: Loss = "mse",
    ) -> Self:
        """Make the model from the arrays of :class:`fedntk.strategies.TCT`, or a run's model file.

        `arrays` are the network's state dict, ``tct.linear``, ``tct.mean`` and ``tct.scale``;
        `network` has the architecture that was trained, and is copied.
        """
        mean, inv_std, linear = (arrays[name] for name in (MEAN, SCALE, LINEAR))
        model = cls(network, feature_map, Normaliser(mean, inv_std), linear, loss=loss)
        load_arrays(model.network, arrays)
        return model

    def features(self, x: Any, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
        """Yield the normalised features of examples (n, ...), some at a time: (m, p), float32.

        The features of a chunk take at most `chunk_bytes`.
        """
        extract, normaliser = self.feature_map.extractor(self.network), self.normaliser
        size = max(1, chunk_bytes // (4 * len(normaliser.mean)))
        x = self.prepare(x)
        for chunk in x.split(size) if len(x) else ():
            yield normaliser(extract(chunk))

    def predict(self, x: Any, *, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
        """Return the classes' scores (n, C), float32 on the CPU; the largest is the prediction.

        By least squares they estimate probabilities minus 1/C; by cross-entropy they are logits.
        """
        linear = self.linear.cpu()
        with torch.inference_mode(False):  # features are gradients, whatever the caller has off
            x = x.clone() if isinstance(x, Tensor) and x.is_inference() else x
            scores = [self.scores(z, linear) for z in self.features(x, chunk_bytes=chunk_bytes)]
        empty = linear.new_zeros(0, linear.shape[1])
        return self.in_units(torch.cat([empty, *scores]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of examples (n, ...), without gradient: (n, C), on its device."""
        return self.predict(x).to(self.linear.device)

    def loss_of(self, outputs: Tensor, targets: Tensor) -> float:
        """Loss of stage 2, in which least squares have one-hot targets minus 1/C."""
        is_real = self.targets is not None
        return convex_loss(outputs, centred_targets(targets, self.loss, is_real), self.loss)

    @staticmethod
    def scores(features: Tensor, linear: Tensor) -> Tensor:
        """Return z W + b for normalised features (n, p)."""
        width = features.shape[1]
        scores = features @ linear[:width]
        return scores + linear[width] if len(linear) > width else scores

    def _save(self, folder: Path) -> None:
        arrays = {f"network.{name}": array for name, array in arrays_of(self.network).items()}
        tensors = zip(self.ARRAYS, (self.linear, self.mean, self.inv_std), strict=True)
        arrays |= {name: np.array(tensor.cpu().numpy(), order="C") for name, tensor in tensors}
        described = {"loss": self.loss, **self.feature_map.to_config()}
        write_model(folder / self.FILE, arrays, described)

    @classmethod
    def _load(cls, folder: Path, network: nn.Module) -> Self:
        with reading_model(folder / cls.FILE, "TCT model") as (arrays, described):
            feature_map, loss = FeatureMap.from_config(described), check_loss(described["loss"])
        weights = {k.removeprefix("network."): a for k, a in arrays.items() if "network." in k[:8]}
        missing = not {LINEAR, MEAN, SCALE} <= arrays.keys()
        require_same_network(network, weights, folder, "its linear model" if missing else "")
        return cls.from_arrays(network, feature_map, {**arrays, **weights}, loss=loss)
