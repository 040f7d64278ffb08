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
from .convex_payloads import ConvexTask, FeatureUpload
from .convexify import FeatureKind, FeatureMap
from .differentiate import Structure, jacobian
from .errors import BadReply, NotEnoughMemory
from .evolution import Evolution, evolve
from .factors import ConvBlock, EmbeddingBlock, FactoredBlock, LinearBlock
from .feature_rows import FeatureRows
from .features import entk_features, random_projection
from .jacobian import Jacobian
from .local_steps import (
    Spectrum,
    convex_loss,
    geometric_sums,
    looped_steps,
    mean_gradient,
    residual_sum,
    ridge_regression,
)
from .losses import Loss, check_loss, loss_value, one_hot, output_hessian, output_scale, residual
from .memory import available_memory, require_disk, require_memory
from .normaliser import Moments, Normaliser
from .npy import from_npy, to_npy
from .payloads import (
    Asked,
    CompressedUpload,
    JacobianUpload,
    stack_candidates,
    unstack_candidates,
)
from .pooled_ridge import pooled_ridge
from .pooling import Room, usable
from .privacy import check_privacy, label_epsilon, privatise
from .tct_model import TCTModel

__all__ = [
    "UNQUANTISED",
    "Asked",
    "BadReply",
    "Block",
    "CompressedUpload",
    "ConvBlock",
    "ConvexTask",
    "DenseBlock",
    "EmbeddingBlock",
    "Encoded",
    "Evolution",
    "FactoredBlock",
    "FeatureKind",
    "FeatureMap",
    "FeatureRows",
    "FeatureUpload",
    "Jacobian",
    "JacobianUpload",
    "LinearBlock",
    "Loss",
    "Moments",
    "Normaliser",
    "NotEnoughMemory",
    "Room",
    "Spectrum",
    "Structure",
    "TCTModel",
    "available_memory",
    "check_compression",
    "check_loss",
    "check_privacy",
    "compress",
    "convex_loss",
    "entk_features",
    "evolve",
    "from_npy",
    "geometric_sums",
    "jacobian",
    "kept",
    "label_epsilon",
    "looped_steps",
    "loss_value",
    "mean_gradient",
    "one_hot",
    "output_hessian",
    "output_scale",
    "pooled_ridge",
    "privatise",
    "random_projection",
    "require_disk",
    "require_memory",
    "residual",
    "residual_sum",
    "ridge_regression",
    "stack_candidates",
    "to_npy",
    "top_k",
    "unstack_candidates",
    "usable",
]
