"""What partitions read when they are opened together is brought by a few requests to the bucket, not several for each.

First the meta streams, whose ranges are known; then what those say has to be scanned, and the ends of the indexes.
Until there a log needs nothing but its meta stream, so all that are opened together come to their scans at about the
same time, and the ranges of up to `WAVE_LOGS` of them make one wave. A log that comes much later makes another one.
One whose ranges are in memory already, as those of a replica that has followed are, waits for no wave.

A bucket that is slow or away holds up none that needs nothing of it: the requests go on without being awaited, and what
is missing is read when it is needed.

Entry: `Gathering`, one for each batch of partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tidelog.broker.partitions.storages import MasterStorages
from tidelog.runtime.errors import NotFound
from tidelog.storage.commits import StreamRange

GATHER_S = 1.0
"""How long openings wait for what is gathered for all of them."""
WAVE_LOGS = 256
"""A wave begins with so many: the first of thousands do not wait for the last."""
QUIET_S = 0.1
"""A wave begins before all logs have come if none comes for so long."""


class Gathering:
    """See the module. Used on the event loop's thread."""

    def __init__(self, storages: MasterStorages, coming: int) -> None:
        """`coming`: logs of which each will either `bring` its ranges or have `ended`, once."""
        self._storages = storages
        self._coming = coming
        self._changed = asyncio.Event()
        """One of them has."""
        self._wanted: defaultdict[int, list[StreamRange]] = defaultdict(list)
        """Of the next wave, by replica set."""
        self._logs = 0
        """Logs of the next wave."""
        self._wave: asyncio.Future[None] | None = None
        """The next one, until it begins. The log that has begun it carries it out, and the others wait for it."""

    async def gather(self, wanted: Mapping[int, Sequence[StreamRange]]) -> None:
        """Return when these committed ranges, by replica set, are in memory, cannot be read, or it takes too long."""
        with contextlib.suppress(TimeoutError, NotFound):  # opening says itself that the storage has gone
            async with asyncio.timeout(GATHER_S):
                for replica_set, ranges in wanted.items():
                    await self._storages.get(replica_set).gather(ranges)

    async def bring(self, replica_set: int, ranges: Iterable[StreamRange]) -> None:
        """As `gather`, together with what the other logs bring."""
        self._wanted[replica_set] += ranges
        self._logs += 1
        self.ended()
        if self._wave is not None:
            await asyncio.wait([self._wave])
            return
        wave = self._wave = asyncio.get_running_loop().create_future()
        try:
            await self._others()
            wanted, self._wanted, self._logs, self._wave = self._wanted, defaultdict(list), 0, None
            await self.gather(wanted)
        finally:
            if self._wave is wave:
                self._wave = None
            wave.set_result(None)

    def ended(self) -> None:
        """A log brings nothing more."""
        self._coming -= 1
        self._changed.set()

    async def _others(self) -> None:
        """Return when all logs have come, or many, or none has for a while."""
        with contextlib.suppress(TimeoutError):
            while self._coming > 0 and self._logs < WAVE_LOGS:
                self._changed.clear()
                async with asyncio.timeout(QUIET_S):
                    await self._changed.wait()
