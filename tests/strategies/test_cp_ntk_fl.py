"""CPNTKFL: no tool is NTK-FL, shuffling changes no bit, and each tool's limits."""

import copy
import gc
from collections import Counter
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord
from torch import nn

from fedntk.clients import (
    CPNTKFLClient,
    FedEnsembleClient,
    NTKFLClient,
    SealedProjection,
    SGDClient,
    client_app,
    project,
)
from fedntk.ntk import BadReply
from fedntk.strategies import CPNTKFL, NTKFL, FedEnsemble, NoUsableReply, SeededFedAvg
from fedntk.strategies.ntk.ntk_fl import stack
from fedntk.trust import ClientKeys, KeyServer, ShufflingServer, new_key, public_bytes

from ..conftest import refused
from .federation import (
    NUM_CLIENTS,
    Contract,
    Grid,
    app,
    bits,
    damaged,
    examples,
    initial_bits,
    lost,
    start,
    start_in_vain,
    told,
    with_metrics,
)

RUN = "a run"
EVALUATING = {"fraction_evaluate": 1.0, "min_evaluate_nodes": 6}
OPTIONS = {
    "learning_rate": 0.1, "steps": [5, 20, 50], "min_available_nodes": 6,
    "fraction_train": 1.0, "fraction_evaluate": 0.0,
}  # fmt: skip
TOOLS = {"sparsity": 0.3, "bits": 8}
COMPRESSING = app(CPNTKFLClient, **TOOLS)
CONTRACT = {
    "CPNTKFL": Contract(
        lambda **options: CPNTKFL(**OPTIONS | TOOLS | options), COMPRESSING, sends_queries=True
    )
}
KEYS = [new_key() for _ in range(NUM_CLIENTS)]
ENROLLED = [public_bytes(key) for key in KEYS]


def sealing(*data, seed, **options):
    """Make the client whose seed ends with its number."""
    return CPNTKFLClient(*data, seed=seed, private_key=KEYS[seed[1]], run=RUN, **options)


class SortedRows(NTKFL):
    """NTK-FL that adds up rows in the order of their bytes, whoever sent them."""

    def pool(self, rows):
        return stack(rows).canonical(), {}


def shuffled(changes=None, server=None, in_vain=False, tools=TOOLS):
    server = server or ShufflingServer(ENROLLED)
    clients = app(sealing, shuffling_key=server.public_key, **tools)
    strategy = CPNTKFL(**OPTIONS, **tools, shuffling_server=server, run=RUN)
    run = start_in_vain if in_vain else start
    return strategy, bits(run(strategy, Grid(clients, changes=changes), rounds=2))


def test_without_compression_it_is_ntk_fl_of_sorted_rows_sealed_and_shuffled_or_not():
    expected = bits(start(SortedRows(**OPTIONS), Grid(app(NTKFLClient)), rounds=2))
    plain = CPNTKFL(**OPTIONS)
    assert bits(start(plain, Grid(app(CPNTKFLClient)), rounds=2)) == expected
    strategy, weights = shuffled(tools={})
    assert weights == expected
    losses = [s.train_metrics[2]["train-loss"] for s in (strategy, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bad_sealed_replies_are_dropped():
    """A flipped bit, a byte less, another dtype, a false count; as if these clients were lost."""
    change = {
        1: damaged(0, lambda a: a ^ np.uint8([0] * (len(a) - 1) + [1])),
        2: damaged(0, lambda a: a[:-1]),
        3: damaged(0, lambda a: a.astype(np.float32)),
        4: with_metrics(num_examples=99),
    }
    strategy, weights = shuffled(change)
    assert weights == shuffled(dict.fromkeys(change, lost))[1]
    metrics = strategy.train_metrics[1]
    assert (metrics["rejected-sealed"], metrics["rejected-num-examples"]) == (3, 1)


def test_a_client_that_is_not_enrolled_counts_as_lost(caplog):
    """Also if it sends what another client sealed in a round before."""
    strategy, weights = shuffled(server=ShufflingServer(ENROLLED[:4]))
    assert told(strategy) == [4, 4]
    assert strategy.train_metrics[1]["rejected-not-enrolled"] == 2
    assert "add it to the enrolled keys" in caplog.text
    assert weights == shuffled(dict.fromkeys((4, 5), lost))[1]
    earlier = []

    def replay(reply):
        earlier.append(copy.copy(reply.content["arrays"]))
        reply.content["arrays"] = earlier[0]
        return reply

    strategy, weights = shuffled({2: replay})
    assert told(strategy) == [6, 5]
    assert strategy.train_metrics[2]["rejected-sealed"] == 1


BAD = BadReply("sealed", "no")


def broken(change):
    """A shuffling server with other answers."""
    server = ShufflingServer(ENROLLED)
    shuffle = server.shuffle
    server.shuffle = lambda *args, **options: change(shuffle(*args, **options))
    return server


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (broken(lambda _: 1 / 0), "division by zero"),
        (ShufflingServer(ENROLLED, min_clients=7), "nothing was shuffled"),
        (broken(lambda a: replace(a, upload=a.upload.rows(torch.arange(3)))), "3 rows for 45 exam"),
        *[
            (broken(lambda a, k=k: replace(a, rejected={k: BAD})), f"uploads [{k}] of 6")
            for k in (99, -1)
        ],
    ],
)
def test_an_answer_that_cannot_be_used_leaves_the_model(server, words, caplog):
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
        method = getattr(self.server, name)

        def answer(*arguments, **options):
            self.answers -= 1
            if self.answers < 0:
                raise ConnectionError("no server answers at that address")
            return method(*arguments, **options)

        return answer if callable(method) else method


def test_a_server_that_cannot_be_reached_ends_the_run_only_before_it_begins():
    gone = partial(refused, "no server answers", error=ConnectionError)
    gone(run_projected, parties := Parties(), Away(parties.server, 0))
    gone(shuffled, server=Away(ShufflingServer(ENROLLED), 0))
    strategy, _ = shuffled(server=Away(ShufflingServer(ENROLLED), 1))
    assert told(strategy) == [6, 0]


class Parties:
    """A key server with some clients enrolled, and clients that project 4 inputs to 3."""

    def __init__(self, enrolled=range(NUM_CLIENTS), run=RUN, kind=CPNTKFLClient):
        self.private = {p: new_key() for p in range(NUM_CLIENTS)}
        keys = [public_bytes(self.private[p]) for p in enrolled]
        self.server = KeyServer(bytes(32), keys, Ed25519PrivateKey.generate())
        self.options, self.kind = {"run": run, "verify_key": self.server.verify_key}, kind
        self.app = client_app(self.client)

    def client(self, context):
        partition = int(context.node_config["partition-id"])
        state = context.state.config_records.setdefault("keys", ConfigRecord())
        keys = ClientKeys(self.private[partition], state=state, **self.options)
        x, y = examples(partition)
        return self.kind(small(), x, y, projection=SealedProjection(3, keys))


def small():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def run_projected(parties, server=None, grid=None, make=CPNTKFL, evaluate_fn=None, **options):
    """The strategy after three rounds with the parties' key server, and what it learned."""
    strategy = make(**OPTIONS | options, key_server=server or parties.server, run=RUN)
    grid = grid or Grid(parties.app)
    return strategy, bits(start(strategy, grid, 3, small(), evaluate_fn=evaluate_fn))


def ensemble(learning_rate, steps, **options):
    make = partial(NTKFL, learning_rate=learning_rate, steps=steps)
    return FedEnsemble(inner=make, num_models=2, schedule="balanced", **options)


@pytest.mark.parametrize(
    ("make", "client", "queries"),
    [
        (CPNTKFL, CPNTKFLClient, 3),  # of losses, in each round
        (lambda learning_rate, steps, **more: SeededFedAvg(**more), SGDClient, 0),
        (ensemble, lambda *data, **more: FedEnsembleClient(NTKFLClient(*data, **more)), 3),
    ],
)
def test_clients_train_choose_and_evaluate_on_projected_inputs(make, client, queries):
    """All models of an ensemble use the seeds that are sealed for a client once."""
    parties, results = Parties(kind=client), []
    for order in (None, 3):
        grid = Grid(parties.app, order=order)
        strategy, weights = run_projected(parties, grid=grid, make=make, **EVALUATING)
        results.append(weights)
    assert results[0] == results[1]
    assert told(strategy) == [6, 6, 6]
    assert strategy.evaluate_metrics[2]["replies-accepted"] == 6
    assert strategy.evaluate_metrics[2]["loss"] < strategy.evaluate_metrics[1]["loss"]
    asked = Counter[str]()
    for kind, count in grid.exchanges:
        asked[kind] += count
    assert (asked["query.keys"], asked["query"]) == (6, 6 * queries)


def data_in(thing):
    """The bytes of all numbers, arrays and texts that can be reached from an object."""
    seen, left = {}, [thing]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, type | FunctionType | ModuleType):
            continue
        seen[id(item)] = item
        left += gc.get_referents(item)
        if isinstance(item, int):
            yield item.to_bytes(40, "big", signed=True)
        elif isinstance(item, np.ndarray | np.generic):
            yield item.tobytes()
        elif isinstance(item, bytes | str):
            yield item if isinstance(item, bytes) else item.encode()


def test_neither_the_strategy_nor_any_message_holds_the_seed():
    """Nor P's numbers. With the key server elsewhere, what the server is given is sealed."""
    parties = Parties()
    secret = parties.server.projection_seed(RUN)
    numbers = [number.tobytes() for number in project(torch.eye(4), 3, secret).numpy().flatten()]
    elsewhere = SimpleNamespace(sealed_seed=lambda *sent: parties.server.sealed_seed(*sent))
    strategy, _ = run_projected(parties, elsewhere, grid := Grid(parties.app), **EVALUATING)
    strategy._grid = None  # the clients, in a simulation
    contents = [message.content for _, message in grid.seen if message.has_content()]
    held = list(data_in([strategy, contents]))
    assert sum(data.startswith(b"ntkseed1") for data in held) >= NUM_CLIENTS
    for data in held:
        assert not any(part in data for part in (secret, secret.hex().encode(), *numbers))


def test_only_enrolled_clients_of_the_run_take_part(caplog):
    """A client that is not enrolled is named; of another run, none opens the seed."""
    strategy, _ = run_projected(parties := Parties(enrolled=range(5)))
    assert "is not enrolled; make sure" in caplog.text
    assert told(strategy) == [5, 5, 5]
    said, others = r"sealed for run .*expected run 'another run'", Parties(run="another run")
    refused(said, run_projected, others, error=NoUsableReply)
    start_in_vain(CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN), Grid(app(CPNTKFLClient)))
    assert "does its client have projection=SealedProjection" in caplog.text


@pytest.mark.parametrize(
    ("nodes", "server", "counts"),
    [
        (
            [3],
            lambda server: server,
            [6, 5, 6],
        ),  # its challenge is gone: the next round fetches another
        (
            range(1, 7),
            lambda server: Away(server, 6),
            [6, 0, 0],
        ),  # all, and the key server went away
    ],
)
def test_clients_that_lost_their_state_are_asked_again(nodes, server, counts):
    parties = Parties()
    grid = Grid(parties.app)

    def lose(server_round, _):
        for node in nodes if server_round == 1 else ():
            del grid.contexts[node].state["keys"]

    strategy, _ = run_projected(parties, server(parties.server), grid, evaluate_fn=lose)
    assert told(strategy) == counts


def test_a_client_that_sends_more_than_was_asked_for_is_dropped():
    strategy = CPNTKFL(**OPTIONS, sparsity=0.3, bits=6)
    start_in_vain(strategy, Grid(COMPRESSING))
    assert strategy.train_metrics[1]["rejected-compression"] == 6


def test_replies_that_fit_alone_but_not_together_are_dropped(monkeypatch):
    """Room for the rows of four of six clients, each three times over."""
    size = 3 * 4 * (5 + 6 + 7 + 8) * (4 + 3 * 8 + 8 + 3 * 3 + 2 * 3 * 8)
    strategy = CPNTKFL(**OPTIONS, sparsity=0.5, bits=8)
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda *_: size)
    start(strategy, Grid(app(CPNTKFLClient, sparsity=0.5, bits=8)))
    counted = strategy.train_metrics[1]
    assert 0 < counted["rejected-memory"] < 6
    assert counted["replies-accepted"] == 6 - counted["rejected-memory"]
