"""Several models as one set of named arrays: an ensemble strategy's state, message and result."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

A = TypeVar("A")
NAME = re.compile(r"model-(\d+)\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class EnsembleArrays(Generic[A]):
    """The arrays of K models (or whole records), which travel as ``model-<k>.<name>``."""

    models: tuple[dict[str, A], ...]

    @staticmethod
    def are_in(names: Iterable[str]) -> bool:
        """Whether names are those of several models."""
        matches = [NAME.fullmatch(name) for name in names]
        return bool(matches) and all(matches)

    def to_arrays(self) -> dict[str, A]:
        """Return all arrays by the names under which they travel."""
        return {
            f"model-{k}.{name}": array
            for k, model in enumerate(self.models)
            for name, array in model.items()
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, A]) -> Self:
        """Split what :meth:`to_arrays` returned, or an ArrayRecord of it."""
        models: dict[int, dict[str, A]] = {}
        for full, array in arrays.items():
            parts = NAME.fullmatch(full)
            if parts is None:
                raise ValueError(f"expected names such as model-0.weight, got {full!r}")
            models.setdefault(int(parts[1]), {})[parts[2]] = array
        if sorted(models) != list(range(len(models))) or not models:
            raise ValueError(f"expected the models 0, 1, ..., got {sorted(models)}")
        return cls(tuple(models[k] for k in range(len(models))))
