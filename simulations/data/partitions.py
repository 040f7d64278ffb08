"""Split of the examples among clients, mostly by flwr-datasets' partitioners."""

import hashlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from logging import getLogger
from typing import Any

import numpy as np

from fedntk.clients import cache_dir
from fedntk.ntk.support.files import whole

from ..config.data import SplitSettings
from ..config.settings import ConfigError
from .data import Data, Indices, strata_of
from .load import load_data

logger = getLogger("flwr")
OF_TESTS = ("local_test_fraction", "private_test")
SPLIT_SETTINGS = [name for name in SplitSettings.__annotations__ if name not in OF_TESTS]
"""Settings on which each client's training examples depend, besides the data set."""


@dataclass(frozen=True, eq=False)
class Split:
    """Indices of each client's training and, with private-test, test examples; and the server's.

    Those that are shared are no client's: each client trains on them besides its own.
    """

    clients: tuple[Indices, ...]
    validation: Indices
    tests: tuple[Indices, ...] = ()
    shared: Indices = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def sizes(self) -> list[int]:
        """Number of each client's examples, the shared ones included."""
        return [len(part) + len(self.shared) for part in self.clients]

    @property
    def checksum(self) -> str:
        """SHA-256 of all indices."""
        digest = hashlib.sha256()
        shared = (self.shared,) if len(self.shared) else ()
        for indices in (self.validation, *self.clients, *self.tests, *shared):
            digest.update(len(indices).to_bytes(8, "little") + indices.astype("<i8").tobytes())
        return digest.hexdigest()

    def train_and_test(self, partition: int, settings: SplitSettings) -> tuple[Indices, Indices]:
        """Return a client's examples for training, the shared ones last, and for evaluation."""
        indices, count = self.clients[partition], self.num_kept(partition, settings)
        generator = np.random.default_rng([settings.seed, partition])
        indices = generator.permutation(indices) if count else indices
        return np.concatenate([indices[count:], self.shared]), indices[:count]

    def num_kept(self, partition: int, settings: SplitSettings) -> int:
        """Return how many of a client's examples are kept out of its training."""
        size = len(self.clients[partition])
        return min(int(settings.local_test_fraction * size), size - 1)


def split_data(settings: SplitSettings, data: Data) -> Split:
    """Split the training set as the settings say, and with private-test the test set alike."""
    order = np.random.default_rng([settings.seed, 1]).permutation(len(data.y_train))
    validation = np.sort(order[: settings.validation_examples])
    rest = order[settings.validation_examples :]
    partition, ids = settings.partition, data.natural_ids
    if partition == "natural" and ids is None:
        raise ConfigError(
            f"partition = natural: {settings.dataset} names no owners; set client-column, the "
            "column that says whose an example is"
        )
    if (partition == "given") != (data.split is not None):
        raise ConfigError(
            "partition: expected given exactly if the data come with a split, got partition = "
            f"{partition}"
        )
    if data.split is not None:
        if len(data.split) != settings.num_clients or settings.validation_examples:
            raise ConfigError(
                f"partition = given: the data are split over {len(data.split)} clients, and the "
                f"server keeps none; got num-clients = {settings.num_clients} and "
                f"validation-examples = {settings.validation_examples}"
            )
        if settings.shared_examples:
            raise ConfigError(
                "shared-examples: expected 0 with partition = given; put them into it"
            )
        return _with_tests(Split(data.split, np.zeros(0, np.int64)), settings, data)
    if settings.owners and ids is not None:
        everyone = np.unique(ids[rest])
        if settings.owners > len(everyone):
            most = f"at most the {len(everyone)} that have training examples"
            raise ConfigError(f"owners: expected {most}, got {settings.owners}")
        generator = np.random.default_rng([settings.seed, *b"owners"])
        drawn = generator.choice(everyone, settings.owners, replace=False)
        rest = rest[np.isin(ids[rest], drawn)]
    if settings.shared_examples > len(rest):
        raise ConfigError(
            f"shared-examples: expected at most {len(rest)}, got {settings.shared_examples}"
        )
    shared, rest = np.split(rest, [settings.shared_examples])
    asked = settings.train_examples
    if asked > len(rest):
        raise ConfigError(f"train-examples: expected at most {len(rest)}, got {asked}")
    rest = rest[: asked or None]  # shuffled: Flower deals IID parts out in order
    if settings.num_clients > len(rest):
        raise ConfigError(
            f"num-clients: expected at most one client for each of the {len(rest)} training "
            f"examples, got {settings.num_clients}"
        )
    try:
        clients = _partition(settings, rest, data)
    except ConfigError:
        raise
    except (ValueError, AssertionError) as error:
        if partition != "dirichlet" or settings.min_partition_size > 1:
            cure = "; fewer clients or a larger alpha may do" if partition == "dirichlet" else ""
            raise ConfigError(f"partition = {partition}: {str(error).strip()}{cure}") from error
        clients = _fill(_partition(settings, rest, data, least=0), settings.alpha)
    if empty := [i for i, indices in enumerate(clients) if not len(indices)]:
        raise ConfigError(
            f"partition = {partition}: client {empty[0]} would have no examples; use fewer clients "
            "or a larger alpha"
        )
    return _with_tests(Split(clients, validation, shared=np.sort(shared)), settings, data)


def _fill(split: tuple[Indices, ...], alpha: float) -> tuple[Indices, ...]:
    """Give each client that ten draws left without examples one of the largest client's."""
    clients = list(split)
    empty = [i for i, indices in enumerate(clients) if not len(indices)]
    for i in empty:
        largest = max(range(len(clients)), key=lambda j: len(clients[j]))
        clients[i], clients[largest] = clients[largest][-1:], clients[largest][:-1]
    logger.warning(
        "partition = dirichlet, alpha = %g: draws leave some of %d clients without examples; in "
        "this split %d clients have one example, taken from the largest client; fewer clients or "
        "a larger alpha avoid that",
        *(alpha, len(clients), len(empty)),
    )
    return tuple(clients)


def _partition(
    settings: SplitSettings, rest: Indices, data: Data, least: int | None = None
) -> tuple[Indices, ...]:
    labels, number = strata_of(data.y_train)[rest], settings.num_clients
    if settings.partition == "client-dirichlet":
        return tuple(rest[indices] for indices in client_dirichlet(settings, labels))
    with warnings.catch_warnings():
        # of a progress bar that Jupyter cannot show, and of each draw that Dirichlet discards
        warnings.simplefilter("ignore")
        from datasets import Dataset  # slow to import, and needed only for a split that is new
        from flwr_datasets import partitioner as flower

        class Positions(Dataset):  # type: ignore[misc]
            def select(self, indices: Any, *_: Any, **__: Any) -> Indices:
                """Return a client's positions; a dataset of them takes over a millisecond."""
                return np.fromiter(indices, np.int64)

        columns: dict[str, Any] = {"label": labels}
        num_parts, by, seed = number, "label", settings.seed
        partitioner: flower.Partitioner
        if settings.partition == "iid":
            partitioner = flower.IidPartitioner(number)
        elif settings.partition == "dirichlet":
            least = settings.min_partition_size if least is None else least
            partitioner = flower.DirichletPartitioner(number, by, settings.alpha, least, seed=seed)
        elif settings.partition == "pathological":
            kind = settings.classes_per_client, settings.class_assignment
            partitioner = flower.PathologicalPartitioner(number, by, *kind, seed=seed)
        elif data.natural_ids is not None:
            partitioner = flower.NaturalIdPartitioner("id")
            columns["id"] = data.natural_ids[rest]
            num_parts = len(np.unique(columns["id"]))
        partitioner.dataset = Positions.from_dict(columns)
        clients_each, too_many = divmod(number, num_parts)
        if too_many:
            raise ConfigError(
                f"num-clients: {settings.client_column or 'owners'} has {num_parts} values, got "
                f"{number}; expected as many clients, or several for each: twice as many, and so on"
            )
        parts = (rest[partitioner.load_partition(i)] for i in range(num_parts))
        return tuple(shard for part in parts for shard in np.array_split(part, clients_each))


def client_dirichlet(settings: SplitSettings, labels: Indices) -> Iterator[Indices]:
    """Draw each client's indices among the labels (n,), as Yue et al. (2022).

    For client m, q_m ~ Dir(alpha) over the classes, and floor(q_mk * examples_per_client) images
    of class k, drawn without replacement. Clients are drawn independently: two may hold the same.

    Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 6;
    200 examples (the batch size of appendix A), rounding down and independence are our reading.
    """
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for client in range(settings.num_clients):
        generator = np.random.default_rng([settings.seed, client])
        q = generator.dirichlet(np.full(len(members), settings.alpha))
        chosen: list[Indices] = []
        for of_class, share in zip(members, q, strict=True):
            count = int(share * settings.examples_per_client)
            if count > len(of_class):
                raise ValueError(
                    f"client {client} is to get {count} examples of class {labels[of_class[0]]}, "
                    f"which has {len(of_class)}; lower examples-per-client"
                )
            chosen.append(generator.choice(of_class, size=count, replace=False))
        yield generator.permutation(np.concatenate(chosen))


def load_split(settings: SplitSettings, data: Data | None = None) -> Split:
    """Split the data set of the settings; all processes share a public set's split, in a file."""
    return _load_split(settings, data or load_data(settings))


@lru_cache(maxsize=2)
def _load_split(settings: SplitSettings, data: Data) -> Split:
    if settings.may_be_private:
        return split_data(settings, data)
    digest = hashlib.sha256(data.y_train.tobytes())
    for array in (data.natural_ids, *(data.split or ())):
        digest.update(b"" if array is None else repr(array.tolist()).encode())
    digest.update(repr([(name, getattr(settings, name)) for name in SPLIT_SETTINGS]).encode())
    digest.update(importlib.metadata.version("flwr-datasets").encode())
    path = cache_dir() / "splits" / f"{digest.hexdigest()}.npz"
    if not path.exists():
        split = split_data(settings, data)
        sizes = [len(indices) for indices in split.clients]
        with whole(path) as file:
            np.savez(file, np.concatenate(split.clients), sizes, split.validation, split.shared)
    with np.load(path) as saved:
        clients, sizes, validation, shared = saved.values()
    split = Split(tuple(np.split(clients, np.cumsum(sizes)[:-1])), validation, shared=shared)
    return _with_tests(split, settings, data)  # fast, so no file has it


def _with_tests(split: Split, settings: SplitSettings, data: Data) -> Split:
    """Return a split with each client's part of the test set, if the settings ask for it.

    The examples of a class, and of an owner, are divided as the clients' training examples are.
    """
    if not settings.private_test:
        return split
    import pandas as pd

    ids, ids_test = data.natural_ids, data.natural_ids_test
    owners: tuple[Any, Any] = np.zeros(len(split.clients)), np.zeros(len(data.y_test))
    by_owner = False
    if settings.partition == "natural" and ids is not None and ids_test is not None:
        owners, by_owner = (ids[[indices[0] for indices in split.clients]], ids_test), True
    clients_of, tests_of = (pd.Series(part).groupby(part).indices for part in owners)
    generator = np.random.default_rng([settings.seed, *b"private-test"])
    parts: list[list[Indices]] = [[np.zeros(0, np.int64)] for _ in split.clients]
    for owner in sorted(tests_of.keys() & clients_of.keys()):  # type: ignore[type-var]
        clients, members = clients_of[owner], tests_of[owner]
        labels_held = (strata_of(data.y_train)[split.clients[i]] for i in clients)
        held = np.stack([np.bincount(y, minlength=data.num_classes) for y in labels_held])
        labels = strata_of(data.y_test)[members]
        for label in np.unique(labels):
            indices = generator.permutation(members[labels == label])
            order = generator.permutation(len(clients))
            counts = held[:, label]
            if by_owner and not counts.any():  # new to all of the owner's clients
                counts = held.sum(1)
            if counts.any():
                ends = np.cumsum(_apportion(len(indices), counts, order))
                for i, part in zip(clients, np.split(indices, ends[:-1]), strict=True):
                    parts[i].append(part)
    return replace(split, tests=tuple(np.sort(np.concatenate(indices)) for indices in parts))


def _apportion(total: int, counts: Indices, order: Indices) -> Indices:
    """Divide `total` in proportion to `counts` (n,), not all 0, by the largest remainder.

    Of equal remainders, the one with the smallest number in `order`, a permutation, comes first.
    """
    shares, remainders = np.divmod(total * counts, counts.sum())
    first = np.lexsort((order, -remainders))
    shares[first[: total - shares.sum()]] += 1
    return shares
