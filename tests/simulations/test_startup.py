"""What is slow to import is imported only where it is used."""

import json
import sys

from fedntk.simulations import Config
from fedntk.simulations.data.partitions import load_split

from ..conftest import output_of

SMALL = {"num_clients": 6, "clients_per_round": 2, "train_examples": 200, "rounds": 1}
LOADED = "import json, sys; print(json.dumps([*sys.modules]))"
COMMAND = "from fedntk.simulations.cli import app\ntry: app({})\nexcept SystemExit: pass"
IMPORTS = """
import fedntk.clients, fedntk.strategies
from fedntk.simulations import compare, load_predictor, run
"""
DRAWING = {"matplotlib", "networkx", "pandas"}


def loaded(code: str) -> set[str]:
    """Return the modules that a program has loaded at its end."""
    said = output_of(sys.executable, "-c", f"{code}\n{LOADED}")
    return set(json.loads(said.splitlines()[-1]))


def test_what_the_command_says_of_itself_needs_no_torch():
    commands = ["--help"], ["run", "--help"], ["--version"]
    said = "\n".join(COMMAND.format(command) for command in commands)
    assert loaded(said) & {"torch", "flwr", "numpy"} == set()


def test_imports_and_a_run_that_draws_nothing_load_neither_pandas_nor_matplotlib(tmp_path):
    """Its split is made before, since Hugging Face's datasets, which make it, import pandas."""
    config = Config(**SMALL, out=str(tmp_path))
    load_split(config)
    settings = [f"--set={config.key(name)}={value}" for name, value in SMALL.items()]
    command = ["run", "--quiet", f"--out={tmp_path}", *settings]
    assert loaded(f"{IMPORTS}{COMMAND.format(command)}") & DRAWING == set()
    assert (tmp_path / "rounds.parquet").exists()
