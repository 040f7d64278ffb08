"""The mathematics: Jacobians, tangent kernels and their evolution, on torch and numpy alone.

The names that most programs need are here; each room (``jacobian``, ``evolution``, ``features``,
``convex``, ``payloads``) has all of its own.
"""

from . import support  # noqa: F401 - before torch: it sets how torch's threads wait
from .convex import TCTModel, ridge_regression
from .errors import BadReply, NotEnoughMemory
from .evolution import Evolution, evolve
from .features import (
    CentredInputs,
    FeatureMap,
    Moments,
    Normaliser,
    entk_features,
    random_projection,
    with_fourier_features,
)
from .jacobian import Jacobian, jacobian
from .losses import Loss, loss_value, one_hot, residual
from .payloads import CompressedUpload, JacobianUpload, UploadLimits, compress, privatise
from .predictors.conformal import calibrate, conformal_scores, examples_needed, prediction_sets
from .predictors.ensemble import EnsemblePredictor, Uncertainty, entropy, uncertainty_of
from .predictors.network import NetworkPredictor, Predictor
from .predictors.prototypes import PrototypePredictor
from .support.memory import available_memory, require_disk, require_memory

__all__ = [
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
    "Uncertainty",
    "UploadLimits",
    "available_memory",
    "calibrate",
    "compress",
    "conformal_scores",
    "entk_features",
    "entropy",
    "evolve",
    "examples_needed",
    "jacobian",
    "loss_value",
    "one_hot",
    "prediction_sets",
    "privatise",
    "random_projection",
    "require_disk",
    "require_memory",
    "residual",
    "ridge_regression",
    "uncertainty_of",
    "with_fourier_features",
]
