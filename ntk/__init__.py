"""The mathematics: Jacobians, tangent kernels and their evolution, on only torch and numpy.

The names that most programs need are here; the folders' modules have the others.
"""

from .adapters import AdaptedNetwork, TangentLoRA, merge_adapters, with_lora
from .convex.pooled_statistics import ridge_regression
from .errors import BadReply, NotEnoughMemory
from .evolution.gradient_flow import Evolution, evolve
from .features.centred_inputs import CentredInputs
from .features.feature_map import (
    FeatureMap,
    with_fourier_features,
    with_overlap_codes,
    with_residual_features,
    with_scattering_frequencies,
)
from .features.normaliser import Moments, Normaliser
from .features.projection import random_projection
from .features.tangent import entk_features
from .jacobian.differentiate import example_gradients, gradient_norms, jacobian
from .jacobian.operator import Jacobian, gauss_newton
from .losses import Loss, loss_value, one_hot, residual
from .payloads.compression import compress
from .payloads.uploads import CompressedUpload, JacobianUpload, UploadLimits
from .predictors.conformal import (
    calibrate,
    calibrate_intervals,
    conformal_scores,
    examples_needed,
    prediction_sets,
)
from .predictors.ensemble import EnsemblePredictor, Uncertainty, entropy, uncertainty_of
from .predictors.network import NetworkPredictor, Predictor
from .predictors.prototypes import PrototypePredictor
from .predictors.targets import TargetTransform, regression_metrics
from .predictors.tct_model import TCTModel
from .support.memory import available_memory, require_disk, require_memory

__all__ = [
    "AdaptedNetwork",
    "BadReply",
    "CentredInputs",
    "CompressedUpload",
    "EnsemblePredictor",
    "Evolution",
    "FeatureMap",
    "Jacobian",
    "JacobianUpload",
    "Loss",
    "Moments",
    "NetworkPredictor",
    "Normaliser",
    "NotEnoughMemory",
    "Predictor",
    "PrototypePredictor",
    "TCTModel",
    "TangentLoRA",
    "TargetTransform",
    "Uncertainty",
    "UploadLimits",
    "available_memory",
    "calibrate",
    "calibrate_intervals",
    "compress",
    "conformal_scores",
    "entk_features",
    "entropy",
    "evolve",
    "example_gradients",
    "examples_needed",
    "gauss_newton",
    "gradient_norms",
    "jacobian",
    "loss_value",
    "merge_adapters",
    "one_hot",
    "prediction_sets",
    "random_projection",
    "regression_metrics",
    "require_disk",
    "require_memory",
    "residual",
    "ridge_regression",
    "uncertainty_of",
    "with_fourier_features",
    "with_lora",
    "with_overlap_codes",
    "with_residual_features",
    "with_scattering_frequencies",
]
