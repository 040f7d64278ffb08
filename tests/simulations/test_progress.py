"""What is shown in a log, in a terminal and in Jupyter."""

import io
import logging

import pytest
from rich.console import Console

from fedntk.simulations.engine import progress as module
from fedntk.simulations.engine.progress import Progress, progress


def record(number: int, **metrics: float) -> dict[str, float]:
    return {"round": number, "accuracy": number / 10, **metrics}


def two_runs(shown: Progress) -> None:
    """Four rounds of a first run, two of a second one that is gone on with."""
    shown.begin("first", 4)
    shown.on_answer("train", 3, 8)
    for number in range(5):
        shown.on_round(record(number, **{"replies-accepted": 7, "replies-rejected": 1}))
    shown.end()
    shown.begin("second", 4, done=2)
    shown.on_round(record(3))
    shown.on_round(record(4))
    shown.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass at each look at the clock."""
    now, step = [0.0], [0.0]

    def monotonic() -> float:
        now[0] += step[0]
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", monotonic)
    return step


def test_a_log_gets_lines_and_no_more_than_one_in_ten_seconds(clock):
    file = io.StringIO()
    with progress(8, 2, console=Console(file=file, width=200)) as shown:
        two_runs(shown)
    lines = file.getvalue().splitlines()
    assert [line.split(", ")[1:3] for line in lines] == [
        ["round 0/4", "starting"], ["round 4/4", "done"],
        ["round 2/4", "starting"], ["round 4/4", "done"],
    ]  # fmt: skip
    assert lines[1].startswith("first: run 1/2, ")
    assert "accuracy 40.0 %" in lines[1]
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()


def test_the_metric_that_is_shown_is_the_methods_headline():
    shown = Progress(4)
    shown.begin("one", 4, headline="client-accuracy-mean")
    shown.on_round(record(1, **{"client-accuracy-mean": 0.25}))
    assert "client-accuracy-mean 25.0 %" in str(shown)
    shown.on_round(record(2))  # in which no client evaluated
    assert "%" not in str(shown)


def test_a_slow_run_gets_a_line_in_between(clock):
    clock[0] = 4.0
    file = io.StringIO()
    with progress(8, 2, console=Console(file=file, width=200)) as shown:
        two_runs(shown)
    lines = file.getvalue().splitlines()
    assert len(lines) > 4
    assert any("7 clients, 1 rejected" in line for line in lines)


def test_time_left_is_the_median_round_for_each_round_left(monkeypatch):
    """Rounds of 100, 10 and 10 s, two left: 20 s. Rounds that were there already took no time."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(11, 2, enabled=False) as shown:
        shown.begin("first", 4, done=4)
        shown.end("finished before")
        shown.begin("second", 7, done=2)
        assert shown.left == ""
        for number, seconds in ((3, 100), (4, 10), (5, 10)):
            now[0] += seconds
            shown.on_round(record(number))
        assert shown.left == "0:00:20"
        assert str(shown).endswith("accuracy 50.0 %, 0:02:00, 0:00:20 left")


def test_a_run_that_stops_early_leaves_no_time_over(clock):
    with progress(8, 2, enabled=False) as shown:
        shown.begin("first", 4)
        shown.on_round(record(1))
        shown.end()
        shown.begin("second", 4)
        for number in range(5):
            shown.on_round(record(number))
        assert shown._done == 8


def test_a_terminal_gets_a_bar_and_keeps_a_line_for_each_run():
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    with progress(8, 2, console=console) as shown:
        two_runs(shown)
    text = file.getvalue()
    assert "first: run 1/2, round 4/4, done" in text
    assert "second" in text
    assert "━" in text


def test_the_log_is_printed_above_what_is_live_in_a_terminal(monkeypatch):
    """Lines that rich does not know of would be overwritten by its next picture."""
    file, handler = io.StringIO(), logging.StreamHandler(io.StringIO())
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    before = handler.stream
    logging.getLogger("flwr").addHandler(handler)
    try:
        with progress(8, 2, console=console) as shown:
            two_runs(shown)
            logging.getLogger("flwr").warning("a client was dropped")
            shown.end()
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    assert handler.stream is before
    assert "a client was dropped" not in before.getvalue()
    assert "a client was dropped\n" in file.getvalue()


def test_jupyter_gets_one_output_that_is_rewritten(monkeypatch):
    class Handle:
        texts: list[str] = []  # noqa: RUF012

        def update(self, output: dict[str, str], raw: bool) -> None:
            assert raw
            self.texts.append(output["text/plain"])

    calls = []

    def display(*_: object, **options: object) -> Handle:
        calls.append(options)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    console = Console(force_jupyter=True)
    with progress(8, 2, console=console) as shown:
        two_runs(shown)
    assert calls == [{"raw": True, "display_id": True}]
    last = Handle.texts[-1].splitlines()
    assert [line.split(":")[0] for line in last] == ["first", "second"]
    assert all("done" in line for line in last)


def test_nothing_is_shown_where_it_is_not_wanted(capsys):
    with progress(8, 2, enabled=False) as shown:
        two_runs(shown)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
