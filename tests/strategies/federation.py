"""A small federation on the local grid, with replies that can be reordered or damaged."""

import functools
import io
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import Tensor, nn

from fedntk.clients import PrivacyLedger, PrivacyLimits, cache_dir, client_app
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.simulations.check import failed, from_node
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import NoUsableReply, Strategy

NUM_CLIENTS = 6


class Contract(NamedTuple):
    """How ``test_contract.py`` runs a strategy: a test file's ``CONTRACT`` has these by name."""

    strategy: Callable[..., Strategy]  # of the options of all strategies
    clients: ClientApp
    sends_queries: bool = False
    grows: bool = False  # what is learned has more arrays after the first round than before it
    personal: bool = False  # what is learned are the clients' own models, which they evaluate
    one_exchange: bool = True  # a round trains each client with one message
    once: bool = False  # it learns from all clients, in the first rounds, and then trains no more
    sends_arrays: bool = True  # clients reply with arrays, and not only with metrics
    needs_more: bool = False  # the rows of two clients are too few to learn from


T = TypeVar("T", bound=Strategy)
Change = Callable[[Message], Message | list[Message] | None]
SUPERLINK = 1_000_000  # a node id that no client has


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def examples(partition: int) -> tuple[Tensor, Tensor]:
    """5 + partition examples of a client, of two of three classes."""
    y = (torch.arange(5 + partition) % 2 + partition) % 3
    noise = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(partition))
    return noise + 2 * nn.functional.one_hot(y, 4), y


# Scalar client i's examples are x = a_i with target 1: F_i(w) = (a_i w - 1)^2 / 2 has its minimum
# at 1 / a_i, and the sum of n_i F_i at w* = sum(n_i a_i) / sum(n_i a_i^2).
SLOPES, SIZES = (1.0, 2.0, 1.5), (2, 2, 6)


def scalar(kind: Callable[..., Any], **options: Any) -> ClientApp:
    """Clients of one weight in float64."""

    def make(*_: Any, seed: tuple[int, int]) -> NumPyClient:
        slope, count = SLOPES[seed[1]], SIZES[seed[1]]
        x, y = torch.full((count, 1), slope).double(), torch.zeros(count, dtype=torch.int64)
        client = kind(nn.Linear(1, 1, bias=False).double(), x, y, loss="mse", **options)
        client.targets = client.targets.double()
        return client

    return app(make)


def descend(
    strategy: Strategy, clients: ClientApp, rounds: int, *, first: float = 0.0, **grid: Any
) -> float:
    """Weight after some rounds of three scalar clients."""
    initial = ArrayRecord({"weight": Array(np.array([[first]]))})
    shown = Grid(clients, **{"num_clients": 3, **grid})
    result = strategy.start(shown, initial, num_rounds=rounds)
    return float(result.arrays["weight"].numpy()[0, 0])


class Grid(LocalGrid):
    """A local grid that gives other node ids, and changes replies of some kinds.

    `changes`: partition -> what becomes of its replies; `order` permutes all replies. `damaged`
    counts the changed replies; `seen` keeps what was sent ("down") and answered ("up"). `on_send`
    is called with each exchange's messages before they are answered.
    """

    def __init__(
        self,
        app: ClientApp,
        *,
        node_ids: Iterable[int] | None = None,
        order: int | None = None,
        changes: dict[int, Change] | None = None,
        changed_kind: str = "train",
        num_clients: int = NUM_CLIENTS,
        on_send: Callable[[list[Message]], object] | None = None,
    ) -> None:
        super().__init__(app, num_clients, {})
        ids = self.contexts if node_ids is None else node_ids
        self.contexts = dict(zip(ids, self.contexts.values(), strict=True))
        for node_id, context in self.contexts.items():
            context.node_id = node_id
        self.order, self.changes, self.changed_kinds = order, changes or {}, changed_kind.split()
        self.damaged, self.on_send = 0, on_send or (lambda _: None)
        self.trained: list[int] = []
        self.exchanges: list[tuple[str, int]] = []
        self.seen: list[tuple[str, Message]] = []

    def _in_order(self, items: Iterable[Any]) -> list[Any]:
        listed = list(items)
        if self.order is None:
            return listed
        return [listed[i] for i in np.random.default_rng(self.order).permutation(len(listed))]

    def get_node_ids(self) -> Iterable[int]:
        return self._in_order(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        if messages:
            self.exchanges.append((messages[0].metadata.message_type, len(messages)))
        self.on_send(messages)
        self.seen += [("down", message) for message in messages]
        replies: list[Message] = []
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            partition = int(self.contexts[node].node_config.get("partition-id", node))
            (reply,) = super().send_and_receive([message])
            if kind == "train":
                self.trained.append(partition)
            changed: Message | list[Message] | None = reply
            if partition in self.changes and kind in self.changed_kinds:
                changed = self.changes[partition](reply)
                self.damaged += 1
            replies += changed if isinstance(changed, list) else [changed] if changed else []
        replies = self._in_order(replies)
        self.seen += [("up", reply) for reply in replies]
        return replies

    def records(self, way: str) -> list[dict[str, list[str]]]:
        """List the names of each message's arrays, by record."""
        contents = [m.content.array_records for w, m in self.seen if w == way and m.has_content()]
        return [{name: list(record) for name, record in records.items()} for records in contents]


class InOrder(Grid):
    """Asks clients in the order of their nodes; Flower's own strategies ask in a random one."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return super().send_and_receive(sorted(messages, key=lambda m: m.metadata.dst_node_id))


def size(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def app(make: Callable[..., NumPyClient], mods: Any = None, **options: Any) -> ClientApp:
    def client_fn(context: Context) -> NumPyClient:
        partition = int(context.node_config["partition-id"])
        x, y = examples(partition)
        return make(network(), x, y, seed=(0, partition), **options)

    return client_app(client_fn, mods=mods)


def owned(folder: Path, client: object, **limits: Any) -> PrivacyLimits:
    """Limits of a client's owner, with a ledger in a folder, which is made if it is missing."""
    path = folder / f"{client}.ledger"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        PrivacyLedger.create(path)
    return PrivacyLimits(ledger=path, **limits)


def first_model(strategy: FlowerStrategy) -> nn.Module:
    """Return the strategy's network if its arrays have other names than those of network()."""
    usual, other = network(), getattr(strategy, "network", None)
    differs = other is not None and other.state_dict().keys() != usual.state_dict().keys()
    return other if other is not None and differs else usual


def start(
    strategy: FlowerStrategy,
    grid: Grid,
    rounds: int = 1,
    model: nn.Module | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Weights after some rounds, from those of the network or of another model."""
    initial = ArrayRecord(dict((model or first_model(strategy)).state_dict()))
    result = strategy.start(grid, initial, num_rounds=rounds, **options)
    return arrays_of(result.arrays)


def told(strategy: Any, name: str = "replies-accepted") -> list[Any]:
    return [strategy.train_metrics[number][name] for number in sorted(strategy.train_metrics)]


def asked_first(strategy: T, grid: Grid) -> T:
    """Return the strategy, all clients asked for their partitions: it may sample some of them."""
    nodes, channel = list(grid.get_node_ids()), strategy.channel
    channel.grid = grid
    channel.registry.add(channel.ask_partitions(nodes))
    channel.registry.set_present(nodes)
    return strategy


def start_in_vain(strategy: Strategy, grid: Grid, rounds: int = 1) -> dict[str, np.ndarray]:
    """Weights after rounds in which no reply could be used: the run says so in the end."""
    with pytest.raises(NoUsableReply, match=f"in {rounds} rounds no client's reply could be used"):
        start(strategy, grid, rounds)
    return arrays_of(strategy.global_arrays)


def run_as_if_lost(
    make: Callable[[], T], clients: ClientApp, change: Change, reason: str, rounds: int = 1
) -> tuple[T, T]:
    """Show that client 2's changed replies have the result of lost ones; return both strategies."""
    attacked, without = make(), make()
    weights = start(attacked, Grid(clients, changes={2: change}), rounds)
    assert bits(weights) == bits(start(without, Grid(clients, changes={2: lost}), rounds))
    metrics = attacked.train_metrics[rounds]
    assert (metrics["replies-rejected"], metrics[f"rejected-{reason}"]) == (1, 1)
    return attacked, without


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def initial_bits(model: nn.Module | None = None) -> dict[str, bytes]:
    """What a run that changes nothing returns."""
    return bits(arrays_of(ArrayRecord(dict((model or network()).state_dict()))))


def kept_by(strategy: Any, client: int | str, server_round: int) -> dict[str, np.ndarray]:
    """What a client keeps to itself of a round."""
    folder = cache_dir() / "personal" / f"client-{client}" / f"run-{strategy.trained.run_key}"
    with np.load(folder / f"round-{server_round:08}.npz") as file:
        return {name.removeprefix("array "): file[name] for name in file.files}


def forgetting(strategy: Any, until: int = 1_000) -> Change:
    """Reply as usual, and lose what all clients keep to themselves, in the rounds before one."""

    def forget(reply: Message) -> Message:
        if strategy.server_round < until:
            for folder in (cache_dir() / "personal").glob(
                f"client-*/run-{strategy.trained.run_key}*"
            ):
                shutil.rmtree(folder)
        return reply

    return forget


def loaded(weights: dict[str, np.ndarray]) -> nn.Module:
    model = network()
    model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in weights.items()})
    return model.eval()


def as_record(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def bits(weights: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: str(w.dtype).encode() + w.tobytes() for name, w in weights.items()}


def assert_near(found: Any, expected: Any, atol: float = 0, rtol: float = 0) -> None:
    """Compare arrays by name: the same ones, in the same order."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=atol, err_msg=name)


# ------------------------------------------------------------------ hostile replies


def in_rounds(strategy: Any, numbers: Iterable[int], change: Change) -> Change:
    """Change replies of some rounds."""
    return lambda reply: change(reply) if strategy.server_round in numbers else reply


def with_arrays(
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], record: str = "arrays"
) -> Change:
    def apply(reply: Message) -> Message:
        reply.content[record] = as_record(change(arrays_of(reply.content[record])))
        return reply

    return apply


def with_metrics(**values: Any) -> Change:
    changed = {name.replace("_", "-"): value for name, value in values.items()}

    def apply(reply: Message) -> Message:
        metrics = {**reply.content["metrics"], **changed}
        reply.content["metrics"] = MetricRecord({k: v for k, v in metrics.items() if v is not None})
        return reply

    return apply


def lost(_: Message) -> None:
    return None


def empty(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


def second_record(name: str, *, instead: bool = False) -> Change:
    def apply(reply: Message) -> Message:
        reply.content["again"] = reply.content[name]
        if instead:
            del reply.content[name]
        return reply

    return apply


renamed = functools.partial(second_record, instead=True)


def first_array(make: Callable[[Array], Array]) -> Change:
    """Replace the first array by what is made of it."""

    def apply(reply: Message) -> Message:
        arrays = reply.content["arrays"]
        name = next(iter(arrays))
        arrays[name] = make(arrays[name])
        return reply

    return apply


def with_bytes(write: Callable[[io.BytesIO], object]) -> Change:
    write(buffer := io.BytesIO())
    return first_array(lambda _: Array("float32", (3,), "numpy.ndarray", buffer.getvalue()))


def damaged(
    position: int, change: Callable[[np.ndarray], np.ndarray], record: str = "arrays"
) -> Change:
    """Change the array at a position of a record."""

    def apply(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = list(arrays)[position]
        return {k: change(a) if k == name else a for k, a in arrays.items()}

    return with_arrays(apply, record)


EXTRA = np.zeros(3, np.float32)
HUGE = {"descr": "<f4", "fortran_order": False, "shape": (2**40,)}
# Kind of damage -> (what becomes of the reply, reasons under which it may be counted). These reach
# what each method makes of the arrays.
DAMAGED_ARRAYS: dict[str, tuple[Change, str]] = {
    "extra array": (with_arrays(lambda a: a | {"extra": EXTRA}), "arrays shape compression"),
    "missing array": (with_arrays(lambda a: dict(list(a.items())[:-1])), "arrays shape"),
    "two array records": (second_record("arrays"), "arrays"),
    "garbage": (with_bytes(lambda file: file.write(b"not an array")), "arrays"),
    "NaN": (damaged(0, lambda a: np.full_like(a, np.nan)), "non-finite"),
    "infinity": (damaged(0, lambda a: np.full_like(a, np.inf)), "non-finite"),
    "shape": (damaged(0, lambda a: a[:-1]), "shape"),
    "dtype": (damaged(0, lambda a: a.astype(np.complex64)), "dtype"),
}
COUNTS = {"zero": 0, "huge": 2**62, "list of": [1, 2], "fraction of": 5.5, "no": None}
COUNTS |= {"NaN": float("nan"), "infinite": float("inf")}
# These are stopped before, by Reply and Exchange.
DAMAGED_REPLIES: dict[str, tuple[Change, str]] = {
    **{
        f"{kind} num-examples": (with_metrics(num_examples=count), "num-examples")
        for kind, count in COUNTS.items()
    },
    "error": (failed, "error"),
    # which carries the SuperLink's node id
    "error of the transport": (lambda reply: from_node(failed(reply), SUPERLINK), "error"),
    "no content": (empty, "metrics"),
    "zip archive": (with_bytes(lambda file: np.savez(file, w=EXTRA)), "arrays"),
    "other serialisation": (
        first_array(lambda a: Array(a.dtype, a.shape, "safetensors", a.data)), "arrays"
    ),
    # one that declares 4 TB
    "header without data": (
        with_bytes(lambda file: np.lib.format.write_array_header_1_0(file, HUGE)), "arrays"
    ),
    "two metric records": (second_record("metrics"), "metrics"),
    "metric of 67 bits": (with_metrics(train_loss=10**20), "metrics"),
    "from a node that was not asked": (lambda reply: from_node(reply, 77), "not-asked"),
    "in another client's name": (lambda reply: from_node(reply, 1), "not-asked"),
}  # fmt: skip


def run_damaged(
    strategy: Strategy, clients: ClientApp, kinds: list[str], odd: dict[int, Change] | None = None
) -> dict[str, bytes]:
    """Weights after a round in which all but two clients send damaged arrays, which is seen."""
    strategy.min_completed = 1
    damage = DAMAGED_ARRAYS | DAMAGED_REPLIES
    changes = {k: damage[kind][0] for k, kind in enumerate(kinds, 1)} | (odd or {})
    grid = Grid(clients, changes=changes, num_clients=len(kinds) + 2)
    weights = start(asked_first(strategy, grid) if odd else strategy, grid)
    metrics = strategy.train_metrics[1]
    assert metrics["replies-accepted"] == 2
    counted = {k.removeprefix("rejected-"): v for k, v in metrics.items() if "rejected-" in k}
    counted.pop("duplicate", None)
    possible = [damage[kind][1].split() for kind in kinds]
    assert any(Counter(c) == counted for c in itertools.product(*possible)), (counted, possible)
    return bits(weights)


# replies that are odd, but whose arrays can be used
ODD: list[Change] = [
    with_metrics(bonus=1.0),
    with_metrics(train_loss=None),
    with_metrics(train_loss=[1.0, 2.0]),
    with_metrics(train_loss=float("nan")),
    with_metrics(train_loss=-float("inf")),
    with_metrics(bonus=[1.0, float("nan")]),
    *(with_metrics(partition_id=partition) for partition in (None, 0.5, 0)),  # 0: another's
    renamed("arrays"),
    renamed("metrics"),
]
