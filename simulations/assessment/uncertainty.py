"""How far a run's predictions can be trusted: calibration, uncertainty, unfamiliar data, sets."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from fedntk.ntk.predictors.conformal import Score, calibrate, prediction_sets, rank
from fedntk.ntk.predictors.ensemble import EnsemblePredictor, uncertainty_of
from fedntk.ntk.predictors.network import Predictor

from ..config.settings import ConfigError
from ..configuration import Config
from ..data.load import load_data
from ..data.partitions import load_split
from ..engine.building import load_predictor
from ..errors import naming, place_in
from ..report.figures import rejection_curves, reliability_diagram, uncertainty_histogram
from ..report.report import as_markdown, markdown, setting_in_words, write_csv
from ..report.results import Run, run_with_its_data, write_json
from .uncertainty_metrics import SHARES, auroc, calibration, rejection_curve, reliability

# measures of uncertainty -> what tables and pictures call them
MEASURES = {
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "doubt": "1 - confidence",
}
DRAWS = 4  # in the seed of the adaptive score's draws


@dataclass(frozen=True)
class ConformalSets:
    """Conformal prediction sets of a run's test examples; shares are between 0 and 1."""

    coverage: float  # asked for
    score: Score
    calibrated_on: str  # which examples
    num_calibration: int  # how many
    threshold: float  # the largest score in a set
    test_coverage: float  # share of the test examples with their class in the set
    # the range of test_coverage in 95 % of all draws of calibration and test examples, if all are
    # exchangeable and no two scores the same
    expected_low: float
    expected_high: float
    mean_size: float  # classes in a set, averaged over the test examples
    empty: float  # share of the sets that are empty
    note: str  # how the run had used the calibration examples, if it had


@dataclass(frozen=True, eq=False)
class Assessment:
    """How far the predictions of a finished run can be trusted.

    Attributes
    ----------
    which : {"model", "best"}
        Which of the run's models was assessed.
    table : DataFrame
        A row for the ensemble and one for each of its models, or one for a single model:
        ``accuracy``, ``nll``, ``brier``, ``ece`` as of :func:`calibration`, and with unfamiliar
        examples ``auroc_entropy``, ``auroc_mutual_information`` (NaN for a single model) and
        ``auroc_doubt``.
    examples, unfamiliar : DataFrame, DataFrame or None
        A row for each test example, in the data set's order: ``label``, ``prediction``,
        ``confidence``, ``doubt`` (1 - confidence), ``entropy``, ``expected_entropy``,
        ``mutual_information`` (nats), ``variance``, and with a coverage ``set_size``; and for each
        unfamiliar example, without labels and sets.
    unfamiliar_name : str
        Name of the data set of these.
    rejection : DataFrame
        Tidy: ``model``, ``measure``, ``rejected`` (a share) and ``accuracy``.
    reliability : dict of str to DataFrame
        :func:`reliability` of each row of `table`.
    sets : ConformalSets or None
        The prediction sets, if a coverage was asked for.
    """

    run: Run
    which: str
    table: pd.DataFrame
    examples: pd.DataFrame
    unfamiliar: pd.DataFrame | None
    unfamiliar_name: str
    rejection: pd.DataFrame
    reliability: Mapping[str, pd.DataFrame]
    sets: ConformalSets | None

    def figures(self) -> dict[str, Figure]:
        """Return the pictures, by name."""
        title = setting_in_words([self.run])
        pictures = {
            "reliability": reliability_diagram(self.reliability, title=title),
            "rejection": rejection_curves(self.rejection, title=title),
        }
        if self.unfamiliar is not None:
            tables = {self.run.config.dataset: self.examples, self.unfamiliar_name: self.unfamiliar}
            for measure in self.rejection.measure.unique():
                pictures[f"unfamiliar-{measure.replace('_', '-')}"] = uncertainty_histogram(
                    {name: table[measure].to_numpy() for name, table in tables.items()},
                    label=f"{MEASURES[measure]}{'' if measure == 'doubt' else ' (nats)'}",
                    title=f"{self.table.index[0]}: {title}",
                )
        return pictures

    def write(self, out: str | Path | None = None) -> Path:
        """Write tables and pictures into `out`; return the path of ``report.md``.

        By default `out` is the folder ``uncertainty`` of the run. ``metrics.json`` has all figures,
        and ``examples.parquet`` and ``unfamiliar.parquet`` those of each example.
        """
        out = place_in(self.run.folder, "uncertainty") if out is None else Path(out)
        out.mkdir(parents=True, exist_ok=True)
        for stale in (*out.glob("unfamiliar-*.png"), *out.glob("unfamiliar.parquet")):
            stale.unlink()  # of an earlier assessment
        self.examples.to_parquet(out / "examples.parquet", index=False)
        if self.unfamiliar is not None:
            self.unfamiliar.to_parquet(out / "unfamiliar.parquet", index=False)
        write_csv(self.rejection, out / "rejection.csv", float_format="%.6g")
        pictures = self.figures()
        for name, figure in pictures.items():
            figure.savefig(out / f"{name}.png")
        shown = self._shown_table()
        shown.to_latex(out / "table.tex", index=False, escape=True)
        content = {
            "run": self.run.summary["run"],
            "model": self.which,
            "examples": len(self.examples),
            "unfamiliar": self.unfamiliar_name or None,
            "models": self.table.astype(object).where(self.table.notna(), None).to_dict("index"),
            "sets": None if self.sets is None else asdict(self.sets),
        }
        write_json(out / "metrics.json", content)
        text = [*self._paragraphs(shown), *(f"![{name}]({name}.png)" for name in pictures)]
        (out / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
        return out / "report.md"

    def _shown_table(self) -> pd.DataFrame:
        """Return `table` as text, with a row for the mean of an ensemble's models."""
        table = self.table
        if len(table) > 1:
            mean = table.iloc[1:].mean().rename("mean of the models")
            table = pd.concat([table.iloc[:1], mean.to_frame().T, table.iloc[1:]])
        forms = {
            "accuracy": ("accuracy (%)", "{:.1%}"),
            "nll": ("NLL (nats)", "{:.4f}"),
            "brier": ("Brier", "{:.4f}"),
            "ece": ("ECE", "{:.4f}"),
            **{f"auroc_{key}": (f"AUROC, {name}", "{:.3f}") for key, name in MEASURES.items()},
        }
        shown = pd.DataFrame({"model": table.index})
        for key in table.columns[table.notna().any()]:
            label, form = forms[key]
            texts = table[key].map(form.format).str.rstrip("%").replace("nan", "-")
            shown[label] = texts.to_numpy()
        return shown

    def _paragraphs(self, shown: pd.DataFrame) -> list[str]:
        summary, config, sets = self.run.summary, self.run.config, self.sets
        name, setting = map(as_markdown, (summary["run"], setting_in_words([self.run])))
        newest, best = self.which == "model", summary["best"]
        rounds = summary["rounds"] if newest or not best else best["round"]
        paragraphs = [
            "# Uncertainty",
            f"{name}, the {'last' if newest else 'best'} model, of round {rounds}: {setting}. "
            f"{len(self.examples)} test examples.",
        ]
        private = config.private_test or config.monitor in ("accuracy", "loss")
        if not newest and config.evaluate_on == "test" and private:
            paragraphs.append(
                "The best model was chosen on these test examples, so the figures are optimistic."
            )
        paragraphs += ["## Calibration", markdown(shown)]
        if self.unfamiliar is not None:
            paragraphs.append(
                f"AUROC: how well uncertainty separates {len(self.unfamiliar)} examples of "
                f"{as_markdown(self.unfamiliar_name)} from the test examples; 0.5: not at all."
            )
        whole = self.rejection[self.rejection.model == self.table.index[0]]
        percent = (100 * whole.rejected).round().astype(int)
        some = whole.assign(percent=percent)[percent.isin((0, 5, 10, 20, 30, 50))]
        rows = some.pivot_table(index="measure", columns="percent", values="accuracy", sort=False)
        rows = (100 * rows).map("{:.1f}".format).rename(columns="{} %".format, index=MEASURES)
        paragraphs += [
            "## Accuracy of what is not rejected",
            "Accuracy (%) of the remaining test examples if a share is rejected, the most "
            "uncertain first.",
            markdown(rows.rename_axis("rejected by").reset_index()),
        ]
        if sets is not None:
            row = {
                "coverage asked for (%)": f"{100 * sets.coverage:g}",
                "coverage of the test examples (%)": f"{100 * sets.test_coverage:.1f}",
                "expected if exchangeable (%)": (
                    f"{100 * sets.expected_low:.1f} to {100 * sets.expected_high:.1f}"
                ),
                "mean size": f"{sets.mean_size:.2f}",
                "empty (%)": f"{100 * sets.empty:.1f}",
            }
            paragraphs += [
                "## Prediction sets",
                f"Score: {sets.score}. Calibrated on {sets.calibrated_on}. The range holds in 95 % "
                f"of all draws of exchangeable calibration and test examples. {sets.note}".rstrip(),
                markdown(pd.DataFrame([row])),
            ]
        return paragraphs


def assess(
    run: Run | str | Path,
    *,
    unfamiliar: str | None = None,
    coverage: float | None = None,
    score: Score = "threshold",
    calibrate_on: Literal["clients", "examples"] | None = None,
    which: Literal["model", "best"] = "model",
    trust: bool = False,
) -> Assessment:
    """Say how far the predictions of a finished run can be trusted, on its test examples.

    Parameters
    ----------
    run : Run, or path of its folder
        A run of any method with the loss cross-entropy: one network, or an ensemble.
    unfamiliar : str, optional
        Another data set with examples of the same shape, by a name that the setting ``dataset``
        takes: the model should be uncertain of its test set.
    coverage : float, optional
        Coverage of conformal prediction sets, between 0 and 1:
        :mod:`fedntk.ntk.predictors.conformal` says what guarantees it.
    score : {"threshold", "adaptive"}
        Score of these sets: see :func:`fedntk.ntk.conformal_scores`. The adaptive one draws from
        the run's seed.
    calibrate_on : {"clients", "examples"}, optional
        Whether the run's ``validation-clients`` or its ``validation-examples`` calibrate the sets;
        by default the clients, if it held some out.
    which : {"model", "best"}
        The last model, or the best one by the setting ``monitor``.
    trust : bool
        As in :func:`~fedntk.simulations.load_predictor`.

    Raises
    ------
    ConfigError
        The model's outputs are no probabilities, the other data set does not fit, or too little
        was held out for the coverage.
    FileNotFoundError, RunFailed
        There is no finished run.
    """
    run = run_with_its_data(run, trust=trust)
    if which not in ("model", "best"):
        raise ConfigError(f"which: expected model or best, got {which!r}")
    config = run.config
    predictor = load_predictor(run, which)
    if predictor.targets is not None:
        raise ConfigError("assess is of classes; with real targets use intervals(run, coverage)")
    if predictor.loss != "cross-entropy":
        raise ConfigError(
            f"expected a model whose loss is cross-entropy, got {predictor.loss}, whose outputs "
            "are no probabilities; run it with loss = cross-entropy, or with the method's own loss"
        )
    held_out = None if coverage is None else held_out_examples(config, which, calibrate_on)
    strangers = None if unfamiliar is None else _load_unfamiliar(config, unfamiliar)
    data, tested = load_data(config), slice(config.test_examples or None)
    models = _by_model(predictor, data.x_test[tested])
    labels = torch.from_numpy(data.y_test[tested])
    examples = {name: _examples(logs, labels) for name, logs in models.items()}
    table = pd.DataFrame({n: calibration(_together(logs), labels) for n, logs in models.items()}).T
    whole, *_ = models  # the ensemble, or the single model
    others: dict[str, pd.DataFrame] = {}
    if strangers is not None:
        others = {name: _examples(logs) for name, logs in _by_model(predictor, strangers).items()}
        for measure in MEASURES:
            table[f"auroc_{measure}"] = [
                auroc(examples[name][measure].to_numpy(), others[name][measure].to_numpy())
                if measure in _measures(logs)
                else float("nan")
                for name, logs in models.items()
            ]
    sets = None
    if held_out is not None:
        indices, examples_used, note = held_out
        held = _together(_by_model(predictor, data.x_train[indices])[whole]).exp()
        y, p = torch.from_numpy(data.y_train[indices]), _together(models[whole]).exp()
        described: Any = {"coverage": coverage, "calibrated_on": examples_used, "note": note}
        sets, sizes = _make_sets(held, y, p, labels, score, config.seed, **described)
        examples[whole]["set_size"] = sizes
    return Assessment(
        run=run,
        which=which,
        table=table,
        examples=examples[whole],
        unfamiliar=others.get(whole),
        unfamiliar_name=unfamiliar or "",
        rejection=_rejection(models, examples),
        reliability={n: reliability(_together(logs).exp(), labels) for n, logs in models.items()},
        sets=sets,
    )


def _by_model(predictor: Predictor, x: NDArray[Any]) -> dict[str, Tensor]:
    """Name -> log-probabilities, float64 (k, n, C): all models as the ensemble, then each."""
    if isinstance(predictor, EnsemblePredictor):
        scores = predictor.scores(x)
    else:
        scores = predictor.predict(x)[None]
    log_p = scores.double().log_softmax(-1)
    if len(log_p) == 1:
        return {"model": log_p}
    return {"ensemble": log_p} | {f"model {k}": log_p[k : k + 1] for k in range(len(log_p))}


def _together(log_p: Tensor) -> Tensor:
    """Return the log of the mean probabilities (n, C) of k models (k, n, C)."""
    return log_p.logsumexp(0) - math.log(len(log_p))


def _measures(log_p: Tensor) -> list[str]:
    return [m for m in MEASURES if len(log_p) > 1 or m != "mutual_information"]  # of one: 0


def _examples(log_p: Tensor, labels: Tensor | None = None) -> pd.DataFrame:
    """Prediction and uncertainty of each example, given k models' log-probabilities (k, n, C)."""
    confidence, prediction = _together(log_p).exp().max(1)
    columns = {} if labels is None else {"label": labels}
    columns |= {"prediction": prediction, "confidence": confidence, "doubt": 1 - confidence}
    columns |= vars(uncertainty_of(log_p.exp()))
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


def _rejection(models: Mapping[str, Tensor], examples: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    parts = []
    for name, table in examples.items():
        correct = (table.prediction == table.label).to_numpy()
        for measure in _measures(models[name]):
            accuracy = rejection_curve(table[measure].to_numpy(), correct)
            columns = {"model": name, "measure": measure, "rejected": SHARES, "accuracy": accuracy}
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _load_unfamiliar(config: Config, name: str) -> NDArray[Any]:
    if name == config.dataset:
        raise ConfigError(f"unfamiliar: expected another data set than the run's, got {name!r}")
    data = load_data(config)
    with naming(f"unfamiliar = {name}", ValueError):
        x = load_data(config.replace(dataset=name)).x_test[: config.test_examples or None]
        data.inputs(x[:1])
    return x


def held_out_examples(
    config: Config, which: str, on: str | None
) -> tuple[NDArray[np.int64], str, str]:
    """Return indices of examples that nobody trained on, which they are, and a note on them."""
    counts = {"clients": config.validation_clients, "examples": config.validation_examples}
    if on and on not in counts:
        raise ConfigError(f"calibrate-on: expected clients or examples, got {on!r}")
    on = on or next((name for name, count in counts.items() if count), "clients or examples")
    if not counts.get(on):
        keys = " or ".join(f"validation-{name}" for name in on.split(" or "))
        raise ConfigError(f"coverage: the run held out no {on} to calibrate on; run it with {keys}")
    split, reason = load_split(config), ""
    indices, described = split.validation, f"{len(split.validation)} held-out examples"
    if on == "clients":
        indices = np.concatenate(split.clients[-config.validation_clients :])
        described = f"the {len(indices)} examples of {config.validation_clients} held-out clients"
        if which == "best" and config.monitor.startswith("client-"):
            reason = "they may have chosen the best model"
    if config.chosen_method.chosen_by(config):
        reason = "they chose part of the model"
    note = f"In the run {reason}, so the stated coverage holds only approximately."
    return indices, described, note if reason else ""


def _make_sets(
    held: Tensor, y: Tensor, p: Tensor, labels: Tensor, score: Score, seed: int, **described: Any
) -> tuple[ConformalSets, NDArray[np.int64]]:
    """Return the sets, and the size of each, from probabilities and labels of held and test data.

    `described` has other fields of the sets.
    """
    from scipy.stats import betabinom

    coverage, draws = described["coverage"], list[Tensor | None]((None, None))
    if score == "adaptive":
        generator = np.random.default_rng([seed, DRAWS])
        draws = [torch.from_numpy(generator.random(len(part))) for part in (held, p)]
    try:
        threshold = calibrate(held, y, coverage, score=score, draws=draws[0])
        sets = prediction_sets(p, threshold, score=score, draws=draws[1])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    sizes: NDArray[np.int64] = sets.sum(1).numpy()
    k = rank(len(held), coverage)
    low, high = betabinom(len(p), k, len(held) + 1 - k).interval(0.95)
    conformal = ConformalSets(
        score=score,
        num_calibration=len(held),
        threshold=threshold,
        test_coverage=float(sets.gather(1, labels[:, None]).double().mean()),
        expected_low=float(low / len(p)),
        expected_high=float(high / len(p)),
        mean_size=float(sizes.mean()),
        empty=float((sizes == 0).mean()),
        **described,
    )
    return conformal, sizes
