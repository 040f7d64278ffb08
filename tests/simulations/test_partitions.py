"""Splits: every partitioner, that of Yue et al. 2022 and checksums."""

from dataclasses import replace

import numpy as np
import pytest

from fedntk.simulations import Config
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import _load_split, client_dirichlet, load_split, split_data

DIGITS = Config(num_clients=20, clients_per_round=5)
LABELS = np.repeat(np.arange(10), 300)


def test_papers_partition_draws_floor_of_q_times_200_of_each_class_for_each_client():
    """q is the first draw of the generator of (seed, partition), so it can be drawn again."""
    settings = replace(DIGITS, alpha=0.1, seed=3)
    for client, own in enumerate(client_dirichlet(settings, LABELS)):
        q = np.random.default_rng([3, client]).dirichlet(np.full(10, 0.1))
        expected = np.floor(q * settings.examples_per_client)
        np.testing.assert_array_equal(np.bincount(LABELS[own], minlength=10), expected)
        assert len(set(own)) == len(own)  # without replacement
    assert client == 19


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological"])
def test_disjoint_partitions_hold_every_example_once(partition):
    """Fewer examples are drawn from all; no client has one of the validation examples."""
    config = replace(DIGITS, partition=partition, classes_per_client=3)
    labels, split = load_data(config).y_train, load_split(config)
    np.testing.assert_array_equal(np.sort(np.concatenate(split.clients)), np.arange(1437))
    if partition == "pathological":
        assert [len(np.unique(labels[own])) for own in split.clients] == [3] * 20
    split = load_split(replace(config, train_examples=600, validation_examples=100))
    everything = np.concatenate([split.validation, *split.clients])
    assert len(split.validation) == 100
    assert len(everything) == len(set(everything)) == 700
    assert len(set(labels[everything[100:]])) == 10


def test_with_one_class_by_number_client_k_has_class_k():
    one = {"classes_per_client": 1, "class_assignment": "first-deterministic"}
    config = replace(DIGITS, partition="pathological", num_clients=10, **one)
    labels = load_data(config).y_train
    found = [np.unique(labels[own]).tolist() for own in load_split(config).clients]
    assert found == [[k] for k in range(10)]


def test_cached_split_is_the_split(tmp_path, monkeypatch):
    """And its checksum is that of what it depends on. Private tests are of the seed, in no file."""
    others = [{"seed": 1}, {"alpha": 0.2}, {"num_clients": 19}, {}, {"learning_rate": 3.0}]
    assert len({load_split(replace(DIGITS, **other)).checksum for other in others}) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _load_split.cache_clear()
    fresh, private = load_split(DIGITS), replace(DIGITS, private_test=True)
    same, other = (split_data(replace(private, seed=s), load_data(DIGITS)) for s in (0, 1))
    assert len(list((tmp_path / "fedntk" / "splits").iterdir())) == 1
    _load_split.cache_clear()
    monkeypatch.setattr("fedntk.simulations.data.partitions.split_data", None)
    found = load_split(private)
    assert load_split(DIGITS).checksum == fresh.checksum != found.checksum == same.checksum
    np.testing.assert_equal((found.clients, found.tests), (same.clients, same.tests))
    np.testing.assert_equal((fresh.clients, fresh.tests), (found.clients, ()))
    assert set(found.tests[0]) != set(other.tests[0])
    _load_split.cache_clear()
