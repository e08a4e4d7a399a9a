"""Snapshots of one member: written beside its turns, sent to others in pieces, and received.

A piece carries the snapshot's identity (index and term of its newest entry), its position, the total and the CRC32C of
the whole file. Invariants (docs/rules.md, rule 15): a receiver keeps only pieces that follow one another; what it has
replaces nothing before it is whole, its checksum is right, it decodes, and it is synced. A sender begins anew whenever
the connection is lost. A piece that could not be kept (disk full) leaves nothing behind but a draft.

Entry: `Snapshots`, in the place of pysyncobj's serializer; the names with capitals are those that pysyncobj calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from crc32c import crc32c
from pysyncobj.config import SERIALIZER_STATE

from tidelog.controller.model.levels import NewerLevel
from tidelog.controller.raft.files import RaftFile
from tidelog.controller.raft.journal import Entry
from tidelog.controller.raft.snapshot import Snapshot, read_snapshot, write_snapshot
from tidelog.controller.raft.surroundings import BackgroundWork, Surroundings
from tidelog.runtime.errors import CorruptData, StorageFailed

logger = logging.getLogger(__name__)

PIECE_VERSION: Final = 1
MEASURE_BYTES: Final = 1 << 20


class SnapshotPiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a snapshot's file, as it is sent."""

    version: int
    index: int
    """Of the newest entry that the snapshot contains; with its term, the snapshot's identity."""
    term: int
    position: int
    """Of the first byte, in the file."""
    total: int
    """Bytes of the file."""
    checksum: int
    """CRC32C of the file."""
    data: bytes


class PlainPiece(NamedTuple):
    """A part of a snapshot's file as members before feature levels send and take it, in the order of the file."""

    data: bytes
    is_first: bool
    is_last: bool


def decode_plain_piece(raw: Any) -> PlainPiece | None:
    """A piece of a member before feature levels; None for another form."""
    try:
        return PlainPiece(*msgspec.convert(raw, tuple[bytes, bool, bool]))
    except msgspec.ValidationError:
        return None


def decode_piece(raw: Any) -> SnapshotPiece:
    """A piece as it was received. Raises `CorruptData`, `NewerLevel`."""
    try:
        piece = msgspec.convert(raw, SnapshotPiece)
    except msgspec.ValidationError as error:
        raise CorruptData(f"a piece of a snapshot does not decode: {error}") from error
    if piece.version != PIECE_VERSION:
        raise NewerLevel(
            f"a piece of a snapshot has version {piece.version}; {PIECE_VERSION} is known",
            hint="start this controller in the version of the leader, or a newer one",
        )
    return piece


class Sent(NamedTuple):
    """What pysyncobj sends on; it looks at the third field only."""

    piece: SnapshotPiece
    peer: Any
    is_last: bool

    def plain(self) -> PlainPiece:
        """The same for a member before feature levels."""
        return PlainPiece(self.piece.data, self.piece.position == 0, self.is_last)


@dataclass(slots=True)
class _Sending:
    file: RaftFile
    index: int
    term: int
    total: int
    checksum: int
    position: int = 0


@dataclass(slots=True)
class _Incoming:
    file: RaftFile
    identity: tuple[int, int, int, int]
    """Index, term, total, checksum."""
    position: int = 0
    checksum: int = 0


_PLAIN = (-1, -1, -1, -1)
"""Identity of what arrives without one."""


class Snapshots:
    """`freeze(last, previous)` holds the state and returns what makes the snapshot.

    One file is written at a time, beside the turns: a leader that stops for longer than an election time-out is none
    any more.
    """

    def __init__(
        self,
        path: Path,
        piece_bytes: int,
        surroundings: Surroundings,
        freeze: Callable[[Entry, Entry], Callable[[], Snapshot]],
        last: Entry | None,
    ) -> None:
        self._path = path
        self._piece_bytes = piece_bytes
        self._files = surroundings.files
        self._work = surroundings.work
        self._draft = path.with_name(path.name + ".tmp")
        self._incoming_path = path.with_name(path.name + ".1.tmp")
        self._freeze = freeze
        self._last = last
        """The newest entry in the file."""
        self._whole: tuple[int, int] | None = None
        """Total and checksum of the file, once somebody asked."""
        self._writer: BackgroundWork | None = None
        self._written = False
        self._wanted = True
        self._id = 0
        self._writing: Entry | None = None
        self._transfers: dict[Any, _Sending] = {}
        self._incoming: _Incoming | None = None
        self.failed = False
        """The last one was not written."""

    def serialize(self, data: tuple[Any, Entry, Entry, Any], snapshot_id: int) -> None:
        """Begin a snapshot; `checkSerializing` tells how it went."""
        if self._writer is not None:
            return
        self._id, self._written, self._wanted = snapshot_id, False, True
        self._writing = data[1]
        make = self._freeze(data[1], data[2])
        self._writer = self._work(lambda: self._write(make))

    def _write(self, make: Callable[[], Snapshot]) -> None:
        try:
            write_snapshot(self._draft, make(), self._files)
            self._written = True
        except (OSError, MemoryError) as error:
            logger.warning("the snapshot was not written; it is tried again", extra={"error": str(error)})

    def checkSerializing(self) -> Any:  # noqa: N802
        """Put a finished snapshot in its place, which ends the transfers of the old one."""
        if self._writer is None:
            return SERIALIZER_STATE.NOT_SERIALIZING, None
        if self._writer.is_alive():
            return SERIALIZER_STATE.SERIALIZING, self._id
        self._writer = None
        if not self._wanted:
            self._files.remove(self._draft)
            return SERIALIZER_STATE.NOT_SERIALIZING, None
        try:
            if self._written:
                self._files.rename(self._draft, self._path)
        except OSError as error:
            logger.warning("the snapshot was not put in place", extra={"error": str(error)})
            self._written = False
        if not self._written:
            self.failed = True
            return SERIALIZER_STATE.FAILED, self._id
        self._replaced(self._writing)
        return SERIALIZER_STATE.SUCCESS, self._id

    def _replaced(self, last: Entry | None) -> None:
        self._last, self._whole = last, None
        self._end_transfers()

    # Sending

    def _end_transfers(self) -> None:
        for peer in list(self._transfers):
            self.cancelTransmisstion(peer)

    def getTransmissionData(self, peer: Any) -> Sent | None:  # noqa: N802
        """The next piece; None while there is none to send."""
        try:
            if peer not in self._transfers:
                self._transfers[peer] = self._begin_transfer()
            transfer = self._transfers[peer]
            data = transfer.file.read(self._piece_bytes)
        except OSError as error:
            logger.warning("the snapshot cannot be read for a transfer", extra={"error": str(error)})
            self.cancelTransmisstion(peer)
            return None
        piece = SnapshotPiece(
            PIECE_VERSION,
            transfer.index,
            transfer.term,
            transfer.position,
            transfer.total,
            transfer.checksum,
            data,
        )
        transfer.position += len(data)
        is_last = not data or transfer.position >= transfer.total
        if is_last:
            self.cancelTransmisstion(peer)
        return Sent(piece, peer, is_last)

    def _begin_transfer(self) -> _Sending:
        if self._last is None:
            raise FileNotFoundError("there is no snapshot")
        if self._whole is None:
            self._whole = self._measure()
        return _Sending(self._files.open(self._path), self._last[1], self._last[2], *self._whole)

    def _measure(self) -> tuple[int, int]:
        total = checksum = 0
        file = self._files.open(self._path)
        try:
            while data := file.read(MEASURE_BYTES):
                total += len(data)
                checksum = crc32c(data, checksum)
        finally:
            file.close()
        return total, checksum

    def cancelTransmisstion(self, peer: Any) -> None:  # noqa: N802
        """The peer went away."""
        transfer = self._transfers.pop(peer, None)
        if transfer is not None:
            transfer.file.close()

    # Receiving

    def receive(self, piece: SnapshotPiece) -> Snapshot | None:
        """Take a piece. The snapshot, when all of it is there, checked and synced; it replaces nothing yet.

        Raises `OSError` when the piece could not be kept, and `CorruptData` when the whole is not what was sent; both
        times everything that was received is dropped.
        """
        identity = (piece.index, piece.term, piece.total, piece.checksum)
        if piece.position == 0:
            self.drop_incoming()
            self._incoming = _Incoming(self._files.create(self._incoming_path), identity)
        incoming = self._incoming
        if incoming is None:
            return None
        if incoming.identity != identity or incoming.position != piece.position:
            self.drop_incoming()  # a piece before this one was lost
            return None
        try:
            incoming.file.write(piece.data)
            incoming.position += len(piece.data)
            incoming.checksum = crc32c(piece.data, incoming.checksum)
            if incoming.position < piece.total:
                return None
            return self._check(incoming, piece)
        except BaseException:
            self.drop_incoming()
            raise

    def receive_plain(self, piece: PlainPiece) -> Snapshot | None:
        """As `receive`, for a piece without a position: only the file's own checksum tells that nothing is missing."""
        if piece.is_first:
            self.drop_incoming()
            self._incoming = _Incoming(self._files.create(self._incoming_path), _PLAIN)
        incoming = self._incoming
        if incoming is None or incoming.identity != _PLAIN:
            self.drop_incoming()
            return None
        try:
            incoming.file.write(piece.data)
            return self._synced(incoming) if piece.is_last else None
        except BaseException:
            self.drop_incoming()
            raise

    def _synced(self, incoming: _Incoming) -> Snapshot | None:
        incoming.file.sync()
        return read_snapshot(self._incoming_path, self._files)

    def _check(self, incoming: _Incoming, piece: SnapshotPiece) -> Snapshot:
        if incoming.position != piece.total or incoming.checksum != piece.checksum:
            raise CorruptData(f"a received snapshot of {incoming.position} bytes fails its checksum")
        snapshot = self._synced(incoming)
        if snapshot is None or snapshot.last[1:] != (piece.index, piece.term):
            raise CorruptData(f"a received snapshot is not the one of entry {piece.index} in term {piece.term}")
        return snapshot

    def take_over(self, last: Entry) -> None:
        """Put what was received in the place of this member's own. Raises `StorageFailed`."""
        self._wanted = False  # what is being written is older
        try:
            self._files.rename(self._incoming_path, self._path)
            self._files.sync_directory(self._path.parent)
        except OSError as error:
            raise StorageFailed(f"a received snapshot was not put in place: {error}") from error
        finally:
            self.drop_incoming()
        self._replaced(last)

    def drop_incoming(self) -> None:
        """Forget what has been received so far."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.file.close()

    def close(self) -> None:
        """End all transfers, in and out."""
        if self._writer is not None:
            self._writer.join()
        self._end_transfers()
        self.drop_incoming()
