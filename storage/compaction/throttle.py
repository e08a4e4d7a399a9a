"""The rate limit of compaction in bytes per second, lower while the broker is busy. Sans-IO.

While the broker is *busy*, the rate is a tenth. The broker is busy when producers have written more than
`compaction.busy_bytes_per_s` to the WAL, averaged over a second or more, or when a whole upload is waiting. The rate
never drops to zero, so that objects of a permanently busy cluster are compacted too.

Entry: `Throttle`, `BusyMeter`.
"""

from __future__ import annotations

BUSY_SHARE = 0.1
_WINDOW_S = 1.0
_BURST_S = 1.0
"""Unused budget accumulates for this long."""


class Throttle:
    """A budget of bytes that fills at a steady rate."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def delay_s(self, now: float, size: int, busy: bool) -> float:
        """Take `size` bytes; returns how many seconds to wait before using them. `now` is monotonic seconds."""
        rate = self._bytes_per_s * (BUSY_SHARE if busy else 1.0)
        self._free_at = max(self._free_at, now - _BURST_S) + size / rate
        return max(0.0, self._free_at - now)


class BusyMeter:
    """Decides whether the broker is busy, from the WAL's end and the bytes waiting for upload."""

    def __init__(self, busy_bytes_per_s: int, upload_bytes: int) -> None:
        self._busy_bytes_per_s = busy_bytes_per_s
        self._upload_bytes = upload_bytes
        self._since: tuple[float, int] | None = None
        self.produce_bytes_per_s = 0.0
        """The latest measurement."""

    def observe(self, now: float, wal_end: int, waiting_bytes: int) -> bool:
        """Record the current values; return whether the broker is busy. `waiting_bytes` are confirmed, not uploaded."""
        if self._since is None:
            self._since = (now, wal_end)
        seconds = now - self._since[0]
        if seconds >= _WINDOW_S:
            self.produce_bytes_per_s = (wal_end - self._since[1]) / seconds
            self._since = (now, wal_end)
        return self.produce_bytes_per_s > self._busy_bytes_per_s or waiting_bytes >= self._upload_bytes
