"""What the tests of replicated WALs share: the log of a master that is not under test, and shipping to a follower."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import ReplicatedWal, WalRecord, WalRecordType
from tidelog.storage.wal.epochs import EpochHistory
from tidelog.storage.wal.format import EPOCH_START, HEADER_BYTES, encode_header


class Line(NamedTuple):
    """One record of a log, to compare."""

    offset: int
    end_offset: int
    epoch: int
    type: WalRecordType
    base_offset: int
    payload: bytes


def line_of(record: WalRecord) -> Line:
    return Line(
        record.offset,
        record.end_offset,
        record.master_epoch,
        record.type,
        record.base_offset,
        bytes(record.payload),
    )


@dataclass
class MasterLog:
    """The log of some master. Its headers claim as much as a master's can: `confirmed`, durable on its disk."""

    lines: list[Line] = field(default_factory=list)
    history: EpochHistory = field(default_factory=EpochHistory)
    claims: dict[int, int] = field(default_factory=dict)
    """The confirm offsets in headers, by WAL offset."""

    @property
    def end_offset(self) -> int:
        return self.lines[-1].end_offset if self.lines else 0

    @property
    def epoch(self) -> int:
        return self.history.last_epoch

    def begin(self, epoch: int, confirmed: int = 0) -> None:
        self.history.append(epoch, self.end_offset)
        self._add(WalRecordType.EPOCH_START, 0, b"", confirmed)

    def write(self, base: int, payload: bytes, confirmed: int = 0) -> None:
        self._add(WalRecordType.DATA, base, payload, confirmed)

    def _add(self, type: WalRecordType, base: int, payload: bytes, confirmed: int) -> None:
        at = self.end_offset
        self.claims[at] = min(at, confirmed)
        self.lines.append(Line(at, at + HEADER_BYTES + len(payload), self.epoch, type, base, payload))

    def upto(self, offset: int) -> MasterLog:
        """The same log, cut at a record boundary."""
        history = self.history.copy()
        history.truncate_to(offset)
        lines = [line for line in self.lines if line.end_offset <= offset]
        return MasterLog(lines, history, {line.offset: self.claims.get(line.offset, 0) for line in lines})

    def batch(self, offset: int, count: int) -> tuple[list[Line], bytes, int, int]:
        """Up to `count` records of one epoch from `offset` on: lines, bytes, epoch and its start."""
        lines = [line for line in self.lines if line.offset >= offset][:count]
        lines = [line for line in lines if line.epoch == lines[0].epoch]
        if not lines:
            return [], b"", *self.history.entries[-1]
        entry = self.history.entry_at(offset)
        assert entry is not None and entry.epoch == lines[0].epoch
        return (
            lines,
            b"".join(encoded(line, self.claims.get(line.offset, 0)) for line in lines),
            entry.epoch,
            entry.start_offset,
        )


def encoded(line: Line, confirm_offset: int = 0) -> bytes:
    append = StreamAppend(9, 1, line.base_offset, 1, [line.payload])
    if line.type is WalRecordType.EPOCH_START:
        append = EPOCH_START
    header = encode_header(int(line.type), len(line.payload), line.offset, confirm_offset, line.epoch, append)
    return header + line.payload


async def ship(master: ReplicatedWal, follower: ReplicatedWal, *, batch_bytes: int = 3000) -> list[WalRecord]:
    """Send a follower everything that it lacks of a master; returns what it accepted."""
    seen: list[WalRecord] = []
    while (raw := await master.read_raw(follower.end_offset, batch_bytes)) is not None:
        rest = memoryview(b"".join(raw.buffers))
        while rest:
            await follower.receivable(rest)
            at = follower.end_offset
            accepted = await follower.receive(
                at, raw.epoch, raw.epoch_start, rest, master_epoch=master.epoch_history.last_epoch
            )
            seen += accepted
            rest = rest[accepted[-1].end_offset - at :]
        assert follower.end_offset == raw.end_offset
    return seen
