"""How much one must hold in mind to read a client: its ancestors, its names, and `super()`."""

import ast
import inspect

import pytest
import torch
from torch import nn

import fedntk.clients
from fedntk.clients import ModelClient
from fedntk.clients.core.numpy_client import NumPyClient
from fedntk.ntk.options import Declared

from ..conftest import ROOT

EXPORTS = [getattr(fedntk.clients, name) for name in fedntk.clients.__all__]
CLIENTS = [kind for kind in EXPORTS if inspect.isclass(kind) and issubclass(kind, ModelClient)]
# constructors, and what Flower's ClientApp does for other messages
SUPER = {
    "adapter.py": {"__init__", "__call__", "train", "evaluate", "query"},
    "base.py": {"__post_init__"},
    "feature_store.py": {"__init__"},
    "weights.py": {"__init__"},
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_has_at_most_three_classes_above_it_and_a_hundred_names(kind):
    above = [base for base in kind.__mro__[1:] if base.__module__.startswith("fedntk.")]
    assert len([base for base in above if base is not Declared]) <= 3
    assert all(len(base.__bases__) == 1 for base in (kind, *above) if base not in SHARED)
    if inspect.isabstract(kind):
        return
    client = kind(nn.Linear(4, 3), torch.ones(6, 4), torch.arange(6) % 3)
    assert len([name for name in dir(client) if not name.startswith("__")]) <= 100


SHARED = (ModelClient, Declared, NumPyClient)  # the one class with two bases


def test_nothing_calls_super_but_what_is_listed():
    calls: dict[str, set[str]] = {}
    for path in (ROOT / "clients").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
            if "super" in names and function.name not in ("lifespan", "register"):
                calls.setdefault(path.name, set()).add(function.name)
    assert calls == SUPER


def test_no_attribute_of_another_class_that_begins_with_an_underscore():
    """Private attributes are read by the class that sets them, on itself."""
    for path in (ROOT / "clients").rglob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(kind, ast.ClassDef):
                nodes = list(ast.walk(kind))
                used = {n.attr for n in nodes if isinstance(n, ast.Attribute) and is_private(n)}
                made = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
                made |= {n.attr for n in nodes if is_private(n) and isinstance(n.ctx, ast.Store)}
                made |= {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign)}
                assert used <= made, path


def is_private(node):
    """Whether a node is an attribute of `self` that begins with one underscore."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    is_own = is_own and node.value.id == "self"
    return is_own and node.attr.startswith("_") and not node.attr.startswith("__")
