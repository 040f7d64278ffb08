"""Rows of a finished run's clients are deleted, to the bit; the record is checked."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context

from fedntk.clients import ClosedFormClient, client_app
from fedntk.simulations import Config, delete, run
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.strategies import OneExchange
from fedntk.strategies.core.array_archive import checksum, load_tensors
from fedntk.trust import verify_records

from .outcomes import bits, refused
from .test_cli import fedntk

SMALL = Config(
    method="one-exchange", rounds=1, num_clients=4, clients_per_round=4, train_examples=120,
    clients_per_evaluation=0, random_features=60, one_exchange={"changes": True},
)  # fmt: skip


def record_of(folder):
    (path,) = (folder / "details" / "changes").glob("changes-*.jsonl")
    return path


def never(config, gone):
    """Bits of the model of a federation that never had some rows, by client."""
    setup = load_setup(config)

    def client_fn(context: Context):
        k = int(context.node_config["partition-id"])
        x, y = setup.examples(k).train
        there = np.setdiff1d(np.arange(len(y)), gone.get(k, []))
        return ClosedFormClient(setup.network, x[there], y[there], seed=(config.seed, k))

    strategy = OneExchange(network=setup.network, fraction_evaluate=0.0, min_available_nodes=4)
    initial = ArrayRecord(setup.network.state_dict())
    result = strategy.start(LocalGrid(client_app(client_fn), 4, {}), initial, num_rounds=1)
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


@pytest.mark.parametrize("secure", [False, True])
def test_the_command_deletes_rows_and_verifies_that_it_did(secure, tmp_path):
    finished = run(SMALL, out=tmp_path / "a", secure=secure, progress=False)
    first = bits(finished.folder)
    fedntk("delete", finished.folder, "--client", 2, 0, 3, "--quiet")
    again = delete(finished, 1, [1], progress=False)
    assert bits(again.folder) != first
    arrays, _ = load_tensors(again.folder / "model.safetensors")
    expected = never(finished.config, {2: [0, 3], 1: [1]})
    assert {name: array.tobytes() for name, array in arrays.items()} == expected
    path = record_of(again.folder)
    records = verify_records(path)
    assert [(r["deleted"], r["rows"]) for r in records] == [(0, 120), (2, 118), (1, 117)]
    assert records[-1]["after"] == checksum(*arrays.values())
    said = fedntk("verify", path, "--key", records[0]["key"])
    assert f"3 records of run {records[0]['run']} signed by" in said
    path.write_text(path.read_text().replace('"deleted": 2', '"deleted": 1'))
    said = fedntk("verify", path, fails=2)
    assert "line 2: its signature is not that of its content" in said


def test_what_cannot_be_deleted_is_refused_and_no_round_is_run(tmp_path):
    finished = run(SMALL, out=tmp_path / "a", progress=False)
    before = bits(finished.folder)
    delete(finished, 1, [1], progress=False)
    after = bits(finished.folder)
    for client, rows, said in (
        (1, [1], "were deleted before"),
        (1, [2, 2], "not so often"),
        (4, [0], "client: expected 0 ... 3, got 4"),
        (0, [10_000], "rows: expected some of 0"),
        (0, [-1], "rows: expected some of 0"),
        (0, [], "rows: expected some of 0"),
    ):
        refused(said, delete, finished, client, rows)
    assert bits(finished.folder) == after != before
    assert len(verify_records(record_of(finished.folder))) == 2
    plain = run(SMALL, one_exchange={"changes": False}, out=tmp_path / "b", progress=False)
    refused("expected a run with the setting changes = true", delete, plain, 0, [0])
