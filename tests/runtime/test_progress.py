"""Lines of progress: rate, time left and what fits; and the bar on a terminal, which leaves nothing."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from contextlib import redirect_stderr, suppress

import pytest

from tests.support.cluster_process import eventually
from tidelog.runtime import progress_bar
from tidelog.runtime.progress import (
    BYTES,
    COLOURED,
    FINE,
    PLAIN,
    SECONDS,
    WINDOW_S,
    ProgressMeter,
    clock_text,
    size_text,
)
from tidelog.runtime.progress_bar import ProgressBar, aside

WAIT_S = 30


def copied(seconds: int, *, bytes_per_s: int = 20_000_000, total: int | None = 1_000_000_000) -> ProgressMeter:
    meter = ProgressMeter("copying", BYTES, 0.0)
    for quarter in range(4 * seconds + 1):
        meter.observe(quarter * bytes_per_s // 4, total, quarter / 4)
    return meter


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", text)


def test_a_line_has_the_rate_and_the_time_left() -> None:
    line = copied(20).line(20.0, 100, PLAIN)
    assert line == "copying  ############..................   40%  381.5 MiB of 953.7 MiB  19.1 MiB/s  0:30 left"


def test_the_rate_is_that_of_the_last_seconds_and_falls_while_nothing_happens() -> None:
    meter = copied(20)
    assert meter.rate(20.0) == 20_000_000
    assert meter.rate(20.0 + WINDOW_S / 2) == pytest.approx(10_000_000)
    assert meter.rate(100.0) == 0 and meter.left_s(100.0) is None
    assert meter.line(100.0, 100, PLAIN).endswith("0 B/s  -:-- left")
    for second in range(21, 41):
        meter.observe(400_000_000, 1_000_000_000, second)
    meter.observe(440_000_000, 1_000_000_000, 41.0)
    assert meter.rate(41.0) == pytest.approx(40_000_000 / WINDOW_S)


def test_without_a_total_the_time_so_far_is_shown() -> None:
    assert copied(20, total=None).line(20.0, 100, PLAIN) == "copying  381.5 MiB  19.1 MiB/s  0:20"
    assert ProgressMeter("waiting", BYTES, 0.0).line(65.0, 100, PLAIN) == "waiting  0 B/s  1:05"


def test_what_is_counted_has_its_name() -> None:
    meter = ProgressMeter("restarting", "brokers", 0.0)
    meter.observe(1, 3, 30.0)
    assert meter.line(30.0, 100, PLAIN).split("  ")[2:] == [" 33%", "1 of 3 brokers", "30 s each", "1:00 left"]
    meter = ProgressMeter("consuming", "records", 0.0)
    meter.observe(5_000, 20_000, 2.0)
    assert "5,000 of 20,000 records  2,500/s  0:06 left" in meter.line(2.0, 100, PLAIN)
    meter = ProgressMeter("measuring", SECONDS, 0.0)
    meter.observe(30, 600, 30.0)
    assert "30 of 600 s  9:30 left" in meter.line(30.0, 100, PLAIN)


def test_another_part_of_an_operation_begins_anew() -> None:
    meter = copied(20)
    meter.observe(1_000_000, 10_000_000, 21.0)
    meter.observe(2_000_000, 10_000_000, 22.0)
    assert meter.rate(22.0) == 1_000_000 and meter.left_s(22.0) == 8


@pytest.mark.parametrize("style", [PLAIN, FINE, COLOURED], ids=["plain", "fine", "coloured"])
@pytest.mark.parametrize("columns", [1, 2, 10, 20, 40, 60, 80, 200])
def test_a_line_never_reaches_the_last_column(columns: int, style: tuple[str, ...]) -> None:
    for total in (None, 1_000_000_000, 1):
        line = visible(copied(20, total=total).line(20.0, columns, PLAIN if style == PLAIN else COLOURED))
        assert len(line) < columns
        assert "copying".startswith(line[:7])


def test_sizes_and_times_as_text() -> None:
    assert [size_text(count) for count in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert [clock_text(seconds) for seconds in (0.9, 61, 3_753)] == ["0:00", "1:01", "1:02:33"]


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(progress_bar, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress_bar, "INTERVAL_S", 0.01)
    monkeypatch.setattr(progress_bar, "PLAIN_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return found


def test_a_bar_is_drawn_and_nothing_of_it_is_left(terminal: Terminal) -> None:
    with redirect_stderr(terminal), ProgressBar("copying", 100) as bar:
        bar.update(50)
        eventually(lambda: "50%" in terminal.getvalue(), WAIT_S)
    assert terminal.getvalue().endswith(progress_bar.ERASE)
    assert COLOURED.colour in terminal.getvalue()
    assert [one for one in threading.enumerate() if one.name == "tidelog-progress"] == []


def test_other_output_is_on_lines_of_its_own(terminal: Terminal) -> None:
    with redirect_stderr(terminal), ProgressBar("copying", 100):
        eventually(lambda: "copying" in terminal.getvalue(), WAIT_S)
        with aside():
            print("a warning", file=sys.stderr)
        before = terminal.getvalue()
        eventually(lambda: terminal.getvalue() != before, WAIT_S)
    screen = visible(terminal.getvalue().replace(progress_bar.ERASE, "\r"))
    assert "\ra warning\n" in screen


def test_the_inner_one_of_two_is_shown(terminal: Terminal) -> None:
    with redirect_stderr(terminal), ProgressBar("outer", 100):
        with ProgressBar("inner", 100):
            eventually(lambda: "inner" in terminal.getvalue(), WAIT_S)
            between = len(terminal.getvalue())
        eventually(lambda: "outer" in terminal.getvalue()[between:], WAIT_S)


def test_without_a_thread_it_is_drawn_when_it_is_told(terminal: Terminal) -> None:
    with redirect_stderr(terminal), ProgressBar("simulating", 100, "seeds", thread=False) as bar:
        threads = threading.active_count()

        def told() -> bool:
            bar.update(50)
            return "50 of 100 seeds" in terminal.getvalue()

        eventually(told, WAIT_S)
        assert threading.active_count() == threads
    assert terminal.getvalue().endswith(progress_bar.ERASE)


def test_no_color_takes_the_colours_away(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stderr(terminal), ProgressBar("copying", 100) as bar:
        bar.update(50)
        eventually(lambda: "50%" in terminal.getvalue(), WAIT_S)
    assert not re.search(r"\x1b\[[0-9;]*m", terminal.getvalue())


def test_a_terminal_without_control_sequences_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with redirect_stderr(terminal), ProgressBar("copying", 100) as bar:
        bar.update(50)
        eventually(lambda: terminal.getvalue().count("50%") >= 2, WAIT_S)
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")


@pytest.mark.usefixtures("terminal")
def test_it_is_silent_where_nobody_looks() -> None:
    pipe = io.StringIO()
    with redirect_stderr(pipe), ProgressBar("copying", 100) as bar:
        bar.update(50)
        assert not bar.is_live and [one for one in threading.enumerate() if one.name == "tidelog-progress"] == []
    assert pipe.getvalue() == ""


def test_nothing_is_drawn_in_the_first_second(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "SHOWN_AFTER_S", 3_600.0)
    with redirect_stderr(terminal), ProgressBar("copying", 100, thread=False) as bar:
        for done in range(100):
            bar.update(done)
    assert terminal.getvalue() == ""


def test_a_terminal_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setattr(progress_bar, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress_bar, "INTERVAL_S", 0.01)
    stream = open(theirs, "w", encoding="utf-8")  # noqa: SIM115
    with redirect_stderr(stream), ProgressBar("copying", 100) as bar:
        assert os.read(ours, 1)
        os.close(ours)
        bar.update(50)
    with suppress(OSError):  # what could not be written
        stream.close()


def test_what_goes_on_by_itself_is_asked_for_how_far_it_is(terminal: Terminal) -> None:
    with redirect_stderr(terminal), ProgressBar("waiting", 100, SECONDS) as bar:
        bar.follow(lambda: 42)
        eventually(lambda: "42 of 100 s" in terminal.getvalue(), WAIT_S)
