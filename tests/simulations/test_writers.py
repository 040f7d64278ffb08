"""TensorBoard and MLflow get each round's metrics once, also of a run that was interrupted."""

import importlib
import sys

import pytest

from fedntk.simulations import Config, ConfigError, run
from fedntk.simulations.engine import writers

SMALL = Config(
    method="fedavg", num_clients=4, clients_per_round=2, clients_per_evaluation=0, rounds=3,
    train_examples=200, width=5,
)  # fmt: skip


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


def in_two_parts(folder, each_run, writer):
    """Three rounds, interrupted after the first."""

    def stop(config, record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    each_run(report=stop)
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, out=folder, progress=False, writers=[writer])
    return run(SMALL, out=folder, progress=False, writers=[writer])


def test_tensorboard(tmp_path, each_run):
    """A finished run is written again when it is asked for."""
    result = in_two_parts(tmp_path, each_run, "tensorboard")
    for _ in range(2):
        for metric in ("accuracy", "train-loss", "bytes-up"):
            steps, values = steps_of(tmp_path, metric)
            curve = result.curve(metric)
            assert steps == curve.index.tolist()
            assert values == pytest.approx(curve.tolist(), rel=1e-6)  # float32
        for path in (tmp_path / "tensorboard").iterdir():
            path.unlink()
        run(SMALL, out=tmp_path, progress=False, writers=["tensorboard"])


@pytest.mark.filterwarnings("ignore:The ``noload``")  # MLflow's, about SQLAlchemy
def test_mlflow(tmp_path, each_run, mlflow):
    """A run that goes on keeps its own there; one that is replaced gets another."""
    with mlflow.start_run() as active:  # a user's own, which goes on
        result = in_two_parts(tmp_path / "run", each_run, "mlflow")
        assert mlflow.active_run().info.run_id == active.info.run_id
    (own,) = mlflow.search_runs(experiment_names=["fedntk"], output_format="list")
    assert own.info.run_name == "fedavg-0"
    assert own.data.params["learning-rate"] == "0.01"
    history = mlflow.MlflowClient().get_metric_history(own.info.run_id, "accuracy")
    assert [m.step for m in history] == [0, 1, 2, 3]
    assert [m.value for m in history] == result.curve().tolist()
    each_run()
    options = {"out": tmp_path / "run", "progress": False, "writers": ["mlflow"]}
    run(SMALL, **options, again=True, width=6, rounds=1)
    both = mlflow.search_runs(experiment_names=["fedntk"], output_format="list")
    assert {o.data.params["width"]: o.data.metrics["bytes-up"] > 0 for o in both} == {
        "5": True, "6": True
    }  # fmt: skip
    (other,) = (o for o in both if o.data.params["width"] == "6")
    history = mlflow.MlflowClient().get_metric_history(other.info.run_id, "accuracy")
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
