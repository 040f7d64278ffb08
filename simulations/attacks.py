"""Clients that lie: attacks on their examples, or on what they send.

An attack on examples changes a client's training data, and the client is honest from there on, so
it works with every method. An attack on replies changes the arrays of floating point in whatever a
client sends, as :class:`LyingGrid` passes it on; what is counted, sealed or compressed to whole
numbers stays. A reply is x + d, with x what the client was sent under the same name (0 if nothing),
and attacks change d. Colluding liars know the honest replies of the exchange.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from fedntk.strategies.core.averaging import named_arrays, record_of

from .config.config import AttackName, Config
from .engine.engines import OuterGrid

Changes = dict[str, NDArray[Any]]  # d by the names of records and arrays, "arrays/0.weight"
Generator = np.random.Generator
OnExamples = Callable[[Tensor, Tensor, int, Generator], tuple[Tensor, Tensor]]
OnReply = Callable[[Changes, Sequence[Changes], float, Generator], Changes]
BACKDOOR_CLASS = 0


@dataclass(frozen=True)
class Attack:
    """What a liar does.

    `on_examples` maps examples (n, ...), labels (n,), the number of classes and a generator to
    false examples and labels. `on_reply` maps the honest changes, those of the honest clients for
    colluding liars, the factor and a generator to false changes.
    """

    on_examples: OnExamples | None = None
    on_reply: OnReply | None = None
    factor: float = 1.0  # by default
    colludes: bool = False
    kinds: str = "f"  # kinds of numbers that are changed


def patched(x: Tensor) -> Tensor:
    """Return images (n, ..., height, width) with a bright square in a corner, the backdoor's."""
    x, side = x.clone(), max(2, x.shape[-1] // 7)
    x[..., -side:, -side:] = x.max()
    return x


def _shift_labels(x: Tensor, y: Tensor, classes: int, _: Generator) -> tuple[Tensor, Tensor]:
    return x, (y + 1) % classes


def _flip_class(x: Tensor, y: Tensor, classes: int, _: Generator) -> tuple[Tensor, Tensor]:
    most = int(y.bincount().argmax())
    return x, torch.where(y == most, (most + 1) % classes, y)


def _draw_labels(x: Tensor, y: Tensor, classes: int, rng: Generator) -> tuple[Tensor, Tensor]:
    return x, torch.from_numpy(rng.integers(0, classes, len(y))).to(y)


def _add_backdoor(x: Tensor, y: Tensor, _: int, __: Generator) -> tuple[Tensor, Tensor]:
    every = torch.arange(len(y)) % 2 == 0
    wide = every.reshape(-1, *[1] * (x.ndim - 1))
    return torch.where(wide, patched(x), x), torch.where(every, BACKDOOR_CLASS, y)


def _scale(own: Changes, _: Sequence[Changes], factor: float, __: Generator) -> Changes:
    return {name: factor * change for name, change in own.items()}


def _flip_signs(own: Changes, _: Sequence[Changes], factor: float, __: Generator) -> Changes:
    return {name: -factor * change for name, change in own.items()}


def _be_a_little_off(
    _: Changes, honest: Sequence[Changes], factor: float, __: Generator
) -> Changes:
    """Mean of the honest less z standard deviations of each coordinate."""
    every = {name: np.stack([other[name] for other in honest]) for name in honest[0]}
    return {name: own.mean(0) - factor * own.std(0) for name, own in every.items()}


def _reverse_mean(_: Changes, honest: Sequence[Changes], factor: float, __: Generator) -> Changes:
    return {n: -factor * np.mean([other[n] for other in honest], 0) for n in honest[0]}


def _mimic(_: Changes, honest: Sequence[Changes], __: float, ___: Generator) -> Changes:
    """Repeat the honest client that is farthest along the first principal direction."""
    rows = np.stack([np.concatenate([a.ravel() for a in own.values()]) for own in honest])
    rows = rows.astype(np.float64) - rows.mean(0)
    _, vectors = np.linalg.eigh(rows @ rows.T)
    return honest[int(np.abs(vectors[:, -1]).argmax())]


def _exchange_prototypes(
    own: Changes, _: Sequence[Changes], factor: float, __: Generator
) -> Changes:
    """Send each class mean under the next class."""
    return {
        name: factor * np.roll(change, 1, 0) if name.endswith("/means") else change
        for name, change in own.items()
    }


def _draw_gram_signs(own: Changes, _: Sequence[Changes], __: float, rng: Generator) -> Changes:
    """Draw signs off the diagonal of a packed Gram matrix."""
    found = dict(own)
    for name, change in own.items():
        if name.endswith("/gram") and change.ndim == 1:
            width = int((2 * change.size + 0.25) ** 0.5 - 0.5)
            signs = rng.choice([-1, 1], change.size)
            signs[np.cumsum([0, *range(width, 1, -1)])] = 1
            found[name] = change * signs
    return found


ATTACKS: Mapping[AttackName, Attack] = {
    "none": Attack(),
    "label-shift": Attack(_shift_labels),
    "label-flip": Attack(_flip_class),
    "random-labels": Attack(_draw_labels),
    "backdoor": Attack(_add_backdoor),
    "sign-flip": Attack(on_reply=_flip_signs),
    "scaling": Attack(on_reply=_scale, factor=10.0),
    # Baruch et al., A Little Is Enough, NeurIPS 2019, algorithm 3, with the paper's z = 1.5
    "little-is-enough": Attack(on_reply=_be_a_little_off, factor=1.5, colludes=True),
    # Xie et al., Fall of Empires, UAI 2020, section 4
    "inner-product": Attack(on_reply=_reverse_mean, colludes=True),
    # Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets, ICLR 2022, section 3
    "mimic": Attack(on_reply=_mimic, colludes=True),
    "false-prototypes": Attack(on_reply=_exchange_prototypes),
    "false-gram": Attack(on_reply=_draw_gram_signs, kinds="fi"),
}


def choose_liars(config: Config, sizes: Sequence[int]) -> frozenset[int]:
    """Draw the liars among the clients that train, by the run's seed.

    They are of at least the median size, since a liar with few examples is heard little.
    """
    own = np.array(sizes[: config.num_clients - config.validation_clients])
    large = np.flatnonzero(own >= np.median(own))
    drawn = np.random.default_rng([config.seed, *b"liars"]).permutation(large)
    return frozenset(drawn[: config.liars].tolist())


def false_examples(
    config: Config, partition: int, x: Tensor, y: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return what a liar trains on: its own examples, unless its attack is on these."""
    rng, lie = np.random.default_rng([config.seed, partition, *b"lie"]), ATTACKS[config.attack]
    return (x, y) if lie.on_examples is None else lie.on_examples(x, y, num_classes, rng)


class LyingGrid(OuterGrid):
    """A grid on which the replies of some partitions to training messages are false.

    Draws depend on `seed`, the round and the partition, so a resumed run sees the same lies. With
    ``push_messages`` and ``pull_messages`` colluding liars know what comes at the same time.
    """

    def __init__(
        self, grid: Grid, liars: Iterable[int], attack: Attack, *, factor: float = 0, seed: int = 0
    ) -> None:
        super().__init__(grid)
        self.liars, self.attack, self.seed = frozenset(liars), attack, seed
        self.factor = factor or attack.factor
        self._sent: dict[int, Message] = {}  # node -> its newest message

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Remember what is sent."""
        return super().push_messages(self._remember(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive, with lies."""
        return self._with_lies(super().pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and receive, with lies."""
        return self._with_lies(super().send_and_receive(self._remember(messages), timeout=timeout))

    def _remember(self, messages: Iterable[Message]) -> list[Message]:
        sent = list(messages)
        self._sent |= {message.metadata.dst_node_id: message for message in sent}
        return sent

    def _with_lies(self, replies: Iterable[Message]) -> Iterable[Message]:
        honest: list[Changes] = []
        if self.attack.colludes:
            replies = list(replies)
            others = [r for r in replies if _sends(r) and _partition_of(r) not in self.liars]
            honest = [self._changes(reply)[0] for reply in others]
        for reply in replies:
            if _sends(reply) and _partition_of(reply) in self.liars:
                self._lie(reply, honest)
            yield reply

    def _lie(self, reply: Message, honest: Sequence[Changes]) -> None:
        """Put false arrays in place of a reply's."""
        own, origins = self._changes(reply)
        alike = [other for other in honest if _shapes(other) == _shapes(own)]
        if not own or self.attack.on_reply is None or (self.attack.colludes and not alike):
            return
        config = self._sent[reply.metadata.src_node_id].content.config_records.values()
        server_round: Any = next((c["server-round"] for c in config if "server-round" in c), 0)
        rng = np.random.default_rng([self.seed, server_round, _partition_of(reply), *b"lie"])
        found = self.attack.on_reply(own, alike, self.factor, rng)
        for record, arrays in reply.content.array_records.items():
            for name, array in named_arrays(arrays).items():
                if (key := f"{record}/{name}") in found:
                    false = np.asarray(origins[key] + found[key], array.dtype)
                    arrays[name] = record_of({name: false})[name]

    def _changes(self, reply: Message) -> tuple[Changes, Changes]:
        """Return d and x of the arrays of a reply that the attack is about."""
        sent = self._sent[reply.metadata.src_node_id].content.array_records
        changes, origins = Changes(), Changes()
        for record, arrays in reply.content.array_records.items():
            for name, array in named_arrays(arrays).items():
                if array.dtype.kind in self.attack.kinds:
                    key = f"{record}/{name}"
                    origins[key] = _origin(sent, record, name, array)
                    changes[key] = array - origins[key]
        return changes, origins


def _sends(reply: Message) -> bool:
    """Whether a reply answers a training message with arrays."""
    is_train = reply.metadata.message_type.startswith("train")
    return is_train and reply.has_content() and bool(reply.content.array_records)


def _partition_of(reply: Message) -> int:
    found: Any = [own.get("partition-id") for own in reply.content.metric_records.values()]
    return next((int(number) for number in found if number is not None), -1)


def _shapes(changes: Changes) -> dict[str, tuple[int, ...]]:
    return {name: change.shape for name, change in changes.items()}


def _origin(
    sent: Mapping[str, ArrayRecord], record: str, name: str, array: NDArray[Any]
) -> NDArray[Any]:
    """Return the array that was sent under a name, in this record or the only one that has it."""
    homes = [record] if record in sent else [own for own in sent if name in sent[own]]
    found = sent[homes[0]].get(name) if len(homes) == 1 else None
    if found is None or tuple(found.shape) != array.shape:
        return np.zeros_like(array)
    return found.numpy().astype(array.dtype)
