"""The command that creates a branch: a topic that begins with what a snapshot holds of another one
(docs/design/0031-snapshots-and-branches.md).

Invariants: a branch's streams begin with the range that the snapshot holds, closed, and nobody has opened them; their
extents are the snapshot's, so no object becomes live; their leader epochs are larger than any of the source's up to the
cut, which its batches carry.
"""

from __future__ import annotations

from tidelog.controller.machine.nodes import merged_configs
from tidelog.controller.machine.placement import place
from tidelog.controller.machine.snapshots import find_snapshot, require_room
from tidelog.controller.machine.tables import Tables
from tidelog.controller.machine.topics import check_id, check_name
from tidelog.controller.model.records import (
    STREAMS_PER_PARTITION,
    PartitionRecord,
    StreamRecord,
    StreamState,
    TopicRecord,
)
from tidelog.controller.model.snapshots import BranchRecord, CreateBranch, UnknownSnapshot
from tidelog.controller.model.topic_replicas import replicas_key


def create_branch(tables: Tables, command: CreateBranch) -> TopicRecord:
    """See `CreateBranch`.

    Raises `UnknownSnapshot`, `InvalidTopic`, `TopicExists`, `InvalidInput`, `Overloaded` and the placement errors.
    """
    snapshot = find_snapshot(tables, command.snapshot)
    held = next((topic for topic in snapshot.topics if topic.name == command.source), None)
    if held is None:
        raise UnknownSnapshot(
            f"snapshot {snapshot.name!r} holds no topic {command.source[:300]!r}",
            hint=f"`tidelog snapshot describe {snapshot.name}` shows what it holds",
        )
    check_name(tables, command.name)
    check_id(tables, command.topic_id)
    configs = merged_configs(held.configs, command.changes)
    require_room(tables, len(held.partitions))
    placement = place(tables, len(held.partitions), None, command.loads, replicas=held.replicas)
    topic = TopicRecord(command.topic_id, command.name, len(held.partitions), configs, False, tables.now_ms)
    tables.topics.put(topic.id, topic)
    if held.replicas > 0:
        tables.kv.put(replicas_key(topic.id), b"%d" % held.replicas)
    source = f"{held.name}@{snapshot.name}"
    base = tables.take_ids("stream", STREAMS_PER_PARTITION * len(placement), STREAMS_PER_PARTITION)
    for index, (partition, replica_set) in enumerate(zip(held.partitions, placement, strict=True)):
        tables.branches.put(base, BranchRecord(base, source, partition.ends, partition.extents))
        row = PartitionRecord(topic.id, index, replica_set, partition.leader_epoch + 1, base)
        tables.partitions.put((topic.id, index), row)
        for number, (start, end) in enumerate(zip(partition.starts, partition.ends, strict=True)):
            stream_id = base + number
            tables.streams.put(stream_id, StreamRecord(stream_id, -1, StreamState.CLOSED, replica_set, start, end, 0))
        base += STREAMS_PER_PARTITION
    return topic
