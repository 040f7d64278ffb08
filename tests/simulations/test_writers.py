"""What runs tell while they run: to TensorBoard and MLflow, in a log and in a terminal."""

import io
import logging
import re

import pytest

from fedntk.simulations import run
from fedntk.simulations.engine.progress import Progress, progress

from .settings import FEDAVG

SMALL = FEDAVG.replace(clients_per_evaluation=0, rounds=3, width=5)


def in_two_parts(folder, writer):
    """Three rounds, interrupted after the first."""

    def stop(record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    options = {"out": folder, "progress": False, "writers": [writer]}
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, **options, on_round=stop)
    return run(SMALL, **options)


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
        run(SMALL, out=tmp_path, progress=False, writers=["tensorboard"])


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
    run(SMALL, **options, again=True, width=6, rounds=1)
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
