"""Docstrings' references, such as :class:`~fedntk.ntk.Jacobian`, as links of the site."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))  # where hooks.py is

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(~?)([\w.]+)`")
ROOMS = ("ntk", "trust", "clients", "strategies", "simulations")


class SphinxRoles(griffe.Extension):
    """Turn roles into links where they name something public, else into code."""

    def __init__(self) -> None:
        super().__init__()
        from hooks import public_names

        self.public = {name: f"fedntk.{room}.{name}" for room in ROOMS for name in public_names(room)}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: D102
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(self._link, obj.docstring.value)

    def _link(self, role: re.Match[str]) -> str:
        short, path = role.groups()
        last = path.rpartition(".")[2]
        shown = last if short else path
        return f"[`{shown}`][{self.public[last]}]" if last in self.public else f"`{shown}`"
