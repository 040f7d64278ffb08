"""The clients: they train a network, then a linear model of its features."""

from flwr.app import Context

from fedntk.clients import BootstrapSGD, TCTClient, client_app
from tct.task import make_network, split


def client_fn(context: Context) -> TCTClient:
    """Make the client of one partition."""
    node, config = context.node_config, context.run_config
    partitioner = split(node["num-partitions"], config["alpha"])
    return TCTClient(
        make_network(),
        partitioner.load_partition(node["partition-id"]),
        sgd=BootstrapSGD(
            epochs=config["local-epochs"],
            batch_size=config["batch-size"],
            learning_rate=config["learning-rate"],
        ),
    )


app = client_app(client_fn)
