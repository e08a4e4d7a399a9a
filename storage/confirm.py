"""The confirm offset: up to which WAL offset the quorum rule is met. Nothing past it is visible or uploaded (rule 2).

Sans-IO: the WAL calls `advance` when a single member syncs (later, replication does), and the callbacks registered for
an offset run in the order of offsets. They run inside `advance`, before any task that `wait`s resumes, so high
watermarks have moved before a Produce response is written.

Invariants: the value never decreases; of a callback and its `failed` one runs, once; after `fail` no callback runs and
every wait for a larger value raises.

Entry: `ConfirmOffset`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

_Entry = TypeVar("_Entry", bound=tuple[Any, ...])
"""The offset, and what waits for it."""
_NEVER = 1 << 63


def _put_in_order(queue: deque[_Entry], entry: _Entry) -> None:
    """Insert by offset: O(1) when offsets arrive in order, as they usually do; otherwise a search from the end."""
    offset = entry[0]
    if not queue or queue[-1][0] <= offset:
        queue.append(entry)
        return
    index = len(queue)
    while index > 0 and queue[index - 1][0] > offset:
        index -= 1
    queue.insert(index, entry)


class ConfirmOffset:
    """A WAL offset (int64 bytes) that only grows, and the callbacks and tasks that wait for it."""

    __slots__ = ("_error", "_listeners", "_observer", "_on_watch", "_waiters", "_watch_at", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = value
        """The current confirm offset."""
        self._listeners: deque[tuple[int, Callable[[], None], Callable[[Exception], None] | None]] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._error: Exception | None = None
        self._watch_at = _NEVER
        self._on_watch: Callable[[], None] | None = None
        self._observer: Callable[[int], None] | None = None

    def observe(self, observer: Callable[[int], None]) -> None:
        """Call `observer` with each new value from now on, before all who wait for it. There is one; it must be fast
        and not raise."""
        self._observer = observer

    @property
    def error(self) -> Exception | None:
        """Return the error that prevents further confirmation, or None."""
        return self._error

    def advance(self, offset: int) -> None:
        """Confirm everything before `offset`. An offset that is not larger than the value changes nothing."""
        if offset <= self.value or self._error is not None:
            return
        self.value = offset
        if self._observer is not None:
            self._observer(offset)
        listeners = self._listeners
        while listeners and listeners[0][0] <= offset:
            listeners.popleft()[1]()
        waiters = self._waiters
        while waiters and waiters[0][0] <= offset:
            future = waiters.popleft()[1]
            if not future.done():
                future.set_result(None)
        if offset >= self._watch_at and self._on_watch is not None:
            self._watch_at = _NEVER
            self._on_watch()

    def add_listener(
        self, wal_offset: int, callback: Callable[[], None], failed: Callable[[Exception], None] | None = None
    ) -> None:
        """Call `callback` once when the value is at least `wal_offset`: now, if it already is. O(1) in offset order.

        Never called after `fail`: then `failed` is called with its error instead, now if that has been. The callbacks
        must not raise and must be fast: every acknowledgement waits for them.
        """
        if wal_offset <= self.value:
            callback()
        elif self._error is None:
            listeners = self._listeners
            if not listeners or listeners[-1][0] <= wal_offset:  # as usual, and then without a call
                listeners.append((wal_offset, callback, failed))
            else:
                _put_in_order(listeners, (wal_offset, callback, failed))
        elif failed is not None:
            failed(self._error)

    async def wait(self, wal_offset: int) -> None:
        """Return when the value is at least `wal_offset`. Raises the error given to `fail`."""
        if wal_offset <= self.value:
            return
        if self._error is not None:
            raise self._error
        waiters = self._waiters
        while waiters and waiters[-1][1].done():  # its caller was cancelled, perhaps by a time-out
            waiters.pop()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _put_in_order(waiters, (wal_offset, future))
        await future

    def watch(self, wal_offset: int, callback: Callable[[], None]) -> None:
        """Call `callback` once when the value reaches `wal_offset`. There is one watch; a new one replaces it.

        For the uploader, which waits for offsets far ahead and would break the listeners' order.
        """
        self._watch_at = wal_offset
        self._on_watch = callback
        if wal_offset <= self.value:
            self._watch_at = _NEVER
            callback()

    def fail(self, error: Exception) -> None:
        """Stop confirming: the WAL failed or this master is fenced. The first error is kept."""
        if self._error is not None:
            return
        self._error = error
        listeners, self._listeners = self._listeners, deque()
        for _, _, failed in listeners:
            if failed is not None:
                failed(error)
        waiters, self._waiters = self._waiters, deque()
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)
