"""Tables and pictures of finished runs, in one folder, and as one page."""

import json
import logging
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs

from ..config.metrics import metrics_of
from ..config.settings import ConfigError
from ..data.load import load_data
from ..data.partitions import SPLIT_SETTINGS, load_split
from ..errors import place_in
from . import figures, statistics
from .results import Run, describe_replies, read_runs

QUALITIES = {"accuracy": "accuracy", "r2": "R^2"}  # metric -> its name in reports
MARKS = re.compile(r"[\\|<`\x00-\x1f\x7f-\x9f]|(?<=\])\(")  # of Markdown, and of terminals
# how what a spreadsheet computes begins
FORMULA = re.compile(r"^['\ufeff\u200b ]*[=+\-@\uff1d\uff0b\uff0d\uff20\t\r\n]")
# how costs to a target are shown -> their key, unit and digits
COSTS = {
    "rounds": ("round", 1, 0),
    "MB up": ("bytes-up", 1e6, 1),
    "MB down": ("bytes-down", 1e6, 1),
    "s": ("seconds", 1, 1),
}
# beginnings of metrics without curves in report.html
UNDRAWN = ("bytes", "seconds", "replies", "rejected", "peak-memory", "num-examples", "models-")
MOST_POINTS = 300  # of such a curve
TRAINING = "training examples"
Targets = Sequence[float] | None
logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Section:
    """A part of the report: a title, what it shows, and a table or a chart or both."""

    title: str
    text: str
    frame: pd.DataFrame | None = None
    chart: str = ""


def write_report(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    targets: Targets = None,
    trust: bool = False,
) -> Path:
    """Write a report on all finished runs in a folder; return the path of ``report.md``.

    It holds tables and pictures; ``targets.tex`` has the rounds, data and time to each target in
    LaTeX, and ``report.html`` tables to sort and curves to explore, in one file. FileNotFoundError
    if there is no finished run.

    `folder` is a run's, or holds runs at any depth, and `out` is by default ``report`` in it.
    `targets` are accuracies, by default the runs' own, and `trust` is as in :meth:`Config.of_run`.
    """
    runs = read_runs(folder, trust=trust)
    out = Path(out) if out is not None else place_in(Path(folder), "report")
    out.mkdir(parents=True, exist_ok=True)
    quality = quality_of(runs)
    rounds, clients = _join_tables(runs)
    target_table(runs, targets).to_latex(out / "targets.tex", index=False, escape=True)
    options = words_of_curves(runs)
    pictures = {
        f"{quality}-{x}": figures.accuracy_curves(rounds, against=x, metric=quality, **options)
        for x in figures.AXES
    }
    for name in {name: 0 for run in runs for name in metrics_of(run.config.metrics)}:
        having = rounds[rounds.run.isin(rounds[rounds.metric == name].run)]
        if len(having):
            pictures[f"metric-{name}"] = figures.accuracy_curves(having, metric=name, **options)
    alphas = {str(run.summary["run"]): run.config.alpha for run in runs}
    dirichlet = all("dirichlet" in run.config.partition for run in runs)
    if dirichlet and len(set(alphas.values())) > 1:
        named = rounds.assign(method=rounds.run.map(_without_alpha(runs)))
        pictures["heterogeneity"] = figures.accuracy_against_heterogeneity(named, alphas, **options)
    if len(clients):
        title = f"Clients' {_examples_of_clients(runs)}, last five rounds"
        pictures["clients"] = figures.client_accuracies(clients, title=title)
        write_csv(statistics.client_accuracy_table(clients).reset_index(), out / "clients.csv")
    for number, (title, labels, split) in enumerate(_splits(runs), 1):
        name = "labels" if number == 1 else f"labels-{number}"
        pictures[name] = figures.label_distribution(labels, split, title=title)
    for name, (run, *_) in _group(runs).items():  # what methods draw, of each run's first seed
        drawn = figures.figures_of_details(run.folder / "details")
        pictures |= {f"{kind}-{name}": figure for kind, figure in drawn.items()}
    pictures = {re.sub(r"\W+", "-", name).strip("-"): figure for name, figure in pictures.items()}
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png")
    others = {path.parent.resolve() for path in Path(folder).rglob("rounds.jsonl")}
    left_out = sorted(others - {run.folder.resolve() for run in runs})
    html = write_html(runs, out / "report.html", targets=targets, left_out=left_out)
    setting = as_markdown(setting_in_words(runs)) or "Runs on several data sets or splits."
    paragraphs = ["# Report", setting]
    paragraphs += [f"- {as_markdown(warning)}" for warning in _warnings(runs, left_out)]
    for section in _sections(runs, targets):
        if section.frame is not None:
            paragraphs += [f"## {section.title}", section.text, markdown(section.frame)]
    for name, (run, *_) in _group(runs).items():  # tables of what methods found, as of their seeds
        for path in sorted((run.folder / "details").glob("*.csv")):
            title = f"## {path.stem.capitalize()} of {as_markdown(name)}, seed {run.config.seed}"
            paragraphs += [title, markdown(pd.read_csv(path).map(_short))]
    paragraphs += [
        "\n".join(f"![{name}]({name}.png)" for name in pictures),
        f"Tables to sort, curves to explore, and all settings: [{html.name}]({html.name})\n",
    ]
    (out / "report.md").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return out / "report.md"


def write_html(
    runs: Sequence[Run], path: str | Path, *, targets: Targets = None, left_out: Sequence[Path] = ()
) -> Path:
    """Write a report on runs as one HTML file, which needs no network; return its path.

    `targets` is as in :func:`write_report`, and `left_out` has folders to name in a warning.
    """
    rounds, clients = _join_tables(runs)
    looks = figures.styles(rounds.run)
    shorter = sorted(_without_alpha(runs).items(), reverse=True)
    looks = {label: looks[name] for name, label in shorter} | looks
    data = {
        "styles": looks,
        "curves": _curves(rounds),
        "profile": _profiles(_scores(runs)),
        "clients": _client_points(clients),
        "split": [
            {"title": title, "counts": figures.class_counts(labels, clients[:200]).T.tolist()}
            for title, labels, clients in _splits(runs)
        ],
    }
    sections = [*_sections(runs, targets), *_sections_of_settings(runs)]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True)
    templates.filters["digest"] = lambda text: b64encode(sha256(text.encode()).digest()).decode()
    text = templates.get_template("page.html").render(
        setting=setting_in_words(runs),
        warnings=_warnings(runs, left_out),
        sections=[section for section in sections if not section.chart or data[section.chart]],
        styles=looks,
        data=json.loads(pd.Series(data).to_json(double_precision=6)),  # with null for NaN
        plotly=get_plotlyjs(),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _curves(rounds: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each run's seeds, and curves of at most 300 rounds of metrics that all runs have."""
    shared = sorted(set.intersection(*(set(rows.metric) for _, rows in rounds.groupby("run"))))
    metrics = [m for m in shared if not m.removeprefix("client-").startswith(UNDRAWN)]
    runs: list[dict[str, Any]] = []
    for name, rows in rounds.groupby("run"):
        run: dict[str, Any] = {"name": name, "seeds": rows.seed.nunique(), "metrics": {}}
        for metric in metrics:
            values = figures.curve(rows, metric)
            some = values.iloc[:: -(-len(values) // MOST_POINTS) or 1]
            run["metrics"][metric] = some.to_dict("list")
        runs.append(run)
    return runs


def _profiles(scores: pd.DataFrame) -> dict[str, Any]:
    """Return each run's performance profile, in per cent."""
    thresholds = np.quantile(scores.value, np.linspace(0, 1, 60), method="nearest")
    thresholds = np.unique([thresholds[0] - 0.01, *thresholds])  # where shares change
    profile = 100 * statistics.performance_profile(scores, thresholds).set_index("run")
    return {str(name): rows.to_dict("list") for name, rows in profile.groupby("run")}


def _client_points(clients: pd.DataFrame) -> dict[str, Any]:
    """Return the newest accuracy of each client of each run, in per cent, with its name."""
    newest = statistics.newest_accuracies(clients)
    words = "client " + newest.partition.astype(str) + ", seed " + newest.seed.astype(str)
    newest = newest.assign(accuracy=100 * newest.accuracy, client=words)
    return {
        str(name): {"x": rows.accuracy.tolist(), "text": rows.client.tolist()}
        for name, rows in newest.groupby("run")
    }


def _join_tables(runs: Sequence[Run]) -> tuple[pd.DataFrame, pd.DataFrame]:
    rounds = pd.concat([run.rounds for run in runs], ignore_index=True)
    clients = pd.concat([run.clients for run in runs], ignore_index=True)
    return rounds, clients[clients.metric == "accuracy"]


def quality_of(runs: Sequence[Run]) -> str:
    """Return the metric that runs are compared by, accuracy or r2; ValueError if they differ."""
    qualities = {run.quality for run in runs}
    if len(qualities) > 1:
        raise ValueError("runs: expected classification or regression, got both; name a metric")
    return qualities.pop()


def _scores(runs: Sequence[Run]) -> pd.DataFrame:
    """Return last accuracies; runs that differ only in alpha are one with several tasks."""
    tasks = {str(run.summary["run"]): setting_in_words([run]) for run in runs}
    scores = statistics.run_scores(_join_tables(runs)[0], quality_of(runs), tasks=tasks)
    if len(set(tasks.values())) > 1:
        scores["run"] = scores.run.map(_without_alpha(runs))
    return scores


def _sections(runs: Sequence[Run], targets: Targets) -> Iterator[Section]:
    """Yield what a report shows, in order."""
    text = (
        f"Measured on: {evaluated_on(runs)} examples. Means over the seeds, and in brackets 95 % "
        "bootstrap intervals (Agarwal et al. 2021). These are too narrow with few seeds: with 3 "
        "they hold the true mean in about 75 % of all cases, with 10 in 90 %."
    )
    yield Section(QUALITIES[quality_of(runs)].capitalize(), text, final_table(runs))
    yield Section("Curves", "", chart="curves")
    text = (
        "A round counts by the mean of five evaluations, two before and two after it. Medians over "
        "the seeds that reach it; in brackets how many do, if not all. Data is what all clients "
        "send (up) and receive (down) for training, together."
    )
    word = QUALITIES[quality_of(runs)]
    yield Section(f"Rounds, data and time to each {word}", text, target_table(runs, targets))
    scores = _scores(runs)
    over_seeds = statistics.summary_over_seeds(scores)
    if (over_seeds.scores > 3).any():  # else both means are those above
        text = (
            f"Scores are the last {word}, one for each seed and split. Mean, and mean of the "
            "middle half, with 95 % stratified bootstrap intervals."
        )
        frame = _join_ends(over_seeds, "mean (%)", "interquartile mean (%)")
        yield Section("Over seeds and splits", text, frame)
    names = [name for name in _baselines(runs) if name in set(scores.run)]
    pairs = statistics.paired_differences(scores, names or [scores.run.min()])
    pairs = pairs[pairs.pairs > 1]
    if len(pairs):
        text = f"Mean differences of the last {word} between runs of the same seed and split."
        yield Section("Paired differences", text, _join_ends(pairs, "difference (points)"))
    if (over_seeds.scores > 3).all():  # fewer say no more than the tables
        text = "Share of a run's seeds and splits with a last value above each; bands are "
        yield Section("Performance profile", f"{text}95 % bootstrap intervals.", chart="profile")
    clients = _join_tables(runs)[1]
    if len(clients):
        yield from _sections_of_clients(runs, clients)
    yield Section("Classes of the clients", "Of each split's first seed.", chart="split")


def _join_ends(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Return the names of runs, the triples value, low, high as texts, and then counts."""
    texts = table.iloc[:, :3].copy()
    for number, name in enumerate(names):
        ends = table.iloc[:, 3 * number + 3 :].to_numpy()
        place = number + 1 + ("against" in table)
        texts.insert(place, name, [statistics.Estimate(*row[:3]).text() for row in ends])
    return texts


def _short(cell: Any) -> Any:
    return f"{cell:.6g}" if isinstance(cell, float) else cell


def _write_per_cent(table: pd.DataFrame, columns: list[str]) -> None:
    table[columns] = (100 * table[columns]).map("{:.1f}".format).replace("nan", "-")


def _sections_of_clients(runs: Sequence[Run], clients: pd.DataFrame) -> Iterator[Section]:
    summary, groups = statistics.client_summary(clients), _group(runs)
    summary["examples"] = [_examples_of_clients(groups[name]) for name in summary.run]
    _write_per_cent(summary, ["mean", "mean-std", "worst", "std"])
    shown = {"mean-std": "std over seeds", "worst": "worst client", "std": "std over clients"}
    text = (
        f"Accuracy (%) on each client's {_examples_of_clients(runs)}, each client counting once: "
        "its newest of a run's last five rounds. Means over the seeds; std: standard deviation."
    )
    yield Section("Clients", text, summary.rename(columns=shown), "clients")
    gains = statistics.client_gains(clients, _baselines(runs))
    if len(gains):
        _write_per_cent(gains, ["gain", "lose", "mean-gain", "largest-gain", "largest-loss"])
        text = (
            "Clients that gain or lose more than one point against each baseline (%), and by how "
            "many points."
        )
        yield Section("Clients' gains", text, gains)


def _sections_of_settings(runs: Sequence[Run]) -> Iterator[Section]:
    settings, machines = {}, {}
    for name, (run, *_) in _group(runs).items():
        settings[name] = run.config.values()
        machines[name] = run.summary["machine"] | {k: run.summary[k] for k in ("device", "threads")}
    for title, values in (("Settings", settings), ("Machine", machines)):
        frame = pd.DataFrame(values).drop(["name", "out", "seed"], errors="ignore")
        frame = frame.astype(object).where(frame.notna(), "-").astype(str)
        same = frame.nunique(axis=1) == 1
        if same.all():
            frame = frame.iloc[:, :1].set_axis(["all runs"], axis=1)
        frame = pd.concat([frame[~same], frame[same]]).rename_axis(title.lower())
        text = "" if same.all() else "What differs comes first."
        yield Section(title, text, frame.reset_index())


def _warnings(runs: Sequence[Run], left_out: Sequence[Path]) -> list[str]:
    groups, seeds = _group(runs), {run.summary["seed"] for run in runs}
    splits = {(run.summary["seed"], run.summary["split"]) for run in runs}
    machines = {str((run.summary["machine"], run.summary["threads"])) for run in runs}

    def listed(names: Sequence[str]) -> str:
        return "all runs" if len(names) == len(groups) > 1 else ", ".join(names)

    warnings = []
    if single := [name for name, group in groups.items() if len(group) == 1]:
        warnings.append(f"One seed, so no interval: {listed(single)}.")
    if len(splits) != len(seeds):
        warnings.append("The runs have different data or splits.")
    if len(machines) > 1:
        warnings.append("The runs are from different machines: do not compare seconds.")
    if "test" in evaluated_on(runs):
        warnings.append("Best accuracies are chosen on the test examples, so they are optimistic.")
    if trained := [n for n, group in groups.items() if TRAINING in _examples_of_clients(group)]:
        warnings.append(
            "Clients' accuracies are of their training examples, as none are held out: "
            f"{listed(trained)}. Set local-test-fraction or private-test."
        )
    if left_out:
        paths = ", ".join(map(str, left_out))
        warnings.append(f"Left out, as not finished, not readable or there twice: {paths}.")
    for run in runs:
        if replies := describe_replies(run.summary):
            warnings.append(f"{run.summary['run']}, seed {run.summary['seed']}: {replies}.")
    return warnings


def _examples_of_clients(runs: Sequence[Run]) -> str:
    kinds = set()
    for config in (run.config for run in runs if len(run.clients)):
        kind = "held-out examples" if config.local_test_fraction else TRAINING
        of_test = config.private_test and config.evaluate_on == "test"
        kinds.add("part of the test set" if of_test else kind)
    return " or ".join(sorted(kinds))


def evaluated_on(runs: Sequence[Run]) -> str:
    """Return which examples the runs' accuracies are of: test, validation, or both words."""
    return " or ".join(sorted({run.config.evaluate_on for run in runs}))


def words_of_curves(runs: Sequence[Run]) -> dict[str, Any]:
    """Return title and axis of pictures of the runs, as options of their functions."""
    return {"title": setting_in_words(runs), "evaluated_on": evaluated_on(runs)}


def _baselines(runs: Sequence[Run]) -> list[str]:
    return list(_group([run for run in runs if run.config.chosen_method.baseline]))


def write_tuning_report(
    out: Path, trials: pd.DataFrame, searched: Sequence[str], *, metric: str, lines: Sequence[str]
) -> None:
    """Write a search's table (Markdown, LaTeX, CSV) under `lines`, and its values as a picture.

    `trials` is the table of a :class:`~fedntk.simulations.Tuning`.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_csv(trials, out / "trials.csv")
    shown = trials.drop(columns=["mean", "std", *([] if trials.error.any() else ["error"])])
    means = trials["mean"].map("{:.4f}".format).replace("nan", "-")
    shown.insert(2, metric, means + trials["std"].map(" ± {:.4f}".format).replace(" ± nan", ""))
    for key in shown[[*searched, "seconds"]].select_dtypes("float"):
        shown[key] = shown[key].map("{:.4g}".format)
    shown.to_latex(out / "trials.tex", index=False, escape=True)
    figures.tuning_values(trials, searched, metric=metric).savefig(out / "values.png")
    text = ["# Search for settings", *map(as_markdown, lines), markdown(shown)]
    text += ["![values](values.png)", ""]
    (out / "report.md").write_text("\n\n".join(text), encoding="utf-8")


def markdown(table: pd.DataFrame) -> str:
    """Return a table as Markdown, in which no text makes a tag, a link or a cell."""
    return _with_texts(table, as_markdown).to_markdown(index=False, disable_numparse=True)


def as_markdown(text: str) -> str:
    """Return Markdown that shows a text: no tag, link, cell or escape code begins in it."""
    return MARKS.sub(lambda mark: f"\\{mark[0]}" if mark[0].isprintable() else " ", text)


def write_csv(table: pd.DataFrame, path: Path, **options: Any) -> None:
    """Write a table; texts that FORMULA matches have an apostrophe more, to be taken away again."""
    texts = _with_texts(table, lambda text: FORMULA.sub(r"'\g<0>", text))
    texts.to_csv(path, index=False, lineterminator="\r\n", **options)  # else \r has no quotes


def _with_texts(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    cells = table.map(lambda cell: change(cell) if isinstance(cell, str) else cell)
    return cells.rename(columns=lambda name: change(str(name)))


def final_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row a run: accuracies or R^2 with intervals, data, time; means over seeds."""
    rows, quality = [], quality_of(runs)
    word = QUALITIES[quality]
    for name, group in _group(runs).items():
        summaries = pd.DataFrame([run.summary for run in group])
        low, high = summaries["rounds"].min(), summaries["rounds"].max()
        metrics = pd.DataFrame([run.summary.get("metrics", {}) for run in group])
        worst = [value for run in group for value in run.curve(f"client-{quality}-worst")[-1:]]
        rows.append(
            {
                "run": name,
                f"last {word} (%)": _spread(summaries[quality]),
                f"best {word} (%)": _spread([run.curve().max() for run in group]),
                "worst client (%)": _spread(worst),
                **({"last MAE": _spread(summaries["mae"], 1, 3)} if "mae" in summaries else {}),
                **{f"last {metric}": _spread(metrics[metric], 1, 3) for metric in metrics},
                "seeds": len(group),
                "rounds": str(low) if low == high else f"{low}-{high}",
                "MB up": f"{summaries['bytes-up'].mean() / 1e6:.1f}",
                "MB down": f"{summaries['bytes-down'].mean() / 1e6:.1f}",
                "seconds": f"{summaries['seconds'].mean():.1f}",
            }
        )
    return pd.DataFrame(rows).fillna("-")  # a metric that not all runs have


def target_table(runs: Sequence[Run], targets: Targets = None) -> pd.DataFrame:
    """Return one row a run: rounds, MB and seconds to each target; medians over seeds."""
    if targets is None:
        targets = sorted({target for run in runs for target in run.config.targets})
    rows = []
    for name, group in _group(runs).items():
        row = {"run": name}
        for target in targets:
            reached = pd.DataFrame(filter(None, (run.to_target(target) for run in group)))
            few = f" ({len(reached)} of {len(group)})" if len(reached) < len(group) else ""
            for label, (key, unit, digits) in COSTS.items():
                text = "-"
                if len(reached):
                    text = f"{reached[key].median() / unit:.{digits}f}{few}"
                row[f"{label} to {100 * target:g} %"] = text
        rows.append(row)
    return pd.DataFrame(rows)


def _group(
    runs: Sequence[Run], key: Callable[[Run], str] = lambda run: str(run.summary["run"])
) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _spread(values: Sequence[float] | pd.Series, factor: float = 100, digits: int = 1) -> str:
    return statistics.estimate([pd.Series(values, dtype=float).dropna()]).text(factor, digits)


def setting_in_words(runs: Sequence[Run]) -> str:
    """Return in words the data and split that all runs share; empty if they differ."""
    described = set()
    for config in (run.config for run in runs):
        clients = f"{config.num_clients} clients, {config.clients_a_round} a round"
        text = f"{config.dataset}, {clients}, {config.partition}"
        if "dirichlet" in config.partition:
            text += f"({config.alpha:g})"
        if config.partition == "pathological":
            text += f" of {config.classes_per_client} classes"
        described.add(text)
    return described.pop() if len(described) == 1 else ""


def _without_alpha(runs: Sequence[Run]) -> dict[str, str]:
    """Return name of a run -> one name for the runs that differ from it only in alpha."""
    labels: dict[str, str] = {}
    same = {"alpha": 1.0, "seed": 0, "name": "", "out": "", "rounds": 0}
    for group in _group(runs, lambda run: str(run.config.replace(**same).values())).values():
        names = list(_group(group))
        shared = os.path.commonprefix(names).strip(" ,_-=/")  # noqa: RUF071 - of names, not paths
        labels |= dict.fromkeys(names, shared or group[0].config.chosen_method.name)
    return labels


def _splits(runs: Sequence[Run]) -> Iterator[tuple[str, NDArray[np.int64], Any]]:
    """Yield title, labels and clients' examples of each setting's split, with its first seed."""
    keys = ["dataset", *(name for name in SPLIT_SETTINGS if name != "seed")]
    for run, *_ in _group(runs, lambda r: str([getattr(r.config, k) for k in keys])).values():
        config = run.config
        try:
            place = Path(config.data_dir or ".").expanduser()
            if config.mechanism is not None or "hf:" in config.dataset or not place.is_dir():
                continue  # exact counts, or what would have to be fetched
            data, clients = load_data(config), load_split(config).clients
            if data.has_real_targets:
                continue
            labels = data.y_train
        except (ConfigError, OSError) as error:
            logger.warning("no picture of the split: %s", error)
            continue
        yield f"{setting_in_words([run])}: seed {config.seed}", labels, clients
