"""The attackers of attack.py, and the cells of what they measure."""

import itertools
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def grid(**values: Iterable[Any]) -> list[Row]:
    """Return a cell for each combination of settings' values, the last of which changes first."""
    combinations = itertools.product(*values.values())
    return [dict(zip(values, combination, strict=True)) for combination in combinations]
