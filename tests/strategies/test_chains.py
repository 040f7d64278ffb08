"""How much one must hold in mind to read a strategy: its ancestors, its names, and `super()`."""

import ast
import inspect

import pytest
from flwr.serverapp.strategy import Strategy as FlowerStrategy

import fedntk.strategies
from fedntk.ntk.options import Declared
from fedntk.strategies import Strategy

from ..conftest import ROOT
from .test_contract import RICHEST, STRATEGIES

EXPORTS = [getattr(fedntk.strategies, name) for name in fedntk.strategies.__all__]
KINDS = [kind for kind in EXPORTS if inspect.isclass(kind) and issubclass(kind, Strategy)]
FILES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "strategies").rglob("*.py"))
}
SUPER = {
    "closed_form/deep_afl.py": {"task"},
    "closed_form/one_exchange.py": {"load_state_dict", "evaluates_in"},
    "core/strategy.py": {"__post_init__"},
    "ensembles/distillation.py": {"__post_init__"},
    "gossip/topology.py": {"__post_init__"},
    "tct/tct.py": {"require_nested"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_has_at_most_three_classes_above_it_and_no_mixin(kind):
    """A second base only declares options that clients read as well, of a room below."""
    above = [base for base in kind.__mro__[1:] if base.__module__.startswith("fedntk.")]
    assert len([base for base in above if base is not Declared]) <= 3
    for base in (kind, *above):
        *others, last = base.__bases__
        assert base is Strategy or issubclass(last, Strategy | Declared) or not others
        for other in others if base is not Strategy else ():
            assert issubclass(other, Declared), other
            assert other.__module__.startswith("fedntk.ntk."), other


@pytest.mark.parametrize("name", sorted(RICHEST))
def test_a_strategy_has_at_most_a_hundred_names(name):
    """Beside those of Flower's strategies and of whatever declares options."""
    shared = {*dir(Declared), *dir(FlowerStrategy)}
    names = [n for n in dir(STRATEGIES[name][0]()) if not n.startswith("_") and n not in shared]
    assert len(names) <= 100


def test_nothing_calls_super_but_what_is_listed():
    calls: dict[str, set[str]] = {}
    for path, tree in FILES.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                names = [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
                if "super" in names:
                    where = path.relative_to(ROOT / "strategies").as_posix()
                    calls.setdefault(where, set()).add(function.name)
    assert calls == SUPER


def test_no_attribute_of_another_class_begins_with_an_underscore():
    for path, tree in FILES.items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        inside = {part for kind in classes for part in private_attributes(kind)}
        assert private_attributes(tree) == list(
            filter(inside.__contains__, private_attributes(tree))
        )
        for kind in classes:
            nodes = list(ast.walk(kind))
            made = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            made |= {n.attr for n in private_attributes(kind) if isinstance(n.ctx, ast.Store)}
            for node in private_attributes(kind):
                assert node.attr in made, f"{path}:{node.lineno}: {ast.unparse(node)}"


def private_attributes(tree):
    """List attributes that begin with one underscore, but for a named tuple's."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr != "_replace"
    ]
