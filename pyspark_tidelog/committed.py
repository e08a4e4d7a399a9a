"""What `kafka.isolation.level = read_committed` leaves of the bucket: no records of aborted transactions.

A transaction's records are in the log before anybody knows whether they count. Its marker tells, a control batch of the
same producer id that follows them. So batches are held back, in order, until the marker has come. It may lie behind
what a task reads; then the task asks whether the transaction is committed. That was decided when the read was planned,
because a read ends at the last stable offset.

Invariants: rows come out in the order of their offsets; a batch of a transaction is handed on only if that is known to
be committed; `HELD_BYTES` bounds what is held back.

Entry: `CommittedRows`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark_tidelog.decode import RecordDecoder
from tidelog.batch.batch import ControlType, check_crc, control_type, iter_batches, iter_records
from tidelog.batch.errors import CorruptRecord
from tidelog.runtime.types import Buffer

if TYPE_CHECKING:
    import pyarrow as pa

HELD_BYTES = 32 << 20
"""Bytes of batches that wait for a marker; with more the transactions are asked for."""

Ask = Callable[[Sequence[range]], bool]
"""Whether the transaction is committed that has written batches of these offsets."""


@dataclass(eq=False)
class _WaitingBatch:
    """A batch that was read."""

    batch: memoryview
    offsets: range
    start: int
    end: int
    """Wanted are offsets `[start, end)`."""
    is_wanted: bool | None
    """None: not known yet."""


class CommittedRows:
    """A `RecordDecoder` that leaves out the records of aborted transactions."""

    def __init__(self, decoder: RecordDecoder, ask: Ask) -> None:
        self._decoder = decoder
        self._ask = ask
        self._queue: deque[_WaitingBatch] = deque()
        self._bytes = 0
        self._undecided: dict[int, list[_WaitingBatch]] = {}
        """By producer id: the batches of its transaction."""

    def add(self, batches: Buffer, start: int, end: int) -> int:
        """See `RecordDecoder.add`."""
        reached = start
        for header, batch in iter_batches(batches):
            last = header.last_offset
            reached = max(reached, min(last + 1, end))
            if last < start or header.base_offset >= end:
                continue
            if header.is_control:
                if not check_crc(batch):
                    raise CorruptRecord(f"the control batch {header.base_offset} fails its CRC32C")
                (record,) = iter_records(batch, header=header)
                self._settle(header.producer_id, is_committed=control_type(record) == ControlType.COMMIT)
                continue
            offsets = range(header.base_offset, last + 1)
            held = _WaitingBatch(batch, offsets, start, end, None if header.is_transactional else True)
            self._queue.append(held)
            self._bytes += len(batch)
            if header.is_transactional:
                self._undecided.setdefault(header.producer_id, []).append(held)
        if self._bytes > HELD_BYTES:
            self._ask_all()
        return reached

    def _settle(self, producer_id: int, *, is_committed: bool) -> None:
        for held in self._undecided.pop(producer_id, ()):
            held.is_wanted = is_committed

    def _ask_all(self) -> None:
        for producer_id, mine in list(self._undecided.items()):
            self._settle(producer_id, is_committed=self._ask([held.offsets for held in mine]))

    def full(self) -> Iterator[pa.RecordBatch]:
        """See `RecordDecoder.full`."""
        while self._queue and self._queue[0].is_wanted is not None:
            held = self._queue.popleft()
            self._bytes -= len(held.batch)
            if held.is_wanted:
                self._decoder.add(held.batch, held.start, held.end)
                yield from self._decoder.full()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """See `RecordDecoder.rest`."""
        self._ask_all()
        yield from self.full()
        yield from self._decoder.rest()
