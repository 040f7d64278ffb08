"""What is slow to import is imported only where it is used."""

import json
import sys

import pytest

from fedntk.simulations import Config
from fedntk.simulations.data.partitions import load_split

from ..conftest import output_of

SMALL = {"num_clients": 6, "clients_per_round": 2, "train_examples": 200, "rounds": 1}
LOADED = "import json, sys; print(json.dumps([*sys.modules]))"
COMMAND = "from fedntk.simulations.cli import app\ntry: app({})\nexcept SystemExit: pass"
DRAWING = {"matplotlib", "networkx", "pandas"}


def loaded(code: str) -> set[str]:
    """Return the modules that a program has loaded at its end."""
    said = output_of(sys.executable, "-c", f"{code}\n{LOADED}")
    return set(json.loads(said.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "unused"),
    [
        (COMMAND.format(["--help"]), {"torch", "flwr", "numpy"}),
        (COMMAND.format(["run", "--help"]), {"torch", "flwr", "numpy"}),
        (COMMAND.format(["--version"]), {"torch", "flwr", "numpy"}),
        ("import fedntk.strategies, fedntk.clients", DRAWING),
        ("from fedntk.simulations import compare, load_predictor, run", DRAWING),
    ],
)
def test_imports_leave_out_what_they_do_not_use(code, unused):
    assert loaded(code) & unused == set()


def test_a_run_that_draws_nothing_loads_neither_pandas_nor_matplotlib(tmp_path):
    """Its split is made before, since Hugging Face's datasets, which make it, import pandas."""
    config = Config(**SMALL, out=str(tmp_path))
    load_split(config)
    settings = [f"--set={config.key(name)}={value}" for name, value in SMALL.items()]
    command = ["run", "--quiet", f"--out={tmp_path}", *settings]
    assert loaded(COMMAND.format(command)) & DRAWING == set()
    assert (tmp_path / "rounds.parquet").exists()
