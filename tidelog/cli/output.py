"""Output of the commands: aligned tables for people, JSON for scripts, periodic refresh for `--watch`.

A command loads a document (plain data, as in JSON) and renders it as a table; `show` does the rest. Tables are not
truncated. On a terminal that is too narrow for a table, a row takes several lines; in a file or pipe it is always one
line, so that `grep` and `awk` can read it. Results are written to standard output, progress and
warnings to standard error. If the reader closes the pipe, the command ends without an error.

rich is imported only when a progress bar is shown.

Entry: `show`, `table`, `Progress`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable

T = TypeVar("T")

FOLD_INDENT = "    "
"""Before what follows of a row on further lines."""


def show(
    style: str, load: Callable[[], T], render: Callable[[T], str], *, watch_s: float | None = None, empty: str = ""
) -> T:
    """Load a document and print it as `table` or `json` (`style`), once or every `watch_s` seconds until Ctrl-C.

    `empty` is the text for an empty table. Returns the last document. While watching, an unreachable cluster is
    reported and requested again; JSON is one document per line.
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
    except KeyboardInterrupt:  # the usual end of watching
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
        emit("\x1b[H\x1b[2J", newline=False)  # move the cursor home and clear the screen
    emit(f"{datetime.now():%H:%M:%S}  Ctrl-C ends\n\n{text}\n")


def emit(text: str, *, newline: bool = True) -> None:
    """Print to standard output and flush. A closed pipe ends the command with success."""
    try:
        click.echo(text, nl=newline)
    except BrokenPipeError:
        leave_pipe()


def leave_pipe() -> None:
    """Exit with success after the reader closed the pipe, without an error from the interpreter's last flush."""
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
    """Ask for confirmation of an irreversible action. Raises `InvalidInput` without a terminal."""
    if not sys.stdin.isatty():
        raise InvalidInput(f"standard input is not a terminal: cannot ask whether to {action}", hint="add --yes")
    click.confirm(f"Really {action}?", abort=True, err=True)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = (), columns: int | None = None
) -> str:
    """Aligned columns, two spaces apart; `right` names the right-aligned columns. None is shown as `-`.

    Each row is one line, except where it would not fit into `columns` characters (default: those of the terminal, if
    standard output is one): then the columns that do not fit follow on indented lines.
    """
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    numbers = set(right)
    folds = _folds(widths, columns or _terminal_columns())
    aligned = []
    for line in lines:
        for indent, fold in zip(_indents(), folds, strict=False):
            parts = [
                line[at].rjust(widths[at]) if headers[at] in numbers else line[at].ljust(widths[at]) for at in fold
            ]
            aligned.append((indent + "  ".join(parts)).rstrip())
    return "\n".join(aligned)


def _indents() -> Iterator[str]:
    return itertools.chain([""], itertools.repeat(FOLD_INDENT))


def _folds(widths: Sequence[int], columns: int | None) -> list[list[int]]:
    """Divide the columns into lines that fit; a column that is too wide by itself has a line of its own."""
    folds: list[list[int]] = [[]]
    used = 0
    for at, width in enumerate(widths):
        if columns is not None and folds[-1] and used + 2 + width > columns:
            folds.append([])
            used = len(FOLD_INDENT) - 2
        used += width + (2 if folds[-1] or len(folds) > 1 else 0)
        folds[-1].append(at)
    return folds


def _terminal_columns() -> int | None:
    """The width of the terminal; None if standard output is a file or a pipe, whose lines programs read."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def pairs(rows: Iterable[tuple[str, Any]]) -> str:
    """Aligned `name  value` lines."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name:<{width}}  {cell(value)}".rstrip() for name, value in listed)


def cell(value: Any) -> str:
    """Format one value for a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def size(count: int | None) -> str | None:
    """Format a number of bytes: `512 B`, `1.5 MiB`."""
    if count is None:
        return None
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("the last unit has no bound")


def moment(time_ms: int | None) -> str | None:
    """Format milliseconds since the epoch as `2026-07-30T12:00:00.000Z`; None without a timestamp."""
    if time_ms is None or time_ms < 0:
        return None
    try:
        at = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)  # a producer may write any int64
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Progress:
    """A progress bar on standard error for long operations; silent if that is not a terminal, or without `rich`, which
    the extra `console` brings."""

    def __init__(self, label: str, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
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
        """Set the number of bytes completed."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


class Failures:
    """Collects the errors of a command with several names; the others are still processed, the first code counts."""

    def __init__(self) -> None:
        self._first: TidelogError | None = None

    def add(self, error: TidelogError) -> None:
        """Print the error now and exit with its code at the end."""
        warn(f"error: {error.message}")
        if error.hint:
            warn(f"hint: {error.hint}")
        self._first = self._first or error

    def exit(self) -> None:
        """End the command with the code of the first error, if there was one."""
        if self._first is not None:
            raise click.exceptions.Exit(self._first.exit_code)
