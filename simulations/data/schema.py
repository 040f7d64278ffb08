"""Schemas of tables as files: read, and proposed from a table."""

import json
import math
import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from fedntk.ntk.predictors.schema import (
    MEAN,
    REFUSE,
    RESERVED,
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

FORMATS = (  # the order of day and month, where both are possible, is to be checked
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
    column: Column
    for name in frame.columns:
        cells = Cells(name, Ignored(), frame[name])
        texts = [t for t, gap in zip(cells.texts, cells.gaps, strict=True) if not gap]
        numbers = [*map(pointed, texts)]
        is_number = all(map(WITH_EXPONENT.fullmatch, numbers))
        words, num_gaps = sorted({*texts}), int(cells.gaps.sum())
        if name in targets and (is_number or len(words) > MOST_CATEGORIES):
            column, note = Target(), "numbers of classes, or real targets: see the setting task"
        elif name in targets:
            column, note = Target(categories=(*words,)), "check: are these all classes?"
        elif name == settings.client_column:
            column, note = Client(), "its values are the clients"
        elif words and is_number:
            column, note = _guess_number([*map(float, numbers)], has_gaps=num_gaps > 0)
        else:
            column, note = _guess(words, texts, has_gaps=num_gaps > 0)
        lines += [f"# {note}" + f"; {num_gaps} of {len(frame)} rows are gaps" * (num_gaps > 0)]
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _as_toml(name)
        lines += [f"[{key}]", *_as_lines(column), ""]
    text = "\n".join(lines)
    with naming(f"schema: {path}", ValueError):
        Schema.parse(tomllib.loads(text))
    return text


def _guess(words: list[str], texts: list[str], *, has_gaps: bool) -> tuple[Column, str]:
    """Return the likeliest kind of a column of words, and what is to be checked."""
    dates = [Date(format=form) for form in FORMATS]
    formats = [date.format for date in dates if all(map(math.isfinite, map(date.number, words)))]
    if words and formats:
        gap: Any = {"gap": MEAN, "indicator": True} if has_gaps else {}
        shown = ", or ".join(form or "ISO 8601" for form in formats)
        return Date(format=formats[0], **gap), f"check the form, and the century: {shown}"
    folded = {word.casefold(): word for word in words}
    limit = min(MOST_CATEGORIES, max(MOST_CODES, len(texts) / 2), len(texts) - 1)
    if words and len(words) <= limit and not RESERVED & {*words}:
        column = Category(
            categories=(*sorted(folded.values()),),
            gap="unknown" if has_gaps else REFUSE,
            any_case=len(folded) < len(words),
        )
        return column, "check: other tables may have more categories, which become zeros"
    if words and sum(map(len, map(str.split, texts))) >= 3 * len(texts):
        return Text(gap="" if has_gaps else REFUSE), "texts"
    return Ignored(), f"check: {len(words)} different words; names of rows, a text, a category?"


def _guess_number(values: list[float], *, has_gaps: bool) -> tuple[Column, str]:
    low, high, different = min(values), max(values), len({*values})
    width, is_whole = high - low, all(value.is_integer() for value in values)
    if is_whole and different == len(values) == width + 1 and different > MOST_CODES:
        return Ignored(), "check: it numbers the rows"
    ends: tuple[float, ...] = ()
    least, most = 0.0 if low >= 0 else low - width, high + width
    if width > 0 and max(most, -least) < 1e308:  # rounding makes none infinite
        digits = -math.floor(math.log10(width))
        ends = round(least, digits), round(most, digits)
    note = f"check unit and range: here {low:g} ... {high:g}"
    if is_whole and 2 < different <= MOST_CODES:
        note += f"; {different} different values: if they are codes, it is a category"
    gap = median(values) if has_gaps else REFUSE
    return Number(range=ends, gap=gap, indicator=has_gaps), note


def _as_lines(column: Column) -> list[str]:
    """Return the settings that are not defaults as lines of TOML."""
    lines = [f"kind = {_as_toml(column.kind)}"]
    for name, option in column.options().items():
        if (value := getattr(column, name)) != option.default:
            lines.append(f"{key_of(name)} = {_as_toml(value)}")
    return lines


def _as_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
