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
    """The mean model and each client's weights; first weights travel once, with first messages."""
    assert bits(runs[True].found) == bits(runs[False].found)
    assert alike(runs[True].strategy, runs[False].strategy, 2) == EVERYONE
    metrics = runs[True].strategy.train_metrics[2]
    assert (metrics["parcels-rejected"], metrics["neighbours-heard"]) == (0, 3)
    for run in runs.values():
        assert sent_first(run.grid) == dict.fromkeys(EVERYONE, 1)


def sent_first(grid: Grid) -> Counter[int]:
    """How often each client was sent the network's weights."""
    down = [m for way, m in grid.seen if way == "down" and "arrays" in m.content]
    return Counter(m.metadata.dst_node_id - 1 for m in down)


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
    exchanges, length = [sum(up[k : k + 6]) for k in range(0, len(up), 6)], len(own._planned)
    assert len(exchanges) == 2 * length
    assert [k for k, count in enumerate(exchanges) if not count] == [length - 1, 2 * length - 1]
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6]
    paths = list((cache_dir() / "personal").glob(f"run-{own.run_key}-client-*-keys/key.pem"))
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 6


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
        found, other = (np.stack([at[k][array].ravel() for k in range(6)])
                        for at in (averaged, trained))  # fmt: skip
        np.testing.assert_allclose(found, matrix @ before, atol=1e-6)
        assert np.abs(found - other).max() > 1e-4


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


def in_step(own: RelayStrategy, number: int, position: int, change: Change) -> Change:
    """Change a reply in one step of one round."""
    return lambda reply: (
        change(reply) if (own.server_round, own._position) == (number, position) else reply
    )


def test_a_damaged_parcel_is_refused_and_its_sender_left_out():
    """As if clients 2 to 4 had sent nothing; it is no reason to end a run, or their own round.

    Client 1's first parcels of round 2 are those of round 1, which do not open, either; client 3's
    are not sealed.
    """
    before: list[dict[str, ArrayRecord]] = []

    def replayed(reply: Message) -> Message:
        before.append(dict(reply.content.array_records))
        for name, record in before[0].items():
            reply.content[name] = record
        return reply

    def damage(own: RelayStrategy) -> Any:
        def first(reply: Message) -> Message:
            return replayed(reply) if own._position == 0 else reply

        clear = on_parcels(lambda _: {"a": np.zeros(3, np.float32)})
        return {"changes": {1: first, 2: flipped("content"), 3: clear, 4: flipped("key-")}}

    def leave_out(own: RelayStrategy) -> Any:
        return {"changes": {1: in_step(own, 2, 0, silent), **dict.fromkeys((2, 3, 4), silent)}}

    damaged, without = (CASES["DFedAvg"].run(2, of, seal=True) for of in (damage, leave_out))
    assert alike(damaged, without, 2) == EVERYONE
    first, second = (damaged.train_metrics[number] for number in (1, 2))
    assert first["replies-accepted"] == second["replies-accepted"] == 6
    # of three neighbours each, in both averages; client 1's in the first of round 2
    assert (first["parcels-rejected"], second["parcels-rejected"]) == (3 * 3 * 2, 3 * 3 * 2 + 3)
    assert without.train_metrics[2]["parcels-rejected"] == 0


def forgets(own: RelayStrategy, client: int, what: str) -> Change:
    """Lose a client's folders, once."""
    lost: list[int] = []

    def change(reply: Any) -> Any:
        for folder in (cache_dir() / "personal").glob(f"run-{own.run_key}-client-{client}*"):
            if not lost and folder.name.endswith("-keys") == (what == "keys"):
                shutil.rmtree(folder)
        lost.append(client)
        return reply

    return change


def test_keys_are_asked_for_again_of_a_client_that_failed():
    """Client 2 loses its key after round 1: it fails in round 2, and is back in round 3."""
    own = CASES["DFedAvg"].make(seal=True)
    lose = forgets(own, 2, "keys")
    grid = Grid(CASES["DFedAvg"].app(), on_send=lambda sent: own.server_round == 2 and lose(sent))
    start(own, grid, rounds=3)
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6, 1]
    accepted = [own.train_metrics[number]["replies-accepted"] for number in (1, 2, 3)]
    assert accepted == [6, 5, 6]
    assert own.train_metrics[3]["parcels-rejected"] == 0


def test_a_client_with_keys_of_its_own_refuses_to_work_in_clear():
    clients = CASES["DFedAvg"].app(parcel_keys=ParcelKeys(new_key()))
    with pytest.raises(NoUsableReply, match="the strategy does not have parcels sealed"):
        start(CASES["DFedAvg"].make(), Grid(clients))


def test_a_client_whose_public_key_is_none_fails():
    """It knows no key of its own that others have."""

    def odd(reply: Message) -> Message:
        reply.content["properties"]["public-key"] = b"no key"
        return reply

    given = {"changes": {3: odd}, "changed_kind": "query.public_key"}
    own = CASES["DFedAvg"].run(1, lambda _: given, seal=True)
    metrics = own.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["rejected-error"]) == (5, 1)


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
    grid = Grid(clients)
    run = Run(CASES["DFedAvg"], own, grid, start(own, grid))
    readable = [opens(parcel, own.thief, own.run_key, k) for k, _, parcel in run.parcels("up")]
    assert any(readable) == (not vouched)
    metrics = own.train_metrics[1]
    found = (metrics["replies-accepted"], metrics.get("rejected-error", 0))
    assert found == ((5, 1) if vouched else (6, 0))


# ------------------------------------------------------------------------- mixing


def test_a_part_of_the_clients_has_a_gap_and_a_method_without_averages_none():
    some = {"topology": COMPLETE, "fraction_train": 0.5, "min_train_nodes": 3}
    own = CASES["DPSGD"].run(2, **some)
    assert [own.train_metrics[n]["spectral-gap"] for n in (1, 2)] == pytest.approx([1, 1])
    assert "spectral-gap" not in CASES["NTKDFL"].run(average=False, **some).train_metrics[1]


@pytest.mark.parametrize("name", ["NTKDFL", "DisPFL"])
def test_without_edges_it_is_training_alone(name):
    """A client's weights are those of a run in which it is the only one."""
    none = {"topology": Topology("own", graph=[])}
    own = CASES[name].run(2, **none)
    alone = CASES[name].run(
        2, lambda _: {"num_clients": 1}, **none, min_train_nodes=1, min_available_nodes=1
    )
    assert bits(kept_by(own, 0, 2)) == bits(kept_by(alone, 0, 2)) != bits(kept_by(own, 0, 1))
    assert own.train_metrics[2]["spectral-gap"] == pytest.approx(0)


# ------------------------------------------------------------------------- faults


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


def test_what_hostile_neighbours_send_is_dropped_and_counted(case, caplog):
    """NaN, and bytes that are no arrays, which the relay hands on unread: as if not heard."""
    kinds = dict(enumerate([with_arrays(nan), garbage, archive, boasting], 2))
    attacked, without = (
        case.run(1, lambda _, of=of: {"changes": {k: on_weights(c) for k, c in of.items()}},
                 topology=COMPLETE)
        for of in (kinds, dict.fromkeys(kinds, lambda _: None))
    )  # fmt: skip
    assert alike(attacked, without) == EVERYONE
    exchanges = sum(step.name in ("weights", "average", "train") for step in attacked._planned)
    exchanges -= attacked._planned[-1].name == "average"  # which sends nothing
    metrics = attacked.train_metrics[1]
    assert metrics["parcels-rejected"] == 5 * len(kinds) * exchanges
    assert (metrics["replies-accepted"], metrics["replies-rejected"]) == (6, 0)
    assert "dropped what came from-3" in caplog.text


def test_a_static_graph_stays_as_it_is_where_a_client_is_missing():
    """Drawn among those who are there, one client fewer would give all of them other neighbours."""
    own, resumed, anew = (
        CASES["DFedAvg"].make(topology=Topology(degree=3, dynamic=dynamic, seed=4))
        for dynamic in (False, False, True)
    )
    before, present = own.graph(1, range(6)), [0, 1, 2, 4, 5]
    after = own.graph(2, present)
    assert after == {k: tuple(j for j in before[k] if j != 3) for k in present}
    assert after != own.topology.neighbours(2, present)
    resumed.load_state_dict(own.state_dict())
    assert resumed.graph(2, present) == after
    anew.graph(1, range(6))
    assert anew.graph(2, present) == anew.topology.neighbours(2, present)


def cut(lost: Callable[[RelayStrategy, int, str], bool]) -> Callable[[RelayStrategy], Any]:
    """Lose on its way what one client sends another."""

    def of(own: RelayStrategy) -> Any:
        def apply(messages: list[Message]) -> None:
            for message in messages:
                for name in list(message.content.array_records):
                    if lost(own, message.metadata.dst_node_id - 1, name):
                        del message.content[name]

        return {"on_send": apply}

    return of


@pytest.mark.parametrize("name", ["DPSGD", "NTKDFL"])
def test_an_edge_that_drops_out_leaves_both_ends_at_work(name):
    """Between clients 0 and 2, in both rounds and ways: as if the graph had not had it.

    Neighbours count by examples or the same: the shares of a row then leave out who was not heard.
    """
    case, edges = CASES[name], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]
    mixing = {} if case.strategy is NTKDFL else {"mixing": "equal"}
    lose = cut(lambda _, *of: of in ((0, "from-2"), (2, "from-0")))
    more, fewer = (Topology("own", graph=[*edges, *of]) for of in ([(0, 2)], []))
    whole, without = (
        case.run(2, grid, topology=graph, **mixing) for grid, graph in ((lose, more), (None, fewer))
    )
    assert (
        alike(whole, without, 2)
        == EVERYONE
        != alike(whole, case.run(2, topology=more, **mixing), 2)
    )
    assert whole.train_metrics[2]["replies-accepted"] == 6


def test_an_edge_that_drops_out_within_a_round_is_felt_from_then_on():
    """The Jacobian that client 2 sends client 0 is lost: client 0 evolves without those rows."""
    lose = cut(lambda own, *of: own._step.name == "evolve" and of == (0, "from-2"))
    own = CASES["NTKDFL"].run(1, lose, topology=COMPLETE)
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
    collected: list[Any] = []

    def absent(reply: Message) -> Message:
        return failed(reply) if 2 <= own.server_round <= 4 else reply

    def note(*_: Any) -> None:
        if own.server_round == 4:
            collected.append((sorted(own.models), sorted(own.models_before)))

    equal = {"same_masks": True, "prune_share": 0.0} if case.strategy is DisPFL else {}
    own = case.make(topology=COMPLETE, collect_both=True, **equal)
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
        ("DPSGD", claiming(20), 100.0, False),
        ("DPSGD", claiming(21), 100.0, True),
        ("DisPFL", claiming(21), 100.0, True),
    ],
)
def test_weights_of_a_huge_norm_or_too_many_examples_are_refused(name, change, factor, refused):
    """With three or more to compare, the client itself among them: as if nothing had come.

    With no limit, which `outlier_factor` may say, they carry the average away. Of examples, which
    are its weight, a neighbour claims at most what the strategy allows.
    """
    options = {"outlier_factor": factor, "max_examples": 20, "same_weights": False}
    attacked, without = (
        CASES[name].run(1, lambda _, own=own: {"changes": {2: own}}, **options)
        for own in (change, silent)
    )
    assert attacked.trained == dict.fromkeys(range(6), 1)
    assert (alike(attacked, without) >= EVERYONE - {2}) == refused
    assert (attacked.train_metrics[1]["parcels-rejected"] >= 3) == refused


def test_a_model_of_a_huge_norm_is_left_out_of_the_mean():
    own, large = CASES["DPSGD"].make(), with_arrays(enlarge)
    grid = Grid(CASES["DPSGD"].app(), changes={2: large}, changed_kind="evaluate.model")
    found = start(own, grid)
    assert own.train_metrics[1]["models-collected"] == len(own.models) == 5
    assert max(np.abs(a).max() for n, a in found.items() if n != "1.num_batches_tracked") < 1e3


def test_parcels_named_like_the_network_are_handed_on_and_weights_are_not():
    """The relay tells a client that replies with weights by its record's name, and no other way."""
    weights = arrays_of(ArrayRecord(dict(network().state_dict())))

    def in_the_clear(reply: Message) -> Message:
        reply.content["arrays"] = as_record(weights)
        return reply

    changes = {1: in_the_clear, 2: on_parcels(lambda _: weights)}
    own = CASES["DFedAvg"].run(1, lambda _: {"changes": changes})
    metrics = own.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["rejected-weights"]) == (5, 1)
    assert f"weights came, not parcels: is the client a {own.client}?" in own.last_refusal


def test_a_client_that_lost_its_weights_sends_its_neighbours_none(case):
    """With `seal` weights travel as a round begins: who lost its own must not send first ones.

    The others end the round as if it had sent nothing then; it says that it was restarted, and
    takes over their average, with which NTK-DFL evolves and DFedAvg ends (float32: 1e-5).
    """

    def losing(own: RelayStrategy) -> Change:
        return in_step(own, 1, len(own.plan(first=True)) - 1, forgets(own, 5, "weights"))

    lost, hushed = (
        case.run(2, grid, topology=COMPLETE, seal=True)
        for grid in (
            lambda own: {"changes": {5: losing(own)}},
            lambda own: {"changes": {5: lambda r: in_step(own, 2, 0, silent)(losing(own)(r))}},
        )
    )
    assert alike(lost, hushed, 2) >= EVERYONE - {5}
    if case.strategy in (NTKDFL, DFedAvg):
        for name, array in kept_by(lost, 0, 2).items():
            np.testing.assert_allclose(kept_by(lost, 5, 2)[name], array, atol=1e-5)
    metrics = lost.train_metrics[2]
    assert metrics["replies-accepted"] == 6
    assert metrics["restarted"] == pytest.approx(10 / 45)  # client 5 has 10 of the 45 examples


def test_a_client_that_lost_the_first_weights_is_sent_them_again():
    """Its folder goes after its first reply: it fails in round 1, and takes part in round 2."""
    own = CASES["NTKDFL"].make(topology=COMPLETE, seal=True)
    lose = in_step(own, 1, 0, forgets(own, 5, "weights"))
    grid = Grid(CASES["NTKDFL"].app(), changes={5: lose})
    start(own, grid, rounds=2)
    assert [own.train_metrics[number]["replies-accepted"] for number in (1, 2)] == [5, 6]
    assert own.trained[5] == 2
    assert sent_first(grid) == {**dict.fromkeys(range(5), 1), 5: 2}


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
    topology = Topology("ring", seed=3)
    near = topology.neighbours(1, range(6))[2]
    stranger = next(k for k in range(6) if k not in (2, *near))

    def change(reply: Message) -> Message:
        reply.content[f"to-{stranger}"] = reply.content["to-neighbours"]
        return reply

    own = CASES["DPSGD"].run(1, lambda _: {"changes": {2: change}}, topology=topology)
    assert own.train_metrics[1]["rejected-arrays"] == 1


def test_deviation_is_eq_12_and_grows_with_the_root_of_the_number_of_clients():
    rng = np.random.default_rng(0)
    models = [{"a": rng.normal(size=(2, 3)), "b": rng.normal(size=4)} for _ in range(5)]
    flat = np.stack([np.concatenate([m["a"].ravel(), m["b"]]) for m in models])
    expected = np.sqrt(((flat - flat.mean(0)) ** 2).sum(0)).mean()
    assert deviation(models) == pytest.approx(expected)
    assert deviation(models * 4) == pytest.approx(2 * expected)


@pytest.mark.parametrize(("attackers", "refused"), [((2,), 5), ((2, 3, 4, 5), 4 * 3)])
def test_a_hostile_jacobian_of_a_neighbour_is_refused(attackers, refused):
    """Rows a million times as large. A majority that agrees on them sets the measure itself.

    Of six on the complete graph four attack. The two others have four such rows and two good ones:
    none of the four is an outlier. Each attacker has three of them, and three good ones.
    """

    def attack(own: RelayStrategy) -> Any:
        hostile = in_step(own, 1, 2, on_parcels(enlarge))  # after weights and averages
        return {"changes": dict.fromkeys(attackers, hostile)}

    metrics = CASES["NTKDFL"].run(1, attack, topology=COMPLETE).train_metrics[1]
    assert (metrics["parcels-rejected"], metrics["replies-accepted"]) == (refused, 6)
