"""A user's own evaluation goes on working with every strategy, in every round."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedntk.clients import (
    NTKFLClient,
    TCTClient,
    client_app,
    received,
)
from fedntk.ntk import NetworkPredictor
from fedntk.strategies import NTKFL, TCT

from .federation import Grid, examples, network

NUM_CLIENTS = 3
INITIAL = ArrayRecord(dict(network().state_dict()))
COUNTS = [len(examples(p)[1]) for p in range(NUM_CLIENTS)]


def loader(partition: int) -> DataLoader[Any]:
    x, y = examples(partition)
    items = [{"img": x[i], "label": int(y[i])} for i in range(len(x))]
    return DataLoader(items, batch_size=4, shuffle=True)  # type: ignore[arg-type]


def test_of_a_user(net: nn.Module, batches: DataLoader[Any], device: str) -> tuple[float, float]:
    """What Flower's quickstart has: moves the network, and sums loss and hits over batches."""
    net.to(device)
    net.eval()
    criterion = nn.CrossEntropyLoss()
    correct, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for batch in batches:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            outputs = net(images)
            loss += criterion(outputs, labels).item() * len(labels)
            correct += int((torch.max(outputs.data, 1)[1] == labels).sum().item())
            count += len(labels)
    return loss / count, correct / count


test_of_a_user.__test__ = False  # type: ignore[attr-defined]


def app(make: Callable[..., NumPyClient], *, by_predictor: bool = False, **options: Any) -> Any:
    """A client app with a user's own evaluation, of the kind of Flower's quickstart."""

    def client_fn(context: Context) -> NumPyClient:
        partition = int(context.node_config["partition-id"])
        return make(network(), loader(partition), seed=(0, partition), **options)

    own = client_app(client_fn)

    @own.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        batches = loader(int(context.node_config["partition-id"]))
        if by_predictor:
            net: nn.Module = client_fn(context).predictor(*received(message, context))  # type: ignore[attr-defined]
        else:
            net = network(5)
            net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss, accuracy = test_of_a_user(net, batches, "cpu")
        assert list(message.content.metric_records) == []
        values = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(batches.dataset)}  # type: ignore[arg-type]
        return Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)

    return own


def test_replies_under_a_users_own_names_are_averaged_under_them():
    """They name no partition, and there are no loss and accuracy among them."""
    strategy = NTKFL(learning_rate=0.1, min_train_nodes=2, min_available_nodes=NUM_CLIENTS)
    result = strategy.start(Grid(app(NTKFLClient), num_clients=NUM_CLIENTS), INITIAL, num_rounds=2)
    final = NetworkPredictor(network())
    final.network.load_state_dict(result.arrays.to_torch_state_dict())
    own = [test_of_a_user(final, loader(p), "cpu") for p in range(NUM_CLIENTS)]
    metrics = result.evaluate_metrics_clientapp[2]
    # float32 losses of 5 ... 7 examples, in another order of the batches
    expected = pytest.approx(np.average(own, axis=0, weights=COUNTS), rel=1e-5)
    assert [metrics["eval_loss"], metrics["eval_acc"]] == expected
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (NUM_CLIENTS, 0)
    assert sorted(strategy.client_evaluations) == [0, 1, 2]


def test_tct_gives_every_evaluation_a_module_in_every_round(tmp_path):
    """Round 0, stage 1, the round of the moments, and stage 2: on the server and on clients."""
    x, y = examples(9)
    items = [{"img": x[i], "label": int(y[i])} for i in range(len(x))]
    kinds = []
    strategy = TCT(
        network=network(7), bootstrap=FedAvg(), bootstrap_rounds=1, num_features=40,
        learning_rate=1e-2, local_steps=2, min_available_nodes=NUM_CLIENTS,
    )  # fmt: skip

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> None:
        predictor = strategy.predictor(arrays)
        loss, accuracy = test_of_a_user(predictor, DataLoader(items, batch_size=3), "cpu")  # type: ignore[arg-type]
        scores = predictor.predict(x)
        assert loss == pytest.approx(float(nn.functional.cross_entropy(scores, y)), rel=1e-5)
        assert accuracy == float((scores.argmax(1) == y).double().mean())
        kinds.append(type(predictor).__name__)

    clients = app(TCTClient, by_predictor=True, cache=tmp_path, local_epochs=1)
    grid = Grid(clients, num_clients=NUM_CLIENTS)
    result = strategy.start(grid, INITIAL, num_rounds=4, evaluate_fn=evaluate_fn)
    assert kinds == 3 * ["NetworkPredictor"] + 2 * ["TCTModel"]
    evaluated = result.evaluate_metrics_clientapp
    assert [evaluated[n]["replies-accepted"] for n in (1, 2, 3, 4)] == 4 * [NUM_CLIENTS]
    final = strategy.predictor(result.arrays)
    losses = [test_of_a_user(final, loader(p), "cpu")[0] for p in range(NUM_CLIENTS)]
    expected = float(np.average(losses, weights=COUNTS))
    assert evaluated[4]["eval_loss"] == pytest.approx(expected, rel=1e-5)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Adds noise to a client's examples."""

    def __init__(self, partition: int) -> None:
        self.x, self.y = examples(partition)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + 0.1 * torch.randn(4), int(self.y[i])


def test_augmented_examples_are_the_same_through_all_of_tcts_second_stage(tmp_path):
    """Clients are made anew for each message, and would say that their examples changed."""

    def client_fn(context: Context) -> NumPyClient:
        partition = int(context.node_config["partition-id"])
        batches = DataLoader(Augmented(partition), batch_size=4, shuffle=True)
        return TCTClient(network(), batches, cache=tmp_path, seed=(0, partition))

    options = {"num_features": 40, "local_steps": 2, "min_available_nodes": NUM_CLIENTS}
    strategy = TCT(network=network(), bootstrap=FedAvg(), bootstrap_rounds=1, **options)
    strategy.start(Grid(client_app(client_fn), num_clients=NUM_CLIENTS), INITIAL, num_rounds=4)
    assert [strategy.train_metrics[r]["examples-changed"] for r in (2, 3, 4)] == [0, 0, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_predictor_gives_its_scores_in_any_mode_of_autograd(mode):
    strategy = TCT(network=network(), normalise=False, num_features=40)
    arrays = strategy.begin(INITIAL, 3, 0)
    strategy.linear_rounds = 1
    named = {name: array.numpy().copy() for name, array in arrays.items()}
    named["tct.linear"] = np.random.default_rng(0).standard_normal((40, 3)).astype("f4")
    (x, _), model = examples(4), strategy.predictor(named)
    expected = strategy.predictor(named).predict(x)
    with mode():
        inside: Tensor = x.clone()  # an inference tensor, in inference mode
        for scores in (model(x), model(inside), strategy.predictor(named).eval()(inside)):
            assert torch.equal(scores.detach(), expected)
