"""The command: what it does, what it says, how it ends; and what it imports."""

import errno
import json
import os
import re
import signal
import sys
from importlib import metadata
from logging import getLogger
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedntk.clients import PrivacyLedger
from fedntk.clients.core.privacy_ledger import Release
from fedntk.simulations import Config, read_runs, run
from fedntk.simulations.cli import app
from fedntk.simulations.data.partitions import load_split
from fedntk.simulations.report.results import read_run

from ..conftest import ROOT, output_of
from .outcomes import bits

CONF = ROOT / "simulations" / "conf"
NTK_FL = CONF / "ntk_fl_digits.toml"
SMALL = {
    "num-clients": 8, "clients-per-round": 3, "clients-per-evaluation": 2, "rounds": 2,
    "train-examples": 300,
}  # fmt: skip


def fedntk(*arguments: object, fails: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == fails, done.output
    if fails:
        assert done.output.startswith("fedntk: ")
        assert done.output.count("\n") == 1
    return done.output


def settings(**others: object) -> list[str]:
    return [f"--set={key}={value}" for key, value in (SMALL | others).items()]


def test_run_again_resume_and_longer_and_damaged_results_are_said_in_one_line(tmp_path):
    folder = tmp_path / "a"
    said = fedntk("run", NTK_FL, "--out", folder, "--seed=1", "--quiet", *settings())
    assert re.fullmatch(rf"\d+\.\d % after round 2: {folder}\n", said)
    resume = "run", "--resume", folder, "--quiet"
    assert "after round 3" in fedntk(*resume, "--set", "rounds=3")
    config = Config.load(NTK_FL, **{**SMALL, "rounds": 3, "seed": 1})
    assert bits(folder) == bits(run(config, out=tmp_path / "b", progress=False).folder)

    summary = folder / "summary.json"
    for text in ("{", "[]", '{"rounds": 3}'):
        summary.write_text(text)
        for arguments in (resume, ["report", folder]):
            assert "summary.json is damaged: " in fedntk(*arguments, fails=1)
    summary.unlink()  # as the message says
    fedntk(*resume)
    assert len(read_runs(folder)) == 1
    (folder / "rounds.parquet").write_bytes(b"PAR1")
    assert "rounds.parquet is damaged: " in fedntk("report", folder, fails=1)
    (folder / "config.toml").write_text("")
    assert "config.toml" in fedntk(*resume, fails=2)


FAILING = """
from torch import nn
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)
    def forward(self, x):
        if self.training and WHEN:
            raise RuntimeError(f"no luck with {len(x)} examples")
        return self.layer(x.flatten(1))
def build(shape, classes):
    return Net(classes)
"""


@pytest.mark.parametrize("when", ["False", "2 < len(x) < 33", "True"])
def test_a_run_in_which_most_clients_failed_does_not_end_as_if_it_had_not(when, tmp_path, caplog):
    """The results are there; the command fails, and says how many replies were used of how many.

    Of the one traceback that all clients have, the log has one.
    """
    (tmp_path / "net.py").write_text(FAILING.replace("WHEN", when))
    own = {"rounds": 6, "num-clients": 10, "clients-per-round": 10, "local-epochs": 1}
    own |= {"batch-size": 10_000, "model": f"{tmp_path}/net.py:build", "min-completed": 1}
    command = "run", CONF / "fedavg_digits.toml", "--out", tmp_path / "run", *settings(**own)
    logger = getLogger("flwr")
    logger.propagate, before = True, logger.propagate
    try:
        done = CliRunner().invoke(app, [str(part) for part in (*command, "--quiet")])
    finally:
        logger.propagate = before
    said = done.output.splitlines()[-1]
    fails = when != "False"
    assert (done.exit_code, said.startswith("fedntk: ")) == (int(fails), fails)
    if when == "True":
        assert "in 3 rounds no client's reply could be used" in said
    assert sum("Traceback" in own.getMessage() for own in caplog.records) == fails
    if when == "True":
        return
    summary = read_run(tmp_path / "run").summary
    used, asked = summary["replies-used"], summary["replies-asked"]
    assert asked == 60
    if not fails:
        assert (summary["status"], used) == ("finished", 60)
        return
    assert summary["status"] == "mostly-failed"
    assert 0 < used < 30
    words = f"{used} of 60 replies were used; most clients failed in "
    assert words in said
    again = CliRunner().invoke(app, [str(part) for part in command])  # nothing is run
    assert (again.exit_code, words in again.output) == (1, True)
    fedntk("report", tmp_path / "run")
    assert words in (tmp_path / "run" / "report" / "report.md").read_text()


def test_compare_and_report(tmp_path):
    files = NTK_FL, CONF / "fedavg_digits.toml"
    options = "--seeds", "0,1", "--out", tmp_path, "--quiet", *settings(rounds=1)
    said = fedntk("compare", *files, *options)
    assert "fedavg_digits " in said  # no name is cut off, however narrow the console
    assert "…" not in said
    assert len(read_runs(tmp_path / "fedavg_digits")) == 2
    text = (tmp_path / "report" / "report.md").read_text()
    assert "fedavg_digits" in text
    assert "training examples, as none are held out: all runs" in text
    assert "all runs" in (tmp_path / "report" / "report.html").read_text()
    assert all(f"]({path.name})" in text for path in (tmp_path / "report").glob("*.png"))
    assert r"fedavg\_digits" in (tmp_path / "report" / "targets.tex").read_text()
    said = fedntk("report", tmp_path / "ntk_fl_digits", "--out", tmp_path / "other")
    assert f"{tmp_path}/other/report.md" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.toml"], "no configuration at nowhere.toml"),
        (["run", "."], "no configuration at .: Is a directory\n"),
        (["check", __file__], "test_cli.py:<class>?"),
        (["run", "ntk-fll"], "did you mean 'ntk-fl'"),
        (["run", "--set", "alpa=1"], "unknown key 'alpa'; did you mean 'alpha'?"),
        (["run", "--set", "alpha"], "--set: expected KEY=VALUE, got 'alpha'"),
        (["run", "--resume", "nowhere"], "no run in nowhere: config.toml is missing"),
        (["run", "a.toml", "--resume", "b"], "--resume FOLDER takes its settings and folder"),
        (["compare", *[str(NTK_FL)] * 2], "files of different names"),
        (["unlearn", "nowhere", "1"], "no finished run in nowhere: summary.json is missing"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fedntk(*arguments, fails=2)
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_is_made_only_if_asked_for(tmp_path):
    path = tmp_path / "x.ledger"
    assert "no such file" in fedntk("privacy-ledger", path, fails=2)
    assert fedntk("privacy-ledger", "--new", path) == fedntk("privacy-ledger", path) == ""
    assert "exists and is not replaced" in fedntk("privacy-ledger", "--new", path, fails=2)
    release = Release("a run", 1.0, 1e-5, exchange="x")
    PrivacyLedger(path).reserve(release, None, lambda before: None)
    assert fedntk("privacy-ledger", path) == "a run: epsilon 1, delta 1e-05\n"


def test_settings_are_listed():
    assert fedntk("settings").splitlines() == Config.describe()
    assert "did you mean 'tct'" in fedntk("settings", "tctt", fails=2)
    assert fedntk("settings", "local-training") == "local-training has no settings of its own\n"


def test_a_request_to_terminate_saves_what_there_is(tmp_path, each_run):
    folder, sent = tmp_path / "a", []

    def stop(config, record) -> None:
        if record["round"] == 2 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    each_run(report=stop)
    command = ["run", "--quiet", "--out", str(folder), *settings(rounds=4)]
    assert CliRunner().invoke(app, command).exit_code == 130
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3
    fedntk("run", "--resume", folder, "--quiet")
    assert len(read_runs(folder)[0].curve()) == 5


def test_the_version_is_said():
    assert fedntk("--version") == f"fedntk {metadata.version('fedntk')}\n"


def test_command_is_installed():
    (command,) = metadata.entry_points(group="console_scripts", name="fedntk")
    assert command.load() is app


def test_a_disk_that_takes_no_more_is_said_in_one_line(tmp_path, monkeypatch):
    """From the results' files on; later the run goes on."""
    folder, written = tmp_path / "a", []

    def refusing(path: Path, *arguments: object, **options: object) -> object:
        if str(tmp_path) in str(path) and (arguments or ("r",))[0] in ("w", "wb", "a"):
            written.append(path)
            if len(written) > 6:
                raise OSError(errno.ENOSPC, "No space left on device")
        return open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refusing)
        patch.setattr("fedntk.ntk.support.files.open", refusing, raising=False)
        said = fedntk("run", "--quiet", "--out", folder, *settings(), fails=1)
        assert "No space left on device" in said
    fedntk("run", "--quiet", "--out", folder, *settings())
    assert read_runs(folder)[0].summary["rounds"] == 2
    assert list(folder.rglob("*.partial")) == []


TINY = {"num_clients": 6, "clients_per_round": 2, "train_examples": 200, "rounds": 1}
LOADED = "import json, sys; print(json.dumps([*sys.modules]))"
COMMAND = "from fedntk.simulations.cli import app\ntry: app({})\nexcept SystemExit: pass"
IMPORTS = """
import fedntk.clients, fedntk.strategies
from fedntk.simulations import compare, load_predictor, run
"""
DRAWING = {"matplotlib", "networkx", "pandas"}


def loaded(code: str) -> set[str]:
    """Return the modules that a program has loaded at its end."""
    said = output_of(sys.executable, "-c", f"{code}\n{LOADED}")
    return set(json.loads(said.splitlines()[-1]))


def test_what_the_command_says_of_itself_needs_no_torch():
    commands = ["--help"], ["run", "--help"], ["--version"]
    said = "\n".join(COMMAND.format(command) for command in commands)
    assert loaded(said) & {"torch", "flwr", "numpy"} == set()


def test_imports_and_a_run_that_draws_nothing_load_neither_pandas_nor_matplotlib(tmp_path):
    """Its split is made before, since Hugging Face's datasets, which make it, import pandas."""
    config = Config(**TINY, out=str(tmp_path))
    load_split(config)
    settings = [f"--set={config.key(name)}={value}" for name, value in TINY.items()]
    command = ["run", "--quiet", f"--out={tmp_path}", *settings]
    assert loaded(f"{IMPORTS}{COMMAND.format(command)}") & DRAWING == set()
    assert (tmp_path / "rounds.parquet").exists()
