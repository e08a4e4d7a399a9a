"""`VirtualLoop`: asyncio's event loop with virtual time, and `Life`, one run of one simulated process on it.

There is no selector, no thread and no sleep: when nothing is ready, time jumps to the next timer. Timers with the same
time run in the order of their creation. Functions that production code runs in a thread (`run_in_executor`,
`asyncio.to_thread`) run without interruption, `EXECUTOR_S` later, on the loop.

Every callback and task belongs to a `Life` by a context variable inherited from its creator. Crashes and pauses use
this: the loop drops callbacks of a life that has ended (no `finally` runs, as after SIGKILL), and holds back those of a
paused life (as after SIGSTOP) until it resumes. The tasks of a dead life are kept until the simulation ends, so that
nothing of them runs when they are deallocated.

Invariant: the order of callbacks depends on nothing but the program and its seed. Tasks and futures hash by their
creation order, so that the iteration order of sets of them is deterministic, too.

Entry: `VirtualLoop`, `Life.run`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 1_000.0
"""Virtual monotonic time at the start."""
EXECUTOR_S = 0.0002
"""Duration of work in a thread."""
_MANY_CANCELLED = 4_096

_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


_ENDED: list[Life] = []
"""Ended lives and their tasks: never deallocated, because that would run their `finally` blocks."""


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set: the simulation cannot make progress."""


class Life:
    """One run of one process: from its start to its crash or end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.halted = False
        """Dead or paused: the only attribute that the loop checks."""
        self._held: list[asyncio.Handle] = []
        self._graveyard: list[object] = []
        self.context = contextvars.Context()
        self.context.run(_LIFE.set, self)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` so that all tasks and callbacks that it creates belong to this life."""
        return self.context.copy().run(function, *args)

    def spawn(self, loop: VirtualLoop, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Create a task of this life."""
        return loop.create_task(work, name=f"{self.name}.{name}", context=self.context.copy())

    def hold(self, handle: asyncio.Handle) -> None:
        """Hold back a callback that may not run now."""
        (self._graveyard if self.dead else self._held).append(handle)

    def pause(self) -> None:
        """Stop between two steps of any task; time continues."""
        assert not self.dead
        self.paused = self.halted = True

    def resume(self, loop: VirtualLoop) -> None:
        """Resume: all callbacks that became due meanwhile run now."""
        if self.dead:
            return
        self.paused = self.halted = False
        held, self._held = self._held, []
        loop.take_back(held)

    def end(self, loop: VirtualLoop) -> None:
        """End the process: none of its tasks makes another step."""
        self._graveyard.extend(task for task in asyncio.all_tasks(loop) if _life_of(task) is self)
        self._graveyard.extend(self._held)
        self._held.clear()
        self.dead = self.halted = True
        _ENDED.append(self)


def current_life() -> Life | None:
    """The life that the running code belongs to; None for the world itself."""
    return _LIFE.get()


def next_serial(loop: asyncio.AbstractEventLoop) -> int:
    """Return the next hash for a task or future of this loop."""
    assert isinstance(loop, VirtualLoop)
    return next(loop.serials)


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """Hashes by a serial number, assigned on first use, so that sets of tasks iterate deterministically."""

    life: Life | None = None
    _serial = 0

    def __hash__(self) -> int:
        return self._serial or self._draw()

    def _draw(self) -> int:
        self._serial = next_serial(self._loop)
        return self._serial


def _life_of(task: asyncio.Task[Any]) -> Life | None:
    return task.life if isinstance(task, _Task) else None


class _Future(asyncio.Future):  # type: ignore[type-arg]
    """Hashes as `_Task` does."""

    _serial: int

    def __hash__(self) -> int:
        try:
            return self._serial
        except AttributeError:
            self._serial = next_serial(self._loop)
            return self._serial


class _Handle(asyncio.Handle):
    """As asyncio's, without debugging support: creating that would take longer than most callbacks of a simulation."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., Any], args: Any, loop: VirtualLoop, context: contextvars.Context
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False


def _nothing() -> None:
    """The callback of a cancelled handle."""


class _Timer(_Handle):
    """The handle returned by `call_at`."""

    __slots__ = ("_due",)

    def __init__(
        self, when: float, callback: Callable[..., Any], args: Any, loop: VirtualLoop, context: contextvars.Context
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False
        self._due = False
        """The timer was removed from the heap."""

    def cancel(self) -> None:
        """See `asyncio.TimerHandle`."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = _nothing, ()
            if not self._due:
                self._loop.note_cancelled()


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop with virtual time; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START_S
        self._timers: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count()
        self.serials = itertools.count(1)
        """The last serial number of tasks and futures."""
        self._cancelled = 0
        self._queue: deque[Any] = deque()
        self.turns = 0
        """Callbacks run so far."""
        self.max_turns = sys.maxsize
        """Maximum number of callbacks; more is an error: a busy loop without progress of time."""

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def close(self) -> None:
        """See `asyncio.BaseEventLoop`; pending callbacks are dropped."""
        self._timers.clear()
        self._queue.clear()
        super().close()

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """See `asyncio.BaseEventLoop`. A task without a name is not numbered, as asyncio would, over all seeds."""
        context = context if context is not None else contextvars.copy_context()
        task = _Task(coro, loop=self, name=name or "task", context=context)
        task.life = context.get(_LIFE)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio.BaseEventLoop`."""
        return _Future(loop=self)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.BaseEventLoop`."""
        handle = _Handle(callback, args, self, context if context is not None else contextvars.copy_context())
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """There are no threads: the same as `call_soon`."""
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.BaseEventLoop`; `when` in the past is now."""
        timer = _Timer(when, callback, args, self, context if context is not None else contextvars.copy_context())
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.BaseEventLoop`."""
        when = self._now + delay
        timer = _Timer(when, callback, args, self, context if context is not None else contextvars.copy_context())
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def note_cancelled(self) -> None:
        """Account a cancelled timer in the heap: it is skipped, or removed together with many others."""
        self._cancelled += 1
        if self._cancelled > _MANY_CANCELLED and self._cancelled > len(self._timers) // 2:
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run `func` on the loop after a delay."""
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  # handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(EXECUTOR_S, run)
        return future

    def take_back(self, handles: list[asyncio.Handle]) -> None:
        """Queue callbacks that were held back."""
        self._queue.extend(handles)

    def _run_once(self) -> None:
        """Called repeatedly by asyncio: run ready callbacks, then advance the time, until the loop is stopped."""
        queue, max_turns = self._queue, self.max_turns
        while not self._stopping:  # type: ignore[attr-defined]
            if not queue:
                self._jump()
            handle = queue.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            life = context.get(_LIFE)
            if life is not None and life.halted:
                life.hold(handle)
                continue
            self.turns += 1
            try:
                context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt, Deadlock):
                raise
            except BaseException as error:  # noqa: BLE001  # as `asyncio.Handle._run` does
                what = {"message": f"Exception in callback {handle._callback!r}", "exception": error, "handle": handle}
                self.call_exception_handler(what)
            if self.turns > max_turns:
                self.stop()
                raise Deadlock(f"{self.turns} callbacks have run: something spins")

    def _jump(self) -> None:
        """Advance the time to the next timer, and queue it and all others of that time."""
        timers, queue, pop = self._timers, self._queue, heapq.heappop
        while timers:
            now, _, timer = pop(timers)
            if timer._cancelled:
                self._cancelled -= 1
                continue
            timer._due = True
            queue.append(timer)
            while timers and timers[0][0] <= now:
                timer = pop(timers)[2]
                if timer._cancelled:
                    self._cancelled -= 1
                else:
                    timer._due = True
                    queue.append(timer)
            if now > self._now:
                self._now = now
            return
        raise Deadlock("nothing is ready and no timer is set")

    def _write_to_self(self) -> None:
        """There is no other thread to wake this one."""
