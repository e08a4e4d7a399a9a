"""How full the disk of the data directory is, for the metrics: measured now and then, for a hung disk may not answer.

Invariants: a scrape never waits for the disk; a figure that could not be measured is absent, not old.

Entry: `DiskSpaceMeter`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from tidelog.runtime.clock import Clock
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

MEASURE_S: Final = 5.0
"""A disk that is written at 1 GB/s fills by 5 GB in it."""


class DiskSpace(NamedTuple):
    """Bytes of a file system."""

    free_bytes: int
    """Those that this process may still use."""
    total_bytes: int


class DiskSpaceMeter:
    """Measures one file system every `MEASURE_S`."""

    def __init__(self, clock: Clock, measure: Callable[[], Awaitable[DiskSpace]]) -> None:
        """`measure` raises `OSError` if the file system does not tell."""
        self._clock = clock
        self._measure = measure
        self._tasks = TaskSet("disk-space")
        self._latest: DiskSpace | None = None
        self._asked_at = float("-inf")

    def start(self) -> None:
        """Begin to measure."""
        self._tasks.keep(self._run, "measure")

    async def close(self) -> None:
        """Stop."""
        await self._tasks.close()

    def latest(self) -> DiskSpace | None:
        """Return the newest figures; None if none could be measured, or the last two measurements are missing."""
        return self._latest if self._clock.monotonic() - self._asked_at <= 2 * MEASURE_S else None

    async def _run(self) -> None:
        while True:
            self._asked_at = self._clock.monotonic()
            try:
                self._latest = await self._measure()
            except OSError as error:
                if self._latest is not None:
                    logger.warning("the disk's free space cannot be measured", extra={"error": str(error)})
                self._latest = None
            await self._clock.sleep(MEASURE_S)
