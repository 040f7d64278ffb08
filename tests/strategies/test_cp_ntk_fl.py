"""CPNTKFL: no tool is NTK-FL, shuffling changes no bit, and each tool's limits."""

import gc
import struct
from dataclasses import replace
from logging import WARNING
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient
from torch import nn

from fedntk.clients import (
    CPNTKFLClient,
    NTKFLClient,
    SealedProjection,
    SGDClient,
    client_app,
    get_weights,
    project,
)
from fedntk.ntk import BadReply
from fedntk.simulations.engine.engines import MeteredGrid
from fedntk.strategies import CPNTKFL, NTKFL, NoUsableReply, SeededFedAvg
from fedntk.strategies.ntk.accounting import epsilon_after
from fedntk.trust import ClientKeys, KeyServer, ShufflingServer, new_key, public_bytes

from .federation import (
    NUM_CLIENTS,
    Contract,
    Grid,
    app,
    bits,
    damaged,
    examples,
    failed,
    initial_bits,
    lost,
    run_as_if_lost,
    start,
    start_in_vain,
    with_metrics,
)

RUN = "a run"
OPTIONS = {
    "learning_rate": 0.1, "steps": [5, 20, 50], "min_available_nodes": 6,
    "fraction_train": 1.0, "fraction_evaluate": 0.0,
}  # fmt: skip
TOOLS = {"sparsity": 0.3, "bits": 8}
CONTRACT = {
    "CPNTKFL": Contract(
        lambda **options: CPNTKFL(**{"learning_rate": 0.1, "steps": [5, 20, 50]} | TOOLS | options),
        app(CPNTKFLClient, **TOOLS),
        sends_queries=True,
    )
}


class SortedRows(NTKFL):
    """NTK-FL that adds up rows in the order of their bytes, whoever sent them."""

    def pooled(self, uploads, metrics):
        return super().pooled(uploads, metrics).canonical()


def test_without_tools_it_is_ntk_fl_of_sorted_rows():
    plain = start(SortedRows(**OPTIONS), Grid(app(NTKFLClient)), rounds=2)
    assert bits(start(CPNTKFL(**OPTIONS), Grid(app(CPNTKFLClient)), rounds=2)) == bits(plain)


# ---------------------------------------------------------------------- shuffling


def shuffled(changes=None, server=None, in_vain=False, tools=TOOLS):
    server = server or ShufflingServer()
    clients = app(CPNTKFLClient, shuffling_key=server.public_key, run=RUN, **tools)
    strategy = CPNTKFL(**OPTIONS, **tools, shuffling_server=server, run=RUN)
    run = start_in_vain if in_vain else start
    return strategy, bits(run(strategy, Grid(clients, changes=changes), rounds=2))


def test_without_compression_sealing_and_shuffling_change_no_bit():
    """Rows are sorted by their bytes, whoever permuted them before."""
    strategy, weights = shuffled(tools={})
    plain = CPNTKFL(**OPTIONS)
    assert weights == bits(start(plain, Grid(app(CPNTKFLClient)), rounds=2))
    losses = [s.train_metrics[2]["train-loss"] for s in (strategy, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bad_sealed_replies_are_dropped(caplog):
    """A flipped bit, a byte less, another dtype, nothing; as if these clients were lost."""
    change = {
        1: damaged(0, lambda a: a ^ np.uint8([1] + [0] * (len(a) - 1))),
        2: damaged(0, lambda a: a[:-1]),
        3: damaged(0, lambda a: a.astype(np.float32)),
        4: damaged(0, lambda a: a[:0]),
    }
    with caplog.at_level(WARNING, "flwr"):
        strategy, weights = shuffled(change)
    assert weights == shuffled(dict.fromkeys(change, lost))[1]
    assert strategy.train_metrics[1]["rejected-sealed"] == 4
    assert sum("dropped the reply" in message for message in caplog.messages) == 2 * 4


def test_a_false_number_of_examples_is_noticed_by_the_shuffling_server():
    strategy, weights = shuffled({2: with_metrics(num_examples=99)})
    assert strategy.train_metrics[1]["rejected-num-examples"] == 1
    assert weights == shuffled({2: lost})[1]


class Broken(ShufflingServer):
    """Answers with something else."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def shuffle(self, *args, **options):
        return self.change(super().shuffle(*args, **options))


BAD = BadReply("sealed", "no")
ANSWERS = {
    "raises": (Broken(lambda _: 1 / 0), "division by zero"),
    "none": (Broken(lambda _: None), "no attribute"),
    "too few": (ShufflingServer(min_clients=7), "nothing was shuffled"),
    "other rows": (
        Broken(lambda a: replace(a, upload=a.upload.rows(torch.arange(3)))),
        "3 rows for 45 examples",
    ),
    "unknown index": (Broken(lambda a: replace(a, rejected={99: BAD})), "out of range"),
    "negative index": (Broken(lambda a: replace(a, rejected={-1: BAD})), "rows for"),
}


@pytest.mark.parametrize("failure", sorted(ANSWERS))
def test_an_answer_that_cannot_be_used_leaves_the_model(failure, caplog):
    server, words = ANSWERS[failure]
    with caplog.at_level(WARNING, "flwr"):
        strategy, weights = shuffled(server=server, in_vain=True)
    assert weights == initial_bits()
    assert words in caplog.text
    counted = strategy.train_metrics[1]
    assert (counted["replies-accepted"], counted["rejected-shuffling"]) == (0, 6)


class Away:
    """A server that cannot be reached after so many answers."""

    def __init__(self, server, answers):
        self.server, self.answers = server, answers

    def __getattr__(self, name):
        own = getattr(self.server, name)

        def answer(*arguments, **options):
            self.answers -= 1
            if self.answers < 0:
                raise ConnectionError("no server answers at that address")
            return own(*arguments, **options)

        return answer if callable(own) else own


def test_a_shuffling_server_that_cannot_be_reached_ends_the_run_only_before_it_begins():
    with pytest.raises(ConnectionError, match="no server answers"):
        shuffled(server=Away(ShufflingServer(), 0))
    strategy, _ = shuffled(server=Away(ShufflingServer(), 1))
    assert strategy.train_metrics[1]["replies-accepted"] == 6
    assert strategy.train_metrics[2]["rejected-shuffling"] == 6


# --------------------------------------------------------------------- key server


class Parties:
    """A key server with some clients enrolled, and clients that project 4 inputs to 3."""

    def __init__(self, enrolled=range(NUM_CLIENTS), run=RUN, kind=CPNTKFLClient):
        self.private = {p: new_key() for p in range(NUM_CLIENTS)}
        keys = [public_bytes(self.private[p]) for p in enrolled]
        self.server = KeyServer(bytes(32), keys, Ed25519PrivateKey.generate())
        self.run, self.kind = run, kind
        self.app = client_app(self.client)

    def client(self, context: Context) -> NumPyClient:
        partition = int(context.node_config["partition-id"])
        if "keys" not in context.state:
            context.state["keys"] = ConfigRecord()
        keys = ClientKeys(
            self.private[partition],
            run=self.run,
            verify_key=self.server.verify_key,
            state=context.state.config_records["keys"],
        )
        x, y = examples(partition)
        return self.kind(small(), x, y, projection=SealedProjection(3, keys))


def small():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def run_projected(parties, server=None, grid=None, rounds=2, make=CPNTKFL, **options):
    """The strategy after rounds with the parties' key server, and what it learned."""
    strategy = make(**OPTIONS | options, key_server=server or parties.server, run=RUN)
    return strategy, bits(start(strategy, grid or Grid(parties.app), rounds, small()))


def accepted(strategy):
    return [m["replies-accepted"] for _, m in sorted(strategy.train_metrics.items())]


EVALUATING = {"fraction_evaluate": 1.0, "min_evaluate_nodes": 6}


@pytest.mark.parametrize(
    ("make", "kind"),
    [(CPNTKFL, CPNTKFLClient), (lambda learning_rate, steps, **o: SeededFedAvg(**o), SGDClient)],
)
def test_clients_train_choose_and_evaluate_on_projected_inputs(make, kind):
    parties = Parties(kind=kind)
    strategy, weights = run_projected(
        parties, grid=(grid := Grid(parties.app)), make=make, **EVALUATING
    )
    assert accepted(strategy) == [6, 6]
    assert strategy.evaluate_metrics[2]["replies-accepted"] == 6
    assert strategy.train_metrics[2]["train-loss"] < strategy.train_metrics[1]["train-loss"]
    asked = [kind for kind, _ in grid.exchanges]
    assert asked.count("query.keys") == 1
    assert asked.count("query") == (2 if make is CPNTKFL else 0)  # losses, each round
    grid = Grid(parties.app, order=3)
    assert weights == run_projected(parties, grid=grid, make=make, **EVALUATING)[1]


def holding(thing):
    """All that can be reached from an object, without code."""
    seen, left = {}, [thing]
    while left:
        own = left.pop()
        if id(own) not in seen and not isinstance(own, type | FunctionType | ModuleType):
            seen[id(own)] = own
            left += gc.get_referents(own)
    return list(seen.values())


def as_bytes(value):
    if isinstance(value, int):
        return value.to_bytes(40, "big", signed=True)
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    return value if isinstance(value, bytes) else str(value).encode()


def test_neither_the_strategy_nor_any_message_holds_the_seed():
    """Nor P's numbers. With the key server elsewhere, what the server is given is sealed."""
    parties = Parties()
    secret = parties.server.projection_seed(RUN)
    numbers = [number.tobytes() for number in project(torch.eye(4), 3, secret).numpy().flatten()]
    elsewhere = SimpleNamespace(sealed_seed=lambda *sent: parties.server.sealed_seed(*sent))
    strategy, _ = run_projected(parties, elsewhere, grid := Grid(parties.app), **EVALUATING)
    strategy._grid = None  # the clients, in a simulation
    contents = [message.content for _, message in grid.seen if message.has_content()]
    kinds = bytes | str | int | np.ndarray | np.generic
    held = [as_bytes(own) for own in holding([strategy, contents]) if isinstance(own, kinds)]
    assert sum(data.startswith(b"ntkseed1") for data in held) >= NUM_CLIENTS
    for data in held:
        assert not any(part in data for part in (secret, secret.hex().encode(), *numbers))


def test_a_client_that_is_not_enrolled_is_left_out_and_named(caplog):
    with caplog.at_level(WARNING, "flwr"):
        strategy, _ = run_projected(Parties(enrolled=range(5)))
    assert "is not enrolled with the key server" in caplog.text
    assert accepted(strategy) == [5, 5]
    assert strategy.train_metrics[2]["rejected-error"] == 1


def test_a_client_of_another_run_does_not_open_the_seed():
    with pytest.raises(NoUsableReply, match=r"sealed for run .*expected run 'another run'"):
        run_projected(Parties(run="another run"))


def run_losing_keys(server, nodes):
    """Three rounds; after the first some clients' states are gone."""
    parties = Parties()
    strategy = CPNTKFL(**OPTIONS, key_server=server(parties.server), run=RUN)
    grid = Grid(parties.app)

    def lose(server_round, _):
        for node in nodes if server_round == 1 else ():
            del grid.contexts[node].state["keys"]

    start(strategy, grid, 3, small(), evaluate_fn=lose)
    return accepted(strategy)


def test_a_client_that_lost_its_state_is_asked_again():
    """Its challenge is gone, so the seed does not open; the next round fetches another."""
    assert run_losing_keys(lambda server: server, [3]) == [6, 5, 6]


def test_a_key_server_that_goes_away_later_does_not_end_the_run():
    """All clients fail in the second round, and are asked for their keys again in the third."""
    assert run_losing_keys(lambda server: Away(server, 6), range(1, 7)) == [6, 0, 0]


def test_clients_without_projection_are_told_apart_from_enrolled_ones(caplog):
    parties = Parties()
    strategy = CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN)
    with caplog.at_level(WARNING, "flwr"):
        start_in_vain(strategy, Grid(app(CPNTKFLClient)))
    assert "does its client have projection=SealedProjection" in caplog.text
    assert "CPNTKFLClient projects nothing; give it projection=SealedProj" in strategy.last_refusal


def test_a_failure_of_another_kind_leaves_a_client_its_seed():
    parties = Parties()
    strategy, _ = run_projected(parties, grid=Grid(parties.app, changes={2: failed}))
    assert accepted(strategy) == [5, 5]
    assert strategy._seeds.of(3) is not None  # node 3 holds partition 2


def test_a_key_server_that_cannot_be_reached_ends_the_run_before_it_begins():
    with pytest.raises(ConnectionError, match="no server answers"):
        run_projected(parties := Parties(), Away(parties.server, 0))


# ------------------------------------------------------------ differential privacy

NOISE = {"noise_multiplier": 4.0, "label_noise": 0.2}


def private_run(rounds=3, changes=None, **options):
    half = {"fraction_train": 0.5, "min_train_nodes": 3, "selection": "linearised"}
    strategy = CPNTKFL(**OPTIONS | half | NOISE | options)
    clients = app(CPNTKFLClient, clip=1.0, noise_seed=(0,), **NOISE | options)
    grid = Grid(clients, changes=changes, changed_kind="query.partition")
    start(strategy, grid, rounds=rounds)
    return strategy


@pytest.mark.filterwarnings("ignore")  # of Opacus' imports
@pytest.mark.parametrize("known", [True, False])
def test_epsilon_is_that_of_the_client_asked_most_often(known):
    """A node without a partition that is started again has another id, and would count from 0."""
    unknown = {p: with_metrics(partition_id=None) for p in range(NUM_CLIENTS)}
    strategy = private_run(changes={} if known else unknown)
    assert all("train-loss" not in metrics for metrics in strategy.train_metrics.values())
    assert strategy.uploads_asked.total() == 3 * 3
    most = max(strategy.uploads_asked.values()) if known else 3
    expected = epsilon_after(most, num_outputs=3, delta=1e-5, **NOISE)
    assert strategy.train_metrics[3]["epsilon"] == expected < float("inf")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("own", "claims", "refused"),
    [
        (NOISE, {"noise_multiplier": 2.0}, 1),
        (NOISE, {"noise_multiplier": None}, 1),
        (NOISE, {"label_noise": 0.0}, 1),
        ({}, {}, NUM_CLIENTS),  # that no one accounts for
    ],
)
def test_a_client_with_other_noise_than_the_accountings_is_refused(own, claims, refused):
    strategy = CPNTKFL(**OPTIONS, selection="linearised", **own)
    clients = app(CPNTKFLClient, clip=1.0, noise_seed=(0,), **NOISE)
    run = start if own else start_in_vain
    run(strategy, Grid(clients, changes={2: with_metrics(**claims)}))
    assert strategy.train_metrics[1]["rejected-noise"] == refused


@pytest.mark.filterwarnings("ignore")
def test_with_exact_labels_epsilon_says_so():
    strategy = private_run(rounds=1, label_noise=0.0)
    assert "epsilon" not in strategy.train_metrics[1]
    assert strategy.train_metrics[1]["epsilon-without-labels"] > 0


# ------------------------------------------------------------------------ arguments


def test_a_client_that_sends_more_than_was_asked_for_is_dropped():
    strategy = CPNTKFL(**OPTIONS, sparsity=0.5, bits=6)
    start_in_vain(strategy, Grid(app(CPNTKFLClient, sparsity=0.5, bits=8)))
    assert strategy.train_metrics[1]["rejected-compression"] == 6


def bomb(code):
    """Declare 12 GB of inputs, none of which stayed, in a payload of a few bytes."""
    shape = (len(code), 1, 2**20 * 3)
    head = struct.pack("<BBBBQQ", 2, 32, 0, 3, 1, 0) + struct.pack("<3Q", *shape)
    return np.frombuffer(head, np.uint8)


def test_replies_that_fit_alone_but_not_together_are_dropped(monkeypatch):
    """Room for the rows of four of six clients, each three times over."""
    size = 3 * 4 * (5 + 6 + 7 + 8) * (4 + 3 * 8 + 8 + 3 * 3 + 2 * 3 * 8)
    strategy = CPNTKFL(**OPTIONS, sparsity=0.5, bits=8)
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda *_: size)
    start(strategy, Grid(app(CPNTKFLClient, sparsity=0.5, bits=8)))
    counted = strategy.train_metrics[1]
    assert 0 < counted["rejected-memory"] < 6
    assert counted["replies-accepted"] == 6 - counted["rejected-memory"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a[:-1], "compression"),
        (lambda a: np.append(a, np.uint8(0)), "compression"),
        (lambda a: np.concatenate([a[:52], a[52:] | np.uint8(255)]), "compression"),  # a bitmap
        (bomb, "shape"),
    ],
)
def test_a_payload_that_is_not_what_it_declares_is_dropped_alone(change, reason):
    tools = {"sparsity": 0.5, "bits": 8}
    clients, change = app(CPNTKFLClient, **tools), damaged(3, change)
    run_as_if_lost(lambda: CPNTKFL(**OPTIONS, **tools), clients, change, reason)


def test_bytes_up_are_the_length_of_what_is_sent():
    """Flower adds NumPy's heads of 128 bytes and its own to each array: under 600 in all."""
    tools = {"sparsity": 0.5, "bits": 6}
    client = CPNTKFLClient(small(), torch.randn(50, 3), torch.arange(50) % 3, **tools)
    arrays, _, _ = client.fit(get_weights(small()), {"server-round": 1})
    metered = MeteredGrid(Grid(client_app(lambda _: client)))
    start(CPNTKFL(**OPTIONS | {"selection": "linearised"}, **tools), metered, 1, small())
    own = sum(array.nbytes for array in arrays)
    assert own < metered.take()["bytes-up"] / NUM_CLIENTS < own + 600 * (len(arrays) + 1)
