"""The internal topics of coordinators: mapping of keys to partitions, leader lookup, and creation on first use.

A key is a group id for `__consumer_offsets`, a transactional id for `__transaction_state`.

Entry: `partition_for`, `CoordinatorTopic.find`, `planned_topic`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tidelog.broker.coordinators.errors import CoordinatorNotAvailable
from tidelog.broker.settings import GroupSettings
from tidelog.runtime.errors import AlreadyExists, InvalidInput, TidelogError

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Delta
    from tidelog.controller.model.records import BrokerRecord, TopicRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTION_TOPIC = "__transaction_state"
_SEGMENT_BYTES = str(100 << 20)
OFFSETS_CONFIGS = {"cleanup.policy": "compact", "segment.bytes": _SEGMENT_BYTES, "compression.type": "producer"}
"""Kafka's config of `__consumer_offsets`."""
TRANSACTION_CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": _SEGMENT_BYTES,
    "compression.type": "uncompressed",
}
"""Kafka's config of `__transaction_state`."""
MAX_KEY_CHARS = 0x7FFF
"""A longer key fits in no record, and is not hashed: that takes 0.15 s for a million characters."""
LEADER_WAIT_S = 3.0
"""How long FindCoordinator waits for a partition to get a leader before it returns COORDINATOR_NOT_AVAILABLE."""


class KeyTooLong(InvalidInput):
    """A group id or transactional id has more than `MAX_KEY_CHARS`. Kafka: INVALID_REQUEST (42)."""


class PlannedTopic(NamedTuple):
    """How an internal topic is created."""

    name: str
    partitions: int
    configs: Mapping[str, str]


def planned_topic(name: str, settings: GroupSettings) -> PlannedTopic | None:
    """Return how the internal topic of this name is created; None for any other name."""
    if name == OFFSETS_TOPIC:
        return PlannedTopic(name, settings.offsets_topic_partitions, OFFSETS_CONFIGS)
    if name == TRANSACTION_TOPIC:
        return PlannedTopic(name, settings.transaction_topic_partitions, TRANSACTION_CONFIGS)
    return None


def java_hash(text: str) -> int:
    """`java.lang.String.hashCode`: int32 over UTF-16 code units."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        value = (31 * value + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(key: str, partitions: int) -> int:
    """The partition of a key, as Kafka computes it: `abs(hashCode) % partitions`, abs(-2³¹) being 0."""
    value = java_hash(key)
    return (0 if value == -(1 << 31) else abs(value)) % partitions


class CoordinatorTopic:
    """Finds and creates one internal topic through the controller."""

    def __init__(self, controller: ControllerClient, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        """`partitions` and `configs` are those of a topic that is created; an existing one keeps its own."""
        self.name = name
        self._controller = controller
        self._partitions = partitions
        self._configs = configs
        self._creating = asyncio.Lock()

    @property
    def record(self) -> TopicRecord | None:
        """The record of the topic in this broker's image."""
        return self._controller.image.topic(self.name)

    def partition_of(self, key: str) -> int | None:
        """The partition of a key; None before the topic exists, and for a key that is too long to have one."""
        topic = self.record
        return None if topic is None or len(key) > MAX_KEY_CHARS else partition_for(key, topic.partitions)

    async def find(self, key: str) -> BrokerRecord:
        """Return a key's coordinator; creates the topic if it does not exist. Raises `CoordinatorNotAvailable`,
        `KeyTooLong`."""
        _require_short(key)
        try:
            async with asyncio.timeout(LEADER_WAIT_S):
                await self.ensure()
                return await self.wait_for(lambda: self._leader(key))
        except TimeoutError as error:
            raise CoordinatorNotAvailable(f"the partition of {key!r} in {self.name} has no leader yet") from error

    async def find_partition(self, key: str) -> int:
        """The partition of a key; creates the topic if it does not exist. Raises `CoordinatorNotAvailable`,
        `KeyTooLong`."""
        _require_short(key)
        try:
            async with asyncio.timeout(LEADER_WAIT_S):
                await self.ensure()
                return await self.wait_for(lambda: self.partition_of(key))
        except TimeoutError as error:
            raise CoordinatorNotAvailable(f"{self.name} is not known to this broker yet") from error

    async def wait_for(self, find: Callable[[], T | None]) -> T:
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

    def _leader(self, key: str) -> BrokerRecord | None:
        topic = self.record
        if topic is None:
            return None
        image = self._controller.image
        partition = image.partition(topic.id, partition_for(key, topic.partitions))
        if partition is None:
            return None
        broker_id, _ = image.leader(partition)
        return image.brokers.get(broker_id)

    async def ensure(self) -> None:
        """Return when the topic exists; creates it if necessary. Raises `CoordinatorNotAvailable`."""
        async with self._creating:
            if self.record is not None:
                return
            try:
                await self._controller.create_topic(self.name, self._partitions, dict(self._configs), internal=True)
            except AlreadyExists:
                return
            except TidelogError as error:
                raise CoordinatorNotAvailable(f"{self.name} cannot be created now: {error}") from error
            logger.info("internal topic created", extra={"topic": self.name, "partitions": self._partitions})


def _require_short(key: str) -> None:
    if len(key) > MAX_KEY_CHARS:
        raise KeyTooLong(f"a group id or transactional id of {len(key)} characters: at most {MAX_KEY_CHARS}")
