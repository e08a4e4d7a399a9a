"""What partitions that leave a broker at the same time do together (docs/design/0006-partition-moves.md).

Each move is a coroutine of its own, with a fate of its own. Two things it needs are worth sharing, for their price is
that of a round trip and hardly depends on how many they serve:

- an upload of everything that is confirmed (`Rounds`): whoever asks while one runs is served by the next;
- a command to the controller, which names up to 1,024 partitions (`Commands`): what gathers while
  `COMMANDS_AT_ONCE` are on their way goes with the next (group commit, as in the WAL).

Nobody waits for others to come: the first of a quiet time begins at once, with whoever asks in the same turn of the
event loop. Invariants: a round that serves a move begins after the move asked; each partition is given its own answer,
or the error of the whole command; who stops waiting (a time-out) takes nothing from the others.

Entry: `Rounds`, `Commands`, parts of `broker.moves`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from runtime.errors import Closed, TidelogError
from runtime.tasks import TaskSet

Item = TypeVar("Item")
Answers = Sequence[TidelogError | None]

ITEMS_A_COMMAND = 64
"""Partitions of one command: as many as one may have to wait for before it is judged."""
COMMANDS_AT_ONCE = 2


def _fail(future: asyncio.Future[None] | asyncio.Future[TidelogError | None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # there may be nobody left who waits for it


class Rounds:
    """Work that serves everybody who asked before it began, one round at a time."""

    def __init__(self, work: Callable[[], Awaitable[None]], tasks: TaskSet, name: str) -> None:
        """`work` is one round; it is called when someone has asked, and may raise `TidelogError`."""
        self._work = work
        self._tasks = tasks
        self._name = name
        self._next: asyncio.Future[None] | None = None
        self._running = False
        self.count = 0
        """Rounds begun so far."""

    async def join(self) -> None:
        """Return when a round that began after this call has ended. Raises what it failed with."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if not self._running:
            self._running = True
            self._tasks.spawn(self._run(), self._name)
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                await asyncio.sleep(0)  # all who ask in this turn
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


class _Asked(NamedTuple, Generic[Item]):
    kind: int
    item: Item
    answer: asyncio.Future[TidelogError | None]


class Commands(Generic[Item]):
    """A command that judges many partitions, asked for by one at a time."""

    def __init__(self, send: Callable[[int, list[Item]], Awaitable[Answers]], tasks: TaskSet, name: str) -> None:
        """`send(kind, items)` asks for items of one kind (a master epoch) together; an answer for each, in order."""
        self._send = send
        self._tasks = tasks
        self._name = name
        self._queue: deque[_Asked[Item]] = deque()
        self._senders = 0
        self._gathers = False
        """Whether a sender has begun that will take what is in the queue at the next turn of the loop."""
        self.count = 0
        """Commands sent so far."""

    async def ask(self, kind: int, item: Item) -> TidelogError | None:
        """What the item was refused with, if it was. Raises what the whole command failed with."""
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
            self._gathers = False  # a task begins in the next turn of the loop: all who asked in that one are here
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

    def _take(self) -> list[_Asked[Item]]:
        """The oldest, with those of its kind that follow it."""
        batch: list[_Asked[Item]] = []
        while self._queue and len(batch) < ITEMS_A_COMMAND and (not batch or self._queue[0].kind == batch[0].kind):
            asked = self._queue.popleft()
            if not asked.answer.done():  # the move was cancelled before it was asked for
                batch.append(asked)
        return batch

    async def _serve(self, batch: list[_Asked[Item]]) -> None:
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
