"""Names on the wire stand once, where clients and strategies both import them."""

import ast
import re
from collections.abc import Iterator

from ..conftest import ROOT

FLOWERS = {  # names of Flower's and torch's
    "arrays", "metrics", "config", "accuracy", "loss", "lr", "num-examples", "partition-id",
    "server-round", "numpy.ndarray", "train", "flwr", "cpu", "cuda",
}  # fmt: skip
# what a client replies with, which Agreement compares, and words that never travel
OTHERS = {
    "parcels", "prototypes", "bits", "sparsity", "sums", "examples", "step", "last", "weights",
    "fedntk", "inf", "none", "he",
}  # fmt: skip


def strings(room: str) -> set[str]:
    """All words in a room's code that are no docstrings, nor values of a Literal."""
    found = set[str]()
    for tree in trees(room):
        found |= {n.value for n in ast.walk(tree) if is_text(n)}
    return {text for text in found if re.fullmatch("[a-z]{2,}([.-][a-z]+)*", text)}


def literals() -> set[str]:
    """Values of all Literals, which the type checker compares."""
    nodes = (
        n for room in ("ntk", "clients", "strategies") for t in trees(room) for n in ast.walk(t)
    )
    typed = (n for n in nodes if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "Literal")
    return {n.value for part in typed for n in ast.walk(part.slice) if is_text(n)}


def trees(room: str) -> Iterator[ast.AST]:
    for path in sorted((ROOT / room).rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_name_of_a_record_or_a_configuration_key_stands_in_both_rooms():
    both = strings("clients") & strings("strategies")
    assert both - literals() - FLOWERS - OTHERS == set()
    assert both >= OTHERS  # the list has nothing that is not needed
