"""Docstrings as the reference shows them: roles become links, parameters stand one by one."""

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))  # where hooks.py is

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(~?)([\w.]+)`")
# "sparsity, bits : float, int" and what is said of them
TOGETHER = re.compile(r"^(\w+(?:, \w+)+)(?: : (.+))?\n((?:(?: {4}.*)?\n)*(?: {4}.*))", re.MULTILINE)
# 'loss : {"mse", "cross-entropy"}', which the annotation says in Python's words
CHOICES = re.compile(r"^(\w+) : \{.*\}$", re.MULTILINE)
HEADING = "\nParameters\n----------\n"
BRACKET = re.compile(r"(`[^`]*`)|<")
NO_TYPE = re.compile(r"optional|default|shapes? ")
ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")


class Docstrings(griffe.Extension):
    """Prepare docstrings for Markdown."""

    def __init__(self) -> None:
        super().__init__()
        from hooks import public_names

        self.public = {
            name: f"fedntk.{room}.{name}" for room in ROOMS for name in public_names(room)
        }

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of any module, class, function or attribute."""
        if isinstance(obj, griffe.Class):
            add_options(obj)
        if obj.docstring is not None:
            text = TOGETHER.sub(one_by_one, obj.docstring.value)
            text = CHOICES.sub(r"\1", text)
            obj.docstring.value = ROLE.sub(self._link, text)

    def _link(self, role: re.Match[str]) -> str:
        """Return a link to what is public, and code for all else."""
        short, path = role.groups()
        last = path.rpartition(".")[2]
        shown = last if short else path
        return f"[`{shown}`][{self.public[last]}]" if last in self.public else f"`{shown}`"


def add_options(obj: griffe.Class) -> None:
    """Give a class with options the constructor and the docstring that it has once it is made."""
    with warnings.catch_warnings(action="ignore"):  # other packages', about each other
        from fedntk.ntk.options import Declared, parameters_of

        kind = getattr(importlib.import_module(obj.module.path), obj.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Declared)):
        return
    said, heading, options = (kind.__doc__ or "").partition(HEADING)
    options = BRACKET.sub(lambda match: match[1] or "&lt;", options)  # such as <file>, no tag
    obj.docstring = griffe.Docstring(said + heading + options, parent=obj, parser="numpy")
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_only)]
    for name, parameter in inspect.signature(kind).parameters.items():
        declared = parameters_of(kind).get(name)
        default = declared.default_text if declared else ""
        place = griffe.ParameterKind(parameter.kind.description)
        parameters.append(griffe.Parameter(name, kind=place, default=default or None))
    init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=obj)
    obj.set_member("__init__", init)


def one_by_one(found: re.Match[str]) -> str:
    """Give each of several parameters that are described together its own type and default."""
    names, kinds, said = found[1].split(", "), found[2] or "", found[3].rstrip()
    each = kinds.split(", ")
    if len(each) != len(names) or any(map(NO_TYPE.match, each)):  # one type, of all of them
        each = [kinds] * len(names)
    heads = [f"{name} : {kind}" if kind else name for name, kind in zip(names, each, strict=True)]
    return "\n".join(f"{head}\n{said}" for head in heads)
