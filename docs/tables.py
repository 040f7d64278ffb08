"""Write tables of results and lists of the methods into the pages, and the defaults of settings.

Run it as a program (`make pages`) after a result, a method or a setting has changed. A page has

    <!-- table: NAME -->
    ...
    <!-- end of table -->

and what stands between is replaced. The tests refuse a page that is not current.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import binomtest

from fedntk.simulations.reproduction.declaration import Declaration

sys.path.append(str(Path(__file__).parent))
import catalogue
import papers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- table: ([^>]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def rounds_of(name: str) -> pd.DataFrame:
    """Return the table of a benchmark."""
    return pd.read_csv(RESULTS / f"{name}.csv")


def figures(group: str, device: str = "cpu") -> pd.DataFrame:
    """Return rows of speed.csv; each of the further figures is a column."""
    table = rounds_of("speed").query("group == @group and device == @device").reset_index()
    pairs = [re.findall(r"([^;=]+)=([^;]+)(?:; |$)", text) for text in table.more.fillna("")]
    return table.join(pd.DataFrame(map(dict, pairs)).apply(pd.to_numeric))


def markdown(head: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the head's cells are separated by "|"."""
    cells = [cell.strip() for cell in head.split("|")]
    lines = [cells, ["---"] * len(cells), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def number(value: float, digits: int = 1) -> str:
    """Return a rounded number; halves of a decimal go up. Nothing if there is none."""
    return "" if pd.isna(value) else f"{value + 1e-9:.{digits}f}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return number(100 * share)


def columns(name: str, *chosen: str) -> str:
    """Return some columns of a file of results, in percent where a column's name ends with %."""
    table, shown = rounds_of(name), {}
    for column in chosen:
        values = table[column.removesuffix(" %")].astype(object)
        shares = column.endswith(" %")
        texts = values.map(lambda v: f"{v:.2f}" if isinstance(v, float) else v)
        shown[column.replace("-", " ")] = values.map(percent) if shares else texts
    return pd.DataFrame(shown).replace("nan", "").to_markdown(index=False, disable_numparse=True)


def sums_privacy() -> str:
    table = rounds_of("sums_privacy").query("weights == 'first' and bits == 32 and auc > 0")
    share = table["members-found-at-1%-false"].map(lambda share: f" ({100 * share:.0f} %)")
    table["cell"] = table["auc-calibrated"].map("{:.2f}".format) + share
    cells = table.set_index(["examples", "features", "sums"]).cell
    places = list(product(("last-layer", "entk"), ("one client", "sum of ten")))
    return markdown(
        "n | AFL, Fed3R: p = 128, one client's sums | the sum of all ten"
        " | tangent features: p = 1,000, one client's | the sum of all ten",
        ([f"{n:,.0f}", *(cells[n, *place] for place in places)] for n in (1, 10, 100, 1000, 5800)),
    )


def liars_in_sums() -> str:
    """Return who is removed by attack, with the points of accuracy before and after."""
    table = rounds_of("liars_in_sums")
    honest, lied = table[table.share == 0], table[table.share > 0].sort_values("alpha")
    groups = lied.groupby(["attack", "alpha", "clients", "share"])
    sums, means = groups.sum(numeric_only=True), 100 * groups.mean(numeric_only=True)
    cells = (100 * sums.found / sums.liars).map("{:.0f} %".format)
    for when, text in (("before", "; {:+.1f}"), ("after", " to {:+.1f}")):
        points = (means[f"accuracy-{when}"] - means["accuracy-honest"]).round(1) + 0.0
        cells += points.map(text.format).str.replace("+nan", "no model")
    cells = cells.unstack([1, 2, 3])
    without = means["accuracy-honest"].groupby(["alpha", "clients", "share"]).mean()
    rows = [[attack, *row] for attack, row in zip(cells.index, cells.to_numpy(), strict=True)]
    rows.append(["accuracy without them, %", *map(number, without)])
    head = ["attack", *(f"{k} clients, {s:.0%}, Dirichlet {a:g}" for a, k, s in cells)]
    said = (
        f"{part.alarms.sum()} of {(part.clients - part.liars).sum():,} honest clients were removed"
        for part in (honest, lied)
    )
    text = "If all are honest, {}, and 100 clients have {} %; with malicious clients {}. {} seeds."
    accuracy = percent(honest[honest.clients == 100]["accuracy-before"].mean())
    text = text.format(next(said), accuracy, next(said), table.seed.nunique())
    return f"{markdown(' | '.join(head), rows)}\n\n{text}"


def copies_in_sums() -> str:
    """Return who is found of clients that copy their examples, and how often honest ones go."""
    table, splits = rounds_of("copies_in_sums"), ["split", "clients"]
    lied, rows, said = table[table.liars > 0], [], []
    for (attack, times), part in lied.groupby(["attack", "times"], sort=False):
        found = part.groupby(splits)[["found", "harm-found", "liars"]].sum().to_numpy()
        cells = ("{} ({}) of {}".format(*numbers) for numbers in found)
        keys = ["accuracy-before", "harm-accuracy", "accuracy", "accuracy-honest"]
        rows.append([f"{attack}, {times} times", *cells, *map(percent, part[keys].mean())])
    for name, part in (("All are honest", table[table.liars == 0]), ("One is malicious", lied)):
        shares = []
        for count, trials, what in (
            ((part.alarms > 0).sum(), len(part), "federations an honest client was removed"),
            (part.alarms.sum(), (part.clients - part.liars).sum(), "honest clients"),
        ):  # with Clopper and Pearson's interval
            low, high = binomtest(int(count), int(trials)).proportion_ci()
            interval = f"{number(100 * low, 2)} to {number(100 * high, 2)} %"
            shares.append(f"{count} of {trials:,} {what} (95 % interval {interval})")
        said.append(f"{name}: in {', '.join(shares)}.")
    head = ["attack", *("{}, {} clients".format(*key) for key in lied.groupby(splits).groups)]
    head += ["accuracy before", "by harm only", "after", "without them"]
    return "\n\n".join([markdown(" | ".join(head), rows), "\n".join(said)])


def crashes() -> str:
    """Return how many runs of each case ended with the same bits, by what had happened to them."""
    table = rounds_of("crashes").set_index(["case", "trouble"])
    cells = table["same-bits"].astype(str) + " of " + table.runs.astype(str)
    kills = table.xs("kill", level="trouble").disturbed.sort_index()
    rows = (
        [case, number, *(cells.get((case, trouble), "-") for trouble in ("kill", "disk", "loss"))]
        for case, number in kills.items()
    )
    return markdown("Method | Kills | Killed runs | Full disk | Lost store", rows)


def secure_sums() -> str:
    """Return a row for each stage, and seconds of each case that was measured."""
    table = figures("secure_sums")
    names = [*dict.fromkeys(table.case)]
    by_stage = table.pivot(index="way", columns="case", values="seconds")[names]
    rows = []
    for stage in ("shares", "encode", "masked", "confirm", "reveal", "sum", "open"):
        who = "server" if stage in ("sum", "open") else "a client"
        rows.append([stage, who, *(f"{seconds:.2g}" for seconds in by_stage.loc[stage])])
    of_client = table.groupby("case")[["down", "up"]].sum().loc[names] / 1e6
    rows += [
        [f"MB {way}", "a client", *(f"{sent:.3g}" for sent in of_client[way])]
        for way in ("down", "up")
    ]
    return markdown(f"seconds | of | {' | '.join(names)}", rows)


def under_attack() -> tuple[pd.DataFrame, list[list[str]]]:
    """Return accuracies with malicious clients and the points lost; methods with their rules."""
    declaration = Declaration.load(str(papers.MEASURED / "liars.toml"))
    shown = papers.shown(declaration).query("measure == 'accuracy'").reset_index()
    names = (shown.row.astype(str) + "+" + shown.column.astype(str)).str.split("+").tolist()
    keys = ["method", "rule", "data", "alpha", "attack", "liars"]
    table = pd.DataFrame(names, columns=keys).astype({"liars": int})
    table = table.assign(seed=shown.seed, value=shown.value)
    case, honest = ["data", "alpha", "method", "seed"], table.eval("liars == 0 and rule == 'none'")
    without = table[honest].set_index(case).value.rename("honest")
    table = table.join(without, on=case).eval("points = 100 * (honest - value)")
    return table, [name.split("+") for name, row in declaration.rows.items() if row.note]


def liars_costs() -> str:
    """Return what the worst attack costs each method, with and without a rule."""
    goals = {0: (1, "not if all are honest"), 1: (3, "not with one"), 2: (5, "not with two")}
    (table, recommended), rows = under_attack(), []
    places = product(["digits", "fashion-mnist"], ["0.5", "0.1"], recommended)
    for data, alpha, (method, rule) in places:
        part = table.query("data == @data and alpha == @alpha and method == @method")
        groups = part.dropna().groupby(["rule", "attack", "liars"]).points
        worst = groups.mean().drop("absent", level=1).groupby(level=[0, 2]).max()
        costs = worst[rule], worst["none"], groups.mean()["none", "absent"]
        ruled, *others = (c.reindex(range(4)).map(lambda v: number(v) or "-") for c in costs)
        cells = map("**{}** ({}; {})".format, ruled[1:], *(other[1:] for other in others))
        missed = [words for k, (most, words) in goals.items() if costs[0][k] > most]
        honest = percent(part.query("liars == 0 and rule == 'none'").value.mean())
        seeds = groups.size()[[rule, "none"]].min()
        rows.append([data, alpha, method, rule, seeds, honest, ruled[0], *cells,
                     ", ".join(missed) or "yes"])  # fmt: skip
    return markdown(
        "data | Dirichlet | method | rule | seeds | honest, % | none malicious | one"
        " | two | three | goal met",
        rows,
    )


def liars() -> str:
    """Return a row for each rule of FedAvg on digits, and each split; accuracies in percent."""
    cases = {
        ("none", 0): "all honest",
        ("sign-flip", 1): "one: change times -50",
        ("label-shift", 1): "one: labels moved on",
        ("label-shift", 2): "two: labels moved on",
        ("inner-product", 2): "two: honest mean times -1",
        ("label-shift", 3): "three: labels moved on",
    }
    groups = under_attack()[0].query("data == 'digits' and method == 'fedavg'")
    groups = groups.groupby(["alpha", "rule", "attack", "liars"]).value
    means, counts = (found.unstack([2, 3])[[*cases]] for found in (groups.mean(), groups.count()))
    seeds = counts.min(axis=1).map("{:.0f}".format)
    rows = ([*key, seeds[key], *map(percent, means.loc[key])] for key in means.index)
    return markdown(" | ".join(["Dirichlet | rule | seeds, at least", *cases.values()]), rows)


WORDS = {
    "one-exchange": "one exchange, p = 1,000",
    "one-exchange-20000": "one exchange of 20,000 images, p = 2,000",
    "fedavg": "FedAvg", "scaffold": "SCAFFOLD", "ntk-fl": "NTK-FL", "local": "local engine",
    "ray": "Ray", "cluster": "Ray, a cluster of two nodes",
    "supernodes": "SuperLink and SuperNodes", "factors": "`gradient_norms`",
    "opacus": "Opacus, fast gradient clipping",
    "vmap, 16 at a time": "`vmap` of `torch.func.grad`, 16 at a time",
}  # fmt: skip
MEASURED = {  # group of speed.csv -> its rows, head of the table, cells of a row r
    "ntk_dfl": (
        "way == 'fedntk'", "case | CPU s | s | memory, GB | MB of a client, up | MB, down",
        "{r[case]}|{r[cpu-seconds]:.1f}|{r[seconds]:.1f}|{r[process-gb]:.1f}|{r[up-mb]:.1f}"
        "|{r[down-mb]:.1f}",
    ),
    "federation_minutes": (
        "way == 'run'", "method | seconds to 88 % | first replies added up after, s"
        " | ended after, s | rounds | accuracy at the end, % | load before",
        "{r[case]}|{r[seconds]:.0f}|{r[answered]:.0f}|{r[until]:.0f}|{r[rounds]:.0f}"
        "|{r[accuracy]:.1f}|{r[load]:.1f}",
    ),
    "round_costs": (
        "way != 'local' or clients >= 10", "clients run on | clients | seconds | CPU seconds"
        " | memory, GB | CPU seconds of the server | memory of the server, GB",
        "{r[way]}|{r[clients]:,.0f}|{r[seconds]:.3g}|{r[cpu-seconds]:.3g}|{r[memory-gb]:.1f}"
        "|{r[server-cpu-seconds]:.1f}|{r[server-memory-gb]:.1f}",
    ),
    "kernel_peers": (
        "way == 'neural-tangents'", "network, examples, threads | fedntk, ms | neural-tangents, ms"
        " | times faster",
        "{r[case]}|{r[rival-seconds-ms]:.1f}|{r[seconds-ms]:.1f}|{r[ratio]:.1f}",
    ),
    "gradient_norms": (
        "way != 'step'", " | batch | training steps | seconds, of a step | MB, of a step"
        " | relative difference",
        "{r[way]}|{r[case]}|{r[ratio]:.2f}|{r[seconds]:.1f}, {r[rival-seconds]:.1f}"
        "|{r[peak-mb]:.0f}, {r[rival-peak-mb]:.0f}|{r[error]:.0e}",
    ),
}  # fmt: skip


def cases(group: str) -> str:
    """Return a row for each case of a group of speed.csv."""
    chosen, head, cells = MEASURED[group]
    table, order = figures(group).query(chosen), list(WORDS)
    places = table.way.map(lambda way: order.index(way) if way in WORDS else 0)
    table = table.iloc[places.argsort(kind="stable")].replace(WORDS)
    for key in table.columns:
        if key.endswith("-mb"):
            table[f"{key[:-3]}-gb"] = table[key] / 1e3
        elif key.startswith("bytes-"):
            table[f"{key[6:]}-mb"] = table[key] / 1e6
        elif key.endswith("seconds"):
            table[f"{key}-ms"] = table[key] * 1e3
        elif key == "accuracy":
            table[key] *= 100
    rows = (cells.format(r=row).replace("nan", "").split("|") for row in table.to_dict("records"))
    return markdown(head, rows)


SPEED = (  # group, way, case, what, fedntk, beside; r is a row of speed.csv
    ("ntk_fl_round", "fedntk", r"mean, n=(1|4|20)000|full, n=20000",
     "a round of NTK-FL, 784-100-10, 12 candidates for t, kernel {r[case]}",
     "{r[seconds]:.2f} s, {r[gb]:.2f} GB", "{r[rival]}"),
    ("kernel", "torch.func", ".*", "kernel, {r[case]}",
     "{r[ratio]:.1f} times faster, {r[less]:.0f} times less memory",
     "contraction of `torch.func`'s Jacobians"),
    ("tangent_features", "subsample|sketch", ".*",
     "tangent features of one logit, {r[way]}, {r[case]}", "{r[ratio]:.1f} forward passes",
     "{r[loop]}"),
    ("features", "scattering|8,000 cosines of scattering|Eff.*", ".*", "{r[way]}, {r[case]}",
     "{r[ratio]:.1f} forward passes of SimpleCNN, {r[rate]:.0f} images a CPU second", ""),
    ("many_clients", "fedntk", ".*",
     "a client's part of a round of FedAvg, {r[case]}, 100 in a round",
     "{r[first-ms]:.1f} ms in the first tenth of {r[rounds]} rounds, {r[last-ms]:.1f} ms in the"
     " last", ""),
    ("ntk_dfl", "fedntk", ".*", "a round of NTK-DFL, 200 examples a client, {r[case]}",
     "{r[seconds]:.1f} s", ""),
    ("engine", "fedntk", ".* workers", "a round of FedAvg, 10 clients x 600 images, {r[case]}",
     "{r[ratio]:.2f} times a bare loop's time", "{r[others]}"),
)  # fmt: skip
LOOP = "a backward pass for each example takes {:.1f} times as long"


def speed() -> str:
    """Return a row for each figure of speed, with the machine and the day it was measured."""
    rows = []
    for group, way, case, *texts in SPEED:
        table = figures(group)
        table["gb"], table["rate"] = table["peak-mb"] / 1e3, 100 / table.seconds
        table["less"] = table["peak-mb"] / table["rival-peak-mb"]
        table["rival"] = table["rival-seconds"].map("{:g} s, ".format) + table.rival
        ratios = (table.way + table.ratio.map(" {:.2f}".format))[
            ~table.way.isin(["fedntk", "bare"])
        ]
        table["others"] = table.case.map(ratios.groupby(table.case).agg(", ".join))
        kind = table.case.str.partition(", n=")
        single = table.seconds / pd.to_numeric(kind[2])  # of an example; a loop is measured once
        loop = kind[0].map(single[table.way == "loop"].groupby(kind[0]).first()) / single
        table["loop"] = loop.map(LOOP.format).where(loop.notna(), "")
        chosen = table.way.str.fullmatch(way) & table.case.str.fullmatch(case)
        for row in table[chosen].to_dict("records"):
            cells = (text.format(r=row) for text in texts)
            rows.append((row, *(re.sub("nan|, inf times less memory", "", cell) for cell in cells)))
    usual = Counter(_place_of(row) for row, *_ in rows).most_common(1)[0][0]
    return f"Measured on {usual}, if a row does not say otherwise.\n\n" + markdown(
        "what | fedntk | beside | program", [(*cells, _program(row, usual)) for row, *cells in rows]
    )


def gpu() -> str:
    """Return what was measured on a GPU, beside the same on a CPU where that was measured."""
    rows = []
    for group, cases, what, factor, digits in (
        ("ntk_fl_round", "(mean|full), n=.*", "a round of NTK-FL, 784-100-10, kernel {}", 1, 2),
        ("kernel", "mlp-100 n=.*000", "kernel, {}", 1e3, 1),
    ):
        unit = "s" if factor == 1 else "ms"
        there, here = (
            figures(group, on).query("way in ('fedntk', 'factored')").set_index("case").seconds
            for on in ("cuda", "cpu")
        )
        for case in there.index[there.index.str.fullmatch(cases)]:
            cells = (f"{factor * of[case]:.{digits}f} {unit}" for of in (there, here))
            rows.append((what.format(case), *cells))
    for _, run in figures("gpu_runs", "cuda").iterrows():
        if run.case.startswith("runs, "):
            what = f"{run.case.removeprefix('runs, ')}, {run.rounds} round" + "s" * (run.rounds > 1)
            rows.append((what, f"{run.seconds:.0f} s, accuracy {percent(run.accuracy)} %", ""))
    return markdown("what | GPU | CPU", rows)


def _place_of(row: Any) -> str:
    """Return on what machine and when a case was measured."""
    day = ", between 21 and 23 November" if pd.isna(row["date"]) else f" on {row['date']}"
    return f"{row['machine'].partition(',')[0]}{day}"


def _program(row: Any, usual: str) -> str:
    """Return a link to a case, its threads, and where it was measured if not as usual."""
    place, threads = _place_of(row), int(row["threads"])
    words = f"[{row['group']}](../../benchmarks/cases.py), {threads} thread" + "s" * (threads > 1)
    return words if place == usual else f"{words}, {place}"


TABLES: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        columns, cases,
        sums_privacy, liars_in_sums, copies_in_sums, crashes, secure_sums, liars_costs, liars,
        speed, gpu, catalogue.baseline_families, catalogue.baseline_list, catalogue.papers,
    )
}  # fmt: skip
TABLES |= {
    "papers_overview": papers.overview,
    "papers_results": papers.results,
    "board": papers.board,
    "measured": papers.measured,
}


def filled(text: str) -> str:
    """Return a page's text with its tables as the files have them."""

    def block(found: re.Match[str]) -> str:
        name, *arguments = found[1].split(": ")
        table = TABLES[name](*arguments)
        return f"<!-- table: {found[1]} -->\n\n{table}\n\n<!-- end of table -->"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    app = ROOT / "simulations" / "pyproject.toml"
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in [app, *pages]:
        before = path.read_text(encoding="utf-8")
        if (after := catalogue.with_defaults(before) if path == app else filled(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))
