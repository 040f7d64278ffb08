"""Features of examples: their map, rows on disk, normaliser, projections."""

from .centred_inputs import CENTRE, INPUT_SUMS
from .feature_map import record_input
from .fixed_point import MOST_BITS, FixedPoint
from .projection import low_frequencies, rotated_low_frequencies
from .residual import RESIDUAL_LAYER, ResidualFeatures
from .rows import FeatureRows

__all__ = [
    "CENTRE",
    "INPUT_SUMS",
    "MOST_BITS",
    "RESIDUAL_LAYER",
    "FeatureRows",
    "FixedPoint",
    "ResidualFeatures",
    "low_frequencies",
    "record_input",
    "rotated_low_frequencies",
]
