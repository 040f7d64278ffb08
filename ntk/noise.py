"""What a mechanism of differential privacy rests on, and what a run with it may therefore do.

Epsilon is of what a mechanism adds noise to, and of nothing else. So it says what it protects and
releases, and which options its derivation covers; all others are refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from .options import Declared, Part, parameters_of

# messages that a client answers which promises something of its training examples: training is
# the mechanism's own, evaluation is on examples for evaluation only, the others concern no example
ANSWERED = frozenset({"train", "evaluate", "query.partition", "query.keys"})

# options of strategies and clients that concern no value of a training example: who takes part,
# when, on what machine, and what is done with evaluations on other examples
HARMLESS = frozenset(
    {
        *("fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes"),
        *("min_available_nodes", "weighted_by_key", "arrayrecord_key", "configrecord_key"),
        *("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn", "min_completed", "max_examples"),
        *("query_timeout", "round_deadline", "key_server", "run", "schema", "seed", "network"),
        *("sampling", "evaluate_every"),
        *("device", "loss", "head"),
        *("model", "x", "y", "x_test", "y_test", "columns", "batch_size_eval", "projection"),
    }
)


class Noise(ABC):
    """A mechanism of differential privacy.

    Options of parts have a dot, as ``screening.rule``; a part's name stands for all of its options.
    """

    protects: ClassVar[str]  # what two neighbouring data sets differ in
    covers: ClassVar[frozenset[str]]  # options besides HARMLESS ones that may have any value
    needs: ClassVar[Mapping[str, tuple[Any, ...]]]  # values of options; others keep their defaults
    metrics: ClassVar[frozenset[str]]  # what a run may record of a round of training
    releases: ClassVar[tuple[str, ...]]  # what all that a run sends and writes tells of examples

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """How far neighbours are apart at most, in standard deviations of the noise (L2)."""

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta` of one release."""

    @classmethod
    def require_covered(
        cls,
        holder: Declared,
        *,
        harmless: Set[str] = HARMLESS,
        needs: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> None:
        """Refuse options of an object with values that the mechanism's derivation does not cover.

        `needs` are further conditions of the caller's.
        """
        conditions = {**cls.needs, **(needs or {})}
        for name, value, default in _values_of(holder, harmless | cls.covers):
            expected = conditions.get(name, (default,))
            if value not in expected:
                words = " or ".join(map(repr, expected))
                raise ValueError(
                    f"{name}: with noise only what its epsilon covers may be used; expected "
                    f"{words}, got {value!r}"
                )

    @classmethod
    def filtered(cls, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a round of training that may be released."""
        counts = ("replies-", "rejected-")  # of replies that break the protocol, or do not come
        return {k: v for k, v in metrics.items() if k in cls.metrics or k.startswith(counts)}


def _values_of(holder: Declared, free: Set[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of the options, and of optional parts, that are not free."""
    for name, declared in parameters_of(type(holder)).items():
        value = getattr(holder, name, declared.default)
        if name in free:
            continue
        if isinstance(declared, Part) and not declared.optional:
            inside = {other.removeprefix(f"{name}.") for other in free if "." in other}
            for below, *values in _values_of(value, inside):
                yield f"{name}.{below}", *values
        else:
            yield name, value, declared.default
