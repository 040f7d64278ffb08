"""The ledger of a finished run: each client's part, by the function and by the command."""

import pandas as pd
import pytest

from fedntk.simulations import Config, ledger, load_predictor, run, unlearn
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split

from .outcomes import refused
from .test_cli import fedntk

SMALL = Config(
    method="one-exchange", rounds=1, num_clients=5, clients_per_round=5, train_examples=400,
    clients_per_evaluation=0, validation_examples=100, model="scattering", standardise=False,
    random_features=60, bandwidth=1.6, partition="dirichlet", alpha=0.5,
    one_exchange={"storage": True},
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(SMALL, out=tmp_path_factory.mktemp("ledger") / "a", progress=False)


def test_each_client_has_its_part_and_the_loss_without_it(finished):
    """Loss and harm are of the run's model; Shapley values add up to the fall from a model of 0.

    Half the squared norm of a label, one-hot minus 1/10, is 0.45.
    """
    table = ledger(finished, shapley=2)
    assert sorted(table.client) == list(range(5))
    assert table.examples.sum() == 400
    assert (table["loss-with"] == table["loss-with"][0]).all()
    assert table.harm.equals(table["loss-with"] - table["loss-without"])
    assert table.score.is_monotonic_decreasing
    assert table.filter(regex="class-").sum().to_numpy() == pytest.approx(1.0)
    assert table.shapley.sum() == pytest.approx(0.45 - table["loss-with"][0])
    assert not table.removed.any()
    assert pd.read_parquet(finished.folder / "ledger.parquet").equals(table)


def test_the_model_without_a_client_has_the_accuracy_that_the_ledger_says(tmp_path):
    """With a ridge that does not depend on who takes part."""
    fixed = SMALL.replace(one_exchange={"sums": {"auto_ridge": False, "validation_share": 0.0}})
    finished = run(fixed, out=tmp_path / "a", progress=False)
    table = ledger(finished).set_index("client")
    data, own = load_data(finished.config), load_split(finished.config).validation
    for client in range(5):
        predicted = load_predictor(unlearn(finished, [client]).folder).predict(data.x_train[own])
        hits = predicted.argmax(1).numpy() == data.y_train[own]
        assert table["accuracy-without"][client] == hits.mean()


def test_the_command_shows_the_worst_first(finished):
    said = fedntk("ledger", finished.folder, "--rows", 3)
    assert "score" in said
    assert said.splitlines()[-1].startswith("All 5 clients:")
    assert (finished.folder / "ledger.png").exists()


def test_what_cannot_be_is_refused(finished, tmp_path):
    none = run(SMALL.replace(validation_examples=0), out=tmp_path / "a", progress=False)
    refused("harm is judged on validation-examples, got 0", ledger, none)
    forgetting = SMALL.replace(one_exchange={"storage": False})
    other = run(forgetting, out=tmp_path / "b", progress=False)
    refused("storage: set KeptSums.* before the run", ledger, other)


def test_a_run_that_removes_clients_says_how_many(tmp_path):
    """Nobody lies, so nobody is removed."""
    removing = SMALL.replace(one_exchange={"ledger": {"alpha": 0.01}})
    found = run(removing, out=tmp_path / "a", progress=False)
    assert found.curve("clients-removed").tolist() == [0]
    assert not ledger(found).removed.any()
    refused(
        "one-exchange.ledger needs validation-examples", removing.replace, validation_examples=0
    )
