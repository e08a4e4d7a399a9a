"""Check acknowledged writes and reads: lost-write, unseen, phantom-read, G1a, precommitted-read.

A write is *lost* when it was acknowledged, was never read, could not have been deleted, and one of these holds: a
consumer read past its offset; another value was read there; or the high watermark, requested after the acknowledgement,
was at or below it and the value was never read later. A write that was never read but might still appear is *unseen*,
which is a finding if all faults in the history have ended: harnesses read everything after that.
"""

from __future__ import annotations

from bisect import bisect_right

from tidelog.simulation.checkers.finding import CheckOptions, Findings
from tidelog.simulation.checkers.history import UNKNOWN, Op
from tidelog.simulation.checkers.index import HistoryIndex, Partition
from tidelog.simulation.checkers.polls import Gap


def check_writes(
    index: HistoryIndex, partition: Partition, gaps: list[Gap], end_us: int, options: CheckOptions, found: Findings
) -> None:
    """Check the sends. `gaps` are the ranges that consumers skipped; `end_us` is the end of the history."""
    if partition.compacted is not None or partition.topic in options.gaps_allowed:
        return
    unseen = ((offset, partition.acknowledged[offset]) for offset in _never_read(partition))
    instead = (
        (offset, partition.acknowledged[offset])
        for offset in partition.read_instead
        if offset in partition.acknowledged
    )
    lowest, last_mark = partition.deleted_before(end_us), last_high_watermark(partition)
    passed = _Passed(gaps)
    for offset, op in (*unseen, *instead, *partition.displaced):
        if offset < lowest:
            continue
        value = op.values[op.offsets.index(offset)]
        if _read_elsewhere(partition, value, offset):
            continue  # a duplicate, or an acknowledgement with a wrong offset: reported as such
        at = (partition.topic, partition.number, offset)
        said = f"{partition.name}: value {value} was acknowledged at offset {offset}"
        if offset in partition.seen:
            found.add("lost-write", f"{said}, where there is another", op, partition.seen[offset], at=at)
        elif (gap := passed.over(offset)) is not None:
            found.add("lost-write", f"{said}, and consumers read past it", op, *gap.ops, at=at)
        elif last_mark is not None and last_mark.began_us >= op.ended_us and last_mark.high_watermark <= offset:
            ends = last_mark.high_watermark
            found.add("lost-write", f"{said}, and the partition ends at {ends}", op, last_mark, at=at)
        elif index.healed is not None:
            found.add(
                "unseen", f"{said}, and it could not be read after all faults were healed", op, index.healed, at=at
            )
    if index.healed is not None and not lowest:
        _check_placeless(index.healed, partition, found)


def _check_placeless(healed: Op, partition: Partition, found: Findings) -> None:
    """Check sends acknowledged without an offset: retries that the broker recognised as duplicates."""
    for op in partition.sends:
        if op.outcome != "ok" or op.acks != -1 or op.offsets:
            continue
        for value in op.values:
            if value not in partition.offset_of:
                said = f"{partition.name}: value {value} was acknowledged and not readable after all faults were healed"
                found.add("unseen", said, op, healed, at=(partition.topic, partition.number, value))


def _never_read(partition: Partition) -> list[int]:
    return sorted(partition.acknowledged.keys() - partition.seen.keys())


def _read_elsewhere(partition: Partition, value: int, offset: int) -> bool:
    at = partition.offset_of[value]
    return at in partition.seen and partition.read_at(at) == value


def last_high_watermark(partition: Partition) -> Op | None:
    """Return the newest answer that has one."""
    return max(
        (op for op in partition.marks if op.ok and op.high_watermark >= 0),
        key=lambda op: (op.began_us, op.high_watermark),
        default=None,
    )


class _Passed:
    """Finds the gap over an offset. Gaps may overlap; any of them is a proof."""

    def __init__(self, gaps: list[Gap]) -> None:
        self._gaps: list[Gap] = []
        for gap in sorted(gaps, key=lambda gap: (gap.low, -gap.high)):
            if not self._gaps or gap.high > self._gaps[-1].high:
                self._gaps.append(gap)  # a gap inside another proves nothing more
        self._highs = [gap.high for gap in self._gaps]

    def over(self, offset: int) -> Gap | None:
        """The gap whose bounds are around the offset."""
        at = bisect_right(self._highs, offset)
        if at < len(self._gaps) and self._gaps[at].low < offset:
            return self._gaps[at]
        return None


def check_reads(index: HistoryIndex, partition: Partition, found: Findings) -> None:
    """Check that everything read was written before, to this partition, and not aborted."""
    for offset, reader in partition.seen.items():
        value = partition.read_at(offset)
        source = index.sent.get(value)
        if source is not None and source.outcome == "ok" and source.began_us <= reader.ended_us:
            if source.partition == partition.number and source.topic == partition.topic:
                continue
        elif value == UNKNOWN:
            continue
        _explain(partition, offset, value, source, reader, found)
    if index.ends or any(op.txn != UNKNOWN for op in partition.sends):
        _check_transactions(index, partition, found)


def _explain(partition: Partition, offset: int, value: int, source: Op | None, reader: Op, found: Findings) -> None:
    at = (partition.topic, partition.number, offset)
    said = f"{partition.name}, offset {offset}: value {value} was read"
    if source is None:
        found.add("phantom-read", f"{said}, but it was never sent", reader, at=at)
    elif (source.topic, source.partition) != (partition.topic, partition.number):
        where = f"{source.topic}-{source.partition}"
        found.add("phantom-read", f"{said}, but it was sent to {where}", source, reader, at=at)
    elif source.began_us > reader.ended_us >= 0:
        found.add("phantom-read", f"{said} before it was sent", source, reader, at=at)
    elif source.outcome == "fail":
        found.add("G1a", f"{said}, though its send failed", source, reader, at=at)


def _check_transactions(index: HistoryIndex, partition: Partition, found: Findings) -> None:
    for reader in partition.polls:
        if not reader.committed_only:
            continue
        for value, offset in zip(reader.values, reader.offsets, strict=True):
            source = index.sent.get(value)
            if source is None or source.txn == UNKNOWN:
                continue
            at = (partition.topic, partition.number, offset)
            said = f"{partition.name}, offset {offset}: value {value} was read"
            end = index.ends.get(source.txn)
            if end is None or end.began_us > reader.ended_us:
                proof = (source, reader) if end is None else (source, reader, end)
                found.add(
                    "precommitted-read", f"{said} before the commit of its transaction was requested", *proof, at=at
                )
            elif not end.commits or end.outcome == "fail":
                found.add("G1a", f"{said}, though its transaction was aborted", source, reader, end, at=at)
