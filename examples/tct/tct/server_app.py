"""The server: FedAvg in the first rounds, then TCT's linear model."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedntk.strategies import TCT
from tct.task import load_data, make_network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run both stages, and save what was learned."""
    config = context.run_config
    torch.manual_seed(config["seed"])
    network = make_network()
    strategy = TCT(
        network=network,
        bootstrap=FedAvg(fraction_train=config["fraction-train"]),
        bootstrap_rounds=config["bootstrap-rounds"],
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate what a round learned on images that no client has."""
        test = load_data()[1][:]
        correct = strategy.predictor(arrays)(test["image"]).argmax(1) == test["label"]
        return MetricRecord({"accuracy": correct.float().mean().item()})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network.state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    strategy.predictor(result.arrays).save("tct_model")
