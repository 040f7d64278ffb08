"""Every option of every public class: in its page of the reference, help, signature and editor."""

import dataclasses
import importlib
import inspect
import pydoc
import re
import sys
from html.parser import HTMLParser

import pytest
import yaml
from docstrings import ROOMS
from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config

from fedntk.ntk.options import Declared, Option, argument, option, parameters_of

from .conftest import ROOT, output_of

CLASSES = {
    f"{room}.{name}": kind
    for room in ROOMS
    for module in [importlib.import_module(f"fedntk.{room}")]
    for name in module.__all__
    if isinstance(kind := getattr(module, name), type) and issubclass(kind, Declared)
}


def entries(kind):
    """Option -> type, default ("" without one) and meaning, as people read them."""
    for name, one in parameters_of(kind).items():
        heading, meaning = one.document().split("\n")
        words, _, default = heading.removeprefix(f"{name} : ").partition(", default ")
        yield name, words, default, meaning.strip()


def test_an_entry_has_name_type_default_and_meaning():
    kinds = {"rate": (float, 0.5), "steps": (tuple[int, ...], (1, 2)), "model": (object, None)}
    said = [
        Option(name, kind, default, "what it is", {}, False, True, True).document()
        for name, (kind, default) in kinds.items()
    ]
    assert said[0] == "rate : float, default 0.5\n    What it is."
    assert said[1] == "steps : a sequence of int, default (1, 2)\n    What it is."
    assert said[2] == "model : object, default None\n    What it is."


@pytest.mark.parametrize("name", CLASSES)
def test_help_and_signature_have_every_option(name):
    kind = CLASSES[name]
    text = re.sub(r"^ \| ? ?", "", pydoc.render_doc(kind, renderer=pydoc.plaintext), flags=re.M)
    parameters = inspect.signature(kind).parameters
    assert " at 0x" not in text  # an address, which says nothing
    for own, words, default, meaning in entries(kind):
        entry = f"\n{own} : {words}{f', default {default}' if default else ''}\n    {meaning}\n"
        assert text.count(entry) == 1, own
        assert parameters[own].default == (
            parameters_of(kind)[own].default if default else inspect.Parameter.empty
        )


class Base(Declared):
    """Shared."""

    first: int = option("of the base", default=1)


def test_own_options_come_first_and_what_is_described_by_hand_once():
    class Own(Base):
        """One."""

        last: float = option("its own")

    class ByHand(Own):
        """Two.

        Parameters
        ----------
        model : object
            Said here.
        """

        model: object = argument("said elsewhere", default=None)

    assert Own.__doc__.index("last : float\n    Its own.") < Own.__doc__.index("first : int")
    assert Own.__doc__.count("Parameters\n---") == 1
    assert ByHand.__doc__.count("model :") == ByHand.__doc__.count("first :") == 1
    assert re.findall(r"(\w.*)\n-+\n", ByHand.__doc__) == ["Parameters", "Other Parameters"]


def test_a_constructor_written_by_hand_shows_the_options_that_it_takes():
    class Free(Base):
        """Any."""

        def __init__(self, place: str, *, first: int = 7, **more: object) -> None: ...

    class Last(Free):
        """More."""

        last: float = option("its own")

    assert str(inspect.signature(Last)) == (
        "(place: str, *, first: int = 7, last: float, **more: object) -> None"
    )


def test_mypy_knows_every_option(tmp_path):
    """And so does an editor whose checker knows dataclass transforms; Config takes any word."""
    static = {name: kind for name, kind in CLASSES.items() if not name.endswith(".Config")}
    lines = [f"import fedntk.{room}" for room in ROOMS]
    lines += [f"reveal_type(fedntk.{name}.__init__)" for name in static]
    (tmp_path / "shown.py").write_text("\n".join(lines) + "\n")
    mypy = (sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml")
    python = "{}.{}".format(*sys.version_info)  # NumPy's newest types are not for the oldest
    said = output_of(*mypy, "--python-version", python, tmp_path / "shown.py", cwd=ROOT)
    revealed = re.findall(r'Revealed type is "def \(self: [^,)]+(?:, (.*))?\)"', said)
    for kind, text in zip(static.values(), revealed, strict=True):
        for own, one in parameters_of(kind).items():
            given = one.default is dataclasses.MISSING
            assert re.search(rf"(^| ){own}: ((?! \w+: ).)+{'' if given else ' ='}(,|$)", text), own


class Text(HTMLParser):
    """The text of a page, by the class that it is under."""

    def __init__(self):
        super().__init__()
        self.parts, self.anchor = {}, ""

    def handle_starttag(self, tag, attrs):
        anchor = dict(attrs).get("id") or ""
        if tag == "h2" and anchor.startswith("fedntk."):
            self.anchor = anchor.removeprefix("fedntk.")

    def handle_data(self, data):
        self.parts[self.anchor] = self.parts.get(self.anchor, "") + data


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Class -> what its part of the reference says, from a build of these pages only."""
    docs = tmp_path_factory.mktemp("docs")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (python := settings["plugins"][1]["mkdocstrings"]["handlers"]["python"])
    python["paths"] = [str(ROOT)]
    python["options"]["extensions"] = [str(ROOT / "docs" / "docstrings.py")]
    (docs / "source").mkdir()
    for room in ROOMS:
        names = [name.partition(".")[2] for name in CLASSES if name.startswith(f"{room}.")]
        text = "\n\n".join(f"::: fedntk.{room}.{name}" for name in names)
        (docs / "source" / f"{room}.md").write_text(f"# {room}\n\n{text}\n")
    settings |= {"docs_dir": "source", "site_dir": "site", "hooks": [], "strict": False}
    del settings["nav"], settings["extra_css"]
    (docs / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    mkdocs_build(load_config(str(docs / "mkdocs.yml")))
    parser = Text()
    for room in ROOMS:
        parser.feed((docs / "site" / f"{room}.html").read_text(encoding="utf-8"))
    return {name: " ".join(text.split()) for name, text in parser.parts.items()}


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_has_every_option(name, pages):
    page = re.sub(r"[\s`']", "", pages[name])
    for own, words, default, meaning in entries(CLASSES[name]):
        kind = f"{own}({words},default:{default})" if default else f"{own}({words})"
        entry = f"{kind}\N{EN DASH}{meaning}"
        assert re.sub(r"[\s`']", "", entry) in page, own
