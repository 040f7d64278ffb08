"""What all methods share that go through the relay: sealed parcels, first weights, faults."""

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedntk.clients import (
    DFedAvgClient,
    DisPFLClient,
    DPSGDClient,
    NTKDFLClient,
    SGDClient,
    cache_dir,
)
from fedntk.clients.personal import personal_store
from fedntk.strategies import (
    DPSGD,
    NTKDFL,
    DFedAvg,
    DFedSAM,
    DisPFL,
    NoUsableReply,
    RelayStrategy,
    Topology,
    mixing_matrix,
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
    network,
    start,
    with_arrays,
)

SGD: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 4, "local_epochs": 1}
ALL: dict[str, Any] = {"min_available_nodes": 6, "fraction_evaluate": 0.0}
MSE = {"loss": "mse"}


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


CASES = {
    "NTKDFL": Case(NTKDFL, NTKDFLClient, {"learning_rate": 0.1, "steps": (2.0, 5.0), **MSE}, MSE),
    "DFedAvg": Case(DFedAvg, DFedAvgClient, {"gossip_steps": 2}, SGD),
    "DPSGD": Case(DPSGD, DPSGDClient, {"mixing": "metropolis"}, SGD),
    "DisPFL": Case(DisPFL, DisPFLClient, {"same_masks": False}, SGD),
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class Run(NamedTuple):
    case: Case
    strategy: RelayStrategy
    grid: Grid
    found: dict[str, np.ndarray]

    def parcels(self, way: str) -> list[tuple[int, str, ArrayRecord]]:
        """Client that was sent it, or sent it, and name and arrays of each parcel in training."""
        return [
            ((m.metadata.dst_node_id if way == "down" else m.metadata.src_node_id) - 1, name, own)
            for direction, m in self.grid.seen
            if direction == way and m.metadata.message_type == "train" and m.has_content()
            for name, own in m.content.array_records.items()
            if name != "arrays"
        ]


@pytest.fixture(scope="module", params=sorted(CASES))
def runs(request: pytest.FixtureRequest) -> dict[bool, Run]:
    """Two rounds of graphs drawn anew; sealed or not."""
    case, made = CASES[request.param], {}
    for seal in (False, True):
        own, grid = case.make(seal=seal, collect_both=True), Grid(case.app())
        made[seal] = Run(case, own, grid, start(own, grid, rounds=2))
    return made


# ------------------------------------------------------------------ sealed parcels


def test_sealed_runs_have_the_bits_of_others(runs):
    """The mean model and each client's weights."""
    assert bits(runs[True].found) == bits(runs[False].found)
    for client in range(6):
        kept = [bits(kept_by(run.strategy, client, 2)) for run in runs.values()]
        assert kept[0] == kept[1]
    metrics = runs[True].strategy.train_metrics[2]
    assert (metrics["parcels-rejected"], metrics["neighbours-heard"]) == (0, 3)


def test_all_that_clients_send_each_other_is_ciphertext(runs):
    """Bytes of the clients' weights pass through an unsealed run, and not through a sealed one."""
    for seal, run in runs.items():
        sent = [own for way in ("down", "up") for *_, own in run.parcels(way)]
        everything = b"".join(array.data for own in sent for array in own.values())
        trained = kept_by(run.strategy, 0, 1)  # two numbers of a row of weights, wherever they go
        parts = [a.tobytes()[k : k + 8] for a in trained.values() if a.dtype.kind == "f"
                 for k in range(0, a.nbytes - 8, 8) if a.ravel()[k // a.itemsize] != 0]  # fmt: skip
        assert any(part in everything for part in parts) != seal
        for own in sent if seal else ():
            assert {name.partition("-")[0] for name in own} == {"content", "key"}


def test_what_ends_a_sealed_round_is_sealed_for_nobody_and_keys_are_asked_for_once(runs):
    """Its receivers are the next round's neighbours, who then are sent it as that begins."""
    own, grid = runs[True].strategy, runs[True].grid
    up = [len(m.content.array_records) for way, m in grid.seen
          if way == "up" and m.metadata.message_type == "train"]  # fmt: skip
    exchanges = [sum(up[k : k + 6]) for k in range(0, len(up), 6)]
    length = len(own._planned)
    assert len(exchanges) == 2 * length
    assert [k for k, count in enumerate(exchanges) if not count] == [length - 1, 2 * length - 1]
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6]
    paths = list((cache_dir() / "personal").glob(f"run-{own.run_key}-client-*-keys/key.pem"))
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert len(paths) == 6


def test_first_weights_travel_once(runs):
    """Each client gets them with its first message, and none with those that follow."""
    for run in runs.values():
        asked = Counter(
            m.metadata.dst_node_id for way, m in run.grid.seen
            if way == "down" and "arrays" in m.content
        )  # fmt: skip
        assert asked == dict.fromkeys(range(1, 7), 1)


def test_both_models_of_a_round_are_those_around_its_average(runs):
    """Averaged ones are W times what was sent: the trained ones, or those of the round before.

    Weights in float32: 1e-6. DisPFL's masks and two gossip steps have other averages.
    """
    own, case = runs[False].strategy, runs[False].case
    averaged, trained = (own.models_at[point] for point in ("averaged", "trained"))
    for client, model in own.models.items():
        kept = kept_by(own, client, 2)
        assert bits(model) == bits({name: kept[name] for name in model})
    rule = "examples" if case.strategy in (NTKDFL, DFedAvg) else "metropolis"
    matrix = mixing_matrix(own.neighbours, {k: 5 + k for k in range(6)}, rule)
    if case.strategy is DFedAvg:
        matrix = matrix @ matrix
    for array in ("0.weight", "3.bias") if case.strategy is not DisPFL else ():
        sent = [trained[k] if case.strategy is DFedAvg else kept_by(own, k, 1) for k in range(6)]
        before = np.stack([each[array].ravel() for each in sent])
        found = np.stack([averaged[k][array].ravel() for k in range(6)])
        np.testing.assert_allclose(found, matrix @ before, atol=1e-6)
        assert np.abs(found - np.stack([trained[k][array].ravel() for k in range(6)])).max() > 1e-4


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
    own, grid = CASES["NTKDFL"].make(seal=True, topology=Topology("ring")), Grid(clients)
    opened = Counter()
    run = Run(CASES["NTKDFL"], own, grid, start(own, grid))
    for receiver, name, parcel in run.parcels("down"):
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


def flipped(part: str) -> Any:
    """Change a bit in an array of each parcel."""

    def flip(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name in [name for name in arrays if name.startswith(part)]:
            arrays[name] = arrays[name].copy()
            arrays[name][arrays[name].size // 2] ^= 1
        return arrays

    return on_parcels(flip)


silent = on_parcels(lambda _: None)


def test_a_damaged_parcel_is_refused_and_its_sender_left_out():
    """As if clients 2 to 4 had sent nothing; it is no reason to end a run, or their own round.

    Client 1's first parcels of round 2 are those of round 1, which do not open, either; client 3's
    are not sealed.
    """
    case = CASES["DFedAvg"]
    damaged, without = (case.make(seal=True, collect=False) for _ in range(2))
    before: list[dict[str, ArrayRecord]] = []

    def replayed(reply: Message) -> Message:
        if damaged._position == 0:
            before.append(dict(reply.content.array_records))
            for name, record in before[0].items():
                reply.content[name] = record
        return reply

    def late(reply: Message) -> Message:
        return silent(reply) if (without.server_round, without._position) == (2, 0) else reply

    in_clear = on_parcels(lambda _: {"a": np.zeros(3, np.float32)})
    changes = {2: flipped("content"), 4: flipped("key-"), 3: in_clear, 1: replayed}
    start(damaged, Grid(case.app(), changes=changes), rounds=2)
    changes = {**dict.fromkeys((2, 3, 4), silent), 1: late}
    start(without, Grid(case.app(), changes=changes), rounds=2)
    for client in range(6):
        assert bits(kept_by(damaged, client, 2)) == bits(kept_by(without, client, 2))
    first, second = (damaged.train_metrics[number] for number in (1, 2))
    assert first["replies-accepted"] == second["replies-accepted"] == 6
    # of three neighbours each, in both averages; client 1's in the first of round 2
    assert (first["parcels-rejected"], second["parcels-rejected"]) == (3 * 3 * 2, 3 * 3 * 2 + 3)
    assert without.train_metrics[2]["parcels-rejected"] == 0


def test_what_hostile_neighbours_send_is_dropped_and_counted(case, caplog):
    """NaN, and bytes that are no arrays, which the relay hands on unread: as if not heard."""
    options = {"topology": Topology("complete"), "collect": False}
    attacked, without = (case.make(**options) for _ in range(2))
    kinds = [with_arrays(nan), garbage, archive, boasting]
    changes = dict(enumerate(map(on_weights, kinds), 2))
    start(attacked, Grid(case.app(), changes=changes))
    start(without, Grid(case.app(), changes=dict.fromkeys(changes, on_weights(lambda _: None))))
    for client in range(6):
        assert bits(kept_by(attacked, client, 1)) == bits(kept_by(without, client, 1))
    exchanges = sum(step.name in ("weights", "average", "train") for step in attacked._planned)
    exchanges -= attacked._planned[-1].name == "average"  # which sends nothing
    metrics = attacked.train_metrics[1]
    assert metrics["parcels-rejected"] == 5 * len(kinds) * exchanges
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (6, 0)
    assert "dropped what came from-3" in caplog.text


def nan(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def on_weights(change: Change) -> Change:
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


def forgets(own: RelayStrategy, client: int, when: Callable[[], bool], what: str) -> Any:
    """Reply as usual, and lose a client's folders, once."""
    lost: list[int] = []

    def change(reply: Any) -> Any:
        if when() and not lost:
            lost.append(client)
            for folder in (cache_dir() / "personal").glob(f"run-{own.run_key}-client-{client}*"):
                if folder.name.endswith("-keys") == (what == "keys"):
                    shutil.rmtree(folder)
        return reply

    return change


def test_keys_are_asked_for_again_of_a_client_that_failed():
    """Client 2 loses its key after round 1: it fails in round 2, and is back in round 3."""
    own = CASES["DFedAvg"].make(seal=True)
    lose = forgets(own, 2, lambda: own.server_round == 2, "keys")
    grid = Grid(CASES["DFedAvg"].app(), on_send=lose)
    start(own, grid, rounds=3)
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6, 1]
    accepted = [own.train_metrics[number]["replies-accepted"] for number in (1, 2, 3)]
    assert accepted == [6, 5, 6]
    assert own.train_metrics[3]["parcels-rejected"] == 0


def test_a_client_with_keys_of_its_own_refuses_to_work_in_clear():
    clients = CASES["DFedAvg"].app(parcel_keys=ParcelKeys(new_key()))
    with pytest.raises(NoUsableReply, match="the strategy does not have parcels sealed"):
        start(CASES["DFedAvg"].make(), Grid(clients))


def test_a_client_whose_public_key_is_none_hears_nobody_and_is_heard_by_nobody():
    """It fails each round, as it knows no key of its own that others have."""

    def odd(reply: Message) -> Message:
        reply.content["properties"]["public-key"] = b"no key"
        return reply

    own = CASES["DFedAvg"].make(seal=True)
    start(own, Grid(CASES["DFedAvg"].app(), changes={3: odd}, changed_kind="query.public_key"))
    assert own.train_metrics[1]["replies-accepted"] == 5
    assert own.train_metrics[1]["rejected-error"] == 1


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
    """Sealing alone holds against a curious relay. With vouchers it gets nothing to read."""
    options: dict[str, Any] = {}
    keys, clients = keys_of(DFedAvgClient, options, **SGD)
    if vouched:
        server = KeyServer(bytes(32), map(public_bytes, keys), Ed25519PrivateKey.generate())
        options |= {"run": "a", "verify_key": server.verify_key}
    given = {"vouching": server, "run": "a"} if vouched else {}
    own = Swapping(seal=True, topology=Topology("ring"), **ALL, **given)
    grid = Grid(clients)
    run = Run(CASES["DFedAvg"], own, grid, start(own, grid))
    readable = [opens(parcel, own.thief, own.run_key, k) for k, _, parcel in run.parcels("up")]
    assert any(readable) == (not vouched)
    assert own.train_metrics[1]["replies-accepted"] == 6


def test_who_is_not_enrolled_is_sent_nothing():
    """Of six clients the key server knows five: the sixth has no voucher, and no key."""
    options: dict[str, Any] = {}
    keys, clients = keys_of(DFedAvgClient, options, **SGD)
    server = KeyServer(bytes(32), map(public_bytes, keys[:5]), Ed25519PrivateKey.generate())
    options |= {"run": "a", "verify_key": server.verify_key}
    own = CASES["DFedAvg"].make(
        seal=True, vouching=server, run="a", topology=Topology("complete"), gossip_steps=1
    )
    start(own, Grid(clients))
    metrics = own.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["rejected-error"]) == (5, 1)
    assert metrics["neighbours-heard"] == pytest.approx(4)


def test_vouchers_without_sealing_or_a_name_are_refused():
    server = KeyServer(bytes(32), [], Ed25519PrivateKey.generate())
    for options in ({"vouching": server}, {"vouching": server, "seal": True}):
        with pytest.raises(ValueError, match="vouching: expected seal=True and the name"):
            DFedAvg(**options)


# ------------------------------------------------------------------------- mixing


def test_a_part_of_the_clients_has_a_gap_and_a_method_without_averages_none():
    some = {"topology": Topology("complete"), "fraction_train": 0.5, "min_train_nodes": 3}
    own, alone = CASES["DPSGD"].make(**some), CASES["NTKDFL"].make(average=False, **some)
    start(own, Grid(CASES["DPSGD"].app()), rounds=2)
    assert [own.train_metrics[n]["spectral-gap"] for n in (1, 2)] == pytest.approx([1, 1])
    start(alone, Grid(CASES["NTKDFL"].app()))
    assert "spectral-gap" not in alone.train_metrics[1]


@pytest.mark.parametrize("name", ["NTKDFL", "DisPFL"])
def test_without_edges_it_is_training_alone(name):
    """A client's weights are those of a run in which it is the only one."""
    case = CASES[name]
    none = {"topology": Topology("own", graph=[]), "collect": False}
    own, alone = case.make(**none), case.make(**none, min_train_nodes=1, min_available_nodes=1)
    start(own, Grid(case.app()), rounds=2)
    start(alone, Grid(case.app(), num_clients=1), rounds=2)
    assert bits(kept_by(own, 0, 2)) == bits(kept_by(alone, 0, 2))
    assert bits(kept_by(own, 0, 2)) != bits(kept_by(own, 0, 1))
    assert own.train_metrics[2]["spectral-gap"] == pytest.approx(0)


# ------------------------------------------------------------------------- faults


def cuts(lost: Callable[[int, str], bool]) -> Callable[[list[Message]], None]:
    """Lose on its way what one client sends another."""

    def apply(messages: list[Message]) -> None:
        for message in messages:
            for name in list(message.content.array_records):
                if lost(message.metadata.dst_node_id - 1, name):
                    del message.content[name]

    return apply


def test_a_static_graph_stays_as_it_is_where_a_client_is_missing():
    """Drawn among those who are there, one client fewer would give all of them other neighbours."""
    strategy = CASES["DFedAvg"].make(topology=Topology(degree=3, dynamic=False, seed=4))
    strategy.graph(1, range(6))
    before, present = strategy.graph(1, range(6)), [0, 1, 2, 4, 5]
    after = strategy.graph(2, present)
    assert after == {k: tuple(j for j in before[k] if j != 3) for k in present}
    assert after != strategy.topology.neighbours(2, present)
    resumed = CASES["DFedAvg"].make(topology=Topology(degree=3, dynamic=False, seed=4))
    resumed.load_state_dict(strategy.state_dict())
    assert resumed.graph(2, present) == after
    drawn_anew = CASES["DFedAvg"].make(topology=Topology(degree=3, seed=4))
    drawn_anew.graph(1, range(6))
    assert drawn_anew.graph(2, present) == drawn_anew.topology.neighbours(2, present)


@pytest.mark.parametrize("name", ["DPSGD", "NTKDFL"])
def test_an_edge_that_drops_out_leaves_both_ends_at_work(name):
    """Between clients 0 and 2, in both rounds and ways: as if the graph had not had it.

    Neighbours count by examples or the same: the shares of a row then leave out who was not heard.
    """
    case, edges = CASES[name], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]
    mixing = {} if case.strategy is NTKDFL else {"mixing": "equal"}
    whole, without = (
        case.make(topology=Topology("own", graph=[*edges, *more]), collect=False, **mixing)
        for more in ([(0, 2)], [])
    )
    lost: list[str] = []

    def cut(receiver: int, name: str) -> bool:
        found = (receiver, name) in ((0, "from-2"), (2, "from-0"))
        lost.extend([name] * found)
        return found

    start(whole, Grid(case.app(), on_send=cuts(cut)), rounds=2)
    start(without, Grid(case.app()), rounds=2)
    assert len(lost) >= 4
    for client in range(6):
        assert bits(kept_by(whole, client, 2)) == bits(kept_by(without, client, 2))
    assert whole.train_metrics[2]["replies-accepted"] == 6


def test_an_edge_that_drops_out_within_a_round_is_felt_from_then_on():
    """The Jacobian that client 2 sends client 0 is lost: client 0 evolves without those rows."""
    own = CASES["NTKDFL"].make(topology=Topology("complete"), collect=False)

    def cut(receiver: int, name: str) -> bool:
        return own._step.name == "evolve" and (receiver, name) == (0, "from-2")

    start(own, Grid(CASES["NTKDFL"].app(), on_send=cuts(cut)))
    assert own.train_metrics[1]["replies-accepted"] == 6
    heard = own.train_metrics[1]["neighbours-heard"]
    assert heard == pytest.approx((4 * 5 + 5 * (45 - 5)) / 45)  # by examples: client 0 has 5
    mine, *others = (kept_by(own, k, 1)["0.weight"] for k in (0, 1, 3))
    apart = np.abs(others[0] - others[1]).max()
    assert min(np.abs(mine - other).max() for other in others) > 10 * apart  # they have one kernel


def test_a_client_that_returns_after_rounds_catches_up_by_averaging(case, monkeypatch):
    """Client 5 fails in rounds 2 to 4, and is back in round 5, with its weights of round 1.

    They stay however many rounds fail; here two rounds are kept. A round that lacks what one of its
    clients sent at the end of the round before has the steps of a first round.

    On the complete graph all have one average, so what client 5 ends round 5 with is as near to the
    others' as theirs are to each other's; what it ended round 1 with was not. It has no models
    around the average of a round in which it failed.
    """

    monkeypatch.setattr(personal_store, "KEPT", 2)

    def absent(reply: Message) -> Message:
        return failed(reply) if 2 <= own.server_round <= 4 else reply

    collected: list[Any] = []

    def note(*_: Any) -> None:
        if own.server_round == 4 and own.models_before:
            collected.append((sorted(own.models), sorted(own.models_before)))

    equal = {"same_masks": True, "prune_share": 0.0} if case.strategy is DisPFL else {}
    own = case.make(topology=Topology("complete"), collect_both=True, **equal)
    grid = Grid(case.app(), changes={5: absent})
    start(own, grid, rounds=5, evaluate_fn=note)
    assert [own.train_metrics[n]["replies-accepted"] for n in range(1, 6)] == [6, 5, 5, 5, 6]
    assert own.trained == dict.fromkeys(range(6), 5)
    assert own.train_metrics[5].get("restarted", 0) == 0
    planned = sum(len(own.plan(first=first)) for first in (True, False, True, True, True))
    assert [kind for kind, _ in grid.exchanges].count("train") == planned
    assert collected[-1] == (list(range(6)), list(range(5)))

    def flat(client: int, number: int) -> np.ndarray:
        kept = kept_by(own, client, number)
        return np.concatenate([kept[name].ravel() for name in own.models[0]])

    def distances(number: int, last: int) -> tuple[float, float]:
        others, its = [flat(k, number) for k in range(5)], flat(5, last)
        among = [float(np.linalg.norm(a - b)) for a in others for b in others]
        return max(float(np.linalg.norm(its - a)) for a in others), max(among)

    (stale, before), (back, now) = distances(4, 1), distances(5, 5)
    assert stale > 1.5 * before
    assert back < 2 * now + 1e-5


def enlarge(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Multiply all numbers of a parcel by a million; they stay finite and well formed."""
    large = {n: a.dtype.kind == "f" and n not in ("targets", "inputs") for n, a in arrays.items()}
    return {n: (a * 1e6).astype(a.dtype) if large[n] else a for n, a in arrays.items()}


@pytest.mark.parametrize(
    ("name", "factor"),
    [("DisPFL", 100.0), ("NTKDFL", 100.0), ("DPSGD", 100.0), ("DPSGD", float("inf"))],
)
def test_weights_of_a_huge_norm_are_refused_by_who_gets_them(name, factor):
    """With three or more to compare, the client itself among them: as if nothing had come.

    With no limit, which `outlier_factor` may say, they carry the average away.
    """
    case, refused = CASES[name], factor == 100
    attacked, without = (case.make(outlier_factor=factor, collect=False) for _ in range(2))
    start(attacked, Grid(case.app(), changes={2: on_parcels(enlarge)}))
    start(without, Grid(case.app(), changes={2: silent}))
    assert attacked.trained == dict.fromkeys(range(6), 1)
    assert same_but_for(2, attacked, without) == refused
    assert (attacked.train_metrics[1]["parcels-rejected"] >= 3) == refused


def same_but_for(other: int, a: RelayStrategy, b: RelayStrategy) -> bool:
    """Whether all clients but one ended round 1 of two runs with the same bits."""
    clients = set(range(6)) - {other}
    return all(bits(kept_by(a, k, 1)) == bits(kept_by(b, k, 1)) for k in clients)


@pytest.mark.parametrize(("name", "count"), [("DPSGD", 20), ("DPSGD", 21), ("DisPFL", 21)])
def test_a_neighbour_claims_at_most_the_examples_that_the_strategy_allows(name, count):
    """They are its weight in an average: with more, it would be nearly all of it."""
    case, refused = CASES[name], count > 20
    options = {"max_examples": 20, "same_weights": False, "collect": False}
    own, without = (case.make(**options) for _ in range(2))
    more = {"num-examples": np.array(count, np.int64)}
    claim = on_parcels(lambda arrays: arrays | more if "num-examples" in arrays else arrays)
    quiet = on_parcels(lambda arrays: None if "num-examples" in arrays else arrays)
    start(own, Grid(case.app(), changes={2: claim}))
    start(without, Grid(case.app(), changes={2: quiet}))
    assert same_but_for(2, own, without) == refused
    assert (own.train_metrics[1]["parcels-rejected"] >= 3) == refused
    assert own.train_metrics[1]["replies-accepted"] == 6


def test_a_model_of_a_huge_norm_is_left_out_of_the_mean():
    def change(reply: Message) -> Message:
        reply.content["arrays"] = as_record(enlarge(arrays_of(reply.content["arrays"])))
        return reply

    own = CASES["DPSGD"].make()
    grid = Grid(CASES["DPSGD"].app(), changes={2: change}, changed_kind="evaluate.model")
    found = start(own, grid)
    assert own.train_metrics[1]["models-collected"] == len(own.models) == 5
    assert max(np.abs(a).max() for n, a in found.items() if n != "1.num_batches_tracked") < 1e3


def test_parcels_named_like_the_network_are_handed_on_and_weights_are_not():
    """The relay tells a client that replies with weights by its record's name, and no other way."""
    own, weights = CASES["DFedAvg"].make(), arrays_of(ArrayRecord(dict(network().state_dict())))

    def in_the_clear(reply: Message) -> Message:
        reply.content["arrays"] = as_record(weights)
        return reply

    changes = {1: in_the_clear, 2: on_parcels(lambda _: weights)}
    start(own, Grid(CASES["DFedAvg"].app(), changes=changes))
    assert own.train_metrics[1]["replies-accepted"] == 5
    assert own.train_metrics[1]["rejected-weights"] == 1
    assert f"weights came, not parcels: is the client a {own.client}?" in own.last_refusal


def ends_round_1(own: RelayStrategy) -> bool:
    return (own.server_round, own._position) == (1, len(own._planned) - 1)


def test_a_client_that_lost_its_weights_sends_its_neighbours_none(case):
    """With `seal` weights travel as a round begins: who lost its own must not send first ones.

    The others end the round as if it had sent nothing then; it says that it was restarted, and
    takes over their average, with which NTK-DFL evolves and DFedAvg ends (float32: 1e-5).
    """
    made = []
    for quiet in (False, True):
        own = case.make(collect=False, topology=Topology("complete"), seal=True)
        lose = forgets(own, 5, partial(ends_round_1, own), "weights")

        def change(reply: Message, own: Any = own, quiet: Any = quiet, lose: Any = lose) -> Message:
            first = quiet and (own.server_round, own._position) == (2, 0)
            return silent(reply) if first else lose(reply)

        start(own, Grid(case.app(), changes={5: change}), rounds=2)
        made.append(own)
    for client in range(5):
        assert bits(kept_by(made[0], client, 2)) == bits(kept_by(made[1], client, 2))
    if case.strategy in (NTKDFL, DFedAvg):
        for name, array in kept_by(made[0], 0, 2).items():
            np.testing.assert_allclose(kept_by(made[0], 5, 2)[name], array, atol=1e-5)
    metrics = made[0].train_metrics[2]
    assert metrics["replies-accepted"] == 6
    assert metrics["restarted"] == pytest.approx(10 / 45)  # client 5 has 10 of the 45 examples


def test_a_client_that_lost_the_first_weights_is_sent_them_again():
    """Its folder goes after its first reply: it fails in round 1, and takes part in round 2."""
    own = CASES["NTKDFL"].make(topology=Topology("complete"), seal=True)
    lose = forgets(own, 5, lambda: own._position == 0, "weights")
    grid = Grid(CASES["NTKDFL"].app(), changes={5: lose})
    start(own, grid, rounds=2)
    assert [own.train_metrics[number]["replies-accepted"] for number in (1, 2)] == [5, 6]
    assert own.trained[5] == 2
    asked = Counter(m.metadata.dst_node_id - 1 for way, m in grid.seen
                    if way == "down" and "arrays" in m.content)  # fmt: skip
    assert asked == {**dict.fromkeys(range(5), 1), 5: 2}


@pytest.mark.parametrize("strategy", [CASES["NTKDFL"].make(), DFedSAM(**ALL)], ids=str)
def test_another_client_is_told_what_to_use(strategy):
    with pytest.raises(NoUsableReply, match=f"client_fn return a {strategy.client}"):
        start(strategy, Grid(app(SGDClient)))


def test_what_clients_say_of_refused_parcels_counts_within_reason():
    """At most as many as there are clients, each; what is no whole number above 0 does not."""
    said: list[Any] = [[1, 2], -5, 0.5, 10**15, 2, 0]
    assert parcels_refused([(SimpleNamespace(metrics={REFUSED: n}), None) for n in said]) == 6 + 2
    assert parcels_refused([(SimpleNamespace(metrics={}), None)]) == 0


def test_parcels_for_who_is_no_neighbour_are_refused():
    own = CASES["DPSGD"].make(topology=Topology("ring", seed=3), collect=False)
    near = own.topology.neighbours(1, range(6))
    stranger = next(k for k in range(6) if k not in near[2] and k != 2)

    def change(reply: Message) -> Message:
        reply.content[f"to-{stranger}"] = reply.content["to-neighbours"]
        return reply

    start(own, Grid(CASES["DPSGD"].app(), changes={2: change}))
    assert own.train_metrics[1]["rejected-arrays"] == 1


def test_deviation_is_eq_12_and_grows_with_the_root_of_the_number_of_clients():
    rng = np.random.default_rng(0)
    models = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(5)]
    flat = np.stack([np.concatenate([m["a"].ravel(), m["b"]]) for m in models])
    expected = np.sqrt(((flat - flat.mean(0)) ** 2).sum(0)).mean()
    assert deviation(models) == pytest.approx(expected)
    assert deviation(models * 4) == pytest.approx(2 * expected)


def test_a_hostile_jacobian_of_a_neighbour_is_refused():
    """Rows a million times as large. A majority that agrees on them sets the measure itself.

    Of six on the complete graph four attack. The two others have four such rows and two good ones:
    none of the four is an outlier. Each attacker has three of them, and three good ones.
    """
    rejected = {}
    for attackers in ((2,), (2, 3, 4, 5)):
        own = CASES["NTKDFL"].make(topology=Topology("complete"), collect=False)

        def change(reply: Message, own: Any = own) -> Message:
            return on_parcels(enlarge)(reply) if own._step.name == "jacobians" else reply

        start(own, Grid(CASES["NTKDFL"].app(), changes=dict.fromkeys(attackers, change)))
        rejected[attackers] = own.train_metrics[1]["parcels-rejected"]
        assert own.train_metrics[1]["replies-accepted"] == 6
    assert rejected == {(2,): 5, (2, 3, 4, 5): 4 * 3}
