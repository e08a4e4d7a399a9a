"""Commands about snapshots of topics (`tidelog.controller.model.snapshots`, docs/design/0031).

`tidelog.controller.machine.branches` has the command that makes a branch of one.

Invariants: a snapshot holds committed offsets only, at one metadata version; what it holds was live when it was taken,
so no command makes an object live again. Extents name the streams under whose ids objects have the offsets, so a
snapshot of a branch names the branch's source.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.errors import InvalidTopic, UnknownTopicId
from tidelog.controller.model.records import STREAMS_PER_PARTITION, PartitionRecord, StreamRecord
from tidelog.controller.model.snapshots import (
    MAX_EXTENTS,
    MAX_HELD_PARTITIONS,
    MAX_NAME_CHARS,
    MAX_PARTITIONS_PER_SNAPSHOT,
    MAX_SNAPSHOTS,
    CreateSnapshot,
    CutRefused,
    DeleteSnapshot,
    Ends,
    Extents,
    HeldPartition,
    HeldTopic,
    SnapshotExists,
    SnapshotRecord,
    TopicCut,
    UnknownSnapshot,
)
from tidelog.controller.model.topic_replicas import topic_replicas
from tidelog.runtime.errors import InvalidInput, Overloaded
from tidelog.storage.commits import StreamRange

LEGAL_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def create_snapshot(tables: Tables, command: CreateSnapshot) -> int:
    """See `CreateSnapshot`. Raises `InvalidInput`, `SnapshotExists`, `Overloaded`, `UnknownTopicId`, `CutRefused`."""
    name = command.name
    if not 0 < len(name) <= MAX_NAME_CHARS or not LEGAL_CHARS.issuperset(name):
        raise InvalidInput(
            f"a snapshot is named by 1 to {MAX_NAME_CHARS} ASCII letters, digits, '.', '_' and '-', not {name[:300]!r}"
        )
    if name in tables.snapshots:
        raise SnapshotExists(f"snapshot {name!r} already exists", hint="`tidelog snapshot list` shows all")
    if len(tables.snapshots) >= MAX_SNAPSHOTS:
        raise Overloaded(
            f"there are {len(tables.snapshots)} snapshots, and may be {MAX_SNAPSHOTS}",
            hint="`tidelog snapshot delete` deletes one",
        )
    ids = {cut.topic_id for cut in command.topics}
    if not ids or len(ids) != len(command.topics):
        raise InvalidInput("a snapshot holds one topic or more, each once")
    count = sum(len(cut.ends) for cut in command.topics)
    if count > MAX_PARTITIONS_PER_SNAPSHOT:
        raise InvalidInput(
            f"a snapshot holds up to {MAX_PARTITIONS_PER_SNAPSHOT} partitions, not {count}",
            hint="name fewer topics, and take several snapshots",
        )
    require_room(tables, count)
    topics = tuple(_held_topic(tables, cut) for cut in command.topics)
    tables.snapshots.put(name, SnapshotRecord(name, tables.log_index, tables.now_ms, topics))
    return tables.log_index


def delete_snapshot(tables: Tables, command: DeleteSnapshot) -> None:
    """See `DeleteSnapshot`; the sweep of the state destroys what nobody holds any more. Raises `UnknownSnapshot`."""
    find_snapshot(tables, command.name)
    tables.snapshots.delete(command.name)


def find_snapshot(tables: Tables, name: str) -> SnapshotRecord:
    """Return a snapshot. Raises `UnknownSnapshot`."""
    found = tables.snapshots.get(name)
    if found is None:
        raise UnknownSnapshot(f"there is no snapshot {name[:300]!r}", hint="`tidelog snapshot list` shows all")
    return found


def require_room(tables: Tables, count: int) -> None:
    """Check that `count` more partitions may be held. Raises `Overloaded`."""
    held = sum(each.partition_count for each in tables.snapshots.values()) + len(tables.branches)
    if held + count > MAX_HELD_PARTITIONS:
        raise Overloaded(
            f"snapshots and branches hold {held} partitions; with {count} more they would be more than"
            f" {MAX_HELD_PARTITIONS}",
            hint="`tidelog snapshot delete` deletes a snapshot",
        )


def _held_topic(tables: Tables, cut: TopicCut) -> HeldTopic:
    topic = tables.topics.get(cut.topic_id)
    if topic is None:
        raise UnknownTopicId(f"there is no topic with id {cut.topic_id.hex()}")
    if topic.internal:
        raise InvalidTopic(
            f"topic {topic.name!r} is internal: it changes with the groups and transactions of all topics",
            hint="name the topics that hold your records",
        )
    if len(cut.ends) != topic.partitions:
        raise CutRefused(f"the cut of topic {topic.name!r} has {len(cut.ends)} of its {topic.partitions} partitions")
    partitions = []
    for index, ends in enumerate(cut.ends):
        partition = tables.partitions.get((topic.id, index))
        assert partition is not None, (topic.name, index)
        partitions.append(_held_partition(tables, partition, ends, f"{topic.name}-{index}"))
    replicas = topic_replicas(tables.kv, topic.id)
    return HeldTopic(topic.id, topic.name, topic.configs, replicas, tuple(partitions))


def _held_partition(tables: Tables, partition: PartitionRecord, ends: Ends, what: str) -> HeldPartition:
    branch = tables.branches.get(partition.first_stream)
    streams: list[StreamRecord] = []
    extents: list[Extents] = []
    for place, end in enumerate(ends):
        stream = tables.streams.get(partition.first_stream + place)
        assert stream is not None, (what, place)
        if not stream.start_offset <= end <= stream.end_offset or stream.quarantined:
            raise CutRefused(
                f"{what}: stream {stream.id} has {stream.start_offset}..{stream.end_offset}, and no cut at {end}"
                f"{' while it is quarantined' if stream.quarantined else ''}",
                hint="try again",
            )
        streams.append(stream)
        extents.append(_extents(stream, end, branch.extents[place] if branch is not None else ()))
    if any(len(each) > MAX_EXTENTS for each in extents):
        raise InvalidInput(
            f"{what} is a branch of a branch, {MAX_EXTENTS} deep: its records cannot be held for another one",
            hint="copy it into a new topic, and go on from that",
        )
    replica_set = tables.replica_sets.get(partition.replica_set)
    master_epoch = replica_set.master_epoch if replica_set is not None else 0
    known = max(partition.epoch_base + master_epoch, *(stream.epoch for stream in streams))
    starts = tuple(stream.start_offset for stream in streams)
    assert len(starts) == len(extents) == STREAMS_PER_PARTITION
    return HeldPartition(
        partition.first_stream,
        max(known, 0),
        (starts[0], starts[1], starts[2], starts[3]),
        ends,
        (extents[0], extents[1], extents[2], extents[3]),
    )


def _extents(stream: StreamRecord, end: int, shared: Sequence[StreamRange]) -> Extents:
    """Return where the offsets of a stream from its start to `end` are; `shared`: the extents that it began with."""
    own_start = shared[-1].end_offset if shared else stream.start_offset
    pieces = [*shared, StreamRange(stream.id, own_start, max(own_start, end))]
    clipped = (
        StreamRange(each.stream_id, max(each.start_offset, stream.start_offset), min(each.end_offset, end))
        for each in pieces
    )
    return tuple(each for each in clipped if each.start_offset < each.end_offset)
