"""How training examples are split among clients, with flwr-datasets' partitioners."""

import hashlib
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    IidPartitioner,
    NaturalIdPartitioner,
    Partitioner,
    PathologicalPartitioner,
)
from numpy.typing import NDArray

from .config import Config, ConfigError
from .data import Data, load_data

__all__ = ["ClientDirichletPartitioner", "Split", "load_split", "split_data"]


class ClientDirichletPartitioner(Partitioner):  # type: ignore[misc]
    """Paper 000's non-IID split: each client's mixture of classes is drawn for it alone.

    For client m, q_m ~ Dir(alpha) over the classes, and floor(q_mk * examples_per_partition)
    images of class k, drawn without replacement. Clients are drawn independently of each other,
    so that two may hold the same image, and no class can run out.

    Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 6
    and appendix A (200 images a client).

    Parameters
    ----------
    num_partitions : int
        Number of clients.
    partition_by : str
        Column of the labels.
    alpha : float
        Concentration of the symmetric Dirichlet distribution.
    examples_per_partition : int
        Before rounding down; a client has up to C - 1 fewer.
    seed : int
        Of all draws.

    Raises
    ------
    ValueError
        From :meth:`load_partition`, if a class has fewer images than a client is to get.
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
        self._num_partitions = num_partitions
        self._partition_by = partition_by
        self._alpha = alpha
        self._examples = examples_per_partition
        self._seed = seed

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
        labels = _column(self.dataset, self._partition_by)
        return {label: np.flatnonzero(labels == label) for label in np.unique(labels)}


def _column(dataset: Dataset, name: str) -> NDArray[Any]:
    column: NDArray[Any] = dataset.with_format("arrow")[:][name].to_numpy()
    return column


@dataclass(frozen=True, eq=False)
class Split:
    """Which training examples each client holds.

    Attributes
    ----------
    clients : tuple of ndarray of int64
        For each partition, the indices of its training examples.
    validation : ndarray of int64
        Indices that the server keeps and no client has.
    checksum : str
        SHA-256 of all of it: two runs with one checksum had the same split.
    """

    clients: tuple[NDArray[np.int64], ...]
    validation: NDArray[np.int64]
    checksum: str

    def train_and_test(
        self, partition: int, config: Config
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a client's own examples for training and for evaluation, without overlap."""
        own = self.clients[partition]
        count = min(int(config.local_test_fraction * len(own)), len(own) - 1)
        generator = np.random.default_rng([config.seed, partition])
        own = generator.permutation(own) if count else own
        return own[count:], own[:count]


def split_data(config: Config, data: Data) -> Split:
    """Split the training set as `config` says.

    Raises
    ------
    ConfigError
        If there are more clients than examples, a client would be empty, or the partitioner
        cannot do what is asked of it.
    """
    generator = np.random.default_rng([config.seed, 1])
    order = generator.permutation(len(data.y_train))
    validation = np.sort(order[: config.validation_examples])
    rest = order[config.validation_examples :]  # shuffled: Flower deals IID parts out in order
    if config.num_clients > len(rest):
        raise ConfigError(
            f"num-clients: expected at most one client for each of the {len(rest)} training "
            f"examples, got {config.num_clients}"
        )
    columns: dict[str, Any] = {"index": rest, "label": data.y_train[rest]}
    if config.partition == "natural":
        if data.natural_ids is None:
            raise ConfigError(f"partition = natural: {config.dataset} has no natural ids")
        columns["id"] = data.natural_ids[rest]
    try:
        partitioner = _partitioner(config)
        partitioner.dataset = Dataset.from_dict(columns)
        if config.partition == "natural" and partitioner.num_partitions != config.num_clients:
            raise ConfigError(
                f"num-clients: {config.natural_column} has {partitioner.num_partitions} values, "
                f"got {config.num_clients}"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Flower's Dirichlet warns at each draw it discards
            clients = tuple(
                _column(partitioner.load_partition(i), "index").astype(np.int64)
                for i in range(config.num_clients)
            )
    except ConfigError:
        raise
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"partition = {config.partition}: {error}") from error
    for i, own in enumerate(clients):
        if len(own) == 0:
            raise ConfigError(
                f"partition = {config.partition}: client {i} would have no examples; use fewer "
                "clients or a larger alpha"
            )
    digest = hashlib.sha256()
    for indices in (validation, *clients):
        digest.update(len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes())
    return Split(clients, validation, digest.hexdigest())


def _partitioner(config: Config) -> Partitioner:
    number, by, seed = config.num_clients, "label", config.seed
    match config.partition:
        case "iid":
            return IidPartitioner(number)
        case "dirichlet":
            return DirichletPartitioner(
                number, by, config.alpha, min_partition_size=config.min_partition_size, seed=seed
            )
        case "client-dirichlet":
            return ClientDirichletPartitioner(
                number, by, config.alpha, config.examples_per_client, seed
            )
        case "pathological":
            return PathologicalPartitioner(number, by, config.classes_per_client, seed=seed)
        case _:
            return NaturalIdPartitioner("id")


@lru_cache(maxsize=2)
def load_split(config: Config) -> Split:
    """Split the data set that `config` names; later calls in a process share it."""
    return split_data(config, load_data(config))
