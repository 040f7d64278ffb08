"""Strategies and clients that do not go together say so, and what would."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedntk.clients import (
    CPNTKFLClient,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
)
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD, TCT, NoUsableReply, SeededFedAvg

from .federation import Grid, app, bits, network, start

NUM_CLIENTS = 2

OFF: dict[str, Any] = {"fraction_evaluate": 0.0}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "SeededFedAvg": lambda **o: SeededFedAvg(**OFF | o),
    "SCAFFOLD": lambda **o: SCAFFOLD(**OFF | o),
    "NTKFL": lambda **o: NTKFL(learning_rate=0.1, **OFF | o),
    "CPNTKFL": lambda **o: CPNTKFL(learning_rate=0.1, **OFF | o),
    "TCT": lambda **o: TCT(
        network=network(), bootstrap=SeededFedAvg(**OFF), bootstrap_rounds=1, **OFF | o
    ),
}
CLIENTS: dict[str, type[NumPyClient]] = {
    "SeededFedAvg": SGDClient,
    "SCAFFOLD": SCAFFOLDClient,
    "NTKFL": NTKFLClient,
    "CPNTKFL": CPNTKFLClient,
    "TCT": TCTClient,
}


def run(strategy: Strategy, clients: ClientApp, rounds: int = 1, **options: Any) -> Any:
    return start(strategy, Grid(clients, num_clients=NUM_CLIENTS), rounds, **options)


def refused(strategy: Strategy, clients: ClientApp, **options: Any) -> str:
    """What the run says in the end."""
    with pytest.raises(NoUsableReply) as caught:
        run(strategy, clients, **options)
    return str(caught.value).partition("the last refused: ")[2]


@pytest.mark.parametrize(
    ("strategy", "client"), list(zip(STRATEGIES, [*list(CLIENTS)[1:], "SeededFedAvg"], strict=True))
)
def test_a_strategy_names_its_own_clients_to_others(strategy, client, tmp_path):
    options = {"cache": tmp_path} if client == "TCT" else {}
    expected, sent = CLIENTS[strategy], CLIENTS[client]
    assert refused(STRATEGIES[strategy](), app(sent, **options)) == (
        f"ValueError: {strategy} takes {expected.replies}, and {sent.__name__} replies with "
        f"{sent.replies}; have client_fn return a {expected.__name__}"
    )


def stock_app() -> ClientApp:
    """Replies with the weights that came, as an app of Flower's own does."""
    own = ClientApp()

    @own.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 10})
        arrays = message.content["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return own


@pytest.mark.parametrize("strategy", ["SCAFFOLD", "NTKFL", "CPNTKFL"])
def test_weights_of_a_stock_app_are_told_from_what_is_expected(strategy):
    expected = CLIENTS[strategy]
    said = refused(STRATEGIES[strategy](), stock_app())
    assert said.endswith(
        f"weights came, not {expected.replies}: is the client a {expected.__name__}?"
    )


def test_a_stock_app_does_in_stage_1_of_tct_and_not_in_stage_2():
    strategy = STRATEGIES["TCT"](normalise=False, num_features=5)
    run(strategy, stock_app(), rounds=2)
    assert strategy.train_metrics[1]["replies-accepted"] == NUM_CLIENTS
    assert strategy.train_metrics[2]["replies-accepted"] == 0
    assert "error" in strategy.last_refusal.lower() or "KeyError" in strategy.last_refusal


@pytest.mark.parametrize("client", ["SCAFFOLD", "TCT"])
def test_a_stock_strategy_is_told_from_the_clients_own(client, tmp_path, caplog):
    """Flower's FedAvg hears of it as the clients' errors, and its run goes on."""
    options = {"cache": tmp_path} if client == "TCT" else {}
    with caplog.at_level("INFO", "flwr"):
        run(FedAvg(**OFF), app(CLIENTS[client], **options))
    assert f"use fedntk.strategies.{client} on the server" in caplog.text


@pytest.mark.parametrize("name", ["NTKFL", "CPNTKFL"])
def test_another_loss_than_the_strategys_is_refused(name):
    said = refused(STRATEGIES[name](), app(CLIENTS[name], loss="mse"))
    assert said == (
        f"ValueError: {name} has the loss cross-entropy, and {name}Client has mse; give both the "
        "same loss"
    )


# ---------------------------------------------------------------------- train_config


def trained(config: dict[str, Any], kind: type[NumPyClient] = SGDClient, **own: Any) -> Any:
    strategy = STRATEGIES["SeededFedAvg" if kind is SGDClient else "SCAFFOLD"]()
    return bits(run(strategy, app(kind, **own), 2, train_config=ConfigRecord(config)))


@pytest.mark.parametrize("kind", [SGDClient, SCAFFOLDClient])
def test_a_learning_rate_in_train_config_is_that_of_the_steps(kind):
    """As Flower's quickstart sends it."""
    assert trained({"lr": 0.5}, kind) == trained({}, kind, learning_rate=0.5)
    assert trained({"lr": 0.5}, kind) != trained({}, kind)


@pytest.mark.parametrize("rate", [0.0, float("nan"), "fast"])
def test_a_learning_rate_that_is_none_is_refused(rate):
    config = ConfigRecord({"lr": rate})
    said = refused(STRATEGIES["SeededFedAvg"](), app(SGDClient), train_config=config)
    assert re.match("ValueError: lr: expected (more than 0|a finite number|float), got", said)


@pytest.mark.parametrize("name", ["NTKFL", "SeededFedAvg"])
def test_unknown_keys_of_train_config_are_refused(name):
    config = ConfigRecord({"local-epochs": 5, "colour": "blue"})
    said = refused(STRATEGIES[name](), app(CLIENTS[name]), train_config=config)
    supported = "none" if "NTK" in name else "lr, proximal-mu"
    unknown = f"unknown keys colour, local-epochs for {CLIENTS[name].__name__}"
    assert f"train_config: {unknown}; supported: {supported}. " in said


class Coloured(NTKFLClient):
    """Knows one more."""

    config_keys = NTKFLClient.config_keys | {"colour"}


class Plain(NumPyClient):
    """None of ours, which is not asked."""

    def __init__(self, *data: Any, **options: Any) -> None:
        pass

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 5, {}


@pytest.mark.parametrize(("name", "kind"), [("NTKFL", Coloured), ("SeededFedAvg", Plain)])
def test_clients_of_ones_own_may_know_more(name, kind):
    strategy = STRATEGIES[name]()
    run(strategy, app(kind), train_config=ConfigRecord({"colour": "blue"}))
    assert strategy.train_metrics[1]["replies-accepted"] == NUM_CLIENTS
