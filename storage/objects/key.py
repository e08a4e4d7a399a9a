"""Object keys: pure functions of cluster id and object id.

`{cluster id}/objects/{low byte, 2 hex digits}/{object id, 16 hex digits}`. The low byte comes first so that objects
written in succession are spread over 256 prefixes: S3 scales request rates by prefix. Quarantined data, which no
metadata names, has keys `{cluster id}/quarantine/{stream id}/{WAL offset}-{replica set}-{part}`; the
stream's id and the offset have 16 hex digits, the other two are decimal. Feature levels have no part in that: keys that
earlier versions wrote have no replica set, and are read as well.

Entry: `object_key`, `parse_object_key`.
"""

from __future__ import annotations

import re

_OBJECT = re.compile(r"(?P<cluster>[^/]+)/objects/(?P<low>[0-9a-f]{2})/(?P<id>[0-9a-f]{16})")


def object_prefix(cluster_id: str) -> str:
    """Return the prefix of the keys of all committed or prepared objects of a cluster."""
    return f"{cluster_id}/objects/"


def object_key(cluster_id: str, object_id: int) -> str:
    """Return the key of an object. `object_id` is an int64 ≥ 0."""
    assert 0 <= object_id < 1 << 63, object_id
    return f"{cluster_id}/objects/{object_id & 0xFF:02x}/{object_id:016x}"


def parse_object_key(key: str) -> tuple[str, int] | None:
    """Return `(cluster id, object id)` of a key made by `object_key`, or None for any other key."""
    match = _OBJECT.fullmatch(key)
    if match is None:
        return None
    object_id = int(match["id"], 16)
    if object_id >= 1 << 63 or object_id & 0xFF != int(match["low"], 16):
        return None
    return match["cluster"], object_id


def quarantine_key(cluster_id: str, stream_id: int, replica_set: int, wal_start: int, part: int = 0) -> str:
    """Return the key of part `part` of a quarantined stream's records in the range from `wal_start` (int64 bytes) of
    the WAL of a replica set. A stream may be set aside from several, at the same offset of each."""
    return f"{quarantine_prefix(cluster_id, stream_id)}{wal_start:016x}-{replica_set}-{part}"


def all_quarantined_prefix(cluster_id: str) -> str:
    """Return the prefix of the keys of all quarantined records of a cluster."""
    return f"{cluster_id}/quarantine/"


def quarantine_prefix(cluster_id: str, stream_id: int) -> str:
    """Return the prefix of the keys of all records set aside of a stream."""
    return f"{all_quarantined_prefix(cluster_id)}{stream_id:016x}/"
