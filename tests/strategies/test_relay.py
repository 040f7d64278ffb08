"""What all methods share that go through the relay: sealed parcels, first weights, faults."""

import shutil
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedntk.clients import DFedAvgClient, DisPFLClient, DPSGDClient, NTKDFLClient, cache_dir
from fedntk.clients.personal import personal_store
from fedntk.strategies import (
    DPSGD,
    NTKDFL,
    DFedAvg,
    DisPFL,
    NoUsableReply,
    RelayStrategy,
    Topology,
)
from fedntk.strategies.gossip.relay import REFUSED, deviation, parcels_refused
from fedntk.trust import KeyServer, ParcelKeys, new_key, open_parcel, public_bytes

from .federation import (
    Change,
    Grid,
    app,
    archive,
    arrays_of,
    as_record,
    bits,
    boasting,
    failed,
    garbage,
    kept_by,
    lost,
    start,
    with_arrays,
)

SGD: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 4, "local_epochs": 1}
ALL: dict[str, Any] = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
MSE = {"loss": "mse"}
COMPLETE = Topology("complete")
EVERYONE = set(range(6))


class Case(NamedTuple):
    strategy: Callable[..., RelayStrategy]
    client: type[NumPyClient]
    options: dict[str, Any]  # of the strategy
    own: dict[str, Any]  # of the client

    def make(self, **options: Any) -> RelayStrategy:
        given = {"topology": Topology("regular", degree=3), **self.options, **ALL, **options}
        return self.strategy(**given)

    def app(self, **options: Any) -> ClientApp:
        return app(self.client, **self.own, **options)

    def run(self, rounds: int = 1, grid: Any = None, **options: Any) -> RelayStrategy:
        """Run without models collected; `grid` makes the grid's options of the strategy."""
        own = self.make(**{"collect": False, **options})
        start(own, Grid(self.app(), **(grid(own) if grid else {})), rounds)
        return own


CASES = {
    "NTKDFL": Case(NTKDFL, NTKDFLClient, {"learning_rate": 0.1, "steps": (2.0, 5.0), **MSE}, MSE),
    "DFedAvg": Case(DFedAvg, DFedAvgClient, {"gossip_steps": 2}, SGD),
    "DPSGD": Case(DPSGD, DPSGDClient, {"mixing": "metropolis"}, SGD),
    "DisPFL": Case(DisPFL, DisPFLClient, {"same_masks": False}, SGD),
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def alike(a: RelayStrategy, b: RelayStrategy, number: int = 1) -> set[int]:
    """Clients that ended a round of two runs with the same bits."""
    return {k for k in EVERYONE if bits(kept_by(a, k, number)) == bits(kept_by(b, k, number))}


def told(own: RelayStrategy, name: str = "replies-accepted") -> list[Any]:
    """A metric of each round."""
    return [own.train_metrics[number][name] for number in sorted(own.train_metrics)]


def sent_first(grid: Grid) -> Counter[int]:
    """How often each client was sent the network's weights."""
    down = [m for way, m in grid.seen if way == "down" and "arrays" in m.content]
    return Counter(m.metadata.dst_node_id - 1 for m in down)


def parcels(grid: Grid, way: str) -> list[tuple[int, str, ArrayRecord]]:
    """Client that was sent it, or sent it, and name and arrays of each parcel in training."""
    return [
        ((m.metadata.dst_node_id if way == "down" else m.metadata.src_node_id) - 1, name, own)
        for direction, m in grid.seen
        if direction == way and m.metadata.message_type == "train" and m.has_content()
        for name, own in m.content.array_records.items()
        if name != "arrays"
    ]


# ------------------------------------------------------------------ sealed parcels


def test_sealed_runs_have_the_bits_of_others_and_show_none_of_them(case):
    """First weights travel once, and keys; those stay with their owners. Graphs are drawn anew."""
    plain, own = (case.make(seal=seal) for seal in (False, True))
    clear, sealed = Grid(case.app()), Grid(case.app())
    assert bits(start(own, sealed, rounds=2)) == bits(start(plain, clear, rounds=2))
    assert alike(own, plain, 2) == EVERYONE
    metrics = own.train_metrics[2]
    assert (metrics["parcels-rejected"], metrics["neighbours-heard"]) == (0, 3)
    assert sent_first(sealed) == sent_first(clear) == dict.fromkeys(EVERYONE, 1)
    assert [n for kind, n in sealed.exchanges if kind == "query.public_key"] == [6]
    paths = list((cache_dir() / "personal").glob(f"run-{own.run_key}-client-*-keys/key.pem"))
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 6
    trained = kept_by(own, 0, 1)  # two numbers of a row of weights, wherever they go
    parts = [a.tobytes()[k : k + 8] for a in trained.values() if a.dtype.kind == "f"
             for k in range(0, a.nbytes - 8, 8) if a.ravel()[k // a.itemsize] != 0]  # fmt: skip
    for grid, shown in ((clear, True), (sealed, False)):
        sent = [record for way in ("down", "up") for *_, record in parcels(grid, way)]
        everything = b"".join(array.data for record in sent for array in record.values())
        assert any(part in everything for part in parts) == shown
    assert {n.partition("-")[0] for record in sent for n in record} == {"content", "key"}


def keys_of(clients: type[NumPyClient], given: Any, **options: Any) -> tuple[list[Any], ClientApp]:
    """Private keys of six clients, and the clients that have them."""
    keys = [new_key() for _ in range(6)]

    def make(*args: Any, **more: Any) -> NumPyClient:
        own = ParcelKeys(keys[more["seed"][1]], **given)
        return clients(*args, parcel_keys=own, **options, **more)

    return keys, app(make)


def opens(parcel: ArrayRecord, key: Any, run_key: str, sender: int) -> bool:
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
    """Client 0's key opens what is for it; no key opens what is for others."""
    keys, clients = keys_of(NTKDFLClient, {}, **MSE)
    own = CASES["NTKDFL"].make(seal=True, topology=Topology("ring"))
    start(own, grid := Grid(clients))
    opened: Counter[bool] = Counter()
    for receiver, name, parcel in parcels(grid, "down"):
        for client, key in enumerate(keys):
            sender = int(name.removeprefix("from-"))
            opened[client == receiver] += opens(parcel, key, own.run_key, sender)
    # weights and averages are for both of a client's neighbours, Jacobians for one of them
    assert opened == {True: 6 * 2 * 3, False: 6 * 2 * 2}


def on_parcels(change: Callable[[dict[str, np.ndarray]], Any]) -> Any:
    """Change the arrays of each parcel of a reply; None takes the parcel out."""

    def apply(reply: Message) -> Message:
        for name in [n for n in reply.content.array_records if n.startswith("to-")]:
            changed = change(arrays_of(reply.content[name]))
            del reply.content[name]
            if changed is not None:
                reply.content[name] = as_record(changed)
        return reply

    return apply


def flip(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Change a bit of what is sealed."""
    return {n: a ^ (np.arange(a.size) == 20) if n == "content" else a for n, a in arrays.items()}


silent = on_parcels(lambda _: None)


def in_step(own: RelayStrategy, number: int, position: int, change: Change) -> Change:
    """Change a reply in one step of one round."""
    return lambda reply: (
        change(reply) if (own.server_round, own._position) == (number, position) else reply
    )


def test_a_damaged_parcel_is_refused_and_its_sender_left_out():
    """As if clients 2 and 3, whose are not sealed, had sent nothing; the run and their round go on.

    Client 1's first parcels of round 2 are those of round 1, which do not open, either.
    """
    before: list[dict[str, ArrayRecord]] = []

    def replayed(reply: Message) -> Message:
        before.append(dict(reply.content.array_records))
        for name, record in before[0].items():
            reply.content[name] = record
        return reply

    def damage(own: RelayStrategy) -> Any:
        first = lambda reply: replayed(reply) if own._position == 0 else reply  # noqa: E731
        clear = on_parcels(lambda _: {"a": np.zeros(3, np.float32)})
        return {"changes": {1: first, 2: on_parcels(flip), 3: clear}}

    def leave_out(own: RelayStrategy) -> Any:
        return {"changes": {1: in_step(own, 2, 0, silent), 2: silent, 3: silent}}

    damaged, without = (CASES["DFedAvg"].run(2, of, seal=True) for of in (damage, leave_out))
    assert alike(damaged, without, 2) == EVERYONE
    # of three neighbours each, in both averages; client 1's in the first of round 2
    assert told(damaged, "parcels-rejected") == [2 * 3 * 2, 2 * 3 * 2 + 3]
    assert (told(damaged), told(without, "parcels-rejected")) == ([6, 6], [0, 0])


def forgets(own: RelayStrategy, client: int, what: str) -> Change:
    """Lose a client's folders, once."""
    done: list[int] = []

    def change(reply: Any) -> Any:
        for folder in (cache_dir() / "personal").glob(f"run-{own.run_key}-client-{client}*"):
            if not done and folder.name.endswith("-keys") == (what == "keys"):
                shutil.rmtree(folder)
        done.append(client)
        return reply

    return change


def test_keys_are_asked_for_again_of_clients_that_failed():
    """Client 3 sends what is no key in round 1, and client 2 loses its own before round 2."""

    def odd(reply: Message) -> Message:
        if own.server_round == 1:
            reply.content["properties"]["public-key"] = b"no key"
        return reply

    own = CASES["DFedAvg"].make(seal=True)
    lose = forgets(own, 2, "keys")
    grid = Grid(
        CASES["DFedAvg"].app(), changes={3: odd}, changed_kind="query.public_key",
        on_send=lambda sent: own.server_round == 2 and lose(sent),
    )  # fmt: skip
    start(own, grid, rounds=3)
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6, 1, 1]
    assert told(own) == [5, 5, 6]
    assert own.train_metrics[3]["parcels-rejected"] == 0


def test_a_client_with_keys_of_its_own_refuses_to_work_in_clear():
    clients = CASES["DFedAvg"].app(parcel_keys=ParcelKeys(new_key()))
    with pytest.raises(NoUsableReply, match="the strategy does not have parcels sealed"):
        start(CASES["DFedAvg"].make(), Grid(clients))


class Swapping(DFedAvg):
    """A relay that names a key of its own for client 2, and reads what is sealed for it."""

    thief = new_key()

    def _add_keys(self, config: Any, client: int) -> None:
        held = self.public_keys[2]
        if client != 2:
            self.public_keys[2] = (public_bytes(self.thief).hex(), held[1])
        super()._add_keys(config, client)
        self.public_keys[2] = held


@pytest.mark.parametrize("vouched", [False, True])
def test_a_relay_that_swaps_keys_reads_along_unless_a_key_server_vouches(vouched):
    """Sealing alone holds against a curious relay. With vouchers it gets nothing to read.

    Client 5 is not enrolled, and so has no voucher: it is sent nothing, and fails.
    """
    options: dict[str, Any] = {}
    keys, clients = keys_of(DFedAvgClient, options, **SGD)
    server = KeyServer(bytes(32), map(public_bytes, keys[:5]), Ed25519PrivateKey.generate())
    if vouched:
        options |= {"run": "a", "verify_key": server.verify_key}
    given = {"vouching": server, "run": "a"} if vouched else {}
    own = Swapping(seal=True, topology=COMPLETE, **ALL, **given)
    start(own, grid := Grid(clients))
    readable = [opens(parcel, own.thief, own.run_key, k) for k, _, parcel in parcels(grid, "up")]
    assert (any(readable), told(own)) == (not vouched, [6 - vouched])


# ------------------------------------------------------------------------- faults


def test_deviation_is_eq_12_and_grows_with_the_root_of_the_number_of_clients():
    rng = np.random.default_rng(0)
    models = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(5)]
    flat = np.stack([np.concatenate([m["a"].ravel(), m["b"]]) for m in models])
    expected = np.sqrt(((flat - flat.mean(0)) ** 2).sum(0)).mean()
    assert [deviation(models), deviation(models * 4)] == pytest.approx([expected, 2 * expected])


def nan(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def to_all(change: Change) -> Change:
    """Damage the record for all neighbours, if a reply has one; take it out for None."""

    def apply(reply: Message) -> Any:
        if "to-neighbours" in reply.content:
            reply.content["arrays"] = reply.content["to-neighbours"]
            del reply.content["to-neighbours"]
            if change(reply) is not None:
                reply.content["to-neighbours"] = reply.content["arrays"]
            del reply.content["arrays"]
        return reply

    return apply


def test_what_hostile_neighbours_send_is_dropped_and_counted(case):
    """NaN, and bytes that are no arrays, which the relay hands on unread: as if not heard."""
    kinds = dict(enumerate([with_arrays(nan), garbage, archive, boasting, lost], 1))
    attacked, without = (
        case.run(1, lambda _, of=of: {"changes": of}, topology=COMPLETE)
        for of in ({k: to_all(of) for k, of in kinds.items()}, dict.fromkeys(kinds, to_all(lost)))
    )
    assert alike(attacked, without) == EVERYONE
    exchanges = sum(step.name in ("weights", "average", "train") for step in attacked._planned)
    exchanges -= attacked._planned[-1].name == "average"  # which sends nothing
    assert told(attacked, "parcels-rejected") == [5 * 4 * exchanges]
    assert told(attacked) == [6]


def enlarge(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Multiply all numbers of a parcel by a million; they stay finite and well formed."""
    large = {n: a.dtype.kind == "f" and n not in ("targets", "inputs") for n, a in arrays.items()}
    return {n: (a * 1e6).astype(a.dtype) if large[n] else a for n, a in arrays.items()}


def claiming(count: int) -> Change:
    """Claim a number of examples, in parcels that do."""
    more = {"num-examples": np.array(count, np.int64)}
    return on_parcels(lambda arrays: arrays | more if "num-examples" in arrays else arrays)


@pytest.mark.parametrize(
    ("name", "change", "factor", "refused"),
    [
        ("DisPFL", on_parcels(enlarge), 100.0, True),
        ("NTKDFL", on_parcels(enlarge), 100.0, True),
        ("DPSGD", on_parcels(enlarge), 100.0, True),
        ("DPSGD", on_parcels(enlarge), float("inf"), False),
        ("DPSGD", claiming(21), 100.0, True),
        ("DisPFL", claiming(21), 100.0, True),
    ],
)
def test_weights_of_a_huge_norm_or_too_many_examples_are_refused(name, change, factor, refused):
    """With three or more to compare, the client itself among them: as if nothing had come.

    Without a limit they carry the average away. Examples are a neighbour's weight in it.
    """
    options = {"outlier_factor": factor, "max_examples": 20, "same_weights": False}
    attacked, without = (
        CASES[name].run(1, lambda _, own=own: {"changes": {2: own}}, **options)
        for own in (change, silent)
    )
    assert attacked.trained == dict.fromkeys(range(6), 1)
    assert (alike(attacked, without) >= EVERYONE - {2}) == refused
    assert (attacked.train_metrics[1]["parcels-rejected"] >= 3) == refused


@pytest.mark.parametrize(("factor", "models"), [(100.0, 5), (float("inf"), 6)])
def test_a_model_of_a_huge_norm_is_left_out_of_the_mean_unless_there_is_no_limit(factor, models):
    own = CASES["DPSGD"].make(outlier_factor=factor)
    changes = {"changes": {2: with_arrays(enlarge)}, "changed_kind": "evaluate.model"}
    found = start(own, Grid(CASES["DPSGD"].app(), **changes))
    assert own.train_metrics[1]["models-collected"] == len(own.models) == models
    assert (np.abs(found["0.weight"]).max() < 1e3) == (models == 5)


def test_a_hostile_jacobian_of_a_neighbour_is_refused():
    """Rows a million times as large, after weights and averages as they should be."""

    def attack(own: RelayStrategy) -> Any:
        return {"changes": {2: in_step(own, 1, 2, on_parcels(enlarge))}}

    own = CASES["NTKDFL"].run(1, attack, topology=COMPLETE)
    assert (told(own, "parcels-rejected"), told(own)) == ([5], [6])


def test_replies_with_weights_or_parcels_for_strangers_are_refused():
    """The relay tells weights by their record's name: parcels named like them are handed on."""
    topology = Topology("ring", seed=3)
    near = topology.neighbours(1, range(6))[1]
    stranger = next(k for k in range(6) if k not in (1, *near))

    def copied(name: str) -> Change:
        def apply(reply: Message) -> Message:
            reply.content[name] = reply.content["to-neighbours"]
            return reply

        return apply

    as_network = on_parcels(lambda a: {n: w for n, w in a.items() if n != "num-examples"})
    changes = {1: copied(f"to-{stranger}"), 2: as_network, 3: copied("arrays")}
    own = CASES["DFedAvg"].run(1, lambda _: {"changes": changes}, topology=topology)
    metrics = own.train_metrics[1]
    assert (metrics["rejected-weights"], metrics["rejected-arrays"], told(own)) == (1, 1, [4])
    assert f"is the client a {own.client}?" in own.last_refusal


def test_what_clients_say_of_refused_parcels_counts_within_reason():
    """At most as many as there are clients, each; what is no whole number above 0 does not."""
    said: list[Any] = [[1, 2], -5, 0.5, 10**15, 2, 0]
    assert parcels_refused([(SimpleNamespace(metrics={REFUSED: n}), None) for n in said]) == 6 + 2
    assert parcels_refused([(SimpleNamespace(metrics={}), None)]) == 0


# ----------------------------------------------------------- who is gone, or returns


def test_a_static_graph_stays_as_it_is_where_a_client_is_missing():
    """Drawn among those who are there, one client fewer would give all of them other neighbours."""
    own, resumed = (
        CASES["DFedAvg"].make(topology=Topology(degree=3, dynamic=False, seed=4)) for _ in range(2)
    )
    before, present = own.graph(1, range(6)), [0, 1, 2, 4, 5]
    after = own.graph(2, present)
    assert after == {k: tuple(j for j in before[k] if j != 3) for k in present}
    assert after != own.topology.neighbours(2, present)
    resumed.load_state_dict(own.state_dict())
    assert resumed.graph(2, present) == after


def test_a_client_that_returns_after_rounds_goes_on_with_its_weights(case, monkeypatch):
    """Client 5 fails in rounds 2 to 4, and is back in round 5, with its weights of round 1.

    They stay however many rounds fail; here two rounds are kept. Of a round in which it failed it
    has no models around the average. Its return has the steps of a first round for all.
    """
    monkeypatch.setattr(personal_store, "KEPT", 2)
    collected: list[Any] = []

    def absent(reply: Message) -> Message:
        return failed(reply) if 2 <= own.server_round <= 4 else reply

    def note(*_: Any) -> None:
        collected.append((len(own.models), len(own.models_before)))

    own = case.make(topology=COMPLETE, collect_both=True)
    grid = Grid(case.app(), changes={5: absent})
    start(own, grid, rounds=5, evaluate_fn=note)
    assert (told(own), own.trained) == ([6, 5, 5, 5, 6], dict.fromkeys(range(6), 5))
    assert own.train_metrics[5].get("restarted", 0) == 0
    planned = sum(len(own.plan(first=first)) for first in (True, False, True, True, True))
    assert [kind for kind, _ in grid.exchanges].count("train") == planned
    assert collected[4] == (6, 5)


def test_a_client_that_lost_its_weights_sends_its_neighbours_none(case):
    """With `seal` weights travel as a round begins: who lost its own must not send first ones.

    The others end the round as if it had sent nothing then; it says that it was restarted, and
    takes over their average, with which NTK-DFL evolves and DFedAvg ends (float32: 1e-5).
    """

    def losing(own: RelayStrategy) -> Change:
        return in_step(own, 1, len(own.plan(first=True)) - 1, forgets(own, 5, "weights"))

    loser, hushed = (
        case.run(2, grid, topology=COMPLETE, seal=True)
        for grid in (
            lambda own: {"changes": {5: losing(own)}},
            lambda own: {"changes": {5: lambda r: in_step(own, 2, 0, silent)(losing(own)(r))}},
        )
    )
    assert alike(loser, hushed, 2) >= EVERYONE - {5}
    if case.strategy in (NTKDFL, DFedAvg):
        for name, array in kept_by(loser, 0, 2).items():
            np.testing.assert_allclose(kept_by(loser, 5, 2)[name], array, atol=1e-5)
    metrics = loser.train_metrics[2]
    assert metrics["replies-accepted"] == 6
    assert metrics["restarted"] == pytest.approx(10 / 45)  # client 5 has 10 of the 45 examples


def test_a_client_that_lost_the_first_weights_is_sent_them_again():
    """Its folder goes after its first reply: it fails in round 1, and takes part in round 2."""
    own = CASES["NTKDFL"].make(topology=COMPLETE, seal=True)
    lose = in_step(own, 1, 0, forgets(own, 5, "weights"))
    start(own, grid := Grid(CASES["NTKDFL"].app(), changes={5: lose}), rounds=2)
    assert (told(own), own.trained[5]) == ([5, 6], 2)
    assert sent_first(grid) == {**dict.fromkeys(range(5), 1), 5: 2}
