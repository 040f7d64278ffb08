"""Schemas of tables as files: read, and proposed from a table."""

import json
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from fedntk.ntk.predictors.schema import (
    MEAN,
    REFUSE,
    RESERVED,
    Boolean,
    Category,
    Cells,
    Client,
    Column,
    Date,
    Ignored,
    Number,
    Schema,
    Target,
    Text,
    plain_text,
)

from ..config.data import DatasetSettings
from ..config.settings import ConfigError, key_of
from ..errors import first_line, naming
from .files import WITH_EXPONENT, kind_of, read_tables, require_column, target_columns, with_point

PAIRS = ("no yes", "n y", "false true", "f t", "off on", "nein ja", "non oui", "absent present")
FORMATS = (
    *("", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d", "%Y.%m.%d"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%d.%m.%Y %H:%M", "%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M"),
)
MOST_CATEGORIES, MOST_CODES = 50, 10
HEAD = """\
# A guess by fedntk schema from {} rows: what to check is said above each column. Categories,
# ranges and numbers that fill gaps are of these rows, and all who get this file see them.
"""
UNNAMED = "# check: no column is the target; name it by --target, or give it that kind.\n"


def load_schema(path: str | Path) -> Schema:
    """Read a file of a table for each column; ConfigError says what does not fit."""
    place = Path(path).expanduser()
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"schema: {place} cannot be read: {first_line(error)}") from error
    with naming(f"schema: {place}", ValueError):
        return Schema.parse(tomllib.loads(text))


def columns_of(schema: Schema, target: str, client: str) -> tuple[str, str]:
    """Return the names of target and client column, which settings or the schema have."""
    target, client = plain_text(target), plain_text(client)
    targets, (first, *more) = ",".join(schema.named(Target)), schema.named(Client) or ("",)
    if more or (first and client not in ("", first)):
        names = ", ".join({*schema.named(Client), client} - {""})
        raise ConfigError(f"schema: expected one column of clients, got {names}")
    if targets and target not in (DatasetSettings.options()["target"].default, targets):
        raise ConfigError(f"target: expected {targets}, as in the schema, got {target}")
    target, client = targets or target, client or first
    beside = {"target": target_columns(target, schema.columns), "client-column": [client]}
    for key, columns in beside.items():
        if inputs := [
            name for name in columns if schema.columns.get(name, Ignored()).outputs(name)
        ]:
            cure = f"in the schema, give it the kind {key.removesuffix('-column')}"
            raise ConfigError(f"{key}: expected no column of inputs, got {inputs[0]}; {cure}")
    return target, client


def propose_schema(path: Path, settings: DatasetSettings) -> str:
    """Return a schema of a csv or parquet file as TOML, with what is to be checked in it.

    The columns of targets and clients are those of the settings, if the file has them.
    """
    kind = kind_of(path)
    if kind not in ("csv", "parquet") or not path.is_file():
        raise ConfigError(f"schema: expected a csv or parquet file, got {path.absolute()}")
    target, client = map(plain_text, (settings.target, settings.client_column))
    settings = replace(settings, target=target, client_column=client)
    frame = read_tables(kind, {"": path}, settings, Schema({}))[""].rename(columns=plain_text)
    targets = target_columns(settings.target, frame.columns)
    if settings.target == DatasetSettings.options()["target"].default:
        targets = [name for name in targets if name in frame.columns]
    for name in targets:
        require_column("target", name, frame.columns)
    if settings.client_column:
        require_column("client-column", settings.client_column, frame.columns)
    lines = [HEAD.format(len(frame)) + UNNAMED * (not targets)]
    pointed = partial(with_point, Number(), settings.decimal if kind == "csv" else "point")
    for name in frame.columns:
        cells = Cells(name, Ignored(), frame[name])
        if all(map(WITH_EXPONENT.fullmatch, map(pointed, _present(cells)))):
            cells.texts = [*map(pointed, cells.texts)]
        if name in targets:
            column, *notes = _guess_target(cells)
        elif name == settings.client_column:
            column, *notes = Client(), "its values are the clients"
        else:
            column, *notes = _guess(cells)
        notes += [f"{cells.gaps.sum()} of {len(frame)} rows are gaps"] * bool(cells.gaps.any())
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _as_toml(name)
        lines += [f"# {note}" for note in notes] + [f"[{key}]", *_as_lines(column), ""]
    text = "\n".join(lines)
    with naming(f"schema: {path}", ValueError):
        Schema.parse(tomllib.loads(text))
    return text


def _guess_target(cells: Cells) -> tuple[Column, str]:
    words = sorted({*_present(cells)})
    if all(map(WITH_EXPONENT.fullmatch, words)) or len(words) > MOST_CATEGORIES:
        return Target(), "numbers of classes, or real targets: see the setting task"
    return Target(categories=(*words,)), "check: are these all classes of all tables?"


def _present(cells: Cells) -> list[str]:
    return [text for text, gap in zip(cells.texts, cells.gaps, strict=True) if not gap]


def _guess(cells: Cells) -> Iterator[Any]:
    """Yield the likeliest kind of a column, and what is to be checked."""
    texts, has_gaps = _present(cells), bool(cells.gaps.any())
    words = sorted({*texts})
    folded = {word.casefold(): word for word in words}
    pair = [pair for pair in PAIRS if {*pair.split()} == {*folded}]
    formats = [form for form in FORMATS if _fits(Date(format=form), words)]
    unknown, empty = ("unknown", "") if has_gaps else (REFUSE, REFUSE)
    few = not RESERVED & {*words} and len(words) <= min(
        MOST_CATEGORIES, max(MOST_CODES, len(texts) / 2), len(texts) - 1
    )
    if not words:
        yield Ignored()
        yield "all cells are gaps"
    elif all(map(WITH_EXPONENT.fullmatch, words)):
        yield from _guess_number([*map(float, texts)], has_gaps=has_gaps)
    elif pair:
        yield Boolean(categories=tuple(folded[word] for word in pair[0].split()), gap=unknown)
    elif formats:
        yield Date(format=formats[0], gap=MEAN if has_gaps else REFUSE, indicator=has_gaps)
        if formats[0] and formats[1:]:
            yield f"check the order of day and month: {formats[1]} is also possible"
        if "%y" in formats[0]:
            yield "check the century: 69 is taken for 1969, and 68 for 2068"
    elif few:
        yield Category(categories=(*words,), gap=unknown)
        yield "check: other tables may have more categories, which become zeros"
        if len(folded) < len(words):
            yield "check: some differ only in capital letters; any-case = true makes them one"
    elif sum(map(len, map(str.split, texts))) >= 3 * len(texts):
        yield Text(gap=empty)
        yield f"texts of up to {max(map(len, texts))} characters"
    else:
        yield Ignored()
        yield f"check: {len(words)} different words; names of rows, or text, or a category?"


def _fits(date: Date, words: list[str]) -> bool:
    return all(math.isfinite(date.number(word)) for word in words)


def _guess_number(values: list[float], *, has_gaps: bool) -> Iterator[Any]:
    low, high, different = min(values), max(values), len({*values})
    width, is_whole = high - low, all(value.is_integer() for value in values)
    if is_whole and different == len(values) == width + 1 and different > MOST_CODES:
        yield Ignored()
        yield "check: it numbers the rows"
        return
    ends: tuple[float, ...] = ()
    least, most = 0.0 if low >= 0 else low - width, high + width
    if width > 0 and max(most, -least) < 1e308:  # rounding makes none infinite
        digits = -math.floor(math.log10(width))
        ends = round(least, digits), round(most, digits)
    yield Number(range=ends, gap=median(values) if has_gaps else REFUSE, indicator=has_gaps)
    yield f"check unit and range: here {low:g} ... {high:g}"
    if is_whole and 2 < different <= MOST_CODES:
        yield f"check: {different} different values; if they are codes, it is a category"


def _as_lines(column: Column) -> list[str]:
    """Return the settings that are not defaults as lines of TOML."""
    lines = [f"kind = {_as_toml(column.kind)}"]
    for name, option in column.options().items():
        if (value := getattr(column, name)) != option.default:
            lines.append(f"{key_of(name)} = {_as_toml(value)}")
    return lines


def _as_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
