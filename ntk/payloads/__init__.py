"""Messages between clients and server: checked dataclasses, compression, array format."""

from .agreement import Agreement
from .compression import UNQUANTISED, CompressionOptions, check_compression
from .convex_task import ConvexOptions, ConvexTask, MessageTask
from .ensemble_arrays import EnsembleArrays
from .feature_statistics import FeatureStatistics, SumFormat, SumStep, packed_size, sums_digest
from .feature_upload import FeatureUpload
from .jacobian_parcel import JacobianParcel
from .leave_one_out import screen_harmful
from .masked_average import AverageTask, average_digest, average_of, average_words
from .npy import from_npy, to_npy
from .privacy import check_privacy, label_epsilon
from .prototypes import GLOBAL_PROTOTYPES, Prototypes
from .screening import (
    OUTLIER_FACTOR,
    STRANGER_FACTOR,
    MemoryBudget,
    change_size,
    screen_changes,
    screen_losses,
    screen_sizes,
    screen_strangers,
    screen_uploads,
)
from .split_statistics import SplitStatistics, draw_held_out
from .sum_task import NoiseOptions, SumOptions, SumTask

__all__ = [
    "GLOBAL_PROTOTYPES",
    "OUTLIER_FACTOR",
    "STRANGER_FACTOR",
    "UNQUANTISED",
    "Agreement",
    "AverageTask",
    "CompressionOptions",
    "ConvexOptions",
    "ConvexTask",
    "EnsembleArrays",
    "FeatureStatistics",
    "FeatureUpload",
    "JacobianParcel",
    "MemoryBudget",
    "MessageTask",
    "NoiseOptions",
    "Prototypes",
    "SplitStatistics",
    "SumFormat",
    "SumOptions",
    "SumStep",
    "SumTask",
    "average_digest",
    "average_of",
    "average_words",
    "change_size",
    "check_compression",
    "check_privacy",
    "draw_held_out",
    "from_npy",
    "label_epsilon",
    "packed_size",
    "screen_changes",
    "screen_harmful",
    "screen_losses",
    "screen_sizes",
    "screen_strangers",
    "screen_uploads",
    "sums_digest",
    "to_npy",
]
