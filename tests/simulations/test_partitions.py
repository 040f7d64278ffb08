"""Who has which examples, of training and of test data of their own; tuning never sees these."""

from dataclasses import replace

import numpy as np
import pytest

from fedntk.simulations import Config, load_predictor, run
from fedntk.simulations.data.load import Data, load_data
from fedntk.simulations.data.partitions import _load_split, client_dirichlet, load_split, split_data
from fedntk.simulations.engine.building import load_setup

from .outcomes import refused

DIGITS = Config(num_clients=20, clients_per_round=5)
LABELS = np.repeat(np.arange(10), 300)


def test_papers_partition_draws_floor_of_q_times_200_of_each_class_for_each_client():
    """q is the first draw of the generator of (seed, partition), so it can be drawn again."""
    settings = replace(DIGITS, alpha=0.1, seed=3)
    for client, indices in enumerate(client_dirichlet(settings, LABELS)):
        q = np.random.default_rng([3, client]).dirichlet(np.full(10, 0.1))
        expected = np.floor(q * settings.examples_per_client)
        np.testing.assert_array_equal(np.bincount(LABELS[indices], minlength=10), expected)
        assert len(set(indices)) == len(indices)  # without replacement
    assert client == 19


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological"])
def test_disjoint_partitions_hold_every_example_once(partition):
    """Fewer examples are drawn from all; no client has one of the validation examples."""
    config = replace(DIGITS, partition=partition, classes_per_client=3)
    labels, split = load_data(config).y_train, load_split(config)
    np.testing.assert_array_equal(np.sort(np.concatenate(split.clients)), np.arange(1437))
    if partition == "pathological":
        assert [len(np.unique(labels[indices])) for indices in split.clients] == [3] * 20
    split = load_split(replace(config, train_examples=600, validation_examples=100))
    everything = np.concatenate([split.validation, *split.clients])
    assert len(split.validation) == 100
    assert len(everything) == len(set(everything)) == 700
    assert len(set(labels[everything[100:]])) == 10


def test_shared_examples_are_no_clients_and_each_trains_on_them_besides_its_own():
    """From a cached split as well; without any, splits have the checksums that they had."""
    config = replace(DIGITS, shared_examples=50, local_test_fraction=0.5)
    split = load_split(config)
    everything = np.concatenate([split.shared, *split.clients])
    np.testing.assert_array_equal(np.sort(everything), np.arange(1437))
    assert len(split.shared) == 50
    for client, indices in enumerate(split.clients):
        train, test = split.train_and_test(client, config)
        np.testing.assert_array_equal(train[-50:], split.shared)
        np.testing.assert_array_equal(np.sort([*train[:-50], *test]), np.sort(indices))
    none = load_split(DIGITS)
    assert none.checksum == replace(none, shared=none.shared.copy()).checksum != split.checksum
    message = "shared-examples: expected at most 1437, got 2000"
    refused(message, load_split, replace(DIGITS, shared_examples=2000))


def test_shared_examples_count_at_each_client_and_no_held_out_one_has_them():
    config = replace(DIGITS, shared_examples=50, validation_clients=1)
    setup = load_setup(config)
    sizes = [len(part) for part in setup.split.clients]
    assert setup.split.sizes == [size + 50 for size in sizes]
    trained = [len(setup.examples(client).train[1]) for client in range(config.num_clients)]
    assert trained == [*setup.split.sizes[:-1], sizes[-1]]


def test_with_one_class_by_number_client_k_has_class_k():
    one = {"classes_per_client": 1, "class_assignment": "first-deterministic"}
    config = replace(DIGITS, partition="pathological", num_clients=10, **one)
    labels = load_data(config).y_train
    for k, indices in enumerate(load_split(config).clients):
        assert np.unique(labels[indices]).tolist() == [k]


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
    cached = load_split(private)
    assert load_split(DIGITS).checksum == fresh.checksum != cached.checksum == same.checksum
    np.testing.assert_equal((cached.clients, cached.tests), (same.clients, same.tests))
    np.testing.assert_equal((fresh.clients, fresh.tests), (cached.clients, ()))
    assert set(cached.tests[0]) != set(other.tests[0])
    _load_split.cache_clear()


def test_a_cached_split_is_of_its_owners():
    """Two columns of owners under one setting are two splits."""
    config = Config(num_clients=3, clients_per_round=1, partition="natural")
    for ids in (np.arange(1437) % 3, np.arange(1437) // 479):
        data = replace(load_data(config), natural_ids=ids)
        for k, indices in enumerate(_load_split(config, data).clients):
            assert set(ids[indices]) == {k}


PRIVATE = Config(num_clients=20, clients_per_round=5, private_test=True, alpha=0.5)
SMALL = Config(
    method="fedavg", num_clients=6, clients_per_round=4, clients_per_evaluation=6, rounds=2,
    partition="dirichlet", alpha=1.0, width=10, batch_size=8, learning_rate=0.1, private_test=True,
    min_partition_size=10,
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "iid"},
        {"partition": "dirichlet", "alpha": 0.3},
        {"partition": "client-dirichlet", "examples_per_client": 100},
        {"partition": "pathological", "classes_per_client": 4},
    ],
)
def test_every_test_example_has_one_client_and_classes_go_as_in_training(options):
    config = replace(PRIVATE, **options)
    data, split = load_data(config), load_split(config)
    everything = np.sort(np.concatenate(split.tests))
    np.testing.assert_array_equal(everything, np.arange(len(data.y_test)))
    held, tested = (
        np.stack([np.bincount(y[indices], minlength=10) for indices in parts])
        for y, parts in ((data.y_train, split.clients), (data.y_test, split.tests))
    )
    exact = held / held.sum(0) * np.bincount(data.y_test)
    assert np.all(np.abs(tested - exact) < 1)
    assert not tested[held == 0].any()


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        (list("bbadbb"), {"a": [2], "b": [0, 1, 4, 5], "c": []}),
        (None, {"a": [0, 3], "b": [1, 4], "c": [2, 5]}),  # by class: owner a has class 0, and so on
    ],
)
def test_where_the_split_is_by_owners_so_is_that_of_the_test_set(owners, expected):
    """Test examples of an unknown owner, and of another class, are nobody's."""
    data = Data(
        np.zeros((10, 2)), np.arange(10) % 3, np.zeros((7, 2)), np.array([0, 1, 2, 0, 1, 2, 3]), 4,
        natural_ids=np.array(list("abcabcabca")),
        natural_ids_test=None if owners is None else np.array([*owners, "e"]),
    )  # fmt: skip
    options = {"partition": "natural", "client_column": "writer", "private_test": True}
    split = split_data(Config(num_clients=3, clients_per_round=1, **options), data)
    pairs = zip(split.clients, split.tests, strict=True)
    assert {data.natural_ids[train[0]]: sorted(test) for train, test in pairs} == expected


def test_clients_evaluate_on_their_part_and_train_on_the_rest_of_their_own():
    """The server validates on what all clients hold out, unless it has examples of its own."""
    config = replace(SMALL, local_test_fraction=0.25)
    tested, all_held_out = load_setup(config), []
    tuned = load_setup(config.replace(evaluate_on="validation"))
    (x_test, _), (x, _) = tested.data.test(), tested.data.train(np.arange(len(tested.data.y_train)))
    for i, test in enumerate(tested.split.tests):
        train, held_out = tested.split.train_and_test(i, config)
        np.testing.assert_array_equal(tested.examples(i).test[0], x_test[test])
        np.testing.assert_array_equal(tuned.examples(i).test[0], x[held_out])
        for setup in (tested, tuned):
            np.testing.assert_array_equal(setup.examples(i).train[0], x[train])
        assert not set(train) & set(held_out)
        all_held_out.append(held_out)
    np.testing.assert_array_equal(tuned.evaluation_set()[0], x[np.concatenate(all_held_out)])
    more = load_setup(config.replace(evaluate_on="validation", validation_examples=50))
    assert len(more.evaluation_set()[1]) == 50


def test_clients_accuracies_are_those_of_the_model_on_their_parts(tmp_path):
    result = run(SMALL, out=tmp_path, progress=False)
    setup, model = load_setup(result.config), load_predictor(tmp_path)
    last = result.clients[result.clients["round"] == 2].pivot(columns="metric", index="partition")
    for i, test in enumerate(setup.split.tests):
        x, y = setup.data.x_test[test], setup.data.y_test[test]
        expected = model.evaluate(x, y).accuracy, len(test)
        values = last.value.loc[i, ["accuracy", "num-examples"]]
        assert tuple(values) == pytest.approx(expected, abs=1e-12)
    on_all = model.evaluate(setup.data.x_test, setup.data.y_test).accuracy
    assert result.curve("client-accuracy")[2] == pytest.approx(on_all, abs=1e-9)


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
def test_a_client_without_examples_to_evaluate_on_does_not_evaluate(tmp_path, evaluate_on):
    """Fifty clients share nine test examples; or keep a tenth of ten examples or fewer."""
    y = np.arange(400) % 3
    x = np.random.default_rng(0).normal(size=(400, 6))
    np.savez(tmp_path / "d.npz", x_train=x[:391], y_train=y[:391], x_test=x[391:], y_test=y[391:])
    config = SMALL.replace(
        dataset=f"npz:{tmp_path / 'd.npz'}", num_clients=50, clients_per_evaluation=50, rounds=1,
        evaluate_on=evaluate_on, local_test_fraction=0.1, min_partition_size=1,
    )  # fmt: skip
    setup = load_setup(config)
    with_some = {i for i in range(50) if len(setup.examples(i).test[1])}
    assert 0 < len(with_some) < 50
    result = run(config, out=tmp_path / "run", progress=False)
    assert set(result.clients.partition) == with_some
    assert result.curve("client-replies-accepted")[1] == len(with_some)


def test_a_client_that_all_draws_leave_empty_gets_an_example_of_the_largest(tmp_path, caplog):
    """Two classes for 50 clients at alpha 0.1: the split is still one of all examples."""
    np.savez(tmp_path / "own.npz", x_train=np.zeros((300, 4)), y_train=np.arange(300) % 2)
    config = Config(dataset=f"npz:{tmp_path / 'own.npz'}")
    split = split_data(config, data := load_data(config))
    assert "have one example, taken from the largest client" in caplog.text
    assert min(map(len, split.clients)) == 1
    assert len(split.clients) == 50
    assert sorted(np.concatenate(split.clients)) == [*range(len(data.y_train))]
    message = "fewer clients or a larger alpha"
    refused(message, split_data, config.replace(min_partition_size=2), data)
