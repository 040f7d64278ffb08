"""The page on adding a method, followed word by word: its files, its package, its commands."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from .conftest import ROOT, output_of

PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILES = dict(FILE.findall(PAGE))
COMMANDS = re.search(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1].splitlines()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Folder with what the page says, and what an installation of it would leave there."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "clipped_median" / "__init__.py").touch()
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    described = tmp_path / f"clipped_median-{project['version']}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    ((group, named),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
    (described / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


CODE = """
import sys
from typer.testing import CliRunner
from fedntk.simulations import Config, load_model, run
from fedntk.simulations.cli import app
for line in sys.argv[1:]:
    done = CliRunner().invoke(app, line.split()[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    print(done.output)

def learned(name, **own):
    result = run(Config(method=name), out=f"{name}{own}", clients_per_round=1, rounds=2,
                 learning_rate=0.3, progress=False, **own)
    return {k: v.tobytes() for k, v in load_model(result.folder).items()}

# the median of one is it itself, and so is its mean
assert learned("clipped-median", clipped_median={"max_norm": 1e9}) == learned("fedavg")
assert learned("clipped-median", clipped_median={"max_norm": 0.01}) != learned("fedavg")
"""


def test_the_commands_of_the_page_work_and_one_client_without_clipping_is_fedavg(package):
    """Each in its turn. The fixture does the work of the first, which takes an index."""
    install, *others = COMMANDS
    assert install == "pip install --editable ."
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    said = output_of(sys.executable, "-c", CODE, *others, cwd=package, env=own)
    assert said.startswith("clipped-median.max-norm = 1.0: ")
    assert "after round 2" in said
    first, _, last = (
        json.loads(line)
        for line in (package / "runs/clipped-median/rounds.jsonl").read_text().splitlines()
    )
    assert last["model-updated"] == 1
    assert last["clipped"] > 0  # the norm of the page is one that clients reach
    assert last["accuracy"] > first["accuracy"]
