"""The accuracy of a configuration in simulations/conf, with clients that are lost or late."""

import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedntk.simulations import Config, run

CONF = Path(__file__).parents[2] / "simulations" / "conf"


def accuracy(settings: dict[str, Any], seed: int) -> Iterator[tuple[str, None, float]]:
    """Yield the headline metric after the last round, and the rounds that changed nothing."""
    settings = {key: value for key, value in settings.items() if key != "data-dir"}
    file = tomllib.loads((CONF / f"{settings.pop('file')}_digits.toml").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        config = Config({**file, **settings}, seed=seed, out=folder)
        done = run(config, progress=False)
    yield "accuracy", None, 100 * done.curve(config.chosen_method.headline).iloc[-1]
    yield "unchanged", None, done.summary["rounds-unchanged"]
