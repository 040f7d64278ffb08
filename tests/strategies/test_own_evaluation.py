"""A user's own evaluation goes on working with every strategy, in every round."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader

from fedntk.clients import TCTClient, client_app, received
from fedntk.strategies import TCT

from .federation import Grid, examples, network

NUM_CLIENTS = 3
INITIAL = ArrayRecord(dict(network().state_dict()))
COUNTS = [len(examples(p)[1]) for p in range(NUM_CLIENTS)]


def loader(partition: int, noise: float = 0.0) -> DataLoader[Any]:
    x, y = examples(partition)

    class Items:
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"img": x[i] + noise * torch.randn(4), "label": int(y[i])}

    return DataLoader(Items(), batch_size=4, shuffle=True)  # type: ignore[arg-type]


def own_test(net: nn.Module, batches: DataLoader[Any]) -> tuple[float, ...]:
    """What Flower's quickstart has: sums loss and hits over batches."""
    net.eval()
    sums = np.zeros(3)
    with torch.no_grad():
        for batch in batches:
            outputs, labels = net(batch["img"]), batch["label"]
            loss = nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            sums += loss, int((outputs.argmax(1) == labels).sum()), len(labels)
    return tuple((sums / sums[2])[:2].tolist())


def app(make: Callable[..., Any], *, noise: float = 0.0, **options: Any) -> Any:
    """A client app with a user's own evaluation, by the predictor that its client makes."""

    def client_fn(context: Context) -> Any:
        partition = int(context.node_config["partition-id"])
        return make(network(), loader(partition, noise), seed=(0, partition), **options)

    own = client_app(client_fn)

    @own.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        batches = loader(int(context.node_config["partition-id"]))
        net = client_fn(context).predictor(*received(message, context))
        loss, accuracy = own_test(net, batches)
        count = int(context.node_config["partition-id"]) + 5
        values = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": count}
        return Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)

    return own


def test_tct_gives_every_evaluation_a_module_in_every_round(tmp_path):
    """Examples are augmented: they stay the same in stage 2, though clients are made anew."""
    (x, y), kinds = examples(2), []
    strategy = TCT(
        network=network(7), bootstrap=FedAvg(), bootstrap_rounds=1, num_features=40,
        learning_rate=1e-2, local_steps=2, min_available_nodes=NUM_CLIENTS,
    )  # fmt: skip

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        predictor = strategy.predictor(arrays)
        scores = predictor.predict(x)
        expected = (nn.functional.cross_entropy(scores, y), (scores.argmax(1) == y).double().mean())
        assert own_test(predictor, loader(2)) == pytest.approx(list(map(float, expected)), rel=1e-5)
        kinds.append(type(predictor).__name__)

    clients = app(TCTClient, noise=0.1, cache=tmp_path, local_epochs=1)
    grid = Grid(clients, num_clients=NUM_CLIENTS)
    result = strategy.start(grid, INITIAL, num_rounds=4, evaluate_fn=evaluate_fn)
    assert kinds == 3 * ["NetworkPredictor"] + 2 * ["TCTModel"]
    evaluated = result.evaluate_metrics_clientapp
    assert [evaluated[n]["replies-accepted"] for n in (1, 2, 3, 4)] == 4 * [NUM_CLIENTS]
    final = strategy.predictor(result.arrays)
    losses = [own_test(final, loader(p))[0] for p in range(NUM_CLIENTS)]
    expected = float(np.average(losses, weights=COUNTS))
    assert evaluated[4]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert [strategy.train_metrics[r]["examples-changed"] for r in (2, 3, 4)] == [0, 0, 0]
