"""What the controllers know of each replica set's WAL, and how a broker's WAL is judged by it: data and pure functions.

A `WalNote` is written by the master: when it has begun a master epoch in its WAL, before it acknowledges a record while
its WAL is known as wholly committed, regularly while it writes, and when all of it is committed. So the controllers
know the lineage of the WAL (the last epoch that was begun in it), a WAL offset up to which records were acknowledged at
least, and whether there may be more. A WAL without that epoch, or one that ends before that offset, is a lost, empty or
older one (rule 13).

A `WalLoss` is what was given up, by `tidelog wal accept-loss` or with a removed broker. It stays in the metadata.

Both are rows of the table `kv`, under `wal/ID` and `wal-loss/…` (docs/formats/controller.md).

Entry: `WalNote`, `FoundWal`, `judge`, `WalLoss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from tidelog.runtime.errors import CorruptData, InvalidInput

DISK_WAL = "disk"
MEMORY_WAL = "memory"
NOTE_S = 1.0
"""Interval of notes while records are written, and the pause after which a committed WAL is reported as such."""
NOTE_OF_MANY_S = 0.05
"""The interval is at least this for each broker of the cluster: every note is a command."""
MAX_WAL_ENDS = 256
"""Streams that one note names: a row of about 4 KB, which every broker receives once a second while another writes."""
MAX_WAL_LOSSES = 1_024
"""Recorded losses; beyond it the oldest is forgotten. Each is an act of an operator."""
MAX_LOST_PARTITIONS = 1_024
"""Partitions that one recorded loss names."""
SHOWN_PARTITIONS = 10
"""Partitions that an error names."""
DATA_STREAM = 1
"""The data stream's place among the streams of a partition."""
_NOTE = "wal/"
_LOSS = "wal-loss/"


class WalLost(CorruptData):
    """A broker's WAL does not continue what it acknowledged: it is missing, empty, older, or another one."""


class WalNotCommitted(InvalidInput):
    """The kind or place of a WAL may not change: records that were acknowledged may only be in the old one."""


class WalNote(msgspec.Struct, frozen=True, array_like=True):
    """What a master told of its WAL. Row `wal/<replica set id>` of `kv`, as msgpack."""

    kind: str
    """`wal.kind`."""
    place: str
    """The bucket that it commits to, as text; empty: not told."""
    master_epoch: int
    """The last master epoch that was begun in this WAL: it is in the WAL's epoch history, and in no other WAL's."""
    number: int
    """Grows with each note of one master epoch: a late note does not replace a newer one."""
    end_offset: int
    """WAL offset up to which records are durable, and may have been acknowledged."""
    may_grow: bool
    """Whether there may be acknowledged records after `end_offset`. If not, the master tells before there are."""
    ends: tuple[tuple[int, int], ...] = ()
    """`(data stream, next offset)` of streams that were not wholly committed; at most 256."""


class FoundWal(NamedTuple):
    """What a broker found in its WAL when it recovered it."""

    kind: str
    epochs: tuple[int, ...]
    """The master epochs of its history."""
    end_offset: int
    may_lose_tail: bool
    """Whether a power loss may take records that were acknowledged (`wal.flush = "async"`)."""


class WalVerdict(Enum):
    """How a WAL relates to what the controllers know."""

    CONTINUES = 1
    """It has everything that was acknowledged and is not committed, as far as is known."""
    STARTS_OVER = 2
    """It is another WAL, but everything acknowledged is committed: a new one is begun, and this one kept aside."""
    LOST = 3
    """Acknowledged records are missing, or may be."""


class StakeRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets of one partition that are in no committed object."""

    topic: str
    partition: int
    from_offset: int
    to_offset: int = -1
    """The next offset that is known to have been acknowledged; -1: not known."""

    def __str__(self) -> str:
        end = f"s {self.from_offset} to {self.to_offset}" if self.to_offset >= 0 else f" {self.from_offset} and later"
        return f"{self.topic}:{self.partition} offset{end}"


class WalLoss(msgspec.Struct, frozen=True, array_like=True):
    """Records that were given up. Row `wal-loss/<time>/<replica set>/<master epoch>` of `kv`, as msgpack."""

    replica_set: int
    master_epoch: int
    """The last epoch that is known to have been begun in the lost WAL; -1: none is known."""
    at_ms: int
    reason: str
    committed_offset: int
    """WAL offset: everything before it is committed and was kept."""
    end_offset: int
    """WAL offset up to which records are known to have been acknowledged; -1: not known."""
    may_be_more: bool
    partitions: tuple[StakeRange, ...]
    """At most 1,024."""


_notes = msgspec.msgpack.Decoder(WalNote)
_losses = msgspec.msgpack.Decoder(WalLoss)


def note_interval_s(brokers: int) -> float:
    """Return how often a master tells where its WAL ends, in a cluster of so many brokers (seconds)."""
    return max(NOTE_S, NOTE_OF_MANY_S * brokers)


def note_key(replica_set_id: int) -> str:
    """Return the key of a replica set's note in `kv`."""
    return f"{_NOTE}{replica_set_id}"


def note_in(rows: Mapping[str, bytes], replica_set_id: int) -> WalNote | None:
    """Return what is known of a replica set's WAL; None: nothing, for it never told. Raises `msgspec.DecodeError`."""
    row = rows.get(note_key(replica_set_id))
    return _notes.decode(row) if row is not None else None


def loss_key(loss: WalLoss) -> str:
    """Return the key of a loss in `kv`; keys sort by time."""
    return f"{_LOSS}{loss.at_ms:016d}/{loss.replica_set}/{loss.master_epoch}"


def loss_keys(rows: Mapping[str, bytes]) -> list[str]:
    """Return the keys of the recorded losses, the oldest first."""
    return sorted(key for key in rows if key.startswith(_LOSS))


def losses_in(rows: Mapping[str, bytes]) -> list[WalLoss]:
    """Return the recorded losses, the oldest first. Raises `msgspec.DecodeError`."""
    return [_losses.decode(rows[key]) for key in loss_keys(rows)]


def lost_at(rows: Mapping[str, bytes], topic: str, partition: int) -> int:
    """Return the largest offset from which on records of a partition were given up; -1: no loss names it.

    Raises `msgspec.DecodeError`.
    """
    found = -1
    for loss in losses_in(rows):
        for one in loss.partitions:
            if (one.topic, one.partition) == (topic, partition):
                found = max(found, one.from_offset)
    return found


def gave_up(rows: Mapping[str, bytes], replica_set: int, *, last_epoch: int, end_offset: int) -> bool:
    """Return whether a replica whose WAL is of this epoch and ends there may have records that were given up.

    An operator has elected another replica, in a later epoch, without what was not committed by then. Raises
    `msgspec.DecodeError`.
    """
    found = (each for each in losses_in(rows) if each.replica_set == replica_set)
    return any(last_epoch < each.master_epoch and end_offset > each.committed_offset for each in found)


def is_committed(note: WalNote, committed_offset: int) -> bool:
    """Return whether everything that was acknowledged is in committed objects."""
    return not note.may_grow and note.end_offset <= committed_offset


def judge(note: WalNote | None, committed_offset: int, *, owns: bool, found: FoundWal) -> WalVerdict:
    """Compare the WAL that a broker found with what is known. `owns`: whether it has any partition.

    Memory keeps nothing: such a WAL is never missed.
    """
    if note is None or note.kind == MEMORY_WAL:
        return WalVerdict.CONTINUES
    is_other = note.kind != found.kind or (found.kind == DISK_WAL and _is_older(note, found.epochs))
    if not owns or is_committed(note, committed_offset):
        return WalVerdict.STARTS_OVER if is_other else WalVerdict.CONTINUES
    needed = note.end_offset if found.may_lose_tail else max(note.end_offset, committed_offset)
    return WalVerdict.LOST if is_other or found.end_offset < needed else WalVerdict.CONTINUES


def _is_older(note: WalNote, epochs: tuple[int, ...]) -> bool:
    """Return whether the noted epoch was not begun in a WAL with these epochs.

    Without it a WAL may have newer ones: of a start that ended before its note, or because the controllers were
    restored from a backup. Such a WAL is not replaced.
    """
    return note.master_epoch not in epochs and max(epochs, default=-1) < note.master_epoch


def describe(ranges: list[StakeRange]) -> str:
    """Return the first ranges as text for an error."""
    shown = ", ".join(map(str, ranges[:SHOWN_PARTITIONS]))
    more = len(ranges) - SHOWN_PARTITIONS
    return f"{shown} and {more} more partitions" if more > 0 else shown
