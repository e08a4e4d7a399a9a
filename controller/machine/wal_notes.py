"""Commands about what is known of WALs (`tidelog.controller.model.wal_notes`): note, and accept a loss.

Invariants: a note of an older master epoch, or an older one of the same epoch, changes nothing; the kind and the place
of a WAL change only when everything in it is committed, or its broker owns nothing; every loss leaves a row (rule 13).
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.streams import require_master_epoch
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import MAX_TEXT_CHARS, AcceptWalLoss, NoteWal, RegisterBroker
from tidelog.controller.model.records import PartitionRecord, ReplicaSetRecord
from tidelog.controller.model.wal_notes import (
    DATA_STREAM,
    MAX_LOST_PARTITIONS,
    MAX_WAL_ENDS,
    MAX_WAL_LOSSES,
    MEMORY_WAL,
    StakeRange,
    WalLoss,
    WalNotCommitted,
    WalNote,
    is_committed,
    loss_key,
    loss_keys,
    note_in,
    note_key,
)
from tidelog.runtime.errors import InvalidInput, NotFound


def known_note(tables: Tables, replica_set_id: int) -> WalNote | None:
    """Return what is known of a replica set's WAL."""
    row = tables.kv.get(note_key(replica_set_id))
    return note_in({note_key(replica_set_id): row}, replica_set_id) if row is not None else None


def note_wal(tables: Tables, command: NoteWal) -> None:
    """See `NoteWal`. Raises `NotFound`, `Fenced`, `InvalidInput`."""
    note = command.note
    if len(note.ends) > MAX_WAL_ENDS or max(len(note.kind), len(note.place)) > MAX_TEXT_CHARS:
        raise InvalidInput(f"a note of a WAL names at most {MAX_WAL_ENDS} streams, not {len(note.ends)}")
    require_master_epoch(tables, command.replica_set_id, note.master_epoch)
    old = known_note(tables, command.replica_set_id)
    if old is not None and (note.master_epoch, note.number) <= (old.master_epoch, old.number):
        return
    tables.kv.put(note_key(command.replica_set_id), msgspec.msgpack.encode(note))


def raise_note(tables: Tables, replica_set_id: int, end_offset: int) -> None:
    """Let a note say that records up to a WAL offset, and perhaps more, may have been acknowledged.

    While the set had several members nobody noted that. The epoch stays: a later one may not have begun in the WAL.
    """
    old = known_note(tables, replica_set_id)
    if old is None:
        return
    known = msgspec.structs.replace(old, end_offset=max(old.end_offset, end_offset), may_grow=True)
    if known != old:
        tables.kv.put(note_key(replica_set_id), msgspec.msgpack.encode(known))


def accept_wal_loss(tables: Tables, command: AcceptWalLoss) -> None:
    """See `AcceptWalLoss`. Raises `NotFound`, `Fenced`, `InvalidInput`."""
    record = require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    note = known_note(tables, record.id)
    if note is None:
        raise NotFound(f"nothing is known of the WAL of replica set {record.id}: there is no loss to accept")
    if note.master_epoch != command.lost_epoch:
        raise InvalidInput(
            f"the loss that was accepted is {record.id}.{command.lost_epoch}; the present one is"
            f" {record.id}.{note.master_epoch}",
            hint=f"`tidelog wal accept-loss {record.id}.{note.master_epoch}` accepts it",
        )
    record_loss(tables, record, owned_partitions(tables, record.id), "an operator accepted the loss of its WAL")
    settled = msgspec.structs.replace(
        note,
        master_epoch=record.master_epoch,
        number=0,
        end_offset=record.committed_wal_offset,
        may_grow=False,
        ends=(),
    )
    tables.kv.put(note_key(record.id), msgspec.msgpack.encode(settled))


def record_loss(tables: Tables, record: ReplicaSetRecord, partitions: list[PartitionRecord], reason: str) -> None:
    """Record that these partitions of a replica set continue without what only its WAL had.

    Records nothing if all is committed, and nothing of deleted topics, whose partitions are removed by and by. Called
    before the partitions or the replica set are changed.
    """
    note = known_note(tables, record.id)
    partitions = [each for each in partitions if each.topic_id in tables.topics]
    if not partitions or (note is not None and is_committed(note, record.committed_wal_offset)):
        return
    loss = WalLoss(
        record.id,
        note.master_epoch if note is not None else -1,
        tables.now_ms,
        reason,
        record.committed_wal_offset,
        note.end_offset if note is not None else -1,
        note is None or note.may_grow,
        loss_ranges(tables, partitions, dict(note.ends) if note is not None else {}),
    )
    keep_loss(tables, loss)


def keep_loss(tables: Tables, loss: WalLoss) -> None:
    """Keep the row of a loss; the oldest is forgotten if there are too many."""
    for key in loss_keys(tables.kv.rows)[: -(MAX_WAL_LOSSES - 1)]:
        tables.kv.delete(key)
    tables.kv.put(loss_key(loss), msgspec.msgpack.encode(loss))


def loss_ranges(tables: Tables, partitions: list[PartitionRecord], ends: dict[int, int]) -> tuple[StakeRange, ...]:
    """Return the offsets of partitions that are in no committed object, of the first `MAX_LOST_PARTITIONS`.

    `ends` has the next offsets that are known to have been acknowledged, by data stream.
    """
    found = []
    for partition in partitions[:MAX_LOST_PARTITIONS]:
        stream = tables.streams.get(partition.first_stream + DATA_STREAM)
        topic = tables.topics.get(partition.topic_id)
        assert stream is not None and topic is not None, partition
        known = ends.get(stream.id, -1)
        end = known if known > stream.end_offset else -1
        found.append(StakeRange(topic.name, partition.index, stream.end_offset, end))
    return tuple(found)


def owned_partitions(tables: Tables, replica_set_id: int) -> list[PartitionRecord]:
    """Return the partitions of a replica set, in order, without those of deleted topics."""
    found = (each for each in tables.partitions.values() if each.topic_id in tables.topics)
    mine = [each for each in found if each.replica_set == replica_set_id]
    return sorted(mine, key=lambda each: (each.topic_id, each.index))


def check_wal_change(tables: Tables, command: RegisterBroker) -> None:
    """Refuse a broker whose WAL changes its kind or bucket over records that are not committed.

    Raises `WalNotCommitted`.
    """
    note, record = known_note(tables, command.broker_id), tables.replica_sets.get(command.broker_id)
    if note is None or record is None or not command.wal_kind or note.kind == MEMORY_WAL:
        return
    if not tables.index.partition_counts.get(record.id, 0) or is_committed(note, record.committed_wal_offset):
        return
    old, new = (note.kind, note.place), (command.wal_kind, command.wal_place or note.place)
    if old == new or (note.kind == command.wal_kind and not note.place):
        return
    raise WalNotCommitted(
        f"broker {record.id} starts with {_told(*new)}, but acknowledged records that are in no committed object are in"
        f" its WAL {_told(*old)}",
        hint=f"start it with {_told(*old)}, which recovers them; `tidelog wal drain --broker {record.id}` or a clean"
        " stop uploads them; then change the setting",
    )


def _told(kind: str, place: str) -> str:
    return f"wal.kind {kind}" + (f" and the bucket {place}" if place else "")
