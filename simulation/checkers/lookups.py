"""Check answers to ListOffsets by time (offset-for-time) and to OffsetForLeaderEpoch (epoch-end).

Only what is certain counts. A record that lies before the one found was visible; it was there if it may not have been
deleted, or, in a compacted topic, if somebody read it later. That there is no record is wrong if one was acknowledged
or read before the question.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import compress, count

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import LARGEST_TIME, UNKNOWN, Op
from tidelog.simulation.checkers.index import HistoryIndex, Partition


def check_lookups(index: HistoryIndex, partition: Partition, found: Findings) -> None:
    """Check all lookups of one partition."""
    if partition.lookups:
        _Lookups(index, partition, found).check()


class _Lookups:
    def __init__(self, index: HistoryIndex, partition: Partition, found: Findings) -> None:
        self._partition = partition
        self._found = found
        self._known = partition.known()
        self._times = [_time_of(index, partition.value_at[offset]) for offset in self._known]
        """ms; `UNKNOWN`, for what is not known, is before all that can be asked for."""
        self._epochs = _epochs(partition)
        self._read_until = _read_until(partition) if partition.compacted is not None else None
        self._starts = _starts(partition)

    def check(self) -> None:
        for op in self._partition.lookups:
            if not op.ok:
                continue
            if op.kind == "epoch_end":
                self._check_end(op)
            elif op.offset == UNKNOWN or op.time_ms == LARGEST_TIME:
                self._check_none_later(op)
            else:
                self._check_first(op)
            if op.kind == "offset_for_time" and op.offset != UNKNOWN:
                self._check_record(op)

    def _check_record(self, op: Op) -> None:
        """The record that was found is what was told of it, and not deleted."""
        if op.time_ms != LARGEST_TIME and op.found_ms < op.time_ms:
            self._say(op, f"offset {op.offset}, whose record is of {op.found_ms}")
        at = bisect_left(self._known, op.offset)
        if at < len(self._known) and self._known[at] == op.offset and self._times[at] not in (UNKNOWN, op.found_ms):
            self._say(op, f"time {op.found_ms} of the record at {op.offset}, which has {self._times[at]}")
        told = self._start_before(op)
        if told is not None and op.offset < told.log_start:
            self._say(op, f"offset {op.offset}, though the log start was {told.log_start}", told)

    def _check_first(self, op: Op) -> None:
        """No record before the one that was found is as new as what was asked for."""
        first = bisect_left(self._known, self._lowest(op))
        last = bisect_left(self._known, op.offset)
        for offset in self._new_ones(first, last, op.time_ms):
            if self._is_there_after(offset, op):
                proof = self._partition.told_by[offset]
                self._say(op, f"offset {op.offset}, past the record at {offset}", proof)
                return

    def _check_none_later(self, op: Op) -> None:
        """Nothing that was visible at the question is as new as what was asked for, or newer than the largest."""
        if op.committed_only:
            return  # an open transaction may hide any of them
        time_ms = op.found_ms + 1 if op.time_ms == LARGEST_TIME else op.time_ms
        first = bisect_left(self._known, self._lowest(op))
        for offset in self._new_ones(first, len(self._known), max(time_ms, 0)):
            proof = self._visible_before(offset, op)
            if proof is not None and self._is_there_after(offset, op):
                self._say(op, f"{'none' if op.offset == UNKNOWN else op.offset}, with a record at {offset}", proof)
                return

    def _check_end(self, op: Op) -> None:
        """Epochs up to the one asked for end where the next one begins, as far as that was visible before.

        A leader tells the end of its log, and what it has not confirmed there may be lost and written by a later one.
        """
        if op.offset == UNKNOWN:
            self._check_no_end(op)
            return
        if op.epoch > op.wanted_epoch:
            self._say_end(op, f"epoch {op.epoch}")
        lowest = self._lowest(op)
        for offset, (epoch, proof) in self._epochs.items():
            if proof.ended_us >= op.began_us:
                continue
            is_there = offset >= lowest and self._is_there_after(offset, op)
            if epoch > op.wanted_epoch and offset < op.offset and is_there:
                self._say_end(op, f"the end {op.offset}, behind a record of epoch {epoch} at {offset}", proof)
                return
            if epoch <= op.wanted_epoch and offset >= op.offset:
                self._say_end(op, f"the end {op.offset}, before a record of epoch {epoch} at {offset}", proof)
                return

    def _check_no_end(self, op: Op) -> None:
        """A leader knows an epoch that is as new as the one asked for, if a record of such a one was read before."""
        for offset, (epoch, proof) in self._epochs.items():
            if epoch >= op.wanted_epoch and proof.ended_us < op.began_us:
                self._say_end(op, f"none, with a record of epoch {epoch} at {offset}", proof)
                return

    def _new_ones(self, first: int, last: int, time_ms: int) -> Iterator[int]:
        """Known offsets, by their positions, of records of that time or later."""
        times = self._times[first:last]
        if not times or max(times) < time_ms:
            return
        yield from (self._known[at] for at in compress(count(first), (each >= time_ms for each in times)))

    def _lowest(self, op: Op) -> int:
        """The offset below which records may have been deleted when the question was answered."""
        return self._partition.deleted_before(op.ended_us)

    def _is_there_after(self, offset: int, op: Op) -> bool:
        """Whether log compaction had not removed a record when the question was answered."""
        return self._read_until is None or self._read_until.get(offset, UNKNOWN) > op.ended_us

    def _visible_before(self, offset: int, op: Op) -> Op | None:
        """Return the operation by which a record was surely visible before the question."""
        for one in (self._partition.acknowledged.get(offset), self._partition.seen.get(offset)):
            if one is not None and one.ended_us < op.began_us:
                return one
        return None

    def _start_before(self, op: Op) -> Op | None:
        """The operation with the highest log start told before the question."""
        at = bisect_left(self._starts, op.began_us, key=lambda each: each[0])
        return self._starts[at - 1][1] if at else None

    def _say(self, op: Op, what: str, *proofs: Op) -> None:
        asked = "the largest time" if op.time_ms == LARGEST_TIME else f"time {op.time_ms}"
        said = f"{self._partition.name}: {asked} was asked for, and the answer is {what}"
        self._found.add("offset-for-time", said, *proofs, op, at=self._place(op))

    def _say_end(self, op: Op, what: str, *proofs: Op) -> None:
        said = f"{self._partition.name}: the end of epoch {op.wanted_epoch} was asked for, and the answer is {what}"
        self._found.add("epoch-end", said, *proofs, op, at=self._place(op))

    def _place(self, op: Op) -> tuple[str, int, int]:
        return self._partition.topic, self._partition.number, op.index


def _time_of(index: HistoryIndex, value: int) -> int:
    op = index.sent.get(value)
    return op.times[op.values.index(value)] if op is not None and op.times else UNKNOWN


def _epochs(partition: Partition) -> dict[int, tuple[int, Op]]:
    """Offset → the record's leader epoch, and who read it first."""
    found: dict[int, tuple[int, Op]] = {}
    for op in partition.polls:
        for offset, epoch in zip(op.offsets, op.epochs, strict=False):
            known = found.get(offset)
            if known is None or op.ended_us < known[1].ended_us:
                found[offset] = epoch, op
    return found


def _read_until(partition: Partition) -> dict[int, int]:
    """Offset → when the last poll began that returned it."""
    found: dict[int, int] = {}
    for op in partition.polls:
        for offset in op.offsets:
            found[offset] = max(op.began_us, found.get(offset, UNKNOWN))
    return found


def _starts(partition: Partition) -> list[tuple[int, Op]]:
    """(When it was told, operation) of ever higher log starts."""
    found: list[tuple[int, Op]] = []
    for op in sorted((op for op in partition.marks if op.ok and op.log_start >= 0), key=lambda op: op.ended_us):
        if not found or op.log_start > found[-1][1].log_start:
            found.append((op.ended_us, op))
    return found
