"""The Flower app's components, by a name that Flower finds without importing anything.

``flwr run`` looks for the modules of an app before it sends it off. For one in a package it imports
the package, and torch with it: a second before each run.
"""

from fedntk.simulations.engine.client_app import app as client
from fedntk.simulations.engine.server_app import app as server

__all__ = ["client", "server"]
