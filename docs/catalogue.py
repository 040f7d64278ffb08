"""Lists of the methods, and of all settings.

Methods are listed from their rows, the files of their classes and the titles of their pages.

The docstring of a strategy's file begins "NAME: what is special.", and names the paper by a line
"Source: authors, *title*, venue and year". A family is a folder of strategies.
"""

import functools
import importlib
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

PAGES = Path(__file__).resolve().parent / "methods"
SOURCE = re.compile(r"^Source: ([^*]+), \*([^*]+)\*,?[^*]*?\b((?:19|20)\d\d)\b", re.MULTILINE)


class Entry(NamedTuple):
    """What is listed of a method; `family` is what its folder's methods share, "" for none."""

    stem: str
    title: str  # of its page
    special: str
    family: str
    paper: str  # authors, year and title; empty: none
    baseline: bool

    def link(self, folder: str = "methods") -> str:
        """Return a link to its page, which lies in a folder."""
        return f"[{self.title}]({folder}/{self.stem}.md)"


@functools.cache
def entries() -> list[Entry]:
    """Return all methods: those that are no baselines first, then families one after the other."""
    with warnings.catch_warnings(action="ignore"):  # other packages', about each other
        from fedntk.simulations.methods import own_methods

    found = []
    for name, method in own_methods().items():
        module = method.strategy_class.__module__
        package = module.rpartition(".")[0]
        docstring = importlib.import_module(module).__doc__ or ""
        family, home, _ = (importlib.import_module(package).__doc__ or "").partition(": the server")
        source = SOURCE.search(docstring)
        words = [" ".join(part.split()) for part in source.groups()] if source else []
        stem = name.replace("-", "_")
        entry = Entry(
            stem,
            title=(PAGES / f"{stem}.md").read_text(encoding="utf-8").partition("\n")[0].strip("# "),
            special=docstring.partition("\n")[0].partition(": ")[2].removesuffix("."),
            family=family if home else "",
            paper="{0} {2}, *{1}*".format(*words) if words else "",
            baseline=method.baseline,
        )
        found.append((method.baseline, package, entry))
    return [entry for *_, entry in sorted(found, key=lambda one: one[:2])]


def baselines() -> list[Entry]:
    """Return the methods to compare with."""
    return [entry for entry in entries() if entry.baseline]


def baseline_families() -> str:
    """Return a line for each family of baselines, with links from the checkout's root."""
    families: dict[str, list[str]] = {}
    for entry in baselines():
        families.setdefault(entry.family or "Baselines", []).append(entry.link("docs/methods"))
    return "\n".join(f"- {family}: {', '.join(links)}" for family, links in families.items())


def baseline_list() -> str:
    """Return a line for each baseline, with what is special."""
    return "\n".join(f"- {entry.link()}: {entry.special}" for entry in baselines())


def papers() -> str:
    """Return a line for each paper, with the methods that are from it."""
    methods: dict[str, list[str]] = {}
    for entry in entries():
        if entry.paper:
            methods.setdefault(entry.paper, []).append(entry.link())
    return "\n".join(f"- {paper}: {', '.join(links)}" for paper, links in methods.items())


def with_defaults(app: str) -> str:
    """Return the text of the Flower app's pyproject.toml with all settings at their defaults.

    A part that may be absent is itself a key, and so the keys of its settings are quoted.
    """
    from fedntk.simulations import Config

    values, config = Config.run_config_defaults(), dict[str, Any]()
    for key, value in values.items():
        home, name = config, key
        while "." in name and key[: -len(name)] + name.partition(".")[0] not in values:
            table, _, name = name.partition(".")
            home = home.setdefault(table, {})
        home[name] = value
    head = app.partition("[tool.flwr.app.config]\n")[0]
    return head + tomli_w.dumps({"tool": {"flwr": {"app": {"config": config}}}})
