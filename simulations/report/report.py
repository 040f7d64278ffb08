"""Tables and pictures of finished runs, in one folder."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..config.settings import ConfigError
from ..data.client_tables import client_accuracy_table, client_gains, client_summary
from ..data.load import load_data
from ..data.partitions import SPLIT_SETTINGS, load_split
from .figures import (
    AXES,
    accuracy_against_heterogeneity,
    accuracy_curves,
    client_accuracies,
    label_distribution,
    tuning_values,
)
from .results import Run, read_runs

logger = logging.getLogger("flwr")


def write_report(
    folder: str | Path, out: str | Path | None = None, *, targets: Sequence[float] | None = None
) -> Path:
    """Write a report on all finished runs in a folder; return the path of ``report.md``.

    It holds accuracy against rounds, data sent and time; accuracy against heterogeneity, if splits
    of several concentrations were run; the rounds, data and time to each target (``targets.tex``
    has them in LaTeX); the accuracies of single clients; and the split of the labels.
    FileNotFoundError if there is no finished run.

    Parameters
    ----------
    folder : path
        A run's folder, or one that holds runs at any depth.
    out : path, optional
        Folder of the report: ``report`` in `folder` by default.
    targets : sequence of float, optional
        Accuracies for the table of rounds to targets; by default the runs' own.
    """
    runs = read_runs(folder)
    out = Path(out) if out is not None else Path(folder) / "report"
    out.mkdir(parents=True, exist_ok=True)
    rounds = pd.concat([run.rounds for run in runs], ignore_index=True)
    clients = pd.concat([run.clients for run in runs], ignore_index=True)
    to_targets = target_table(runs, targets)
    write_latex(to_targets, out / "targets.tex")
    judged = " or ".join(sorted({run.config.evaluate_on for run in runs}))
    pictures = {
        f"accuracy-{against}": accuracy_curves(
            rounds, against=against, title=setting_in_words(runs), evaluated_on=judged
        )
        for against in AXES
    }
    alphas = {str(run.summary["run"]): run.config.alpha for run in runs}
    dirichlet = all("dirichlet" in run.config.partition for run in runs)
    if dirichlet and len(set(alphas.values())) > 1:
        pictures["heterogeneity"] = accuracy_against_heterogeneity(
            rounds, alphas, labels=_without_alpha(runs), evaluated_on=judged
        )
    if len(clients):
        pictures["clients"] = client_accuracies(
            clients, title="Clients' own examples, last five rounds"
        )
    pictures |= _splits(runs)
    for name, own in _group(
        runs
    ).items():  # what methods draw of their own runs, each of its first seed
        word = re.sub(r"[^\w]+", "-", name).strip("-")
        found = own[0].config.chosen_method.pictures(own[0].folder / "details")
        pictures |= {f"{kind}-{word}": figure for kind, figure in found.items()}
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png")
    paragraphs = [
        "# Report",
        setting_in_words(runs) or "Runs on several data sets or splits.",
        "## Accuracy",
        f"Measured on: {judged} examples.",
        markdown(final_table(runs)),
        "## Rounds, data and time to each accuracy",
        "Medians over the seeds that reach it; in brackets how many do, if not all. Data is what "
        "clients send for training.",
        markdown(to_targets),
        *(_of_clients(runs, clients, out) if len(clients) else ()),
        "\n".join(f"![{name}]({name}.png)" for name in pictures),
    ]
    (out / "report.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    return out / "report.md"


def _of_clients(runs: Sequence[Run], clients: pd.DataFrame, out: Path) -> list[str]:
    """Write each client's accuracies; describe their spread and gains."""
    client_accuracy_table(clients).reset_index().to_csv(out / "clients.csv", index=False)
    summary = client_summary(clients)
    for column in ("mean", "mean-std", "worst", "std"):
        summary[column] = (100 * summary[column]).map("{:.1f}".format).replace("nan", "-")
    paragraphs = [
        "## Clients",
        "Accuracy (%) on each client's own examples for evaluation, each client counting once: its "
        "newest of a run's last five rounds. Mean over the clients and its standard deviation over "
        "the seeds; the worst client; standard deviation over the clients.",
        markdown(summary),
    ]
    baselines = [str(r.summary["run"]) for r in runs if r.config.chosen_method.baseline]
    gains = client_gains(clients, list(dict.fromkeys(baselines)))
    if len(gains):
        for column in ("gain", "lose", "mean-gain", "largest-gain", "largest-loss"):
            gains[column] = (100 * gains[column]).map("{:.1f}".format)
        paragraphs += [
            "Clients that gain or lose more than one point against each baseline (%), and by how "
            "many points.",
            markdown(gains),
        ]
    return paragraphs


def write_tuning_report(
    out: Path,
    trials: pd.DataFrame,
    searched: Sequence[str],
    *,
    metric: str,
    lines: Sequence[str],
) -> None:
    """Write the table of a search (Markdown, LaTeX, CSV), and its values against each setting.

    `out` is the folder of the report, `trials` the table of a :class:`~fedntk.simulations.Tuning`,
    `metric` the name of its values, and `lines` is the text before the table.
    """
    out.mkdir(parents=True, exist_ok=True)
    trials.to_csv(out / "trials.csv", index=False)
    shown = trials.drop(columns=["mean", "std", *([] if trials.error.any() else ["error"])])
    values = [
        "-" if pd.isna(mean) else f"{mean:.4f}" + ("" if pd.isna(std) else f" ± {std:.4f}")
        for mean, std in zip(trials["mean"], trials["std"], strict=True)
    ]
    shown.insert(2, metric, values)
    for key in [*searched, "seconds"]:
        if pd.api.types.is_float_dtype(shown[key]):
            shown[key] = shown[key].map("{:.4g}".format)
    write_latex(shown, out / "trials.tex")
    tuning_values(trials, searched, metric=metric).savefig(out / "values.png")
    text = ["# Search for settings", *lines, markdown(shown), "![values](values.png)", ""]
    (out / "report.md").write_text("\n\n".join(text), encoding="utf-8")


def markdown(table: pd.DataFrame) -> str:
    """Return a table as Markdown, its texts unchanged."""
    return table.to_markdown(index=False, disable_numparse=True)


def write_latex(table: pd.DataFrame, path: Path) -> None:
    """Write a table as LaTeX."""
    styled = table.style.hide(axis="index").format(escape="latex")
    text = styled.format_index(escape="latex", axis="columns").to_latex(hrules=True)
    path.write_text(text, encoding="utf-8")


def final_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row a run: accuracy of its models, clients, data, time; means over seeds."""
    rows = []
    for name, own in _group(runs).items():
        summaries = pd.DataFrame([run.summary for run in own])
        low, high = summaries["rounds"].min(), summaries["rounds"].max()
        worst = [value for run in own for value in run.curve("client-accuracy-worst")[-1:]]
        rows.append(
            {
                "run": name,
                "seeds": len(own),
                "rounds": str(low) if low == high else f"{low}-{high}",
                "last accuracy (%)": _spread(summaries["accuracy"]),
                "best accuracy (%)": _spread(pd.Series([run.curve().max() for run in own])),
                "worst client (%)": _spread(pd.Series(worst, dtype=float)),
                "MB up": f"{summaries['bytes-up'].mean() / 1e6:.1f}",
                "MB down": f"{summaries['bytes-down'].mean() / 1e6:.1f}",
                "seconds": f"{summaries['seconds'].mean():.1f}",
            }
        )
    return pd.DataFrame(rows)


def target_table(runs: Sequence[Run], targets: Sequence[float] | None = None) -> pd.DataFrame:
    """Return one row a run: rounds, MB up and seconds to each target; medians over seeds."""
    rows = []
    if targets is None:
        targets = sorted({target for run in runs for target in run.config.targets})
    forms = {"rounds": ("round", 1, "{:.0f}"), "MB up": ("bytes-up", 1e6, "{:.1f}")}
    forms["s"] = "seconds", 1, "{:.1f}"
    for name, own in _group(runs).items():
        row = {"run": name}
        for target in targets:
            reached = [found for run in own if (found := run.to_target(target)) is not None]
            few = f" ({len(reached)} of {len(own)})" if len(reached) < len(own) else ""
            for label, (key, unit, form) in forms.items():
                values = [found[key] / unit for found in reached]
                value = form.format(np.median(values)) + few if reached else "-"
                row[f"{label} to {100 * target:g} %"] = value
        rows.append(row)
    return pd.DataFrame(rows)


def _group(
    runs: Sequence[Run], key: Callable[[Run], str] = lambda run: str(run.summary["run"])
) -> dict[str, list[Run]]:
    """Return the runs by a key, by default their names."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _spread(shares: "pd.Series[float]") -> str:
    """Return mean and standard deviation over the seeds, in per cent."""
    values = 100 * shares
    if values.isna().all():
        return "-"
    return f"{values.mean():.1f}" + (f" ± {values.std():.1f}" if len(values) > 1 else "")


def setting_in_words(runs: Sequence[Run]) -> str:
    """Return in words the data and split that all runs share; empty if they differ."""
    described = {
        f"{c.dataset}, {c.num_clients} clients, {c.clients_a_round} a round, {c.partition}"
        + (f"({c.alpha:g})" if "dirichlet" in c.partition else "")
        + (f" of {c.classes_per_client} classes" if c.partition == "pathological" else "")
        for c in (run.config for run in runs)
    }
    return described.pop() if len(described) == 1 else ""


def _without_alpha(runs: Sequence[Run]) -> dict[str, str]:
    """Return name of a run -> one name for the runs that differ from it only in alpha."""
    labels: dict[str, str] = {}
    same = {"alpha": 1.0, "seed": 0, "name": "", "out": "", "rounds": 0}
    for own in _group(runs, lambda run: str(run.config.replace(**same).values())).values():
        names = list(_group(own))
        shared = os.path.commonprefix(names).strip(" ,_-=/")  # noqa: RUF071 - of names, not paths
        labels |= dict.fromkeys(names, shared or own[0].config.method)
    return labels


def _splits(runs: Sequence[Run]) -> dict[str, Figure]:
    """Return a picture of the split of each setting, with its first seed."""
    pictures: dict[str, Figure] = {}
    keys = ["dataset", *(name for name in SPLIT_SETTINGS if name != "seed")]
    for run, *_ in _group(runs, lambda r: str([getattr(r.config, k) for k in keys])).values():
        config = run.config
        try:
            labels, clients = load_data(config).y_train, load_split(config).clients
        except (ConfigError, OSError) as error:
            logger.warning("no picture of the split: %s", error)
            continue
        title = f"{setting_in_words([run])}: seed {config.seed}"
        name = "labels" if not pictures else f"labels-{len(pictures) + 1}"
        pictures[name] = label_distribution(labels, clients, title=title)
    return pictures
