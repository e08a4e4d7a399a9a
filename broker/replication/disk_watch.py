"""`DiskWatch`: tells that the disk of a WAL hangs: something waits to be durable, and nothing becomes durable.

Time is counted in looks that were made, and not read from a clock: a process that was stopped and is woken up finds the
completions of its disk after its first look, and has no reason to suspect the disk.

Sans-IO. Entry: `DiskWatch`.
"""

from __future__ import annotations


class DiskWatch:
    """Looks at a WAL's offsets at regular intervals."""

    def __init__(self, limit_s: float, interval_s: float) -> None:
        """`limit_s`: how long (seconds, > 0) a disk may do nothing; `interval_s`: between two looks."""
        self._limit = max(1, round(limit_s / interval_s))
        self._looks = 0
        """Made since the durable offset moved last, or nothing waited."""
        self._durable = -1

    def look(self, durable_offset: int, end_offset: int) -> bool:
        """Return whether the disk hangs, at WAL offsets (int64 bytes) up to which all is durable, and was appended.

        True at most once in `limit_s`: what was begun because of it has that long.
        """
        if durable_offset >= end_offset or durable_offset != self._durable:
            self._durable, self._looks = durable_offset, 0
            return False
        self._looks += 1
        if self._looks < self._limit:
            return False
        self._looks = 0
        return True
