"""Priority gate of the bucket: bounds the requests in flight and admits urgent ones first.

Purposes have four ranks: the WAL and tail reads; uploads; cold reads; compaction and everything else that can wait. A
request enters when

- fewer than `slots` requests are in flight altogether, and
- fewer than its rank's share of the slots are in flight from its own rank and the less urgent ones together.

So the less urgent ranks never use up all connections: a WAL object finds a free one at once, during replays and
compactions too. Waiting requests enter by rank, then in order of arrival; but every `TURN_EVERY`th entry goes to the
least urgent rank that may enter, so that no rank starves.

Does no I/O: `tidelog.storage.bucket.guarded` calls it before each request. Entry: `PriorityGate`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from tidelog.storage.bucket.purpose import Purpose

RANKS: Final = {
    Purpose.WAL: 0,
    Purpose.TAIL: 0,
    Purpose.UPLOAD: 1,
    Purpose.COLD: 2,
    Purpose.COMPACTION: 3,
    Purpose.CLEAN: 3,
    Purpose.METADATA: 3,
    Purpose.OTHER: 3,
}
_SHARES: Final = (1.0, 0.875, 0.75, 0.25)
"""Share of the slots, for each rank together with all less urgent ones."""
TURN_EVERY: Final = 16


class PriorityGate:
    """The slots and the queues. Used on one event loop."""

    def __init__(self, slots: int) -> None:
        assert slots >= 1
        self._slots = slots
        self._caps = [max(1, int(slots * share)) for share in _SHARES]
        self._in_flight = [0] * len(_SHARES)
        self._waiting: list[deque[asyncio.Future[None]]] = [deque() for _ in _SHARES]
        self._entries = 0
        self.waits = 0
        """Number of requests that had to wait."""

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have entered and not left."""
        return sum(self._in_flight)

    @property
    def waiting(self) -> int:
        """Return the number of waiting requests, including those whose caller was cancelled."""
        return sum(map(len, self._waiting))

    def _has_room(self, rank: int) -> bool:
        return sum(self._in_flight) < self._slots and sum(self._in_flight[rank:]) < self._caps[rank]

    async def enter(self, purpose: Purpose) -> None:
        """Wait for a slot; `leave` releases it. A cancelled wait takes none."""
        rank = RANKS[purpose]
        queue = self._waiting[rank]
        if not queue and self._has_room(rank):
            self._in_flight[rank] += 1
            return
        self.waits += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._admit()  # it may have blocked a request that has room now
            else:
                self.leave(purpose)
            raise

    def leave(self, purpose: Purpose) -> None:
        """Release a slot and admit the waiting requests that may enter now."""
        rank = RANKS[purpose]
        self._in_flight[rank] -= 1
        assert self._in_flight[rank] >= 0
        self._admit()

    def _admit(self) -> None:
        while (rank := self._next_rank()) is not None:
            self._in_flight[rank] += 1
            self._entries += 1
            self._waiting[rank].popleft().set_result(None)

    def _next_rank(self) -> int | None:
        ready = []
        for rank, queue in enumerate(self._waiting):
            while queue and queue[0].done():  # its caller was cancelled
                queue.popleft()
            if queue and self._has_room(rank):
                ready.append(rank)
        if not ready:
            return None
        return ready[-1] if self._entries % TURN_EVERY == TURN_EVERY - 1 else ready[0]
