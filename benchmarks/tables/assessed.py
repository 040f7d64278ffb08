"""How far the predictions of a run can be trusted: calibration, unfamiliar data, sets."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedntk.simulations import Config, Run, assess, run

Values = Iterator[tuple[str, int | None, float]]
COLUMNS = {
    "nll": "nll",
    "brier": "brier",
    "ece": "ece",
    "auroc-entropy": "auroc_entropy",
    "auroc-information": "auroc_mutual_information",
}


@contextmanager
def finished(settings: dict[str, Any], seed: int) -> Iterator[tuple[Run, str]]:
    """Give a run of the settings, and the name of the unfamiliar data."""
    options = dict(settings)
    place = {"data-dir": options.pop("data-dir") or "data"}
    unfamiliar = options.pop("unfamiliar")
    with tempfile.TemporaryDirectory() as folder:
        yield run(Config(place, options, seed=seed, out=folder), progress=False), unfamiliar


def predictions(settings: dict[str, Any], seed: int) -> Values:
    """Yield figures of the whole predictor, and the means of an ensemble's single models."""
    with finished(settings, seed) as (done, unfamiliar):
        table = assess(done, unfamiliar=unfamiliar or None).table
    table = table.reindex(columns=["accuracy", *COLUMNS.values()])  # AUROCs need unfamiliar data
    single = table.index.str.fullmatch(r"model \d+") & (len(table) > 1)
    for prefix, rows in (("", table[~single]), ("one-", table[single])):
        yield f"{prefix}accuracy", None, 100 * rows.accuracy.mean()
        yield from ((prefix + name, None, rows[key].mean()) for name, key in COLUMNS.items())


def sets(settings: dict[str, Any], seed: int) -> Values:
    """Yield coverage and size of sets, and how many of them miss the range to be expected."""
    below = above = 0
    with finished(settings, seed) as (done, _):
        for on, score in itertools.product(("clients", "examples"), ("threshold", "adaptive")):
            found = assess(done, coverage=0.9, score=score, calibrate_on=on).sets
            below += found.test_coverage < found.expected_low
            above += found.test_coverage > found.expected_high
            yield f"{on}-{score}", None, 100 * found.test_coverage
            yield f"{on}-{score}-size", None, found.mean_size
    yield "below", None, below
    yield "above", None, above
