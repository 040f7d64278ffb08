"""What all methods share that go through the relay: sealed parcels, first weights, faults."""

import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array

import fedntk.clients
import fedntk.strategies
from fedntk.clients import LocalSGD, cache_dir
from fedntk.clients.core import disk_store
from fedntk.ntk.payloads.gossip_options import REFUSED
from fedntk.strategies import DFedAvg, NoUsableReply, Topology
from fedntk.strategies.gossip.relay import count_refused, deviation
from fedntk.trust import KeyServer, ParcelKeys, new_key, open_parcel, public_bytes

from .federation import Grid, app, arrays_of, as_record, bits, failed, kept_by, lost, start, told

SGD = {"sgd": LocalSGD(learning_rate=0.1, batch_size=4)}
MSE = {"loss": "mse"}
ALL = {
    "topology": Topology("complete"), "min_available_nodes": 6, "fraction_evaluate": 0.0,
    "collect": False,
}  # fmt: skip
REGULAR = Topology("regular", degree=3)
EVERYONE = set(range(6))
METHODS = {  # options of strategies and clients
    "NTKDFL": ({"learning_rate": 0.1, "steps": (2.0, 5.0), **MSE}, MSE),
    "DFedAvg": ({"gossip_steps": 2}, SGD),
    "DPSGD": ({"mixing": "metropolis"}, SGD),
    "DisPFL": ({"same_masks": False}, SGD),
}
each_method = pytest.mark.parametrize("name", sorted(METHODS))


def make(name, **options):
    return getattr(fedntk.strategies, name)(**METHODS[name][0] | ALL | options)


def client(name, *args, **options):
    return getattr(fedntk.clients, f"{name}Client")(*args, **METHODS[name][1], **options)


def clients(name, **options):
    return app(lambda *args, **more: client(name, *args, **options, **more))


def run(name, rounds=1, changes=lambda _: {}, **options):
    """Run a strategy; `changes` makes those of replies, given the strategy."""
    own = make(name, **options)
    grid = Grid(clients(name), changes=changes(own))
    start(own, grid, rounds)
    return own, grid


def alike(a, b, number=1):
    """Clients that ended a round of two runs with the same bits."""
    return {k for k in EVERYONE if bits(kept_by(a, k, number)) == bits(kept_by(b, k, number))}


def sent_first(grid):
    down = [m for way, m in grid.seen if way == "down" and "arrays" in m.content]
    return Counter(m.metadata.dst_node_id - 1 for m in down)


def on_parcels(change, prefix="to-"):
    """Change the arrays of each parcel of a reply; None takes the parcel out."""

    def apply(reply):
        for name in [n for n in reply.content.array_records if n.startswith(prefix)]:
            changed = change(arrays_of(reply.content[name]))
            del reply.content[name]
            if changed is not None:
                reply.content[name] = as_record(changed)
        return reply

    return apply


silent = on_parcels(lambda _: None)


def in_step(own, number, position, change):
    return lambda reply: (
        change(reply) if (own.server_round, own.progress.position) == (number, position) else reply
    )


def forgets(own, what):
    def change(reply):
        shutil.rmtree(cache_dir() / "personal" / f"client-{what}" / f"run-{own.trained.run_key}")
        return reply

    return change


# ------------------------------------------------------------------ sealed parcels


@each_method
def test_sealed_runs_have_the_bits_of_others_and_send_nothing_in_clear(name):
    """First weights travel once, and keys. Graphs are drawn anew."""
    (plain, clear), (own, sealed) = (
        run(name, 2, seal=seal, topology=REGULAR) for seal in (False, True)
    )
    assert alike(own, plain, 2) == EVERYONE
    assert (told(own, "parcels-rejected"), told(own, "neighbours-heard")) == ([0, 0], [3, 3])
    assert sent_first(sealed) == sent_first(clear) == dict.fromkeys(EVERYONE, 1)
    assert [n for kind, n in sealed.exchanges if kind == "query.public_key"] == [6]
    records = [
        own for way in ("down", "up") for each in sealed.records(way) for own in each.items()
    ]
    names = {array.partition("-")[0] for name, own in records if name != "arrays" for array in own}
    assert names == {"content", "key"}


def keys_of(name, given):
    """Private keys of six clients, and the clients that have them."""
    keys = [new_key() for _ in range(6)]

    def with_key(*args, **more):
        return client(name, *args, parcel_keys=ParcelKeys(keys[more["seed"][1]], **given), **more)

    return keys, app(with_key)


def parcels(grid):
    return [
        (message.metadata.dst_node_id - 1, int(name.removeprefix("from-")), record)
        for message in (m for way, m in grid.seen if way == "down")
        for name, record in message.content.array_records.items()
        if name.startswith("from-")
    ]


def opens(parcel, key, run_key, sender):
    """Whether a key opens a parcel of some exchange of round 1."""
    for exchange in range(4):
        info = f"fedntk parcel 1\0{run_key}\x001\0{exchange}\0{sender}".encode()
        try:
            open_parcel(arrays_of(parcel), key, info)
        except ValueError:
            continue
        return True
    return False


def test_parcels_open_only_with_their_receivers_keys():
    """Weights and averages are for both of a client's neighbours, Jacobians for one of them."""
    keys, own_clients = keys_of("NTKDFL", {})
    own = make("NTKDFL", seal=True, topology=Topology("ring"))
    start(own, grid := Grid(own_clients))
    opened = Counter()
    for receiver, sender, parcel in parcels(grid):
        for k, key in enumerate(keys):
            opened[k == receiver] += opens(parcel, key, own.trained.run_key, sender)
    assert opened == {True: 6 * 2 * 3, False: 6 * 2 * 2}


def flip(arrays):
    return {n: a ^ (np.arange(a.size) == 20) if n == "content" else a for n, a in arrays.items()}


def test_a_parcel_that_is_damaged_replayed_or_in_clear_counts_as_none():
    """Those of clients 2, 1 (its very first one, in every later exchange) and 3."""
    first = {}

    def replay(reply):
        for name, record in list(reply.content.array_records.items()):
            reply.content[name] = first.setdefault(name, record)
        return reply

    def leave_out(own):
        later = lambda r: r if (own.server_round, own.progress.position) == (1, 0) else silent(r)  # noqa: E731
        return {1: later, 2: silent, 3: silent}

    clear = on_parcels(lambda _: {"a": np.zeros(3, np.float32)})
    damage = {1: replay, 2: on_parcels(flip), 3: clear}
    damaged, without = (
        run("DFedAvg", 2, changes, seal=True, topology=REGULAR)[0]
        for changes in (lambda _: damage, leave_out)
    )
    assert alike(damaged, without, 2) == EVERYONE
    # of three neighbours each, in both averages; client 1's not in the first of round 1
    assert told(damaged, "parcels-rejected") == [2 * 3 * 2 + 3, 3 * 3 * 2]
    assert (told(damaged), told(without, "parcels-rejected")) == ([6, 6], [0, 0])


def test_keys_are_asked_for_again_of_clients_that_failed():
    """Client 3 sends what is no key in round 1, and client 2 loses its own at the end of it."""
    own = make("DFedAvg", seal=True)

    def odd(reply):
        if (own.server_round, reply.metadata.message_type) == (1, "query.public_key"):
            reply.content["properties"]["public-key"] = b"no key"
        return reply

    changes = {3: odd, 2: in_step(own, 1, 2, forgets(own, "2-keys"))}
    grid = Grid(clients("DFedAvg"), changes=changes, changed_kind="query.public_key train")
    start(own, grid, rounds=3)
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6, 1, 1]
    assert (told(own), told(own, "parcels-rejected")[2]) == ([5, 5, 6], 0)


def test_a_client_with_keys_of_its_own_refuses_to_work_in_clear():
    own_clients = clients("DFedAvg", parcel_keys=ParcelKeys(new_key()))
    with pytest.raises(NoUsableReply, match="the strategy does not have parcels sealed"):
        start(make("DFedAvg"), Grid(own_clients))


class Swapping(DFedAvg):
    """A relay that names a key of its own for client 2, and reads what is sealed for it."""

    thief = new_key()

    def _keys_for(self, client):
        held = self.public_keys[2]
        if client != 2:
            self.public_keys[2] = (public_bytes(self.thief).hex(), held[1])
        keys = super()._keys_for(client)
        self.public_keys[2] = held
        return keys


@pytest.mark.parametrize("vouched", [False, True])
def test_a_relay_that_swaps_keys_reads_along_unless_a_key_server_vouches(vouched):
    """Client 5 is not enrolled, and so has no voucher: it is sent nothing, and fails."""
    options = {}
    keys, own_clients = keys_of("DFedAvg", options)
    server = KeyServer(bytes(32), map(public_bytes, keys[:5]), Ed25519PrivateKey.generate())
    if vouched:
        options |= {"run": "a", "verify_key": server.verify_key}
    given = {"vouching": server, "run": "a"} if vouched else {}
    own = Swapping(seal=True, **ALL, **given)
    start(own, grid := Grid(own_clients))
    readable = [opens(parcel, own.thief, own.trained.run_key, k) for _, k, parcel in parcels(grid)]
    assert (any(readable), told(own)) == (not vouched, [6 - vouched])


# ------------------------------------------------------------------------- faults


def test_deviation_is_eq_12_and_grows_with_the_root_of_the_number_of_clients():
    rng = np.random.default_rng(0)
    models = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(5)]
    flat = np.stack([np.concatenate([m["a"].ravel(), m["b"]]) for m in models])
    expected = np.sqrt(((flat - flat.mean(0)) ** 2).sum(0)).mean()
    assert [deviation(models), deviation(models * 4)] == pytest.approx([expected, 2 * expected])


def nan(arrays):
    return {n: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def enlarge(arrays):
    """Multiply all numbers of a parcel by a million; they stay finite and well formed."""
    large = {n: a.dtype.kind == "f" and n not in ("targets", "inputs") for n, a in arrays.items()}
    return {n: (a * 1e6).astype(a.dtype) if large[n] else a for n, a in arrays.items()}


def unreadable(reply):
    if record := reply.content.array_records.get("to-neighbours"):
        record[next(iter(record))] = Array("float32", (2,), "numpy.ndarray", b"not an array")
    return reply


@each_method
def test_what_hostile_neighbours_send_is_dropped_and_counted(name):
    """Also a norm out of all proportion, and bytes that are no arrays, handed on unread."""
    kinds = {1: nan, 2: enlarge, 3: lambda own: own | {"num-examples": np.array(21)}}
    changes = {k: on_parcels(of, "to-neighbours") for k, of in kinds.items()} | {4: unreadable}
    quiet = dict.fromkeys(changes, on_parcels(lambda _: None, "to-neighbours"))
    attacked, without = (
        run(name, 1, lambda _, own=own: own, max_examples=20)[0] for own in (changes, quiet)
    )
    assert alike(attacked, without) == EVERYONE
    exchanges = {"NTKDFL": 2, "DFedAvg": 2, "DPSGD": 1, "DisPFL": 1}[name]
    assert (told(attacked, "parcels-rejected"), told(attacked)) == ([4 * 5 * exchanges], [6])


def test_a_hostile_jacobian_of_a_neighbour_is_refused():
    """Rows a million times as large, after weights and averages as they should be."""
    own, _ = run("NTKDFL", 1, lambda own: {2: in_step(own, 1, 2, on_parcels(enlarge))})
    assert (told(own, "parcels-rejected"), told(own)) == ([5], [6])


def test_a_model_of_a_huge_norm_is_left_out_of_the_mean():
    own, changes = make("DPSGD", collect=True), {2: on_parcels(enlarge, "arrays")}
    mean = start(own, Grid(clients("DPSGD"), changes=changes, changed_kind="evaluate.model"))
    assert np.abs(mean["0.weight"]).max() < 1e3
    assert own.train_metrics[1]["models-collected"] == len(own.models) == 5


def test_a_model_of_a_huge_norm_does_not_say_that_its_client_has_the_first_weights():
    """The client's first training is lost; its model comes, and is as if it were lost."""
    results = []
    for change in (on_parcels(enlarge, "arrays"), lost):
        own = make("DPSGD", collect=True)
        gone = {"train": lost, "evaluate.model": change}
        first = lambda r, own=own, gone=gone: (  # noqa: E731
            gone[r.metadata.message_type](r) if own.server_round == 1 else r
        )
        grid = Grid(clients("DPSGD"), changes={2: first}, changed_kind="train evaluate.model")
        results.append(bits(start(own, grid, 2)))
    assert results[0] == results[1]


def test_replies_with_weights_or_parcels_for_strangers_are_refused():
    """The relay tells weights by their record's name: parcels named like them are handed on."""

    def copied(name):
        def apply(reply):
            reply.content[name] = reply.content["to-neighbours"]
            return reply

        return apply

    as_network = on_parcels(lambda a: {n: w for n, w in a.items() if n != "num-examples"})
    changes = {1: copied("to-5"), 2: as_network, 3: copied("arrays")}
    path = Topology("own", graph=[(k, k + 1) for k in range(5)])
    own, _ = run("DFedAvg", 1, lambda _: changes, topology=path)
    metrics = own.train_metrics[1]
    assert (metrics["rejected-weights"], metrics["rejected-arrays"], told(own)) == (1, 1, [4])
    assert f"is the client a {own.client}?" in own.channel.last_refusal


def test_what_clients_say_of_refused_parcels_counts_within_reason():
    """At most as many as there are clients, each; what is no whole number above 0 does not."""
    said = [[1, 2], -5, 0.5, 10**15, 2, 0]
    assert count_refused([SimpleNamespace(metrics={REFUSED: n}) for n in said]) == 6 + 2


# ----------------------------------------------------------- who is gone, or returns


def test_a_static_graph_stays_as_it_is_if_a_client_is_missing():
    """Drawn among those who are there, one client fewer would give all of them other neighbours."""
    static = Topology(degree=3, dynamic=False, seed=4)
    own, resumed = (make("DFedAvg", topology=static) for _ in range(2))
    before, present = own.graph(1, range(6)), [0, 1, 2, 4, 5]
    after = own.graph(2, present)
    assert after == {k: tuple(j for j in before[k] if j != 3) for k in present}
    assert after != static.neighbours(2, present)
    resumed.load_state_dict(own.state_dict())
    assert resumed.graph(2, present) == after


@each_method
def test_a_client_that_returns_after_rounds_goes_on_with_its_weights(name, monkeypatch):
    """Two rounds are kept: those of round 1 stay while client 5 fails in rounds 2 and 3."""
    monkeypatch.setattr(disk_store, "KEPT", 2)
    collected = []

    def absent(reply):
        last = own.progress.position == len(own.progress.steps) - 1
        return failed(reply) if own.server_round in (2, 3) and last else reply

    own = make(name, collect=True, collect_both=True)
    grid = Grid(clients(name), changes={5: absent})
    note = lambda *_: collected.append(tuple(map(len, own.models_at.values())))  # noqa: E731
    start(own, grid, rounds=4, evaluate_fn=note)
    assert (told(own), own.trained.last) == ([6, 5, 5, 6], dict.fromkeys(range(6), 4))
    assert own.train_metrics[4].get("restarted", 0) == 0
    planned = sum(len(own.plan(first=first)) for first in (True, False, True, True))
    assert [kind for kind, _ in grid.exchanges].count("train") == planned
    assert collected[3] == (6, 5)


@each_method
def test_a_client_that_lost_its_weights_sends_its_neighbours_none(name):
    """It takes over their average, with which NTK-DFL evolves and DFedAvg ends (float32: 1e-5)."""

    def losing(own):
        return in_step(own, 1, len(own.plan(first=True)) - 1, forgets(own, "5"))

    def hushing(own):
        lose, hush = losing(own), in_step(own, 2, 0, silent)
        return {5: lambda reply: hush(lose(reply))}

    options = {"seal": True} | ({"gossip_steps": 1} if name == "DFedAvg" else {})
    loser, hushed = (
        run(name, 2, changes, **options)[0] for changes in (lambda own: {5: losing(own)}, hushing)
    )
    assert alike(loser, hushed, 2) >= EVERYONE - {5}
    if name in ("NTKDFL", "DFedAvg"):
        for array, expected in kept_by(loser, 0, 2).items():
            np.testing.assert_allclose(kept_by(loser, 5, 2)[array], expected, atol=1e-5)
    # client 5 has 10 of the 45 examples
    assert (told(loser), told(loser, "restarted")) == ([6, 6], [0, pytest.approx(10 / 45)])
