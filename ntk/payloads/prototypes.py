"""A client's class prototypes: mean features, and the number of examples behind each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadReply
from ..support.arrays import require_array, require_counts, take_arrays

# names of global prototypes among a network's arrays, none of which has a hyphen in its name
GLOBAL_PROTOTYPES = ("global-prototypes.means", "global-prototypes.counts")
LARGEST = 1e12  # a feature; squares of larger ones, summed, leave float32
ITERATIONS = 100  # at most, towards a geometric median
CHUNK = 256  # examples whose features are in memory at a time


@dataclass(frozen=True, eq=False)
class Prototypes:
    """The mean feature of each class among a client's examples.

    Source: Huang et al., *Understanding Convergence and Generalization in Federated Learning
    through Feature Learning Theory*, ICLR 2024, section 6.2.
    """

    means: NDArray[np.float32]  # p_k^j, zeros for a class that the client lacks: (C, p)
    counts: NDArray[np.int64]  # examples of each class: (C,)

    @classmethod
    def of(
        cls, extract: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, num_classes: int
    ) -> Self:
        """Form them from at least one example (n, ...) with labels (n,) by features (m, p)."""
        if not len(x):
            raise ValueError("x: expected at least one example, got none")
        sums = torch.empty(0)
        for chunk, classes in zip(x.split(CHUNK), labels.split(CHUNK), strict=True):
            features = extract(chunk).double()
            if not len(sums):
                sums = features.new_zeros(num_classes, features.shape[1])
            sums.index_add_(0, classes, features)
        counts = torch.bincount(labels, minlength=num_classes)
        means = (sums / counts.clamp(min=1).unsqueeze(1)).float()
        if not bool(torch.isfinite(means).all()):
            raise ValueError("features: expected finite numbers; the network's have diverged")
        return cls(means.numpy(), counts.numpy())

    @classmethod
    def none(cls, num_classes: int, width: int) -> Self:
        """Return those of no example."""
        return cls(np.zeros((num_classes, width), np.float32), np.zeros(num_classes, np.int64))

    @classmethod
    def pooled(cls, clients: Sequence[Self]) -> Self:
        """Return each class's mean over all clients' examples of it, summed in float64."""
        counts, sums = np.zeros_like(clients[0].counts), np.zeros(clients[0].means.shape)
        for client in clients:
            counts = counts + client.counts
            sums = sums + client.counts[:, None] * client.means.astype(np.float64)
        return cls((sums / np.maximum(counts, 1)[:, None]).astype(np.float32), counts)

    @classmethod
    def geometric_median(cls, clients: Sequence[Self]) -> Self:
        """Return each class's point with the least sum of distances to the clients' means.

        A mean counts by the client's examples of the class, at most those of the median client.
        Means longer than the median one are shortened to it before.

        Source: Pillutla et al., *Robust Aggregation for Federated Learning*, IEEE Transactions on
        Signal Processing 2022, whose smoothed Weiszfeld iteration finds it.
        """
        counts = np.sum([client.counts for client in clients], 0)
        means = np.zeros(clients[0].means.shape, np.float32)
        for j in np.flatnonzero(counts):
            present = [client for client in clients if client.present[j]]
            rows = np.stack([client.means[j] for client in present]).astype(np.float64)
            votes = np.array([client.counts[j] for client in present])
            norms = np.linalg.norm(rows, axis=1)
            longest = median_low(norms)
            rows *= np.minimum(1, longest / np.maximum(norms, 1e-300))[:, None]
            means[j] = _nearest_to_all(rows, np.minimum(votes, median_low(votes)))
        return cls(means, counts)

    def update_from(self, newer: Self) -> Self:
        """Return the newer ones, and these for classes that the newer lack."""
        means = np.where(newer.present[:, None], newer.means, self.means)
        return type(self)(means, np.where(newer.present, newer.counts, self.counts))

    @property
    def present(self) -> NDArray[np.bool_]:
        """Mask of the classes that the client has, shape (C,)."""
        return self.counts > 0

    @property
    def size(self) -> float:
        """Root mean square of the means that are there."""
        return float(np.sqrt(np.square(self.means[self.present], dtype=np.float64).mean()))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return ``means`` of the classes that are there, and ``counts`` of all."""
        return {"means": self.means[self.present], "counts": self.counts}

    def to_global_arrays(self) -> dict[str, NDArray[Any]]:
        """Return means and counts of all classes."""
        return dict(zip(GLOBAL_PROTOTYPES, (self.means, self.counts), strict=True))

    @classmethod
    def from_global_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Read what :meth:`to_global_arrays` returned from among other arrays."""
        means, counts = (arrays[name] for name in GLOBAL_PROTOTYPES)
        return cls(means, counts)

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        *,
        num_classes: int,
        width: int,
        max_examples: int,
        num_examples: int | None = None,
    ) -> Self:
        """Check what :meth:`to_arrays` made; BadReply otherwise.

        `max_examples` limits a class; the counts must add up to `num_examples` if that is given.
        """
        rows, counts = take_arrays(arrays, "means", "counts")
        require_counts(counts, num_classes, num_examples)
        if not 1 <= counts.max() <= max_examples:
            raise BadReply("range", f"counts: expected some, of a class up to {max_examples}")
        present = counts > 0
        shape = (int(present.sum()), width)
        require_array("means", rows, shape=shape, dtype=np.float32, limit=LARGEST)
        means = np.zeros((num_classes, width), np.float32)
        means[present] = rows
        return cls(means, counts)


def _nearest_to_all(rows: NDArray[np.float64], votes: NDArray[Any]) -> NDArray[np.float64]:
    median: NDArray[np.float64] = np.median(rows, 0)
    least = 1e-6 * np.linalg.norm(rows, axis=1).max() + 1e-300  # distance that it divides by
    for _ in range(ITERATIONS):
        weights = votes / np.maximum(np.linalg.norm(rows - median, axis=1), least)
        before, median = median, weights @ rows / weights.sum()
        if np.linalg.norm(median - before) <= least:
            break
    return median
