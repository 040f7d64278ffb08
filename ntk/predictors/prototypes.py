"""Prediction of the class with the prototype nearest to an example's features.

Source: Tan et al., *FedProto: Federated Prototype Learning across Heterogeneous Clients*, AAAI
2022: argmin over the classes j of ||f(x) - C^j||, with f the network without its last linear layer.
"""

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..features.feature_map import FeatureMap
from ..payloads.prototypes import Prototypes
from .network import BATCH_SIZE, NetworkPredictor, reading_model, write_model


class PrototypePredictor(NetworkPredictor):
    """Scores -||f(x) - C^j||^2 of the classes j, for features f(x), the inputs of the layer `head`.

    A class without a prototype is scored below all others; at least one has one. The loss is the
    cross-entropy of the scores, as in Snell et al., *Prototypical Networks for Few-shot Learning*,
    NeurIPS 2017. The network is copied; `head` is by default its last ``nn.Linear``.

    Examples
    --------
    >>> means = np.array([[0.0, 0.0], [0.0, 4.0]], np.float32)
    >>> predictor = PrototypePredictor(nn.Linear(2, 2), Prototypes(means, np.array([1, 1])))
    >>> predictor.predict(torch.tensor([[0.0, 1.0]]))
    tensor([[-1., -9.]])
    """

    PROTOTYPES = "prototypes.safetensors"

    def __init__(
        self,
        network: nn.Module,
        prototypes: Prototypes,
        *,
        head: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(network, device=device)
        self.feature_map, self.prototypes = FeatureMap("last-layer", head=head), prototypes
        _, last = self.feature_map.last_layer(self.network)
        expected = (last.out_features, last.in_features)
        if prototypes.means.shape != expected or prototypes.counts.shape != expected[:1]:
            raise ValueError(
                f"prototypes: expected {expected[0]} classes and {expected[1]} features, as the "
                f"network has, got means of shape {prototypes.means.shape}"
            )
        if not prototypes.present.any():
            raise ValueError("prototypes: expected one of at least one class, got none")

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.predict(x)

    @torch.no_grad()
    def predict(self, x: Any) -> Tensor:  # noqa: D102
        extract = self.feature_map.extractor(self.network)
        present = torch.from_numpy(self.prototypes.present)
        means = torch.from_numpy(np.array(self.prototypes.means))[present]
        scores = []
        for features in map(extract, self.prepare(x).split(BATCH_SIZE)):
            distances = torch.stack([-(features - mean).square().sum(1) for mean in means], 1)
            scores.append((distances.amin(1, keepdim=True) - 1).repeat(1, len(present)))
            scores[-1][:, present] = distances
        return torch.cat(scores)

    def _save(self, folder: Path) -> None:
        super()._save(folder)
        means, counts = self.prototypes.means, self.prototypes.counts
        described = {"head": self.feature_map.head}
        write_model(folder / self.PROTOTYPES, {"means": means, "counts": counts}, described)

    @classmethod
    def _load(cls, folder: Path, network: nn.Module) -> Self:
        with reading_model(folder / cls.PROTOTYPES, "prototypes") as (arrays, described):
            head, prototypes = described["head"], Prototypes(arrays["means"], arrays["counts"])
        restored = NetworkPredictor.load(folder, network).network
        return cls(restored, prototypes, head=head)
