"""The command: what it does, what it says, and how it ends."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedntk.simulations import Config, load_model, read_runs, run
from fedntk.simulations.cli import app

from ..conftest import ROOT

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


def result(folder: Path) -> tuple[object, ...]:
    arrays = {name: array.tobytes() for name, array in load_model(folder).items()}
    return read_runs(folder)[0].curve().tolist(), arrays


def test_run_again_resume_and_longer_and_damaged_results_are_said_in_one_line(tmp_path):
    folder = tmp_path / "a"
    said = fedntk("run", NTK_FL, "--out", folder, "--quiet", *settings())
    assert re.fullmatch(rf"\d+\.\d % after round 2: {folder}\n", said)
    first = (folder / "model.safetensors").stat().st_mtime_ns
    fedntk("run", "--resume", folder, "--quiet")
    assert (folder / "model.safetensors").stat().st_mtime_ns == first
    said = fedntk("run", "--resume", folder, "--quiet", "--set", "rounds=3")
    assert "after round 3" in said
    config = Config.load(NTK_FL, **{**SMALL, "rounds": 3})
    assert result(folder) == result(run(config, out=tmp_path / "b", progress=False).folder)

    summary = folder / "summary.json"
    for text in ("{", "[]", '{"rounds": 3}'):
        summary.write_text(text)
        for arguments in (["run", "--resume", folder, "--quiet"], ["report", folder]):
            assert "summary.json is damaged: " in fedntk(*arguments, fails=1)
    summary.unlink()  # as the message says
    fedntk("run", "--resume", folder, "--quiet")
    assert len(read_runs(folder)) == 1
    settings_file = folder / "config.toml"
    whole = settings_file.read_text()
    settings_file.write_text(whole[:-50])
    assert "config.toml" in fedntk("run", "--resume", folder, "--quiet", fails=2)
    settings_file.write_text(whole)
    (folder / "rounds.parquet").write_bytes(b"PAR1")
    assert "rounds.parquet is damaged: " in fedntk("report", folder, fails=1)


def test_compare_and_report(tmp_path):
    files = NTK_FL, CONF / "fedavg_digits.toml"
    options = "--seeds", "0,1", "--out", tmp_path, "--quiet", *settings(rounds=1)
    fedntk("compare", *files, *options)
    assert len(read_runs(tmp_path / "fedavg_digits")) == 2
    assert "fedavg_digits" in (tmp_path / "report" / "report.md").read_text()
    said = fedntk("report", tmp_path / "ntk_fl_digits", "--out", tmp_path / "other")
    assert f"{tmp_path}/other/report.md" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.toml"], "no configuration at nowhere.toml"),
        (["run", "--set", "alpa=1"], "unknown key 'alpa'; did you mean 'alpha'?"),
        (["run", "--set", "alpha"], "--set: expected KEY=VALUE, got 'alpha'"),
        (["run", "--engine", "dask"], "engine: expected one of local, ray, got 'dask'"),
        (["run", "--resume", "nowhere"], "no run in nowhere: config.toml is missing"),
        (["run", "a.toml", "--resume", "b"], "--resume FOLDER takes its settings and folder"),
        (["compare", str(NTK_FL), "--seeds", "a"], "--seeds: expected"),
        (["compare", *[str(NTK_FL)] * 2], "files of different names"),
        (["report", "nowhere"], "no finished run in nowhere"),
        (["unlearn", "nowhere", "1"], "no finished run in nowhere: summary.json is missing"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fedntk(*arguments, fails=2)
    assert list(tmp_path.iterdir()) == []


def test_settings_are_listed():
    assert fedntk("settings").splitlines() == Config.describe()
    assert fedntk("settings", "tct").splitlines() == Config.describe("tct")
    assert "did you mean 'tct'" in fedntk("settings", "tctt", fails=2)
    assert fedntk("settings", "local-training") == "local-training has no settings of its own\n"


def test_ctrl_c_from_outside(tmp_path):
    """The command in a process of its own is interrupted, and gone on with to the end."""
    folder = tmp_path / "a"
    # where this process ignores interrupts, as under nohup, its children would, too
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fedntk.simulations.cli import app; app()"
    )
    options = settings(rounds=30, method="fedavg", **{"server-threads": 1})
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", code, "run", "--out", str(folder), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines, deadline = folder / "rounds.jsonl", time.monotonic() + 90
    while not (lines.exists() and lines.read_text().count("\n") >= 5):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedntk run --resume {folder}" in said
    assert lines.read_text().count("\n") < 30
    fedntk("run", "--resume", folder, "--quiet")
    config = Config.load(folder / "config.toml", out=str(tmp_path / "b"))
    assert result(folder) == result(run(config, progress=False).folder)


def test_command_is_installed():
    (command,) = metadata.entry_points(group="console_scripts", name="fedntk")
    assert command.load() is app


FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(("error", "after"), [(READ_ONLY, 0), (FULL, 6)])
def test_a_disk_that_takes_no_more_is_said_in_one_line(tmp_path, monkeypatch, error, after):
    """From the first file, or the results' on; later the run goes on."""
    folder, written = tmp_path / "a", []

    def refusing(path: Path, *arguments: object, **options: object) -> object:
        if str(tmp_path) in str(path) and (arguments or ("r",))[0] in ("w", "wb", "a"):
            written.append(path)
            if len(written) > after:
                raise error
        return opened(path, *arguments, **options)

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refusing)
        said = fedntk("run", "--quiet", "--out", folder, *settings(), fails=1)
        assert error.strerror in said
    fedntk("run", "--quiet", "--out", folder, *settings())
    assert read_runs(folder)[0].summary["rounds"] == 2
    assert list(folder.rglob("*.partial")) == []
