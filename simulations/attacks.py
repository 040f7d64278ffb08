"""Clients that lie: attacks on their examples, or on what they send.

An attack on examples changes what a client trains on, and the client is honest from there on: it
works with every method. An attack on replies changes the arrays of floating point in what a client
sends, as :class:`~fedntk.simulations.engine.faults.LyingGrid` passes it on; what is counted, sealed
or compressed to whole numbers stays. A reply is x + d, with x what was sent to the client under the
same name (0 if nothing), and the attack changes d. Liars know the honest replies of the exchange,
so they can collude.

Sources: Baruch et al., *A Little Is Enough*, NeurIPS 2019, algorithm 3 (with the paper's z = 1.5);
Xie et al., *Fall of Empires*, UAI 2020, section 4 (inner-product); Karimireddy et al.,
*Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing*, ICLR 2022, section 3 (mimic).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.payloads.feature_statistics import packed_diagonal

Changes = dict[str, NDArray[Any]]  # d by the names of records and arrays, "arrays/0.weight"
Generator = np.random.Generator
Examples = tuple[Tensor, Tensor]
BACKDOOR_CLASS = 0


class Attack(NamedTuple):
    """What a liar does: with examples, labels, classes; or with its own and honest changes."""

    on_examples: Callable[[Tensor, Tensor, int, Generator], Examples] | None = None
    on_reply: Callable[[Changes, Sequence[Changes], float, Generator], Changes] | None = None
    factor: float = 1.0  # by default


def patched(x: Tensor) -> Tensor:
    """Return images (n, ..., height, width) with a bright square in a corner, the backdoor's."""
    x, side = x.clone(), max(2, x.shape[-1] // 7)
    x[..., -side:, -side:] = x.max()
    return x


def _rename_class(x: Tensor, y: Tensor, classes: int, _: Generator) -> Examples:
    most = int(y.bincount().argmax())
    return x, torch.where(y == most, (most + 1) % classes, y)


def _add_backdoor(x: Tensor, y: Tensor, _: int, __: Generator) -> Examples:
    marked = torch.arange(len(y)) % 2 == 0
    images = torch.where(marked.reshape(-1, *[1] * (x.ndim - 1)), patched(x), x)
    return images, torch.where(marked, BACKDOOR_CLASS, y)


def _scale(changes: Changes, factor: float) -> Changes:
    return {name: factor * change for name, change in changes.items()}


def _mean(honest: Sequence[Changes], deviations: float = 0) -> Changes:
    """Mean of the honest changes, less some standard deviations of each coordinate."""
    stacked = {name: np.stack([other[name] for other in honest]) for name in honest[0]}
    return {name: rows.mean(0) - deviations * rows.std(0) for name, rows in stacked.items()}


def _mimic(honest: Sequence[Changes]) -> Changes:
    """Return the honest change that is farthest along their first principal direction."""
    rows = np.stack([np.concatenate([a.ravel() for a in one.values()]) for one in honest])
    rows = rows.astype(np.float64) - rows.mean(0)
    return honest[int(np.abs(np.linalg.eigh(rows @ rows.T)[1][:, -1]).argmax())]


def draw_gram_signs(gram: NDArray[Any], rng: Generator) -> NDArray[Any]:
    """Draw signs off the diagonal of a packed Gram matrix."""
    width = int((2 * gram.size + 0.25) ** 0.5 - 0.5)
    signs = rng.choice([-1, 1], gram.shape)
    signs[packed_diagonal(width)] = 1
    return np.asarray(gram * signs)


def _shift_labels(x: Tensor, y: Tensor, classes: int, _: Generator) -> Examples:
    return x, (y + 1) % classes


def is_named(name: str, key: str) -> bool:
    """Whether the key of a change is of an array with this name."""
    return key.rpartition("/")[2] == name


ATTACKS: Mapping[str, Attack] = {
    "none": Attack(),
    "absent": Attack(),  # never asked to train: what a screening that knew the liars would leave
    "label-shift": Attack(_shift_labels),
    "label-flip": Attack(_rename_class),
    "random-labels": Attack(
        lambda x, y, classes, rng: (x, torch.from_numpy(rng.integers(0, classes, len(y))).to(y))
    ),
    "backdoor": Attack(_add_backdoor),
    "sign-flip": Attack(on_reply=lambda changes, _, factor, __: _scale(changes, -factor)),
    "scaling": Attack(on_reply=lambda changes, _, factor, __: _scale(changes, factor), factor=10.0),
    "little-is-enough": Attack(on_reply=lambda _, honest, z, __: _mean(honest, z), factor=1.5),
    "inner-product": Attack(on_reply=lambda _, honest, e, __: _scale(_mean(honest), -e)),
    "mimic": Attack(on_reply=lambda _, honest, __, ___: _mimic(honest)),
    "false-prototypes": Attack(  # each class mean comes under the next class
        on_reply=lambda changes, _, factor, __: {
            n: factor * np.roll(d, 1, 0) if is_named("means", n) else d for n, d in changes.items()
        }
    ),
    "false-jacobians": Attack(  # of false labels, and as large as passes the checks of form
        _shift_labels,
        lambda changes, _, factor, __: {  # layers come as two factors; nothing else is scaled
            n: factor**0.5 * d if "/block-" in n else d for n, d in changes.items()
        },
        factor=50.0,
    ),
    "false-gram": Attack(
        on_reply=lambda changes, _, __, rng: {
            n: draw_gram_signs(d, rng) if is_named("gram", n) and d.ndim == 1 else d
            for n, d in changes.items()
        }
    ),
}


def choose_liars(count: int, sizes: Sequence[int], seed: int) -> frozenset[int]:
    """Draw liars among the clients of at least the median size; small ones are heard little."""
    large = np.flatnonzero(np.array(sizes) >= np.median(sizes))
    return frozenset(np.random.default_rng([seed, *b"liars"]).permutation(large)[:count].tolist())
