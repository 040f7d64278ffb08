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
    train, test = digits(folder)
    return train.select(slice(250)), test.select(slice(60))
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
    "cp_ntk_fl": {'_digits.toml",': '_digits.toml", num_clients=10, clients_per_round=2,'},
    "fed_ensemble": {},
    "ntk_dfl": {
        "20,50,100,200": "20,50",
        "=12,": "=6,",
        "validation_examples=200": "validation_examples=50",
        r"\[0.03, 0.1, 0.3\]": "[0.3]",
        r"\[5, 20, 50\]": "[1]",
    },
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
    "pretrained": {
        "<= 140": "<= 80",
        "SHOPS = 10": "SHOPS = 4",
        r'    "(Dirichlet\(0.1\)|alike)": .*\n': "",
        r"range\(1, SHOPS\)": "range(1, 2)",
        r"range\(SHOPS\)": "range(2)",
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
    if not quick:
        # of training, other processors' last bits may move a few points, as TCT's notebook says
        assert without_output(name, notebook.cells, points=3.0) == []


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_committed_outputs_are_small_and_speak_of_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    for word in ("/home/", "/root/", "/Users/", "site-packages", '"output_type": "error"'):
        assert word not in text, word
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


# ------------------------------------------------------------------- figures in words

NUMBER = r"\d[\d,]*(?:\.\d+)?"
# one or several numbers and their unit: "83.3 to 94.4 %", "6.0 MB", "20"
FIGURES = re.compile(rf"(?<![\w.])({NUMBER}(?:(?: to | and | or |, ){NUMBER})*) ?(%|points?|MB)?")
# what is no figure: code, formulas, addresses, places in a paper, labels, years, numbered lists,
# and a digit that an image shows
NO_FIGURES = re.compile(
    r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|^\d+\. |\b(?:19|20)\d\d\b"
    r"|\b(?:sections?|figure|table|algorithm|eq\.|seed|round|client|p =) \d[\w.]*"
    r"|(?<![\w.,])\d(?![\w.,]*\d| ?(?:%|points?|MB|to))",
    re.IGNORECASE | re.MULTILINE,
)
# figures that neither an output nor the code has, and where they are from
ELSEWHERE = {
    ("compare", "300"): "validation examples in fed_be_digits.toml",
    ("compare", "95"): "the bootstrap's level, in statistics.py",
    ("cp_ntk_fl", "300"): "clients in the linked results",
    ("fed_ensemble", "90"): "the coverage of the call that follows, a choice",
    ("one_exchange", "60,000"): "training images of Fashion-MNIST",
    ("one_exchange", "5"): "in percent the level of the next call, ledger.alpha",
}


COUNTS = ("seconds", "seeds", "rounds", "pairs", "scores")  # columns that hold no accuracy


def figures_in(text):
    """Yield each figure of a text as it is written, with its unit."""
    for numbers, unit in FIGURES.findall(text):
        for number in re.findall(NUMBER, numbers):
            yield number.rstrip(","), unit.rstrip("s")


def values_of(cell):
    """Yield each number that a cell's outputs show, with its unit; in a table its column's."""
    for output in cell.get("outputs", []):
        page = re.sub(r"<(svg|style).*?</\1>|<img[^>]*>", "", shown_as(output), flags=re.DOTALL)
        head: list[str] = []
        for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL):
            texts = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            if "<td" not in row:
                head = head or texts
                continue
            for column, text in zip(head, texts, strict=True):
                units = (unit for unit in ("MB", "%", *COUNTS) if unit in column)
                unit = next(units, "")
                yield from ((number, unit) for number, _ in figures_in(text))
        if "<tr" not in page:
            yield from figures_in(page)


def shown_as(output):
    """Return the text of an output: what is printed, or a table in HTML, or plain."""
    data = output.get("data", {})
    return output.get("text") or data.get("text/html") or data.get("text/plain", "")


def without_output(name, cells, points=0.0):
    """Return the figures of the words that no output before them has.

    A figure is an output's value, rounded; a share may be in percent or points. Without a unit it
    may also be a setting, from the code. Percent and points may be some `points` off: training on
    another processor ends with other last bits, and bytes do not.
    """
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    settings = [float(number.replace(",", "")) for number, _ in figures_in(code)]
    values: dict[str, list[float]] = {"": [], "%": [], "MB": [], "count": settings}
    missing = []
    for cell in cells:
        if cell.cell_type == "code":
            for number, unit in values_of(cell):
                unit = {"point": "%", **dict.fromkeys(COUNTS, "count")}.get(unit, unit)
                values[unit].append(float(number.replace(",", "")))
            continue
        shares = [100 * value for value in values[""]]
        allowed = {
            "MB": values["MB"],
            "%": values["%"] + values[""] + shares,
            "point": shares,
            "": [value for some in values.values() for value in some],
        }
        for number, unit in figures_in(NO_FIGURES.sub(" ", cell.source)):
            decimals = len(number.partition(".")[2])
            off = 0.5 * 10**-decimals + 1e-9 + (points if unit in ("%", "point") else 0)
            wanted = float(number.replace(",", ""))
            if all(abs(value - wanted) > off for value in allowed[unit]):
                missing.append(f"{number} {unit}".strip())
    return [each for each in missing if (name, each.split()[0]) not in ELSEWHERE]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_figures_in_words_are_those_of_the_committed_outputs(name):
    """With what whole notebooks show when they run: see test_notebook_runs."""
    cells = nbformat.read(NOTEBOOKS[name], as_version=4).cells
    assert without_output(name, cells) == []


def test_a_figure_without_its_output_is_seen():
    """In another column, in another unit, after it, or rounded wrong; settings have no unit."""
    table = (
        "<tr><th>run</th><th>MB up</th><th>last (%)</th></tr>"
        "<tr><td>a</td><td>6.0</td><td>8.1 [7.5, 9]</td></tr>"
    )
    code = nbformat.v4.new_code_cell(
        "rounds = 20",
        outputs=[
            nbformat.v4.new_output("execute_result", {"text/html": table}),
            nbformat.v4.new_output("stream", text="lead: 0.204\n12.5 MB\n"),
        ],
    )

    def missing(words):
        before, after = (nbformat.v4.new_markdown_cell(text) for text in ("6.0 MB", words))
        return without_output("", [before, code, after])[1:]

    right = "6.0 and 12.5 MB; 8.1 %; 20.4 points; 20 rounds, `7.7`, section 4.2, in 2021; 20 %"
    assert missing(right) == []
    assert missing("6.1 MB; 8.1 MB; 6.0 %; 8.2 %; 20 MB; 20.5 points; 19 rounds") == [
        "6.1 MB", "8.1 MB", "6.0 %", "8.2 %", "20 MB", "20.5 point", "19",
    ]  # fmt: skip
    assert without_output("", [nbformat.v4.new_markdown_cell("6.0 MB"), code]) == ["6.0 MB"]
