"""What a case measures: cells, each with a value of every setting."""

import itertools
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def grid(**values: Iterable[Any]) -> list[Row]:
    """Return a cell for each combination of settings' values, the last of which changes first."""
    combinations = itertools.product(*values.values())
    return [dict(zip(values, combination, strict=True)) for combination in combinations]
