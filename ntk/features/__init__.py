"""Tangent features of examples: their map, rows on disk, and their normaliser; projections."""

from .centred_inputs import CENTRE, INPUT_SUMS, CentredInputs
from .feature_map import FeatureKind, FeatureMap, with_fourier_features
from .fixed_point import FixedPoint
from .normaliser import Moments, Normaliser
from .projection import low_frequencies, random_projection, rotated_low_frequencies
from .rows import FeatureRows
from .tangent import TangentFeatures, entk_features

__all__ = [
    "CENTRE",
    "INPUT_SUMS",
    "CentredInputs",
    "FeatureKind",
    "FeatureMap",
    "FeatureRows",
    "FixedPoint",
    "Moments",
    "Normaliser",
    "TangentFeatures",
    "entk_features",
    "low_frequencies",
    "random_projection",
    "rotated_low_frequencies",
    "with_fourier_features",
]
