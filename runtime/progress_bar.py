"""A bar of progress on the terminal's last line, for operations that take seconds.

It is drawn on standard error, by a thread of its own: what is measured only tells how far it is, and a line goes on
counting time while nothing happens. It is silent where standard error is no terminal. With `NO_COLOR` set it has no
colours. A terminal that knows no control sequences (`TERM=dumb`) gets a line every `PLAIN_S` seconds instead.

Invariants: nothing is drawn in the first `SHOWN_AFTER_S`; nothing of a bar is left when it ends; who writes to the
terminal meanwhile does so inside `aside`.

Entry: `ProgressBar`, `aside`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tidelog.runtime.progress import BYTES, COLOURED, FINE, PLAIN, BarStyle, ProgressMeter

SHOWN_AFTER_S = 1.0
INTERVAL_S = 0.2
PLAIN_S = 10.0
"""Between lines on a terminal that knows no control sequences."""
DEFAULT_COLUMNS = 80
ERASE = "\r\x1b[K"


def has_colours() -> bool:
    """Whether the environment allows colours (https://no-color.org, without a value it has no effect)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ProgressBar:
    """The progress of one operation, while the `with` statement lasts. See `ProgressMeter` for `unit`."""

    def __init__(self, label: str, total: int = 0, unit: str = BYTES, *, thread: bool = True) -> None:
        """Without `thread` it is drawn by `update` alone: for an operation that forks, or has a thread of its own."""
        self._has_thread = thread
        self._meter = ProgressMeter(label, unit, time.monotonic())
        self._done, self._total = 0, total
        self._source: Callable[[], int] | None = None
        self._is_plain = os.environ.get("TERM") == "dumb"
        self._is_drawn = False
        self._next_s = time.monotonic() + (PLAIN_S if self._is_plain else INTERVAL_S)
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._outer: ProgressBar | None = None
        self.is_live = sys.stderr.isatty()
        """Whether anybody sees it."""

    def __enter__(self) -> ProgressBar:
        global _shown
        if self.is_live:
            self._outer, _shown = _shown, self
            if self._has_thread:
                self._thread = threading.Thread(target=self._run, name="tidelog-progress", daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        global _shown
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
        if self.is_live:
            self.erase()
            _shown = self._outer

    def update(self, done: int, total: int | None = None) -> None:
        """Say how much is done, and how much there is if that has changed; 0: not known."""
        self._done = done
        if total is not None:
            self._total = total
        if self.is_live and not self._has_thread and time.monotonic() >= self._next_s:
            self._look()

    def follow(self, source: Callable[[], int]) -> None:
        """Ask `source` how much is done whenever it is drawn, in place of `update`: for what goes on by the clock, or
        counts by itself. It is called on the bar's thread."""
        self._source = source

    def describe(self, label: str) -> None:
        """Say what is being done now."""
        self._meter.label = label

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar away, for output of others, until the next time that it is drawn."""
        with self._lock:
            self.erase()
            yield

    def erase(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._is_drawn:
                self._is_drawn = False
                self._write(ERASE)

    def _run(self) -> None:
        while not self._ending.wait(max(0.0, self._next_s - time.monotonic())):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self._next_s = now + (PLAIN_S if self._is_plain else INTERVAL_S)
        source = self._source
        if source is not None:
            self._done = source()
        self._meter.observe(self._done, self._total, now)
        if self._meter.elapsed_s(now) >= SHOWN_AFTER_S and _shown is self:
            self._draw(now)

    def _draw(self, now: float) -> None:
        with self._lock:
            line = self._meter.line(now, _columns(), self._style())
            if self._is_plain:
                self._write(line + "\n")
            else:
                self._is_drawn = True
                self._write(f"{ERASE}{line}")

    def _style(self) -> BarStyle:
        if self._is_plain or not (sys.stderr.encoding or "").lower().startswith("utf"):
            return PLAIN
        return COLOURED if has_colours() else FINE

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal has been closed: nobody sees it
            sys.stderr.write(text)
            sys.stderr.flush()


_shown: ProgressBar | None = None
"""The one that is drawn: the innermost."""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Write to the terminal without a bar in the way."""
    if _shown is None:
        yield
    else:
        with _shown.hidden():
            yield


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS
    except (OSError, ValueError):
        return DEFAULT_COLUMNS
