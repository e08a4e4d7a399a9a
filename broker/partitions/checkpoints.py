"""When partitions write checkpoints, so that whoever leads them next need not scan what these cover.

An election ends a master's term where it is: its partitions are not closed, and the next master scans what is behind
their last checkpoints before it opens them. Clients wait for that.

- Before a hand-over (`write_checkpoints`): a checkpoint of each partition that has more than a little to scan.
- All the time (`due`): a death is not announced, and the time until the last partition is open again depends on what
  all of them have to scan together. A log bounds its own part (`LogConfig.checkpoint_batches`), which a thousand logs
  multiply. So while the sum is over its bound, the logs with the most write a checkpoint. Each covers `LEAST_BATCHES`
  at least, whose appends cost a multiple of it.

An open also reads the partition's whole meta stream, which every checkpoint makes longer. Retention compacts it, but
begins minutes after a broker's start: where brokers fail more often, it never would. So a meta stream that is mostly
garbage is compacted within seconds (`shorten_metas`).

Entry: `write_checkpoints`, `due`, `shorten_metas`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from tidelog.runtime.errors import TidelogError
from tidelog.stream.partition_log import PartitionLog

logger = logging.getLogger(__name__)

BUDGET_S = 3.0
"""Time for the checkpoints of one hand-over; what is left is scanned."""
INTERVAL_S = 2.0
"""How often the sum, and the meta streams, are looked at."""
LEAST_BATCHES = 16
"""A checkpoint costs about as much as a few appends."""


def due(logs: Iterable[PartitionLog], bound: int) -> list[PartitionLog]:
    """Return the logs whose checkpoints bring the batches to scan from over `bound` to half of it, most batches first.

    Logs with fewer than `LEAST_BATCHES` are never among them.
    """
    counts = [(one.batches_to_scan, one) for one in logs]
    total = sum(count for count, _ in counts)
    if total <= bound:
        return []
    counts.sort(key=lambda each: each[0], reverse=True)
    found = []
    for count, one in counts:
        if total <= bound // 2 or count < LEAST_BATCHES:
            break
        found.append(one)
        total -= count
    return found


async def write_checkpoints(logs: Iterable[PartitionLog]) -> None:
    """Write a checkpoint of each log, as far as `BUDGET_S` allows. Never raises."""
    await _for_each(logs, PartitionLog.write_checkpoint, "checkpoints were not written: the next open scans more")


async def shorten_metas(logs: Iterable[PartitionLog]) -> None:
    """Shorten the meta streams of these logs where that is due, as far as `BUDGET_S` allows. Never raises."""
    due_now = [one for one in logs if one.can_shorten_meta and not one.closed]
    await _for_each(due_now, PartitionLog.shorten_meta, "meta streams were not shortened: the next open reads more")


async def _for_each(
    logs: Iterable[PartitionLog], step: Callable[[PartitionLog], Awaitable[None]], consequence: str
) -> None:
    failed: list[TidelogError] = []
    done = 0
    try:
        async with asyncio.timeout(BUDGET_S):
            for one in logs:
                try:
                    await step(one)
                except TidelogError as error:
                    failed.append(error)
                done += 1
                await asyncio.sleep(0)
    except TimeoutError:
        logger.info(consequence, extra={"done": done, "error": f"{BUDGET_S:g} s are up"})
    if failed:  # one line: a full WAL refuses those of all partitions, at each attempt
        logger.info(consequence, extra={"partitions": len(failed), "error": str(failed[-1])})
