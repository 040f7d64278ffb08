"""Run cells of results again, and say whether their figures are the same."""

import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import ConfigError
from .declaration import TABLES, Cell, Declaration, all_names
from .making import CHOSEN, as_table, measure, processor, versions
from .measures import COSTS, NO_ROUND

EQUAL, NEAR, DIFFERENT = "equal to the bit", "within the tolerance", "different"
# what a machine does in its time, which is no result
NO_RESULT = ("seconds",)


def verify(
    result: str | Path, *, cells: Sequence[str] = (), count: int = 1, data_dir: str = ""
) -> pd.DataFrame:
    """Run cells of a result again: one row a cell and measure, with both figures and a verdict.

    Parameters
    ----------
    result : str or path
        A folder that ``fedntk reproduce`` wrote, its ``results.parquet``, a table's name for the
        results that come with fedntk, or a TOML file with results in a Parquet file beside it.
    cells : sequence of str
        ``row/column/seed``, which may be patterns; by default the `count` quickest.
    count : int
        How many cells, if none is named.
    data_dir : str
        Folder of the data sets.

    Returns
    -------
    DataFrame
        Columns cell, machine, measure, round, before, now, tolerance, verdict. What a search chose
        is taken from the result. Seconds are left out.

    Raises
    ------
    ConfigError
        The result, its declaration or a cell is not there, or its settings are others now.
    """
    declaration, table = read_result(result)
    seconds = table[table.measure == "seconds"].set_index(["form", "row", "column", "seed"]).value
    names = {"/".join(filter(None, map(str, key[1:]))): key for key in seconds.sort_values().index}
    chosen = [n for n in names if any(fnmatch(n, pattern) for pattern in cells)]
    if cells and not chosen:
        raise ConfigError(f"cells: expected some of {', '.join(names)}; got {', '.join(cells)}")
    parts = []
    for name in chosen or list(names)[:count]:
        form, row, column, seed = names[name]
        keys = (table[key] == value for key, value in
                zip(("form", "row", "column", "seed"), names[name], strict=True))  # fmt: skip
        before = table[np.logical_and.reduce(list(keys))]
        if row not in declaration.rows:
            raise ConfigError(
                f"{row} is no row of {declaration.name}; verify the others with --cells"
            )
        cell = declaration.cell(row, column, int(seed), form)
        if cell.digest != before.settings.iloc[0]:
            raise ConfigError(
                f"{name}: {declaration.path.name} has other settings now than when it was run; "
                "reproduce it again"
            )
        same = set(before.versions) == {versions()} and set(before.machine) == {processor()}
        machine = "the same versions and processor" if same else "other versions or processor"
        compared = _compared(declaration, cell, before, data_dir)
        parts.append(compared.assign(cell=name, machine=machine))
    return pd.concat(parts, ignore_index=True)


def read_result(result: str | Path) -> tuple[Declaration, pd.DataFrame]:
    """Return the declaration and the figures of a result."""
    path = Path(result)
    if path.suffix == ".toml":
        path = path.with_suffix(".parquet")
    path = path / "results.parquet" if path.is_dir() else path
    if not path.exists() and (TABLES / f"{result}.parquet").exists():
        path = TABLES / f"{result}.parquet"
    if not path.exists():
        raise ConfigError(
            f"expected a folder that fedntk reproduce wrote, or a table with results, got {result}"
        )
    table = pd.read_parquet(path)
    name = str(table.table.iloc[0])
    if path.with_suffix(".toml").exists():
        shipped = TABLES in path.absolute().parents
        return Declaration.load(name if shipped else str(path.with_suffix(".toml"))), table
    copy = path.parent / f"{name.replace('/', '-')}.toml"
    if name in all_names():  # whose programs stand beside it
        home = TABLES / Path(name).parent
        declaration = Declaration.load(str(copy))
        return declaration.model_copy(update={"name": name, "folder": home}), table
    return Declaration.load(str(copy)).model_copy(update={"name": name}), table


def _compared(
    declaration: Declaration, cell: Cell, before: pd.DataFrame, data_dir: str
) -> pd.DataFrame:
    values = before[before.measure.str.startswith(CHOSEN)]
    chosen = dict(zip(values.measure.str.removeprefix(CHOSEN), values.value, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        again = cell.chosen(_as_declared(cell, chosen))
        now = as_table(cell, list(measure(declaration, again, Path(folder), data_dir)))
    keys = ["measure", "round"]
    rows = before[~before.measure.str.startswith(CHOSEN) & ~before.measure.isin(NO_RESULT)]
    both = rows.merge(now[[*keys, "value"]], how="left", on=keys, suffixes=("", " now"))
    figures = both["value"].to_numpy(), both["value now"].to_numpy()
    tolerances = [tolerance(declaration, name) for name in both.measure]
    equal = (figures[0] == figures[1]) | (np.isnan(figures[0]) & np.isnan(figures[1]))
    near = np.abs(figures[0] - figures[1]) <= tolerances
    verdicts = np.select([equal, near], [EQUAL, NEAR], DIFFERENT)
    return pd.DataFrame({
        **{key: both[key] for key in keys}, "before": figures[0], "now": figures[1],
        "tolerance": tolerances, "verdict": verdicts,
    })  # fmt: skip


def tolerance(declaration: Declaration, name: str) -> float:
    """Return how far a figure may differ on another machine; costs must be equal."""
    measure = declaration.measures.get(name.partition(", ")[0])
    return measure.tolerance if measure and name not in COSTS else 0.0


def _as_declared(cell: Cell, chosen: dict[str, float]) -> dict[str, object]:
    """Return the chosen values as the declaration has them: whole numbers are whole."""
    grid = cell.search.grid if cell.search else {}
    return {key: next(v for v in grid[key] if v == value) for key, value in chosen.items()}


def describe(table: pd.DataFrame) -> str:
    """Say in lines how each verified cell compares, the figures that are not equal one by one."""
    lines = []
    for name, cell in table.groupby("cell", sort=False):
        counts = ", ".join(f"{n} {verdict}" for verdict, n in cell.verdict.value_counts().items())
        lines.append(f"{name} ({cell.machine.iloc[0]}): {counts}")
        for row in cell[cell.verdict != EQUAL].itertuples():
            number = "" if row.round == NO_ROUND else f", round {row.round}"
            lines.append(f"  {row.measure}{number}: {row.before!r}, now {row.now!r}; {row.verdict}")
    return "\n".join(lines)
