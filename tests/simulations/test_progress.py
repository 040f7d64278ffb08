"""What is shown in a log and in a terminal."""

import io
import logging

from rich.console import Console

from fedntk.simulations.engine.progress import Progress, progress


def record(number: int) -> dict[str, float]:
    return {"round": number, "accuracy": number / 10}


def two_runs(shown: Progress) -> None:
    """Four rounds of a first run, two of a second one that is gone on with."""
    shown.begin("first", 4)
    shown.on_answer("train", 3, 8)
    for number in range(5):
        shown.on_round(record(number) | {"replies-accepted": 7, "replies-rejected": 1})
    shown.end()
    shown.begin("second", 4, done=2)
    shown.on_round(record(4))
    shown.end()


def test_a_log_gets_lines_and_no_more_than_one_in_ten_seconds(capsys):
    file = io.StringIO()
    with progress(8, 2, console=Console(file=file, width=200)) as shown:
        two_runs(shown)
    lines = file.getvalue().splitlines()
    assert [line.split(", ")[1:3] for line in lines] == [
        ["round 0/4", "starting"], ["round 4/4", "done"],
        ["round 2/4", "starting"], ["round 4/4", "done"],
    ]  # fmt: skip
    assert not {"\x1b", "\r"} & {*file.getvalue()}
    with progress(8, 2, enabled=False) as shown:
        two_runs(shown)
    assert "".join(capsys.readouterr()) == ""


def test_a_terminal_gets_a_bar_and_keeps_a_line_for_each_run(monkeypatch):
    """The log is printed above what is live: lines that rich does not know would be overwritten."""
    file, handler = io.StringIO(), logging.StreamHandler(io.StringIO())
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    before, logger = handler.stream, logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    with progress(8, 2, console=console) as shown:
        two_runs(shown)
        logger.warning("a client was dropped")
    assert (handler.stream, before.getvalue()) == (before, "")
    for text in ("a client was dropped\n", "first: run 1/2, round 4/4, done", "━"):
        assert text in file.getvalue()
