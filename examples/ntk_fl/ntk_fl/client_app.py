"""The clients: each sends the Jacobian of its images."""

from flwr.app import Context

from fedntk.clients import NTKFLClient, client_app
from ntk_fl.task import make_network, split


def client_fn(context: Context) -> NTKFLClient:
    """Make the client of one partition."""
    node = context.node_config
    partitioner = split(node["num-partitions"], context.run_config["alpha"])
    return NTKFLClient(make_network(), partitioner.load_partition(node["partition-id"]))


app = client_app(client_fn)
