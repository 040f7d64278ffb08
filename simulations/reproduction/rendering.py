"""The figures of a table for readers: Markdown, LaTeX and a picture, beside the paper's own."""

import itertools
import math
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..report.figures import COLOURS, LINES, MARKERS
from ..report.report import markdown
from .declaration import Declaration, Form, Picture, listed
from .measures import MOVED, NO_ROUND

SHOWN_DECILES = (0, 10, 50, 90, 100)  # in tables


def write(declaration: Declaration, table: pd.DataFrame, out: Path) -> Path:
    """Write results.parquet, table.tex, figure.png and table.md; return the path of the last."""
    table.to_parquet(out / "results.parquet", index=False)
    parts, latex = [f"# {declaration.title}", described(declaration, table)], []
    for title, frame in frames(declaration, table):
        parts += [f"## {title}", markdown(frame)] if title else [markdown(frame)]
        latex.append(frame.to_latex(index=False, escape=True, caption=title or None))
    if declaration.figure is not None:
        draw(declaration, table).savefig(out / "figure.png")
        parts.append("![figure](figure.png)")
    (out / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (out / "table.tex").write_text("\n".join(latex), encoding="utf-8")
    return out / "table.md"


def described(declaration: Declaration, table: pd.DataFrame) -> str:
    """Say in sentences what a table shows, at which size, and where it differs from the paper."""
    sentences = [f"{declaration.source}."]
    form: Form = table.form.iloc[0] if len(table) else "paper"
    change = declaration.form(form)
    if form != "paper" and change is not None:
        sentences.append(f"Smaller than in the paper: {change.why.rstrip('.')}.")
    sentences += [declaration.text] if declaration.text else []
    seeds = table.groupby(["row", "column"]).seed.nunique()
    if len(seeds):
        low, high = seeds.min(), seeds.max()
        number = f"{low} to {high}" if low < high else f"{high}"
        words = "seed" if high == 1 else "seeds: mean ± standard deviation"
        sentences.append(f"{number} {words}.")
    if declaration.paper and form != "small":
        sentences.append("In parentheses: the paper's figure.")
    return " ".join(sentences)


def frames(declaration: Declaration, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield title and table of each measure, or of all if there is one column only."""
    parts: dict[str, dict[str, dict[str, str]]] = {}
    places = table.column.astype(str).map(list(declaration.columns).index)
    table = table.iloc[places.argsort(kind="stable")]
    one_column, small = len(declaration.columns) == 1, "small" in set(table.form)
    for name, measure in declaration.measures.items():
        if measure.at in ("curve", "cumulative"):
            continue
        rows = table[(table.measure == name) | table.measure.str.startswith(f"{name}, ")]
        if measure.at == "clients":
            last = rows.groupby(["row", "column"])["round"].transform("max")
            shown = [f"{name}, decile {decile}" for decile in SHOWN_DECILES]
            rows = rows[(rows["round"] == last) & rows.measure.isin(shown)]
        label = titled(declaration, name)
        part = parts.setdefault("" if one_column else label, {})
        keys: Any = rows.groupby(["column", "measure", "round"], sort=False)
        for (column, full_name, number), cell in keys:
            if measure.at not in ("reach", "total") and cell.value.isna().all():
                continue  # it has no meaning there, such as clients that never train
            heading = [label if one_column else declaration.label(column)]
            heading += [full_name[len(name) + 2 :]]
            heading += [f"round {number}"] if measure.at == "rounds" else []
            texts = part.setdefault(", ".join(filter(None, heading)), {})
            for row in declaration.rows:
                values = cell[cell.row == row].value
                of_paper = not small and MOVED not in full_name
                figure = declaration.paper_figure(name, row, column) if of_paper else None
                lacking = "never" if measure.at == "reach" else "without a value"
                text = as_list if measure.each else partial(as_text, lacking=lacking)
                texts[row] = text(values, measure.digits) if len(values) else ""
                if figure not in (None, ""):
                    texts[row] += f" ({figure if isinstance(figure, str) else f'{figure:g}'})"
    for title, columns in parts.items():
        shown = [row for row in declaration.rows if any(texts[row] for texts in columns.values())]
        body = {heading: [texts[row] for row in shown] for heading, texts in columns.items()}
        yield title, pd.DataFrame({"": [declaration.label(row) for row in shown], **body})


def titled(declaration: Declaration, name: str) -> str:
    """Return a measure's label with its unit."""
    measure = declaration.measures[name]
    return f"{measure.label or name}{measure.unit and f' ({measure.unit})'}"


def as_text(values: pd.Series, digits: int, *, lacking: str = "without a value") -> str:
    """Return mean and standard deviation over seeds; how many seeds have none, and why."""
    present = values.dropna()
    if present.empty:
        return "-"
    text = f"{present.mean() + 1e-12:.{digits}f}"
    text += f" ± {present.std():.{digits}f}" if len(present) > 1 else ""
    missing = len(values) - len(present)
    return text + (f", {missing} {lacking}" if missing else "")


def as_list(values: pd.Series, digits: int) -> str:
    """Return the figure of each seed; "-" for one that is missing."""
    return ", ".join("-" if math.isnan(v) else f"{v + 1e-12:.{digits}f}" for v in values)


# ------------------------------------------------------------------------- picture


def draw(declaration: Declaration, table: pd.DataFrame) -> Figure:
    """Draw the declared picture: bands and bars show the range over seeds."""
    picture = declaration.figure
    if picture is None:
        raise ValueError(f"{declaration.name} declares no figure")
    drawn = table[[name.partition(", ")[0] in picture.measures for name in table.measure]]
    limits = (None, None) if "small" in set(drawn.form) else (picture.low, picture.high)
    costs = listed(picture.against)
    parts = dict(_panels(declaration, picture, drawn))
    panels = list(itertools.product(listed(picture.measure), parts, costs))
    across = len(costs) if len(costs) > 1 else min(len(panels), 4)
    down = -(-len(panels) // across)
    size = (max(4.4 * across, 6.4), 3.6 * down + 0.6)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    shared: Any = "row" if len(costs) > 1 else isinstance(picture.measure, str)
    axes = figure.subplots(down, across, squeeze=False, sharey=shared)
    for place, (name, title, cost) in enumerate(panels):
        axis = axes.flat[place]
        one = picture.model_copy(update={"measure": name, "against": cost})
        DRAW[picture.x](axis, declaration.model_copy(update={"figure": one}), parts[title])
        axis.set_title(title, fontsize="medium")
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        if picture.x != "bars":
            if picture.log:
                axis.set_xscale("log", nonpositive="mask")  # a first point at 0 has no place
                axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axis.xaxis.set_major_formatter("{x:g}")
                axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel(titled(declaration, cost) if len(costs) > 1 else picture.x_label)
        if place % across == 0 or not isinstance(picture.measure, str):
            axis.set_ylabel(picture.y_label or titled(declaration, name))
    for axis in axes.flat[: len(panels)]:  # after all are drawn, as panels may share their axis
        axis.set_ylim(*limits)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    pairs = (zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes.flat)
    handles = {label: handle for handle, label in itertools.chain(*pairs)}
    width = 11 + max(map(len, handles), default=1)
    entries = max(1, min(len(handles), int(size[0] * 14 / width)))
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=entries, frameon=False
    )
    return figure


def _panels(
    declaration: Declaration, picture: Picture, drawn: pd.DataFrame
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield title and figures of each panel of a measure."""
    if picture.panels:
        cells = drawn.row.astype(str) + "/" + drawn.column.astype(str)
        for title, patterns in picture.panels.items():
            yield title, drawn[[any(fnmatch(cell, p) for p in patterns) for cell in cells]]
    elif picture.x in ("round", "deciles", "plane") or len(listed(picture.against)) > 1:
        for column in declaration.columns:
            if column in set(drawn.column):
                yield declaration.label(column), drawn[drawn.column == column]
    else:
        yield "", drawn


def _drawn_lines(
    declaration: Declaration, part: pd.DataFrame
) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Yield row, label and style, and cells of each row and measure that have figures."""
    picture = declaration.figure
    if picture is None:
        return
    rows = [row for row in declaration.rows if picture.draws(row)]
    names = [*listed(picture.measure), *picture.also]
    for (place, row), (number, name) in itertools.product(enumerate(rows), enumerate(names)):
        named = (part.measure == name) | part.measure.str.startswith(f"{name}, ")
        cells = part[(part.row == row) & named].dropna(subset="value")
        if cells.empty:
            continue
        words = [declaration.label(row)] if len(rows) > 1 or not picture.also else []
        words += [declaration.measures[name].label or name] if picture.also else []
        again, look = divmod(place if len(rows) > 1 else number, len(COLOURS))
        line = LINES[(number or again) % len(LINES)]
        marker = MARKERS[(look + again) % len(MARKERS)]
        style = {"color": COLOURS[look], "marker": marker, "ls": line, "ms": 4}
        yield row, {"label": ", ".join(words), **style}, cells


def _curves(axis: Axes, declaration: Declaration, part: pd.DataFrame) -> None:
    for _, style, cells in _drawn_lines(declaration, part):
        drawn = cells[cells["round"] != NO_ROUND].groupby("round").value.agg(["mean", "min", "max"])
        every = max(len(drawn) // 12, 1)
        axis.plot(drawn.index, drawn["mean"], markevery=every, **style)
        axis.fill_between(drawn.index, drawn["min"], drawn["max"], color=style["color"], alpha=0.15)


def _deciles(axis: Axes, declaration: Declaration, part: pd.DataFrame) -> None:
    for _, style, cells in _drawn_lines(declaration, part):
        deciles = cells.measure.str.rpartition(" ")[2].astype(int)
        drawn = cells.groupby(["round", deciles]).value.mean().unstack()
        axis.plot(drawn.index, drawn[50], **style)
        for low in range(0, 50, 10):
            edges = drawn[low], drawn[100 - low]
            axis.fill_between(drawn.index, *edges, color=style["color"], alpha=0.12, lw=0)


def _plane(axis: Axes, declaration: Declaration, part: pd.DataFrame) -> None:
    picture = declaration.figure
    if picture is None or picture.low is None or picture.high is None:
        raise ValueError(f"{declaration.name}: a plane needs low and high")
    values = part[part["round"] != NO_ROUND].groupby("round").value.mean().to_numpy()
    side = math.isqrt(len(values))
    places = np.linspace(picture.low, picture.high, side)
    drawn = axis.contourf(places, places, values.reshape(side, side), 20, cmap="cividis")
    label = declaration.measures[part.measure.iloc[0]].label
    axis.figure.colorbar(drawn, ax=axis, label=label)
    axis.plot([0, 1, 0], [0, 0, 1], "^", color="white", mec="black", ms=8)


def _lines(axis: Axes, declaration: Declaration, part: pd.DataFrame) -> None:
    for row, style, cells in _drawn_lines(declaration, part):
        places = cells.column.map(lambda name: declaration.columns[name].x)
        drawn = cells.assign(x=places).groupby("x").value.agg(["mean", "min", "max"])
        bars = [drawn["mean"] - drawn["min"], drawn["max"] - drawn["mean"]]
        axis.errorbar(drawn.index, drawn["mean"], bars, capsize=2, **style)
        if figures := _paper(declaration, row):
            axis.plot(*zip(*figures, strict=True), color=style["color"], marker="x", ls=":", lw=0.8)


def _against(axis: Axes, declaration: Declaration, part: pd.DataFrame) -> None:
    """Draw one measure against another, as means over seeds: a line by round in each column.

    If each column has one point, the line joins them.
    """
    against = declaration.figure.against if declaration.figure else ""
    keys = ["row", "column", "seed", "round"]
    x = part[part.measure == against].set_index(keys).value.rename("x")
    for _, style, cells in _drawn_lines(declaration, part[part.measure != against].join(x, keys)):
        drawn = cells.groupby(["column", "round"])[["x", "value"]].mean()
        lines = [line for _, line in drawn.groupby("column")]
        if drawn.index.get_level_values("column").is_unique:
            lines = [drawn.sort_values("x")]
        for line in lines:
            look = style if len(line) > 1 else style | {"ls": "", "ms": 7}
            axis.plot(line.x, line.value, **look)


def _paper(declaration: Declaration, row: str) -> list[tuple[float, float]]:
    measure = str(declaration.figure.measure) if declaration.figure else ""
    figures = [
        (line.x, declaration.paper_figure(measure, row, column))
        for column, line in declaration.columns.items()
    ]
    return [(x, y) for x, y in figures if x is not None and isinstance(y, int | float)]


def _bars(axis: Axes, declaration: Declaration, part: pd.DataFrame) -> None:
    rows = list(_drawn_lines(declaration, part))
    columns = [c for c in declaration.columns if c in set(part.column)]
    width = 0.8 / max(len(rows), 1)
    measure = str(declaration.figure.measure) if declaration.figure else ""
    for number, (row, style, cells) in enumerate(rows):
        drawn = cells.groupby("column").value.agg(["mean", "min", "max"]).reindex(columns)
        x = np.arange(len(columns)) + width * (number - (len(rows) - 1) / 2)
        axis.bar(x, drawn["mean"], width * 0.92, color=style["color"], label=style["label"])
        bars = [drawn["mean"] - drawn["min"], drawn["max"] - drawn["mean"]]
        axis.errorbar(x, drawn["mean"], bars, fmt="none", color="0.2", capsize=2, lw=1)
        figures = [declaration.paper_figure(measure, row, column) for column in columns]
        numbers = [y if isinstance(y, int | float) else np.nan for y in figures]
        if not np.isnan(numbers).all():
            label = "the paper's" if number == 0 else None
            axis.plot(x, numbers, "D", ms=5, mfc="white", mec="0.2", ls="", label=label)
    names = [textwrap.fill(declaration.label(column), 14) for column in columns]
    axis.set_xticks(range(len(columns)), names)


DRAW = {
    "round": _curves, "deciles": _deciles, "column": _lines, "bars": _bars, "measure": _against,
    "plane": _plane,
}  # fmt: skip
