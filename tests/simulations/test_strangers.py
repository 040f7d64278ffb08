"""A folder of results is a stranger's: what it names is not executed, and its names are texts."""

import base64
import contextlib
import csv
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from logging import getLogger

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from fedntk.simulations import Config, assess, ledger, load_predictor, load_results, run, unlearn
from fedntk.simulations.cli import app
from fedntk.simulations.config import importing
from fedntk.simulations.config.importing import import_named
from fedntk.simulations.engine.recorder import AdmittedMetrics
from fedntk.simulations.errors import place_in
from fedntk.simulations.report import report
from fedntk.simulations.report.figures import uncertainty_histogram
from fedntk.simulations.report.report import FORMULA, markdown, write_csv, write_html
from fedntk.simulations.report.results import read_run, read_runs

from .outcomes import refused
from .settings import FEDAVG

CODE = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()
from torch import nn
from fedntk.strategies import SeededFedAvg

class Mine(SeededFedAvg):
    pass

def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def score(scores, labels):
    return 0.5
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Working directory with a stranger's code, which leaves a file when it is executed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importing, "_named", set())  # as in a new process
    (tmp_path / "evil.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def theirs(finished_run, home):
    """Return a function that has settings stand in a finished run's folder."""

    def written(*settings):
        folder = shutil.copytree(finished_run("fedavg").folder, home / "run", dirs_exist_ok=True)
        config = folder / "config.toml"
        keys = tuple(f"{line.partition(' =')[0]} =" for line in settings)
        kept = [line for line in config.read_text().splitlines() if not line.startswith(keys)]
        tables = min(place for place, line in enumerate(kept) if line.startswith("["))
        config.write_text("\n".join([*kept[:tables], *settings, *kept[tables:], ""]))
        return folder

    return written


def command(line):
    return CliRunner().invoke(app, line.split())


@pytest.mark.parametrize(
    "setting",
    [
        'model = "evil.py:build"',
        'model = "{home}/evil.py:build#0123456789ab"',  # as of an object of another process
        'model = "evil:build"',
        'model = "evil:build#untrusted"',
        'metrics = "evil.py:score"',
        'metrics = ["f1-macro", "m=evil:score"]',
        'metrics = {{m = "evil.py:score,f1-macro"}}',
        'metrics = {{m = "x=evil.py:score"}}',
        'dataset = "evil.py:build"',
        'dataset = "evil.py:other:build"',
        'method = "evil.py:Mine"',
        'method = "evil:Mine,build"',
        'plugged-in = \'{{"model": "evil:build"}}\'',
        'plugged-in = \'{{"method": "evil.py:Mine"}}\'',
    ],
)
def test_no_way_of_reading_a_folder_executes_what_it_names(theirs, home, setting):
    folder = theirs(setting.format(home=home))
    calls = [load_predictor, lambda own: load_predictor(own, client=1), assess, ledger]
    calls += [lambda own: unlearn(own, [1]), lambda own: run("fedavg", out=own, progress=False)]
    calls += [lambda own: run(Config.of_run(own).replace(rounds=9), progress=False)]
    for call in calls:
        with contextlib.suppress(ValueError, RuntimeError):
            call(folder)
    (folder / "summary.json").unlink()
    assert command(f"run --resume {folder} --quiet --set rounds=9").exit_code != 0
    assert not (home / "executed").exists()


def test_a_report_executes_nothing(theirs, home):
    folder = theirs('dataset = "evil.py:build"', 'model = "evil:build"')
    page = write_html(read_runs(folder), home / "report.html").read_text()
    assert 'id="split"' not in page  # as the data are not read
    assert not (home / "executed").exists()
    shutil.rmtree(folder)
    folder = theirs('method = "evil.py:Mine"')
    for name, options in (("report", ""), ("assess", ""), ("unlearn", "1"), ("ledger", "")):
        said = command(f"{name} {folder} {options}").output
        assert f"{home / 'evil.py'} would be executed; read it" in said.replace("\n", " ")
        assert "--trust" in said
    assert not (home / "executed").exists()


def test_who_trusts_a_folder_has_its_code_executed(home, monkeypatch):
    """What this process has named itself needs no trust; results are tables, and need none."""
    (home / "mine.py").write_text(CODE)
    settings = {"metrics": "m=mine.py:score", "out": home / "a", "progress": False}
    finished = run(FEDAVG, model="mine.py:build", **settings)
    executed = home / "executed"
    x = np.zeros((2, 1, 8, 8), np.float32)
    expected = load_predictor(home / "a").predict(x)
    executed.unlink()

    def elsewhere():
        monkeypatch.setattr(importing, "_named", set())
        for name in [name for name in importing.sys.modules if name.endswith("mine.py")]:
            del importing.sys.modules[name]

    elsewhere()
    assert load_results(home / "a").metric.eq("m").any()
    message = (
        f"(model|metrics) = .*this code, and {home}/mine.py would be executed.*trust=True .--trust"
    )
    refused(message, load_predictor, home / "a")
    refused(message, assess, read_run(home / "a"))
    config = read_run(home / "a").config
    refused(message, run, config.replace(rounds=3), progress=False)
    again = f"run --resume {home / 'a'} --quiet --set rounds=3"
    assert "mine.py would be executed" in command(again).output
    config.save(home / "a" / "config.toml")  # without the mark
    assert not executed.exists()
    assert load_predictor(home / "a", trust=True).predict(x).equal(expected)
    assert executed.exists()
    elsewhere()
    assert run(FEDAVG, model="mine.py:build", **settings).summary == finished.summary
    elsewhere()
    assert "after round 3" in command(f"{again} --trust").output
    elsewhere()
    assert "model" in assess(read_run(home / "a"), trust=True).table.index


def test_a_folders_results_are_where_it_lies(theirs, home):
    """Nothing is read or written where its settings say that it lies."""
    folder = theirs(f'out = "{home}/elsewhere"')
    assert read_run(folder).config.folder == folder


HOSTILE = [
    '"><img src=x onerror=hacked=1>',
    "</script><script>hacked=1</script>",
    '</option><a href="javascript:hacked=1">a</a>',
    "' onmouseover='hacked=1",
    "&lt;b&gt;${hacked=1}%{x}{{ 7 * 7 }}",
    "<b>bold</b> <a href='https://a.example'>a</a>",
    "__proto__",
    "[bold]\x1b[2J|`x`[a](https://a.example)",
    "$\\frac$ $",
    "../../=1+1",
]


def named_by(finished, names):
    """Runs whose names, metrics and settings are texts of a stranger's."""
    rows, runs = finished.rounds, []
    for name in names[:4]:
        own = [rows.assign(run=name)]
        own += [rows[rows.metric == "accuracy"].assign(run=name, metric=own) for own in names]
        clients = finished.clients.assign(run=name)
        tables = {"rounds": pa.Table.from_pandas(pd.concat(own)), "clients": clients}
        tables["clients"] = pa.Table.from_pandas(clients)
        summary = {**finished.summary, "run": name, "metrics": dict.fromkeys(names, 0.5)}
        config = finished.config.replace(target=names[4], image_column=names[5], name=name)
        runs.append(replace(finished, config=config, summary=summary, tables=tables))
    return runs


# what the page is made of when each metric is drawn, with the text under the pointer
MADE = """const found = new Set(), select = document.querySelector("#curves-controls select");
for (let place = 0; place < select.options.length; place++) {
  select.selectedIndex = place;
  select.dispatchEvent(new Event("change", { bubbles: true }));
  Plotly.Fx.hover("curves", [1, 2].map(each => ({ curveNumber: each, pointNumber: 1 })));
  for (const each of document.querySelectorAll("*"))
    for (const own of ["", ...each.attributes]) found.add(each.tagName + " " + (own.name ?? ""));
}
return [[...found], [...select.options].map(each => [each.value, each.text]),
  document.querySelector("#curves .hoverlayer").textContent]"""


@pytest.mark.slow
def test_names_are_texts_in_a_browser(chrome, finished_run, tmp_path):
    """No name makes an element or an attribute that harmless names do not make."""
    finished, made, hacked = finished_run("fedavg"), [], "return typeof hacked"
    harmless = [f"name {number}" for number, _ in enumerate(HOSTILE)]
    for names in (harmless, HOSTILE):
        page = write_html(named_by(finished, names), tmp_path / "report.html")
        chrome.get(page.as_uri())
        elements, options, hovered = chrome.execute_script(MADE)
        assert {*names} <= {value for value, _ in options}
        assert all(text == " ".join(value.split()) for value, text in options)
        assert any(name in hovered for name in names)
        made.append({*elements})
        assert chrome.get_log("browser") == []
    assert made[1] <= made[0]
    assert chrome.execute_script(hacked) == "undefined"
    chrome.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<b id=b onclick=hacked=1>b</b>'); b.click()"
    )
    assert chrome.execute_script(hacked) == "undefined"  # by the page's policy


class Made(HTMLParser):
    """The elements of a page with their attributes, its scripts and its policy."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.within, self.policy = set(), [], False, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements |= {(tag, name) for name, _ in [("", ""), *attrs]}
        self.within = tag == "script"
        self.scripts += [""] * self.within
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]

    def handle_data(self, data):
        if self.within:
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self.within = False


def test_names_are_texts_in_the_page(finished_run, tmp_path, monkeypatch):
    """As the standard library reads it; and the page's policy permits its own two scripts only."""
    harmless = [f"name {number}" for number, _ in enumerate(HOSTILE)]
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "plotly;")  # has 5 MB
    made = []
    for names in (harmless, HOSTILE):
        page = write_html(named_by(finished_run("fedavg"), names), tmp_path / "report.html")
        made.append(Made(page.read_text()))
    assert made[1].elements == made[0].elements
    assert not [name for _, name in made[1].elements if name.startswith("on")]
    data, *scripts = made[1].scripts
    assert {*HOSTILE} <= {*json.loads(data)["curves"][0]["metrics"]}
    assert scripts == made[0].scripts[1:]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    sources = dict(rule.split(maxsplit=1) for rule in made[1].policy.split("; "))
    assert sources["script-src"].split() == [f"'sha256-{own.decode()}'" for own in hashes]
    assert sources["default-src"] == "'none'"
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|\beval\b", scripts[-1])


def test_names_are_texts_in_tables(tmp_path):
    """Of Markdown, which a terminal and sites show; and of spreadsheets, which compute."""
    frame = pd.DataFrame({HOSTILE[7]: [*HOSTILE, -1.5], "n": [-1.0] * (len(HOSTILE) + 1)})
    text = markdown(frame)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]|(?<!\\)[<`]|\]\(", text)
    pipes = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()]
    assert {*pipes} == {3}
    risky = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''-1", "'plain", "a=1", "-"]
    table = pd.DataFrame({"=name": risky, "n": np.linspace(-1, 1, len(risky))})
    write_csv(table, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = [*csv.reader(file)]
    assert not [cell for cell, _ in rows if re.match(r"[=+\-@\t\r]", cell)]
    assert [cell[bool(FORMULA.match(cell)) :] for cell, _ in rows] == ["=name", *risky]
    back = pd.read_csv(tmp_path / "t.csv")
    assert back.n.equals(table.n)
    signs = ["\uff1d1+1", "\ufeff=1", " =1", "\uff0b1", "\uff201"]  # full width, after a mark
    write_csv(pd.DataFrame({"a": signs}), tmp_path / "t.csv")
    rows = (tmp_path / "t.csv").read_bytes().decode().split("\r\n")[1:-1]
    assert [row.strip('"') for row in rows] == [f"'{text}" for text in signs]


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_report_on_a_run_with_a_hostile_name(theirs, home):
    """Pictures, LaTeX, Markdown and CSV; then the command, which shows it in a terminal."""
    name = "=1|<b>`x`[a](b)$\\frac$ $\x1b[2J"
    folder = theirs(f"name = {json.dumps(name)}")
    summary = json.loads((folder / "summary.json").read_text()) | {"run": name}
    (folder / "summary.json").write_text(json.dumps(summary))
    shown = command(f"report {folder}").output
    assert "report.html" in shown
    assert "\x1b[2J" not in shown
    out = folder / "report"
    text = (out / "report.md").read_text()
    assert not re.search(r"(?<!\\)<|\x1b|\]\(b", text)
    assert r"\frac" not in (out / "targets.tex").read_text()
    assert pd.read_csv(out / "clients.csv").columns[-1] == f"'{name}"
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in out.iterdir())


def test_a_terminal_and_the_log_show_no_escape_codes(theirs, home, caplog):
    """Of an error that a folder tells; and a client's metric of such a name is left out."""
    folder = theirs()
    summary = {"status": "failed", "error": "\x1b]0;gone\x07 \x9b2J lost"}
    (folder / "summary.json").write_text(json.dumps(summary))
    said = command(f"ledger {folder}").output
    assert "lost" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said)
    admitted = AdmittedMetrics((), lambda _: False, "clients").take({"a\x1b[2J": 1.0, "b": 2.0})
    assert admitted == {"b": 2.0}
    code = "\x1b]0;name\x07"
    getLogger("flwr").warning("a client said %s", code)
    assert code not in caplog.text
    assert "a client said" in caplog.text


def test_nothing_but_parts_of_fedntk_is_free_to_be_named_as_such():
    """Its modules import others, which could be called by another name."""
    named = "fedntk.simulations.engine.processes:Process"
    refused("expected a part of fedntk's own", import_named, "model", named)


def test_class_names_with_dollars_are_drawn_as_they_are():
    """What is between two dollars would be a formula, and may be none that can be drawn."""
    name = r"$\frac$"
    figure = uncertainty_histogram({name: np.ones(3)}, label=name, title=name)
    figure.savefig(io.BytesIO())


def test_what_is_written_into_a_folder_follows_no_link_out_of_it(tmp_path):
    (tmp_path / "run").mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "run" / "report").symlink_to(mine)
    refused("leads out of the run's folder", place_in, tmp_path / "run", "report")
    refused("leads out of the run's folder", place_in, tmp_path / "run", "../mine")
    assert not any(mine.iterdir())
