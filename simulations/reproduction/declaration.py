"""What a table or figure of a paper needs to be made again: one TOML file, `Declaration`.

``tables/<paper>/<table>.toml`` has the declarations that come with fedntk, each with its results,
if there are any, in a Parquet file beside it. ``docs/reproduce.md`` describes the keys.
"""

import hashlib
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config.importing import whole_name
from ..config.settings import nearest
from ..errors import ConfigError
from .measures import COSTS, Measure

TABLES = Path(__file__).parents[1] / "tables"
Form = Literal["paper", "smaller", "small"]  # its size in the paper, one that we ran, and a check's
FORMS: tuple[Form, ...] = get_args(Form)
Settings = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )


class Search(_Part):
    """How settings of a cell are chosen, on validation examples: see `simulations.tune`."""

    grid: dict[str, list[Any]]
    settings: Settings = {}
    seeds: list[int] = [0]
    metric: str = "accuracy"
    last: int = 5

    @property
    def trials(self) -> int:
        """Number of combinations."""
        return len(list(itertools.product(*self.grid.values())))


class Line(_Part):
    """A row or a column: its name in the table, and what it sets."""

    label: str = ""
    settings: Settings = {}
    search: dict[str, list[Any]] | None = None  # a grid of as many trials as the table's
    search_settings: Settings = {}  # while the search runs
    searched: bool = True
    note: str = ""
    missing: str = ""  # why it is not run: what fedntk lacks
    x: float | None = None  # place on a figure's axis
    columns: list[str] = ["*"]  # of a row: where it is run
    needs: list[str] = []  # of a row: what it needs beyond weights that travel


class FormOf(_Part):
    """What differs from the paper's size."""

    why: str = ""
    settings: Settings = {}
    rows: list[str] = ["*"]
    columns: list[str] = ["*"]
    seeds: list[int] | None = None
    row_settings: dict[str, Settings] = {}
    column_settings: dict[str, Settings] = {}
    search: Settings = {}  # of the search's settings


class Picture(_Part):
    """What is drawn: a measure by round, by the columns' x, or against another; bars; deciles.

    ``"plane"`` draws a square grid from `low` to `high`, row by row, and marks (0, 0), (1, 0) and
    (0, 1). By round, and with deciles, each column has a panel; `panels` names others.
    """

    measure: str | list[str]  # each of several has a panel
    rows: list[str] = ["*"]
    also: list[str] = []  # measures beside it
    panels: dict[str, list[str]] = {}  # title -> patterns of cells, "row/column"
    against: str | list[str] = ""  # with x = "measure": that axis; each of several has panels
    x: Literal["round", "column", "bars", "measure", "deciles", "plane"] = "round"
    x_label: str = "communication round"
    y_label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def measures(self) -> list[str]:
        """Return the names of all measures that are drawn."""
        names = [*listed(self.measure), *self.also, *listed(self.against)]
        return [name for name in names if name]

    def draws(self, row: str) -> bool:
        """Say whether a row is drawn."""
        return _is_one_of(row, self.rows)


class Declaration(_Part):
    """A table or a figure of a paper. ConfigError if the file is not a declaration."""

    name: str
    folder: Path
    title: str
    source: str
    text: str = ""  # where ours differs from the paper, and what the paper shows
    elsewhere: str = ""  # page of the documentation that has it measured in another way
    hours: float | None = None  # of one core, at the paper's size: an estimate
    seeds: list[int] = [0, 1, 2]
    settings: Settings = {}
    program: str = ""  # <file>.py:<function> in place of runs
    rows: Annotated[dict[str, Line], Field(min_length=1)]
    columns: dict[str, Line] = {"": Line()}
    cells: dict[str, Settings] = {}  # "row/column" -> settings
    search: Search | None = None
    measures: Annotated[dict[str, Measure], Field(min_length=1)]
    paper: dict[str, dict[str, list[float | str] | float | str]] = {}  # measure -> row -> figures
    beyond: dict[str, list[str]] = {}  # why -> cells that do not fit one machine
    nudged: list[str] = []  # measures also read from a run whose first weights' last bits differ
    figure: Picture | None = None
    smaller: FormOf | None = None
    small: FormOf

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = {f"{row}/{column}" for row in self.rows for column in self.columns}
        for pattern in (*self.cells, *itertools.chain(*self.beyond.values())):
            if not any(fnmatch(place, pattern) for place in places):
                raise ValueError(f"expected a cell row/column, got {pattern!r}")
        for measure, rows in self.paper.items():
            _require(measure, self.measures, "a measure")
            for row, figures in rows.items():
                _require(row, self.rows, "a row")
                if len(listed(figures)) != len(self.columns):
                    raise ValueError(f"paper: expected a figure for each column in {row}")
        for measure in (*self.nudged, *(self.figure.measures if self.figure else ())):
            _require(measure, self.measures, "a measure")
        for name in self.nudged:
            one = self.measures[name]
            several = one.at in ("curve", "cumulative", "clients", "rounds") or one.function
            if several or name in (*COSTS, "rounds run") or self.program:
                raise ValueError(f"nudged: expected measures of a whole run, got {name!r}")
        for name, line in {**self.rows, **self.columns}.items():
            trials = Search(grid=line.search).trials if line.search else 0
            if trials and (self.search is None or trials != self.search.trials):
                raise ValueError(f"{name}: expected a search of as many trials as the table's")
            if not line.searched and not line.note:
                raise ValueError(f"{name}: expected a note that says why nothing is searched")
        return self

    @classmethod
    def load(cls, name: str) -> Self:
        """Read a declaration that comes with fedntk, by its name, or a TOML file."""
        path = TABLES / f"{name}.toml"
        if name.endswith(".toml"):
            path, name = Path(name), Path(name).stem
        if not path.exists():
            names = all_names()
            raise ConfigError(
                f"expected a table, or a TOML file, got {name!r}{nearest(name, names)} "
                "(fedntk reproduce lists all)"
            )
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls(name=name, folder=path.absolute().parent, **values)
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError(f"{path}: {'; '.join(faults)}") from error

    @property
    def path(self) -> Path:
        """The TOML file."""
        return self.folder / f"{self.name.rpartition('/')[2]}.toml"

    def label(self, row: str) -> str:
        """Return a row's or column's name for readers."""
        line = self.rows.get(row) or self.columns.get(row)
        return (line and line.label) or row

    def paper_figure(self, measure: str, row: str, column: str) -> float | str | None:
        """Return the paper's own figure of a cell, if it gives one."""
        figures = listed(self.paper.get(measure, {}).get(row, []))
        return dict(zip(self.columns, figures, strict=True)).get(column) if figures else None

    def reason_beyond(self, row: str, column: str) -> str:
        """Say why a cell does not fit one machine; nothing if it does."""
        reasons = (
            why for why, cells in self.beyond.items() if _is_one_of(f"{row}/{column}", cells)
        )
        return next(reasons, "")

    def with_method(self, place: str) -> Self:
        """Return a copy with one more row, of a method such as ``mymethod.py:Mine``."""
        name = place.rpartition(":")[2] or place
        row = Line(label=name, settings={"method": whole_name(place)})
        return self.model_copy(update={"rows": {**self.rows, name: row}})

    def as_text(self) -> str:
        """Return the file's text, with a row for each that was added."""
        text = self.path.read_text(encoding="utf-8")
        declared = tomllib.loads(text)["rows"]
        added = {name: row for name, row in self.rows.items() if name not in declared}
        rows = {name: row.model_dump(include={"label", "settings"}) for name, row in added.items()}
        return f"{text}\n{tomli_w.dumps({'rows': rows})}" if rows else text

    def form(self, form: Form) -> FormOf | None:
        """Return what a form changes; of the paper's size, nothing."""
        return {"paper": FormOf(), "smaller": self.smaller, "small": self.small}[form]

    def plan(
        self,
        form: Form = "paper",
        *,
        rows: Sequence[str] = ("*",),
        columns: Sequence[str] = ("*",),
        seeds: Sequence[int] | None = None,
    ) -> "list[Cell]":
        """Return the cells of a form; names may be patterns. ConfigError if a name is unknown.

        Cells that do not fit one machine are left out of patterns, and taken if they are named.
        """
        change = self.form(form)
        if change is None:
            raise ConfigError(f"{self.name} has no smaller form; leave out --form")
        chosen_rows = _matching(rows, self.rows, "row")
        chosen_columns = _matching(columns, self.columns, "column")
        cells = []
        for row, column in itertools.product(chosen_rows, chosen_columns):
            named = row in rows and column in (*columns, "")
            missing = {row: self.rows[row].missing, column: self.columns[column].missing}
            for name, why in missing.items():
                if why and name in (*rows, *columns):
                    raise ConfigError(f"{name}: {why}")
            too_large = form == "paper" and self.reason_beyond(row, column) and not named
            in_form = _is_one_of(row, change.rows) and _is_one_of(column, change.columns)
            in_form &= _is_one_of(column, self.rows[row].columns)
            if in_form and not any(missing.values()) and not too_large:
                numbers = seeds or change.seeds or self.seeds
                cells += [self.cell(row, column, seed, form) for seed in numbers]
        return cells

    def cell(self, row: str, column: str, seed: int, form: Form = "paper") -> "Cell":
        """Return one cell with its settings: of the table, column, row, cell and form."""
        change, line = self.form(form) or FormOf(), self.rows[row]
        layers = [self.settings, self.columns[column].settings, line.settings]
        layers += [s for place, s in self.cells.items() if fnmatch(f"{row}/{column}", place)]
        layers += [change.settings, change.column_settings.get(column, {})]
        layers += [change.row_settings.get(row, {})]
        search = self.search if line.searched and self.columns[column].searched else None
        if search is not None:
            grid = line.search or self.columns[column].search or search.grid
            lines = self.columns[column].search_settings, line.search_settings
            settings = merged(search.settings, *lines, change.search)
            search = search.model_copy(update={"grid": grid, "settings": settings})
        return Cell(self.name, form, row, column, seed, merged(*layers), search)


@dataclass(frozen=True)
class Cell:
    """One run of a table: a row, a column and a seed."""

    table: str
    form: Form
    row: str
    column: str
    seed: int
    settings: Settings
    search: Search | None

    @property
    def place(self) -> str:
        """Its folder below that of the table."""
        return f"{self.line_place}/seed-{self.seed}"

    @property
    def line_place(self) -> str:
        """The folder of all its seeds; with other settings it has another."""
        return "/".join(filter(None, (self.form, self.row, self.column, self.digest)))

    @property
    def digest(self) -> str:
        """Checksum of what it sets and searches; the seed is apart."""
        search = self.search and self.search.model_dump(mode="json")
        text = json.dumps([self.settings, search], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def chosen(self, values: Mapping[str, Any]) -> "Cell":
        """Return a copy with what a search chose."""
        nested: Settings = {}
        for key, value in values.items():
            table, _, name = key.rpartition(".")
            nested = merged(nested, {table: {name: value}} if table else {name: value})
        return replace(self, settings=merged(self.settings, nested), search=None)


def all_names() -> list[str]:
    """Return the names of the declarations that come with fedntk, in order."""
    files = TABLES.rglob("*.toml")
    return sorted(path.relative_to(TABLES).with_suffix("").as_posix() for path in files)


def merged(*layers: Mapping[str, Any]) -> Settings:
    """Return settings, the later ones over the earlier, table by table."""
    result: Settings = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            if isinstance(value, Mapping) and isinstance(below, Mapping):
                value = merged(below, value)
            result[key] = value
    return result


def listed(figures: Any) -> list[Any]:
    """Return a list of what may be one figure."""
    return figures if isinstance(figures, list) else [figures]


def _require(name: str, names: Mapping[str, Any], what: str) -> None:
    if name not in names:
        raise ValueError(f"expected {what}, one of {', '.join(names)}; got {name!r}")


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _matching(patterns: Sequence[str], names: Mapping[str, Any], what: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            listing = ", ".join(filter(None, names))
            raise ConfigError(f"{what}: expected one of {listing}; got {pattern!r}")
    return [name for name in names if _is_one_of(name, patterns)]
