"""DeepAFL: its network has residual blocks before the last layer."""

from torch import nn

from fedntk.ntk import with_residual_features
from fedntk.strategies import DeepAFL

from ..config.config import BaseConfig
from ..config.settings import Settings, setting
from .method import Method


class DeepAFLSettings(Settings, frozen=True, eq=True):
    """The blocks, which strategy and clients find in their network; the run's seed gives them."""

    layers: int = setting(3, "blocks: one is computed in a round", at_least=1)
    block_width: int = setting(500, "m, random features of a block", at_least=1)


class _DeepAFL(Method):
    name = "deep-afl"
    strategy_class = DeepAFL
    own_settings = DeepAFLSettings
    baseline = True

    def adapt(self, network: nn.Module, config: BaseConfig) -> nn.Module:
        own = self.own(config)
        return with_residual_features(network, own.layers, own.block_width, config.seed)


METHOD = _DeepAFL()
