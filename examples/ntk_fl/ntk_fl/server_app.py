"""The server: finds the weights of each round by NTK-FL."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedntk.strategies import NTKFL
from ntk_fl.task import load_data, make_network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, and save the network."""
    config = context.run_config
    torch.manual_seed(config["seed"])
    strategy = NTKFL(learning_rate=config["learning-rate"], fraction_train=config["fraction-train"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_network().state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), "ntk_fl.pt")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the network on images that no client has."""
    model, test = make_network(), load_data()[1][:]
    model.load_state_dict(arrays.to_torch_state_dict())
    correct = model(test["image"]).argmax(1) == test["label"]
    return MetricRecord({"accuracy": correct.float().mean().item()})
