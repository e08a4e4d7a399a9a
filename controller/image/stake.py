"""The records that may be in a broker's WAL alone, as every copy of the metadata shows them.

Of a WAL that other brokers have replicas of nothing is in it alone, and its note says nothing of how much of it is
committed: only its master knows.

Entry: `at_stake`, `wal_rows`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import ReplicaSetRecord
from tidelog.controller.model.replication import has_several
from tidelog.controller.model.wal_notes import DATA_STREAM, DISK_WAL, StakeRange, WalNote, is_committed, note_in


def at_stake(image: Image, replica_set_id: int) -> list[StakeRange]:
    """Return the partitions of a replica set with records that may not be committed, known ranges first.

    Empty if nothing is known of its WAL, everything in it is committed, or other brokers have replicas of it. Raises
    `msgspec.DecodeError`.
    """
    note, record = note_in(image.kv, replica_set_id), image.replica_sets.get(replica_set_id)
    if note is None or record is None or has_several(record) or is_committed(note, record.committed_wal_offset):
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
    """Return what is known of each broker's WAL, as plain values.

    `master`, `alive` and `admin_url` are those of the broker that uploads it: of several replicas, of their master.
    """
    rows = []
    for set_id, record in sorted(image.replica_sets.items()):
        note, broker = note_in(image.kv, set_id), image.brokers.get(set_id)
        if has_several(record):
            rows.append(_replicated_row(image, record, note))
        elif broker is not None and note is not None:
            rows.append(
                {
                    "broker": set_id,
                    "master": set_id,
                    "alive": broker.alive,
                    "admin_url": broker.admin_url,
                    "kind": note.kind,
                    "bucket": note.place or None,
                    "master_epoch": note.master_epoch,
                    "acknowledged_offset": note.end_offset,
                    "committed_offset": record.committed_wal_offset,
                    "committed": is_committed(note, record.committed_wal_offset),
                    "at_stake": [msgspec.structs.asdict(one) for one in at_stake(image, set_id)],
                    "replicas": 1,
                }
            )
    return rows


def _replicated_row(image: Image, record: ReplicaSetRecord, note: WalNote | None) -> dict[str, Any]:
    master = image.brokers.get(record.master)
    return {
        "broker": record.id,
        "master": record.master if master is not None else None,
        "alive": master is not None and master.alive,
        "admin_url": master.admin_url if master is not None else "",
        "kind": DISK_WAL,
        "bucket": (note.place or None) if note is not None else None,
        "master_epoch": record.master_epoch,
        "acknowledged_offset": None,
        "committed_offset": record.committed_wal_offset,
        "committed": None,
        "at_stake": [],
        "replicas": len(record.members) + len(record.learners),
    }
