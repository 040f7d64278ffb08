"""What is refused by name: options beyond limits, and options and clients that do not fit."""

import functools
import inspect
import itertools
import math

import networkx as nx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg
from torch import nn

import fedntk.clients
from fedntk.clients import (
    CPNTKFLClient,
    LocalSGD,
    NTKFLClient,
    SCAFFOLDClient,
    SGDClient,
    TCTClient,
)
from fedntk.ntk.convex.private_sums import SumNoise
from fedntk.ntk.options import Declared, parts_of
from fedntk.strategies import (
    CPNTKFL,
    NTKDFL,
    NTKFL,
    SCAFFOLD,
    TCT,
    CentreInputs,
    DFedAvg,
    Distillation,
    FeatureSums,
    FedBE,
    FedEnsemble,
    FedPer,
    FromFlower,
    KeptSums,
    Ledger,
    NoUsableReply,
    OneExchange,
    Screening,
    SecureAggregation,
    SeededFedAvg,
    Topology,
    WeightAverage,
    WeightedFedAvg,
)
from fedntk.trust import KeyServer, ShufflingServer

from .federation import Grid, app, bits, network, start
from .test_contract import CONTRACTS

SERVER = ShufflingServer([])
KEYS = KeyServer(bytes(32), [], Ed25519PrivateKey.generate())
SHARED = itertools.repeat(FedAvg())  # the same strategy at each call
UNLIKE = iter([FedAdam() if k else FedAdam(eta=0.5) for k in range(5)])
PLAIN = {"auto_ridge": False, "validation_share": 0.0}


def sums(**options):
    """Return float64 sums of no validation examples, by default."""
    return {"sums": FeatureSums(**{"bits": 32} | PLAIN | options)}


KEPT, SECURE = {"storage": KeptSums("sums")}, {"secure": SecureAggregation()}
VOUCHED = {"secure": SecureAggregation(vouching=KEYS)}
NAN = float("nan")
HELD = torch.zeros(1, 4), torch.tensor([3])
CLIPPING = functools.partial(DifferentialPrivacyServerSideFixedClipping, FedAvg(), 1.0, 1.0, 6)
BOTH = {"validation_partitions": (1,), "screening": Screening(validation_loss=lambda arrays: 0.0)}
SHUFFLED = {"shuffling_server": SERVER, "run": "a run"}
CENTRED = {"centre": CentreInputs()}
LATE = {"asynchrony": True, "round_deadline": 60}
MEDIAN = {"screening": Screening("median")}
NET = nn.Linear(4, 3)
EVOLUTION = {"learning_rate": 0.1, "steps": [5, 20, 50]}
ntk_fl = functools.partial(NTKFL, **EVOLUTION)
cp_ntk_fl = functools.partial(CPNTKFL, **EVOLUTION)
weighted = functools.partial(WeightedFedAvg, network=NET)
fed_per = functools.partial(FedPer, network=NET)
one_exchange = functools.partial(OneExchange, network=NET)
tct = functools.partial(TCT, network=NET)
own_graph = functools.partial(Topology, "own")
DISTILLED = {"network": NET, "examples": torch.ones(5, 4)}
distillation = functools.partial(
    Distillation, **DISTILLED, learning_rate=0.05, final_learning_rate=0.01
)


class Noisy(SeededFedAvg):
    @classmethod
    def mechanism_of(cls, options):
        return SumNoise


REFUSED = [
    (SeededFedAvg, {"min_completed": 2.5}, "min_completed: expected a whole number, or a"),
    (ntk_fl, MEDIAN, "screening.rule: expected none or leave-one-out for NTKFL, got median"),
    (weighted, MEDIAN, "screening.rule: expected none or norm-bound for WeightedFedAvg"),
    (FedEnsemble, {"inner": SeededFedAvg} | MEDIAN, "that of inner, which follows it, none"),
    (Screening, {"rule": "validation"}, "validation_loss: expected one"),
    (cp_ntk_fl, SHUFFLED | {"screening": Screening("leave-one-out")}, "do not say whose they are"),
    (SeededFedAvg, SECURE | CENTRED, "centre: expected None with secure aggregation"),
    (SeededFedAvg, SECURE | MEDIAN, "no client's weights under secure aggregation"),
    (one_exchange, {"ledger": Ledger(0.05)}, "ledger: expected storage"),
    (one_exchange, {"ledger": Ledger(0.05)} | KEPT, "ledger.alpha = 0.05: pass sums.validation"),
    (one_exchange, LATE | SECURE, "cancel only if all answer in one round"),
    (one_exchange, LATE | sums(), "sums in any order need sums.bits = 2 ... 8, got 32"),
    (
        functools.partial(FromFlower, SCAFFOLD()),
        {},
        "strategy: expected another one's, got SCAFFOLD",
    ),
    (ntk_fl, {"steps": (2, 1)}, "steps: expected increasing times"),
    (ntk_fl, {"class_prior": True, "loss": "mse"}, "expected the loss cross-entropy"),
    (ntk_fl, {"class_target": "seen"}, "'seen' goes with class_prior=True, got False"),
    (ntk_fl, {"selection": "validation"}, "goes with screening.validation_loss or"),
    (ntk_fl, {"selection": "validation"} | BOTH, "not both"),
    (FedBE, {"distill": torch.ones(3)}, "expected a Distillation(network, examples), got"),
    (distillation, {"final_learning_rate": 1.0}, "expected at most learning_rate = 0.05"),
    (distillation, {"examples": torch.full((5, 4), NAN)}, "examples: expected finite numbers"),
    (distillation, {"examples": torch.ones(5, 9)}, "does not take two of them, of shape (9,)"),
    (FedEnsemble, {"inner": SHARED.__next__}, "expected a new strategy at each call"),
    (FedEnsemble, {"inner": FedEnsemble}, "expected a strategy of one model"),
    (FedEnsemble, {"inner": UNLIKE.__next__}, "model 1's differs in inner"),
    (FedEnsemble, {"inner": CLIPPING}, "expected a strategy that aggregates itself, got"),
    (FedEnsemble, {"inner": tct}, "a round shows only some of the clients"),
    (FedEnsemble, {"inner": Noisy}, "noise is refused within a FedEnsemble"),
    (weighted, {"personal_batch_norm": True}, "personal_batch_norm: the network has no BatchNorm"),
    (FedEnsemble, {"inner": FedBE, "average": WeightAverage(0.5)}, "None with models by FedBE"),
    (NTKDFL, {"bits": 17}, "bits: expected 1 ... 16"),
    (NTKDFL, {"evolve_once": True}, "evolve_once: expected clusters whose members average"),
    (DFedAvg, {"vouching": KEYS, "seal": True}, "vouching: expected seal = True and the name"),
    (Topology, {"kind": "own"}, "expected one with topology = 'own'"),
    (own_graph, {"graph": nx.DiGraph([(0, 1)])}, "got a DiGraph; give graph.to_undirected()"),
    (tct, {"bootstrap": SCAFFOLD()}, "bootstrap: expected a strategy whose replies are one set"),
    (tct, SECURE, "secure: goes with sums, got sums = None"),
    (tct, KEPT, "storage: goes with sums, got sums = None"),
    (tct, {"balanced": True}, "balanced: goes with sums, got sums = None"),
    (tct, sums() | {"loss": "cross-entropy"}, "loss: expected mse with sums"),
    (tct, {"head": "7"}, "head: expected the name of the network's last nn.Linear"),
    (tct, sums(auto_ridge=True), "auto_ridge = True: pass sums.validation"),
    (tct, sums(bits=8), "sums.bits = 8: pass sums.validation"),
    (tct, sums(bits=8) | {"balanced": True}, "balanced: sums of weighted examples"),
    (sums, {"validation_share": 0.2}, "validation_share: goes with auto_ridge"),
    (tct, sums() | KEPT | {"balanced": True}, "expected balanced = False"),
    (tct, sums(validation=HELD), "sums.validation: expected labels 0 ... 2, got 3 ... 3"),
    (tct, sums() | SECURE, "masks are added to whole numbers"),
    (tct, sums(bits=8) | SECURE | KEPT, "no client's sums to keep"),
    (tct, sums(bits=8) | VOUCHED, "the name of the run"),
    (cp_ntk_fl, SHUFFLED | CENTRED, "which helps to tell rows apart"),
    (cp_ntk_fl, {"shuffling_server": SERVER}, "shuffling_server: name the training run"),
]


def outside(option):
    """List values that an option's limits exclude, at each of them, and one of another type."""
    past = {"at_least": -1, "at_most": 1, "above": 0, "below": 0}
    numbers = [
        bound + past[limit] for limit, bound in option.limits.items() if math.isfinite(bound)
    ]
    if option.limits and isinstance(option.default, float):
        numbers.append(math.nan)
    if isinstance(option.default, tuple):
        return [(number,) for number in numbers]
    words = ["nonsense"] if option.choices or isinstance(option.default, int | float) else []
    return numbers + words


EXAMPLES = {"model": NET, "x": torch.zeros(2, 4), "y": torch.arange(2)}
MADE = [distillation(), *(case.strategy() for case in CONTRACTS.values())]
# class -> what it takes besides options
KINDS = {type(made): vars(made) for made in MADE} | {
    kind: EXAMPLES
    for kind in map(vars(fedntk.clients).get, fedntk.clients.__all__)
    if isinstance(kind, type) and issubclass(kind, Declared)
}
KINDS |= {part.kind: {} for kind in list(KINDS) for part in parts_of(kind).values()}
# what several methods inherit is tried with one of them
DECLARED = {
    option.name + str(option): (kind, option)
    for kind in KINDS
    for option in kind.options().values()
}
LIMITS = [
    pytest.param(kind, option, value, id=f"{kind.__name__}-{option.name}-{value}")
    for kind, option in DECLARED.values()
    for value in outside(option)
]


@pytest.mark.parametrize(("kind", "option", "value"), LIMITS)
def test_an_option_beyond_its_limits_is_refused_by_name(kind, option, value):
    required = {
        name: KINDS[kind].get(name, 0.1)
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    with pytest.raises(ValueError, match=rf"^{option.name}: expected .*, got"):
        kind(**required | {option.name: value})


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_arguments_are_refused_by_name(make, options, message):
    with pytest.raises(ValueError) as caught:
        make(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (fed_per, {"average": WeightAverage(0.5)}),
        (tct, {"average": WeightAverage(0.5)}),
        (NTKDFL, CENTRED),
        (functools.partial(FromFlower, FedAvg()), SECURE),
    ],
)
def test_a_part_that_a_method_cannot_have_is_no_argument_of_it(make, options):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(options))}'"):
        make(**options)


# ------------------------------------- strategies and clients that do not go together

OFF = {"fraction_evaluate": 0.0}
BOOTSTRAP = {"network": network(), "bootstrap": SeededFedAvg(**OFF), "bootstrap_rounds": 1}
STRATEGY_FOR = {
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
    stock = ClientApp()

    @stock.train()
    def train(message, context):
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 10})
        arrays = message.content["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return stock


UNKNOWN = {"local-epochs": 5, "colour": "blue"}
SAID = "train_config: unknown keys colour, local-epochs for"
MISMATCHES = [
    *(
        (client, app(other), {}, f"takes {client.replies}, and {other.__name__} replies with "
         f"{other.replies}; have client_fn return a {client.__name__}")
        for client, other in itertools.pairwise([*STRATEGY_FOR, SGDClient])
    ),
    *(
        (client, stock_app(), {},
         f"weights came, not {client.replies}: is the client a {client.__name__}?")
        for client in (SCAFFOLDClient, NTKFLClient, CPNTKFLClient)
    ),
    *(
        (client, app(client, loss="mse"), {},
         f"has the loss cross-entropy, and {client.__name__} has mse; give both the same loss")
        for client in (NTKFLClient, CPNTKFLClient)
    ),
    (SGDClient, app(SGDClient), {"lr": 0.0}, "ValueError: lr: expected more than 0, got"),
    (SGDClient, app(SGDClient), {"lr": "fast"}, "ValueError: lr: expected float, got"),
    (SGDClient, app(SGDClient), UNKNOWN, f"{SAID} SGDClient; supported: lr, proximal-mu. "),
    (NTKFLClient, app(NTKFLClient), UNKNOWN, f"{SAID} NTKFLClient; supported: none. "),
]  # fmt: skip


@pytest.mark.parametrize(("client", "clients", "config", "message"), MISMATCHES)
def test_what_does_not_go_together_is_named_with_its_cure(client, clients, config, message):
    with pytest.raises(NoUsableReply) as caught:
        run(STRATEGY_FOR[client](), clients, **config)
    assert message in str(caught.value).partition("the last refused: ")[2]


@pytest.mark.parametrize("client", [SCAFFOLDClient, TCTClient])
def test_a_stock_strategy_is_told_from_the_clients_own(client, caplog):
    """Flower's FedAvg hears of it as the clients' errors, and its run goes on."""
    with caplog.at_level("INFO", "flwr"):
        run(FedAvg(**OFF), app(client))
    name = client.__name__.removesuffix("Client")
    assert f"use fedntk.strategies.{name} on the server" in caplog.text


@pytest.mark.parametrize("kind", [SGDClient, SCAFFOLDClient])
def test_a_learning_rate_in_train_config_is_that_of_the_steps(kind):
    def trained(**options):
        return bits(run(STRATEGY_FOR[kind](), app(kind, **options), 2))

    sent = bits(run(STRATEGY_FOR[kind](), app(kind), 2, lr=0.5))
    assert sent == trained(sgd=LocalSGD(learning_rate=0.5)) != trained()


class Coloured(NTKFLClient):
    config_keys = NTKFLClient.config_keys | {"colour"}


def test_clients_of_ones_own_may_know_more():
    run(strategy := STRATEGY_FOR[NTKFLClient](), app(Coloured), colour="blue")
    assert strategy.train_metrics[1]["replies-accepted"] == 2
