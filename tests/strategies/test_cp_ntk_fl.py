"""CPNTKFL: no tool is NTK-FL, shuffling changes no bit, and each tool's limits."""

import math
import struct
from dataclasses import replace
from logging import WARNING

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
    arrays_of,
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


def close(one, other, rtol):
    """Compare what two rounds changed: summation order and float32's rounding allowed."""
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=rtol, atol=rtol)


# ---------------------------------------------------------------------- reductions


def test_without_tools_it_is_ntk_fl():
    """Equal up to the order of summation: float32, sums of 45 rows, two rounds."""
    plain = start(NTKFL(**OPTIONS), Grid(app(NTKFLClient)), rounds=2)
    without = start(CPNTKFL(**OPTIONS), Grid(app(CPNTKFLClient)), rounds=2)
    close(plain, without, 1e-4)


def test_compression_that_keeps_all_is_exact():
    exact = start(CPNTKFL(**OPTIONS), Grid(app(CPNTKFLClient)))
    asked = CPNTKFL(**OPTIONS, sparsity=0.0, bits=32)
    assert bits(start(asked, Grid(app(CPNTKFLClient, sparsity=0.0, bits=32)))) == bits(exact)


def test_finer_quantisation_comes_closer_to_the_exact_update():
    initial = start(CPNTKFL(**OPTIONS), Grid(app(CPNTKFLClient)), rounds=0)
    options = OPTIONS | {"steps": [20]}  # the same t for all
    exact = start(CPNTKFL(**options), Grid(app(CPNTKFLClient)))
    errors = []
    for number in (3, 6, 9, 12, 16):
        strategy = CPNTKFL(**options, bits=number)
        weights = start(strategy, Grid(app(CPNTKFLClient, bits=number)))
        moved = sum(float(np.abs(exact[k] - initial[k]).sum()) for k in exact)
        errors.append(sum(float(np.abs(weights[k] - exact[k]).sum()) for k in exact) / moved)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


def test_the_factored_and_the_literal_wire_give_the_same_update():
    both = [
        start(CPNTKFL(**OPTIONS), Grid(app(CPNTKFLClient, structure=structure)))
        for structure in ("factored", "dense")
    ]
    close(*both, 1e-4)


# ---------------------------------------------------------------------- shuffling


def shuffled(changes=None, server=None, in_vain=False, **options):
    server = server or ShufflingServer()
    clients = app(CPNTKFLClient, shuffling_key=server.public_key, run=RUN, sparsity=0.3, bits=8)
    strategy = CPNTKFL(**OPTIONS, shuffling_server=server, run=RUN, sparsity=0.3, bits=8, **options)
    run = start_in_vain if in_vain else start
    return strategy, run(strategy, Grid(clients, changes=changes), rounds=2)


class NotPermuted(ShufflingServer):
    """Gives the rows out in the order of the clients."""

    def shuffle(self, *args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("secrets.SystemRandom.shuffle", lambda *_: None)
            return super().shuffle(*args, **options)


def test_shuffling_changes_no_bit_of_the_update():
    """Rows are sorted by their bytes, whoever permuted them before."""
    plain, expected = shuffled(server=NotPermuted())
    for _ in range(2):  # two permutations
        strategy, weights = shuffled()
        assert bits(weights) == bits(expected)
    assert dict(strategy.train_metrics[2]) == dict(plain.train_metrics[2])


def test_without_compression_sealing_and_shuffling_change_no_bit_either():
    """And so it is the update of NTK-FL, up to the order of summation."""
    server = ShufflingServer()
    clients = app(CPNTKFLClient, shuffling_key=server.public_key, run=RUN)
    strategy = CPNTKFL(**OPTIONS, shuffling_server=server, run=RUN)
    weights = start(strategy, Grid(clients), rounds=2)
    plain = CPNTKFL(**OPTIONS)
    assert bits(weights) == bits(start(plain, Grid(app(CPNTKFLClient)), rounds=2))
    losses = [s.train_metrics[2]["train-loss"] for s in (strategy, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_nothing_beside_a_sealed_upload_tells_the_clients_loss():
    server = ShufflingServer()
    client = CPNTKFLClient(small(), torch.randn(9, 3), torch.arange(9) % 3,
                           shuffling_key=server.public_key, run=RUN)  # fmt: skip
    _, count, metrics = client.fit(get_weights(small()), {"server-round": 1})
    assert (count, metrics) == (9, {})


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
    assert bits(weights) == bits(shuffled(dict.fromkeys(change, lost))[1])
    assert strategy.train_metrics[1]["rejected-sealed"] == 4
    assert sum("dropped the reply" in message for message in caplog.messages) == 2 * 4


def test_a_false_number_of_examples_is_noticed_by_the_shuffling_server():
    strategy, weights = shuffled({2: with_metrics(num_examples=99)})
    assert strategy.train_metrics[1]["rejected-num-examples"] == 1
    assert bits(weights) == bits(shuffled({2: lost})[1])


class Broken(ShufflingServer):
    """Answers with something else."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def shuffle(self, *args, **options):
        return self.change(super().shuffle(*args, **options))


def fewer(answer):
    return replace(answer, upload=answer.upload.rows(torch.arange(3)))


BAD = BadReply("sealed", "no")
ANSWERS = {
    "raises": (Broken(lambda _: 1 / 0), "division by zero"),
    "none": (Broken(lambda _: None), "no attribute"),
    "too few": (ShufflingServer(min_clients=7), "nothing was shuffled"),
    "other rows": (Broken(fewer), "3 rows for 45 examples"),
    "unknown index": (Broken(lambda a: replace(a, rejected={99: BAD})), "out of range"),
    "negative index": (Broken(lambda a: replace(a, rejected={-1: BAD})), "rows for"),
}


@pytest.mark.parametrize("failure", sorted(ANSWERS))
def test_an_answer_that_cannot_be_used_leaves_the_model(failure, caplog):
    server, words = ANSWERS[failure]
    with caplog.at_level(WARNING, "flwr"):
        strategy, weights = shuffled(server=server, in_vain=True)
    assert bits(weights) == initial_bits()
    assert words in caplog.text
    counted = strategy.train_metrics[1]
    assert (counted["replies-accepted"], counted["rejected-shuffling"]) == (0, 6)


def test_a_shuffling_server_that_cannot_be_reached_ends_the_run_before_it_begins():
    class Away(ShufflingServer):
        present = False

        def shuffle(self, *args, **options):
            if not self.present:
                raise ConnectionError("no shuffling-server answers")
            self.present = False
            return super().shuffle(*args, **options)

    with pytest.raises(ConnectionError, match="no shuffling-server answers"):
        shuffled(server=Away())
    server = Away()
    server.present = True  # in the first round alone
    strategy, _ = shuffled(server=server)
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


def run_projected(strategy, grid, rounds=2):
    return start(strategy, grid, rounds, small())


EVALUATING = OPTIONS | {"fraction_evaluate": 1.0, "min_evaluate_nodes": 6}
STRATEGIES = {
    "cp-ntk-fl": (lambda **o: CPNTKFL(**EVALUATING, **o), CPNTKFLClient),
    "fedavg": (
        lambda **o: SeededFedAvg(
            fraction_train=1.0, fraction_evaluate=1.0, min_evaluate_nodes=6,
            min_available_nodes=6, **o,
        ),
        SGDClient,
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_clients_train_choose_and_evaluate_on_projected_inputs(method):
    make, kind = STRATEGIES[method]
    parties = Parties(kind=kind)
    strategy = make(key_server=parties.server, run=RUN)
    grid = Grid(parties.app)
    weights = run_projected(strategy, grid)
    metrics = strategy.train_metrics
    assert [metrics[r]["replies-accepted"] for r in (1, 2)] == [6, 6]
    assert strategy.evaluate_metrics[2]["replies-accepted"] == 6
    assert metrics[2]["train-loss"] < metrics[1]["train-loss"]
    asked = [kind for kind, _ in grid.exchanges]
    assert asked.count("query.keys") == 1
    assert asked.count("query") == (2 if method == "cp-ntk-fl" else 0)  # losses, each round
    assert bits(weights) == bits(run_projected(make(key_server=parties.server, run=RUN),
                                               Grid(parties.app, order=3)))  # fmt: skip


def holding(thing, seen=None):
    """All bytes, words and numbers that can be reached from an object, as bytes."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type | Parties):
        return
    seen.add(id(thing))
    if isinstance(thing, bytes):
        yield thing
    elif isinstance(thing, str):
        yield thing.encode()
    elif isinstance(thing, int):
        yield thing.to_bytes(40, "big", signed=True)
    elif isinstance(thing, np.ndarray | np.generic):
        yield thing.tobytes()
    elif isinstance(thing, dict):
        for value in [*thing, *thing.values()]:
            yield from holding(value, seen)
    elif isinstance(thing, list | tuple | set | frozenset):
        for value in thing:
            yield from holding(value, seen)
    elif hasattr(thing, "__dict__") and not callable(thing):
        yield from holding(vars(thing), seen)


class Elsewhere:
    """A key server in another process: what it holds is out of the strategy's reach."""

    def __init__(self, parties):
        self.sealed_seed = lambda *arguments: parties.server.sealed_seed(*arguments)


def test_neither_the_strategy_nor_any_message_holds_the_seed():
    """Nor P's numbers. With the key server elsewhere, what the server is given is sealed."""
    parties = Parties()
    secret = parties.server.projection_seed(RUN)
    matrix = project(torch.eye(4), 3, secret).numpy()
    strategy = CPNTKFL(**EVALUATING, key_server=Elsewhere(parties), run=RUN)
    run_projected(strategy, grid := Grid(parties.app))
    strategy._grid = None  # the clients, in a simulation
    held = [*holding(strategy)]
    for _, message in grid.seen:
        if message.has_content():
            held += holding([dict(r) for r in message.content.config_records.values()])
            held += holding([dict(r) for r in message.content.metric_records.values()])
            for record in message.content.array_records.values():
                held += [array.data for array in record.values()]
    assert sum(data.startswith(b"ntkseed1") for data in held) >= NUM_CLIENTS
    numbers = [number.tobytes() for number in matrix.flatten()]
    for data in held:
        assert secret not in data
        assert secret.hex().encode() not in data
        assert not any(number in data for number in numbers)


def test_a_client_that_is_not_enrolled_is_left_out_and_named(caplog):
    parties = Parties(enrolled=range(5))
    strategy = CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN)
    with caplog.at_level(WARNING, "flwr"):
        run_projected(strategy, Grid(parties.app))
    assert "is not enrolled with the key server" in caplog.text
    assert strategy.train_metrics[2]["replies-accepted"] == 5
    assert strategy.train_metrics[2]["rejected-error"] == 1


def test_a_client_of_another_run_does_not_open_the_seed():
    parties = Parties(run="another run")
    strategy = CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN)
    with pytest.raises(NoUsableReply, match=r"sealed for run .*expected run 'another run'"):
        run_projected(strategy, Grid(parties.app))
    assert strategy.train_metrics[1]["rejected-error"] == 6
    assert bits(arrays_of(strategy.global_arrays)) == initial_bits(small())


def run_losing_keys(strategy, grid, nodes, then=lambda: None):
    """Three rounds; after the first some clients' states are gone."""

    def lose(server_round, _):
        if server_round == 1:
            then()
            for node in nodes:
                del grid.contexts[node].state["keys"]

    start(strategy, grid, 3, small(), evaluate_fn=lose)


def test_a_client_that_lost_its_state_is_asked_again():
    """Its challenge is gone, so the seed does not open; the next round fetches another."""
    parties = Parties()
    strategy = CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN)
    grid = Grid(parties.app)
    run_losing_keys(strategy, grid, [3])
    accepted = [strategy.train_metrics[r]["replies-accepted"] for r in (1, 2, 3)]
    assert accepted == [6, 5, 6]


def test_clients_without_projection_are_told_apart_from_enrolled_ones(caplog):
    parties = Parties()
    strategy = CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN)
    with caplog.at_level(WARNING, "flwr"):
        start_in_vain(strategy, Grid(app(CPNTKFLClient)))
    assert "does its client have projection=SealedProjection" in caplog.text
    assert "CPNTKFLClient projects nothing; give it projection=SealedProj" in strategy.last_refusal


def test_a_key_server_that_goes_away_later_does_not_end_the_run():
    """All clients fail in the second round, and are asked for their keys again in the third."""
    parties = Parties()

    class Leaving:
        gone = False

        def sealed_seed(self, *arguments):
            if self.gone:
                raise ConnectionError("no key-server answers at that address")
            return parties.server.sealed_seed(*arguments)

    server = Leaving()
    strategy = CPNTKFL(**OPTIONS, key_server=server, run=RUN)
    grid = Grid(parties.app)
    run_losing_keys(strategy, grid, list(grid.contexts), lambda: setattr(server, "gone", True))
    assert [strategy.train_metrics[r]["replies-accepted"] for r in (1, 2, 3)] == [6, 0, 0]


def test_a_failure_of_another_kind_leaves_a_client_its_seed():
    parties = Parties()
    strategy = CPNTKFL(**OPTIONS, key_server=parties.server, run=RUN)
    run_projected(strategy, Grid(parties.app, changes={2: failed}), rounds=2)
    assert [strategy.train_metrics[r]["replies-accepted"] for r in (1, 2)] == [5, 5]
    assert strategy._seeds.of(3) is not None  # node 3 holds partition 2


def test_a_key_server_that_cannot_be_reached_ends_the_run_before_it_begins():
    class Gone:
        def sealed_seed(self, *_):
            raise ConnectionError("no key-server answers at that address")

    strategy = CPNTKFL(**OPTIONS, key_server=Gone(), run=RUN)
    with pytest.raises(ConnectionError, match="no key-server answers"):
        run_projected(strategy, Grid(Parties().app))


# ------------------------------------------------------------ differential privacy

NOISE = {"noise_multiplier": 4.0, "label_noise": 0.2}


def strategy_options(**options):
    half = {"fraction_train": 0.5, "min_train_nodes": 3, "selection": "linearised"}
    return OPTIONS | half | NOISE | options


def private_run(rounds=3, changes=None, **options):
    strategy = CPNTKFL(**strategy_options(**options))
    clients = app(CPNTKFLClient, clip=1.0, noise_seed=(0,), **NOISE | options)
    kind = "query.partition"
    start(strategy, Grid(clients, changes=changes, changed_kind=kind), rounds=rounds)
    return strategy


@pytest.mark.filterwarnings("ignore")  # of Opacus' imports
def test_epsilon_is_that_of_the_client_asked_most_often():
    strategy = private_run()
    for server_round in (1, 2, 3):
        assert "train-loss" not in strategy.train_metrics[server_round]
    most = max(strategy.uploads_asked.values())
    assert sum(strategy.uploads_asked.values()) == 3 * 3
    expected = epsilon_after(most, num_outputs=3, delta=1e-5, **NOISE)
    assert strategy.train_metrics[3]["epsilon"] == expected
    assert math.isfinite(expected)


@pytest.mark.filterwarnings("ignore")
def test_without_partition_ids_a_client_may_have_been_asked_each_round():
    """A node that is started again has another id, and would count from nought."""
    strategy = private_run(changes={p: with_metrics(partition_id=None) for p in range(6)})
    expected = epsilon_after(3, num_outputs=3, delta=1e-5, **NOISE)
    assert strategy.train_metrics[3]["epsilon"] == expected


@pytest.mark.filterwarnings("ignore")
def test_uploads_of_nodes_that_are_not_known_yet_count_when_a_run_goes_on():
    """All first replies, which tell the partitions, are refused; then the run is cut off."""
    clients = app(CPNTKFLClient, clip=1.0, noise_seed=(0,), **NOISE)
    refused = dict.fromkeys(range(6), with_metrics(num_examples=-5))
    first, again = (CPNTKFL(**strategy_options(fraction_train=1.0)) for _ in range(2))
    start_in_vain(first, Grid(clients, node_ids=range(50, 56), changes=refused))
    again.load_state_dict(first.state_dict())
    start(again, Grid(clients), rounds=2)
    expected = epsilon_after(2, num_outputs=3, delta=1e-5, **NOISE)
    assert again.train_metrics[2]["epsilon"] == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "claims", [{"noise_multiplier": 2.0}, {"noise_multiplier": None}, {"label_noise": 0.0}]
)
def test_a_client_with_other_noise_than_the_accountings_is_refused(claims):
    strategy = CPNTKFL(**OPTIONS, selection="linearised", **NOISE)
    clients = app(CPNTKFLClient, clip=1.0, noise_seed=(0,), **NOISE)
    start(strategy, Grid(clients, changes={2: with_metrics(**claims)}))
    assert strategy.train_metrics[1]["rejected-noise"] == 1
    assert strategy.train_metrics[1]["replies-accepted"] == 5


def test_noise_that_no_one_accounts_for_is_refused_too():
    strategy = CPNTKFL(**OPTIONS)
    start_in_vain(strategy, Grid(app(CPNTKFLClient, clip=1.0, noise_seed=(0,), **NOISE)))
    assert strategy.train_metrics[1]["rejected-noise"] == 6


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


def all_ones(code):
    return np.concatenate([code[:52], code[52:] | np.uint8(255)])


COMPRESSED = {
    "cut off": (damaged(3, lambda a: a[:-1]), "compression"),
    "too long": (damaged(3, lambda a: np.append(a, np.uint8(0))), "compression"),
    "bitmap of ones": (
        damaged(3, lambda a: np.concatenate([a[:52], a[52:] | np.uint8(255)])),
        "compression",
    ),
    "bomb": (damaged(3, bomb), "shape"),
}


def test_replies_that_fit_alone_but_not_together_are_dropped(monkeypatch):
    """Room for the rows of four of six clients, each three times over."""
    size = 3 * 4 * (5 + 6 + 7 + 8) * (4 + 3 * 8 + 8 + 3 * 3 + 2 * 3 * 8)
    strategy = CPNTKFL(**OPTIONS, sparsity=0.5, bits=8)
    monkeypatch.setattr("fedntk.ntk.support.memory.available_memory", lambda *_: size)
    start(strategy, Grid(app(CPNTKFLClient, sparsity=0.5, bits=8)))
    counted = strategy.train_metrics[1]
    assert 0 < counted["rejected-memory"] < 6
    assert counted["replies-accepted"] == 6 - counted["rejected-memory"]


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
def test_a_payload_that_is_not_what_it_declares_is_dropped_alone(kind):
    change, reason = COMPRESSED[kind]
    options = {"sparsity": 0.5, "bits": 8}
    clients = app(CPNTKFLClient, **options)
    run_as_if_lost(lambda: CPNTKFL(**OPTIONS, **options), clients, change, reason)


def test_bytes_up_are_the_length_of_what_is_sent():
    """Flower adds NumPy's heads of 128 bytes and its own to each array: under 600 in all."""
    counted = {}
    for options in ({}, {"sparsity": 0.5, "bits": 6}):
        client = CPNTKFLClient(small(), torch.randn(50, 3), torch.arange(50) % 3, **options)
        arrays, _, _ = client.fit(get_weights(small()), {"server-round": 1})
        clients = client_app(lambda _, client=client: client)
        metered = MeteredGrid(Grid(clients))
        strategy = CPNTKFL(**OPTIONS | {"selection": "linearised"}, **options)
        start(strategy, metered, 1, small())
        up = metered.take()["bytes-up"] / NUM_CLIENTS
        counted[len(counted)] = up
        own = sum(array.nbytes for array in arrays)
        assert own < up < own + 600 * (len(arrays) + 1)
    assert counted[1] < 0.5 * counted[0]
