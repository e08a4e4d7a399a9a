"""Tasks that do not get lost, and back-off that does not synchronise.

`TaskSet` owns the background tasks of one component: a task that dies of an unexpected exception is logged and handed
to `on_failure`, never forgotten by the garbage collector, and `close()` cancels and awaits what is left. `Backoff`
gives the delays of rule 11: exponential, with full jitter, inside a budget; randomness is passed in.

Entry: `TaskSet`, `Backoff`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class TaskSet:
    """The background tasks of one component, with one owner and one end."""

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

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        log.error("background task failed", exc_info=error, extra={"task": task.get_name()})
        if self._on_failure is not None:
            self._on_failure(error)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


class Backoff:
    """Exponential delays with full jitter: the n-th is uniform in (0, min(cap, base · 2ⁿ)], in seconds."""

    def __init__(self, base_s: float = 0.05, cap_s: float = 5.0, rng: random.Random | None = None) -> None:
        assert 0 < base_s <= cap_s
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng or random.Random()
        self.attempts = 0

    def next_delay_s(self) -> float:
        """The next delay in seconds; counts one attempt."""
        ceiling = min(self._cap_s, self._base_s * (1 << min(self.attempts, 30)))
        self.attempts += 1
        return ceiling * (1.0 - self._rng.random())

    def reset(self) -> None:
        """Start over after a success."""
        self.attempts = 0
