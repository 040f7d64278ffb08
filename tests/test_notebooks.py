"""Each notebook runs from its first cell to its last, and is committed as it was run."""

import asyncio
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from .conftest import ROOT

pytestmark = pytest.mark.xdist_group("notebooks")  # one process executes them all
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=1800,  # seconds of a cell that hangs; a busy machine may take minutes
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    asyncio.run(client.async_execute())
    return notebook


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """All notebooks at the same time, two of them at work: each has a process of its own."""
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore")  # Jupyter's own
        folders = [tmp_path_factory.mktemp(path.stem) for path in NOTEBOOKS]
        futures = {
            path: pool.submit(execute, path, folder)
            for path, folder in zip(NOTEBOOKS, folders, strict=True)
        }
        wait(futures.values())
    return futures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, executed):
    notebook = executed[path].result()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_small_and_speak_of_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 500_000
    for word in ("/home/", "/root/", "/Users/", "site-packages", '"output_type": "error"'):
        assert word not in text, word
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
