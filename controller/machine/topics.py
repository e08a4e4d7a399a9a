"""Commands about topics and partitions.

Invariants: a topic's name and id are unique; its partitions are numbered 0..n-1 without holes; each has four streams
whose ids are never reused. Partitions without a topic are those of a deleted one (`MetadataIndex.deleted_topics`), also
0..n-1: nobody opens them, and they go a bounded number at a time.
Names follow Kafka's rules (legal characters, length, collision of '.' and '_').
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tidelog.controller.machine.index import fold
from tidelog.controller.machine.nodes import check_base, check_configs, merged_configs
from tidelog.controller.machine.placement import place
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import (
    MAX_PARTITIONS_PER_COMMAND,
    MAX_PARTITIONS_PER_TOPIC,
    AlterTopicConfigs,
    CreatePartitions,
    CreateTopic,
    DeletePartitions,
    DeleteTopic,
)
from tidelog.controller.model.errors import InvalidPartitions, InvalidTopic, TopicExists, TopicIdTaken, UnknownTopicId
from tidelog.controller.model.levels import REPLICATION_LEVEL
from tidelog.controller.model.records import (
    MAX_TOPIC_CHARS,
    STREAMS_PER_PARTITION,
    PartitionRecord,
    StreamRecord,
    StreamState,
    TopicRecord,
)
from tidelog.controller.model.topic_replicas import replicas_key, topic_replicas
from tidelog.runtime.errors import InvalidInput

_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]+\Z")


def check_name(tables: Tables, name: str) -> None:
    """Check a new topic's name by Kafka's rules. Raises `InvalidTopic`, `TopicExists`."""
    if not 0 < len(name) <= MAX_TOPIC_CHARS:
        raise InvalidTopic(f"a topic name has 1 to {MAX_TOPIC_CHARS} characters, this one {len(name)}")
    if name in (".", ".."):
        raise InvalidTopic(f"a topic cannot be named {name!r}")
    if _LEGAL_NAME.match(name) is None:
        raise InvalidTopic(f"topic name {name!r} has characters other than ASCII letters, digits, '.', '_' and '-'")
    if name in tables.index.topic_ids:
        raise TopicExists(f"topic '{name}' already exists")
    other = tables.index.folded_names.get(fold(name))
    if other is not None:
        clash = tables.topics.get(other)
        raise InvalidTopic(f"topic '{name}' collides with existing topic '{clash.name if clash else ''}'")


def check_id(tables: Tables, topic_id: bytes) -> None:
    """Check a new topic's id. Raises `InvalidInput`, `TopicIdTaken`."""
    if len(topic_id) != 16 or topic_id == bytes(16):
        raise InvalidInput("a topic id has 16 bytes that are not all zero")
    if topic_id in tables.topics:
        raise TopicIdTaken("the random topic id is in use")


def create_topic(tables: Tables, command: CreateTopic) -> TopicRecord:
    """See `CreateTopic`. Raises `InvalidTopic`, `TopicExists`, `InvalidPartitions` and the placement errors."""
    check_name(tables, command.name)
    if not 1 <= command.partitions <= MAX_PARTITIONS_PER_COMMAND:
        raise InvalidPartitions(
            f"a topic is created with 1 to {MAX_PARTITIONS_PER_COMMAND} partitions, not {command.partitions}"
        )
    check_id(tables, command.topic_id)
    check_configs(command.configs)
    placement = place(tables, command.partitions, command.assignment, command.loads, replicas=command.replicas)
    record = TopicRecord(
        id=command.topic_id,
        name=command.name,
        partitions=command.partitions,
        configs=dict(sorted(command.configs.items())),
        internal=command.internal,
        created_ms=tables.now_ms,
    )
    if not command.validate_only:
        tables.topics.put(record.id, record)
        if command.replicas > 0 and tables.level >= REPLICATION_LEVEL:
            tables.kv.put(replicas_key(record.id), b"%d" % command.replicas)
        add_partitions(tables, record.id, 0, placement)
    return record


def add_partitions(tables: Tables, topic_id: bytes, first_index: int, placement: Sequence[int]) -> None:
    """Stage partitions `first_index`... with four closed streams each."""
    first_stream = tables.take_ids("stream", STREAMS_PER_PARTITION * len(placement), STREAMS_PER_PARTITION)
    assert first_stream % STREAMS_PER_PARTITION == 0, first_stream
    for step, replica_set in enumerate(placement):
        index = first_index + step
        base = first_stream + STREAMS_PER_PARTITION * step
        tables.partitions.put((topic_id, index), PartitionRecord(topic_id, index, replica_set, 0, base))
        for stream_id in range(base, base + STREAMS_PER_PARTITION):
            tables.streams.put(stream_id, StreamRecord(stream_id, -1, StreamState.CLOSED, replica_set, 0, 0, 0))


def _topic(tables: Tables, topic_id: bytes) -> TopicRecord:
    record = tables.topics.get(topic_id)
    if record is None:
        raise UnknownTopicId(f"there is no topic with id {topic_id.hex()}")
    return record


def delete_topic(tables: Tables, command: DeleteTopic) -> None:
    """See `DeleteTopic`; the sweep of the state destroys unreferenced objects. Raises `UnknownTopicId`."""
    record = _topic(tables, command.topic_id)
    at_once = command.at_once if tables.level >= 1 else 0
    _remove_partitions(tables, record.id, record.partitions, at_once or record.partitions)
    tables.topics.delete(record.id)
    if replicas_key(record.id) in tables.kv:
        tables.kv.delete(replicas_key(record.id))


def delete_partitions(tables: Tables, command: DeletePartitions) -> int:
    """See `DeletePartitions`. Raises `InvalidInput` for a topic that is not deleted."""
    if command.topic_id in tables.topics or command.count < 1:
        raise InvalidInput(f"{command.count} partitions of topic {command.topic_id.hex()}: it is not being deleted")
    found = tables.index.topic_partitions.get(command.topic_id, 0)
    return found - _remove_partitions(tables, command.topic_id, found, command.count)


def _remove_partitions(tables: Tables, topic_id: bytes, found: int, count: int) -> int:
    """Remove the last `count` of the partitions 0 to `found` - 1, and their streams. Returns how many those are."""
    first = max(0, found - count)
    for index in range(first, found):
        partition = tables.partitions.get((topic_id, index))
        assert partition is not None, (topic_id, index)
        for stream_id in range(partition.first_stream, partition.first_stream + STREAMS_PER_PARTITION):
            tables.streams.delete(stream_id)
        if tables.branches.rows and partition.first_stream in tables.branches:
            tables.branches.delete(partition.first_stream)
        tables.partitions.delete((topic_id, index))
    return found - first


def create_partitions(tables: Tables, command: CreatePartitions) -> TopicRecord:
    """See `CreatePartitions`. Raises `UnknownTopicId`, `InvalidPartitions` and the placement errors."""
    record = _topic(tables, command.topic_id)
    count = command.total - record.partitions
    if count <= 0:
        raise InvalidPartitions(
            f"topic '{record.name}' has {record.partitions} partitions; {command.total} is not an increase"
        )
    if count > MAX_PARTITIONS_PER_COMMAND or command.total > MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitions(
            f"at most {MAX_PARTITIONS_PER_COMMAND} partitions are added at once, {MAX_PARTITIONS_PER_TOPIC} in all"
        )
    partitions = (tables.partitions.get((record.id, index)) for index in range(record.partitions))
    siblings = [each.replica_set for each in partitions if each is not None]
    placement = place(
        tables,
        count,
        command.assignment,
        command.loads,
        siblings=siblings,
        replicas=topic_replicas(tables.kv, record.id),
    )
    grown = msgspec.structs.replace(record, partitions=command.total)
    if not command.validate_only:
        add_partitions(tables, record.id, record.partitions, placement)
        tables.topics.put(record.id, grown)
    return grown


def alter_topic_configs(tables: Tables, command: AlterTopicConfigs) -> None:
    """See `AlterTopicConfigs`. Raises `UnknownTopicId`, `ConfigsChanged`, `InvalidInput`."""
    record = _topic(tables, command.topic_id)
    check_base(f"topic {record.name}", record.configs, command.base)
    merged = merged_configs(record.configs, command.changes)
    tables.topics.put(record.id, msgspec.structs.replace(record, configs=merged))
