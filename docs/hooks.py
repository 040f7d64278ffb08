"""What the site is made of besides the pages: notebooks, pictures, tables of settings, names.

Pages link to files of the checkout by relative paths, as they would be followed in the checkout
itself; here these links become links of the site, or of the project's repository. After the build
every link and anchor of the finished pages is checked, and that no page loads anything from
elsewhere. Each fault is a warning, which a strict build refuses.
"""

import ast
import base64
import functools
import html
import io
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import latex2mathml.converter
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent))
import catalogue
import papers

if TYPE_CHECKING:  # slow to import
    from fedntk.simulations.config.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DOCS, NOTEBOOKS, RESULTS = ROOT / "docs", ROOT / "notebooks", ROOT / "benchmarks" / "results"
# pages that are kept elsewhere
SOURCES = {
    "index.md": ROOT / "README.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(^[ ]*(?:```|~~~).*?^[ ]*(?:```|~~~)[ ]*$|`[^`]+`)", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"^<!-- (settings|keys|names|file):[ ]*([\w. -]*?) -->$", re.MULTILINE)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$([,.;:)]*)", re.DOTALL)
# what the search finds first: pages that explain, before what they are made of
BOOSTS = {"api": 0.1, "notebooks": 0.3, "results": 0.3, "changelog.md": 0.1, "methods": 3}
logger = getLogger("mkdocs.hooks.fedntk")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the repository's address from where it stands, and add the baselines' pages."""
    for part in config.nav or []:
        if "Methods" in part:
            pages = [f"methods/{entry.stem}.md" for entry in catalogue.baselines()]
            part["Methods"] += [page for page in pages if page not in part["Methods"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = config.extra["repository"] = project["urls"]["Homepage"]
    # not repo_url: for one on GitHub each page would ask its API for the number of stars
    icon = "fontawesome/brands/github"
    config.extra["social"] = [{"icon": icon, "link": home, "name": "The source of fedntk"}]
    return config


# --------------------------------------------------------------------------- files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures of the results, the notebooks and the changelog."""
    for picture in sorted(RESULTS.glob("*.png")):
        name = f"results/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        for name, content in rendered(notebook):
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for name, figure in papers.pictures():
        picture = io.BytesIO()
        figure.savefig(picture)
        files.append(File.generated(config, f"papers/{name}", content=picture.getvalue()))
    for name, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def rendered(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield a notebook's page, and its pictures, as it was run."""
    parts, pictures = [], 0
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                name = f"{path.stem}_{pictures}.png"
                yield name, base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
                table = re.sub('border="[01]" class="dataframe"', "", table)  # have it as others
                lines = "".join(line.strip() for line in table.splitlines())
                parts.append(f'<div class="output">{lines}</div>')
            else:
                text = (output.get("text") or data.get("text/plain", "")).strip()
                parts.append(f"``` {{.text .output}}\n{text}\n```")
    yield f"{path.stem}.md", "\n\n".join(parts) + "\n"


def _mathml(formula: re.Match[str]) -> str:
    """Write a formula as MathML, which browsers show without a script; wide spaces end lines."""
    shown, display = (formula[1], "block") if formula[1] else (formula[2], "inline")
    parts = re.split(r"\\q?quad\b", shown) if display == "block" else [shown]
    lines = [latex2mathml.converter.convert(part.strip(), display=display) for part in parts]
    # in a span, or Markdown takes it for a block; with the comma after it, or that begins a line
    return f'<span class="formula">{"".join(lines)}{formula[3] or ""}</span>'


# --------------------------------------------------------------------------- pages


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the markers, show formulas, and have links lead to what the site has."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": BOOSTS.get(uri.partition("/")[0], 2)}
    page.meta["hide"] = ["navigation", "toc"] if uri == "index.md" else []
    markdown = MARKER.sub(lambda found: FILLED[found[1]](found[2]), markdown)
    source = SOURCES.get(uri, DOCS / uri)
    if uri.startswith("notebooks/"):
        source = NOTEBOOKS / Path(uri).name
    parts = CODE.split(markdown)  # text and code by turns
    for number in range(0, len(parts), 2):
        parts[number] = LINK.sub(
            lambda m: m[1] + _target(m[2], source, page.file, config, files) + m[3],
            FORMULA.sub(_mathml, parts[number]),
        )
    return "".join(parts)


def _target(link: str, source: Path, page: File, config: MkDocsConfig, files: Files) -> str:
    parts = urlsplit(link)
    if parts.scheme or not parts.path:
        return link
    if source.parent == NOTEBOOKS and files.get_file_from_path(f"notebooks/{parts.path}"):
        return link  # a picture of its own
    path = Path(os.path.normpath(source.parent / unquote(parts.path)))
    of_site = path.is_relative_to(DOCS) and path != DOCS
    drawn = of_site and files.get_file_from_path(path.relative_to(DOCS).as_posix())
    if not (path.exists() or drawn):
        logger.warning("%s links to %s, which does not exist", source.relative_to(ROOT), link)
        return link
    sources = {source: name for name, source in SOURCES.items()}
    if path in sources:
        uri = sources[path]
    elif of_site:
        uri = path.relative_to(DOCS).as_posix()
    elif path.parent == NOTEBOOKS and path.suffix == ".ipynb":
        uri = f"notebooks/{path.stem}.md"
    elif path.parent == RESULTS and path.suffix == ".png":
        uri = f"results/{path.name}"
    else:
        kind = "tree" if path.is_dir() else "blob"
        return f"{config.extra['repository']}/{kind}/main/{path.relative_to(ROOT).as_posix()}"
    relative = os.path.relpath(uri, Path(page.src_uri).parent.as_posix() or ".")
    return Path(relative).as_posix() + (f"#{parts.fragment}" if parts.fragment else "")


@functools.cache
def _settings(method: str) -> str:
    with warnings.catch_warnings(action="ignore"):  # other packages', about each other
        from fedntk.simulations.methods import own_methods

    kind = own_methods()[method].settings
    return _table(
        (home, name) for home in (kind, *kind.sections().values()) for name in home.names()
    )


def _keys(names: str) -> str:
    with warnings.catch_warnings(action="ignore"):
        from fedntk.simulations import Config

    return _table(Config().home_of(name) for name in names.split())


def _table(settings: "Iterable[tuple[type[Settings], str]]") -> str:
    """Return a table of settings; on a phone each row becomes a paragraph."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for kind, name in settings:
        field = kind.setting_of(name)
        choices = ", ".join(f"`{choice}`" for choice in kind.choices(name))
        plain = field.plain(field.default)
        default = str(plain).lower()
        if isinstance(plain, str):
            default = html.escape(f'"{plain}"').replace(",", ",<wbr>")
        default = f'<code class="whole">{default}</code>'
        meaning = html.escape(field.meaning, quote=False).replace("|", "&#124;")
        choices = f"<br>One of {choices}" if choices else ""
        lines.append(f"| `{kind.key(name)}` | {default} | {meaning}{choices} |")
    table = "\n".join(lines)
    return f'<div class="stacked" markdown>\n\n{table}\n\n</div>' if len(lines) > 2 else ""


def _names(room: str) -> str:
    """Return a reference to each public name of ``fedntk.<room>``, from its ``__all__``."""
    return "\n\n".join(f"::: fedntk.{room}.{name}" for name in public_names(room))


def _file(name: str) -> str:
    text = (DOCS / name).read_text(encoding="utf-8").rstrip()
    return f"```{Path(name).suffix.removeprefix('.')}\n{text}\n```"


def public_names(room: str) -> list[str]:
    """Return ``__all__`` of ``fedntk.<room>``, without importing it."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ValueError(f"{room}/__init__.py: expected __all__")


FILLED: dict[str, Callable[[str], str]] = {
    "settings": _settings, "keys": _keys, "names": _names, "file": _file,
}  # fmt: skip


# --------------------------------------------------------------------------- check


class _Links(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        address = named.get("href", "")
        if tag == "a" and "href" in named:
            self.links.append(address)
        if tag == "link" and address and named.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(address)
        if "src" in named:
            self.loaded.append(named["src"])


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of links and anchors that lead nowhere, and of what comes from other hosts.

    Where links leave the site is listed beside it, for `make outside`.
    """
    site, pages, outside = Path(config.site_dir), {}, set()
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the host's root
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme == "data":  # a picture of a notebook
                continue
            if parts.scheme or parts.netloc:
                outside.add(link)
                if parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
                    logger.warning("%s links to %s: no address", path.relative_to(site), link)
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path)))
            target = path if not parts.path else target
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                logger.warning("%s links to %s: no such file", path.relative_to(site), link)
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                logger.warning("%s links to %s: no such anchor", path.relative_to(site), link)
    for path, page in pages.items():
        for address in page.loaded:
            if urlsplit(address).netloc:
                logger.warning("%s loads %s", path.relative_to(site), address)
    listed = "".join(f"{link}\n" for link in sorted(outside))
    site.with_name(f"{site.name}-links.txt").write_text(listed, encoding="utf-8")
