"""What the columns of a table mean, and which numbers words, dates, texts and gaps become.

A schema is written down before a row is read, so a row becomes the same numbers wherever it lies.
Nothing in it is learned but a mean that fills gaps.
"""

import math
import numbers
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar, Self
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from ..options import Declared, nearest, option

MISSING = {"", "?", "na", "n/a", "nan", "null", "none", "<na>", "#n/a", "-", "."}  # in lower case
REFUSE, MEAN, ZEROS = "refuse", "mean", "zeros"  # what a gap or a new word may become
RESERVED = {"", REFUSE, MEAN, ZEROS}
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
OBJECT = "datetime "  # stands before the ISO 8601 text of a cell that is a date and not text
MOST_OUTPUTS = 100_000
CORRECT = "correct them, or the schema"
Mask = NDArray[np.bool_]
_PLAIN = (str, bytes, numbers.Number, np.bool_)


class Cells:
    """Cells (n,) of a column as text; which are gaps, bool (n,); and what is wrong with some."""

    def __init__(self, name: str, column: "Column", cells: Any) -> None:
        values = cells.to_numpy(dtype=object)
        self.name = name
        self.errors: list[str] = []
        self.doubts: list[str] = []
        self.texts = [plain_text(value) for value in values]
        self.are_empty: Mask = cells.isna().to_numpy()
        self.gaps = self.are_empty | self.are_among(filter(column.is_gap, {*self.texts}))
        plain = [isinstance(v, _PLAIN) or hasattr(v, "isoformat") for v in values]
        others = ~np.array(plain, bool) & ~self.are_empty
        self.refuse(others, "text, numbers or dates", "make each cell one of these")

    def are_among(self, texts: Iterable[str]) -> Mask:
        """Return which cells have one of some texts."""
        some = {*texts}
        return np.array([text in some for text in self.texts], bool)

    def describe(self, rows: Mask) -> str:
        """Return the first values of some rows, and how many more there are."""
        places = np.flatnonzero(rows).tolist()
        shown = ", ".join(f"{self.texts[i][:40]!r} in row {i + 1}" for i in places[:3])
        return shown + f" and {len(places) - 3} more" * (len(places) > 3)

    def refuse(self, rows: Mask, expected: str, cure: str) -> None:
        """Note that rows, if there are any, are not as expected."""
        if rows.any():
            got = self.describe(rows)
            self.errors.append(f"{self.name}: expected {expected}, got {got}; {cure}")


class Column(Declared, ABC, frozen=True, eq=True):
    """What one column holds; see :class:`Schema`."""

    kind: ClassVar[str]
    gaps: ClassVar = MISSING
    unit: str = option("unit of the values, or a note", default="")

    def is_gap(self, text: str) -> bool:
        """Whether a cell stands for a missing value."""
        return text.lower() in self.gaps

    def describe(self) -> str:
        """Say in a few words what the column holds."""
        return _join(self.kind, self.unit)

    def outputs(self, name: str) -> dict[str, str]:
        """Return name -> kind of the p columns of numbers that it becomes; none if no input."""
        return {}

    def encode(self, cells: Cells) -> NDArray[np.float64]:
        """Return the numbers (n, p), NaN where a mean is to fill a gap."""
        return np.zeros((len(cells.texts), 0))


class Ignored(Column, frozen=True, eq=True):
    """A column that is left out."""

    kind = "ignored"


class Client(Column, frozen=True, eq=True):
    """The column that says whose a row is."""

    kind = "client"


class Target(Column, frozen=True, eq=True):
    """A column of labels or of real targets."""

    kind = "target"
    categories: tuple[str, ...] = option("names of the classes, in order", default=())

    def check(self) -> None:
        """Refuse classes that are the same."""
        if len({*map(plain_text, self.categories)}) < len(self.categories):
            raise ValueError(f"categories: expected different words, got {[*self.categories]}")


class Input(Column, ABC, frozen=True, eq=True):
    """A column that becomes numbers."""

    missing: tuple[str, ...] = option(
        "values, as they are written, that stand for a gap besides empty cells and such as NA",
        default=(),
    )

    def is_gap(self, text: str) -> bool:  # noqa: D102
        return text in map(plain_text, self.missing) or super().is_gap(text)


class Measured(Input, ABC, frozen=True, eq=True):
    """A column that becomes one number, and perhaps an indicator of gaps."""

    gap: float | str = option("what fills a gap: a value, mean, or refuse", default=REFUSE)
    indicator: bool = option("one more column, 1 where there was a gap", default=False)

    @abstractmethod
    def number(self, text: str) -> float:
        """Return a cell's number; NaN if it has none."""

    @property
    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """The least and the largest possible number."""

    def is_gap(self, text: str) -> bool:  # noqa: D102
        return super().is_gap(text) or self.number(text) in self._sentinels

    @cached_property
    def _sentinels(self) -> set[float]:
        return {*map(self.number, self.missing)} - {math.nan}  # -9 is also -9.0

    @property
    def fill(self) -> float:
        """The number of a gap; NaN if it is refused, or a mean that is not known yet."""
        return self.gap if isinstance(self.gap, float) else self.number(self.gap)

    def outputs(self, name: str) -> dict[str, str]:  # noqa: D102
        return {name: "real"} | ({f"{name}=?": "0 or 1"} if self.indicator else {})

    def encode(self, cells: Cells) -> NDArray[np.float64]:  # noqa: D102
        numbers = {text: self.number(text) for text in {*cells.texts}}
        values = np.array([numbers[text] for text in cells.texts], float)
        low, high = self.bounds
        outside = ~cells.gaps & ~((values >= low) & (values <= high))
        cells.refuse(outside, self.describe(), CORRECT)
        values[cells.gaps] = self.fill
        return np.column_stack([values, cells.gaps] if self.indicator else [values])

    def check(self) -> None:
        """Refuse a range that is none, and a gap that becomes no number."""
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"range: expected least and largest value, got {low:g} and {high:g}")
        if self.gap not in (REFUSE, MEAN) and not low <= self.fill <= high:
            raise ValueError(f"gap: expected {self.describe()}, mean or refuse, got {self.gap!r}")


class Number(Measured, frozen=True, eq=True):
    """Numbers as they are."""

    kind = "number"
    range: tuple[float, ...] = option(
        "least and largest possible value, such as [0, inf]", default=(), at_most=math.inf
    )

    def number(self, text: str) -> float:  # noqa: D102
        try:
            value = math.nan if "_" in text else float(text)
            is_exact = not text.lstrip("+-").isdigit() or int(text) == value
        except ValueError:
            return math.nan
        return value if math.isfinite(value) and is_exact else math.nan

    @property
    def bounds(self) -> tuple[float, float]:  # noqa: D102
        return _pair(self.range)

    def describe(self) -> str:  # noqa: D102
        return _join(self.kind, " ... ".join(f"{value:g}" for value in self.range), self.unit)


class Date(Measured, frozen=True, eq=True):
    """Dates and times as days since 2000-01-01; those without a time zone are of UTC."""

    kind = "date"
    format: str = option(
        "form of a date, as of strptime, such as %d.%m.%Y; by default ISO 8601", default=""
    )
    range: tuple[str, ...] = option("first and last possible date, in that form", default=())

    def number(self, text: str) -> float:  # noqa: D102
        is_object = text.startswith(OBJECT)  # of a data frame, which has read the date
        try:
            if self.format and not is_object:
                date = datetime.strptime(text, self.format)
            else:
                date = datetime.fromisoformat(text.removeprefix(OBJECT))
        except (ValueError, re.error):
            return math.nan
        date = date.replace(tzinfo=UTC) if date.tzinfo is None else date
        return (date - EPOCH) / timedelta(days=1)

    @property
    def bounds(self) -> tuple[float, float]:  # noqa: D102
        return _pair([self.number(text) for text in self.range])

    def describe(self) -> str:  # noqa: D102
        form = self.format or "2000-01-31"
        return _join(self.kind, f"as {form}", " ... ".join(self.range), self.unit)

    def check(self) -> None:
        """Refuse a form that does not tell a year's first day."""
        date = datetime(2001, 1, 1, tzinfo=UTC)
        text = date.strftime(self.format)
        is_read = not text or self.number(text) == self.number(OBJECT + date.isoformat())
        if not is_read or "%Z" in self.format:  # names of time zones are not unique
            expected = "a form that tells a date, such as %d.%m.%Y, without %Z"
            raise ValueError(f"format: expected {expected}, got {self.format!r}")


class Category(Input, frozen=True, eq=True):
    """One of several words, each of which becomes a column of 0 and 1."""

    kind = "category"
    categories: tuple[str, ...] = option("the words, as they are written", default=())
    gap: str = option("category of a gap, which may be a new one, or refuse", default=REFUSE)
    unseen: str = option(
        "what another word becomes: zeros, a category, which may be a new one, or refuse",
        default=ZEROS,
    )
    reference: str = option(
        "category without a column, with which coefficients compare the others", default=""
    )
    any_case: bool = option("capital letters play no part", default=False)

    @property
    def words(self) -> dict[str, str]:
        """The words by how they are compared."""
        more = sorted({self.gap, self.unseen} - {REFUSE, ZEROS})
        words = dict[str, str]()
        for word in map(plain_text, (*self.categories, *more)):
            words.setdefault(self.compared(word), word)
        return words

    def is_gap(self, text: str) -> bool:  # noqa: D102
        return super().is_gap(text) and self.compared(text) not in self.words

    def compared(self, text: str) -> str:
        """Return a cell as it is compared with words."""
        return text.casefold() if self.any_case else text

    @property
    def columns(self) -> list[str]:
        """The categories that have a column."""
        reference = plain_text(self.reference)
        return [word for word in self.words.values() if word != reference]

    def outputs(self, name: str) -> dict[str, str]:  # noqa: D102
        return {f"{name}={word}": "0 or 1" for word in self.columns}

    def describe(self) -> str:  # noqa: D102
        return _join(self.kind, ", ".join(self.categories), self.unit)

    def encode(self, cells: Cells) -> NDArray[np.float64]:  # noqa: D102
        words = self.words
        number = Number().number
        values, folded = {*map(number, words)} - {math.nan}, {word.casefold() for word in words}
        unknown = {text for text in {*cells.texts} if self.compared(text) not in words}
        alike = {t for t in unknown if number(t) in values or t.casefold() in folded}
        misread = ~cells.gaps & cells.are_among(alike)  # 1.0 or 001 for 1, a for A
        cure = "write it as the schema does, read it as text (dtype=str), or set any-case"
        cells.refuse(misread, self.describe(), cure)
        others = ~cells.gaps & cells.are_among(unknown - alike)
        if self.unseen == REFUSE:
            cells.refuse(others, self.describe(), CORRECT)
        elif others.any():
            cells.doubts.append(f"{cells.name}: {cells.describe(others)}: taken for {self.unseen}")
        if cells.are_empty.any() and any(word.lower() in MISSING for word in self.categories):
            shown = cells.describe(cells.are_empty)
            cure = "pandas reads such words so without keep_default_na=False"
            cells.doubts.append(f"{cells.name}: {shown}: taken for gaps; {cure}")
        place = {word: i for i, word in enumerate(self.columns)}
        gap, unseen = (words.get(self.compared(plain_text(w)), "") for w in (self.gap, self.unseen))
        named = {text: words.get(self.compared(text), unseen) for text in {*cells.texts}}
        pairs = zip(cells.texts, cells.gaps, strict=True)
        chosen = [gap if is_gap else named[text] for text, is_gap in pairs]
        positions = np.array([place.get(word, -1) for word in chosen], int)
        return np.asarray(positions[:, None] == np.arange(len(place)), np.float64)

    def check(self) -> None:
        """Refuse categories that are the same or reserved, and a reference that is none of them."""
        words = {plain_text(word) for word in self.categories}
        if not words or len({*map(self.compared, words)}) < len(self.categories):
            raise ValueError(f"categories: expected different words, got {[*self.categories]}")
        if some := RESERVED & (words | ({plain_text(self.gap), self.unseen} - {REFUSE, ZEROS})):
            got = ", ".join(map(repr, some))
            raise ValueError(f"categories: expected words that are no keywords, got {got}")
        if self.reference not in ("", *self.categories):
            raise ValueError(f"reference: expected {self.describe()}, got {self.reference!r}")


class Text(Input, frozen=True, eq=True):
    """Text, as counts of its words and pairs of words in columns that a hash chooses, of norm 1.

    No vocabulary is learned; scikit-learn's ``HashingVectorizer`` does it.
    """

    kind = "text"
    gaps = {""}  # noqa: RUF012
    gap: str = option("text that stands for a gap, or refuse", default=REFUSE)
    features: int = option("number of columns", default=64, at_least=1, at_most=2**16)

    def outputs(self, name: str) -> dict[str, str]:  # noqa: D102
        return {f"{name}#{i}": "text" for i in range(self.features)}

    def encode(self, cells: Cells) -> NDArray[np.float64]:  # noqa: D102
        try:
            from sklearn.feature_extraction.text import HashingVectorizer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{cells.name}: columns of text need scikit-learn; install it with pip install "
                "scikit-learn, or fedntk with the extra simulation",
                name=error.name,
            ) from error
        pairs = zip(cells.texts, cells.gaps, strict=True)
        texts = [self.gap if gap else text for text, gap in pairs]
        if not texts:  # which it refuses
            return np.zeros((0, self.features))
        hashed = HashingVectorizer(n_features=self.features, ngram_range=(1, 2)).transform(texts)
        return np.asarray(hashed.toarray(), np.float64)


KINDS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (Number, Category, Date, Text, Target, Client, Ignored)
}


@dataclass(frozen=True)
class Schema:
    """The columns of a table by name, in the order in which their numbers follow each other.

    Examples
    --------
    >>> schema = Schema.parse({
    ...     "age": {"kind": "number", "range": [0, 120], "gap": 50.0, "indicator": True},
    ...     "smoker": {"kind": "category", "categories": ["no", "yes"]},
    ... })
    >>> schema.outputs
    {'age': 'real', 'age=?': '0 or 1', 'smoker=no': '0 or 1', 'smoker=yes': '0 or 1'}
    """

    columns: Mapping[str, Column]

    @classmethod
    def parse(cls, tables: Mapping[str, Any]) -> Self:
        """Read it from a table of settings for each column; ValueError says what does not fit."""
        if not isinstance(tables, Mapping):
            raise ValueError(f"expected a table for each column, got {type(tables).__name__}")
        columns, number = dict[str, Column](), 0
        for name, table in zip(map(plain_text, tables), tables.values(), strict=True):
            if name in columns:
                raise ValueError(f"expected columns of different names, got twice {name}")
            settings = table.items() if isinstance(table, Mapping) else ()
            table = {key.replace("-", "_"): value for key, value in settings}
            word = str(table.pop("kind", "nothing"))
            if word not in KINDS:
                raise ValueError(f"[{name}] kind: expected {', '.join(KINDS)}, got {word}")
            keys = KINDS[word].options()
            if unknown := [key for key in table if key not in keys]:
                meant = nearest(unknown[0], keys) or f"; it may have {', '.join(keys)}"
                raise ValueError(f"[{name}]: a {word} has no {unknown[0]!r}{meant}")
            try:
                columns[name] = KINDS[word](**table)
            except ValueError as error:
                raise ValueError(f"[{name}] {error}") from None
            number += len(columns[name].outputs(name))
            if number > MOST_OUTPUTS:
                raise ValueError(f"[{name}] expected at most {MOST_OUTPUTS} numbers in all")
        schema = cls(columns)
        if not number or len(schema.outputs) < number:
            got = f"{number} names, {len(schema.outputs)} of them different"
            raise ValueError(
                f"expected columns of inputs whose numbers have their own names, got {got}"
            )
        return schema

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """What :meth:`parse` reads, as JSON holds it."""
        return {n: {"kind": c.kind, **c.compared_options()} for n, c in self.columns.items()}

    @property
    def outputs(self) -> dict[str, str]:
        """Name -> kind of each of the p columns of numbers, such as ``smoker=yes``."""
        return {k: v for name, c in self.columns.items() for k, v in c.outputs(name).items()}

    def named(self, kind: type[Column]) -> tuple[str, ...]:
        """Return the names of the columns of a kind."""
        return tuple(name for name, column in self.columns.items() if isinstance(column, kind))

    def encode(
        self, frame: Any, warn: Callable[[str], object] = warnings.warn
    ) -> NDArray[np.float64]:
        """Return the numbers (n, p) of a data frame's rows, with NaN where a mean is to be filled.

        Other columns are not looked at. ValueError has a line for all that does not fit: column,
        first rows, counted from 1, what was expected, what came, and what to do. Categories that
        the schema lacks, but accepts, are said by `warn`.
        """
        frame = frame.rename(columns=plain_text)
        inputs = {name: c for name, c in self.columns.items() if c.outputs(name)}
        if missing := ", ".join(name for name in inputs if name not in frame.columns):
            raise ValueError(
                f"expected the columns {', '.join(inputs)}; missing: {missing}; a column of empty "
                "cells stands for values that nobody knows"
            )
        if twice := ", ".join(frame.columns[frame.columns.duplicated()]):
            raise ValueError(f"expected columns of different names, got twice {twice}")
        blocks, errors, doubts = [], list[str](), list[str]()
        for name, column in inputs.items():
            cells = Cells(name, column, frame[name])
            if getattr(column, "gap", "") == REFUSE:
                cure = "fill them, leave these rows out, or say in the schema what a gap becomes"
                cells.refuse(cells.gaps, "a value in each row", cure)
            blocks.append(column.encode(cells))
            errors += cells.errors
            doubts += cells.doubts
        if errors:
            raise ValueError("\n".join(["the rows do not fit the schema", *errors]))
        for doubt in doubts:
            warn(doubt)
        return np.hstack(blocks)

    def fit(self, x: NDArray[np.float64]) -> Self:
        """Return the schema with the means of examples x (n, p), as encoded, that fill gaps.

        A mean is rounded once, so it is the same for all orders of the rows.
        """
        columns, start = dict(self.columns), 0
        for name, column in self.columns.items():
            if isinstance(column, Measured) and column.gap == MEAN:
                values = x[~np.isnan(x[:, start]), start].tolist()
                if not values:
                    raise ValueError(f"{name}: expected values for gap = mean, got only gaps")
                mean = math.fsum(values) / len(values)  # which rounding may move out of the range
                columns[name] = column.copy(gap=min(max(mean, min(values)), max(values)))
            start += len(column.outputs(name))
        return type(self)(columns)

    def fill(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return encoded examples (n, p) with each gap's number in place of NaN."""
        fills = [
            column.fill if isinstance(column, Measured) and output == name else math.nan
            for name, column in self.columns.items()
            for output in column.outputs(name)
        ]
        return np.where(np.isnan(x), fills, x)


def plain_text(value: Any) -> str:
    """Return a cell as text without blanks around it.

    A whole number has no point, as a data frame with gaps has 1.0 for 1; a date begins with
    `OBJECT`.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8")
    if hasattr(value, "isoformat"):
        return OBJECT + str(value.isoformat())
    return normalize("NFC", str(value)).strip()


def _join(*words: str) -> str:
    return " ".join(filter(None, words))


def _pair(limits: Sequence[float]) -> tuple[float, float]:
    """Return least and largest value, which may be none."""
    low, high = limits if len(limits) == 2 else (-math.inf, math.inf) if not limits else (1, 0)
    return low, high
