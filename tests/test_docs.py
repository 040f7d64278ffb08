"""Every example runs and prints what it says; every link leads somewhere; no page lags behind."""

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import re
import sys
import tomllib
from collections import Counter
from urllib.parse import urlsplit

import pandas as pd
import papers
import pytest
import tables
import yaml
from typer.testing import CliRunner

from fedntk.simulations.cli import app

from .conftest import FILE, ROOT, output_of

ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = PROJECT["urls"]["Homepage"]
HOST = urlsplit(HOME).netloc + urlsplit(HOME).path
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(path):
    return path.read_text(encoding="utf-8")


MODULES = [
    info.name
    for room in ROOMS
    for info in pkgutil.walk_packages(
        importlib.import_module(f"fedntk.{room}").__path__, f"fedntk.{room}."
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


WITH_EXAMPLES = [page for page in PAGES if ">>> " in text_of(page)]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=str)
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    """On pages of one's own data also their files, and their commands where they stand."""
    monkeypatch.chdir(tmp_path)
    text = text_of(page)
    if page.name in ("own-data.md", "table-per-hospital.md"):
        for name, content in FILE.findall(text):
            (tmp_path / name).write_text(content)
        text = SHELL.sub(lambda found: f">>> command({found[1]!r})\n", text)

    def command(lines: str) -> None:
        for line in lines.splitlines():
            done = CliRunner().invoke(app, line.split()[1:], catch_exceptions=False)
            assert done.exit_code == 0, done.output

    examples = doctest.DocTestParser().get_doctest(text, {"command": command}, page.name, None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    assert result.attempted > result.failed == 0


def test_the_lines_of_the_readme_run_and_show_what_its_picture_shows(tmp_path, monkeypatch):
    """NTK-FL is ahead of FedAvg, both with settings from a search: by some seven points."""
    monkeypatch.chdir(tmp_path)
    (lines,) = re.findall(r"^```python\n(.*?)^```$", text_of(ROOT / "README.md"), re.M | re.S)
    names: dict[str, object] = {}
    exec(lines, names)  # noqa: S102 - our own page
    last = names["results"].summary().set_index("run")["iqm"]
    assert last["FedAvg"] + 0.05 < last["NTK-FL"] < last["FedAvg"] + 0.09


def test_pages_link_to_the_repository_by_relative_paths():
    """Each is followed in a strict build of the site: see test_site."""
    pages = [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("notebooks/*.ipynb")]
    assert [page for page in pages if HOST in text_of(page)] == []


def test_links_of_the_readme_are_absolute_in_the_package_index():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    links = [link for link in LINK.findall(setup.readme()) if HOST in link]
    assert len(links) > 15
    kinds = [re.match(rf"{HOME}/(blob|tree|raw)/main/(.+)", link).groups() for link in links]
    for kind, path in kinds:
        path = ROOT / path.partition("#")[0]
        assert path.is_dir() if kind == "tree" else path.is_file()
        assert (kind == "raw") == (path.suffix == ".png")


@pytest.mark.parametrize(
    "page", [p for p in (ROOT / "README.md", *PAGES) if "<!-- table:" in text_of(p)], ids=str
)
def test_tables_of_a_page_are_those_of_the_result_files_and_of_the_methods(page):
    """`make pages` writes them."""
    assert tables.filled(text_of(page)) == text_of(page)


def test_the_citation_file_cites_what_the_bibliography_has():
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert (citation["license"], citation["title"]) == (PROJECT["license"], PROJECT["name"])
    bibliography = text_of(ROOT / "docs" / "references.bib").replace("{", "").replace("}", "")
    entries = bibliography.split("\n@")
    assert len(entries) == 59
    titles = [re.search(r"title *= (.*),", entry)[1] for entry in entries]
    years = [re.search(r"year *= (\d+)", entry)[1] for entry in entries]
    assert [one["title"] for one in citation["references"] if one["title"] not in titles] == []
    page = text_of(ROOT / "docs" / "bibliography.md")
    cited = [f"{year}, *{title}*" for year, title in zip(years, titles, strict=True)]
    assert [entry for entry in cited if entry not in page] == []


HELD = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)` \| (\d+) \|")
PROMISES = HELD.findall(text_of(ROOT / "docs" / "promises.md"))


def test_each_promise_is_held_by_a_test_that_exists():
    assert len(PROMISES) > 20
    lost = [f"{path}::{n}" for path, n, _ in PROMISES if f"\ndef {n}(" not in text_of(ROOT / path)]
    assert lost == []


@pytest.mark.slow
def test_each_promise_has_as_many_cases_as_the_page_says():
    files = sorted({path for path, *_ in PROMISES})
    command = (sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", *files)
    cases = Counter(line.partition("[")[0] for line in output_of(*command, cwd=ROOT).splitlines())
    few = {n: cases[f"{path}::{n}"] for path, n, m in PROMISES if cases[f"{path}::{n}"] < int(m)}
    assert few == {}


def test_messages_on_the_page_of_mismatches_are_those_of_the_code():
    """Each has a text of the code between the values that are filled in."""
    page = text_of(ROOT / "docs" / "troubleshooting.md")
    said = re.findall(r"^- `([^`]+)`$", page, re.MULTILINE)
    assert len(said) > 15
    paths = [path for room in ("clients", "strategies") for path in (ROOT / room).rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(text_of(path))))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    parts = {part for text in texts for part in re.split(r"%[.\d]*[a-z]", str(text))}
    known = [part for part in parts if len(part) >= 18]
    assert [message for message in said if not any(part in message for part in known)] == []


def test_no_row_of_a_paper_loses_its_evidence():
    """A changed setting, a deleted file: `docs/papers.py` writes what was there before."""
    before = pd.read_csv(papers.EVIDENCE).set_index(["table", "form"]).cells
    now = papers.evidence().set_index(["table", "form"]).cells
    lost = before[now.reindex(before.index).fillna(0) < before]
    assert lost.empty, f"run these again, or restore them: {list(lost.index)}"
    assert now.equals(before), "run docs/papers.py, which writes down the new results"
