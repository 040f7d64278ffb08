"""The client half of each method: NumPyClients, and the adapter that puts them on messages."""

from .adapter import client_app
from .base import ModelClient, sample_size
from .cp_ntk_fl import CPNTKFLClient
from .feature_cache import FeatureCache, cache_dir, shrink
from .ntk_fl import NTKFLClient
from .projection import SealedProjection, project
from .scaffold import SCAFFOLDClient
from .sgd import SGDClient
from .tct import TCTClient
from .weights import get_weights, set_weights

__all__ = [
    "CPNTKFLClient",
    "FeatureCache",
    "ModelClient",
    "NTKFLClient",
    "SCAFFOLDClient",
    "SGDClient",
    "SealedProjection",
    "TCTClient",
    "cache_dir",
    "client_app",
    "get_weights",
    "project",
    "sample_size",
    "set_weights",
    "shrink",
]
