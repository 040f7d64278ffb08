"""What is recorded of a run, and what it tells while it runs."""

import io
import itertools
import logging
import math
import re

import pytest
from flwr.app import MetricRecord

from fedntk.clients import SGDClient
from fedntk.simulations import run
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.progress import Progress, progress
from fedntk.simulations.engine.recorder import LONGEST, OTHERS
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.report.results import read_run

from .outcomes import bits, grid_of, measured
from .settings import FEDAVG

SMALL = FEDAVG.replace(num_clients=6, clients_per_evaluation=3, rounds=3)


def naming(monkeypatch, more):
    """Let all clients add metrics to their replies; `more` is given the kind and the round."""
    for name in ("fit", "evaluate"):
        own = getattr(SGDClient, name)

        def changed(self, parameters, config, own=own, name=name):
            *result, metrics = own(self, parameters, config)
            return *result, more(name, int(config["server-round"])) | metrics

        monkeypatch.setattr(SGDClient, name, changed)


def test_any_name_of_a_metric_is_recorded_beside_what_the_server_measures(tmp_path, monkeypatch):
    """Except one that no file can hold."""
    plain = run(SMALL, out=tmp_path / "plain", progress=False)
    names = ["run", "round", "level_0", "client-loss-mean", "", "\U0001f600", "x" * LONGEST]
    odd = {
        "fit": ["accuracy", "loss", "seconds", "\ud800", "x" * (LONGEST + 1)],
        "evaluate": ["a\udfff"],
    }
    naming(monkeypatch, lambda kind, _: dict.fromkeys(names + odd[kind], -7.0))
    result = run(SMALL, out=tmp_path / "named", progress=False)
    for name in names:
        assert result.clients[result.clients.metric == name].value.tolist() == [-7.0] * 9
    for metric in ("accuracy", "loss", "client-accuracy-mean", "client-loss-mean"):
        assert result.curve(metric).tolist() == plain.curve(metric).tolist()
    assert (result.curve("seconds") > 0).all()
    unusual = {name for name in result.rounds.metric if name > "\u00ff" or name[:2] == "xx"}
    assert unusual == {"\U0001f600", "x" * LONGEST}


def test_a_client_whose_model_diverged_is_in_the_clients_mean(tmp_path, monkeypatch):
    """Its loss is NaN, and so are mean and worst: without it a diverged run looks better."""
    plain = run(SMALL, out=tmp_path / "plain", progress=False)
    evaluate = SGDClient.evaluate

    def diverged(self, parameters, config):
        loss, n, metrics = evaluate(self, parameters, config)
        first = next(evaluated) == 0
        return math.nan if first else loss, n, metrics

    evaluated = itertools.count()
    monkeypatch.setattr(SGDClient, "evaluate", diverged)
    result = run(SMALL, out=tmp_path / "diverged", progress=False)
    for statistic in ("mean", "worst", "std"):
        curves = [r.curve(f"client-loss-{statistic}").tolist() for r in (plain, result)]
        assert [math.isnan(value) for value in curves[1]] == [True, False, False]
        assert curves[1][1:] == curves[0][1:]
    assert result.curve("client-accuracy-mean").equals(plain.curve("client-accuracy-mean"))


def test_thousands_of_new_names_a_round_leave_files_small(tmp_path, monkeypatch):
    """500 a round from every client: the first 32 are recorded, also of a run that goes on."""

    def names(_, server_round):
        count = 24 if server_round < 3 else 500
        return {f"name {server_round} {i}": float(i) for i in range(count)}

    naming(monkeypatch, names)
    whole = run(SMALL, rounds=4, out=tmp_path / "whole", progress=False)
    for frame in (whole.rounds, whole.clients):
        assert len({name for name in frame.metric if name.startswith("name")}) == OTHERS
    for rounds in (1, 3, 4):
        parts = run(SMALL, rounds=rounds, out=tmp_path / "parts", progress=False)
    assert parts.clients.equals(whole.clients)
    assert measured(parts).equals(measured(whole))
    network = (parts.folder / "model.safetensors").stat().st_size
    (checkpoint,) = (parts.folder / "checkpoints").glob("*.safetensors")
    assert checkpoint.stat().st_size < 2 * network + 40_000
    assert (parts.folder / "rounds.jsonl").stat().st_size < 4 * 6_000


def test_nodes_with_ids_of_64_bits_are_recorded(tmp_path):
    """Without a partition of its own a client goes by its node's id, or by a placeholder."""

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
    for metric, measured_in in (("accuracy", [0, 2, 4, 5]), ("client-loss-worst", [2, 4, 5])):
        assert len(every.curve(metric)) == 6 - (metric != "accuracy")
        assert some.curve(metric).equals(every.curve(metric)[measured_in])
    for metric in ("bytes-up", "train-loss", "model-updated"):
        assert some.curve(metric).tolist() == every.curve(metric).tolist()
    assert sorted(some.clients["round"].unique()) == [2, 4, 5]
    assert bits(some.folder) == bits(every.folder)
    reached = some.to_target(0.2)
    assert reached["round"] in (2, 4, 5)
    assert reached["bytes-up"] == every.curve("bytes-up").loc[: int(reached["round"])].sum()


NARROW = FEDAVG.replace(clients_per_evaluation=0, rounds=3, width=5)


def in_two_parts(folder, writer):
    """Three rounds, interrupted after the first."""

    def stop(record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    options = {"out": folder, "progress": False, "writers": [writer]}
    with pytest.raises(KeyboardInterrupt):
        run(NARROW, **options, on_round=stop)
    return run(NARROW, **options)


def test_tensorboard(tmp_path):
    """A finished run is written again when it is asked for."""
    name = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(name).EventAccumulator
    result = in_two_parts(tmp_path, "tensorboard")
    for _ in range(2):
        events = reader(str(tmp_path / "tensorboard"))
        events.Reload()
        for metric in ("accuracy", "train-loss", "bytes-up"):
            found = {event.step: event.value for event in events.Scalars(metric)}
            assert found == pytest.approx(result.curve(metric).to_dict(), rel=1e-6)  # float32
            assert len(events.Scalars(metric)) == len(found)
        for path in (tmp_path / "tensorboard").iterdir():
            path.unlink()
        run(NARROW, out=tmp_path, progress=False, writers=["tensorboard"])


def test_mlflow(tmp_path, monkeypatch):
    """A run that goes on keeps its own there; one that is replaced gets another."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    monkeypatch.chdir(tmp_path)
    with mlflow.start_run() as active:  # a user's own, which goes on
        result = in_two_parts(tmp_path / "run", "mlflow")
        assert mlflow.active_run().info.run_id == active.info.run_id
    options = {"out": tmp_path / "run", "progress": False, "writers": ["mlflow"]}
    run(NARROW, **options, again=True, width=6, rounds=1)
    found = {}
    for own in mlflow.search_runs(experiment_names=["fedntk"], output_format="list"):
        history = mlflow.MlflowClient().get_metric_history(own.info.run_id, "accuracy")
        found[own.data.params["width"]] = [(m.step, m.value) for m in history]
    assert found["5"] == [*result.curve().items()]
    assert [step for step, _ in found["6"]] == [0, 1]
    assert len(found) == 2


def two_runs(shown: Progress) -> None:
    """Four rounds of a first run, two of a second one that is gone on with."""
    shown.begin("first", 4)
    shown.on_answer("train", 3, 8)
    for number in range(5):
        record = {"round": number, "accuracy": number / 10}
        shown.on_round(record | {"replies-accepted": 7, "replies-rejected": 1})
    shown.end()
    shown.begin("second", 4, done=2)
    shown.on_round(record)
    shown.end()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_for_each_run_that_has_ended(capsys):
    with progress(8, 2) as shown:
        two_runs(shown)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[0] for line in lines] == [
        "first: run 1/2, round 4/4, done, accuracy 40.0 %",
        "second: run 2/2, round 4/4, done, accuracy 40.0 %",
    ]
    with progress(8, 2, enabled=False) as shown:
        two_runs(shown)
    assert "".join(capsys.readouterr()) == ""


def test_a_terminal_gets_a_bar_and_keeps_a_line_for_each_run(monkeypatch):
    """The log is printed above the bar, which would overwrite it."""
    terminal, logger = Terminal(), logging.getLogger("flwr")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("tqdm.auto.tqdm.monitor_interval", 0)
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    with progress(8, 2) as shown:
        shown.bar.mininterval = 0
        two_runs(shown)
        logger.warning("a client was dropped")
    assert handler.stream is terminal
    written = [part.strip() for part in re.split("[\r\n]", terminal.getvalue())]
    for text in (
        "first: run 1/2, round 0/4, training 3/8 clients, 00:00, ? left",
        "first: run 1/2, round 4/4, 7 clients, 1 rejected, accuracy 40.0 %, 00:00, 00:00 left",
        "second: run 2/2, round 2/4, starting, 00:00, 00:00 left",
        "second: run 2/2, round 4/4, done, accuracy 40.0 %, 0:00:00",
        "a client was dropped",
    ):
        assert any(part.startswith(text) for part in written), text
    assert (shown.done, shown.rounds) == (6, 6)
