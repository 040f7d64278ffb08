"""The page on adding a method, followed word by word: its files, its commands, its package."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from .conftest import FILE, ROOT, output_of

PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
FILES = dict(FILE.findall(PAGE))
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BEFORE, AFTER = (part.splitlines() for part in SHELL.split("pip install --editable .\n"))

COMMANDS = """
import sys
from typer.testing import CliRunner
from fedntk.simulations import Config, load_model, run
from fedntk.simulations.cli import app
for line in sys.argv[1:]:
    done = CliRunner().invoke(app, line.split()[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    print(done.output)
"""
FROM_A_CELL = """
exec(open("compare.py").read())
assert accuracy.run.unique().tolist() == ["momentum", "FedAvg", "file"]
import pytest
assert pytest.main(["-q", "-p", "no:cacheprovider", "-k", "seed", "test_mymethod.py"]) == 0
"""
AS_A_PACKAGE = """
def learned(name, **own):
    result = run(Config(method=name), out=f"{name}{own}", clients_per_round=1, rounds=2,
                 learning_rate=0.3, progress=False, **own)
    return {k: v.tobytes() for k, v in load_model(result.folder).items()}

# the median of one is it itself, and so is its mean
assert learned("clipped-median", clipped_median={"max_norm": 1e9}) == learned("fedavg")
assert learned("clipped-median", clipped_median={"max_norm": 0.01}) != learned("fedavg")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with the files of the page."""
    made = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


def python(code: str, lines: list[str], folder: Path) -> str:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return output_of(sys.executable, "-c", COMMANDS + code, *lines, cwd=folder, env=own)


def test_one_file_runs_from_the_command_line_and_from_a_cell_and_keeps_the_contract(folder):
    said = python(FROM_A_CELL, BEFORE, folder)
    assert "after round 2" in said.partition("fed-avg-m.server-momentum = 0.7: beta\n")[0]
    assert "after round 3" in said
    assert said.count("passed") == 24 + 1  # four methods, six checks; what pytest says


def test_as_a_package_one_client_without_clipping_is_fedavg(folder):
    """The dist-info is what the installation, which takes an index, would leave there."""
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    described = folder / f"clipped_median-{project['version']}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    ((group, named),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
    (described / "entry_points.txt").write_text("\n".join(lines))
    said = python(AS_A_PACKAGE, AFTER, folder)
    assert said.startswith("clipped-median.max-norm = 1.0: ")
    first, _, last = (
        json.loads(line)
        for line in (folder / "runs/clipped-median/rounds.jsonl").read_text().splitlines()
    )
    assert last["model-updated"] == 1
    assert last["clipped"] > 0  # the norm of the page is one that clients reach
    assert last["accuracy"] > first["accuracy"]
