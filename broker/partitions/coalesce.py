"""Batches the common work of partitions that leave a broker at the same time (docs/design/0006-partition-moves.md).

Each move is a coroutine of its own, with an outcome of its own. Two operations are shared, since each costs a
round trip almost independently of the number of partitions:

- an upload of everything confirmed (`Rounds`): calls made during an upload are served by the next one;
- a command to the controller, which names up to 1,024 partitions (`Commands`): partitions that arrive while
  `COMMANDS_AT_ONCE` are in flight share the next command (group commit, as in the WAL).

No call waits for others to arrive: the first after an idle time starts at once, with all calls of the same iteration of
the event loop. Invariants: a round that serves a move begins after the move's call; each partition gets its own
answer, or the error of the whole command; a cancelled or timed-out caller does not affect the others.

Entry: `Rounds`, `Commands`, used by `tidelog.broker.partitions.moves`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tidelog.runtime.errors import Closed, TidelogError
from tidelog.runtime.tasks import TaskSet

Kind = TypeVar("Kind")
Item = TypeVar("Item")
Answers = Sequence[TidelogError | None]

ITEMS_A_COMMAND = 64
"""Limit of partitions in one command: the number that a partition may have to wait for."""
COMMANDS_AT_ONCE = 2


def _fail(future: asyncio.Future[None] | asyncio.Future[TidelogError | None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark as retrieved: no task may be waiting for it any more


class Rounds:
    """Runs work in rounds, one at a time; a round serves all calls made before it began."""

    def __init__(self, work: Callable[[], Awaitable[None]], tasks: TaskSet, name: str) -> None:
        """`work` is one round; it is called when a caller waits, and may raise `TidelogError`."""
        self._work = work
        self._tasks = tasks
        self._name = name
        self._next: asyncio.Future[None] | None = None
        self._running = False
        self.count = 0
        """Rounds begun so far."""

    async def join(self) -> None:
        """Return when a round that began after this call has ended. Raises the round's error."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if not self._running:
            self._running = True
            self._tasks.spawn(self._run(), self._name)
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                await asyncio.sleep(0)  # collect all calls of this iteration
                served, self._next = self._next, None
                await self._serve(served)
        finally:
            self._running = False
            if self._next is not None:
                _fail(self._next, Closed(f"{self._name} has ended"))
                self._next = None

    async def _serve(self, served: asyncio.Future[None]) -> None:
        self.count += 1
        try:
            await self._work()
        except TidelogError as error:
            _fail(served, error)
        except BaseException:
            _fail(served, Closed(f"{self._name} has ended"))
            raise
        else:
            served.set_result(None)


class _Asked(NamedTuple, Generic[Kind, Item]):
    kind: Kind
    item: Item
    answer: asyncio.Future[TidelogError | None]


class Commands(Generic[Kind, Item]):
    """Combines requests for single partitions into commands for many."""

    def __init__(self, send: Callable[[Kind, list[Item]], Awaitable[Answers]], tasks: TaskSet, name: str) -> None:
        """`send(kind, items)` sends items of one kind (a master's term); it returns one answer per item, in order."""
        self._send = send
        self._tasks = tasks
        self._name = name
        self._queue: deque[_Asked[Kind, Item]] = deque()
        self._senders = 0
        self._gathers = False
        """Whether a sender has started that will take the queue in the next iteration of the loop."""
        self.count = 0
        """Commands sent so far."""

    async def ask(self, kind: Kind, item: Item) -> TidelogError | None:
        """Return the error that refused the item, or None. Raises the error of the whole command."""
        answer: asyncio.Future[TidelogError | None] = asyncio.get_running_loop().create_future()
        self._queue.append(_Asked(kind, item, answer))
        self._start()
        return await answer

    def _start(self) -> None:
        if self._queue and not self._gathers and self._senders < COMMANDS_AT_ONCE:
            self._gathers = True
            self._senders += 1
            self._tasks.spawn(self._run(), self._name)

    async def _run(self) -> None:
        try:
            self._gathers = False  # a task starts in the next iteration: all calls of the previous one are queued
            while batch := self._take():
                self._start()
                await self._serve(batch)
        except BaseException:
            self._gathers = False
            while self._queue:
                _fail(self._queue.popleft().answer, Closed(f"{self._name} has ended"))
            raise
        finally:
            self._senders -= 1

    def _take(self) -> list[_Asked[Kind, Item]]:
        """Take the oldest item and the items of its kind that follow it."""
        batch: list[_Asked[Kind, Item]] = []
        while self._queue and len(batch) < ITEMS_A_COMMAND and (not batch or self._queue[0].kind == batch[0].kind):
            asked = self._queue.popleft()
            if not asked.answer.done():  # else the move was cancelled before its item was sent
                batch.append(asked)
        return batch

    async def _serve(self, batch: list[_Asked[Kind, Item]]) -> None:
        self.count += 1
        try:
            answers = await self._send(batch[0].kind, [asked.item for asked in batch])
        except TidelogError as error:
            for asked in batch:
                _fail(asked.answer, error)
        except BaseException:
            for asked in batch:
                _fail(asked.answer, Closed(f"{self._name} has ended"))
            raise
        else:
            for asked, found in zip(batch, answers, strict=True):
                if not asked.answer.done():
                    asked.answer.set_result(found)
