"""How commands speak: tables that line up for people, JSON for scripts, the same again and again for `--watch`.

A command loads a document (plain data, as JSON has it) and knows how to make a table of it; `show` does the rest.
Tables are never wrapped or cut: they are read by `grep` and `awk`, too. Results go to standard output, everything about
the work itself (progress, warnings) to standard error. A reader that closes the pipe ends the command quietly.

rich is imported when a progress bar is shown, and only then.

Entry: `show`, `table`, `Progress`.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from runtime.errors import InvalidInput, TidelogError, Unavailable

T = TypeVar("T")


def show(
    style: str, load: Callable[[], T], render: Callable[[T], str], *, watch_s: float | None = None, empty: str = ""
) -> T:
    """Load a document and print it, `style` being `table` or `json`; every `watch_s` seconds until Ctrl-C, if given.

    `empty` is what a person is told when there is nothing to show. Returns the last document. While watching, a cluster
    that does not answer is shown as such and asked again; JSON is one document a line.
    """
    if watch_s is None:
        document = load()
        emit(json.dumps(document, indent=2, ensure_ascii=False) if style == "json" else render(document))
        if style == "table" and empty and not document:
            warn(empty)
        return document
    last: list[T] = []
    try:
        while True:
            try:
                last[:] = [load()]
            except Unavailable as error:
                _emit_watched(style, f"error: {error.message}", failed=True)
            else:
                _emit_watched(style, json.dumps(last[0], ensure_ascii=False) if style == "json" else render(last[0]))
            time.sleep(watch_s)
    except KeyboardInterrupt:  # the usual way to end watching
        if not last:
            raise
        return last[0]


def _emit_watched(style: str, text: str, *, failed: bool = False) -> None:
    if style == "json":
        if failed:
            warn(text)
        else:
            emit(text)
        return
    if sys.stdout.isatty():
        emit("\x1b[H\x1b[2J", newline=False)  # home, and clear the screen
    emit(f"{datetime.now():%H:%M:%S}  Ctrl-C ends\n\n{text}\n")


def emit(text: str, *, newline: bool = True) -> None:
    """Print to standard output, now. A closed pipe ends the command with success."""
    try:
        click.echo(text, nl=newline)
    except BrokenPipeError:
        leave_pipe()


def leave_pipe() -> None:
    """Nobody reads on: end with success, and without a word from the interpreter's last flush."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    raise click.exceptions.Exit(0)


def reader_gone() -> bool:
    """Whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def warn(text: str) -> None:
    """Print a line to standard error."""
    click.echo(text, err=True)


def confirm(action: str) -> None:
    """Ask a person before something that cannot be undone. Raises `InvalidInput` where nobody can be asked."""
    if not sys.stdin.isatty():
        raise InvalidInput(f"standard input is no terminal: cannot ask whether to {action}", hint="add --yes")
    click.confirm(f"Really {action}?", abort=True, err=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> str:
    """Columns that line up, two spaces apart; `right` names the columns of numbers. None is shown as `-`."""
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    numbers = set(right)
    aligned = []
    for line in lines:
        parts = [
            text.rjust(width) if name in numbers else text.ljust(width)
            for name, text, width in zip(headers, line, widths, strict=True)
        ]
        aligned.append("  ".join(parts).rstrip())
    return "\n".join(aligned)


def pairs(rows: Iterable[tuple[str, Any]]) -> str:
    """`name  value` lines that line up."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name:<{width}}  {cell(value)}".rstrip() for name, value in listed)


def cell(value: Any) -> str:
    """One value as a table shows it."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def size(count: int | None) -> str | None:
    """Bytes for people: `512 B`, `1.5 MiB`."""
    if count is None:
        return None
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("the last unit has no bound")


def moment(time_ms: int | None) -> str | None:
    """Milliseconds since the epoch as `2026-07-30T12:00:00.000Z`; None for none."""
    if time_ms is None or time_ms < 0:
        return None
    try:
        at = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)  # a producer may write any int64
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Progress:
    """A progress bar on standard error while something long goes on; silent where that is not a terminal."""

    def __init__(self, label: str, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int | None = None) -> None:
        """Say how many bytes are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


class Failures:
    """What went wrong with some of several names, so that the others are still done; the first one's code counts."""

    def __init__(self) -> None:
        self._first: TidelogError | None = None

    def add(self, error: TidelogError) -> None:
        """Say it now, exit with its code at the end."""
        warn(f"error: {error.message}")
        if error.hint:
            warn(f"hint: {error.hint}")
        self._first = self._first or error

    def exit(self) -> None:
        """End the command with the code of the first error, if there was one."""
        if self._first is not None:
            raise click.exceptions.Exit(self._first.exit_code)
