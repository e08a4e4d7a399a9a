"""Records of compacted topics: a key, and a value or none.

What identifies a record is in its value, as in all topics of the simulation, and in a header if it is a tombstone.

Entry: `keyed_record`, `number_of`, `key_of`.
"""

from __future__ import annotations

from tidelog.batch.batch import Record
from tidelog.simulation.checkers.history import UNKNOWN

_NUMBER = "number"


def keyed_record(now_ms: int, key: int, number: int, *, tombstone: bool, padding: bytes = b"") -> Record:
    """Return the record that is identified by `number`; key `UNKNOWN`: it has none."""
    name = None if key == UNKNOWN else b"key-%d" % key
    if tombstone:
        return Record(0, now_ms, name, None, ((_NUMBER, b"%d" % number),))
    return Record(0, now_ms, name, b"%d|%b" % (number, padding), ())


def number_of(record: Record) -> int:
    """Return what identifies a record."""
    if record.value is not None:
        return int(bytes(record.value).split(b"|")[0])
    return int(next((bytes(value or b"") for name, value in record.headers if name == _NUMBER), b"-1"))


def key_of(record: Record) -> int:
    """Return a record's key, or `UNKNOWN`."""
    return UNKNOWN if record.key is None else int(bytes(record.key).removeprefix(b"key-"))
