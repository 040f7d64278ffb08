"""A finished run without some of its clients, by the function and by the command."""

import json
import shutil

import numpy as np
import pytest

from fedntk.simulations import Config, load_predictor, run, unlearn
from fedntk.simulations.data.load import load_data
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.report.results import read_run

from .outcomes import bits, refused
from .test_cli import fedntk

OWN = {
    "sums": {"validation_share": 0.0}, "storage": True, "num_features": 60, "bootstrap_rounds": 0,
}  # fmt: skip
SMALL = Config(
    method="tct", rounds=1, num_clients=6, clients_per_round=5, train_examples=300,
    clients_per_evaluation=0, validation_examples=50, partition="pathological",
    classes_per_client=2, tct=OWN,
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
    found = unlearn(finished, [5])
    assert bits(found.folder) == bits(never.folder) != bits(finished.folder)
    assert (found.overall.before, found.overall.after) == (finished.curve()[1], never.curve()[1])


def test_the_new_model_is_read_as_a_runs_and_its_accuracies_are_its_own(finished):
    killed = finished.folder / "without-1-3"  # what an earlier call left that was killed
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    found = unlearn(finished, [3, 1, 3])
    assert found.clients == (1, 3)
    data, split = load_data(finished.config), load_split(finished.config)
    (_, y), x = data.test(), data.x_test
    theirs = np.concatenate([split.clients[k] for k in (1, 3)])
    assert set(found.by_class) == set(data.y_train[theirs].tolist())
    assert found.examples == len(theirs)
    for folder, which in ((finished.folder, "before"), (found.folder, "after")):
        hits = load_predictor(folder).predict(x).argmax(1) == y
        assert getattr(found.overall, which) == float(hits.double().mean())
        for label, own in found.by_class.items():
            assert getattr(own, which) == float(hits[y == label].double().mean())
            assert own.examples == int((y == label).sum())
    written = json.loads((found.folder / "unlearned.json").read_text())
    assert (written["clients"], written["overall"]["after"]) == ([1, 3], found.overall.after)


def test_the_command_forgets_and_another_unlearning_starts_from_what_is_left(finished, tmp_path):
    said = fedntk("unlearn", finished.folder, 2, 4, "--forget").splitlines()
    assert said[-1] == f"The model: {finished.folder / 'without-2-4'}"
    sums = finished.folder / "details" / "sums"
    assert {p.name for p in sums.glob("*/client-*")} == {
        f"client-{k}.safetensors" for k in (0, 1, 3, 5)
    }
    assert "those of client 4 are not in" in fedntk("unlearn", finished.folder, 2, fails=2)
    fedntk("unlearn", finished.folder, 2, 4, "--out", tmp_path / "elsewhere")
    assert bits(tmp_path / "elsewhere") == bits(finished.folder / "without-2-4")


def test_a_run_that_was_moved_is_found_with_its_sums_until_it_is_replaced(finished, tmp_path):
    """In another run they would be wrong."""
    expected, moved = bits(unlearn(finished, [0]).folder), tmp_path / "moved"
    shutil.move(finished.folder, moved)
    shutil.rmtree(moved / "without-0")
    found = unlearn(moved, [0])
    assert bits(found.folder) == expected
    other = run(SMALL.replace(tct={"storage": False}), out=moved, progress=False, again=True)
    assert not found.folder.exists()
    assert not (moved / "details").exists()
    refused("storage: set KeptSums.* before the run", unlearn, other, [1])


def test_what_cannot_be_is_refused_and_nothing_is_written(finished):
    before, taken = sorted(finished.folder.iterdir()), finished.folder / "checkpoints"
    known = "clients: expected some of those in the model, 0, 1, 2, 3, 4, 5, got 6"
    refused("expected at least one partition", unlearn, finished, [])
    refused(known, unlearn, finished, [6])
    refused("expected a folder that is new or empty", unlearn, finished, [1], out=taken)
    assert sorted(finished.folder.iterdir()) == before
