"""Producer ids for idempotent producers, from blocks that the controller gives to one broker once.

An id is never given twice: a block belongs to one registration of one broker, and what is left of it when the process
ends is lost (there are 2⁶³). The next block is fetched while the last quarter of the current one is used up, so that a
producer does not wait for the controller.

Entry: `ProducerIds.next_id`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tidelog.runtime.errors import TidelogError
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

_PREFETCH_SHARE = 4
"""The next block is asked for when a quarter is left."""


class ProducerIdSource(Protocol):
    """What is needed of the controller's client."""

    async def allocate_producer_ids(self, broker_id: int, registration_epoch: int) -> tuple[int, int]:
        """`(first id, count)` of a block that nobody else gets. Raises `Fenced`, `Unavailable`."""
        ...


class ProducerIds:
    """This broker's supply of producer ids (int64, ≥ 0)."""

    def __init__(self, controller: ProducerIdSource, broker_id: int, registration_epoch: Callable[[], int]) -> None:
        """`registration_epoch` gives this process's current registration."""
        self._controller = controller
        self._broker_id = broker_id
        self._registration_epoch = registration_epoch
        self._blocks: list[tuple[int, int]] = []
        """`(next id, end)`, the current block first."""
        self._low = 0
        self._lock = asyncio.Lock()
        self._tasks = TaskSet("producer-ids")
        self._prefetching = False

    async def next_id(self) -> int:
        """A producer id that was never given before. Raises `Unavailable` without a controller, `Fenced`."""
        while not self._blocks:
            async with self._lock:
                if not self._blocks:
                    await self._fetch()
        first, end = self._blocks[0]
        if first + 1 < end:
            self._blocks[0] = (first + 1, end)
        else:
            del self._blocks[0]
        if len(self._blocks) < 2 and end - first - 1 <= self._low and not self._prefetching:
            self._prefetching = True
            self._tasks.spawn(self._prefetch(), "prefetch")
        return first

    async def _fetch(self) -> None:
        first, count = await self._controller.allocate_producer_ids(self._broker_id, self._registration_epoch())
        assert count > 0
        self._low = count // _PREFETCH_SHARE
        self._blocks.append((first, first + count))

    async def _prefetch(self) -> None:
        try:
            async with self._lock:
                await self._fetch()
        except TidelogError as error:  # whoever needs the next id asks again and gets the error
            logger.info("producer ids could not be fetched ahead", extra={"error": str(error)})
        finally:
            self._prefetching = False

    async def close(self) -> None:
        """Stop fetching ahead."""
        await self._tasks.close()
