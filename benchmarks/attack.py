"""Attacks: what is learned from what clients send and runs release, what lies do to a model.

    python benchmarks/attack.py CASE [--data-dir FOLDER] [--only "method=fedavg; seed=0"]

`CASES` has each attack with its payload and measure, and its cells, whose settings are columns of
results/CASE.csv; the attackers are in attacks/. The rows of a cell that is measured again are
replaced. The picture, if there is one, needs all cells.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd
import torch
from attacks import audit, images, jacobians, liars, lies, members, neighbours, noise, projections
from attacks.cells import Row
from common import RESULTS, parse_options, write


class Case(NamedTuple):
    """An attack on a payload, and what is measured of it in each cell."""

    attack: str
    payload: str
    measure: str
    rows: Callable[..., Iterable[Row]]  # of a data folder and a cell's settings
    cells: list[Row]
    draw: Callable[[pd.DataFrame, Row, str], None] | None = None  # of table and pictures


CASES = {
    "reconstruction": Case("deep leakage, closed form, priors", "compressed Jacobians", "SSIM",
                           jacobians.rows, jacobians.CELLS, images.draw),
    "projection_privacy": Case("linear estimates by known pairs", "projected inputs", "SSIM",
                               projections.rows, projections.CELLS, images.draw),
    "sums_privacy": Case("leverage, nearest image, linear map", "sums over features", "AUC, SSIM",
                         members.sums, members.SUMS, images.draw),
    "prototypes_privacy": Case("nearest image", "class prototypes", "share of hits",
                               members.prototypes, members.PROTOTYPES),
    "private_attack": Case("LiRA", "models of noisy sums", "AUC",
                           noise.members, noise.MEMBERS, noise.draw),
    "private_audit": Case("telling neighbouring data apart", "all that private runs show",
                          "lower bound of epsilon", audit.rows, audit.CELLS),
    "private_sums": Case("none", "noisy sums", "accuracy", noise.accuracies, noise.SUMS),
    "private_run_losses": Case("clients leave after their shares", "masked noisy sums", "accuracy",
                               noise.losses, noise.LOSSES),
    "colluding_neighbours": Case("one neighbour, two who collude", "Jacobians, weights of NTK-DFL",
                                 "relative errors", neighbours.curious, neighbours.CURIOUS),
    "hostile_neighbours": Case("false and scaled labels", "Jacobians of NTK-DFL", "accuracy",
                               neighbours.hostile, neighbours.HOSTILE),
    "liars": Case("false labels, changes, Jacobians", "replies of all methods", "accuracy",
                  liars.rows, liars.CELLS, liars.draw),
    "liars_in_sums": Case("false and impossible sums", "sums over features", "found, accuracy",
                          lies.rows, lies.CELLS, lies.draw),
    "copies_in_sums": Case("examples counted several times", "sums over features",
                           "found, accuracy", lies.copies, lies.COPIES),
}  # fmt: skip


def text(value: Any) -> str:
    """Return a cell of a CSV file."""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def replace(name: str, cell: Row, rows: list[Row]) -> None:
    """Write rows in place of those of the same cell, leaving the others as they are."""
    path, groups = RESULTS / f"{name}.csv", defaultdict(list)
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                groups[tuple(row[key] for key in cell)].append(row)
    groups[tuple(map(text, cell.values()))] = [
        {key: text(value) for key, value in (cell | row).items()} for row in rows
    ]
    table = [row for group in groups.values() for row in group]
    with path.open("w", encoding="utf-8", newline="") as file:
        names = dict.fromkeys(key for row in table for key in row)
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def selected(cells: Iterable[Row], only: str) -> list[Row]:
    """Return the cells that have one of the values of each setting in `only`."""
    wanted: Mapping[str, set[str]] = defaultdict(set)
    for word in filter(None, only.split(";")):
        key, _, value = word.strip().partition("=")
        wanted[key].add(value)
    cells = list(cells)
    if unknown := set(wanted) - set(cells[0]):
        raise SystemExit(f"--only: expected some of {', '.join(cells[0])}; got {unknown}")
    chosen = [c for c in cells if all(text(c[key]) in values for key, values in wanted.items())]
    if not chosen:
        raise SystemExit(f"--only: no cell has {only}")
    return chosen


def main() -> None:
    options = parse_options(__doc__, case=CASES, data_dir="", only="")
    torch.set_num_threads(1)
    case, pictures = CASES[options.case], dict[str, Any]()
    for cell in selected(case.cells, options.only):
        rows = []
        for row in case.rows(options.data_dir, **cell):
            pictures |= row.pop("picture", {})
            rows.append(row)
            print(cell | rows[-1], flush=True)
        replace(options.case, cell, rows)
    if case.draw and not options.only:
        case.draw(pd.read_csv(RESULTS / f"{options.case}.csv"), pictures, options.case)
    write(options.case, summary={"attack": case.attack, "payload": case.payload})


if __name__ == "__main__":
    main()
