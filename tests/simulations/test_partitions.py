"""Splits: every partitioner, that of Yue et al. 2022, checksums and refusals."""

from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset

from fedntk.simulations import Config, ConfigError
from fedntk.simulations.data.load import Data, load_data
from fedntk.simulations.data.partitioners import ClientDirichletPartitioner
from fedntk.simulations.data.partitions import _load_split, load_split, split_data

DIGITS = Config(num_clients=20, clients_per_round=5)


def labels(num_classes: int = 10, each: int = 300) -> np.ndarray:
    return np.repeat(np.arange(num_classes), each)


def paper_partitioner(**options: object) -> ClientDirichletPartitioner:
    partitioner = ClientDirichletPartitioner(50, "label", **{"alpha": 0.1, "seed": 0, **options})
    partitioner.dataset = Dataset.from_dict({"label": labels(), "index": np.arange(3000)})
    return partitioner


def test_papers_partition_draws_floor_of_q_times_200_of_each_class_for_each_client():
    """q is the first draw of the generator of (seed, partition), so it can be drawn again."""
    partitioner = paper_partitioner()
    for client in range(50):
        q = np.random.default_rng([0, client]).dirichlet(np.full(10, 0.1))
        part = partitioner.load_partition(client)
        counts = np.bincount(part["label"], minlength=10)
        np.testing.assert_array_equal(counts, np.floor(q * 200))
        assert len(set(part["index"])) == len(part)  # without replacement


def test_papers_partition_has_the_dirichlets_mean_and_variance():
    """Over m clients the share of a class has mean 1/10 and variance .09 / (10 alpha + 1).

    Rounding down takes at most 1/200 off a share; the bounds are four standard errors. Shares are
    Beta(0.5, 4.5) with a kurtosis of 6.8, so the variance of 4,000 of them has a relative standard
    error of sqrt(5.8 / 4000) = 3.8 %: 15 %.
    """
    m, alpha = 400, 0.5
    partitioner = ClientDirichletPartitioner(m, "label", alpha, seed=1)
    partitioner.dataset = Dataset.from_dict({"label": labels()})
    shares = np.stack(
        [np.bincount(partitioner.load_partition(i)["label"], minlength=10) / 200 for i in range(m)]
    )
    variance = 0.09 / (10 * alpha + 1)
    error = 4 * np.sqrt(variance / m)
    assert np.all(np.abs(shares.mean(0) - 0.1) < error + 1 / 200)
    assert shares.var(0).mean() == pytest.approx(variance, rel=0.15)


def test_papers_partition_does_not_depend_on_the_order_of_requests():
    forwards, backwards = paper_partitioner(), paper_partitioner()
    first = [forwards.load_partition(i)["index"] for i in range(5)]
    second = [backwards.load_partition(i)["index"] for i in reversed(range(5))]
    assert all(list(a) == list(b) for a, b in zip(first, reversed(second), strict=True))


def test_papers_partition_refuses_a_class_that_is_too_small():
    """alpha = 0.01 puts nearly all of some client's 2,000 examples into a class of 300."""
    partitioner = paper_partitioner(examples_per_partition=2000, alpha=0.01)
    with pytest.raises(ValueError, match=r"client 0 is to get \d+ examples of class \d, which"):
        partitioner.load_partition(0)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological"])
def test_disjoint_partitions_hold_every_example_once(partition):
    split = load_split(replace(DIGITS, partition=partition))
    everything = np.concatenate(split.clients)
    np.testing.assert_array_equal(np.sort(everything), np.arange(1437))


def test_iid_parts_hold_all_classes_even_of_a_sorted_set():
    data = Data(np.zeros((3000, 2)), labels(), np.zeros((10, 2)), np.arange(10), 10)
    split = split_data(replace(DIGITS, partition="iid"), data)
    assert all(len(np.unique(data.y_train[own])) == 10 for own in split.clients)


def test_pathological_parts_hold_so_many_classes():
    data = load_data(DIGITS)
    split = load_split(replace(DIGITS, partition="pathological", classes_per_client=3))
    assert all(len(np.unique(data.y_train[own])) == 3 for own in split.clients)


def test_the_first_class_can_be_the_clients_number():
    """With one class a client and as many clients as classes, each class has its client."""
    data = load_data(DIGITS)
    config = replace(
        DIGITS, partition="pathological", classes_per_client=1, num_clients=10,
        clients_per_round=1, class_assignment="first-deterministic",
    )  # fmt: skip
    owned = [set(data.y_train[own].tolist()) for own in load_split(config).clients]
    assert owned == [{k} for k in range(10)]


def test_fewer_training_examples_are_a_part_of_all():
    split = load_split(replace(DIGITS, partition="iid", train_examples=300))
    everything = np.concatenate(split.clients)
    assert len(everything) == len(set(everything)) == 300
    assert len(set(load_data(DIGITS).y_train[everything])) == 10


def test_natural_parts_follow_their_ids():
    ids = np.array(list("abcabcabca"))
    y = np.arange(10)
    data = Data(np.zeros((10, 2)), y, np.zeros((10, 2)), y, 10, natural_ids=ids)
    config = Config(
        num_clients=3, clients_per_round=1, partition="natural", natural_column="writer"
    )
    split = split_data(config, data)
    assert sorted(set(ids[own].tolist()).pop() for own in split.clients) == ["a", "b", "c"]
    assert all(len(set(ids[own].tolist())) == 1 for own in split.clients)
    with pytest.raises(ConfigError, match="writer has 3 values, got 2"):
        split_data(replace(config, num_clients=2), data)
    with pytest.raises(ConfigError, match="digits has no natural ids"):
        split_data(config, load_data(DIGITS))


def test_validation_examples_belong_to_no_client():
    config = replace(DIGITS, partition="iid", method="fedavg", validation_examples=100)
    split = load_split(config)
    assert len(split.validation) == 100
    assert not set(split.validation) & set(np.concatenate(split.clients))
    assert sum(map(len, split.clients)) == 1337


def test_checksum_is_that_of_the_split():
    first, same = load_split(DIGITS), split_data(DIGITS, load_data(DIGITS))
    assert first.checksum == same.checksum
    others = [replace(DIGITS, seed=1), replace(DIGITS, alpha=0.2), replace(DIGITS, num_clients=19)]
    assert len({first.checksum, *(load_split(c).checksum for c in others)}) == 4
    for other in (replace(DIGITS, learning_rate=3.0), replace(DIGITS, method="fedavg")):
        assert load_split(other).checksum == first.checksum


def test_cached_split_is_the_split(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = replace(DIGITS, seed=77, partition="iid")
    _load_split.cache_clear()
    fresh = load_split(config)
    assert len(list((tmp_path / "fedntk" / "splits").iterdir())) == 1
    _load_split.cache_clear()
    monkeypatch.setattr("fedntk.simulations.data.partitions.split_data", None)
    again = load_split(config)
    assert again.checksum == fresh.checksum
    _load_split.cache_clear()


def test_local_test_examples_are_a_clients_own_and_apart():
    config = replace(DIGITS, local_test_fraction=0.25)
    split = load_split(config)
    for partition, own in enumerate(split.clients):
        train, test = split.train_and_test(partition, config)
        assert len(test) == min(int(0.25 * len(own)), len(own) - 1)
        assert sorted([*train, *test]) == sorted(own)
    train, test = split.train_and_test(0, DIGITS)
    assert list(train) == list(split.clients[0])
    assert len(test) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clients": 1500}, "one client for each of the 1437 training examples"),
        ({"partition": "dirichlet", "min_partition_size": 500}, "partition = dirichlet"),
        ({"partition": "pathological", "classes_per_client": 11}, "partition = pathological"),
        ({"partition": "client-dirichlet", "examples_per_client": 2}, "client .* would have no"),
        ({"partition": "client-dirichlet", "examples_per_client": 900}, "is to get"),
    ],
)  # fmt: skip
def test_impossible_splits_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_split(replace(Config(num_clients=100, alpha=0.5, partition="iid"), **options))
