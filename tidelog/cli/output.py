"""Output of the commands: aligned tables for people, JSON for scripts, periodic refresh for `--watch`.

A command loads a document (plain data, as in JSON) and renders it as a table; `show` does the rest. Tables are not
truncated, and characters in them that are not printable are escaped. On a terminal that is too narrow for a table, a
row takes several lines; in a file or pipe it is always one line, so that `grep` and `awk` can read it. Results are
written to standard output, warnings and progress (`tidelog.runtime.progress_bar`) to standard error. If the reader
closes the pipe, the command ends without an error.

Entry: `show`, `table`.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from tidelog.cli.screen import block, page
from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable
from tidelog.runtime.progress import size_text
from tidelog.runtime.progress_bar import aside
from tidelog.runtime.text import printable

T = TypeVar("T")

FOLD_INDENT = "    "
"""Before what follows of a row on further lines."""
PLAIN_COLUMNS = 80
"""Of sentences where no terminal reads them."""
LOOK_S = 0.5
"""How often `--watch` looks whether the reader of its pipe is there."""


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
    return _watch(style, load, lambda document: render(document) if document or not empty else empty, watch_s)


def _watch(style: str, load: Callable[[], T], render: Callable[[T], str], watch_s: float) -> T:
    last: list[T] = []
    is_first = True
    try:
        while True:
            try:
                last[:] = [load()]
            except Unavailable as error:
                _emit_watched(style, f"error: {error.message}", is_first=is_first, failed=True)
            else:
                text = json.dumps(last[0], ensure_ascii=False) if style == "json" else render(last[0])
                _emit_watched(style, text, is_first=is_first)
            is_first = False
            _wait(watch_s)
    except KeyboardInterrupt:  # the usual end of watching
        if not last:
            raise
        return last[0]


def _wait(seconds: float) -> None:
    """Wait; end the command if the reader of the pipe goes away meanwhile."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_S))
        if reader_gone():
            leave_pipe()


def _emit_watched(style: str, text: str, *, is_first: bool, failed: bool = False) -> None:
    if style == "json":
        if failed:
            warn(text)
        else:
            emit(text)
        return
    now = f"{datetime.now():%H:%M:%S}"
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        columns, rows = shutil.get_terminal_size()
        emit(page(text, now, columns=columns, rows=rows, is_first=is_first), newline=False)
    else:
        emit(block(text, now), newline=False)


def emit(text: str, *, newline: bool = True) -> None:
    """Print to standard output and flush. A closed pipe ends the command with success."""
    try:
        with aside():
            click.echo(text, nl=newline)
    except BrokenPipeError:
        leave_pipe()


def leave_pipe() -> None:
    """Exit with success after the reader closed the pipe, without an error from the interpreter's last flush."""
    discard_output()
    raise click.exceptions.Exit(0)


def discard_output() -> None:
    """Lead standard output nowhere, the interpreter's last flush included."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def reader_gone() -> bool:
    """Whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def warn(text: str) -> None:
    """Print a line to standard error."""
    with aside():
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
    standard output is one): then the columns that do not fit follow on indented lines, and a text that does not fit
    into one is continued on the next.
    """
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    numbers = set(right)
    columns = columns or _terminal_columns()
    folds = _folds(widths, columns)
    aligned: list[str] = []
    for line in lines:
        for indent, fold in zip(_indents(), folds, strict=False):
            if columns is not None and len(fold) == 1 and len(indent) + widths[fold[0]] > columns:
                aligned += [indent + part for part in _wrapped(line[fold[0]], columns - len(indent))]
                continue
            parts = [
                line[at].rjust(widths[at]) if headers[at] in numbers else line[at].ljust(widths[at]) for at in fold
            ]
            aligned.append((indent + "  ".join(parts)).rstrip())
    return "\n".join(aligned)


def paragraph(text: str) -> str:
    """A sentence in lines as wide as the terminal, or of `PLAIN_COLUMNS` where standard output is none."""
    return "\n".join(_wrapped(text, _terminal_columns() or PLAIN_COLUMNS))


def _wrapped(text: str, columns: int) -> list[str]:
    """Divide a text at its blanks; a word is never cut."""
    if len(text) <= columns or columns < 1:
        return [text]
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False) or [text]


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


def pairs(rows: Iterable[tuple[str, Any]], *, columns: int | None = None) -> str:
    """Aligned `name  value` lines; a value that does not fit into the terminal's columns is continued below itself."""
    listed = [(name, cell(value)) for name, value in rows]
    width = max((len(name) for name, _ in listed), default=0)
    columns = columns or _terminal_columns()
    lines: list[str] = []
    for name, value in listed:
        parts = [value] if columns is None else _wrapped(value, columns - width - 2)
        lines.append(f"{name:<{width}}  {parts[0]}".rstrip())
        lines += [" " * (width + 2) + part for part in parts[1:]]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Format one value for a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value))


def size(count: int | None) -> str | None:
    """Format a number of bytes: `512 B`, `1.5 MiB`."""
    return None if count is None else size_text(count)


def moment(time_ms: int | None) -> str | None:
    """Format milliseconds since the epoch as `2026-07-30T12:00:00.000Z`; None without a timestamp."""
    if time_ms is None or time_ms < 0:
        return None
    try:
        at = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)  # a producer may write any int64
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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


def gather(names: Iterable[str], load: Callable[[str], T], failures: Failures | None) -> list[T]:
    """Load each name. Failures are collected, and end the command if nothing is left; without `failures` they raise."""
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(load(name))
        except TidelogError as error:
            if failures is None:
                raise
            failures.add(error)
    if failures is not None and not found:
        failures.exit()
    return found
