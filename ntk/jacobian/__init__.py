"""Per-example Jacobians: the operator, its blocks, a rule for each kind of layer."""

from .blocks import Block, DenseBlock
from .differentiate import Plans, Structure, jacobian
from .factors import ConvBlock, EmbeddingBlock, FactoredBlock, LinearBlock
from .operator import Jacobian

__all__ = [
    "Block",
    "ConvBlock",
    "DenseBlock",
    "EmbeddingBlock",
    "FactoredBlock",
    "Jacobian",
    "LinearBlock",
    "Plans",
    "Structure",
    "jacobian",
]
