"""What a line of progress says: how much is done, how fast it goes, and how long it will take.

The rate is that of the last `WINDOW_S` seconds, so that it follows a bucket that slows down, and falls while nothing
happens. Without a total there is no bar and no time left, but the time so far.

Sans-IO: time is passed in, a line comes out. Entry: `ProgressMeter`; `tidelog.runtime.progress_bar` shows it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 10.0
SAMPLE_S = 0.25
"""Between two samples of the window."""
EARLIEST_S = 0.5
"""A rate of less time would only jump."""
LONGEST_LEFT_S = 100 * 3600
"""A longer time left is not known well enough to be shown."""
WIDEST_BAR, NARROWEST_BAR = 30, 8
GAP = "  "
BYTES = "bytes"
SECONDS = "s"


class BarStyle(NamedTuple):
    """How a bar is drawn."""

    done: str
    left: str
    colour: str
    """An escape sequence before what is done, or nothing."""
    reset: str


PLAIN = BarStyle("#", ".", "", "")
FINE = BarStyle("━", "─", "", "")
COLOURED = BarStyle("━", "━", "\x1b[32m", "\x1b[0;2m")
END_OF_COLOUR = "\x1b[0m"


class _Sample(NamedTuple):
    at: float
    done: int


class ProgressMeter:
    """The progress of one operation. `unit` is `BYTES`, `SECONDS`, or what is counted: "objects"."""

    def __init__(self, label: str, unit: str, now: float) -> None:
        self.label = label
        self._unit = unit
        self._began = now
        self._done = 0
        self._total: int | None = None
        self._samples = deque([_Sample(now, 0)])

    def observe(self, done: int, total: int | None, now: float) -> None:
        """Take note of what is done, of a total that may have changed; None or 0: it is not known."""
        if done < self._done:  # another part of the operation has begun
            self._samples.clear()
            self._samples.append(_Sample(now, done))
        elif now - self._samples[-1].at >= SAMPLE_S:
            self._samples.append(_Sample(now, done))
        self._done, self._total = done, total or None

    def elapsed_s(self, now: float) -> float:
        """Seconds since the beginning."""
        return now - self._began

    def rate(self, now: float) -> float | None:
        """Units a second in the last seconds; None when there were too few."""
        while len(self._samples) > 1 and self._samples[1].at <= now - WINDOW_S:
            self._samples.popleft()
        oldest = self._samples[0]
        if now - oldest.at < EARLIEST_S:
            return None
        return (self._done - oldest.done) / (now - oldest.at)

    def left_s(self, now: float) -> float | None:
        """Seconds until the end at this rate; None when that is not known."""
        rate = self.rate(now)
        if self._total is None or not rate:
            return None
        left = max(0, self._total - self._done) / rate
        return left if left < LONGEST_LEFT_S else None

    def line(self, now: float, columns: int, style: BarStyle) -> str:
        """Return a line of less than `columns` characters, escape sequences apart, with as much as fits."""
        room = columns - 1
        shown = [self.label[:room]]
        room -= len(shown[0])
        for part in self._parts(now):
            if len(GAP) + len(part) <= room:
                shown.append(part)
                room -= len(GAP) + len(part)
        if self._total is not None and room >= len(GAP) + NARROWEST_BAR:
            width = min(WIDEST_BAR, room - len(GAP))
            shown.insert(1, _bar(min(1.0, self._done / self._total), width, style))
        return GAP.join(shown)

    def _parts(self, now: float) -> list[str]:
        rate, left = self.rate(now), self.left_s(now)
        speed = "" if rate is None or self._unit == SECONDS else _rate(rate, self._unit)
        if self._total is None:
            found = [_amount(self._done, self._unit) if self._done else "", speed, clock_text(self.elapsed_s(now))]
        else:
            percent = f"{100 * min(1.0, self._done / self._total):3.0f}%"
            time_left = f"{clock_text(left)} left" if left is not None else "-:-- left"
            found = [percent, _of(self._done, self._total, self._unit), speed, time_left]
        return [part for part in found if part]


def _bar(part: float, width: int, style: BarStyle) -> str:
    done = int(width * part)
    end = END_OF_COLOUR if style.colour else ""
    return f"{style.colour}{style.done * done}{style.reset}{style.left * (width - done)}{end}"


def clock_text(seconds: float) -> str:
    """`0:42`, `12:03`, `1:02:33`."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def size_text(count: float) -> str:
    """`512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _amount(count: int, unit: str) -> str:
    return size_text(count) if unit == BYTES else f"{count:,} {unit}"


def _of(done: int, total: int, unit: str) -> str:
    if unit == BYTES:
        return f"{size_text(done)} of {size_text(total)}"
    return f"{done:,} of {total:,} {unit}"


def _rate(rate: float, unit: str) -> str:
    if unit == BYTES:
        return f"{size_text(rate)}/s"
    if 0 < rate < 1:
        return f"{1 / rate:,.0f} s each"
    return f"{rate:,.0f}/s" if rate >= 10 or not rate else f"{rate:.1f}/s"
