"""Pictures of runs: colour-blind safe, labelled with units.

Each function returns a matplotlib Figure, which Jupyter shows and ``savefig`` writes. A table
`rounds` is one that :func:`~fedntk.simulations.load_results` returns, `title` stands above the
picture, and `evaluated_on` is the runs' setting of this name.

A run has one style in all pictures: that of its place, by name, among all runs of the comparison.
Tables know these runs by ``attrs["runs"]``, which pandas keeps when rows are selected.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from .statistics import newest_accuracies

# Okabe and Ito's palette, with a grey that is seen on black as well for its black; each colour has
# a marker of its own, and is dashed when it comes again
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
MARKERS = "os^Dvp*"
LINES = ("-", "--", ":")
MOST_BANDS = 4  # more would lie over each other
MOST_CLIENTS = 50  # of a picture of labels

# what an accuracy can be drawn against -> (label, factor from the table's unit)
AXES = {
    "rounds": ("communication round", 1.0),
    "bytes-up": ("data sent by clients (MB)", 1e-6),
    "bytes-down": ("data received by clients (MB)", 1e-6),
    "seconds": ("time (s)", 1.0),
}


def accuracy_curves(
    rounds: pd.DataFrame,
    *,
    against: str = "rounds",
    title: str = "",
    target: float | None = None,
    bottom: float = 0.0,
    evaluated_on: str = "test",
    metric: str = "accuracy",
) -> Figure:
    """Draw accuracy, or another metric as it is, against a key of AXES: one curve a run.

    Several seeds of a run become their mean, with a band from the lowest to the highest, or with
    bars if there are more than four such runs, as far as all seeds have rounds. `target` is an
    accuracy to mark with a line, `bottom` the one at which the axis begins.
    """
    if against not in AXES:
        raise ValueError(f"against: expected one of {', '.join(AXES)}, got {against!r}")
    unit, name_of_unit = (100, " (%)") if metric == "accuracy" else (1, "")
    label = f"{evaluated_on} {metric}{name_of_unit}"
    figure, axes = _figure(title, AXES[against][0], label)
    several = rounds.groupby("run").seed.nunique() > 1
    crowded = several.sum() > MOST_BANDS
    for number, (name, rows, style) in enumerate(_each(rounds, "run")):
        drawn = curve(rows, metric)
        x = drawn[against]
        mean, low, high = (unit * drawn[end] for end in ("mean", "min", "max"))
        axes.plot(x, mean, ms=4, markevery=max(len(x) // 20, 1), label=_plain(name), **style)
        if several[name] and crowded:
            step = max(len(x) // 5, 3)
            some = slice(number % step, None, step)
            bars = (mean - low)[some], (high - mean)[some]
            axes.errorbar(x[some], mean[some], bars, fmt="none", ecolor=style["color"], capsize=2)
        elif several[name]:
            axes.fill_between(x, low, high, color=style["color"], alpha=0.2, lw=0)
    if target is not None:
        axes.axhline(unit * target, color="0.5", lw=1, ls="--", zorder=0)
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "color": "0.4"}
        axes.text(1.01, unit * target, f"{unit * target:g}{name_of_unit and ' %'}", **place)
    if metric == "accuracy":
        axes.set_ylim(100 * bottom, 100 if bottom == 0 else None)
    if against == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
    marks = f"{'bars' if crowded else 'band'}: range over seeds" if several.any() else None
    if len(several) > MOST_BANDS:
        columns = max(1, 75 // (8 + rounds.run.str.len().max()))  # as many as have room
        figure.set_figheight(4 + 0.25 * -(-len(several) // columns))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, title=marks)
    else:
        axes.legend(loc="lower right", frameon=False, title=marks)
    return figure


def accuracy_against_heterogeneity(
    rounds: pd.DataFrame,
    alphas: Mapping[str, float],
    *,
    title: str = "",
    evaluated_on: str = "test",
) -> Figure:
    """Draw the best accuracy against the concentration, `alphas` by run: one curve a method."""
    figure, axes = _figure(title, ylabel=f"best {evaluated_on} accuracy (%)")
    axes.set_xlabel(r"Dirichlet concentration $\alpha$ (smaller: more heterogeneous)")
    accuracy = rounds[rounds.metric == "accuracy"]
    best = accuracy.groupby(["run", "method", "seed"], sort=False).value.max().reset_index()
    best["alpha"] = best.run.map(alphas)
    many = best.duplicated(["method", "alpha"]).any()
    looks = styles(rounds.attrs.get("runs", best.run))
    for method, rows in best.groupby("method", sort=False):
        style = looks.get(str(method)) or looks[rows.run.min()]
        values = 100 * rows.groupby("alpha").value.agg(["mean", "min", "max"])
        bars = values["mean"] - values["min"], values["max"] - values["mean"]
        label = _plain(str(method))
        axes.errorbar(values.index, values["mean"], bars, capsize=3, label=label, **style)
    axes.set_xscale("log")  # once there are points
    _tick(axes, best.alpha)
    axes.legend(loc="lower right", frameon=False, title="bars: range over seeds" if many else None)
    return figure


def client_accuracies(clients: pd.DataFrame, *, title: str = "") -> Figure:
    """Draw the share of clients whose :func:`newest_accuracies` are below each accuracy."""
    labels = "accuracy on a client's own examples (%)", "clients with at most this accuracy (%)"
    figure, axes = _figure(title, *labels)
    axes.set(xlim=(0, 100), ylim=(0, 101))
    for name, rows, style in _each(clients, "run"):
        values = 100 * np.sort(newest_accuracies(rows).accuracy.to_numpy())
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        style = {**style, "marker": "", "label": _plain(name)}
        axes.step([0, *values, 100], [0, *shares, 100], where="post", **style)
    axes.legend(loc="upper left", frameon=False)
    return figure


def label_distribution(
    labels: NDArray[np.int64], clients: Sequence[NDArray[np.int64]], *, title: str = ""
) -> Figure:
    """Draw how many examples of each class each client holds: a disc's area is their number.

    `labels` (n,) are of all training examples, and `clients` has the indices of each client's.
    """
    counts = class_counts(labels, clients[:MOST_CLIENTS])
    client, label = np.nonzero(counts)
    largest, (shown, classes) = int(counts.max()), counts.shape
    few = f" (the first {shown} of {len(clients)})" if len(clients) > shown else ""
    figure, axes = _figure(title, f"client{few}", "class", size=(8.0, 4.0))
    axes.set(xlim=(-1, shown), ylim=(-0.7, classes - 0.3))
    disc: Any = {"color": COLOURS[0], "lw": 0}
    axes.scatter(client, label, s=110 * counts[client, label] / largest, **disc)
    for example in (largest, max(largest // 4, 1)):
        axes.scatter([], [], s=110 * example / largest, label=f"{example}", **disc)
    if classes <= 20:
        axes.set_yticks(range(classes))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(title="examples", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def class_counts(
    labels: NDArray[np.int64], clients: Sequence[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return how many examples each client has of each class, (clients, classes)."""
    classes = int(labels.max()) + 1
    return np.stack([np.bincount(labels[indices], minlength=classes) for indices in clients])


def tuning_values(
    trials: pd.DataFrame, searched: Sequence[str], *, metric: str = "accuracy"
) -> Figure:
    """Draw the value of each trial of a search against each setting that was searched."""
    columns = min(len(searched), 3)
    rows = -(-len(searched) // columns)
    figure = _Picture(figsize=(max(4.2 * columns, 6.4), 4 * rows), dpi=120, layout="constrained")
    for place, key in enumerate(searched, 1):
        axes = figure.add_subplot(rows, columns, place)
        label = f"validation {metric}" if place % columns == 1 % columns else ""
        _frame(axes, key, label)
        x = trials[key]
        in_words = x.dtype == bool or not pd.api.types.is_numeric_dtype(x)
        if in_words:
            x = x.astype(str).map(_plain)
            axes.xaxis.update_units(sorted(x))  # type: ignore[no-untyped-call] # their order
            axes.margins(x=0.2)
        for state, colour, marker in (("finished", COLOURS[0], "o"), ("pruned", COLOURS[4], "x")):
            shown = (trials.state == state) & trials["mean"].notna()
            axes.errorbar(
                x[shown], trials["mean"][shown], trials["std"][shown],
                fmt=marker, color=colour, capsize=3, label=state if shown.any() else None,
            )  # fmt: skip
        first = x.iloc[:1], trials["mean"].iloc[:1]
        axes.plot(*first, "o", ms=13, mfc="none", mec=COLOURS[1], label="best")
        if not in_words and 0 < 10 * x.min() <= x.max():
            axes.set_xscale("log")
        if not in_words and x.nunique() <= 6:
            _tick(axes, x)
    bars = ", bars: standard deviation over seeds" if trials["std"].notna().any() else ""
    figure.suptitle(f"Means over the last rounds and over seeds{bars}", fontsize="medium")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def reliability_diagram(tables: Mapping[str, pd.DataFrame], *, title: str = "") -> Figure:
    """Draw accuracy against confidence, of bins with 10 examples or more.

    `tables` is an :attr:`Assessment.reliability <fedntk.simulations.Assessment.reliability>`, whose
    first is drawn with markers.
    """
    figure, axes = _figure(title, "confidence (%)", "accuracy (%)")
    axes.set(xlim=(0, 100), ylim=(0, 100))
    axes.plot([0, 100], [0, 100], color="0.5", lw=1, ls="--", zorder=0, label="calibrated")
    first: dict[str, Any] = {"color": COLOURS[0], "marker": MARKERS[0], "ms": 4, "zorder": 3}
    other: dict[str, Any] = {"color": COLOURS[1], "lw": 0.8, "alpha": 0.7}
    for number, (name, table) in enumerate(tables.items()):
        shown = 100 * table[table.examples >= 10]
        label = [name, "its single models", None][min(number, 2)]
        axes.plot(shown.confidence, shown.accuracy, label=label, **(other if number else first))
    axes.legend(loc="upper left", frameon=False)
    return figure


def rejection_curves(rejection: pd.DataFrame, *, title: str = "") -> Figure:
    """Draw the accuracy of what is left when the most uncertain examples are rejected.

    `rejection` is an :attr:`Assessment.rejection <fedntk.simulations.Assessment.rejection>`.
    """
    labels = "most uncertain examples that are rejected (%)", "accuracy of the others (%)"
    figure, axes = _figure(title, *labels)
    first = rejection.model.iloc[0]
    table = rejection[rejection.model == first]
    for name, rows, style in _each(table, "measure"):
        words = "1 - confidence" if name == "doubt" else name.replace("_", " ")
        x = 100 * rows.rejected
        axes.plot(x, 100 * rows.accuracy, ms=4, markevery=10, label=f"{first}: {words}", **style)
    others = rejection[(rejection.model != first) & (rejection.measure == "entropy")]
    for number, (_, rows) in enumerate(others.groupby("model", sort=False)):
        label = "its single models: entropy" if number == 0 else None
        axes.plot(100 * rows.rejected, 100 * rows.accuracy, color="0.5", lw=0.8, label=label)
    axes.set(xlim=(0, 99), ylim=(None, 100.5))
    axes.legend(loc="lower right", frameon=False)
    return figure


def uncertainty_histogram(
    values: Mapping[str, NDArray[np.float64]], *, label: str, title: str = ""
) -> Figure:
    """Draw how an uncertainty (n,), named `label` with its unit, is spread in several data sets."""
    figure, axes = _figure(title, label, "share of the examples (%)")
    edges = np.linspace(0, max(float(scores.max()) for scores in values.values()) or 1.0, 41)
    for (name, scores), colour in zip(values.items(), cycle(COLOURS)):
        look: Any = {"histtype": "stepfilled", "fc": (colour, 0.25), "ec": colour, "lw": 1.5}
        weights = np.full(len(scores), 100 / len(scores))
        axes.hist(scores, edges.tolist(), weights=weights, label=_plain(name), **look)
    axes.set_xlim(0, edges[-1])
    axes.legend(loc="upper right", frameon=False)
    return figure


def similarity_heat_map(
    similarities: NDArray[np.float64],
    clients: Sequence[int] | NDArray[np.int64],
    *,
    title: str = "",
) -> Figure:
    """Draw `similarities` (K, K) of K clients with these numbers, similar ones side by side."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    similarities = np.asarray(similarities)
    order = np.arange(len(similarities))
    if len(order) > 2:  # as the leaves of a hierarchical clustering
        distances = np.clip(1 - (similarities + similarities.T) / 2, 0, None)
        near = squareform(distances, checks=False)
        order = leaves_list(linkage(near, "average", optimal_ordering=True))
    figure, axes = _figure(title, "client", "client", size=(5.6, 4.8))
    axes.grid(visible=False)
    image = axes.imshow(similarities[np.ix_(order, order)], interpolation="nearest")
    figure.colorbar(image, label="cosine similarity")
    places = np.arange(0, len(order), -(-len(order) // 30))  # more would run into each other
    names = [str(clients[order[i]]) for i in places]
    axes.set_xticks(places, names, rotation=90, fontsize=7)
    axes.set_yticks(places, names, fontsize=7)
    return figure


def client_harms(table: pd.DataFrame) -> Figure:
    """Draw the clients' scores in a ledger, the worst first, above what they have of each class."""
    figure = _Picture(figsize=(9, 5), dpi=120, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    places, shares = np.arange(len(table)), table.filter(regex="^class-")
    above.bar(places, table.score, color=np.where(table.removed, "tab:red", "tab:blue").tolist())
    above.axhline(0, color="black", linewidth=0.8)
    above.set_ylabel("harm, standard deviations\nover an honest client's")
    above.set_title("Clients, the most harmful first; red: removed from the model")
    picture = below.imshow(shares.T, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    figure.colorbar(picture, ax=below, label="share of the class")
    names = [_plain(str(name).removeprefix("class-")) for name in shares]
    below.set_yticks(range(len(names)), names, fontsize=6)
    below.set(ylabel="class", xlabel="client")
    if len(table) <= 50:
        below.set_xticks(places, [str(client) for client in table.client], fontsize=7)
    return figure


def selection_accuracies(curves: pd.DataFrame, *, title: str = "") -> Figure:
    """Draw what :func:`~fedntk.simulations.methods.decentralised.selection_curves` returns."""
    figure, axes = _figure(title, "clients averaged", "accuracy of their mean (%)")
    for name, rows, style in _each(curves, "order"):
        axes.plot(rows.clients, 100 * rows.accuracy, label=name, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def figures_of_details(folder: Path) -> dict[str, Figure]:
    """Draw what methods wrote into a run's ``details``, by name."""
    figures, curves = {}, folder / "selection.parquet"
    if curves.exists():
        figures["selection"] = selection_accuracies(pd.read_parquet(curves))
    if files := sorted(folder.glob("similarity-*.npz")):
        number = int(files[-1].stem.partition("-")[2])
        with np.load(files[-1]) as saved:
            similarities, clients = saved["similarities"], saved["clients"]
        title = f"Similarity in round {number}"
        figures["similarity"] = similarity_heat_map(similarities, clients, title=title)
    return figures


def as_html(table: pd.DataFrame, figure: Figure) -> str:
    """Return a table and a picture as HTML that Jupyter shows."""
    code = base64.b64encode(_png(figure)).decode()
    shown = table.to_html(index=False, border=0)
    return f'{shown}<img alt="curves of accuracy" src="data:image/png;base64,{code}">'


class _Picture(Figure):
    """A figure that Jupyter shows without pyplot, which would keep each one in memory."""

    def _repr_png_(self) -> bytes:
        return _png(self)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return buffer.getvalue()


def _figure(
    title: str, xlabel: str = "", ylabel: str = "", *, size: tuple[float, float] = (6.4, 4.0)
) -> tuple[Figure, Axes]:
    figure = _Picture(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(_plain(title))
    _frame(axes, xlabel, ylabel)
    return figure, axes


def _frame(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set(xlabel=_plain(xlabel), ylabel=_plain(ylabel))
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # Matplotlib takes what is between two for a formula


def _tick(axes: Axes, values: "pd.Series[float]") -> None:
    shown = sorted(values.unique())
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.set_xticks([], minor=True)


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line of each of a comparison's runs, by their names in order."""
    keys, colours = ("linestyle", "color", "marker"), zip(COLOURS, MARKERS, strict=True)
    looks = [dict(zip(keys, (line, *look), strict=True)) for line, look in product(LINES, colours)]
    return dict(zip(sorted(set(map(str, names))), cycle(looks), strict=False))


def _each(table: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]:
    """Yield rows by the values of a column, with a style that depends only on the value."""
    names = table[column].unique()
    runs = table.attrs.get("runs", ())
    looks = styles(runs if column == "run" and set(names) <= set(runs) else names)
    for name, rows in table.groupby(column, sort=False):
        yield str(name), rows, looks[str(name)]


def curve(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return mean, min and max of a run's metric over the seeds that all rounds have, and costs."""

    def over_seeds(metric: str) -> pd.DataFrame:
        values = rows[rows.metric == metric].groupby("round").value
        return values.agg(["mean", "min", "max"])[values.size() == rows.seed.nunique()]

    costs = {key: over_seeds(key)["mean"].cumsum() * AXES[key][1] for key in list(AXES)[1:]}
    return over_seeds(metric).assign(rounds=lambda values: values.index, **costs)
