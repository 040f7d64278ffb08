"""What a finished run's model owes to each client, and who harms it."""

from pathlib import Path

import numpy as np
import pandas as pd

from fedntk.ntk import NotEnoughMemory
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.strategies.core.kept_sums import require_storage
from fedntk.strategies.core.ledger import clients_sums

from ..config.settings import ConfigError
from ..errors import naming, place_in
from ..report.figures import client_harms
from ..report.results import Run
from .unlearning import load_strategy


def ledger(run: Run | str | Path, *, shapley: int = 0, trust: bool = False) -> pd.DataFrame:
    """Return each client's part in what a run learned from sums, a row each, the worst first.

    Losses are half the mean squared error, and accuracies shares, on the run's validation-examples.
    It needs the settings storage and validation-examples, and takes one solution for each client.

    Parameters
    ----------
    run : Run, or path of its folder
        A run of one-exchange.
    shapley : int
        Number of orders, each with its reverse, by which Shapley values are estimated: 2 or more,
        each as long as two tables without them.
    trust : bool
        As in :func:`~fedntk.simulations.load_predictor`.

    Returns
    -------
    pandas.DataFrame
        ``client``, ``examples``; ``removed``, whether the model lacks it; ``loss-with`` and
        ``loss-without`` it, with all others as they are in the model; ``accuracy-without``;
        ``harm``, the difference of the losses; ``score``, that in standard deviations over what
        honest clients do (see :mod:`fedntk.ntk.convex.ledger`); ``weight-score``; ``class-...``,
        its share of all examples of each class; and ``shapley`` with ``shapley-error``, a standard
        error, of clients in the model. ``ledger.parquet`` in the run's folder has it as well, and
        ``ledger.png`` a picture.

    Raises
    ------
    ConfigError
        The method or the run's settings do not allow it, or the data are too large.
    FileNotFoundError, RunFailed
        There is no finished run.
    """
    run, checkpoint, setup, strategy = load_strategy(run, "client_ledger", trust)
    with naming(str(run.folder), ValueError, ArithmeticError, NotEnoughMemory):
        sums_options = strategy.sums
        if sums_options.validation is None:
            sums_options.validation = setup.data.train(setup.split.validation)
        if not len(sums_options.validation[1]):
            raise ConfigError("ledger: harm is judged on validation-examples, got 0 of them")
        storage = require_storage(strategy.storage)
        removed = () if strategy.ledger is None else strategy.ledger.removed
        clients = clients_sums(storage, list(storage.without((), removed)))
        made, examples = strategy.client_ledger(checkpoint.arrays, strategy.ridge_used)
        total = FeatureStatistics.join(clients[client] for client in storage.summed)
        rows = []
        for client, sums, *models in made.parts(total, clients, removed):
            loss_with, loss_without = map(made.validation.loss, models)
            hits = (examples.rows.double() @ models[1]).argmax(1) == examples.labels
            row = {
                "client": client,
                "examples": sums.num_examples,
                "removed": client in removed,
                "loss-with": loss_with,
                "loss-without": loss_without,
                "accuracy-without": float(hits.double().mean()),
                "weight-score": examples.weight_score(sums),
            }
            names = (f"class-{label}" for label in setup.data.inputs.classes)
            rows.append(row | dict(zip(names, sums.counts.tolist(), strict=True)))
        table = pd.DataFrame(rows)
        classes = table.columns[len(row) :]
        harms, counts = table["loss-with"] - table["loss-without"], table[classes].to_numpy()
        equations = made.equations(total)
        scores = examples.scores(harms.to_numpy(), counts, equations, made.ridge)
        table = table.assign(harm=harms, score=scores)
        if shapley:
            summed = clients_sums(storage, storage.summed)
            estimates = made.shapley(summed, shapley, np.random.default_rng(0))
            for name, values in zip(("shapley", "shapley-error"), estimates, strict=True):
                table[name] = table["client"].map(dict(zip(summed, values, strict=True)))
    table[classes] /= table[classes].sum().clip(lower=1)
    table = table.sort_values("score", ascending=False, ignore_index=True)
    table.to_parquet(place_in(run.folder, "ledger.parquet"))
    client_harms(table).savefig(place_in(run.folder, "ledger.png"))
    return table
