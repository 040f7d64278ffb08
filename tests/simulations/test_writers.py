"""TensorBoard and MLflow get each round's metrics once, also of a run that was interrupted."""

import subprocess
import sys

import pytest

from fedntk.simulations import Config, ConfigError, run
from fedntk.simulations.engine.writers import check_writers

SMALL = Config(num_clients=8, clients_per_round=3, clients_per_evaluation=2, rounds=3)


def in_two_parts(folder, monkeypatch, writer):
    """Three rounds, interrupted after the first."""
    config = SMALL.replace(out=str(folder))
    from fedntk.simulations.engine import runs

    serve = runs.serve

    def cut(grid, config, on_round):
        def stop(record):
            on_round(record)
            if record["round"] == 1:
                raise KeyboardInterrupt

        serve(grid, config, stop)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "serve", cut)
        with pytest.raises(KeyboardInterrupt):
            run(config, progress=False, writers=[writer])
    return run(config, progress=False, writers=[writer])


def test_a_finished_run_is_written_when_it_is_asked_for(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    config = SMALL.replace(out=tmp_path)
    run(config, progress=False)
    run(config, progress=False, writers=["tensorboard"])
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [s.step for s in events.Scalars("accuracy")] == [0, 1, 2, 3]


def test_tensorboard(tmp_path, monkeypatch):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    result = in_two_parts(tmp_path, monkeypatch, "tensorboard")
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for metric in ("accuracy", "train-loss", "bytes-up"):
        curve = result.curve(metric)
        scalars = events.Scalars(metric)
        assert [s.step for s in scalars] == curve.index.tolist()
        assert [s.value for s in scalars] == pytest.approx(curve.tolist(), rel=1e-6)  # float32


@pytest.mark.filterwarnings("ignore:The ``noload``")  # MLflow's, about SQLAlchemy
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    with mlflow.start_run() as active:  # a user's own, which goes on
        result = in_two_parts(tmp_path / "run", monkeypatch, "mlflow")
        assert mlflow.active_run().info.run_id == active.info.run_id
    (own,) = mlflow.search_runs(experiment_names=["fedntk"], output_format="list")
    assert own.info.run_name == "ntk-fl-0"
    assert own.data.params["learning-rate"] == "0.01"
    history = mlflow.MlflowClient().get_metric_history(own.info.run_id, "accuracy")
    assert [m.step for m in history] == [0, 1, 2, 3]
    assert [m.value for m in history] == result.curve().tolist()


@pytest.mark.filterwarnings("ignore:The ``noload``")  # MLflow's, about SQLAlchemy
def test_a_run_that_is_replaced_gets_a_run_of_its_own_in_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    config = SMALL.replace(out=tmp_path / "run", rounds=1)
    run(config, progress=False, writers=["mlflow"])
    run(config, progress=False, writers=["mlflow"], again=True, width=5)
    runs = mlflow.search_runs(experiment_names=["fedntk"], output_format="list")
    assert sorted(own.data.params["width"] for own in runs) == ["100", "5"]
    for own in runs:
        history = mlflow.MlflowClient().get_metric_history(own.info.run_id, "accuracy")
        assert [m.step for m in history] == [0, 1]


def test_they_are_imported_only_when_asked_for(tmp_path):
    code = (
        "import sys\n"
        "from fedntk.simulations import Config, run\n"
        f"run(Config(rounds=0, out={str(tmp_path)!r}), progress=False)\n"
        "print([name for name in ('tensorboard', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_writer_that_is_not_installed_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'fedntk\[mlflow\]'"):
        check_writers(["mlflow"])
