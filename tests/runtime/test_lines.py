"""Lines of the log, while nobody reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.cli import until
from tidelog.runtime import lines, log
from tidelog.runtime.lines import LineWriter

LINE = "x" * 99 + "\n"
LIMIT_S = 30.0


@contextmanager
def a_pipe() -> Iterator[tuple[int, LineWriter]]:
    """A pipe's end to read from, which may be closed, and a writer to the other one."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        writer = LineWriter(stream)
        yield read, writer
        with suppress(OSError):
            os.close(read)
        assert writer.flush(LIMIT_S)


@pytest.fixture
def pipe() -> Iterator[tuple[int, LineWriter]]:
    with a_pipe() as made:
        yield made


def test_who_has_something_to_tell_does_not_wait_for_who_reads_it(pipe: tuple[int, LineWriter]) -> None:
    read, writer = pipe
    sent = 3 * lines.MAX_CHARS // len(LINE)
    for _ in range(sent):
        writer.write(LINE)
    assert not writer.flush(0.01)
    found = b""
    while b"dropped" not in found:
        found += os.read(read, 1 << 16)
    while not found.endswith(b"\n"):
        found += os.read(read, 1 << 16)
    *whole, last = found.decode().splitlines()
    assert set(whole) == {LINE.rstrip()}
    assert last == f"{sent - len(whole)} lines were dropped here: nobody took them"
    assert len(found) < lines.MAX_CHARS + (1 << 18), "what is kept has a bound"
    writer.write("and on\n")
    assert os.read(read, 100) == b"and on\n"
    assert writer.flush(LIMIT_S) and not writer.blocked_s()


def test_what_is_dropped_is_told_before_what_comes_behind_it(pipe: tuple[int, LineWriter]) -> None:
    read, writer = pipe
    for _ in range(lines.MAX_CHARS // len(LINE) + 2_000):
        writer.write(LINE)
    found = b""
    while len(found) < lines.MAX_CHARS // 2:
        found += os.read(read, 1 << 16)
    writer.write("and on\n")
    while not found.endswith(b"and on\n"):
        found += os.read(read, 1 << 16)
    assert found.splitlines()[-2].endswith(b"lines were dropped here: nobody took them")


def test_a_reader_that_is_gone_holds_up_nothing(pipe: tuple[int, LineWriter]) -> None:
    read, writer = pipe
    os.close(read)
    for _ in range(10):
        writer.write(LINE)
        assert writer.flush(LIMIT_S)


def test_a_stream_that_another_process_made_non_blocking_gets_all_lines() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with os.fdopen(write, "w") as stream:
        all_lines_come(read, LineWriter(stream))


def all_lines_come(read: int, writer: LineWriter) -> None:
    for number in range(20_000):
        writer.write(f"{number}\n")
    found = b""
    while not found.endswith(b"\n19999\n"):
        found += os.read(read, 1 << 16)
    assert found.split() == [b"%d" % number for number in range(20_000)]
    assert writer.flush(LIMIT_S)
    os.close(read)


def test_only_standard_streams_are_written_to_by_a_thread(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert lines.writer_for(file) is None


def test_the_log_tells_in_its_own_format_what_was_dropped(
    pipe: tuple[int, LineWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, writer = pipe
    handler = log.LineHandler(writer)
    handler.setFormatter(log.JsonFormatter())
    assert '"event": "lines of the log were dropped here: nobody took them", "lines": 7}' in writer.dropped_text(7)
    monkeypatch.setattr(lines, "WRITERS", {2: writer})
    monkeypatch.setattr(lines, "BLOCKED_S", 0.01)
    assert not lines.problems()
    for _ in range(1000):
        writer.write(LINE)
    until(lambda: bool(lines.problems()), LIMIT_S)
    assert lines.problems()[0].startswith("standard error has taken no line for ")
    while not writer.flush(0.01):
        os.read(read, 1 << 16)
    assert not lines.problems()
