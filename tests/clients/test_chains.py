"""What one must hold in mind to read a client: ancestors, names, `super()`, words on the wire."""

import ast
import inspect
import re

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
SHARED = (ModelClient, Declared, NumPyClient)  # the one class with two bases
# constructors, and what Flower's ClientApp does for other messages
SUPER = {
    "adapter.py": {"__init__", "__call__", "train", "evaluate", "query"},
    "base.py": {"__init__", "__post_init__"},
    "feature_store.py": {"__init__"},
    "weights.py": {"__init__"},
}


def nodes(*rooms, kind=ast.AST):
    """All nodes of a kind in the code of some rooms, with their files."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_has_at_most_three_classes_above_it_and_a_hundred_names(kind):
    above = [base for base in kind.__mro__[1:] if base.__module__.startswith("fedntk.")]
    assert len([base for base in above if base is not Declared]) <= 3
    assert all(len(base.__bases__) == 1 for base in (kind, *above) if base not in SHARED)
    if not inspect.isabstract(kind):
        client = kind(nn.Linear(4, 3), torch.ones(6, 4), torch.arange(6) % 3)
        assert len([name for name in dir(client) if not name.startswith("__")]) <= 100


def test_nothing_calls_super_but_what_is_listed():
    calls: dict[str, set[str]] = {}
    for path, function in nodes("clients", kind=ast.FunctionDef):
        names = [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
        if "super" in names and function.name not in ("lifespan", "register"):
            calls.setdefault(path.name, set()).add(function.name)
    assert calls == SUPER


def test_no_attribute_of_another_class_that_begins_with_an_underscore():
    """Private attributes are read by the class that sets them, on itself."""
    for path, kind in nodes("clients", kind=ast.ClassDef):
        parts = list(ast.walk(kind))
        private = [
            n for n in parts if isinstance(n, ast.Attribute) and n.attr[0] == "_" != n.attr[1]
        ]
        own = [n for n in private if ast.unparse(n.value) == "self"]
        made = {n.name for n in parts if isinstance(n, ast.FunctionDef)}
        made |= {n.attr for n in own if isinstance(n.ctx, ast.Store)}
        made |= {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign)}
        assert {n.attr for n in own} <= made, path


# ------------------------------------------------------------------ words on the wire

FLOWERS = {  # names of Flower's and torch's
    "arrays", "metrics", "config", "accuracy", "loss", "lr", "num-examples", "partition-id",
    "server-round", "numpy.ndarray", "train", "flwr", "cpu", "cuda",
}  # fmt: skip
# what a client replies with, which Agreement compares, and words that never travel
OTHERS = {"parcels", "bits", "sparsity", "sums", "step", "weights", "fedntk", "inf"}


def words(found):
    texts = {n.value for n in found if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {text for text in texts if re.fullmatch("[a-z]{2,}([.-][a-z]+)*", text)}


def test_no_name_of_a_record_or_a_configuration_key_stands_in_both_rooms():
    """Values of a Literal may, as the type checker compares them."""
    both = words(n for _, n in nodes("clients")) & words(n for _, n in nodes("strategies"))
    typed = (n for _, n in nodes("ntk", "clients", "strategies", kind=ast.Subscript))
    literals = [n.slice for n in typed if ast.unparse(n.value) == "Literal"]
    both -= words(part for literal in literals for part in ast.walk(literal))
    assert both - FLOWERS == OTHERS  # the list has nothing that is not needed
