"""Scheduling of the orphan search: periodically and on request. One search at a time.

`tidelog.storage.cleaning.orphan_scan` defines orphans. The periodic search runs on the active controller only
(`is_active`), so that of many processes one lists the bucket.

Entry: `OrphanCleaner`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata, OrphanReport, clean_orphans
from tidelog.storage.settings import CleanSettings

logger = logging.getLogger(__name__)


class CleanRunning(Unavailable):
    """A search is already running."""


class OrphanCleaner:
    """The orphan searches of one process. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        cluster_id: Callable[[], str],
        metadata: OrphanMetadata,
        clock: Clock,
        rng: random.Random,
        settings: CleanSettings,
        is_active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._cluster_id = cluster_id
        self._metadata = metadata
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._is_active = is_active
        self._running = asyncio.Lock()
        self._tasks = TaskSet("storage.orphans")
        self.searches = 0
        """Searches completed since the start."""
        self.deleted = 0
        """Orphans deleted since the start."""
        self.aborted = 0
        """Interrupted multipart uploads aborted since the start."""
        self.last_error = ""
        """The error of the last periodic search; empty after a success, and when another process searches."""

    def start(self) -> None:
        """Start the periodic search, if `clean.enabled`; `clean` works either way."""
        if self._settings.enabled:
            self._tasks.keep(self._loop, "loop")

    async def close(self) -> None:
        """Stop at once. A delete in progress may or may not take effect; the next search finds the rest."""
        await self._tasks.close()

    async def _loop(self) -> None:
        while True:
            await self._clock.sleep(self._settings.interval_ms / 1000 * (0.5 + self._rng.random()))
            if not self._is_active():
                self.last_error = ""
            if not self._is_active() or self._running.locked():
                continue
            try:
                await self.clean()
            except TidelogError as error:
                self.last_error = error.message
                logger.warning("orphan search postponed", extra={"error": str(error)})

    @property
    def active(self) -> bool:
        """Return whether a search is running."""
        return self._running.locked()

    async def clean(
        self, *, dry_run: bool = False, orphan_age_ms: int | None = None, report: OrphanReport | None = None
    ) -> OrphanReport:
        """Search, and delete the orphans unless `dry_run`; `orphan_age_ms` overrides the configuration. `report` is
        filled during the search.

        Raises `CleanRunning` while another search runs, `Unavailable` when the bucket or the controller does not
        answer: deletes up to then have taken effect, the next search finds the rest.
        """
        if self._running.locked():
            raise CleanRunning("an orphan search is already running", hint="wait for it to end, then try again")
        async with self._running:
            report = await clean_orphans(
                self._store,
                self._cluster_id(),
                self._metadata,
                now_ms=self._clock.time_ms(),
                orphan_age_ms=self._settings.orphan_age_ms if orphan_age_ms is None else orphan_age_ms,
                dry_run=dry_run,
                report=report,
            )
        self.searches += 1
        self.deleted += report.deleted
        self.aborted += report.aborted
        self.last_error = ""
        return report

    @property
    def orphan_age_ms(self) -> int:
        """Return the configured safety age."""
        return self._settings.orphan_age_ms

    def figures(self) -> dict[str, int]:
        """Return counts since the start, for metrics."""
        return {"searches": self.searches, "deletes": self.deleted, "aborts": self.aborted}
