"""The mathematics: Jacobians, tangent kernels and their evolution, on torch and numpy alone."""

from .blocks import Block, DenseBlock
from .compression import (
    UNQUANTISED,
    Encoded,
    check_compression,
    compress,
    kept,
    top_k,
)
from .differentiate import Structure, jacobian
from .errors import BadReply, NotEnoughMemory
from .evolution import Evolution, evolve
from .factors import ConvBlock, EmbeddingBlock, FactoredBlock, LinearBlock
from .features import entk_features, random_projection
from .jacobian import Jacobian
from .losses import Loss, check_loss, loss_value, one_hot, output_hessian, output_scale, residual
from .memory import available_memory, require_memory
from .npy import from_npy, to_npy
from .payloads import (
    Asked,
    CompressedUpload,
    JacobianUpload,
    stack_candidates,
    unstack_candidates,
)
from .pooling import Room, usable
from .privacy import check_privacy, label_epsilon, privatise

__all__ = [
    "UNQUANTISED",
    "Asked",
    "BadReply",
    "Block",
    "CompressedUpload",
    "ConvBlock",
    "DenseBlock",
    "EmbeddingBlock",
    "Encoded",
    "Evolution",
    "FactoredBlock",
    "Jacobian",
    "JacobianUpload",
    "LinearBlock",
    "Loss",
    "NotEnoughMemory",
    "Room",
    "Structure",
    "available_memory",
    "check_compression",
    "check_loss",
    "check_privacy",
    "compress",
    "entk_features",
    "evolve",
    "from_npy",
    "jacobian",
    "kept",
    "label_epsilon",
    "loss_value",
    "one_hot",
    "output_hessian",
    "output_scale",
    "privatise",
    "random_projection",
    "require_memory",
    "residual",
    "stack_candidates",
    "to_npy",
    "top_k",
    "unstack_candidates",
    "usable",
]
