"""Background tasks with an owner.

`TaskSet` owns the background tasks of one component: a task that ends with an exception is logged, counted
(`tidelog.runtime.task_errors`) and passed to `on_failure`; a loop that is kept (`keep`) is started again instead. Tasks
are never garbage-collected while running, and `close()` cancels and awaits the remaining ones.

Entry: `TaskSet`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from tidelog.runtime.errors import TidelogError
from tidelog.runtime.task_errors import ERRORS, first_of

logger = logging.getLogger(__name__)

RESTART_BASE_S, RESTART_CAP_S = 0.1, 10.0
"""Pauses before a kept loop is started again. A loop that ran for longer than the cap begins with the base anew."""


class TaskSet:
    """The background tasks of one component."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` in the background until it ends or the set is closed."""
        assert not self._closed, f"task set {self._name} is closed"
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Run `loop()` in the background; after an unexpected exception run it again, with growing pauses.

        For work that finds out by itself what is to be done. What `loop` raises on purpose (`TidelogError`) ends it,
        and so does a failed assertion if there is an `on_failure`: it says that going on would break a rule.
        """
        return self.spawn(self._keep(loop), name)

    async def _keep(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        clock = asyncio.get_running_loop()
        delay_s = RESTART_BASE_S
        while True:
            began = clock.time()
            try:
                await loop()
                return
            except Exception as failure:  # noqa: BLE001  # noted, or raised again
                error = first_of(failure)
                if isinstance(error, TidelogError) or (
                    isinstance(error, AssertionError) and self._on_failure is not None
                ):
                    raise error from failure.__cause__
                ERRORS.note(self._name, error, ended=False)
            if clock.time() - began > RESTART_CAP_S:
                delay_s = RESTART_BASE_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RESTART_CAP_S)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if isinstance(error, TidelogError):
            logger.error("background task failed", exc_info=error, extra={"task": task.get_name()})
        else:
            ERRORS.note(self._name, error, ended=True)
        if self._on_failure is not None:
            self._on_failure(error)

    async def close(self) -> None:
        """Cancel the running tasks and wait for their end."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


def count_tasks() -> int:
    """Return the number of tasks of the running event loop; 0 without one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


async def unless_failed(work: Coroutine[Any, Any, None], failed: asyncio.Future[None]) -> None:
    """Await `work`. If `failed` gets an exception before, cancel `work`, await its end, and raise that exception.

    What `work` waits for may need the part that has failed, and would then never come.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    failed.result()
