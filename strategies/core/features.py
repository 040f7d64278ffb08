"""Strategies whose clients form features of the inputs of their network's last layer."""

from typing import Any

from flwr.app import ConfigRecord
from torch import nn

from fedntk.ntk import FeatureMap
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.support.arrays import Arrays

from .base import BaseStrategy
from .replies import Reply


class FeatureStrategy(BaseStrategy):
    """Tells clients where features are taken.

    Attributes
    ----------
    feature_map : FeatureMap
        What clients make of an example.
    shape : tuple of int
        (C, p), of the last layer's weights.
    """

    network: nn.Module = argument("clients' architecture; its weights do not matter")
    head: str = option(
        "layer before which features are taken; the last linear one by default", default=""
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.feature_map = FeatureMap("last-layer", head=self.head)
        _, last = self.feature_map.last_layer(self.network)
        self.shape = (last.out_features, last.in_features)

    def prepare_config(self, config: ConfigRecord, server_round: int) -> None:
        """Add where features are taken."""
        super().prepare_config(config, server_round)
        config.update(self.feature_map.to_config())

    @property
    def width(self) -> int:
        """Number of features of an example."""
        return self.feature_map.width(self.network)

    def parse(self, reply: Reply) -> Any:
        """Check a client's class means, which must be of as many examples as it reports."""
        return self.check_prototypes(reply.arrays(), reply.num_examples)

    def check_prototypes(self, arrays: Arrays, num_examples: int | None = None) -> Prototypes:
        """Check a client's class means, of `num_examples` examples if that is given."""
        return Prototypes.from_arrays(
            arrays,
            num_classes=self.shape[0],
            width=self.width,
            max_examples=self.max_examples,
            num_examples=num_examples,
        )
