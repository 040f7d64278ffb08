"""What all methods share that go through the relay: sealed parcels, first weights, faults."""

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedntk.clients import (
    DFedAvgClient,
    DFedSAMClient,
    DisPFLClient,
    DPSGDClient,
    NTKDFLClient,
    cache_dir,
)
from fedntk.clients.personal.personal_store import PersonalStore
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
    spectral_gap,
)
from fedntk.strategies.core.trust_protocols import PublicKey
from fedntk.trust import KeyServer, ParcelKeys, new_key, open_parcel, public_bytes

from .federation import Grid, app, bits, failed, network, start

SGD: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 4, "local_epochs": 1}
ALL: dict[str, Any] = {"min_available_nodes": 6, "fraction_evaluate": 0.0}


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
    "NTKDFL": Case(NTKDFL, NTKDFLClient, {"learning_rate": 0.1, "steps": (2.0, 5.0)}, {}),
    "DFedAvg": Case(DFedAvg, DFedAvgClient, {"gossip_steps": 2}, SGD),
    "DFedSAM": Case(DFedSAM, DFedSAMClient, {}, SGD),
    "DPSGD": Case(DPSGD, DPSGDClient, {"mixing": "metropolis"}, SGD),
    "DisPFL": Case(DisPFL, DisPFLClient, {"same_masks": False}, SGD),
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def weights_of(strategy: RelayStrategy, client: int, number: int) -> dict[str, np.ndarray]:
    own = PersonalStore(None, strategy.run_key, str(client)).load(number)
    assert own is not None
    return own


class Listening(Grid):
    """Keeps a copy of all that passes the relay in training: direction, names, bytes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heard: list[tuple[str, int, str, dict[str, bytes]]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for way, node, each in (
            *(("down", m.metadata.dst_node_id, m) for m in messages),
            *(("up", r.metadata.src_node_id, r) for r in replies),
        ):
            if each.metadata.message_type == "train":
                for name, record in each.content.array_records.items():
                    self.heard.append((way, node - 1, name, {k: a.data for k, a in record.items()}))
        return replies


# ------------------------------------------------------------------ sealed parcels


def test_sealed_runs_have_the_bits_of_others(case):
    """The mean model and each client's weights, over three rounds of graphs drawn anew."""
    plain, sealed = case.make(), case.make(seal=True)
    expected, found = (start(own, Grid(case.app()), rounds=3) for own in (plain, sealed))
    assert bits(found) == bits(expected)
    for client in range(6):
        kept = [bits(weights_of(own, client, 3)) for own in (plain, sealed)]
        assert kept[0] == kept[1]
    assert sealed.train_metrics[3]["parcels-rejected"] == 0
    assert sealed.train_metrics[3]["neighbours-heard"] == 3


def test_all_that_clients_send_each_other_is_ciphertext(case):
    """Of arrays the relay sees the first weights, which are its own, and sealed parcels.

    Bytes of the clients' weights pass through an unsealed run, and not through a sealed one.
    """
    clear: dict[bool, bool] = {}
    for seal in (False, True):
        own, grid = case.make(seal=seal, collect=False), Listening(case.app())
        start(own, grid, rounds=2)
        parcels = [heard for heard in grid.heard if heard[2] != "arrays"]
        assert {name for way, _, name, _ in grid.heard if way == "up"} == {
            name for _, _, name, _ in parcels if name.startswith("to-")
        }
        everything = b"".join(data for *_, arrays in parcels for data in arrays.values())
        trained = weights_of(own, 0, 1)  # two numbers of a row of weights, wherever they travel
        parts = [a.tobytes()[k : k + 8] for a in trained.values() if a.dtype.kind == "f"
                 for k in range(0, a.nbytes - 8, 8) if a.ravel()[k // a.itemsize] != 0]  # fmt: skip
        clear[seal] = any(part in everything for part in parts)
        for _, _, _, arrays in parcels if seal else ():
            assert {name.partition("-")[0] for name in arrays} == {"content", "key"}
    assert clear == {False: True, True: False}


def test_what_ends_a_sealed_round_is_sealed_for_nobody(case):
    """Its receivers are the next round's neighbours, who then are sent it as that begins."""
    own, last = case.make(seal=True), []

    def noted(reply: Message) -> Message:
        if own._position == len(own._planned) - 1:
            last.append(len(reply.content.array_records))
        return reply

    start(own, Grid(case.app(), changes=dict.fromkeys(range(6), noted)), rounds=2)
    assert last == [0] * 12


def test_parcels_open_with_their_receivers_keys_alone():
    """Client 0's key opens what is for it; no key opens what is for others."""
    case, keys = CASES["NTKDFL"], [new_key() for _ in range(6)]

    def make(*args: Any, **options: Any) -> NTKDFLClient:
        own = ParcelKeys(keys[options["seed"][1]])
        return NTKDFLClient(*args, parcel_keys=own, **options)

    own, grid = case.make(seal=True, topology=Topology("ring")), Listening(app(make))
    start(own, grid)
    opened = Counter()
    for way, receiver, name, arrays in grid.heard:
        if way == "up" or name == "arrays":
            continue
        parcel = {k: np.frombuffer(data[128:], np.uint8) for k, data in arrays.items()}
        for exchange in range(4):
            sender = int(name.removeprefix("from-"))
            info = f"fedntk parcel 1\0{own.run_key}\x001\0{exchange}\0{sender}".encode()
            for client, key in enumerate(keys):
                try:
                    open_parcel(parcel, key, info)
                except ValueError:
                    continue
                opened[client == receiver, name, receiver] += 1
    of_others = [n for (own_parcel, _, _), n in opened.items() if not own_parcel]
    # weights and averages are for both of a client's neighbours, Jacobians for one of them
    assert sum(n for (own_parcel, *_), n in opened.items() if own_parcel) == 6 * 2 * 3
    assert sum(of_others) == 6 * 2 * 2


def flipped(name: str) -> Callable[[Message], Message]:
    """Change a bit in an array of each parcel of a reply."""

    def change(reply: Message) -> Message:
        for record in reply.content.array_records:
            arrays = {}
            for key, array in reply.content[record].items():
                own = array.numpy().copy()
                if key.startswith(name):
                    own[own.size // 2] ^= 1
                arrays[key] = Array(own)
            reply.content[record] = ArrayRecord(arrays)
        return reply

    return change


def silent(reply: Message) -> Message:
    """Take all parcels out of a reply."""
    for record in list(reply.content.array_records):
        del reply.content[record]
    return reply


@pytest.mark.parametrize("part", ["content", "key-"])
def test_a_damaged_parcel_is_refused_and_its_sender_left_out(case, part):
    """As if that client had sent nothing; it is no reason to end a run, or its own round."""
    damaged, without = case.make(seal=True), case.make(seal=True)
    start(damaged, Grid(case.app(), changes={2: flipped(part)}), rounds=2)
    start(without, Grid(case.app(), changes={2: silent}), rounds=2)
    for client in range(6):
        assert bits(weights_of(damaged, client, 2)) == bits(weights_of(without, client, 2))
    assert damaged.train_metrics[2]["replies-accepted"] == 6
    assert damaged.train_metrics[2]["parcels-rejected"] >= 3
    assert without.train_metrics[2]["parcels-rejected"] == 0


def test_a_parcel_of_an_earlier_round_does_not_open(case):
    """In round 2 client 2's first parcels are those of round 1."""
    own, before = case.make(seal=True), []

    def replayed(reply: Message) -> Message:
        if own._position == 0:
            before.append(dict(reply.content.array_records))
            for name, record in before[0].items():
                reply.content[name] = record
        return reply

    start(own, Grid(case.app(), changes={2: replayed}), rounds=2)
    assert own.train_metrics[1]["parcels-rejected"] == 0
    assert own.train_metrics[2]["parcels-rejected"] == 3
    assert own.train_metrics[2]["replies-accepted"] == 6


def test_an_unsealed_parcel_is_refused_where_sealed_ones_are_expected():
    case = CASES["DFedAvg"]
    own = case.make(seal=True)

    def in_clear(reply: Message) -> Message:
        for name in list(reply.content.array_records):
            reply.content[name] = ArrayRecord({"a": Array(np.zeros(3, np.float32))})
        return reply

    start(own, Grid(case.app(), changes={2: in_clear}))
    assert own.train_metrics[1]["parcels-rejected"] == 3 * 2  # in both averages


def test_keys_are_asked_for_once_and_again_of_a_client_that_failed(case):
    """Client 2 loses its key after round 1: it fails in round 2, and is back in round 3."""
    own = case.make(seal=True)

    class Losing(Grid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            if own.server_round == 2 and not lost:
                (path,) = (cache_dir() / "personal").glob(
                    f"run-{own.run_key}-client-2-keys/key.pem"
                )
                lost.append(path.read_bytes())
                path.unlink()
            return super().send_and_receive(messages, timeout=timeout)

    lost: list[bytes] = []
    grid = Losing(case.app())
    start(own, grid, rounds=3)
    assert lost
    assert [n for kind, n in grid.exchanges if kind == "query.public_key"] == [6, 1]
    accepted = [own.train_metrics[number]["replies-accepted"] for number in (1, 2, 3)]
    assert accepted == [6, 5, 6]
    assert own.train_metrics[3]["parcels-rejected"] == 0


def test_the_private_key_is_a_file_that_its_owner_alone_can_read():
    own = CASES["DFedAvg"].make(seal=True)
    start(own, Grid(CASES["DFedAvg"].app()))
    paths = list((cache_dir() / "personal").glob(f"run-{own.run_key}-client-*-keys/key.pem"))
    assert len(paths) == 6
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_a_client_with_keys_of_its_own_refuses_to_work_in_clear():
    case = CASES["DFedAvg"]
    clients = case.app(parcel_keys=ParcelKeys(new_key()))
    with pytest.raises(NoUsableReply, match="the strategy does not have parcels sealed"):
        start(case.make(), Grid(clients))


def test_a_client_whose_public_key_is_none_hears_nobody_and_is_heard_by_nobody():
    """It fails each round, as it knows no key of its own that others have."""
    case = CASES["DFedAvg"]
    own = case.make(seal=True)

    class Odd(Grid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if (
                    not reply.has_error()
                    and "properties" in reply.content
                    and reply.metadata.src_node_id == 3
                ):
                    reply.content["properties"]["public-key"] = b"no key"
            return replies

    start(own, Odd(case.app()), rounds=2)
    assert own.train_metrics[2]["replies-accepted"] == 5
    assert own.train_metrics[2]["rejected-error"] == 1


class Swapping(NTKDFL):
    """A relay that names a key of its own for client 2, and reads what is sealed for it."""

    thief = new_key()

    def _add_keys(self, config: Any, client: int) -> None:
        held = self._keys.of(2)
        if held is not None and client != 2:
            self._keys._known[2] = PublicKey(public_bytes(self.thief), held.voucher)
        super()._add_keys(config, client)
        if held is not None:
            self._keys._known[2] = held


@pytest.mark.parametrize("vouched", [False, True])
def test_a_relay_that_swaps_keys_reads_along_unless_a_key_server_vouches(vouched):
    """Sealing alone holds against a curious relay. With vouchers it gets nothing to read."""
    keys = [new_key() for _ in range(6)]
    server = KeyServer(bytes(32), map(public_bytes, keys), Ed25519PrivateKey.generate())
    verify = server.verify_key if vouched else None

    def make(*args: Any, **options: Any) -> NTKDFLClient:
        own = ParcelKeys(keys[options["seed"][1]], run="a", verify_key=verify)
        return NTKDFLClient(*args, parcel_keys=own, **options)

    options = {"vouching": server, "run": "a"} if vouched else {}
    own = Swapping(
        learning_rate=0.1, steps=(1.0,), seal=True, topology=Topology("ring"), **ALL, **options
    )
    grid = Listening(app(make))
    start(own, grid)
    readable = 0
    for way, sender, name, arrays in grid.heard:
        if way == "up" and name.startswith("to-"):
            parcel = {k: np.frombuffer(data[128:], np.uint8) for k, data in arrays.items()}
            for exchange in range(4):
                info = f"fedntk parcel 1\0{own.run_key}\x001\0{exchange}\0{sender}".encode()
                try:
                    readable += bool(open_parcel(parcel, own.thief, info))
                except ValueError:
                    continue
    assert (readable > 0) == (not vouched)
    assert own.train_metrics[1]["replies-accepted"] == 6


def test_who_is_not_enrolled_is_sent_nothing():
    """Of six clients the key server knows five: the sixth has no voucher, and no key."""
    keys = [new_key() for _ in range(6)]
    server = KeyServer(bytes(32), map(public_bytes, keys[:5]), Ed25519PrivateKey.generate())

    def make(*args: Any, **options: Any) -> DFedAvgClient:
        own = ParcelKeys(keys[options["seed"][1]], run="a", verify_key=server.verify_key)
        return DFedAvgClient(*args, parcel_keys=own, **SGD, **options)

    own = CASES["DFedAvg"].make(
        seal=True, vouching=server, run="a", topology=Topology("complete"), gossip_steps=1
    )
    start(own, Grid(app(make)))
    metrics = own.train_metrics[1]
    assert (metrics["replies-accepted"], metrics["rejected-error"]) == (5, 1)
    assert metrics["neighbours-heard"] == pytest.approx(4)


def test_vouchers_without_sealing_or_a_name_are_refused():
    server = KeyServer(bytes(32), [], Ed25519PrivateKey.generate())
    for options in ({"vouching": server}, {"vouching": server, "seal": True}):
        with pytest.raises(ValueError, match="vouching: expected seal=True and the name"):
            DFedAvg(**options)


# ------------------------------------------------------------------ first weights


def test_first_weights_travel_once(case):
    """Each client gets them with its first message, and none with those that follow.

    A client whose reply is an error is sent them again, as it may have lost them: here when its
    model is asked for.
    """
    sent: Counter[tuple[int, int]] = Counter()

    class Counting(Grid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            messages = list(messages)
            for message in messages:
                if "arrays" in message.content:
                    sent[own.server_round, message.metadata.dst_node_id - 1] += 1
            return super().send_and_receive(messages, timeout=timeout)

    def fails(reply: Message) -> Message:
        return failed(reply) if own.server_round == 1 else reply

    own = case.make()
    start(own, Counting(case.app()), rounds=2)
    assert sent == {(1, client): 1 for client in range(6)}
    sent.clear()
    own = case.make()
    start(own, Counting(case.app(), changes={4: fails}), rounds=2)
    assert sent == {(1, client): 1 + (client == 4) for client in range(6)}


def test_a_client_that_lost_the_first_weights_is_sent_them_again(case):
    """Its folder goes after its first reply: it fails in round 1, and takes part in round 2."""
    own = case.make(collect=False, topology=Topology("complete"), seal=True)

    def forget(reply: Message) -> Message:
        if own.server_round == 1 and own._position == 0:
            for folder in (cache_dir() / "personal").glob(f"run-{own.run_key}-client-5*"):
                if not folder.name.endswith("-keys"):
                    shutil.rmtree(folder)
        return reply

    start(own, Grid(case.app(), changes={5: forget}), rounds=2)
    assert own.train_metrics[1]["replies-accepted"] == 5
    assert own.train_metrics[2]["replies-accepted"] == 6
    assert own.trained[5] == 2


# ------------------------------------------------------------------------- mixing


@pytest.mark.parametrize("mixing", ["examples", "equal", "metropolis"])
def test_clients_average_by_the_mixing_matrix_whose_gap_is_reported(mixing):
    """Each client's row of W, by its number of examples and its neighbours', and no others."""
    case = CASES["DFedAvg"]
    own = case.make(mixing=mixing, gossip_steps=1, same_weights=False)
    clients = app(DFedAvgClient, **{**SGD, "local_epochs": 0})
    start(own, Grid(clients), rounds=2)
    near = own.topology.neighbours(2, range(6))
    matrix = mixing_matrix(near, {k: 5 + k for k in range(6)}, mixing)
    before, after = (
        np.stack([weights_of(own, k, number)["3.weight"].ravel() for k in range(6)])
        for number in (1, 2)
    )
    np.testing.assert_allclose(after, matrix @ before, atol=1e-6)  # sums of 4 in float32
    assert own.train_metrics[2]["spectral-gap"] == pytest.approx(spectral_gap(matrix))


def test_every_method_reports_the_gap_and_one_without_averages_none(case):
    own = case.make(topology=Topology("complete"), fraction_train=0.5, min_train_nodes=3)
    start(own, Grid(case.app()), rounds=2)
    assert [own.train_metrics[n]["spectral-gap"] for n in (1, 2)] == pytest.approx([1, 1])
    alone = CASES["NTKDFL"].make(average=False)
    start(alone, Grid(CASES["NTKDFL"].app()))
    assert "spectral-gap" not in alone.train_metrics[1]


def test_without_edges_it_is_training_alone(case):
    """A client's weights are those of a run in which it is the only one."""
    own = case.make(topology=Topology("own", graph=[]))
    alone = case.make(topology=Topology("own", graph=[]), min_train_nodes=1, min_available_nodes=1)
    start(own, Grid(case.app()), rounds=3)
    start(alone, Grid(case.app(), num_clients=1), rounds=3)
    assert bits(weights_of(own, 0, 3)) == bits(weights_of(alone, 0, 3))
    assert bits(weights_of(own, 0, 3)) != bits(weights_of(own, 0, 2))
    assert own.train_metrics[3]["spectral-gap"] == pytest.approx(0)


# ------------------------------------------------------------------------- faults


class Cutting(Grid):
    """Loses on its way what one client sends another, in an exchange of a round."""

    def __init__(self, *args: Any, lost: Callable[[int, str], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self.lost, self.count = lost, 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        for message in messages:
            for name in list(message.content.array_records):
                if self.lost(message.metadata.dst_node_id - 1, name):
                    del message.content[name]
                    self.count += 1
        return super().send_and_receive(messages, timeout=timeout)


def test_a_static_graph_stays_as_it_is_where_a_client_is_missing():
    """Drawn among those who are there, one client fewer would give all of them other neighbours."""
    strategy = CASES["DFedAvg"].make(topology=Topology(degree=3, dynamic=False, seed=4))
    start(strategy, Grid(CASES["DFedAvg"].app()))
    before = strategy.neighbours
    assert set(before) == set(range(6))
    present = [0, 1, 2, 4, 5]
    after = strategy.graph(2, present)
    assert after == {k: tuple(j for j in before[k] if j != 3) for k in present}
    assert after != strategy.topology.neighbours(2, present)
    resumed = CASES["DFedAvg"].make(topology=Topology(degree=3, dynamic=False, seed=4))
    resumed.load_state_dict(strategy.state_dict())
    assert resumed.graph(2, present) == after
    drawn_anew = CASES["DFedAvg"].make(topology=Topology(degree=3, seed=4))
    drawn_anew.graph(1, range(6))
    assert drawn_anew.graph(2, present) == drawn_anew.topology.neighbours(2, present)


def test_an_edge_that_drops_out_leaves_both_ends_at_work(case):
    """Between clients 0 and 2, in round 2 and both ways: as if the graph had not had it.

    Neighbours count by examples or the same, whose shares of a row leave out who was not heard.
    """
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]
    mixing = {} if case.strategy is NTKDFL else {"mixing": "equal"}
    whole, without = (
        case.make(topology=Topology("own", graph=[*edges, *more]), **mixing)
        for more in ([(0, 2)], [])
    )

    def cut(receiver: int, name: str) -> bool:
        return (receiver, name) in ((0, "from-2"), (2, "from-0"))

    grid = Cutting(case.app(), lost=cut)
    start(whole, grid, rounds=2)
    start(without, Grid(case.app()), rounds=2)
    assert grid.count >= 4
    for client in range(6):
        assert bits(weights_of(whole, client, 2)) == bits(weights_of(without, client, 2))
    assert whole.train_metrics[2]["replies-accepted"] == 6


def test_an_edge_that_drops_out_within_a_round_is_felt_from_then_on():
    """The Jacobian that client 2 sends client 0 is lost: client 0 evolves without those rows."""
    case = CASES["NTKDFL"]
    own = case.make(topology=Topology("complete"))

    def cut(receiver: int, name: str) -> bool:
        return own._step.name == "evolve" and (receiver, name) == (0, "from-2")

    start(own, Cutting(case.app(), lost=cut))
    assert own.train_metrics[1]["replies-accepted"] == 6
    heard = own.train_metrics[1]["neighbours-heard"]
    assert heard == pytest.approx((4 * 5 + 5 * (45 - 5)) / 45)  # by examples: client 0 has 5
    mine, others = weights_of(own, 0, 1), [weights_of(own, k, 1) for k in (1, 3)]
    distance = [np.abs(mine["0.weight"] - other["0.weight"]).max() for other in others]
    apart = np.abs(others[0]["0.weight"] - others[1]["0.weight"]).max()
    assert min(distance) > 10 * apart  # all others have one kernel


def test_a_client_that_returns_after_rounds_catches_up_by_averaging(case):
    """Client 5 fails in rounds 2 to 4, and is back in round 5, with its weights of round 1.

    On the complete graph all have one average, so what it ends round 5 with is as near to the
    others' as theirs are to each other's; what it ended round 1 with was not.
    """

    def absent(reply: Message) -> Message:
        return failed(reply) if 2 <= own.server_round <= 4 else reply

    own = case.make(topology=Topology("complete"), **EQUAL.get(case.strategy, {}))
    start(own, Grid(case.app(), changes={5: absent}), rounds=5)
    assert [own.train_metrics[n]["replies-accepted"] for n in range(1, 6)] == [6, 5, 5, 5, 6]
    assert own.trained == dict.fromkeys(range(6), 5)
    assert own.train_metrics[5].get("restarted", 0) == 0

    def distances(number: int) -> tuple[float, float]:
        flat = [
            np.concatenate([a.ravel() for n, a in weights_of(own, k, number).items() if "." in n])
            for k in (0, 1, 2, 3, 4)
        ]
        last = weights_of(own, 5, number if number == 5 else 1)
        its = np.concatenate([a.ravel() for n, a in last.items() if "." in n])
        among = [float(np.linalg.norm(a - b)) for a in flat for b in flat]
        return max(float(np.linalg.norm(its - a)) for a in flat), max(among)

    (stale, before), (back, now) = distances(4), distances(5)
    assert stale > 1.5 * before
    assert back < 2 * now + 1e-5


EQUAL: dict[Any, dict[str, Any]] = {DisPFL: {"same_masks": True, "prune_share": 0.0}}


def enlarged(reply: Message) -> Message:
    """Multiply all numbers of a client's parcels by a million; they stay finite and well formed."""
    if reply.has_error():
        return reply
    for record in reply.content.array_records:
        if record == "arrays":  # its own model, for the mean
            continue
        arrays = {}
        for name, array in reply.content[record].items():
            own = array.numpy()
            large = own.dtype.kind == "f" and name not in ("targets", "inputs")
            arrays[name] = Array((own * 1e6).astype(own.dtype) if large else own)
        reply.content[record] = ArrayRecord(arrays)
    return reply


@pytest.mark.parametrize(("factor", "refused"), [(100.0, True), (float("inf"), False)])
def test_weights_of_a_huge_norm_are_refused_by_who_gets_them(case, factor, refused):
    """With three or more to compare, the client itself among them: as if nothing had come.

    With no limit, which `outlier_factor` may say, they carry the average away, or end the round of
    those who evolve from it.
    """
    attacked, without = (case.make(outlier_factor=factor, collect=False) for _ in range(2))
    start(attacked, Grid(case.app(), changes={2: enlarged}))
    start(without, Grid(case.app(), changes={2: silent}))
    same = {0, 1, 3, 4, 5} <= attacked.trained.keys()
    for client in set(attacked.trained) - {2}:
        same &= bits(weights_of(attacked, client, 1)) == bits(weights_of(without, client, 1))
    assert same == refused
    assert (attacked.train_metrics[1]["parcels-rejected"] >= 3) == refused


def claiming(count: int) -> Callable[[Message], Message]:
    """Have a client's parcels claim so many examples; 0: leave out those that would."""

    def change(reply: Message) -> Message:
        for record in list(reply.content.array_records):
            arrays = dict(reply.content[record].items())
            if "num-examples" not in arrays:
                continue
            arrays["num-examples"] = Array(np.array(count, np.int64))
            reply.content[record] = ArrayRecord(arrays)
            if not count:
                del reply.content[record]
        return reply

    return change


@pytest.mark.parametrize(("count", "refused"), [(20, False), (21, True)])
def test_a_neighbour_claims_at_most_the_examples_that_the_strategy_allows(case, count, refused):
    """They are its weight in an average: with more, it would be nearly all of it."""
    options = {"max_examples": 20, "same_weights": False, "collect": False}
    own, without = (case.make(**options) for _ in range(2))
    start(own, Grid(case.app(), changes={2: claiming(count)}))
    start(without, Grid(case.app(), changes={2: claiming(0)}))
    same = all(
        bits(weights_of(own, k, 1)) == bits(weights_of(without, k, 1)) for k in (0, 1, 3, 4, 5)
    )
    assert same == refused
    assert (own.train_metrics[1]["parcels-rejected"] >= 3) == refused
    assert own.train_metrics[1]["replies-accepted"] == 6


@pytest.mark.parametrize(("factor", "collected"), [(100.0, 5), (float("inf"), 6)])
def test_a_model_of_a_huge_norm_is_left_out_of_the_mean(case, factor, collected):
    def change(reply: Message) -> Message:
        arrays = {k: a.numpy() for k, a in reply.content["arrays"].items()}
        large = {k: a * 1e6 if a.dtype.kind == "f" else a for k, a in arrays.items()}
        reply.content["arrays"] = ArrayRecord({k: Array(a) for k, a in large.items()})
        return reply

    own = case.make(outlier_factor=factor)
    grid = Grid(case.app(), changes={2: change}, changed_kind="evaluate.model")
    found = start(own, grid)
    assert own.train_metrics[1]["models-collected"] == len(own.models) == collected
    largest = max(float(np.abs(a).max()) for n, a in found.items() if n != "1.num_batches_tracked")
    assert (largest < 1e3) == (collected == 5)


def test_parcels_named_like_the_network_are_handed_on(case):
    """The relay tells a client that replies with weights by its record's name, and no other way."""
    own = case.make()

    def renamed(reply: Message) -> Message:
        weights = ArrayRecord({k: Array(a) for k, a in network_arrays().items()})
        for record in list(reply.content.array_records):
            reply.content[record] = weights
        return reply

    start(own, Grid(case.app(), changes={2: renamed}))
    assert own.train_metrics[1]["replies-accepted"] == 6

    def in_the_clear(reply: Message) -> Message:
        reply.content["arrays"] = ArrayRecord({k: Array(a) for k, a in network_arrays().items()})
        return reply

    own = case.make()
    start(own, Grid(case.app(), changes={2: in_the_clear}))
    assert own.train_metrics[1]["rejected-weights"] == 1
    assert f"weights came, not parcels: is the client a {own.client}?" in own.last_refusal


def network_arrays() -> dict[str, np.ndarray]:
    return {name: t.numpy() for name, t in network().state_dict().items()}


def test_a_client_that_lost_its_weights_sends_its_neighbours_none(case):
    """With `seal` weights travel as a round begins: who lost its own must not send first ones.

    The others end the round as if it had sent nothing then; it says that it was restarted.
    """

    def restarted(own: RelayStrategy) -> Callable[[Message], Message]:
        def forget(reply: Message) -> Message:
            if own.server_round == 1 and own._position == len(own._planned) - 1:
                root = cache_dir() / "personal"
                for folder in root.glob(f"run-{own.run_key}-client-5*"):
                    if not folder.name.endswith("-keys"):
                        shutil.rmtree(folder)
            return reply

        return forget

    def silent_once(own: RelayStrategy) -> Callable[[Message], Message]:
        forget = restarted(own)

        def change(reply: Message) -> Message:
            first = own.server_round == 2 and own._position == 0
            return silent(reply) if first else forget(reply)

        return change

    runs = []
    for change in (restarted, silent_once):
        own = case.make(collect=False, topology=Topology("complete"), seal=True)
        start(own, Grid(case.app(), changes={5: change(own)}), rounds=2)
        runs.append(own)
    for client in range(5):
        assert bits(weights_of(runs[0], client, 2)) == bits(weights_of(runs[1], client, 2))
    metrics = runs[0].train_metrics[2]
    assert metrics["replies-accepted"] == 6
    assert metrics["restarted"] == pytest.approx(10 / 45)  # client 5 has 10 of the 45 examples


@pytest.mark.parametrize(("said", "counted"), [([1, 2], 0), (-5, 0), (0.5, 0), (10**15, 6), (2, 2)])
def test_what_a_client_says_of_refused_parcels_counts_within_reason(said, counted):
    """At most as many as there are clients; in one of the two exchanges it says so."""
    case = CASES["DPSGD"]
    own = case.make()

    def change(reply: Message) -> Message:
        metrics = dict(reply.content["metrics"])
        if own._position == 1:
            metrics["parcels-rejected"] = said
        reply.content["metrics"] = MetricRecord(metrics)
        return reply

    start(own, Grid(case.app(), changes={2: change}))
    assert own.train_metrics[1]["parcels-rejected"] == counted
    assert own.train_metrics[1]["replies-accepted"] == 6


def test_a_hostile_jacobian_of_a_neighbour_is_refused():
    """Rows a million times as large. A majority that agrees on them sets the measure itself.

    Of six on the complete graph four attack. The two others have four such rows and two good ones:
    none of the four is an outlier. Each attacker has three of them, and three good ones.
    """
    case = CASES["NTKDFL"]
    runs = {}
    for attackers in ((), (2,), (2, 3, 4, 5)):
        own = case.make(topology=Topology("complete"), collect=False)

        def change(reply: Message, own: Any = own) -> Message:
            return enlarged(reply) if own._step.name == "jacobians" else reply

        start(own, Grid(case.app(), changes=dict.fromkeys(attackers, change)))
        runs[attackers] = own.train_metrics[1]
    rejected = [metrics["parcels-rejected"] for metrics in runs.values()]
    assert rejected == [0, 5, 4 * 3]
    assert runs[2,]["replies-accepted"] == 6


# ------------------------------------------------------------------- both models


@pytest.mark.parametrize("name", ["NTKDFL", "DFedAvg", "DPSGD"])
def test_both_models_of_a_round_are_those_around_its_average(name):
    """Averaged ones are W times what was sent: the trained ones, or those of the round before.

    W by hand from the counts 5 ... 10, weights in float32: 1e-6.
    """
    case = CASES[name]
    options = {} if name == "NTKDFL" else {"mixing": "examples"}
    options |= {"gossip_steps": 1} if name == "DFedAvg" else {}
    own = case.make(collect_both=True, **options)
    start(own, Grid(case.app()), rounds=2)
    matrix = mixing_matrix(own.neighbours, {k: 5 + k for k in range(6)}, "examples")
    averaged, trained = (own.models_at[point] for point in ("averaged", "trained"))
    sent = trained if name == "DFedAvg" else {k: weights_of(own, k, 1) for k in range(6)}
    for array in ("0.weight", "3.bias"):
        before = np.stack([sent[k][array].ravel() for k in range(6)])
        found = np.stack([averaged[k][array].ravel() for k in range(6)])
        np.testing.assert_allclose(found, matrix @ before, atol=1e-6)
        assert np.abs(found - np.stack([trained[k][array].ravel() for k in range(6)])).max() > 1e-4
    for client, model in own.models.items():
        assert bits(model) == bits(weights_of(own, client, 2))


def test_a_client_that_failed_in_the_round_has_no_models_around_its_average(case):
    def fails(reply: Message) -> Message:
        return failed(reply) if own.server_round == 2 else reply

    own = case.make(collect_both=True)
    start(own, Grid(case.app(), changes={3: fails}), rounds=2)
    assert sorted(own.models) == [0, 1, 2, 3, 4, 5]
    assert sorted(own.models_before) == [0, 1, 2, 4, 5]
    assert own.train_metrics[2]["models-collected"] == 6
