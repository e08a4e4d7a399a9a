"""`CatchUpPace`: how fast WALs are read for replicas that catch up, a token bucket with debt. Sans-IO.

Bytes may be taken while the bucket is not in debt; what is taken may put it into debt, as a batch has the size that it
has. The bucket fills by `bytes_per_s`, up to what `BURST_S` brings. So over any time of T seconds at most `bytes_per_s`
× (T + `BURST_S`) bytes are taken, and one batch of each taker more; and a batch of B bytes is waited for at most
B / `bytes_per_s` after it.

Times are seconds of a monotonic clock, given by the caller. Entry: `CatchUpPace`.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.25
"""The bucket holds what so much time brings."""


class CatchUpPace:
    """One bucket, for all replicas that the WALs of a broker are read for."""

    def __init__(self, bytes_per_s: int = 0) -> None:
        """`bytes_per_s`: 0 is without a bound."""
        assert bytes_per_s >= 0
        self.bytes_per_s = bytes_per_s
        self._level = self._full = bytes_per_s * BURST_S
        """Bytes that may be taken; negative: debt."""
        self._at = float("-inf")

    def wait_s(self, now: float) -> float:
        """Return how long to wait until something may be taken; 0: now."""
        if not self.bytes_per_s:
            return 0.0
        self._fill(now)
        return max(0.0, -self._level / self.bytes_per_s)

    def took(self, count: int, now: float) -> None:
        """Note that `count` bytes were taken."""
        if self.bytes_per_s:
            self._fill(now)
            self._level -= count

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._full, self._level + (now - self._at) * self.bytes_per_s)
            self._at = now
