"""Attacks: what is learned from what clients send and runs release, what lies do to a model.

    python benchmarks/attack.py CASE [--data-dir FOLDER] [--only "clients == 10 and seed < 2"]

`CASES` has each attack with its payload and measure, and its cells, whose settings are columns of
results/CASE.csv; the attackers are in attacks/. `--only` takes some cells, by a query of pandas.
Rows of a cell that is measured again are replaced. A picture needs all cells. Attacks on replies
are runs: `fedntk reproduce benchmarks/tables/liars.toml`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pandas as pd
import torch
from attacks import audit, images, jacobians, lies, members, neighbours, noise, projections
from common import keep_rows, parse_options, write


class Case(NamedTuple):
    """An attack on a payload, and what is measured of it in each cell."""

    attack: str
    payload: str
    measure: str
    rows: Callable[..., Iterable[Any]]  # of a data folder and a cell's settings
    cells: list[Any]
    draw: Callable[[pd.DataFrame, Any, str], None] | None = None  # of table and pictures


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
    "liars_in_sums": Case("false and impossible sums", "sums over features", "found, accuracy",
                          lies.rows, lies.CELLS),
    "copies_in_sums": Case("examples counted several times", "sums over features",
                           "found, accuracy", lies.copies, lies.COPIES),
}  # fmt: skip


def main() -> None:
    options = parse_options(__doc__, case=CASES, data_dir="", only="")
    torch.set_num_threads(1)
    case, pictures = CASES[options.case], dict[str, Any]()
    cells = pd.DataFrame(case.cells)
    chosen = cells.query(options.only) if options.only else cells
    for cell in chosen.to_dict("records"):
        rows = []
        for row in case.rows(options.data_dir, **cell):
            pictures |= row.pop("picture", {})
            rows.append(cell | row)
            print(rows[-1], flush=True)
        table = keep_rows(options.case, rows, list(cells))
    if case.draw and not options.only:
        case.draw(table, pictures, options.case)
    write(options.case, summary={"attack": case.attack, "payload": case.payload})


if __name__ == "__main__":
    main()
