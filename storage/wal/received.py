"""Checks the records that a follower receives before any of them enters its WAL.

A batch holds whole records of one master epoch, and continues the follower's log: its first byte is the log's end, and
its epoch is either the log's last one, with the same start, or a newer one that begins here. So a batch is never cut
and never crosses an epoch, and the follower's epoch history grows with the first byte of an epoch.

Entry: `check_place`, `parse_received`, `first_payload_bytes`.
"""

from __future__ import annotations

from tidelog.runtime.errors import CorruptData, InvalidInput
from tidelog.runtime.types import Buffer
from tidelog.storage.wal.base import WalRecord
from tidelog.storage.wal.epochs import EpochHistory
from tidelog.storage.wal.format import (
    HEADER_BYTES,
    crc_matches,
    misplaced,
    read_header,
    record_of,
    unsupported,
)


def check_place(
    offset: int, epoch: int, epoch_start: int, *, history: EpochHistory, start_offset: int, end_offset: int
) -> bool:
    """Check that bytes of `epoch` at `offset` continue the log; return whether they begin an epoch that is new to it.

    An empty log without a history may begin in the middle of an epoch: its earlier part was trimmed at the master.
    Raises `InvalidInput`.
    """
    if offset != end_offset:
        raise InvalidInput(f"records of WAL offset {offset} were received; this replica ends at {end_offset}")
    if not 0 <= epoch < 1 << 31 or not 0 <= epoch_start <= offset:
        raise InvalidInput(f"epoch {epoch} from {epoch_start} cannot have a record at {offset}")
    if epoch > history.last_epoch:
        if epoch_start != offset and (history.entries or start_offset != end_offset):
            raise InvalidInput(
                f"epoch {epoch} began at {epoch_start}, and this replica, which ends at {end_offset}, has not seen it",
                hint="compare the epoch histories and truncate first",
            )
        return True
    known = history.entries[-1]
    if (epoch, epoch_start) != known:
        raise InvalidInput(
            f"epoch {epoch} from {epoch_start} does not continue epoch {known.epoch} from {known.start_offset}",
            hint="compare the epoch histories and truncate first",
        )
    return False


def parse_received(records: Buffer, offset: int, epoch: int) -> list[WalRecord]:
    """Return the whole records in `records`, which begin at WAL offset `offset`; the payloads are views into it.

    Raises `CorruptData` unless every record has its magic, place, CRC32C and epoch, and the last one is whole.
    """
    view = memoryview(records)
    found: list[WalRecord] = []
    position = 0
    while position < len(view):
        at = offset + position
        if position + HEADER_BYTES > len(view):
            raise _refused(at, "it ends inside a header")
        header = read_header(view, position)
        reason = misplaced(header, at)
        if reason:
            raise _refused(at, reason)
        if header.end_offset - offset > len(view):
            raise _refused(at, "it ends inside a record")
        if not crc_matches(header, view, position):
            raise _refused(at, "the CRC32C of the record does not match")
        if reason := unsupported(header):
            raise _refused(at, reason)
        if header.master_epoch != epoch:
            raise _refused(at, f"a record of master epoch {header.master_epoch} in a batch of epoch {epoch}")
        if not 0 <= header.confirm_offset <= at:
            raise _refused(at, f"the record says that {header.confirm_offset} was confirmed before it")
        found.append(record_of(header, view, position))
        position = header.end_offset - offset
    return found


def first_payload_bytes(records: Buffer) -> int:
    """Return the payload length of the first record, unchecked; 0 if there is no whole header."""
    return read_header(records, 0).payload_length if len(records) >= HEADER_BYTES else 0


def _refused(wal_offset: int, reason: str) -> CorruptData:
    return CorruptData(f"what the master has sent at WAL offset {wal_offset} is refused: {reason}")
