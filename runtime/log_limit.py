"""Rate limit for log lines that peers can cause, or of which one cause has thousands.

Any peer that can open a connection can cause log lines; a scanner must not fill the disk with them, and neither must
the partitions of a broker whose bucket does not answer. `LogLimiter` passes `burst` lines of a kind in each `period_s`
and counts the rest; the next line that passes reports how many were suppressed. Metrics count every case. Kinds are
named in code, never by a client, so their number is bounded.

Entry: `LogLimiter`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tidelog.runtime.clock import Clock


class _Kind:
    __slots__ = ("left", "suppressed", "until")

    def __init__(self, left: int, until: float) -> None:
        self.left = left
        self.until = until
        self.suppressed = 0


class LogLimiter:
    """Passes at most `burst` lines of a kind in `period_s` seconds to a logger."""

    def __init__(self, log: logging.Logger, clock: Clock, *, burst: int = 10, period_s: float = 60.0) -> None:
        self._log = log
        self._clock = clock
        self._burst = burst
        self._period_s = period_s
        self._kinds: dict[str, _Kind] = {}

    def line(
        self, kind: str, level: int, event: str, extra: Mapping[str, Any], error: BaseException | None = None
    ) -> None:
        """Log `event`, with `error`'s traceback if given, unless the limit of its kind is reached."""
        now = self._clock.monotonic()
        state = self._kinds.get(kind)
        if state is None:
            state = self._kinds[kind] = _Kind(self._burst, now + self._period_s)
        elif now >= state.until:
            state.left, state.until = self._burst, now + self._period_s
        if not state.left:
            state.suppressed += 1
            return
        state.left -= 1
        fields = dict(extra)
        if state.suppressed:
            fields["left_out"] = state.suppressed
            state.suppressed = 0
        elif not state.left:
            fields["next"] = f"further lines of this kind are suppressed for up to {self._period_s:.0f} s"
        self._log.log(level, event, exc_info=error, extra=fields)
