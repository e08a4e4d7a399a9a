"""The committed offsets of the groups of one offsets partition. Sans-I/O.

The table has durable offsets only: an offset is put here after its record is confirmed, so that a crash cannot revoke
an offset that a client has read. Offsets of open transactions will be kept in a separate table until their marker is
written.

Invariants: a group is in the table only while it has an offset; `count` is the number of offsets.

Entry: `OffsetTable`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from tidelog.broker.groups.records import NO_TIMESTAMP, OffsetKey, OffsetValue


class Expiry(NamedTuple):
    """The conditions under which a group's offsets expire (Kafka's KIP-211)."""

    since_ms: int | None
    """Start of the retention time (the group became Empty); None: the commit time of each offset."""
    keep_topics: Collection[str] = ()
    """Topics that members are subscribed to: their offsets do not expire."""


class OffsetTable:
    """Committed offsets by group, topic and partition."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, dict[int, OffsetValue]]] = {}
        self.count = 0

    def __contains__(self, group: object) -> bool:
        return group in self._groups

    def put(self, key: OffsetKey, value: OffsetValue) -> None:
        """Commit an offset, replacing an earlier one. Smaller offsets are valid: users rewind."""
        partitions = self._groups.setdefault(key.group, {}).setdefault(key.topic, {})
        self.count += key.partition not in partitions
        partitions[key.partition] = value

    def remove(self, key: OffsetKey) -> None:
        """Remove an offset, if it exists."""
        topics = self._groups.get(key.group, {})
        partitions = topics.get(key.topic, {})
        if partitions.pop(key.partition, None) is None:
            return
        self.count -= 1
        if not partitions:
            del topics[key.topic]
        if not topics:
            del self._groups[key.group]

    def get(self, group: str, topic: str, partition: int) -> OffsetValue | None:
        """Return a committed offset, or None."""
        return self._groups.get(group, {}).get(topic, {}).get(partition)

    def groups(self) -> list[str]:
        """The groups that have offsets."""
        return list(self._groups)

    def topics(self, group: str) -> dict[str, list[int]]:
        """The topics and partitions for which a group has offsets, in the order of their first commits."""
        return {topic: list(partitions) for topic, partitions in self._groups.get(group, {}).items()}

    def items(self, group: str) -> Iterator[tuple[OffsetKey, OffsetValue]]:
        """All offsets of a group."""
        for topic, partitions in self._groups.get(group, {}).items():
            for partition, value in partitions.items():
                yield OffsetKey(group, topic, partition), value

    def of_topics(self, names: Collection[str]) -> list[OffsetKey]:
        """The offsets of all groups for these topics."""
        return [
            OffsetKey(group, topic, partition)
            for group, topics in self._groups.items()
            for topic, partitions in topics.items()
            if topic in names
            for partition in partitions
        ]

    def expired(self, group: str, expiry: Expiry, retention_ms: int, now_ms: int) -> list[OffsetKey]:
        """The offsets of a group that have expired at `now_ms` (wall clock)."""
        found = []
        for key, value in self.items(group):
            if key.topic in expiry.keep_topics:
                continue
            if value.expire_ms != NO_TIMESTAMP:
                due_ms = value.expire_ms
            else:
                # A commit may be newer than the state change: a simple consumer commits to an Empty group.
                since_ms = value.commit_ms if expiry.since_ms is None else max(expiry.since_ms, value.commit_ms)
                due_ms = since_ms + retention_ms
            if now_ms >= due_ms:
                found.append(key)
        return found
