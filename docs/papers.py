"""The papers' tables and figures, from their declarations and committed results.

    python docs/papers.py FOLDER...

adopts results of ``fedntk reproduce``: their figures replace those of the same cells in
``simulations/tables``. The tests refuse a table that has fewer cells with results than before.
It also draws the README's picture again.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fedntk.simulations.reproduction.declaration import TABLES, Declaration, all_names
from fedntk.simulations.reproduction.listing import State, best_form, results_of, state_of
from fedntk.simulations.reproduction.rendering import as_list, as_text, described, draw, frames

CELL = ["form", "row", "column", "seed"]
MEASURED = Path(__file__).parents[1] / "benchmarks" / "tables"  # beyond those of the papers
EVIDENCE = Path(__file__).parents[1] / "tests" / "evidence.csv"  # which the tests keep
FRONT_PAGE = MEASURED.with_name("results") / "front_page.png"
ON_FRONT_PAGE = {  # rows of ntk_fl_fmnist
    "full": "NTK-FL, full kernel (ours)",
    "mean": "NTK-FL, mean kernel (the paper's)",
    "fedavg": "FedAvg, best of 12 settings",
}


def declarations(paper: str = "") -> list[Declaration]:
    """Return the declarations of all papers, or of one, by the numbers in their names."""
    names = [name for name in all_names() if "/" in name and name.startswith(paper)]
    return [Declaration.load(name) for name in sorted(names, key=_order)]


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, place = name.partition("/")
    kind, _, number = place.partition("-")
    digits = "".join(itertools.takewhile(str.isdigit, number))
    return paper, kind, int(digits or 0), number


def overview() -> str:
    """Return one row for each declaration: state, hours, command."""
    lines = ["| table | what it shows | state | hours of one core |", "|---|---|---|---|"]
    for declaration in declarations():
        state = state_of(declaration)
        paper, _, place = declaration.name.partition("/")
        link = f"[{declaration.source}](papers/{paper}.md#{place})"
        words = [f"{state}"] + [f"[measured in another way]({declaration.elsewhere})"] * bool(
            declaration.elsewhere
        )
        cells = [link, declaration.title, ", ".join(words), _hours(declaration, state)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _hours(declaration: Declaration, state: State) -> str:
    measured = f"{state.hours:.1f}" if state.hours else ""
    if state.kind == "paper" or declaration.hours is None:
        return measured
    whole = f"about {declaration.hours:g} at the paper's size"
    return f"{measured} run; {whole}" if measured else whole


def results(paper: str) -> str:
    """Return a section for each table of a paper: what it is, its figures, its command."""
    sections = []
    for declaration in declarations(paper):
        place, state = declaration.name.partition("/")[2], state_of(declaration)
        parts = [f"## {declaration.title} {{ #{place} }}"]
        table = shown(declaration)
        parts.append(described(declaration, pd.DataFrame(columns=CELL) if table is None else table))
        parts += [f"Not in fedntk: {', '.join(_missing(declaration))}."] * bool(
            _missing(declaration)
        )
        parts += [f"Cells {', '.join(f'`{p}`' for p in cells)}: {why}."
                  for why, cells in declaration.beyond.items()]  # fmt: skip
        for title, frame in frames(declaration, table) if table is not None else ():
            parts += [f"**{title}**"] * bool(title) + [frame.to_markdown(index=False)]
        if table is not None and declaration.figure is not None:
            parts.append(f"![{declaration.title}]({picture_name(declaration)})")
        form = {"smaller": " --smaller"}.get(best_form(declaration), "")
        parts.append(f"State: {state}. Command: `fedntk reproduce {declaration.name}{form}`")
        sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def shown(declaration: Declaration) -> pd.DataFrame | None:
    """Return the figures that the page shows: those of the largest form that has any."""
    table = results_of(declaration)
    return None if table is None else table[table.form == best_form(declaration)]


NEEDS = {
    "server-examples": "server sees examples",
    "client-files": "files on clients",
    "one-exchange": "one exchange of all clients",
    "public-set": "public examples",
    "third-party": "third party",
    "no-server": "neighbours in place of a server",
}


COSTS = {"rounds run": "rounds", "down": "MB to clients", "up": "MB from clients", "time": "s",
         "epsilon": "epsilon"}  # fmt: skip


def board() -> str:
    """Return a table of accuracies, the picture, and a table of accuracies and costs by task."""
    declaration = Declaration.load("board")
    table = shown(declaration)
    if table is None:
        return "Nothing has been run yet."
    cells = {key: cell.value.dropna() for key, cell in table.groupby(["row", "column", "measure"])}
    labels = {row: declaration.label(row) for row in declaration.rows if row in set(table.row)}
    needs = {row: ", ".join(NEEDS[need] for need in declaration.rows[row].needs) for row in labels}
    accuracies = {
        task: {row: as_text(cells[row, task, "accuracy"], 1)
               for row in labels if (row, task, "accuracy") in cells}
        for task in declaration.columns
    }  # fmt: skip

    def listing(columns: dict[str, dict[str, str]], rows: Iterable[str]) -> str:
        body = {name: [texts.get(row, "") for row in rows] for name, texts in columns.items()}
        body = {"method": [labels[row] for row in rows], **body}
        body["needs"] = [needs[row] for row in rows]
        return pd.DataFrame(body).to_markdown(index=False, disable_numparse=True)

    by_task = {f"{declaration.label(task)} (%)": texts for task, texts in accuracies.items()}
    parts = [
        listing(by_task, labels),
        f"![{declaration.title}](papers/{picture_name(declaration)})",
    ]
    for task, texts in accuracies.items():
        costs = {
            name: {row: f"{values.mean():.3g}" for row in texts
                   if len(values := cells.get((row, task, measure), ()))}
            for measure, name in COSTS.items()
        }  # fmt: skip
        parts += [
            f"**{declaration.label(task)}**",
            listing({"accuracy (%)": texts, **costs}, texts),
        ]
    return "\n\n".join(parts)


def _missing(declaration: Declaration) -> list[str]:
    lines = {**declaration.rows, **declaration.columns}
    return [declaration.label(name) for name, line in lines.items() if line.missing]


def picture_name(declaration: Declaration) -> str:
    """Return the name of a picture's file, which the site's build draws."""
    return f"{declaration.name.replace('/', '-')}.png"


def pictures() -> Iterator[tuple[str, Figure]]:
    """Yield name and drawing of each picture."""
    for declaration in [*declarations(), Declaration.load("board"), *all_measured()]:
        table = shown(declaration)
        if table is not None and declaration.figure is not None:
            yield picture_name(declaration), draw(declaration, table)


def front_page() -> Figure:
    """Draw some rows of NTK-FL's table, with the rounds to 85 % of each seed."""
    declaration = Declaration.load(str(MEASURED / "ntk_fl_fmnist.toml"))
    table = pd.read_parquet(MEASURED / "ntk_fl_fmnist.parquet")
    rounds = table[table.measure == "rounds-85"].groupby("row", observed=True).value
    rows = {}
    for name, label in ON_FRONT_PAGE.items():
        label += f": 85 % at round {as_list(rounds.get_group(name), 0)}"
        rows[name] = declaration.rows[name].model_copy(update={"label": label})
    title = "Fashion-MNIST, 300 clients, few classes each; mean and range of 3 seeds"
    picture = {"measure": "curve", "low": 50, "high": 88, "panels": {title: ["*"]}}
    figure = declaration.figure.model_copy(update=picture)
    return draw(declaration.model_copy(update={"rows": rows, "figure": figure}), table)


def adopt(folder: Path) -> Path:
    """Merge the results in a folder into those that come with fedntk; the new ones count."""
    table = pd.read_parquet(folder / "results.parquet")
    name = table.table.iloc[0]
    path = (TABLES if name in all_names() else MEASURED) / f"{name}.parquet"
    if path.exists():
        old = pd.read_parquet(path)
        new = pd.MultiIndex.from_frame(table[CELL])
        table = pd.concat([old[~pd.MultiIndex.from_frame(old[CELL]).isin(new)], table])
    table = table.sort_values([*CELL, "measure", "round"], kind="stable")
    for name in ("table", "form", "row", "column", "measure", "settings", "code", "versions",
                 "machine"):  # fmt: skip
        table[name] = table[name].astype("category")
    table.to_parquet(path, index=False, compression="zstd")
    return path


def measured(name: str, *parts: str) -> str:
    """Return the figures of a declaration in `benchmarks/tables`.

    `parts` are titles of some of its tables, all by default; ``"picture"`` is the drawing.
    """
    declaration = Declaration.load(str(MEASURED / f"{name}.toml"))
    table = shown(declaration)
    if table is None:
        raise ValueError(f"{name} has no results of its present settings")
    tables, pieces = dict(frames(declaration, table)), []
    for part in parts or tables:
        if part == "picture":
            pieces.append(f"![{declaration.title}](../papers/{picture_name(declaration)})")
            continue
        pieces += [f"**{part}**"] if part and not parts else []
        frame = _with_deviations(tables[part])
        pieces.append(frame.to_markdown(index=False, disable_numparse=True))
    return "\n\n".join(pieces)


def _with_deviations(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with deviations over seeds, columns ``"NAME, ±"``, in those of the means.

    Such figures are of runs whose seeds were not kept apart.
    """
    deviations = [column for column in table if column.endswith(", ±")]
    for column in deviations:
        mean = column.removesuffix(", ±")
        pairs = zip(table[mean], table[column], strict=True)
        table[mean] = [f"{value} ± {deviation}" if value else "" for value, deviation in pairs]
    return table.drop(columns=deviations)


def all_measured() -> list[Declaration]:
    """Return the declarations in `benchmarks/tables`."""
    return [Declaration.load(str(path)) for path in sorted(MEASURED.glob("*.toml"))]


def evidence() -> pd.DataFrame:
    """Return how many cells of each form have results: columns table, form, cells."""
    rows = []
    for declaration in [*declarations(), Declaration.load("board"), *all_measured()]:
        table = results_of(declaration)
        if table is not None:
            counts = table[CELL].drop_duplicates().groupby("form", observed=True).size()
            rows += [(declaration.name, form, count) for form, count in counts.items()]
    return pd.DataFrame(rows, columns=["table", "form", "cells"])


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(adopt(Path(argument)))
    evidence().to_csv(EVIDENCE, index=False)
    front_page().savefig(FRONT_PAGE, dpi=150)
