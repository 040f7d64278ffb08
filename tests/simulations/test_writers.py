"""TensorBoard and MLflow get each round's metrics once, also of a run that was interrupted."""

import importlib
import sys

import pytest

from fedntk.simulations import Config, ConfigError, run
from fedntk.simulations.engine import runs, writers

SMALL = Config(num_clients=8, clients_per_round=3, clients_per_evaluation=2, rounds=3)


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    return mlflow


def steps_of(folder, metric):
    """Steps and values of a metric in TensorBoard's files."""
    name = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(name).EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = events.Scalars(metric)
    return [s.step for s in scalars], [s.value for s in scalars]


def in_two_parts(folder, monkeypatch, writer):
    """Three rounds, interrupted after the first."""
    config = SMALL.replace(out=str(folder))
    serve = runs.serve

    def cut(grid, config, on_round, setup=None):
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
    config = SMALL.replace(out=tmp_path)
    run(config, progress=False)
    run(config, progress=False, writers=["tensorboard"])
    assert steps_of(tmp_path, "accuracy")[0] == [0, 1, 2, 3]


def test_tensorboard(tmp_path, monkeypatch):
    result = in_two_parts(tmp_path, monkeypatch, "tensorboard")
    for metric in ("accuracy", "train-loss", "bytes-up"):
        steps, values = steps_of(tmp_path, metric)
        curve = result.curve(metric)
        assert steps == curve.index.tolist()
        assert values == pytest.approx(curve.tolist(), rel=1e-6)  # float32


@pytest.mark.filterwarnings("ignore:The ``noload``")  # MLflow's, about SQLAlchemy
def test_mlflow(tmp_path, monkeypatch, mlflow):
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
def test_a_run_that_is_replaced_gets_a_run_of_its_own_in_mlflow(tmp_path, mlflow):
    config = SMALL.replace(out=tmp_path / "run", rounds=1)
    run(config, progress=False, writers=["mlflow"])
    run(config, progress=False, writers=["mlflow"], again=True, width=5)
    both = mlflow.search_runs(experiment_names=["fedntk"], output_format="list")
    assert sorted(own.data.params["width"] for own in both) == ["100", "5"]
    for own in both:
        history = mlflow.MlflowClient().get_metric_history(own.info.run_id, "accuracy")
        assert [m.step for m in history] == [0, 1]


def test_they_are_imported_only_when_asked_for(tmp_path, monkeypatch):
    for name in ("tensorboard", "torch.utils.tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    importlib.reload(writers)
    run(SMALL, rounds=0, out=tmp_path, progress=False)


def test_a_writer_that_is_not_installed_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'fedntk\[mlflow\]'"):
        writers.check_writers(["mlflow"])
