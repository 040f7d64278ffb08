"""What tests of runs compare, and data on which a model is right or wrong as they wish."""

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedntk.simulations import Config, ConfigError, Run, load_model
from fedntk.simulations.engine.client_app import app
from fedntk.simulations.engine.engines import LocalGrid
from fedntk.simulations.engine.server_app import serve
from fedntk.simulations.report.results import read_run

from .. import conftest

refused = functools.partial(conftest.refused, error=ConfigError)


def grid_of(config: Config) -> LocalGrid:
    return LocalGrid(app, config.num_clients, config.run_config())


def bits(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_model(folder).items()}


def measured(run: Run, varying: str = "seconds|memory") -> pd.DataFrame:
    """All metrics but what the machine makes of them."""
    return run.rounds[~run.rounds.metric.str.contains(varying)].reset_index(drop=True)


def outcome(folder: Path, *, sent: bool = True) -> tuple[object, ...]:
    """All of a run that must not depend on whether it was interrupted; `sent`: the bytes, too."""
    result = read_run(folder)
    rounds = measured(result, "seconds|memory" if sent else "seconds|memory|bytes")
    models = [(folder / f"{which}.safetensors").read_bytes() for which in ("model", "best")]
    changing = ["seconds", "to-target"] + ["bytes-up", "bytes-down"] * (not sent)
    summary = {k: v for k, v in result.summary.items() if k not in changing}
    return (*models, rounds.to_csv(), result.clients.to_csv(), summary)


def interrupted(config: Config, after: int, error: type[BaseException] = RuntimeError) -> None:
    """Run until `error` is raised at the end of a round."""

    def stop(record: dict[str, float]) -> None:
        if record["round"] == after:
            raise error

    with pytest.raises(error):
        serve(grid_of(config), config, stop)


def write_data(path: Path, *, shift: int = 0, scale: float = 1.0) -> str:
    """Three classes that a linear model tells apart; test labels and inputs changed as asked."""
    rng = np.random.default_rng(0)
    y = np.arange(400) % 3
    x = rng.normal(size=(400, 6)) + 3 * np.eye(6)[y]
    values = {"x_train": x[:300], "y_train": y[:300], "x_test": scale * x[300:]}
    np.savez(path, **values, y_test=(y[300:] + shift) % 3)
    return f"npz:{path}"
