"""When the orphan search runs: by itself now and then, and when somebody asks. One search at a time.

The rules of what is an orphan are in `storage.orphan_scan`. The search by itself is for the active controller
(`is_active`), so that of many processes one lists the bucket.

Entry: `OrphanCleaner`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from runtime.clock import Clock
from runtime.errors import TidelogError, Unavailable
from runtime.tasks import TaskSet
from storage.object_store import ObjectStore
from storage.orphan_scan import OrphanMetadata, OrphanReport, clean_orphans
from storage.settings import CleanSettings

log = logging.getLogger(__name__)


class CleanRunning(Unavailable):
    """A search is going on already."""


class OrphanCleaner:
    """Searches of one process. All methods are called on the event loop's thread."""

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
        """Searches that came to their end, since the start."""
        self.deleted = 0
        """Orphans deleted since the start."""
        self.aborted = 0
        """Interrupted multipart uploads aborted since the start."""
        self.last_error = ""
        """How the last search by itself failed; empty once one succeeds."""

    def start(self) -> None:
        """Search by itself from here on, if `clean.enabled`; `clean` works either way."""
        if self._settings.enabled:
            self._tasks.spawn(self._loop(), "loop")

    async def close(self) -> None:
        """Stop at once. A delete that is under way may or may not happen; the next search finds what is left."""
        await self._tasks.close()

    async def _loop(self) -> None:
        while True:
            await self._clock.sleep(self._settings.interval_ms / 1000 * (0.5 + self._rng.random()))
            if not self._is_active() or self._running.locked():
                continue
            try:
                await self.clean()
            except TidelogError as error:
                self.last_error = error.message
                log.warning("the search for orphans is put off", extra={"error": str(error)})

    @property
    def active(self) -> bool:
        """Whether a search is going on."""
        return self._running.locked()

    async def clean(
        self, *, dry_run: bool = False, orphan_age_ms: int | None = None, report: OrphanReport | None = None
    ) -> OrphanReport:
        """Search, and delete what is found unless `dry_run`; `orphan_age_ms` else is the configuration's. `report`
        is filled as the search goes on.

        Raises `CleanRunning` while another search goes on, `Unavailable` when the bucket or the controller does not
        answer: what was deleted by then is, the rest is found by the next search.
        """
        if self._running.locked():
            raise CleanRunning("a search for orphans is going on already", hint="wait for it to end, then try again")
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
        """The safety age of the configuration."""
        return self._settings.orphan_age_ms

    def figures(self) -> dict[str, int]:
        """For metrics: counts since the start."""
        return {"searches": self.searches, "deletes": self.deleted, "aborts": self.aborted}
