"""Watches whether the files of a log are still in their directory.

A file that was removed, or replaced by a copy, while the log has it open takes every write and returns every read.
All of that is gone once the process ends, and nothing else tells of it before the log trims the file. So the files
are looked at every `LOOK_S`. Whether to end is for an operator to decide: what is not in the bucket yet may be in
these files only.

Spare files hold nothing, and are told of to their owner only, which prepares others: the log would fail where it begins
the next file, and what is in the missing ones would be gone with it.

A file that is being renamed or removed by the log itself is not where it was, for a moment. So one counts as missing
when it was missing at two looks in a row.

Entry: `FileWatch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from tidelog.runtime.disk import DiskFile
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

LOOK_S = 5.0


class FileWatch:
    """Looks at the files of one log in the background."""

    def __init__(
        self, files: Callable[[], Sequence[DiskFile]], drop_missing_spares: Callable[[], Awaitable[None]]
    ) -> None:
        """`files` returns those that the log has now, without spares: a new sequence each time."""
        self._files = files
        self._drop_missing_spares = drop_missing_spares
        self._tasks = TaskSet("wal.files")
        self._suspected: set[DiskFile] = set()
        self.missing: tuple[str, ...] = ()
        """The names of the files that are not in the directory."""

    def start(self) -> None:
        """Begin to look."""
        self._tasks.keep(self._run, "watch")

    async def close(self) -> None:
        """Stop looking."""
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        try:
            await self._drop_missing_spares()
        except OSError as error:
            logger.warning("the spare WAL files cannot be looked at", extra={"error": str(error)})
        gone = set()
        for file in self._files():
            try:
                if not await file.is_linked():
                    gone.add(file)
            except OSError as error:  # writes and syncs of such a disk fail, and end the log
                logger.warning("a WAL file cannot be looked at", extra={"file": file.name, "error": str(error)})
        missing = tuple(file.name for file in self._files() if file in gone and file in self._suspected)
        self._suspected = gone
        for name in missing:
            if name not in self.missing:
                logger.error("a WAL file was removed or replaced while it is in use", extra={"file": name})
        self.missing = missing
