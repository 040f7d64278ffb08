"""What is declared, what of it was run, and at which cost."""

from dataclasses import dataclass

import pandas as pd

from .declaration import FORMS, Cell, Declaration, Form, all_names

STATES = {
    "paper": "at the paper's size",
    "part": "in part",
    "smaller": "smaller",
    "declared": "not run",
}


@dataclass(frozen=True)
class State:
    """How much of a declaration has committed results.

    `cells` are those of the paper's size, `done` those of them with results of the present
    settings, `smaller` whether the smaller form is complete, and `hours` what all that was run
    took on one core.
    """

    cells: int
    done: int
    smaller: bool
    hours: float

    @property
    def kind(self) -> str:
        """A key of STATES."""
        if self.done == self.cells:
            return "paper"
        if self.done:
            return "part"
        return "smaller" if self.smaller else "declared"

    def __str__(self) -> str:
        """Say it for readers."""
        words = STATES[self.kind]
        return f"{words}: {self.done} of {self.cells} cells" if self.kind == "part" else words


def results_of(declaration: Declaration) -> pd.DataFrame | None:
    """Return the committed figures of the present settings; None if there are none."""
    path = declaration.path.with_suffix(".parquet")
    if not path.exists():
        return None
    table = pd.read_parquet(path)
    digests = {}
    for row, column in {*zip(table.row, table.column, strict=True)}:
        if row in declaration.rows and column in declaration.columns:
            for form in FORMS:
                digests[form, row, column] = declaration.cell(row, column, 0, form).digest
    keys = zip(table.form, table.row, table.column, strict=True)
    present = [digests.get(key) == digest for key, digest in zip(keys, table.settings, strict=True)]
    return table[present] if any(present) else None


def state_of(declaration: Declaration) -> State:
    """Return how much of a declaration has committed results."""
    table = results_of(declaration)
    everything = {
        (row, column, seed)
        for row in declaration.rows
        for column in declaration.columns
        for seed in declaration.seeds
    }
    if table is None:
        return State(len(everything), 0, smaller=False, hours=0.0)
    done = {form: _cells(part) for form, part in table.groupby("form")}
    wanted = {(c.row, c.column, c.seed) for c in _plan(declaration, "smaller")}
    smaller = bool(wanted) and wanted <= done.get("smaller", set())
    hours = table[table.measure == "seconds"].value.sum() / 3600
    return State(len(everything), len(everything & done.get("paper", set())), smaller, hours)


def best_form(declaration: Declaration) -> Form:
    """Return the form whose results are shown: the paper's size before a smaller one."""
    return "smaller" if state_of(declaration).kind == "smaller" else "paper"


def listing(names: list[str] | None = None) -> pd.DataFrame:
    """Return one row a table: table, what it shows, state, hours of one core."""
    rows = []
    for name in names or all_names():
        declaration = Declaration.load(name)
        state = state_of(declaration)
        hours = f"{state.hours:.1f}" if state.done == state.cells else ""
        if not hours and declaration.hours is not None:
            hours = f"~{declaration.hours:g}"
        rows.append((name, declaration.title, str(state), hours))
    return pd.DataFrame(rows, columns=["table", "shows", "state", "hours of one core"])


def _plan(declaration: Declaration, form: Form) -> list[Cell]:
    return declaration.plan(form) if declaration.form(form) is not None else []


def _cells(part: pd.DataFrame) -> set[tuple[str, str, int]]:
    return set(part[["row", "column", "seed"]].itertuples(index=False, name=None))
