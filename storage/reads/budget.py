"""The budget of cold reads: bounds the bytes in flight from the bucket and schedules the GETs that wait for it.

Every GET reserves its bytes before it starts and releases them when its blocks are checked and cached; a GET that does
not fit waits. That bounds the memory of a replay however fast the bucket is, and leaves the event loop, the threads and
the connections to producers and tail readers.

There are three levels of urgency: GETs for a reader near the end, GETs for any other reader, and read-ahead. Each has
a share of the bound, so that a less urgent level never takes all of it. Within a level the streams are served round
robin, one GET each, whatever the size of a reader's window. A GET larger than its level's share runs alone at its
level.

Entry: `ColdBudget`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from enum import IntEnum


class Level(IntEnum):
    """The urgency of a GET."""

    TAIL = 0
    """A reader near the end of its stream waits for it, or a partition that is being opened."""
    DEMAND = 1
    """A reader waits for it."""
    AHEAD = 2
    """Read-ahead: no reader waits for it yet."""


_SHARES = (1.0, 0.875, 0.75)


class Ticket:
    """A GET's reservation in the budget."""

    __slots__ = ("future", "level", "size", "stream_id")

    def __init__(self, stream_id: int, size: int, level: Level) -> None:
        self.stream_id = stream_id
        self.size = size
        self.level = level
        self.future: asyncio.Future[None] | None = None
        """None before it waits, or if it never had to."""


class ColdBudget:
    """Bytes of cold GETs in flight. Used on one event loop."""

    def __init__(self, bound_bytes: int) -> None:
        assert bound_bytes > 0
        self.bound_bytes = bound_bytes
        self._shares = [int(bound_bytes * share) for share in _SHARES]
        self._used = [0] * len(_SHARES)
        self._queues: list[OrderedDict[int, deque[Ticket]]] = [OrderedDict() for _ in _SHARES]
        self.waits = 0
        """GETs that had to wait."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes of GETs in flight."""
        return sum(self._used)

    @property
    def waiting(self) -> int:
        """Return the number of waiting GETs."""
        return sum(len(queue) for queues in self._queues for queue in queues.values())

    def _fits(self, ticket: Ticket) -> bool:
        level = ticket.level
        return sum(self._used) + ticket.size <= self._shares[level] or not any(self._used[: level + 1])

    async def take(self, ticket: Ticket) -> None:
        """Wait until the ticket's bytes fit; `give` releases them. A cancelled wait reserves none."""
        if not any(self._queues[: ticket.level + 1]) and self._fits(ticket):
            self._used[ticket.level] += ticket.size
            return
        self.waits += 1
        ticket.future = asyncio.get_running_loop().create_future()
        self._enqueue(ticket)
        try:
            await ticket.future
        except asyncio.CancelledError:
            if ticket.future.cancelled():
                self._dequeue(ticket)
                self._grant()
            else:
                self.give(ticket)
            raise

    def give(self, ticket: Ticket) -> None:
        """Release the bytes of a completed GET."""
        self._used[ticket.level] -= ticket.size
        assert self._used[ticket.level] >= 0
        self._grant()

    def promote(self, ticket: Ticket, level: Level) -> None:
        """Move a GET that has not started to a more urgent level: a reader waits for it now."""
        if level >= ticket.level or ticket.future is None or ticket.future.done():
            return
        self._dequeue(ticket)
        ticket.level = level
        self._enqueue(ticket)
        self._grant()

    def _enqueue(self, ticket: Ticket) -> None:
        self._queues[ticket.level].setdefault(ticket.stream_id, deque()).append(ticket)

    def _dequeue(self, ticket: Ticket) -> None:
        queues = self._queues[ticket.level]
        queue = queues.get(ticket.stream_id, deque())
        if ticket in queue:  # `_grant` drops tickets whose caller was cancelled
            queue.remove(ticket)
            if not queue:
                del queues[ticket.stream_id]

    def _grant(self) -> None:
        """Admit the waiting GETs that fit: by level, and round robin by stream within a level."""
        for queues in self._queues:
            while queues:
                stream_id, queue = next(iter(queues.items()))
                ticket = queue[0]
                assert ticket.future is not None
                if not ticket.future.done():
                    if not self._fits(ticket):
                        return
                    self._used[ticket.level] += ticket.size
                    ticket.future.set_result(None)
                queue.popleft()
                if queue:
                    queues.move_to_end(stream_id)
                else:
                    del queues[stream_id]
