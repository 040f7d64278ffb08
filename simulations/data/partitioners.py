"""The non-IID split of Yue et al. (ICML 2022), as a partitioner of flwr-datasets."""

from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

__all__ = ["ClientDirichletPartitioner", "column"]


class ClientDirichletPartitioner(Partitioner):  # type: ignore[misc]
    """The split of Yue et al. (2022): each client has a mixture of classes of its own.

    For client m, q_m ~ Dir(alpha) over the classes, and floor(q_mk * examples_per_partition)
    images of class k, drawn without replacement. Clients are drawn independently of each other,
    so that two may hold the same image, and no class can run out.

    Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 6:
    images of class k go to client m in proportion to q_mk. That a client has 200 (the batch size of
    appendix A), rounding down and drawing clients independently are our reading.

    Parameters
    ----------
    num_partitions : int
        Number of clients.
    partition_by : str
        Column of the labels.
    alpha : float
        Concentration of the symmetric Dirichlet distribution.
    examples_per_partition : int
        Number before rounding down; a client has up to C - 1 fewer.
    seed : int
        Seed of all draws.
    """

    def __init__(
        self,
        num_partitions: int,
        partition_by: str,
        alpha: float,
        examples_per_partition: int = 200,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self._num_partitions, self._partition_by = num_partitions, partition_by
        self._alpha, self._examples, self._seed = alpha, examples_per_partition, seed

    @property
    def num_partitions(self) -> int:
        """Total number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the partition's examples, shuffled."""
        generator = np.random.default_rng([self._seed, partition_id])
        q = generator.dirichlet(np.full(len(self._members), self._alpha))
        chosen: list[NDArray[np.int64]] = []
        for (label, members), share in zip(self._members.items(), q, strict=True):
            count = int(share * self._examples)
            if count > len(members):
                raise ValueError(
                    f"client {partition_id} is to get {count} examples of class {label}, which "
                    f"has {len(members)}; lower the number of examples per client"
                )
            chosen.append(generator.choice(members, size=count, replace=False))
        return self.dataset.select(generator.permutation(np.concatenate(chosen)))

    @cached_property
    def _members(self) -> dict[Any, NDArray[np.int64]]:
        """Indices of each class."""
        labels = column(self.dataset, self._partition_by)
        return {label: np.flatnonzero(labels == label) for label in np.unique(labels)}


def column(dataset: Dataset, name: str) -> NDArray[Any]:
    """Return one column as an array, without going through its rows."""
    values: NDArray[Any] = dataset.with_format("arrow")[:][name].to_numpy()
    return values
