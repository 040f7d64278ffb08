"""Every example in a docstring and on a page runs and prints what it says."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

from .conftest import ROOT

ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")


def modules() -> list[str]:
    names = []
    for room in ROOMS:
        package = importlib.import_module(f"fedntk.{room}")
        prefix = f"fedntk.{room}."
        names += [info.name for info in pkgutil.walk_packages(package.__path__, prefix)]
    return names


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module: ModuleType = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", ["README.md", "PRIVACY.md"])
def test_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_exist():
    """The check above would pass on modules without any."""
    finder = doctest.DocTestFinder()
    with_examples = [
        name
        for name in modules()
        if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]
    assert len(with_examples) >= 6, with_examples
