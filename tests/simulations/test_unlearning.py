"""A finished run without some of its clients, and each client's part in it: the ledger."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config, ledger, load_predictor, run, unlearn
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.report.results import read_run

from .outcomes import bits, refused
from .test_cli import fedntk

SMALL = Config(
    method="tct", rounds=1, num_clients=6, clients_per_round=5, train_examples=300,
    clients_per_evaluation=0, validation_examples=50, partition="pathological",
    classes_per_client=2, tct={
        "sums": {"validation_share": 0.0}, "storage": True, "num_features": 60,
        "bootstrap_rounds": 0,
    },
)  # fmt: skip
LEDGER = Config(
    method="one-exchange", rounds=1, num_clients=5, clients_per_round=5, train_examples=400,
    clients_per_evaluation=0, validation_examples=100, model="scattering", standardise=False,
    random_features=60, bandwidth=1.6, partition="dirichlet", alpha=0.5,
    one_exchange={"storage": True},
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return run(SMALL, out=tmp_path_factory.mktemp("original") / "a", progress=False)


@pytest.fixture
def finished(original, tmp_path):
    """A run that a test may change."""
    return read_run(shutil.copytree(original.folder, tmp_path / "a"))


def test_it_is_to_the_bit_the_run_that_never_had_the_client(finished, tmp_path):
    """The last client is none that trains where it is held out for validation; one network."""
    never = run(SMALL, out=tmp_path / "never", validation_clients=1, progress=False)
    unlearned = unlearn(finished, [5])
    assert bits(unlearned.folder) == bits(never.folder) != bits(finished.folder)
    overall = unlearned.overall
    assert (overall.before, overall.after) == (finished.curve()[1], never.curve()[1])


def test_the_new_model_is_read_as_a_runs_and_its_accuracies_are_its_own(finished):
    killed = finished.folder / "without-1-3"  # what an earlier call left that was killed
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    unlearned = unlearn(finished, [3, 1, 3])
    assert unlearned.clients == (1, 3)
    data, split = load_data(finished.config), load_split(finished.config)
    (_, y), x = data.test(), data.x_test
    theirs = np.concatenate([split.clients[k] for k in (1, 3)])
    assert set(unlearned.by_class) == set(data.y_train[theirs].tolist())
    assert unlearned.examples == len(theirs)
    for folder, which in ((finished.folder, "before"), (unlearned.folder, "after")):
        hits = load_predictor(folder).predict(x).argmax(1) == y
        assert getattr(unlearned.overall, which) == float(hits.double().mean())
        for label, accuracy in unlearned.by_class.items():
            assert getattr(accuracy, which) == float(hits[y == label].double().mean())
            assert accuracy.examples == int((y == label).sum())
    written = json.loads((unlearned.folder / "unlearned.json").read_text())
    assert (written["clients"], written["overall"]["after"]) == ([1, 3], unlearned.overall.after)


def test_the_command_forgets_and_another_unlearning_starts_from_what_is_left(finished, tmp_path):
    said = fedntk("unlearn", finished.folder, 2, 4, "--forget").splitlines()
    assert said[-1] == f"The model: {finished.folder / 'without-2-4'}"
    sums = finished.folder / "details" / "sums"
    kept = {f"client-{k}.safetensors" for k in (0, 1, 3, 5)}
    assert {path.name for path in sums.glob("*/client-*")} == kept
    assert "those of client 4 are not in" in fedntk("unlearn", finished.folder, 2, fails=2)
    fedntk("unlearn", finished.folder, 2, 4, "--out", tmp_path / "elsewhere")
    assert bits(tmp_path / "elsewhere") == bits(finished.folder / "without-2-4")


def test_a_run_that_was_moved_is_found_with_its_sums_until_it_is_replaced(finished, tmp_path):
    """In another run they would be wrong."""
    expected, moved = bits(unlearn(finished, [0]).folder), tmp_path / "moved"
    shutil.move(finished.folder, moved)
    shutil.rmtree(moved / "without-0")
    unlearned = unlearn(moved, [0])
    assert bits(unlearned.folder) == expected
    other = run(SMALL.replace(tct={"storage": False}), out=moved, progress=False, again=True)
    assert not unlearned.folder.exists()
    assert not (moved / "details").exists()
    refused("storage: set KeptSums.* before the run", unlearn, other, [1])


def test_what_cannot_be_is_refused_and_nothing_is_written(finished):
    before, taken = sorted(finished.folder.iterdir()), finished.folder / "checkpoints"
    message = "clients: expected some of those in the model, 0, 1, 2, 3, 4, 5, got 6"
    refused("expected at least one partition", unlearn, finished, [])
    refused(message, unlearn, finished, [6])
    refused("expected a folder that is new or empty", unlearn, finished, [1], out=taken)
    assert sorted(finished.folder.iterdir()) == before


# ------------------------------------------------------------------------- ledger


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    return run(LEDGER, out=tmp_path_factory.mktemp("ledger") / "a", progress=False)


def test_each_client_has_its_part_and_the_loss_without_it(exchanged):
    """Loss and harm are of the run's model; Shapley values add up to the fall from a model of 0.

    Half the squared norm of a label, one-hot minus 1/10, is 0.45.
    """
    table = ledger(exchanged, shapley=2)
    assert sorted(table.client) == list(range(5))
    assert table.examples.sum() == 400
    assert (table["loss-with"] == table["loss-with"][0]).all()
    assert table.harm.equals(table["loss-with"] - table["loss-without"])
    assert table.score.is_monotonic_decreasing
    assert table.filter(regex="class-").sum().to_numpy() == pytest.approx(1.0)
    assert table.shapley.sum() == pytest.approx(0.45 - table["loss-with"][0])
    assert not table.removed.any()
    assert pd.read_parquet(exchanged.folder / "ledger.parquet").equals(table)


def test_the_model_without_a_client_has_the_accuracy_that_the_ledger_says(tmp_path):
    """With a ridge that does not depend on who takes part."""
    fixed = LEDGER.replace(one_exchange={"sums": {"auto_ridge": False, "validation_share": 0.0}})
    finished = run(fixed, out=tmp_path / "a", progress=False)
    table = ledger(finished).set_index("client")
    data, held = load_data(finished.config), load_split(finished.config).validation
    for client in range(5):
        predicted = load_predictor(unlearn(finished, [client]).folder).predict(data.x_train[held])
        hits = predicted.argmax(1).numpy() == data.y_train[held]
        assert table["accuracy-without"][client] == hits.mean()


def test_the_command_shows_the_worst_first(exchanged):
    said = fedntk("ledger", exchanged.folder, "--rows", 3)
    assert "score" in said
    assert said.splitlines()[-1].startswith("All 5 clients:")
    assert (exchanged.folder / "ledger.png").exists()


def test_no_ledger_without_validation_examples_or_storage(tmp_path):
    none = run(LEDGER.replace(validation_examples=0), out=tmp_path / "a", progress=False)
    refused("harm is judged on validation-examples, got 0", ledger, none)
    forgetting = LEDGER.replace(one_exchange={"storage": False})
    other = run(forgetting, out=tmp_path / "b", progress=False)
    refused("storage: set KeptSums.* before the run", ledger, other)


def test_a_run_without_malicious_clients_removes_none_and_says_so(tmp_path):
    removing = LEDGER.replace(one_exchange={"ledger": {"alpha": 0.01}})
    result = run(removing, out=tmp_path / "a", progress=False)
    assert result.curve("clients-removed").tolist() == [0]
    assert not ledger(result).removed.any()
    refused(
        "one-exchange.ledger needs validation-examples", removing.replace, validation_examples=0
    )
