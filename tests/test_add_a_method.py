"""The page on adding a method, followed word by word: its files, its package, its commands."""

import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .conftest import ROOT

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
    entries = configparser.ConfigParser()
    entries.read_dict(project["entry-points"])
    with (described / "entry_points.txt").open("w") as file:
        entries.write(file)
    return tmp_path


def command(package: Path, *arguments: str) -> str:
    """Run Python where the package is installed, and return what it prints."""
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(  # noqa: S603
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, cwd=package,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_lists_the_files_that_it_writes():
    tree = re.search(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    listed = {line.strip() for line in tree.splitlines() if not line.endswith("/")}
    assert listed == {Path(name).name for name in FILES} | {"__init__.py"}


def test_the_example_is_small():
    code = "".join(text for name, text in FILES.items() if name.endswith(".py"))
    lines = [line for line in code.splitlines() if line.strip()]
    assert 40 <= len(lines) <= 55


def test_the_commands_of_the_page_work(package):
    """Each in its turn but the first, whose work the fixture does: it takes an index."""
    install, *others = COMMANDS
    assert install == "pip install --editable ."
    outputs = []
    for line in others:
        name, *arguments = line.split()
        assert name == "fedntk"
        outputs.append(command(package, "-m", "fedntk.simulations.cli", *arguments))
    settings, ran = outputs
    assert settings.startswith("clipped-median.max-norm = 1.0: ")
    assert "after round 2" in ran
    rounds = (package / "runs" / "clipped-median" / "rounds.jsonl").read_text().splitlines()
    last = json.loads(rounds[-1])
    assert len(rounds) == 3  # and what was there before the first
    assert last["model-updated"] == 1
    assert last["clipped"] > 0  # the norm of the page is one that clients reach
    assert last["accuracy"] > json.loads(rounds[0])["accuracy"]


def test_with_one_client_and_no_clipping_it_is_fedavg(package):
    """The median of one is it itself, and so is its mean."""
    code = """
from fedntk.simulations import Config, load_model, run
common = dict(clients_per_round=1, rounds=2, learning_rate=0.3, progress=False)
own = run(Config(method="clipped-median"), clipped_median={"max_norm": 1e9}, out="a", **common)
plain = run(Config(method="fedavg"), out="b", **common)
one, other = ({k: v.tobytes() for k, v in load_model(r.folder).items()} for r in (own, plain))
assert one == other
clipped = run(Config(method="clipped-median"), clipped_median={"max_norm": 0.01}, out="c", **common)
assert one != {k: v.tobytes() for k, v in load_model(clipped.folder).items()}
"""
    command(package, "-c", code)
