"""How examples are split among clients: training examples with flwr-datasets' partitioners.

With the setting private-test the test set is split, too, as the training examples were.
"""

import hashlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedntk.clients import cache_dir
from fedntk.ntk.support.files import whole

from ..config.config import Config
from ..config.settings import ConfigError
from .load import Data, load_data

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

__all__ = ["SPLIT_SETTINGS", "Split", "apportion", "load_split", "split_data"]


@dataclass(frozen=True, eq=False)
class Split:
    """Which examples each client holds.

    Attributes
    ----------
    clients : tuple of ndarray of int64
        For each partition, the indices of its training examples.
    validation : ndarray of int64
        Indices that the server keeps and no client has.
    tests : tuple of ndarray of int64
        With private-test: for each partition, the indices of its test examples. Else empty.
    """

    clients: tuple[NDArray[np.int64], ...]
    validation: NDArray[np.int64]
    tests: tuple[NDArray[np.int64], ...] = ()

    @property
    def checksum(self) -> str:
        """SHA-256 of all indices: two runs with one checksum had the same split."""
        digest = hashlib.sha256()
        for indices in (self.validation, *self.clients, *self.tests):
            digest.update(len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def train_and_test(
        self, partition: int, config: Config
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a client's own examples for training and for evaluation, without overlap."""
        own, count = self.clients[partition], self.num_kept(partition, config)
        generator = np.random.default_rng([config.seed, partition])
        own = generator.permutation(own) if count else own
        return own[count:], own[:count]

    def num_kept(self, partition: int, config: Config) -> int:
        """Return how many of a client's examples are kept out of its training."""
        size = len(self.clients[partition])
        return min(int(config.local_test_fraction * size), size - 1)


def split_data(config: Config, data: Data) -> Split:
    """Split the training set as `config` says, and with private-test the test set alike.

    Raises
    ------
    ConfigError
        If there are more clients than examples, a client would be empty, or the partitioner
        cannot do what is asked of it.
    """
    generator = np.random.default_rng([config.seed, 1])
    order = generator.permutation(len(data.y_train))
    validation = np.sort(order[: config.validation_examples])
    rest = order[config.validation_examples :]
    if config.owners:
        rest = rest[_of_some_owners(config, data, rest)]
    if config.train_examples > len(rest):
        raise ConfigError(
            f"train-examples: expected at most {len(rest)}, got {config.train_examples}"
        )
    rest = rest[: config.train_examples or None]  # shuffled: Flower deals IID parts out in order
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a progress bar that Jupyter cannot show
        from datasets import Dataset  # slow to import, and needed only for a split that is new

    from .partitioners import column

    try:
        partitioner = _partitioner(config)
        partitioner.dataset = Dataset.from_dict(columns)
        num_parts = config.num_clients
        if config.partition == "natural":
            num_parts = partitioner.num_partitions
        clients_each, too_many = divmod(config.num_clients, num_parts)
        if too_many:
            raise ConfigError(
                f"num-clients: {config.natural_column or 'owners'} has {num_parts} values, got "
                f"{config.num_clients}; expected as many clients, or several for each: twice as "
                "many, and so on"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Flower's Dirichlet warns at each draw it discards
            clients = tuple(
                own
                for i in range(num_parts)
                for own in np.array_split(
                    column(partitioner.load_partition(i), "index").astype(np.int64), clients_each
                )
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
    return _with_tests(Split(clients, validation), config, data)


def _of_some_owners(config: Config, data: Data, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which examples are of the owners that are drawn."""
    if data.natural_ids is None:
        raise ConfigError(f"partition = natural: {config.dataset} has no natural ids")
    ids = data.natural_ids[indices]
    everyone = np.unique(ids)
    if config.owners > len(everyone):
        raise ConfigError(
            f"owners: expected at most the {len(everyone)} that have training examples, got "
            f"{config.owners}"
        )
    generator = np.random.default_rng([config.seed, *b"owners"])
    return np.isin(ids, generator.choice(everyone, config.owners, replace=False))


def _partitioner(config: Config) -> "Partitioner":
    from flwr_datasets.partitioner import (
        DirichletPartitioner,
        IidPartitioner,
        NaturalIdPartitioner,
        PathologicalPartitioner,
    )

    from .partitioners import ClientDirichletPartitioner

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
            return PathologicalPartitioner(
                number,
                by,
                config.classes_per_client,
                class_assignment_mode=config.class_assignment,
                seed=seed,
            )
        case _:
            return NaturalIdPartitioner("id")


def load_split(config: Config) -> Split:
    """Split the data set that `config` names, once on a machine: the workers share a cached file.

    The file's name is a hash of all that the split depends on, the labels included.
    """
    return _load_split(config, load_data(config))


@lru_cache(maxsize=2)
def _load_split(config: Config, data: Data) -> Split:
    digest = hashlib.sha256(data.y_train.tobytes())
    if data.natural_ids is not None:
        digest.update(repr(data.natural_ids.tolist()).encode())
    digest.update(repr([getattr(config, name) for name in SPLIT_SETTINGS]).encode())
    digest.update(importlib.metadata.version("flwr-datasets").encode())
    path = cache_dir() / "splits" / f"{digest.hexdigest()}.npz"
    if not path.exists():
        split = split_data(config, data)
        with whole(path) as file:
            np.savez(
                file,
                clients=np.concatenate(split.clients),
                sizes=[len(own) for own in split.clients],
                validation=split.validation,
            )
    with np.load(path) as saved:
        ends = np.cumsum(saved["sizes"])
        split = Split(tuple(np.split(saved["clients"], ends[:-1])), saved["validation"])
    return _with_tests(split, config, data)  # fast, so no file has it


def _with_tests(split: Split, config: Config, data: Data) -> Split:
    """Return a split with each client's part of the test set, if `config` asks for it.

    The test examples of each class are divided in proportion to the clients' training examples of
    it; a class that no client has is left out. Where the split is by owners, and the data set tells
    the owners of the test examples, these go to the clients of their owner.
    """
    if not config.private_test:
        return split
    ids, ids_test = data.natural_ids, data.natural_ids_test
    groups = [(list(range(len(split.clients))), np.arange(len(data.y_test)))]
    by_owner = False
    if config.partition == "natural" and ids is not None and ids_test is not None:
        groups, by_owner = list(_owned(split, ids, ids_test)), True
    generator = np.random.default_rng([config.seed, *b"private-test"])
    parts: list[list[NDArray[np.int64]]] = [[np.zeros(0, np.int64)] for _ in split.clients]
    for clients, members in groups:
        held = np.stack(
            [
                np.bincount(data.y_train[split.clients[i]], minlength=data.num_classes)
                for i in clients
            ]
        )
        labels = data.y_test[members]
        for label in np.unique(labels):
            own = generator.permutation(members[labels == label])
            order = generator.permutation(len(clients))
            counts = held[:, label]
            if by_owner and not counts.any():  # new to all of the owner's clients
                counts = held.sum(1)
            if counts.any():
                ends = np.cumsum(apportion(len(own), counts, order))
                for i, part in zip(clients, np.split(own, ends[:-1]), strict=True):
                    parts[i].append(part)
    return replace(split, tests=tuple(np.sort(np.concatenate(own)) for own in parts))


def _owned(
    split: Split, ids: NDArray[Any], ids_test: NDArray[Any]
) -> Iterator[tuple[list[int], NDArray[np.int64]]]:
    """Yield the clients of each owner, and the owner's test examples."""
    clients: dict[Any, list[int]] = {}
    for i, own in enumerate(split.clients):
        clients.setdefault(ids[own[0]], []).append(i)
    order = np.argsort(ids_test, kind="stable")
    owners, starts = np.unique(ids_test[order], return_index=True)
    for owner, members in zip(owners, np.split(order, starts[1:]), strict=True):
        if owner in clients:
            yield clients[owner], members


def apportion(total: int, counts: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Divide a number in proportion to counts, by the largest remainder.

    Parameters
    ----------
    total : int
        To be divided.
    counts : ndarray of int64, shape (n,)
        At least 0, and not all 0.
    order : ndarray of int64, shape (n,)
        A permutation: of equal remainders, the one with the smallest number here comes first.

    Returns
    -------
    ndarray of int64, shape (n,)
        Each within one of ``total * counts / counts.sum()``, with the sum `total`.
    """
    shares, remainders = np.divmod(total * counts, counts.sum())
    first = np.lexsort((order, -remainders))
    shares[first[: total - shares.sum()]] += 1
    return shares


SPLIT_SETTINGS = (
    "seed",
    "num_clients",
    "validation_examples",
    "partition",
    "alpha",
    "min_partition_size",
    "examples_per_client",
    "classes_per_client",
    "class_assignment",
    "owners",
    "train_examples",
)
