"""Small parts of `DiskWal` for replicas: what waits to be written of received bytes, and what is read for sending.

Received bytes are written as they came: a `ReceivedPiece` is a view into the buffer in which they arrived. It holds
whole records, at most a group of them or one larger record (`tidelog.storage.wal.disk.scan.EvidenceRule` says why).

Entry: `ReceivedPiece`, `divide`, `RawRuns`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.runtime.disk import DiskFile
from tidelog.storage.wal.format import WalHeader, read_header

_NOTHING = memoryview(b"")


@dataclass(slots=True)
class ReceivedPiece:
    """One step of the disk's ordered lane: bytes to write, or a file to publish before its first bytes."""

    end: int
    """WAL offset after it."""
    file: DiskFile
    at: int = 0
    """Byte of the file."""
    view: memoryview = _NOTHING
    publish: str = ""
    """The name under which to publish the file; empty: `view` is written."""
    previous: DiskFile | None = None
    """The file before a published one."""

    @property
    def lane_file(self) -> DiskFile:
        """Return the file to sync so that everything submitted before this piece is synced."""
        return self.previous if self.previous is not None else self.file


def divide(run: memoryview, offset: int, file: DiskFile, at: int, group_bytes: int) -> Iterator[ReceivedPiece]:
    """Divide whole records, which begin at WAL offset `offset` and byte `at` of the file, into pieces."""
    begin = position = 0
    while position < len(run):
        following = read_header(run, position).end_offset - offset
        if following - begin > group_bytes and position > begin:
            yield ReceivedPiece(offset + position, file, at + begin, run[begin:position])
            begin = position
        position = following
    yield ReceivedPiece(offset + position, file, at + begin, run[begin:position])


class RawRuns:
    """Collects the bytes of scanned records, one view for what lies in one window of the scan."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.epochs: set[int] = set()
        self.end_offset = -1
        self._window = _NOTHING
        self._begin = 0

    def on_header(self, header: WalHeader, window: memoryview, position: int) -> None:
        """Add the checked record at `position` of `window`."""
        if window is not self._window:
            self._window, self._begin = window, position
            self.buffers.append(_NOTHING)
        end = position + header.end_offset - header.wal_offset
        self.buffers[-1] = window[self._begin : end]
        self.epochs.add(header.master_epoch)
        self.end_offset = header.end_offset
