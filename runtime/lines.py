"""Lines for a stream that perhaps nobody reads: a terminal that was stopped (Ctrl-S), a pager, a pipe that is full.

A thread of its own writes them, so that who has something to tell never waits for who reads it: a process that did
would stand still with all of its clients. That is for standard output and standard error; what else stands for them, as
in tests, is written to at once.

Invariants: `write` does not wait; lines come in their order; at most `MAX_CHARS` are kept. Later lines are dropped, and
how many these were is told as soon as the stream takes lines again. A process that is killed loses what is kept.

Entry: `say`; `LineWriter`, `writer_for`, `flush_all`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

MAX_CHARS: Final = 4 << 20
FLUSH_S: Final = 1.0
"""How long the end of a process waits for who reads its lines."""
NAMES: Final = {1: "standard output", 2: "standard error"}
"""By file descriptor."""
BLOCKED_S: Final = 5.0
"""A stream that has taken nothing for so long, with lines waiting, is a problem."""


def _dropped_text(lines: int) -> str:
    return f"{lines} lines were dropped here: nobody took them\n"


class LineWriter:
    """Writes lines to the file of a stream. May be used from any thread. `stream` must have a file descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self.dropped_text: Callable[[int], str] = _dropped_text
        """Makes the line that tells how many were dropped."""
        self._stream = stream  # it closes its file when nobody has it
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._chars = 0
        self._dropped = 0
        self._writing_since: float | None = None
        """Monotonic seconds; None: everything is written."""
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Have whole lines written, each with its end."""
        with self._changed:
            if self._chars + len(text) > MAX_CHARS:
                self._dropped += text.count("\n")
                return
            self._tell_dropped()
            self._keep(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="lines")
                self._thread.start()
            self._changed.notify_all()

    def flush(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until everything is written. Returns False if it was not within the limit, in seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._chars and self._writing_since is None, limit_s)

    def blocked_s(self) -> float:
        """Return for how long (seconds) the stream has taken nothing, though there is something to write."""
        since = self._writing_since
        return 0.0 if since is None else time.monotonic() - since

    def _keep(self, text: str) -> None:
        self._lines.append(text)
        self._chars += len(text)

    def _tell_dropped(self) -> None:
        if self._dropped:
            self._keep(self.dropped_text(self._dropped))
            self._dropped = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing_since = None
                if not self._lines:
                    self._tell_dropped()  # nothing has come since
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._lines))
                text = self._lines.popleft()
                self._chars -= len(text)
                self._writing_since = time.monotonic()
            with contextlib.suppress(OSError):  # who read it is gone, and there is nobody else to tell
                self._put(text.encode(self._encoding, "backslashreplace"))

    def _put(self, data: bytes) -> None:
        """Write to the file itself: a buffer's lock, held by a thread that waits, would stop the end of the process."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process, which has the same terminal, has made it so
                select.select([], [self._fd], [])
            self._writing_since = time.monotonic()


WRITERS: Final[dict[int, LineWriter]] = {}
"""By file descriptor: one for each, so that lines do not mix."""


def writer_for(stream: TextIO | None) -> LineWriter | None:
    """Return what writes to standard output or standard error; None for another stream, and for one that is closed."""
    if stream is None:  # the process was started without it
        return None
    try:
        fd = stream.fileno()
    except (OSError, ValueError):  # it has none
        return None
    if fd not in NAMES:
        return None
    if fd not in WRITERS:
        stream.flush()
        WRITERS.setdefault(fd, LineWriter(stream))  # another thread may have been faster
    return WRITERS[fd]


def say(text: str, *, err: bool = False) -> None:
    """Print a line to standard output, or standard error. Who reads it may be gone, or take nothing."""
    stream: TextIO | None = sys.stderr if err else sys.stdout
    writer = writer_for(stream)
    if writer is not None:
        writer.write(text + "\n")
    elif stream is not None:
        with contextlib.suppress(OSError):
            print(text, file=stream, flush=True)


@atexit.register
def flush_all() -> None:
    """Wait until all lines are written, for `FLUSH_S` at most for each stream."""
    for writer in list(WRITERS.values()):
        writer.flush()


def problems() -> list[str]:
    """Return the streams that take nothing, one sentence each."""
    return [
        f"{NAMES[fd]} has taken no line for {blocked_s:.0f} s: a terminal was stopped, or what reads the"
        f" log hangs. The log is kept up to {MAX_CHARS >> 20} MiB, then lines are dropped"
        for fd, writer in sorted(WRITERS.items())
        if (blocked_s := writer.blocked_s()) >= BLOCKED_S
    ]
