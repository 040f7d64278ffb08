"""TensorBoard and MLflow get each round's metrics once, also of a run that was interrupted."""

import pytest

from fedntk.simulations import run

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
