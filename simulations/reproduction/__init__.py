"""Tables and figures of papers: declared, made again by one command, and verified."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from .declaration import Declaration, Form
from .listing import listing
from .making import make, probe, seconds_left
from .rendering import write
from .verifying import verify

__all__ = ["Declaration", "listing", "reproduce", "show_listing", "verify"]


def reproduce(
    table: str,
    *,
    method: str = "",
    rows: Sequence[str] = ("*",),
    columns: Sequence[str] = ("*",),
    seeds: str = "",
    form: Form = "paper",
    out: str | Path = "runs/reproduce",
    data_dir: str = "",
    workers: int = 2,
    progress: bool = True,
    say: Callable[[str], None] = print,
    cost: bool = False,
) -> Path:
    """Make a table or figure again; return the path of its ``table.md``.

    Parameters
    ----------
    table : str
        Name of a declaration that comes with fedntk, or a TOML file.
    method : str
        A method that is not in the table, such as ``"mymethod.py:Mine"``: one more row, and the
        only one that is run.
    rows, columns : sequence of str
        Which cells; may be patterns.
    seeds : str
        Such as ``"0,1"`` or ``"0-2"``; by default those of the table.
    form : {"paper", "smaller", "small"}
        Size: the paper's, or one of those that the declaration states.
    out : path
        Results go into a folder of the table in it.
    data_dir : str
        Folder of the data sets.
    workers : int
        Cells that run at a time, each in a process with one thread.
    progress, say : bool, callable
        Whether to show progress; what is called with the sentence on cost.
    cost : bool
        Only say what it will cost.

    Raises
    ------
    ConfigError
        The declaration, a name or a setting cannot work; nothing was run.
    RunFailed
        Some cells failed; the others' figures are in the folder.
    """
    declaration = Declaration.load(table)
    if method:
        declaration = declaration.with_method(method)
        rows = [list(declaration.rows)[-1]]
    cells = declaration.plan(form, rows=rows, columns=columns, seeds=_seeds(seeds))
    if not cells:
        raise ConfigError(f"{table}: none of these cells fits one machine; name row and column")
    folder = Path(out).expanduser().absolute() / declaration.name.replace("/", "-")
    a_round = probe(declaration, cells, folder, data_dir)
    seconds = seconds_left(declaration, folder, cells, a_round)
    hours = f"about {seconds / 3600:.2g} hours of one core" if seconds else "not known beforehand"
    say(f"{declaration.title}: {len(cells)} cells; cost: {hours}; {workers} at a time")
    if not cost:
        table_of_cells = make(
            declaration, cells, folder, data_dir=data_dir, workers=workers, shown=progress
        )
        return write(declaration, table_of_cells, folder)
    return folder / "table.md"


def show_listing() -> None:
    """Print all declarations with their state and cost."""
    frame = listing()
    table = Table()
    for number, name in enumerate(frame.columns):
        table.add_column(name, no_wrap=number == 0)
    for row in frame.itertuples(index=False):
        table.add_row(*row)
    Console().print(table)


def _seeds(text: str) -> list[int] | None:
    """Read such as ``0,3`` or ``0-2``."""
    if not text:
        return None
    seeds: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        try:
            seeds += range(int(low), int(high or low) + 1)
        except ValueError:
            raise ConfigError(f"seeds: expected such as 0,1 or 0-2, got {text!r}") from None
    return seeds
