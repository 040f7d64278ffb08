"""Tables from declarations: settings, searches, figures, going on after a kill, verifying."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import psutil
import pytest
from safetensors.torch import save_file

from fedntk.simulations import Config, run
from fedntk.simulations.engine.building import load_setup
from fedntk.simulations.errors import ConfigError, RunFailed
from fedntk.simulations.methods.table import METHODS
from fedntk.simulations.report.results import round_at
from fedntk.simulations.reproduction import making, reproduce, verify
from fedntk.simulations.reproduction.declaration import FORMS, Declaration, all_names, merged
from fedntk.simulations.reproduction.measures import NO_ROUND, Measure
from fedntk.simulations.reproduction.rendering import draw, frames
from fedntk.simulations.reproduction.verifying import DIFFERENT, EQUAL, NEAR

from ..conftest import ROOT, refused

TABLE = """
title = "Accuracy on digits"
source = "Nobody 2026, table 1"
seeds = [0, 1]
[settings]
dataset = "digits"
num-clients = 6
clients-per-round = 3
clients-per-evaluation = 6
rounds = 3
learning-rate = 0.05
fedavg.proximal-mu = 0.5
[rows.fedavg]
label = "FedAvg"
settings = { method = "fedavg", learning-rate = 0.1 }
[rows.local]
settings = { method = "local-training", learning-rate = 0.2 }
[rows.other]
missing = "not in fedntk"
[columns.iid]
label = "IID"
x = 1
settings = { partition = "iid", learning-rate = 0.3 }
[columns.skewed]
x = 0.1
settings = { partition = "dirichlet", alpha = 1.0, rounds = 2 }
[cells]
"local/skewed" = { width = 7 }
[search]
grid.learning-rate = [0.1, 0.3]
settings = { validation-examples = 300, rounds = 2 }
[measures.accuracy]
at = "end"
last = 2
factor = 100
unit = "%"
tolerance = 0.5
[measures.curve]
at = "curve"
[measures.clients]
metric = "accuracy"
at = "clients"
[measures.rounds]
at = "reach"
target = 0.3
digits = 0
each = true
[measures.seconds]
label = "seconds of a run"
[paper.accuracy]
fedavg = [50, "60+"]
other = [1.5, ""]
[beyond]
"a large machine" = ["local/iid"]
[figure]
measure = "curve"
[smaller]
why = "one round"
settings.rounds = 1
[small]
why = "fewer examples"
settings = { train-examples = 300, rounds = 1 }
search = { rounds = 1, validation-examples = 100 }
row-settings.local.width = 9
columns = ["iid"]
seeds = [3]
"""


@pytest.fixture
def table(tmp_path) -> Declaration:
    return written(tmp_path, TABLE)


def written(folder, text: str) -> Declaration:
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    return Declaration.load(str(folder / "mine.toml"))


def in_this_process(declaration, cells, out) -> pd.DataFrame:
    """Make cells without the processes of `make`."""
    for cell in cells:
        if cell.search and not (out / cell.line_place / "chosen.json").exists():
            making._search(declaration, cell, out, "")
        making._make_cell(declaration, cell, out, "")
    return making.collect(declaration, out, cells)


# ------------------------------------------------------------------------- declarations


def test_later_layers_win_table_by_table(table):
    cell = table.cell("local", "skewed", 1)
    assert cell.settings["learning-rate"] == 0.2  # the row's over the column's and the table's
    assert (cell.settings["rounds"], cell.settings["width"]) == (2, 7)
    assert table.cell("fedavg", "skewed", 1).settings["fedavg"] == {"proximal-mu": 0.5}
    small = table.cell("local", "iid", 3, "small")
    assert (small.settings["width"], small.settings["rounds"]) == (9, 1)
    assert small.search.settings == {"validation-examples": 100, "rounds": 1}
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"d": 4}) == {
        "a": {"b": 1, "c": 3}, "d": 4,
    }  # fmt: skip


def test_a_plan_has_what_fits_the_machine_and_what_is_named(table):
    places = [(c.row, c.column, c.seed) for c in table.plan()]
    both = [(row, column, seed) for row, column in
            [("fedavg", "iid"), ("fedavg", "skewed"), ("local", "skewed")]
            for seed in (0, 1)]  # fmt: skip
    assert places == both
    assert len(table.plan(rows=["local"], columns=["iid"])) == 2  # named, so taken
    assert [(c.row, c.seed) for c in table.plan("small")] == [("fedavg", 3), ("local", 3)]
    assert len(table.plan(rows=["f*"], columns=["sk*"], seeds=[7])) == 1
    refused("expected one of fedavg, local, other; got 'tct'", table.plan, rows=["tct"])
    refused("other: not in fedntk", table.plan, rows=["other"])
    lacking = table.columns["skewed"].model_copy(update={"missing": "no such data"})
    without = table.model_copy(update={"columns": {**table.columns, "skewed": lacking}})
    assert {c.column for c in without.plan(rows=["fedavg"])} == {"iid"}
    refused("skewed: no such data", without.plan, columns=["skewed"])


def test_a_digest_is_of_what_decides_a_result(table, tmp_path):
    digest = table.cell("fedavg", "iid", 0).digest
    assert table.cell("fedavg", "iid", 1).digest == digest
    for change, same in (
        (('label = "FedAvg"', 'label = "McMahan"'), True),
        (("fedavg = [50", "fedavg = [51"), True),
        (("learning-rate = 0.05", "learning-rate = 0.06"), True),  # which the row overrides
        (("proximal-mu = 0.5", "proximal-mu = 0.6"), False),
        (("[0.1, 0.3]", "[0.1, 0.4]"), False),
        (('partition = "iid"', 'partition = "dirichlet"'), False),
    ):
        assert change[0] in TABLE
        other = written(tmp_path, TABLE.replace(*change)).cell("fedavg", "iid", 0).digest
        assert (other == digest) is same, change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[rows.fedavg]", "[row.fedavg]"), "row: Extra inputs"),
        (("at = \"end\"", "at = \"last\""), "measures.accuracy.at: Input should be"),
        (("local/skewed", "local/skew"), "expected a cell row/column, got 'local/skew'"),
        (("local/iid", "lokal/iid"), "expected a cell row/column, got 'lokal/iid'"),
        (("fedavg = [50, \"60+\"]", "fedavg = [50]"), "expected a figure for each column"),
        (("other = [1.5", "another = [1.5"), "expected a row, one of fedavg, local, other"),
        (("[paper.accuracy]", "[paper.loss]"), "expected a measure, one of accuracy, curve"),
        (("measure = \"curve\"", "measure = \"kurve\""), "expected a measure"),
        (("[rows.local]", "[rows.local]\nsearch = { learning-rate = [1] }"), "as many trials"),
        (("[rows.local]", "[rows.local]\nsearched = false"), "expected a note"),
        (("rounds = 3", "rounds = "), "Invalid value"),
        (("[small]", "[tiny]"), "small: Field required"),
    ],
)  # fmt: skip
def test_a_faulty_declaration_says_what_is_wrong(tmp_path, change, message):
    assert change[0] in TABLE
    refused(rf"mine\.toml: .*{message}", written, tmp_path, TABLE.replace(*change))


def test_unknown_tables_are_refused(tmp_path):
    refused("did you mean 'ntk-fl/table-1'", Declaration.load, "ntk-fl/table1")
    refused("expected a table, or a TOML file", Declaration.load, str(tmp_path / "none.toml"))
    without = TABLE[: TABLE.index("[smaller]")] + TABLE[TABLE.index("[small]") :]
    refused("no smaller form", written(tmp_path, without).plan, "smaller")
    refused("seeds: expected such as", reproduce, "ntk-fl/table-1", seeds="a")


ALL = [*all_names(), *map(str, sorted((ROOT / "benchmarks" / "tables").glob("*.toml")))]


@pytest.mark.parametrize("name", ALL)
def test_settings_of_every_declared_cell_are_valid(name):
    declaration = Declaration.load(name)
    if declaration.program:
        assert (declaration.folder / declaration.program.partition(":")[0]).exists()
        return
    forms = [form for form in FORMS if declaration.form(form)]
    plans = [declaration.plan(form) for form in forms]
    cells = [cell for plan in plans for cell in plan if cell.seed == plan[0].seed]
    cells += [
        declaration.cell(row, column, 0)
        for row, line in declaration.rows.items()
        for column in declaration.columns
        if declaration.reason_beyond(row, column) and not line.missing
    ]
    for cell in cells:
        making.config_of(declaration, cell, declaration.folder, "")


def test_no_row_is_left_out_whose_method_exists():
    methods = {method.name.replace("-", "") for method in METHODS}
    for name in all_names():
        for row, line in Declaration.load(name).rows.items():
            lacks_method = line.missing == "not in fedntk"
            assert not lacks_method or row.split("-")[0] not in methods, (name, row)


# ------------------------------------------------------------------------- measures


def test_measures_are_their_definitions():
    accuracy = pd.Series([0.1, 0.5, 0.6, 0.4, 0.9, 0.8, 0.7], index=[0, 1, 2, 3, 4, 6, 8])
    sent = pd.Series(10.0, index=range(9))
    clients = pd.DataFrame(
        {"round": 8, "partition": range(11), "metric": "accuracy", "value": np.arange(11) / 10}
    )
    curves = {"accuracy": accuracy, "bytes-up": sent}
    finished = SimpleNamespace(
        curve=lambda metric="accuracy": curves.get(metric, pd.Series(dtype=float)),
        clients=clients,
        summary={"headline": "accuracy"},
    )

    def of(**options) -> dict[tuple[str, int], float]:
        values = Measure(**options).of(finished, "x", None)
        return {(value.measure, value.round): value.value for value in values}

    assert of(at="end", last=3, factor=100) == {("x", NO_ROUND): pytest.approx(80)}
    all_rounds = of(at="end", last=99)["x", NO_ROUND]
    assert all_rounds == pytest.approx(accuracy[1:].mean())  # without round 0
    assert of(at="best")["x", NO_ROUND] == pytest.approx(np.mean([0.6, 0.4, 0.9, 0.8, 0.7]))
    assert of(at="rounds", rounds=[2, 5])["x", 2] == 0.6
    assert np.isnan(of(at="rounds", rounds=[2, 5])["x", 5])  # not evaluated
    assert of(at="curve") == {("x", number): value for number, value in accuracy.items()}
    reached = round_at(accuracy.to_dict(), 0.64)
    assert of(at="reach", target=0.64) == {("x", NO_ROUND): reached}
    assert of(at="best", last=1)["x", NO_ROUND] == 0.9
    assert np.isnan(of(at="reach", target=0.95)["x", NO_ROUND])
    assert of(metric="bytes-up", at="total") == {("x", NO_ROUND): 90}
    until = of(metric="bytes-up", at="total", until=0.64)
    assert until == {("x", NO_ROUND): 10 * (reached + 1)}
    assert of(at="clients")["x, decile 30", 8] == pytest.approx(0.3)
    assert of(at="curve", client=4) == {("x", 8): 0.4}
    limited = of(at="curve", metric="headline", within={"bytes-up": 30})
    assert limited == {("x", number): accuracy[number] for number in (0, 1, 2)}  # 10 a round
    cumulative = of(at="cumulative", metric="bytes-up")
    assert cumulative == {("x", number): 10 * (number + 1) for number in accuracy.index}


def test_a_table_shows_each_seed_and_a_picture_some_rows(tmp_path):
    declaration = written(tmp_path, TABLE.replace("[figure]", '[figure]\nrows = ["local"]'))
    figures = [("rounds", NO_ROUND, 7.4), ("curve", 1, 0.5)]
    keys = ["row", "column", "seed", "measure", "round", "value"]
    cells = [
        (row, "iid", seed, measure, number, np.nan if seed and number == NO_ROUND else value)
        for row in ("fedavg", "local")
        for seed in (0, 1)
        for measure, number, value in figures
    ]
    table = pd.DataFrame(cells, columns=keys).assign(form="paper")
    shown = dict(frames(declaration, table))["rounds"].set_index("")
    assert shown["IID"].to_dict() == {"FedAvg": "7, -", "local": "7, -"}
    assert draw(declaration, table).axes[0].get_legend_handles_labels()[1] == ["local"]


# ------------------------------------------------------------------------- making


def test_a_cell_is_the_run_of_its_settings_with_what_the_search_chose(table, tmp_path):
    cells = table.plan("small", rows=["fedavg"])
    figures = in_this_process(table, cells, tmp_path / "out")
    chosen = figures.set_index("measure").value["chosen learning-rate"]
    assert chosen in (0.1, 0.3)
    config = Config(
        dataset="digits", num_clients=6, clients_per_round=3, clients_per_evaluation=6, rounds=1,
        train_examples=300, partition="iid", method="fedavg", fedavg={"proximal_mu": 0.5},
        learning_rate=chosen, seed=3, server_threads=1, out=str(tmp_path / "by-hand"),
    )  # fmt: skip
    by_hand = run(config, progress=False)
    curve = figures[figures.measure == "curve"].set_index("round").value
    assert curve.to_dict() == by_hand.curve().to_dict()
    value = figures.set_index("measure").value
    assert value["bytes up"] == by_hand.curve("bytes-up").sum()
    assert (figures.measure == "seconds").sum() == 1  # a cost, and a measure that shows it
    assert set(figures.settings) == {cells[0].digest}
    assert set(figures.code) == {making.code_digest()}
    tried = pd.read_csv(next((tmp_path / "out").rglob("trials.csv")))
    assert len(tried) == 2  # the table's budget
    assert tried.iloc[0]["learning-rate"] == chosen


def test_last_bits_of_the_first_weights_move_a_measure_by_what_is_said(tmp_path):
    text = TABLE.replace("[paper.accuracy]", "[measures.loss]\nmetric = 'loss'\n[paper.accuracy]")
    wrong = partial(written, tmp_path, f"nudged = ['curve']\n{text}")
    refused("nudged: expected measures of a whole run, got 'curve'", wrong)
    costs = f"{text}\n[measures.'bytes up']\n"
    wrong = partial(written, tmp_path, f"nudged = ['bytes up']\n{costs}")
    refused("nudged: expected measures of a whole run, got 'bytes up'", wrong)
    declaration = written(tmp_path, f"nudged = ['loss', 'accuracy']\n{text}")
    cell = replace(declaration.cell("fedavg", "skewed", 1), search=None)
    figures = in_this_process(declaration, [cell], tmp_path / "out").set_index("measure").value

    plain = run(making.config_of(declaration, cell, tmp_path / "plain", ""), progress=False)
    state = load_setup(plain.config).network.state_dict()
    save_file({name: t * (1 + 2**-23) for name, t in state.items()}, tmp_path / "nudged")
    nudged = run(
        plain.config, weights=str(tmp_path / "nudged"), out=tmp_path / "again", progress=False
    )
    for name, of_last in (("loss", 5), ("accuracy", 2)):
        ends = [r.curve(name)[1:].tail(of_last).mean() for r in (plain, nudged)]
        moved = {"loss": 1, "accuracy": 100}[name] * abs(ends[0] - ends[1])
        assert figures[f"{name}, moved by the last bits"] == pytest.approx(moved, abs=1e-12)
    assert figures["loss, moved by the last bits"] > 0


def test_a_table_is_made_again_with_equal_bits_and_a_failed_cell_alone_fails(tmp_path):
    """Processes, a cell that fails, going on, pages, verifying: one table for all."""
    text = TABLE.replace("[cells]\n", '[cells]\n"local/*" = { model = "nowhere.py:net" }\n')
    table, out = written(tmp_path, text.replace("seeds = [3]", "seeds = [3, 4]")), tmp_path / "out"
    options = {"form": "small", "out": out, "progress": False, "say": lambda text: None}
    with pytest.raises(ConfigError, match=r"nowhere\.py"):  # the probe tells it before any work
        reproduce(str(table.path), **options)
    cells = table.plan("small")
    with pytest.raises(RunFailed, match=r"2 of 4 cells failed .*nowhere\.py"):
        making.make(table, cells, out / "mine", workers=2, shown=False)
    done = [cell for cell in cells if making.is_done(table, out / "mine", cell)]
    assert [(cell.row, cell.seed) for cell in done] == [("fedavg", 3), ("fedavg", 4)]

    paths = [out / "mine" / cell.place / making.FIGURES for cell in done]
    before = [path.stat().st_mtime_ns for path in paths]
    page = reproduce(str(table.path), rows=["fedavg"], **options)
    assert before == [path.stat().st_mtime_ns for path in paths]  # nothing was run again
    figures = pd.read_parquet(page.parent / "results.parquet")
    alone = in_this_process(table, done[:1], tmp_path / "alone")
    keys = ["measure", "round"]
    merged_rows = figures[figures.seed == 3].merge(alone, on=keys, suffixes=("", "_alone"))
    merged_rows = merged_rows[merged_rows.measure != "seconds"]
    assert len(merged_rows) == len(alone) - 1
    np.testing.assert_array_equal(merged_rows.value, merged_rows.value_alone)
    assert "fewer examples" in page.read_text()
    assert (page.parent / "figure.png").stat().st_size > 5000
    assert r"\begin{tabular}" in (page.parent / "table.tex").read_text()

    assert set(verify(page.parent, cells=["fedavg/iid/3"]).verdict) == {EQUAL}
    for shift, verdict in ((0.4, NEAR), (0.6, DIFFERENT)):
        changed = figures.copy()
        changed.loc[(changed.measure == "accuracy") & (changed.seed == 3), "value"] += shift
        changed.to_parquet(page.parent / "results.parquet")
        compared = verify(page.parent, cells=["*/3"])
        assert compared[compared.verdict != EQUAL].measure.tolist() == ["accuracy"]
        assert compared[compared.verdict != EQUAL].verdict.tolist() == [verdict]
    refused("cells: expected some of", verify, page.parent, cells=["fedavg/iid/9"])
    refused("expected a folder that fedntk reproduce wrote", verify, tmp_path / "nothing")
    (page.parent / "mine.toml").write_text(text.replace("proximal-mu = 0.5", "proximal-mu = 0.1"))
    refused("other settings now", verify, page.parent)


def test_a_table_goes_on_after_a_kill(tmp_path):
    table = written(tmp_path, TABLE.replace("rounds = 1\n", "rounds = 40\n"))
    command = [sys.executable, "-m", "fedntk.simulations.cli", "reproduce", str(table.path)]
    command += ["--smaller", "--rows", "fedavg", "--columns", "iid", "--seeds", "0", "--quiet"]
    cells = table.plan("smaller", rows=["fedavg"], columns=["iid"], seeds=[0])
    records = tmp_path / "out" / "mine" / cells[0].place / "rounds.jsonl"
    command += ["--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, start_new_session=True)  # noqa: S603
    while process.poll() is None:
        if records.exists() and records.read_text().count("\n") > 9:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lines = records.read_text().splitlines()
    assert 9 < len(lines) < 41
    making.make(table, cells, tmp_path / "out" / "mine", shown=False)
    assert records.read_text().splitlines()[:9] == lines[:9]  # with their seconds: not run again
    whole = in_this_process(table, cells, tmp_path / "whole")
    again = making.collect(table, tmp_path / "out" / "mine", cells)
    pd.testing.assert_frame_equal(*(
        figures[figures.measure != "seconds"].reset_index(drop=True) for figures in (whole, again)
    ))  # fmt: skip


def test_an_interrupt_ends_the_work_of_all_processes(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n\n\n"
        "def sleeper(settings, seed):\n"
        "    path = pathlib.Path(__file__).parent\n"
        "    (path / 'new').write_text(str(os.getpid()))\n"
        "    (path / 'new').rename(path / 'pid')\n"
        "    time.sleep(600)\n"
        "    yield 'n', None, 1\n"
    )
    text = """
title = "Sleep"
source = "Nobody 2026"
program = "mine.py:sleeper"
seeds = [0]
rows.all = {}
measures.n = {}
small = {}
"""
    table = written(tmp_path, text)
    command = [sys.executable, "-m", "fedntk.simulations.cli", "reproduce", str(table.path)]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where the tests ignore it
    process = subprocess.Popen(  # noqa: S603
        [*command, "--quiet", "--out", str(tmp_path / "out")], preexec_fn=heed
    )
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) != 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_program_yields_figures_and_a_probe_needs_none(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\n"
        "def squares(settings, seed):\n"
        "    yield 'threads', None, torch.get_num_threads()\n"
        "    for x in range(settings['n']):\n"
        "        yield 'square', x, x * x + seed\n"
    )
    text = """
title = "Squares"
source = "Nobody 2026, figure 2"
program = "mine.py:squares"
seeds = [5]
[rows.all]
settings.n = 4
[measures.square]
at = "curve"
[small]
settings.n = 2
"""
    table = written(tmp_path, text)
    figures = in_this_process(table, table.plan(), tmp_path / "out")
    squares = figures[figures.measure == "square"].set_index("round").value
    assert squares.to_dict() == {0: 5, 1: 6, 2: 9, 3: 14}
    # as in the processes of `make`, wherever it is verified, for equal bits
    assert figures.set_index("measure").value["threads"] == 1
    assert making.probe(table, table.plan(), tmp_path / "none", "") == {}


def test_a_users_method_is_a_row_of_any_table(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fedntk.strategies import SeededFedAvg\n\n\nclass Mine(SeededFedAvg):\n    pass\n"
    )
    table = written(tmp_path, TABLE).with_method(f"{tmp_path / 'mine.py'}:Mine")
    figures = in_this_process(table, table.plan("small", rows=["Mine"]), tmp_path / "out")
    curve = figures[figures.measure == "curve"].set_index("round").value
    fedavg = TABLE.replace('method = "fedavg", learning-rate = 0.1', 'method = "fedavg"')
    fedavg = fedavg.replace("fedavg.proximal-mu = 0.5", "")
    (tmp_path / "plain").mkdir()
    plain = written(tmp_path / "plain", fedavg)
    equal = in_this_process(plain, plain.plan("small", rows=["fedavg"]), tmp_path / "plain" / "out")
    pd.testing.assert_series_equal(
        curve, equal[equal.measure == "curve"].set_index("round").value
    )  # the method of the file is FedAvg
    (tmp_path / "copy.toml").write_text(table.as_text())
    assert Declaration.load(str(tmp_path / "copy.toml")).rows == table.rows


# ------------------------------------------------------------------------- what comes with fedntk

QUICK = [
    "feature-learning/figure-2",
    "fed-ensemble/table-1",
    "ntk-dfl/figure-6",
    "ntk-fl/figure-9",
    "tct/table-2",
]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL]
)
def test_small_form_of_a_declaration(name, tmp_path):
    declaration = Declaration.load(name)
    cells = declaration.plan("small")
    figures = in_this_process(declaration, cells, tmp_path)
    assert len(figures.groupby(["row", "column", "seed"])) == len(cells) > 0
    page = making_page(declaration, figures, tmp_path)
    for row in {cell.row for cell in cells}:
        assert declaration.label(row) in page


def making_page(declaration, figures, folder) -> str:
    from fedntk.simulations.reproduction.rendering import write

    return write(declaration, figures, folder).read_text()
