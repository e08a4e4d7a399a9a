"""Changes the state of a lost cluster to that of a cluster of other brokers that has not started yet.

Streams end where their chains end (`tidelog.controller.rebuild.plan`) and are closed; brokers are not alive, and those
that will not exist are removed, with their partitions given to the others; moves, takeovers and clients' sessions are
over. Counters and epochs go so far ahead that nothing is given out twice that the old cluster may have used after the
state was written. What only a lost WAL had is recorded, as if an operator had accepted its loss.

Entry: `adopt`, `Adoption`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from tidelog.controller.machine.nodes import Kept, keep, recall
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import Tables
from tidelog.controller.machine.wal_notes import record_loss
from tidelog.controller.model.bucket_state import GENERATION_ROW, generation_of
from tidelog.controller.model.commands import PRODUCER_ID_BLOCK
from tidelog.controller.model.levels import LEASES_LEVEL
from tidelog.controller.model.records import (
    NO_BROKER,
    NO_RANGES,
    NO_REPLICA_SET,
    STREAMS_PER_PARTITION,
    DrainMode,
    ObjectRecord,
    ObjectState,
    PartitionRecord,
    ReplicaSetRecord,
    StreamState,
)
from tidelog.controller.model.replication import ReplicationRecord, has_several
from tidelog.controller.model.wal_notes import DATA_STREAM, is_committed, note_in, note_key
from tidelog.controller.rebuild.held import StreamPiece
from tidelog.controller.rebuild.plan import RebuildPlan
from tidelog.storage.commits import pack_ranges, unpack_ranges

EPOCH_STEP = 1_000
"""How far epochs go ahead: more elections than there are between two states of the metadata."""
AGE_STEP_MS = 10_000
"""Age of a state for which epochs go ahead by one more."""
MAX_AGE_STEPS = 1 << 24
"""Bound on these steps, five years: epochs are int32."""
INDEX_STEP = 1 << 20
OBJECT_STEP = 1 << 32
STREAM_STEP = 1 << 20
PRODUCER_STEP = 1 << 30
LEASE_STEP = 1 << 20
TIME_STREAM = 2
"""The time stream's place among the streams of a partition."""
LOST = "the cluster was rebuilt from its bucket"


class Adoption(NamedTuple):
    """What the new cluster is."""

    brokers: Collection[int]
    """Ids of the brokers that will exist."""
    generation: int
    largest_object: int
    """The largest id in the bucket."""
    now_ms: int
    """Wall clock, for times that users see."""
    age_ms: int = 0
    """How old the state is, by wall clocks."""
    unsure_wals: Collection[int] = ()
    """Replica sets whose WALs may have got records after the state, also if it knows all in them as committed."""


def adopt(old: ControllerState, plan: RebuildPlan, adoption: Adoption) -> ControllerState:
    """Change the tables of `old` and return them as a new state, at a later place of the log."""
    tables = old.tables
    tables.now_ms = max(tables.now_ms, adoption.now_ms)
    tables.log_index = old.applied_index + INDEX_STEP
    for name in plan.lost_snapshots:
        tables.snapshots.delete(name)
    _take_chains(tables, plan)
    tables.commit()
    _take_objects(tables, plan)
    tables.commit()
    _record_losses(tables, adoption.unsure_wals)
    tables.commit()
    epochs = {record.id: record.master_epoch for record in tables.replica_sets.values()}
    steps = _steps(tables, adoption)
    _replace_brokers(tables, adoption, steps.epoch)
    tables.commit()
    _place(tables, adoption, epochs, steps.epoch)
    _advance(tables, adoption, steps)
    tables.commit()
    tables.settle()
    new = ControllerState()
    new.tables = tables
    new.version = new.applied_index = tables.log_index
    return new


class _Steps(NamedTuple):
    """How far numbers go ahead."""

    lives: int
    """Clusters that may have begun with this state: this one, and others that left no state that can be read."""
    epoch: int
    producer: int
    lease: int


def _steps(tables: Tables, adoption: Adoption) -> _Steps:
    """A state may be taken several times, also from copies of a backup that know nothing of each other.

    Then what they give out differs as the times do at which they take it: they have less than an election in 10 s, and
    less than `PRODUCER_ID_BLOCK` producers a second, on average.
    """
    lives = max(1, adoption.generation - generation_of(tables.kv.rows))
    age = min(max(0, adoption.age_ms) // AGE_STEP_MS, MAX_AGE_STEPS)
    producers = AGE_STEP_MS // 1000 * PRODUCER_ID_BLOCK
    return _Steps(lives, EPOCH_STEP * lives + age, PRODUCER_STEP * lives + producers * age, LEASE_STEP * lives + age)


def _take_chains(tables: Tables, plan: RebuildPlan) -> None:
    continued = {stream_id for stream_id, chain in plan.streams.items() if any(not one.is_known for one in chain.used)}
    partitions = {stream_id - stream_id % STREAMS_PER_PARTITION for stream_id in continued}
    for stream in list(tables.streams.values()):
        chain = plan.streams.get(stream.id)
        start, end = (chain.start, chain.end) if chain is not None else (stream.start_offset, stream.end_offset)
        end = max(start, end)  # what was trimmed beyond the committed end was only in the WAL
        place = stream.id % STREAMS_PER_PARTITION
        may_not_fit = stream.id - place in partitions and place in (DATA_STREAM, TIME_STREAM)
        changed = msgspec.structs.replace(
            stream,
            state=StreamState.CLOSED,
            start_offset=start,
            end_offset=end,
            released_at=end if may_not_fit else stream.released_at,
        )
        tables.streams.put(stream.id, changed)


def _take_objects(tables: Tables, plan: RebuildPlan) -> None:
    """Name the objects by what the chains use of them; those of the state first, because they may lose a range."""
    pieces: defaultdict[int, list[tuple[int, StreamPiece]]] = defaultdict(list)
    for stream_id, chain in plan.streams.items():
        branch = tables.branches.get(stream_id - stream_id % STREAMS_PER_PARTITION)
        own_from = branch.ends[stream_id % STREAMS_PER_PARTITION] if branch is not None else 0
        for piece in chain.used:
            if piece.end > own_from:  # else an object has it under its source's id
                pieces[piece.object_id].append((stream_id, piece))
    for row in list(tables.objects.values()):
        if row.state == ObjectState.PREPARED:
            tables.objects.delete(row.id)
        elif row.state == ObjectState.COMMITTED:
            ranges = unpack_ranges(row.packed)
            kept = {one for one in ranges if one[0] not in plan.streams or tables.index.pins.holds(*one)}
            kept.update((stream_id, one.start, one.end) for stream_id, one in pieces.get(row.id, ()))
            _name(tables, row, sorted(kept))
    tables.commit()
    for object_id, found in sorted(plan.found.items()):
        used = sorted((stream_id, one.start, one.end) for stream_id, one in pieces.get(object_id, ()))
        if used:
            packed = pack_ranges(used)
            row = ObjectRecord(object_id, ObjectState.COMMITTED, found.kind, found.size, packed, tables.now_ms, 0)
            tables.objects.put(object_id, row)


def _name(tables: Tables, row: ObjectRecord, ranges: list[tuple[int, int, int]]) -> None:
    if ranges == unpack_ranges(row.packed):
        return
    if ranges:
        tables.objects.put(row.id, msgspec.structs.replace(row, packed=pack_ranges(ranges)))
        return
    gone = msgspec.structs.replace(
        row,
        state=ObjectState.DESTROYED,
        packed=NO_RANGES,
        since_ms=tables.now_ms,
        expires_ms=tables.time_ms + tables.delete_delay_ms(),
        destroyed_at=tables.log_index,
    )
    tables.objects.put(row.id, gone)


def _record_losses(tables: Tables, unsure_wals: Collection[int]) -> None:
    """A WAL without a note, as all are below feature level 1, may have had records of each partition opened there.

    So may one of which the state knows nothing but that all in it was committed then.
    """
    owned: defaultdict[int, list[PartitionRecord]] = defaultdict(list)
    for partition in tables.partitions.values():
        if partition.topic_id in tables.topics:
            owned[partition.replica_set].append(partition)
    for record in list(tables.replica_sets.values()):
        mine = sorted(owned[record.id], key=lambda one: _place_in_loss(tables, one))
        if has_several(record):
            tables.kv.delete(note_key(record.id))  # it may be of the time when the set had one member
        elif (note := note_in(tables.kv.rows, record.id)) is None:
            mine = [each for each in mine if _was_opened(tables, each)]
        elif record.id in unsure_wals and is_committed(note, record.committed_wal_offset):
            mine = [each for each in mine if _was_opened(tables, each)]
            grown = msgspec.structs.replace(note, may_grow=True, ends=())
            tables.kv.put(note_key(record.id), msgspec.msgpack.encode(grown))
        record_loss(tables, record, mine, LOST)
        tables.kv.delete(note_key(record.id))


def _place_in_loss(tables: Tables, partition: PartitionRecord) -> tuple[bool, bytes, int]:
    """A loss does not name all of very many partitions: those first whose coordinators must know of it."""
    name = tables.topics.rows[partition.topic_id].name
    return not name.startswith("__"), partition.topic_id, partition.index


def _was_opened(tables: Tables, partition: PartitionRecord) -> bool:
    stream = tables.streams.get(partition.first_stream + DATA_STREAM)
    return stream is not None and stream.epoch >= 0


def _replace_brokers(tables: Tables, adoption: Adoption, step: int) -> None:
    for broker in list(tables.brokers.values()):
        epoch = broker.registration_epoch + step
        if broker.id in adoption.brokers:
            changed = msgspec.structs.replace(broker, alive=False, draining=DrainMode.NONE, registration_epoch=epoch)
            tables.brokers.put(broker.id, changed)
        else:
            tables.brokers.delete(broker.id)
            tables.configs.delete(("broker", str(broker.id)))
    for row in list(tables.replication.values()):
        tables.replication.delete(row.id)
        if row.id in adoption.brokers and len(adoption.brokers) > 1:  # replicas join anew; a lone broker has none
            assigned = tuple(each for each in row.assigned if each in adoption.brokers)
            learning = tuple(each for each in row.learning if each in adoption.brokers)
            priorities = tuple(each for each in row.priorities if each[0] in adoption.brokers)
            left = ReplicationRecord(row.id, row.policy, assigned=assigned, learning=learning, priorities=priorities)
            tables.replication.put(row.id, left)
    for record in list(tables.replica_sets.values()):
        if record.id in adoption.brokers:
            tables.replica_sets.put(record.id, _without_master(record, step))
        else:
            old = tables.brokers.rows.get(record.id)
            epoch = old.registration_epoch if old is not None else recall(tables, record.id).registration_epoch
            master_epoch, sync_epoch = record.master_epoch + step, record.sync_state_set_epoch + step
            keep(tables, record.id, Kept(epoch + step, master_epoch, sync_epoch, record.committed_wal_offset))
            tables.replica_sets.delete(record.id)
    for broker_id in sorted(adoption.brokers):
        if tables.replica_sets.get(broker_id) is None:
            kept = recall(tables, broker_id)
            fresh = ReplicaSetRecord(
                broker_id,
                (broker_id,),
                (),
                NO_BROKER,
                kept.master_epoch + step,
                (broker_id,),
                kept.sync_state_set_epoch + step,
                kept.committed_wal_offset,
            )
            tables.replica_sets.put(broker_id, fresh)


def _without_master(record: ReplicaSetRecord, step: int) -> ReplicaSetRecord:
    return msgspec.structs.replace(
        record,
        members=(record.id,),
        learners=(),
        master=NO_BROKER,
        master_epoch=record.master_epoch + step,
        sync_state_set=(record.id,),
        sync_state_set_epoch=record.sync_state_set_epoch + step,
        successor=NO_BROKER,
        takeover_since_ms=0,
    )


def _place(tables: Tables, adoption: Adoption, old_epochs: dict[int, int], step: int) -> None:
    """Give the partitions of brokers that will not exist to the others, the one with the fewest first."""
    counts = dict.fromkeys(sorted(adoption.brokers), 0)
    partitions = sorted(tables.partitions.values(), key=lambda one: (one.topic_id, one.index))
    for partition in partitions:
        if partition.replica_set in counts:
            counts[partition.replica_set] += 1
    for partition in partitions:
        owner, base = partition.replica_set, partition.epoch_base
        if owner not in counts:
            owner = min(counts, key=lambda broker_id: (counts[broker_id], broker_id))
            counts[owner] += 1
            base = _leader_epoch(tables, partition, old_epochs) + step - _master_epoch(tables, owner)
        placed = msgspec.structs.replace(
            partition, replica_set=owner, epoch_base=base, target=NO_REPLICA_SET, moving_since_ms=0
        )
        tables.partitions.put((partition.topic_id, partition.index), placed)


def _leader_epoch(tables: Tables, partition: PartitionRecord, old_epochs: dict[int, int]) -> int:
    """Return the largest epoch that the state knows of a partition."""
    streams = (tables.streams.get(partition.first_stream + step) for step in range(STREAMS_PER_PARTITION))
    known = [stream.epoch for stream in streams if stream is not None]
    return max(partition.epoch_base + old_epochs.get(partition.replica_set, 0), *known)


def _master_epoch(tables: Tables, replica_set_id: int) -> int:
    record = tables.replica_sets.get(replica_set_id)
    assert record is not None, replica_set_id  # `_replace_brokers` has made it
    return record.master_epoch


def _advance(tables: Tables, adoption: Adoption, steps: _Steps) -> None:
    """Move the counters ahead, and note whose state this is."""

    def ahead(counter: str, at_least: int, step: int) -> None:
        tables.counters.put(counter, max(tables.counters.get(counter) or 0, at_least) + step)

    ahead("object", adoption.largest_object + 1, OBJECT_STEP)
    ahead("stream", STREAMS_PER_PARTITION, STREAM_STEP * steps.lives)
    ahead("producer", 0, steps.producer)
    ahead("broker", max(adoption.brokers) + 1, EPOCH_STEP * steps.lives)
    tables.kv.put(GENERATION_ROW, b"%d" % adoption.generation)
    row = tables.cluster.get("")
    assert row is not None  # a state is written by an active controller
    if row.level >= LEASES_LEVEL:  # a reader of the old cluster goes on renewing the id that it was given
        ahead("lease", 1, steps.lease)
    tables.cluster.put("", msgspec.structs.replace(row, controllers=()))
