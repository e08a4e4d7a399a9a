"""The records that may be in a broker's WAL alone, as every copy of the metadata shows them.

Entry: `at_stake`, `wal_rows`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidelog.controller.image.image import Image
from tidelog.controller.model.wal_notes import DATA_STREAM, StakeRange, is_committed, note_in


def at_stake(image: Image, replica_set_id: int) -> list[StakeRange]:
    """Return the partitions of a replica set with records that may not be committed, known ranges first.

    Empty if nothing is known of its WAL, or everything in it is committed. Raises `msgspec.DecodeError`.
    """
    note, record = note_in(image.kv, replica_set_id), image.replica_sets.get(replica_set_id)
    if note is None or record is None or is_committed(note, record.committed_wal_offset):
        return []
    ends = dict(note.ends)
    found = []
    for partition in image.all_partitions():
        if partition.replica_set != replica_set_id:
            continue
        stream = image.streams[partition.first_stream + DATA_STREAM]
        known = ends.get(stream.id, -1)
        end = known if known > stream.end_offset else -1
        found.append(StakeRange(image.topics[partition.topic_id].name, partition.index, stream.end_offset, end))
    return sorted(found, key=lambda one: (one.to_offset < 0, one.topic.startswith("__"), one.topic, one.partition))


def wal_rows(image: Image) -> list[dict[str, Any]]:
    """Return what is known of each broker's WAL, as plain values."""
    rows = []
    for broker_id in sorted(image.brokers):
        note, record = note_in(image.kv, broker_id), image.replica_sets.get(broker_id)
        if note is None or record is None:
            continue
        rows.append(
            {
                "broker": broker_id,
                "alive": image.brokers[broker_id].alive,
                "admin_url": image.brokers[broker_id].admin_url,
                "kind": note.kind,
                "bucket": note.place or None,
                "master_epoch": note.master_epoch,
                "acknowledged_offset": note.end_offset,
                "committed_offset": record.committed_wal_offset,
                "committed": is_committed(note, record.committed_wal_offset),
                "at_stake": [msgspec.structs.asdict(one) for one in at_stake(image, broker_id)],
            }
        )
    return rows
