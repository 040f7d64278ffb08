"""Strategies and clients that do not go together say so, and what would."""

import itertools

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedntk.clients import (
    CPNTKFLClient,
    LocalSGD,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
)
from fedntk.strategies import CPNTKFL, NTKFL, SCAFFOLD, TCT, NoUsableReply, SeededFedAvg

from .federation import Grid, app, bits, network, start

OFF = {"fraction_evaluate": 0.0}
BOOTSTRAP = {"network": network(), "bootstrap": SeededFedAvg(**OFF), "bootstrap_rounds": 1}
MADE = {
    SGDClient: lambda: SeededFedAvg(**OFF),
    SCAFFOLDClient: lambda: SCAFFOLD(**OFF),
    NTKFLClient: lambda: NTKFL(learning_rate=0.1, **OFF),
    CPNTKFLClient: lambda: CPNTKFL(learning_rate=0.1, **OFF),
    TCTClient: lambda: TCT(normalise=False, num_features=5, **BOOTSTRAP, **OFF),
}


def run(strategy, clients, rounds=1, **config):
    options = {"train_config": ConfigRecord(config)} if config else {}
    return start(strategy, Grid(clients, num_clients=2), rounds, **options)


def stock_app():
    """Replies with the weights that came, as an app of Flower's own does."""
    own = ClientApp()

    @own.train()
    def train(message, context):
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 10})
        arrays = message.content["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return own


UNKNOWN = {"local-epochs": 5, "colour": "blue"}
SAID = "train_config: unknown keys colour, local-epochs for"
MISMATCHES = [
    *(
        (own, app(other), {}, f"takes {own.replies}, and {other.__name__} replies with "
         f"{other.replies}; have client_fn return a {own.__name__}")
        for own, other in itertools.pairwise([*MADE, SGDClient])
    ),
    *(
        (own, stock_app(), {}, f"weights came, not {own.replies}: is the client a {own.__name__}?")
        for own in (SCAFFOLDClient, NTKFLClient, CPNTKFLClient)
    ),
    *(
        (own, app(own, loss="mse"), {},
         f"has the loss cross-entropy, and {own.__name__} has mse; give both the same loss")
        for own in (NTKFLClient, CPNTKFLClient)
    ),
    (SGDClient, app(SGDClient), {"lr": 0.0}, "ValueError: lr: expected more than 0, got"),
    (SGDClient, app(SGDClient), {"lr": "fast"}, "ValueError: lr: expected float, got"),
    (SGDClient, app(SGDClient), UNKNOWN, f"{SAID} SGDClient; supported: lr, proximal-mu. "),
    (NTKFLClient, app(NTKFLClient), UNKNOWN, f"{SAID} NTKFLClient; supported: none. "),
]  # fmt: skip


@pytest.mark.parametrize(("own", "clients", "config", "message"), MISMATCHES)
def test_what_does_not_go_together_is_named_with_its_cure(own, clients, config, message):
    with pytest.raises(NoUsableReply) as caught:
        run(MADE[own](), clients, **config)
    assert message in str(caught.value).partition("the last refused: ")[2]


@pytest.mark.parametrize("client", [SCAFFOLDClient, TCTClient])
def test_a_stock_strategy_is_told_from_the_clients_own(client, caplog):
    """Flower's FedAvg hears of it as the clients' errors, and its run goes on."""
    with caplog.at_level("INFO", "flwr"):
        run(FedAvg(**OFF), app(client))
    name = client.__name__.removesuffix("Client")
    assert f"use fedntk.strategies.{name} on the server" in caplog.text


# ---------------------------------------------------------------------- train_config


@pytest.mark.parametrize("kind", [SGDClient, SCAFFOLDClient])
def test_a_learning_rate_in_train_config_is_that_of_the_steps(kind):
    def trained(**own):
        return bits(run(MADE[kind](), app(kind, **own), 2))

    sent = bits(run(MADE[kind](), app(kind), 2, lr=0.5))
    assert sent == trained(sgd=LocalSGD(learning_rate=0.5)) != trained()


class Coloured(NTKFLClient):
    config_keys = NTKFLClient.config_keys | {"colour"}


def test_clients_of_ones_own_may_know_more():
    run(strategy := MADE[NTKFLClient](), app(Coloured), colour="blue")
    assert strategy.train_metrics[1]["replies-accepted"] == 2
