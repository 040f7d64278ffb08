"""What a finished run's model owes to each client, and the model without some of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedntk.ntk import NotEnoughMemory
from fedntk.ntk.payloads.feature_statistics import FeatureStatistics
from fedntk.strategies.core.array_archive import save_tensors
from fedntk.strategies.core.averaging import named_arrays
from fedntk.strategies.core.kept_sums import require_storage
from fedntk.strategies.core.ledger import clients_sums
from fedntk.trust import verify_records

from ..checkpoints import Checkpoint
from ..config.settings import ConfigError
from ..engine.building import load_checkpoint, load_setup, make_strategy
from ..engine.runs import run as run_rounds
from ..errors import RunFailed, naming, place_in
from ..methods.method import Setup
from ..methods.sums import counted_rows
from ..report.figures import client_harms
from ..report.results import Run, run_with_its_data, write_json
from ..simulated_trust import projected


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the models with and without the clients, on some test examples."""

    examples: int  # how many
    before: float
    after: float


@dataclass(frozen=True)
class Unlearned:
    """A run's model without some of its clients."""

    folder: Path  # of the model; load_predictor reads it
    clients: tuple[int, ...]  # partitions that were taken out
    examples: int  # number of their training examples
    overall: Accuracy  # on all test examples
    by_class: dict[int, Accuracy]  # on those of each class that these clients had

    def lines(self) -> list[str]:
        """Return a summary in words, as lines."""
        clients = (
            f"client{'s' if len(self.clients) > 1 else ''} {', '.join(map(str, self.clients))}"
        )
        lines = [f"Without {clients}, with {self.examples} training examples. Test accuracy:"]
        classes = {f"class {label}": accuracy for label, accuracy in self.by_class.items()}
        for name, accuracy in ({"all classes": self.overall} | classes).items():
            before, after = 100 * accuracy.before, 100 * accuracy.after
            number = f"({accuracy.examples} examples)"
            lines.append(f"  {name}: {before:.1f} % before, {after:.1f} % now {number}")
        return [
            *lines,
            "Taken only out of the sums: if they helped to train the network, it has seen them.",
            f"The model: {self.folder}",
        ]


def unlearn(
    run: Run | str | Path,
    clients: Sequence[int],
    *,
    out: str | Path | None = None,
    forget: bool = False,
    trust: bool = False,
) -> Unlearned:
    """Take clients out of a finished run's last model, as if they had never taken part in it.

    The method's page says for which part of the model that is true, and which settings it needs.

    Parameters
    ----------
    run : Run, or path of its folder
        A run of a method that can.
    clients : sequence of int
        Partitions to take out.
    out : path, optional
        Folder of the new model: ``without-<client>-<client>`` in the run's by default, in place of
        what such a call wrote before.
    forget : bool
        Whether to remove afterwards what the run's folder keeps of these clients for such calls.
        The run's own model and its checkpoint stay.
    trust : bool
        As in :func:`~fedntk.simulations.load_predictor`.

    Raises
    ------
    ConfigError
        The method or the run's settings do not allow it, a client is unknown, no client would be
        left, `out` holds something else, or the data has changed or is too large.
    FileNotFoundError, RunFailed
        There is no finished run.

    Examples
    --------
    >>> import tempfile
    >>> from fedntk.simulations import Config, run, unlearn
    >>> sums = {"bits": 32, "auto_ridge": False, "validation_share": 0}
    >>> tct = {"sums": sums, "storage": True, "num_features": 50, "bootstrap_rounds": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run(Config(method="tct", rounds=1, tct=tct, out=folder), progress=False)
    ...     unlearned = unlearn(result, [3, 5])
    >>> unlearned.folder.name
    'without-3-5'
    """
    gone = tuple(sorted(set(clients)))
    if not gone:
        raise ConfigError("clients: expected at least one partition, got none")
    run, checkpoint, setup, strategy = load_strategy(run, "without", trust)  # as TCT has
    config, before = setup.config, checkpoint.arrays
    if setup.data.has_real_targets:
        raise ConfigError("unlearn compares accuracies; with real targets use strategy.without")
    folder = _folder(run, gone, out)
    with naming(str(run.folder), ValueError, ArithmeticError, NotEnoughMemory):
        after = strategy.without(gone, before)
    models = [named_arrays(arrays) for arrays in (before, after)]
    described = {"round": checkpoint.round, "learned": checkpoint.learned}
    save_tensors(folder / "model.safetensors", models[1], described)
    config.replace(out=str(folder)).save(folder / "config.toml")
    setup.data.inputs.save(folder)
    x, labels = setup.data.test(slice(config.test_examples or None))
    x, hits = projected(config, x), []
    for named in models:
        predictor = config.chosen_method.predictor(setup, named, checkpoint.learned)
        hits.append(predictor.predict(x).argmax(1) == labels)

    def accuracy(of: Tensor) -> Accuracy:
        return Accuracy(int(of.sum()), *(float(hit[of].double().mean()) for hit in hits))

    theirs = np.concatenate([setup.split.train_and_test(k, config)[0] for k in gone])
    by_class = {int(label): labels == label for label in np.unique(setup.data.y_train[theirs])}
    unlearned = Unlearned(
        folder,
        gone,
        len(theirs),
        accuracy(torch.ones_like(labels, dtype=torch.bool)),
        {label: accuracy(selected) for label, selected in by_class.items() if selected.any()},
    )
    content = asdict(unlearned) | {"folder": str(folder), "run": str(run.folder)}
    write_json(folder / "unlearned.json", content)
    if forget:
        strategy.storage.forget(gone)
    return unlearned


def delete(
    run: Run | str | Path,
    client: int,
    rows: Sequence[int],
    *,
    trust: bool = False,
    progress: bool = True,
) -> Run:
    """Delete some of a client's training examples, and go on for a round, which solves without.

    The model is then that of a run that never had them, to the bit, and the file of the run's
    folder ``details/changes/changes-<run>.jsonl`` has a signed record more.

    Parameters
    ----------
    run : Run, or path of its folder
        A finished run with the setting ``changes`` of its method.
    client : int
        Partition.
    rows : sequence of int
        Places among its training examples, from 0. Of equal rows the last one goes.
    trust : bool
        As in :func:`~fedntk.simulations.load_predictor`.
    progress : bool
        As in :func:`~fedntk.simulations.run`.

    Raises
    ------
    ConfigError
        The run's settings do not allow it, client or row is unknown, or the row was deleted before.
    FileNotFoundError, RunFailed
        There is no finished run.
    """
    run = run_with_its_data(run, trust=trust)
    config = run.config.replace(out=run.folder)
    if not getattr(config.chosen_method.settings_in(config), "changes", None):
        raise ConfigError(f"{run.folder}: expected a run with the setting changes = true")
    setup = load_setup(config)
    if not 0 <= client < len(setup.split.clients):
        raise ConfigError(f"client: expected 0 ... {len(setup.split.clients) - 1}, got {client}")
    x, y = setup.examples(client).train
    if not rows or not 0 <= min(rows) <= max(rows) < len(y):
        raise ConfigError(f"rows: expected some of 0 ... {len(y) - 1}, got {list(rows)[:10]}")
    with naming(str(run.folder), ValueError):
        counted_rows(config, client).delete(x[list(rows)], y[list(rows)])
    rounds = load_checkpoint(run.folder).round + 1
    result = run_rounds(config, resume=True, rounds=rounds, progress=progress)
    (path,) = (run.folder / "details" / "changes").glob("*.jsonl")
    if verify_records(path)[-1]["round"] < rounds:
        raise RunFailed(
            f"{run.folder}: round {rounds} did not count the change, and the log says why; to try "
            f"again: fedntk run --resume {run.folder} --set rounds={rounds + 1}"
        )
    return result


def load_strategy(run: Any, needed: str, trust: bool) -> tuple[Run, Checkpoint, Setup, Any]:
    """Load a finished run, and its strategy as it was at the end, which must have a method."""
    run = run_with_its_data(run, trust=trust)
    config, checkpoint = run.config.replace(weights="", out=run.folder), load_checkpoint(run.folder)
    setup = load_setup(config)
    strategy: Any = make_strategy(setup)
    if not hasattr(strategy, needed):
        raise ConfigError(
            f"{run.folder}: {type(strategy).__name__} cannot take a client out of what it learned"
        )
    with naming(str(run.folder), ValueError):
        strategy.load_state_dict(checkpoint.strategy)
    return run, checkpoint, setup, strategy


def _folder(run: Run, clients: Sequence[int], out: str | Path | None) -> Path:
    """Return the new model's folder, unless something else is in one that the caller named."""
    name = "without-" + "-".join(map(str, clients))
    if out is None and len(name) > 200:
        raise ConfigError(f"out: name a folder, as the names of {len(clients)} clients are long")
    if out is None:  # whatever an earlier call, which may have been killed, left there
        return place_in(run.folder, name)
    folder = Path(out)
    if folder.exists() and not (folder / "unlearned.json").exists() and any(folder.iterdir()):
        raise ConfigError(f"out: expected a folder that is new or empty, got {folder}")
    return folder


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
