"""Checkpoints of partitions that another broker is about to lead, so that it need not scan what they cover.

An election ends a master's term where it is: its partitions are not closed, and the next master scans what is behind
their last checkpoints before it opens them. Clients wait for that. A checkpoint beforehand costs them nothing.

Entry: `write_checkpoints`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from tidelog.runtime.errors import TidelogError
from tidelog.stream.partition_log import PartitionLog

logger = logging.getLogger(__name__)

BUDGET_S = 3.0
"""Time for the checkpoints of one hand-over; what is left is scanned."""


async def write_checkpoints(logs: Iterable[PartitionLog]) -> None:
    """Write a checkpoint of each log, as far as `BUDGET_S` allows. Never raises."""
    try:
        async with asyncio.timeout(BUDGET_S):
            for one in logs:
                await _write_checkpoint(one)
                await asyncio.sleep(0)
    except TimeoutError:
        logger.info("not all partitions have a new checkpoint before they are handed over: time is up")


async def _write_checkpoint(one: PartitionLog) -> None:
    try:
        await one.write_checkpoint()
    except TidelogError as error:
        place = {"topic": one.topic, "partition": one.partition, "error": str(error)}
        logger.info("no checkpoint before a hand-over: the next open scans more", extra=place)
