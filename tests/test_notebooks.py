"""Each notebook runs from its first cell to its last, and is committed as it was run.

`make test` runs them in a quick form, with fewer rounds, seeds and cases; `make check` as they are.
"""

import asyncio
import re
import warnings

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from .conftest import ROOT

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
START = "%reset -f\n%cd -q {}\nimport matplotlib\nmatplotlib.rcdefaults()\n"
# in the quick form there are fewer digits
FEWER = """
from fedntk.simulations.data import load
def fewer(folder, digits=load._digits):
    train, test, classes = digits(folder)
    return train.select(slice(250)), test.select(slice(60)), classes
load._BY_NAME["digits"] = fewer
"""
# what the quick form replaces in the code: in all notebooks, and in single ones
SHORTER = {
    r"\[0, 1, 2\]": "[0]",  # seeds
    r"\brounds=([2-9]|\d\d)": "rounds=2",
    r"train_examples=\d+": "train_examples=200",
    r"num_clients=(20|50)": "num_clients=5",
    r"clients_per_(\w+)=(10|20)": r"clients_per_\1=5",
    r"local_epochs=(5|20)": "local_epochs=1",
}
QUICK = {
    "compare": {
        r'": 20,': '": 5,',
        '"rounds": 5': '"rounds": 3',
        '"bootstrap_rounds": 2': '"bootstrap_rounds": 1',
        '"train_examples": 1000': '"train_examples": 100',
        r"\*_digits": "[cfnst]*[dglt]_digits",
    },
    "cp_ntk_fl": {
        r"\(0.01, 0.03, 0.1, 0.3, 1.0\)": "(1.0,)",
        '"1000"': '"10"',
        '_digits.toml",': '_digits.toml", num_clients=10, clients_per_round=2,',
    },
    "fed_ensemble": {},
    "ntk_dfl": {"20,50,100,200": "20,50", "=12,": "=6,"},
    "ntk_fl": {r", 200, 500, 1000, 2000\]": "]"},
    "one_exchange": {
        '"num_clients": 50': '"num_clients": 10',
        '"clients_per_round": 10': '"clients_per_round": 3',
        "clients_per_round=50": "clients_per_round=10",
        "validation_examples=200": "validation_examples=50",
        '"rounds": 20': '"rounds": 2',
        "random_features=1000": "random_features=100",
        r"\(100, 200, 500, 1000, 2000\)": "(100, 200)",
        r"\(0.3, 1, 3, 10, 30, 100\)": "(1, 10)",
        r"range\(5\)": "[0]",
        r"random_features=[35]00": "random_features=100",
        r"\(0.5, 0.1\)": "(0.5,)",
        r', index=\["Dirichlet\(0.5\)", .*\]': "",
    },
    "tct": {
        r"\brounds=([2-9]|\d\d)": "rounds=3",
        '"bootstrap_rounds": 8, "num_features": 1000': '"bootstrap_rounds": 1, "num_features": 200',
        r"range\(20\)": "range(1)",
        r"\(100, 300, 1000, 3000\)": "(30, 100, 200, 300)",
    },
    "weighted_fedavg": {r"\[0.03, 0.1, 0.3, 1.0\]": "[0.03]"},
}


@pytest.fixture(scope="module")
def shared():
    """A loop and a kernel for all quick forms: what they import takes longer than most run."""
    with asyncio.Runner() as loop:
        manager = AsyncKernelManager()
        yield loop, manager
        if manager.has_kernel:
            loop.run(manager.shutdown_kernel(now=True))


QUICKLY = pytest.param(True, marks=pytest.mark.xdist_group("notebooks"))


@pytest.mark.parametrize("quick", [QUICKLY, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name, quick, shared, tmp_path):
    """The quick forms in one kernel, whose names each finds reset; the whole ones in their own."""
    loop, kernel = shared
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for old, new in (SHORTER | QUICK[name]).items() if quick else ():
        assert old in SHORTER or any(re.search(old, cell.source) for cell in code), old
        for cell in code:
            cell.source = re.sub(old, new, cell.source)
    start = START.format(tmp_path) + FEWER * quick
    notebook.cells.insert(0, nbformat.v4.new_code_cell(start))
    client = NotebookClient(
        notebook,
        timeout=1800,  # seconds of a cell that hangs; a busy machine may take minutes
        km=kernel if quick else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        loop.run(client.async_execute())
    if quick:
        client.kc.stop_channels()
    outputs = [output for cell in code for output in cell.outputs]
    shown = [output.get("data", {}) for output in outputs]
    assert sum("image/png" in data or "<img" in data.get("text/html", "") for data in shown) >= 4
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_committed_outputs_are_small_and_speak_of_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    for word in ("/home/", "/root/", "/Users/", "site-packages", '"output_type": "error"'):
        assert word not in text, word
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_a_notebook_is_a_story(path):
    """It asks one question, installs what is missing, and ends with what to try next.

    Accuracies and points in its words are those of its outputs, where both may be shares.
    """
    cells = nbformat.read(path, as_version=4).cells
    words = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert re.search(r"^\*\*[^*]+\?\*\*$", words[0], re.MULTILINE)
    assert '%pip install --quiet "fedntk[' in cells[1].source
    assert "## What to try next\n" in words[-1]
    outputs = str([output for cell in cells for output in cell.get("outputs", [])])
    for number in re.findall(r"(\d+\.\d) (?:%|points)", "".join(words)):
        assert number in outputs or f"{float(number) / 100:.3f}" in outputs, number
