"""What a finished run's model owes to each client, and who harms it."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedntk.ntk import NotEnoughMemory
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.strategies.core.kept_sums import require_storage
from fedntk.strategies.core.ledger import clients_sums

from ..config.settings import ConfigError
from ..errors import naming, place_in
from ..report.results import Run
from .unlearning import load_strategy

if TYPE_CHECKING:
    import pandas as pd


def ledger(run: Run | str | Path, *, shapley: int = 0, trust: bool = False) -> "pd.DataFrame":
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
        error, of clients in the model. It is also written into the run's folder, as
        ``ledger.parquet``, with a picture, ``ledger.png``.

    Raises
    ------
    ConfigError
        The method or the run's settings do not allow it, or the data are too large.
    FileNotFoundError, RunFailed
        There is no finished run.
    """
    import pandas as pd

    run, checkpoint, setup, strategy = load_strategy(run, "client_ledger", trust)
    labels = setup.data.inputs.classes
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
            hits = (examples.rows.double() @ models[1]).argmax(1) == examples.labels
            losses, is_removed = map(made.validation.loss, models), client in removed
            mean = float(hits.double().mean())
            start, weight = (client, sums.num_examples, is_removed), examples.weight_score(sums)
            rows.append((*start, *losses, mean, weight, *sums.counts.tolist()))
        classes = [f"class-{label}" for label in labels]
        names = ["client", "examples", "removed", "loss-with", "loss-without", "accuracy-without"]
        table = pd.DataFrame(rows, columns=[*names, "weight-score", *classes])
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
    _draw(table, place_in(run.folder, "ledger.png"))
    return table


def _draw(table: "pd.DataFrame", path: Path) -> None:
    """Draw the clients' scores, the worst first, above what they have of each class."""
    from matplotlib.figure import Figure

    from ..report.figures import DOLLAR

    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    places = np.arange(len(table))
    above.bar(
        places, table.score, color=["tab:red" if out else "tab:blue" for out in table.removed]
    )
    above.axhline(0, color="black", linewidth=0.8)
    above.set_ylabel("harm, standard deviations\nover an honest client's")
    above.set_title("Clients, the most harmful first; red: removed from the model")
    shares = table.filter(regex="^class-")
    picture = below.imshow(shares.T, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    figure.colorbar(picture, ax=below, label="share of the class")
    below.set_yticks(
        range(shares.shape[1]), [str(name)[6:].replace(*DOLLAR) for name in shares], fontsize=6
    )
    below.set(ylabel="class", xlabel="client")
    if len(table) <= 50:
        below.set_xticks(places, [str(client) for client in table.client], fontsize=7)
    figure.savefig(path, dpi=120)
