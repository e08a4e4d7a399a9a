"""The topic `__consumer_offsets`: mapping of groups to partitions, leader lookup, and creation on first use.

Entry: `partition_for`, `OffsetsTopic.find`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.groups.errors import CoordinatorNotAvailable
from tidelog.broker.settings import GroupSettings
from tidelog.runtime.errors import AlreadyExists, TidelogError

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Delta
    from tidelog.controller.model.records import BrokerRecord, TopicRecord

logger = logging.getLogger(__name__)

OFFSETS_TOPIC = "__consumer_offsets"
TOPIC_CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(100 << 20),
    "compression.type": "producer",
}
"""Kafka's config of this topic."""
LEADER_WAIT_S = 3.0
"""How long FindCoordinator waits for a partition to get a leader before it returns COORDINATOR_NOT_AVAILABLE."""


def java_hash(text: str) -> int:
    """`java.lang.String.hashCode`: int32 over UTF-16 code units."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        value = (31 * value + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(group_id: str, partitions: int) -> int:
    """The offsets partition of a group, as Kafka computes it: `abs(hashCode) % partitions`, abs(-2³¹) being 0."""
    value = java_hash(group_id)
    return (0 if value == -(1 << 31) else abs(value)) % partitions


class OffsetsTopic:
    """Finds and creates the topic through the controller."""

    def __init__(self, controller: ControllerClient, settings: GroupSettings) -> None:
        self._controller = controller
        self._settings = settings
        self._creating = asyncio.Lock()

    @property
    def record(self) -> TopicRecord | None:
        """The record of the topic in this broker's image."""
        return self._controller.image.topic(OFFSETS_TOPIC)

    def partition_of(self, group_id: str) -> int | None:
        """The partition of a group; None before the topic exists."""
        topic = self.record
        return None if topic is None else partition_for(group_id, topic.partitions)

    async def find(self, group_id: str) -> BrokerRecord:
        """Return a group's coordinator; creates the topic if it does not exist. Raises `CoordinatorNotAvailable`."""
        try:
            async with asyncio.timeout(LEADER_WAIT_S):
                await self._ensure()
                return await self.wait_for(lambda: self._leader(group_id))
        except TimeoutError as error:
            raise CoordinatorNotAvailable(f"the offsets partition of group {group_id!r} has no leader yet") from error

    async def wait_for(self, find: Callable[[], BrokerRecord | None]) -> BrokerRecord:
        """Repeat the lookup at each change of the image until it succeeds. The caller applies a time-out."""
        changed = asyncio.Event()

        def wake(_: Delta) -> None:
            changed.set()

        unsubscribe = self._controller.subscribe(wake)
        try:
            while (found := find()) is None:
                changed.clear()
                await changed.wait()
            return found
        finally:
            unsubscribe()

    def _leader(self, group_id: str) -> BrokerRecord | None:
        topic = self.record
        if topic is None:
            return None
        image = self._controller.image
        partition = image.partition(topic.id, partition_for(group_id, topic.partitions))
        if partition is None:
            return None
        broker_id, _ = image.leader(partition)
        return image.brokers.get(broker_id)

    async def _ensure(self) -> None:
        async with self._creating:
            if self.record is not None:
                return
            partitions = self._settings.offsets_topic_partitions
            try:
                await self._controller.create_topic(OFFSETS_TOPIC, partitions, dict(TOPIC_CONFIGS), internal=True)
            except AlreadyExists:
                return
            except TidelogError as error:
                raise CoordinatorNotAvailable(f"{OFFSETS_TOPIC} cannot be created now: {error}") from error
            logger.info("offsets topic created", extra={"topic": OFFSETS_TOPIC, "partitions": partitions})
