"""The client half of each method: NumPyClients, and the adapter that puts them on messages."""

from .adapter import client_app
from .base import ModelClient
from .ntk_fl import NTKFLClient
from .sgd import SGDClient
from .weights import get_weights, set_weights

__all__ = [
    "ModelClient",
    "NTKFLClient",
    "SGDClient",
    "client_app",
    "get_weights",
    "set_weights",
]
