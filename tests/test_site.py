"""The site: what a strict build refuses, and what its hooks make of notebooks."""

import os
import re
import shutil
import sys
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from logging import WARNING
from threading import Thread
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

import hooks
import nbformat
import pytest
import yaml
from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from selenium.webdriver.support.ui import WebDriverWait

from fedntk.simulations import Config

from .conftest import ROOT, output_of, requests_of, show

SITE = {
    "index.html": '<h1 id="top">x</h1><a href="a/b.html#there">1</a><a href="#top">2</a>'
    '<img src="p.png"><a href="https://flower.ai">3</a><link rel="stylesheet" href="s.css">',
    "a/b.html": '<p id="there"></p><a href="../index.html">1</a>',
    "p.png": "", "s.css": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("addition", "warning"),
    [
        ("", None),
        ('<a href="nowhere.html">', "index.html links to nowhere.html: no such file"),
        ('<a href="a/b.html#here">', "index.html links to a/b.html#here: no such anchor"),
        ('<script src="https://cdn.org/x.js">', "index.html loads https://cdn.org/x.js"),
        ('<a href="https:/flower.ai">', "index.html links to https:/flower.ai: no address"),
    ],
)
def test_a_dead_link_or_a_foreign_file_is_a_warning(addition, warning, tmp_path, caplog):
    """Links to other sites are listed."""
    for name, text in SITE.items():
        (tmp_path / "site" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "site" / name).write_text(text + addition * (name == "index.html"))
    with caplog.at_level(WARNING):
        hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path / "site")))
    assert caplog.messages == [warning] * bool(warning)
    assert "https://flower.ai\n" in (tmp_path / "site-links.txt").read_text()


ADDED = {
    "speed": "[n](../notebooks/tct.ipynb) [c](../ntk/evolution/solver.py) [f](../simulations)"
    " [a](nowhere.md) [b](settings.md#nowhere) [d](../ntk/nowhere.py)",
    "settings": "![e](../benchmarks/results/nowhere.png)",
}


def test_a_strict_build_leads_links_to_pages_pictures_and_the_repository(tmp_path, caplog):
    """It refuses none of the pages' links, and each dead one that is added; without reference."""
    docs, site = tmp_path / "docs", tmp_path / "site"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("api", "__pycache__"))
    for page in docs.rglob("*.md"):
        text = page.read_text(encoding="utf-8") + f"\n\n{ADDED.get(page.stem, '')}\n"
        page.write_text(re.sub(r"\[([^]]+)\]\([./]*api/[^)]+\)", r"\1", text), encoding="utf-8")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    settings |= {"docs_dir": str(docs), "site_dir": str(site), "plugins": []}
    settings["hooks"] = [str(ROOT / "docs" / "hooks.py")]
    del settings["nav"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    with pytest.raises(Abort):
        mkdocs_build(load_config(str(tmp_path / "mkdocs.yml"), strict=True))
    warned = [r.getMessage() for r in caplog.records if r.levelno == WARNING]
    assert [line for line in warned if "nowhere" not in line] == []
    for dead in ("nowhere.md", "settings.md#nowhere", "../ntk/nowhere.py", "nowhere.png"):
        assert any(dead in line for line in warned), dead
    page = (site / "speed.html").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Homepage"]
    assert 'href="notebooks/tct.html"' in page
    assert 'src="results/solver.png"' in page
    assert f'href="{repository}/blob/main/ntk/evolution/solver.py"' in page
    assert f'href="{repository}/tree/main/simulations"' in page


def test_every_setting_is_in_a_table_of_the_site():
    """Each key with its default, from the code."""
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md"))
    filled = "\n".join(hooks.FILLED[kind](name) for kind, name in hooks.MARKER.findall(pages))
    rows = filled.replace("<wbr>", "").lower().splitlines()
    for line in Config.describe():
        key, _, rest = line.partition(" = ")
        default = rest.split(":")[0].split(" (")[0].strip("'").lower()
        assert default in next(row for row in rows if row.startswith(f"| `{key}` |")), key


@pytest.mark.parametrize("path", sorted(hooks.NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_is_rendered_whole(path):
    """All code, all text, all pictures."""
    cells = nbformat.read(path, as_version=4).cells
    parts = dict(hooks.rendered(path))
    page = parts.pop(f"{path.stem}.md")
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert len(parts) == sum("image/png" in own.get("data", {}) for own in outputs) > 0
    assert all(content.startswith(b"\x89PNG") for content in parts.values())
    assert all(own.get("text", "").strip() in page for own in outputs)
    for cell in cells:
        if cell.cell_type == "code":
            assert cell.source in page


FIRST = {"my own data csv": "own-data", "learning rate": "methods/ntk_fl", "flwr run": "flower-app",
         "NTKFLClient": "api/clients"}  # fmt: skip
TALL = "document.querySelector('mfrac').getBoundingClientRect().height"
FOUND = "return document.querySelector('.md-search-result__item a')?.getAttribute('href')"


@pytest.mark.slow
def test_the_site_in_a_browser(chrome, tmp_path):
    """Searches find first what explains, a phone shows pages whole, and nothing is foreign."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    output_of(*build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        for query, page in FIRST.items():
            chrome.get(f"{home}/index.html?q={quote(query)}")
            found = WebDriverWait(chrome, 60).until(lambda browser: browser.execute_script(FOUND))
            assert urlsplit(found).path == f"/{page}.html"
        show(chrome, 400, "dark")
        for page in ("index", "settings", "own-data", "choosing", "methods/ntk_fl", "methods/tct"):
            chrome.get(f"{home}/{page}.html")
            assert chrome.execute_script("return document.documentElement.scrollWidth") <= 400
        assert chrome.execute_script("return " + TALL) > 20
        server.shutdown()
    assert [url for url in requests_of(chrome) if not url.startswith((home, "data:"))] == []
