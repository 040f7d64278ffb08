"""Attacks: what is learned from what clients send and runs release, what lies do to a model.

    python benchmarks/attack.py CASE [--data-dir FOLDER] [--only "method=fedavg; seed=0"]

`CASES` has each attack with its payload and measure, and its cells, whose settings are columns of
results/CASE.csv; the attackers are in attacks/. The rows of a cell that is measured again are
replaced. What a row has in arrays goes into the picture, which needs all cells.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from attacks import (
    audit,
    jacobians,
    liars,
    lies_in_sums,
    members_in_sums,
    neighbours,
    noise,
    projections,
)
from common import RESULTS, parse_options, write

Row = dict[str, Any]


class Case(NamedTuple):
    """An attack on a payload, and what is measured of it in each cell."""

    attack: str
    payload: str
    measure: str
    rows: Callable[..., Iterable[Row]]  # of a data folder and a cell's settings
    cells: list[Row]
    draw: Callable[[pd.DataFrame, list[Row]], None] | None = None


CASES = {
    "reconstruction": Case(
        "deep leakage, closed form, priors", "Jacobians, compressed and projected", "SSIM",
        jacobians.rows, jacobians.CELLS, jacobians.draw,
    ),
    "projection_privacy": Case(
        "linear estimates by public images or pairs", "projected inputs", "SSIM",
        projections.rows, projections.CELLS, projections.draw,
    ),
    "sums_privacy": Case(
        "leverage, nearest image, linear map", "sums over features", "AUC, SSIM",
        members_in_sums.sums, members_in_sums.SUMS, members_in_sums.draw,
    ),
    "prototypes_privacy": Case(
        "nearest image", "class prototypes", "share of hits",
        members_in_sums.prototypes, members_in_sums.PROTOTYPES,
    ),
    "private_attack": Case(
        "LiRA", "models of noisy sums", "AUC", noise.members, noise.MEMBERS, noise.draw
    ),
    "private_audit": Case(
        "telling neighbouring data sets apart", "all that private runs show",
        "lower bound of epsilon", audit.rows, audit.CELLS,
    ),
    "private_sums": Case(
        "none: what noise costs", "noisy sums", "accuracy", noise.accuracies, noise.SUMS
    ),
    "private_run_losses": Case(
        "loss of clients after their shares", "masked noisy sums", "accuracy",
        noise.losses, noise.LOSSES,
    ),
    "colluding_neighbours": Case(
        "one neighbour, and two who collude", "Jacobians and weights of NTK-DFL",
        "errors of inputs and weights", neighbours.curious, neighbours.CURIOUS,
    ),
    "hostile_neighbours": Case(
        "false and scaled labels", "Jacobians of NTK-DFL", "accuracy",
        neighbours.hostile, neighbours.HOSTILE,
    ),
    "liars": Case(
        "sign flip, labels, inner product, false Jacobians", "all that clients send", "accuracy",
        liars.rows, liars.CELLS, liars.draw,
    ),
    "liars_in_sums": Case(
        "false, scaled and impossible sums", "sums over features", "found, alarms, accuracy",
        lies_in_sums.lies, lies_in_sums.LIES, lies_in_sums.draw,
    ),
    "copies_in_sums": Case(
        "examples counted several times", "sums over features", "found, alarms, accuracy",
        lies_in_sums.copies, lies_in_sums.COPIES,
    ),
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
    return [c for c in cells if all(text(c[key]) in values for key, values in wanted.items())]


def main() -> None:
    options = parse_options(__doc__, case=CASES, data_dir="", only="")
    torch.set_num_threads(1)
    case, results = CASES[options.case], []
    for cell in selected(case.cells, options.only):
        rows = []
        for row in case.rows(options.data_dir, **cell):
            results.append(cell | row)
            rows.append({k: v for k, v in row.items() if not isinstance(v, np.ndarray)})
            print(cell | rows[-1], flush=True)
        replace(options.case, cell, rows)
    if case.draw and not options.only:
        case.draw(pd.read_csv(RESULTS / f"{options.case}.csv"), results)
    write(options.case, summary={"attack": case.attack, "payload": case.payload})


if __name__ == "__main__":
    main()
