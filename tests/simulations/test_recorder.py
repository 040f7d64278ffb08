"""What clients name as they like never becomes a column unasked, and never ends a run."""

import logging

from flwr.app import MetricRecord

from fedntk.clients import SGDClient
from fedntk.simulations import Config, run
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.recorder import LONGEST, OTHERS
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.report.results import read_run
from fedntk.strategies import SeededFedAvg

from .outcomes import bits, grid_of, measured

SMALL = Config(
    method="fedavg", num_clients=6, clients_per_round=3, clients_per_evaluation=3, rounds=3
)


def naming(monkeypatch, fit, evaluate):
    """Let all clients add metrics to their replies; the functions are given the round."""
    for name, more in (("fit", fit), ("evaluate", evaluate)):
        own = getattr(SGDClient, name)

        def changed(self, parameters, config, own=own, more=more):
            *result, metrics = own(self, parameters, config)
            return *result, more(int(config["server-round"])) | metrics

        monkeypatch.setattr(SGDClient, name, changed)


def test_any_name_of_a_metric_is_recorded_beside_what_the_server_measures(tmp_path, monkeypatch):
    """Except one that no file can hold."""
    plain = run(SMALL, out=tmp_path / "plain", progress=False)
    names = [
        *("value", "run", "seed", "round", "metric", "partition", "method", "index", "variable"),
        *("level_0", "client-loss-mean", "accuracy-mean", "", "names", "best.w", "\U0001f600"),
        "x" * LONGEST,
    ]
    in_fit = dict.fromkeys(
        [*names, "accuracy", "loss", "seconds", "\ud800", "x" * (LONGEST + 1)], -7.0
    )
    naming(monkeypatch, lambda r: in_fit, lambda r: dict.fromkeys([*names, "a\udfff"], 8.0))
    result = run(SMALL, out=tmp_path / "named", progress=False)
    for name in names:
        assert result.clients[result.clients.metric == name].value.tolist() == [8.0] * 9
    for metric in ("accuracy", "loss", "client-accuracy-mean", "client-loss-mean"):
        assert result.curve(metric).tolist() == plain.curve(metric).tolist()
    assert (result.curve("seconds") > 0).all()
    rest = result.clients[~result.clients.metric.isin(names)].reset_index(drop=True)
    assert rest.equals(plain.clients)
    unusual = {name for name in result.rounds.metric if name > "\u00ff" or name[:2] == "xx"}
    assert unusual == {"\U0001f600", "x" * LONGEST}


def test_thousands_of_new_names_a_round_leave_files_small(tmp_path, monkeypatch, caplog):
    """500 a round from every client: 32 of them are recorded, and the log says so once each."""

    def names(server_round):
        return {f"name {server_round} {i}": float(i) for i in range(500)}

    naming(monkeypatch, names, names)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(SMALL, rounds=4, out=tmp_path, progress=False)
    said = [message for message in caplog.messages if "are left out" in message]
    assert len(said) == 3  # of training, of evaluation, and in the table of clients
    for frame in (result.rounds, result.clients):
        assert len({name for name in frame.metric if name.startswith("name")}) == OTHERS
    network = (tmp_path / "model.safetensors").stat().st_size
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.safetensors")
    assert checkpoint.stat().st_size < 2 * network + 40_000
    assert (tmp_path / "rounds.jsonl").stat().st_size < 4 * 6_000


def test_a_run_that_goes_on_records_the_same_names(tmp_path, monkeypatch):
    def names(server_round):
        return {f"name {(7 * server_round) % 5} {i}": float(i) for i in range(10)}

    naming(monkeypatch, names, names)
    whole = run(SMALL, rounds=6, out=tmp_path / "whole", progress=False)
    for rounds in (2, 4, 6):
        parts = run(SMALL, rounds=rounds, out=tmp_path / "parts", progress=False)
    assert parts.clients.equals(whole.clients)
    assert measured(parts).equals(measured(whole))
    assert sum(m.startswith("name") for m in whole.rounds.metric.unique()) == OTHERS


def test_a_round_that_changes_nothing_is_told_in_a_run_that_goes_on(tmp_path, monkeypatch):
    """Round 3, the first after the interruption; with a mean of the weights, too."""
    aggregate = SeededFedAvg.aggregate_train

    def unchanged_in_3(self, server_round, replies):
        arrays, metrics = aggregate(self, server_round, replies)
        return None if server_round == 3 else arrays, metrics

    monkeypatch.setattr(SeededFedAvg, "aggregate_train", unchanged_in_3)
    for rounds in (2, 4):
        result = run(SMALL, rounds=rounds, average_decay=0.5, out=tmp_path, progress=False)
    assert result.curve("model-updated").tolist()[-4:] == [1, 1, 0, 1]
    assert result.summary["rounds-unchanged"] == 1


def test_all_that_a_private_run_reports_is_known(tmp_path, unknown_metrics):
    """None of it takes a place that is left for what clients choose; others: test_resume."""
    private = {"clip": 1.0, "noise_multiplier": 1.0, "label_noise": 0.1}
    own = {"selection": "linearised", **private}
    config = SMALL.replace(method="cp-ntk-fl", rounds=1, local_test_fraction=0.2, cp_ntk_fl=own)
    run(config, out=tmp_path, progress=False)
    assert unknown_metrics == []


def test_nodes_with_ids_of_64_bits_are_recorded(tmp_path):
    """On Ray half of all ids have 64 bits; a client goes by its own where it tells no partition.

    Or by a placeholder, where another one tells the same partition: clients 0 and 1.
    """

    def answer(message, context):
        partition, reply = context.node_config["partition-id"], app(message, context)
        if message.metadata.message_type == "query.partition":
            if partition in (2, 3):
                raise RuntimeError("not yet")
            reply.content["metrics"] = MetricRecord({"partition-id": partition or 1})
        return reply

    config = SMALL.replace(out=tmp_path, clients_per_evaluation=6)
    grid = grid_of(config)
    grid.app = answer
    grid.contexts = {2**64 - node: context for node, context in grid.contexts.items()}
    serve(grid, config)
    # 2^64 - 3 and 2^64 - 4 are -3 and -4 in 64 bits with a sign; -1 - (2^64 - 1) is 0
    assert set(read_run(tmp_path).clients.partition) == {0, 1, 4, 5, -3, -4}


def test_rounds_between_evaluations_change_what_is_measured_and_nothing_else(tmp_path):
    """Every second round, and the last one; targets go by these."""
    base = SMALL.replace(rounds=5, learning_rate=0.3, local_epochs=2, targets="0.2", patience=3)
    every, some = (
        run(base, evaluate_every=n, out=tmp_path / str(n), progress=False) for n in (1, 2)
    )
    for metric in ("accuracy", "loss", "client-accuracy", "client-loss-worst"):
        first = 1 if "client" in metric else 0
        assert list(every.curve(metric).index) == list(range(first, 6))
        expected = every.curve(metric)[[number for number in (0, 2, 4, 5) if number >= first]]
        assert some.curve(metric).equals(expected)
    for metric in ("bytes-up", "train-loss", "model-updated"):
        assert some.curve(metric).tolist() == every.curve(metric).tolist()
    assert sorted(some.clients["round"].unique()) == [2, 4, 5]
    assert bits(some.folder) == bits(every.folder)
    reached = some.to_target(0.2)
    assert reached["round"] in (2, 4, 5)
    assert reached["bytes-up"] == every.curve("bytes-up").loc[: int(reached["round"])].sum()
