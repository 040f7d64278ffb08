"""The mathematics: Jacobians, tangent kernels and their evolution, on torch and numpy alone."""

from .blocks import Block, DenseBlock
from .differentiate import Structure, jacobian
from .errors import BadReply, NotEnoughMemory
from .evolution import Evolution, evolve
from .factors import ConvBlock, EmbeddingBlock, FactoredBlock, LinearBlock
from .features import entk_features, random_projection
from .jacobian import Jacobian
from .losses import Loss, check_loss, loss_value, one_hot, output_hessian, output_scale, residual
from .memory import available_memory, require_memory
from .npy import from_npy, to_npy
from .payloads import JacobianUpload, stack_candidates, unstack_candidates

__all__ = [
    "BadReply",
    "Block",
    "ConvBlock",
    "DenseBlock",
    "EmbeddingBlock",
    "Evolution",
    "FactoredBlock",
    "Jacobian",
    "JacobianUpload",
    "LinearBlock",
    "Loss",
    "NotEnoughMemory",
    "Structure",
    "available_memory",
    "check_loss",
    "entk_features",
    "evolve",
    "from_npy",
    "jacobian",
    "loss_value",
    "one_hot",
    "output_hessian",
    "output_scale",
    "random_projection",
    "require_memory",
    "residual",
    "stack_candidates",
    "to_npy",
    "unstack_candidates",
]
