"""The budget of cold reads: how many bytes may be on their way from the bucket at once, and whose turn it is.

Every GET takes its bytes before it starts and gives them back when its blocks are checked and cached; what does not fit
waits. That bounds the memory of a replay however fast the bucket is, and leaves the loop, the threads and the
connections to producers and tail readers.

Three levels of urgency, each with its share of the bound, so that the later ones always leave room for the earlier:
what a reader near the end waits for, what any reader waits for, what is read ahead. Inside a level the streams take
turns, one GET each: a reader with a large window gets no more than one with a small. A GET larger than its level's
share comes alone at its level.

Entry: `ColdBudget`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from enum import IntEnum


class Level(IntEnum):
    """How urgent a GET is."""

    TAIL = 0
    """A reader near the end of its stream waits for it."""
    DEMAND = 1
    """A reader waits for it."""
    AHEAD = 2
    """Nobody waits for it yet."""


_SHARES = (1.0, 0.875, 0.75)


class Ticket:
    """One GET's claim on the budget."""

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
        """Bytes of GETs that are on their way."""
        return sum(self._used)

    @property
    def waiting(self) -> int:
        """GETs that wait."""
        return sum(len(queue) for queues in self._queues for queue in queues.values())

    def _fits(self, ticket: Ticket) -> bool:
        level = ticket.level
        return sum(self._used) + ticket.size <= self._shares[level] or not any(self._used[: level + 1])

    async def take(self, ticket: Ticket) -> None:
        """Wait until the ticket's bytes fit; `give` returns them. Cancelling the wait takes none."""
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
        """The GET is done: its bytes are free for those who wait."""
        self._used[ticket.level] -= ticket.size
        assert self._used[ticket.level] >= 0
        self._grant()

    def promote(self, ticket: Ticket, level: Level) -> None:
        """Somebody waits for it now: if it has not started, it moves to a more urgent level."""
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
        if ticket in queue:  # `_grant` drops those whose caller was cancelled
            queue.remove(ticket)
            if not queue:
                del queues[ticket.stream_id]

    def _grant(self) -> None:
        """Let in who fits: by level, and inside a level one of each stream in turn."""
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
