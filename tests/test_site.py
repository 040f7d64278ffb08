"""The site: what a strict build refuses, and what its hooks make of notebooks."""

import re
import shutil
import tomllib
from logging import WARNING
from types import SimpleNamespace

import docstrings
import hooks
import nbformat
import pytest
import yaml
from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from fedntk.simulations import Config

from .conftest import ROOT

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
    ],
)
def test_a_dead_link_or_a_foreign_file_is_a_warning(addition, warning, tmp_path, caplog):
    for name, text in SITE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + addition * (name == "index.html"))
    with caplog.at_level(WARNING):
        hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    assert caplog.messages == [warning] * bool(warning)


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


@pytest.mark.parametrize("room", docstrings.ROOMS)
def test_every_public_name_is_in_the_reference(room):
    page = (ROOT / "docs" / "api" / f"{room}.md").read_text(encoding="utf-8")
    (marker,) = hooks.MARKER.findall(page)
    shown = re.findall(rf"^::: fedntk\.{room}\.(\w+)$", hooks.FILLED[marker[0]](marker[1]), re.M)
    assert shown == __import__(f"fedntk.{room}", fromlist=["__all__"]).__all__


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
