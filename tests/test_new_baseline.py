"""A new baseline is six files; lists, tables, the site's navigation and all tests then know it."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, output_of

CLASS = '''"""Plain mean: FedAvg in which all clients count alike.

Source: Doe and Roe, *A Mean of
Models*, Nowhere 2020.
"""

import numpy as np

from fedntk.ntk.options import option

from .core.averaging import cast_like
from .core.channel import Rounds
from .core.round import Round
from .core.strategy import Strategy
from .core.uploads import Update


class PlainMean(Strategy):
    """Plain mean (Doe and Roe 2020). Clients are :class:`~fedntk.clients.SGDClient`."""

    step: float = option("fraction of the way to the mean", default=1.0, above=0, at_most=1)

    def train_round(self, r: Round) -> Rounds[Update]:
        """Average the clients' weights."""
        uploads = yield from r.ask(r.weights)
        if not self.enough(uploads):
            return Update(uploads)
        every = uploads.values
        means = {name: np.mean([w[name] for w in every], axis=0) for name in r.model}
        steps = {name: w + self.step * (means[name] - w) for name, w in r.model.items()}
        return Update(uploads, cast_like(steps, r.model))
'''
CONFIGURATION = """method = "plain-mean"
dataset = "digits"
learning-rate = 0.1
"""
PAGE = """# PlainMean

## What it does

## When to use it

## Use it

## Options

<!-- settings: plain-mean -->

## Results

## What it costs

| bytes of one client in a round | formula |
|---|---|
| down | 4 P |
| up | {up} |
| down, to evaluate | 4 P |

**Exchanges.** One.

## Limits
"""
TEST = '''"""Plain mean."""

from fedntk.strategies import PlainMean

from .federation import Contract
from .test_fedavg import CLIENTS

CONTRACT = {"PlainMean": Contract(PlainMean, CLIENTS)}
'''
ROW = '    Method("scaffold", SCAFFOLD, baseline=True),\n'
CHANGED = {  # file -> text in it, and what stands there afterwards
    "strategies/__init__.py": [
        ("from .scaffold", "from .plain_mean import PlainMean\nfrom .scaffold"),
        ('    "RelayStrategy"', '    "PlainMean",\n    "RelayStrategy"'),
    ],
    "simulations/methods/table.py": [
        ("    NTKDFL,\n", "    NTKDFL,\n    PlainMean,\n"),
        (ROW, ROW + '    Method("plain-mean", PlainMean, baseline=True),\n'),
    ],
}
ADDED = {
    "strategies/plain_mean.py": CLASS,
    "simulations/conf/plain_mean_digits.toml": CONFIGURATION,
    "docs/methods/plain_mean.md": PAGE.format(up="4 P"),
    "tests/strategies/test_plain_mean.py": TEST,
}
NAVIGATION = """
import sys, types
sys.path.append("docs")
import hooks
config = types.SimpleNamespace(nav=[{"Methods": ["methods/ntk_fl.md"]}], extra={})
print(hooks.on_config(config).nav)
"""


@pytest.mark.slow
def test_six_files_are_a_baseline(tmp_path: Path) -> None:
    copy = tmp_path / "fedntk"
    unneeded = shutil.ignore_patterns(".*", "build", "__pycache__", "*.pyc")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=unneeded)
    assert len(CHANGED) + len(ADDED) == 6
    for name, changes in CHANGED.items():
        text = (copy / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (copy / name).write_text(text)
    for name, text in ADDED.items():
        (copy / name).write_text(text)
    python = [sys.executable, "-B"]
    options = {"cwd": copy, "env": os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}}
    place = output_of(*python, "-c", "import fedntk; print(fedntk.__file__)", **options)
    assert Path(place.strip()) == copy / "fedntk" / "__init__.py"

    written = output_of(*python, "docs/tables.py", **options).split()
    lists = {"README.md", "docs/bibliography.md", "docs/choosing.md"}
    assert set(written) == {*lists, "simulations/pyproject.toml"}
    assert "[tool.flwr.app.config.plain-mean]\nstep = 1.0" in read(
        copy, "simulations/pyproject.toml"
    )
    link = "[PlainMean](methods/plain_mean.md)"
    assert f"- {link}: FedAvg in which all clients count alike\n" in read(copy, "docs/choosing.md")
    assert f"- Doe and Roe 2020, *A Mean of Models*: {link}" in read(copy, "docs/bibliography.md")
    assert "[PlainMean](docs/methods/plain_mean.md)" in read(copy, "README.md")
    assert "'methods/plain_mean.md'" in output_of(*python, "-c", NAVIGATION, **options)

    quick = ("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not slow")
    tests = ("tests", "-k", "plain_mean or plain-mean or PlainMean")
    said = output_of(*python, *quick, *tests, **options)
    passed = int(said.split(" passed")[0].split()[-1])
    assert passed > 20
    (copy / "docs/methods/plain_mean.md").write_text(PAGE.format(up="8 P"))
    costs = ("tests/test_docs_costs.py", "-k", "plain_mean")
    with pytest.raises(AssertionError, match=r"test_what_a_client_of_a_server_sends\[plain_mean\]"):
        output_of(*python, *quick, *costs, **options)


def read(folder: Path, name: str) -> str:
    return (folder / name).read_text()
