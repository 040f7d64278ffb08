"""Each notebook runs from its first cell to its last, and is committed as it was run.

`make test` runs them in a quick form, with fewer rounds, seeds and cases; `make check` as they are.
"""

import asyncio
import warnings

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from .conftest import ROOT

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# what the quick form replaces in the code
QUICK = {
    "compare": {
        "SEEDS = [0, 1, 2]": "SEEDS = [0]",
        '{"rounds": 10,': '{"rounds": 3, "train_examples": 100, "test_examples": 100, '
        '"num_clients": 5, "clients_per_round": 5,',
        "1000 if": "100 if",
        '"bootstrap_rounds": 3 if': '"bootstrap_rounds": 1 if',
        "ALPHAS = [0.1, 1.0, 10.0]": "ALPHAS = [0.1]",
        '("NTK-FL", "CP-NTK-FL", "FedAvg", "TCT")': '("NTK-FL", "FedAvg")',
    },
    "cp_ntk_fl": {
        "rounds=6,": "rounds=1, num_clients=4, clients_per_round=2, train_examples=100,",
        "arange(0, len(some), 2)": "arange(0, len(some), 10)",
        "RATES, SIZES = (0.1, 0.3, 1.0), (10, 20, 40, 64)": "RATES, SIZES = (0.5,), (10,)",
        "rounds=4,": "rounds=1, num_clients=4, clients_per_round=2, train_examples=100,",
        "seeds=(0, 1, 2)": "seeds=(0,)",
        "rounds=8,": "rounds=1, num_clients=4, clients_per_round=2, train_examples=100,",
        "means[[1, 2, 4, 8]]": "means[[1]]",
        "=20,\n": "=4,\n",
        "(0.01, 0.03, 0.1, 0.3, 1.0)": "(1.0,)",
        "rounds=3,": "rounds=1, train_examples=100, test_examples=100,",
        '"steps": "1000"': '"steps": "10"',
    },
    "fed_ensemble": {
        "num_rounds=200": "num_rounds=10",
        "rounds=30, learning_rate=0.1, local_epochs=20": "rounds=5, learning_rate=0.1",
        "np.linspace(-0.4, 1.4, 25)": "np.linspace(-0.4, 1.4, 4)",
    },
    "ntk_dfl": {
        "rounds=5,": "rounds=2,",
        "train_examples=800": "train_examples=120,\n    test_examples=100",
        "=12,\n": "=6,\n",
        "20,50,100,200": "20,50",
        'names = ("line", "ring", "erdos-renyi", "clustered", "complete")': 'names = ("ring",)',
        "rounds=2, out": "rounds=1, out",
    },
    "ntk_fl": {
        "steps = [10, 20, 50, 100, 200, 500, 1000, 2000]": "steps = [5, 10]",
        "rounds=5,": "rounds=2, train_examples=200,",
    },
    "tct": {
        "    rounds=16,": "    rounds=16,\n    train_examples=100,\n    test_examples=100,",
        "=10,\n": "=2,\n",
        "    local_epochs=2,\n    batch_size": "    local_epochs=1,\n    batch_size",
        '"num_features": 1000,': '"num_features": 200,',
        "rounds=12):": "rounds=3):",
        "epochs=20)": "epochs=2)",
        "SIZES = (100, 300, 1000, 3000)": "SIZES = (1000,)",
        "[1, 3, 10, 30, 100]": "[1, 3]",
        "(1, 2, 3, 6, 7)": "(0,) * 5",
        '(10, ":"), (100, "--"), (1000, "-")': '(10, ":"), (100, "--")',
    },
    "weighted_fedavg": {
        "train_examples=600": "train_examples=200",
        "rounds=12,": "rounds=2,\n    test_examples=100,",
        "local_epochs=5": "local_epochs=1",
        "round == 12": "round == 2",
        "[0.03, 0.1, 0.3, 1.0]": "[0.03]",
    },
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
    for old, new in QUICK[name].items() if quick else ():
        assert any(old in cell.source for cell in code), old
        for cell in code:
            cell.source = cell.source.replace(old, new)
    start = f"%reset -f\n%cd -q {tmp_path}\nimport matplotlib\nmatplotlib.rcdefaults()"
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
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_committed_outputs_are_small_and_speak_of_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 500_000
    for word in ("/home/", "/root/", "/Users/", "site-packages", '"output_type": "error"'):
        assert word not in text, word
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
