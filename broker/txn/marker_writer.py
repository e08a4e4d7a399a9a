"""Writes the markers of ended transactions to the partitions that this broker leads.

A marker is written by the quorum rule like a record with acks=all, and confirmed before it is answered. Those of
partitions of `__consumer_offsets` pass through the group coordinator, which decides the offsets of the transaction.
`__transaction_state` takes none: no transaction has records there, and its coordinator could not read the log again.

Invariants: an answer of 0 means that the marker is confirmed. One of another code means that it may be written or not,
and may be written again. What one partition raises concerns no other. Of the attempts for one producer that wait for
room in a partition only the newest is written. An earlier one whose sender has lost the connection would come behind
it, and before transaction version 2 end the producer's next transaction, which has the same epoch.

Entry: `MarkerWriter.write`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tidelog.broker.coordinators.topic import OFFSETS_TOPIC, TRANSACTION_TOPIC
from tidelog.broker.txn.calls import MarkerParams, TopicPartition
from tidelog.runtime.errors import Overloaded, TidelogError
from tidelog.runtime.steps import paced
from tidelog.runtime.task_errors import as_unavailable

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.stream.partition_log import AppendResult, PartitionLog

CONFIRM_S = 5.0
"""How long a marker waits for room and for its confirmation before it is answered with REQUEST_TIMED_OUT."""
RETRY_PAUSE_S = 0.05
_NOT_LEADER_OR_FOLLOWER = 6
_REQUEST_TIMED_OUT = 7
_INVALID_TOPIC_EXCEPTION = 17
_MOVED = frozenset((5, 14, 15, 16, 74, 75))
"""Codes that the sender takes for NOT_LEADER_OR_FOLLOWER: it looks for the leader again."""


class MarkerWriter:
    """Writes markers to this broker's partitions."""

    def __init__(
        self, partitions: PartitionManager, write_offsets: Callable[[int, MarkerParams], Awaitable[int]]
    ) -> None:
        """`write_offsets(partition, marker)` writes one to a partition of `__consumer_offsets`."""
        self._partitions = partitions
        self._write_offsets = write_offsets
        self._newest: dict[tuple[PartitionLog, int], object] = {}
        """By log and producer id: the attempt that may be written."""

    async def write(self, markers: list[MarkerParams]) -> list[list[int]]:
        """Write markers; return a Kafka error code for each partition of each, in order."""
        writes: list[asyncio.Task[int]] = []
        async with asyncio.TaskGroup() as group:
            async for marker, partition in paced([(each, one) for each in markers for one in each.partitions]):
                writes.append(group.create_task(self._write(marker, partition)))
        left = iter(writes)
        return [[next(left).result() for _ in marker.partitions] for marker in markers]

    async def _write(self, marker: MarkerParams, partition: TopicPartition) -> int:
        if partition[0] == TRANSACTION_TOPIC:
            return _INVALID_TOPIC_EXCEPTION
        try:
            async with asyncio.timeout(CONFIRM_S):
                if partition[0] == OFFSETS_TOPIC:
                    code = await self._write_offsets(partition[1], marker)
                else:
                    log = self._partitions.get(*partition)
                    if marker.topic_ids.get(log.topic, log.topic_id) != log.topic_id:
                        return _NOT_LEADER_OR_FOLLOWER  # its topic was deleted, and this one created under its name
                    await log.wait_acked((await self._append(log, marker)).wal_end)
                    code = 0
        except TimeoutError:
            code = _REQUEST_TIMED_OUT
        except TidelogError as error:
            code = error.kafka_code
        except Exception as failure:  # noqa: BLE001  # whatever it is: the markers of other partitions are told theirs
            code = as_unavailable("txn-markers", failure).kafka_code
        return _NOT_LEADER_OR_FOLLOWER if code in _MOVED else code

    async def _append(self, log: PartitionLog, marker: MarkerParams) -> AppendResult:
        """Append a marker as soon as there is room. The caller applies a time-out.

        Raises `TimeoutError` where a newer attempt for its producer has begun meanwhile.
        """
        key, attempt = (log, marker.producer_id), object()
        self._newest[key] = attempt
        try:
            while self._newest.get(key) is attempt:
                try:
                    log.check_writable()
                    return log.write_marker(
                        marker.producer_id,
                        marker.producer_epoch,
                        commit=marker.commit,
                        coordinator_epoch=marker.coordinator_epoch,
                        transaction_version=marker.transaction_version,
                    )
                except Overloaded:
                    await log.writable()
                await asyncio.sleep(RETRY_PAUSE_S)
            raise TimeoutError("a newer attempt writes the marker")
        finally:
            if self._newest.get(key) is attempt:
                del self._newest[key]
