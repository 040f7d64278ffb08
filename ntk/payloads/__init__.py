"""What travels between clients and server: checked dataclasses, compression, array format."""

from .agreement import Agreement
from .compressed_upload import CompressedUpload
from .compression import UNQUANTISED, Encoded, check_compression, compress, num_kept, top_k
from .convex_task import ConvexTask, Solve
from .ensemble_arrays import EnsembleArrays
from .evolution_task import EvolutionTask
from .feature_statistics import (
    FEATURE_GRAM,
    FeatureStatistics,
    packed_size,
    sums_digest,
    word_dtype,
)
from .feature_upload import FeatureUpload
from .jacobian_format import jacobian_from_arrays, jacobian_to_arrays
from .jacobian_parcel import JacobianParcel
from .jacobian_upload import JacobianUpload
from .limits import UploadLimits
from .npy import from_npy, to_npy
from .privacy import check_privacy, label_epsilon, privatise
from .prototypes import GLOBAL_PROTOTYPES, Prototypes
from .screening import (
    OUTLIER_FACTOR,
    MemoryBudget,
    change_size,
    screen_changes,
    screen_losses,
    screen_sizes,
    screen_uploads,
)
from .split_statistics import SplitStatistics, draw_held_out

__all__ = [
    "FEATURE_GRAM",
    "GLOBAL_PROTOTYPES",
    "OUTLIER_FACTOR",
    "UNQUANTISED",
    "Agreement",
    "CompressedUpload",
    "ConvexTask",
    "Encoded",
    "EnsembleArrays",
    "EvolutionTask",
    "FeatureStatistics",
    "FeatureUpload",
    "JacobianParcel",
    "JacobianUpload",
    "MemoryBudget",
    "Prototypes",
    "Solve",
    "SplitStatistics",
    "UploadLimits",
    "change_size",
    "check_compression",
    "check_privacy",
    "compress",
    "draw_held_out",
    "from_npy",
    "jacobian_from_arrays",
    "jacobian_to_arrays",
    "label_epsilon",
    "num_kept",
    "packed_size",
    "privatise",
    "screen_changes",
    "screen_losses",
    "screen_sizes",
    "screen_uploads",
    "sums_digest",
    "to_npy",
    "top_k",
    "word_dtype",
]
