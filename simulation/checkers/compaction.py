"""Check a compacted topic: what is missing was replaced, what is read is what was sent, and nothing comes back.

A record may be missing only if a later one of its key is in the log: one that is acknowledged, or may have been
written, at a higher offset; of a transaction, only if that may be committed. Then it is the later one's turn, so the
last record of each key must be found. A tombstone may be missing when its time is over, and what is older of its key
then is never read again. Every gap between the records of a reader is looked at, whatever its first offset was.

Where an operation `cleaned` tells how far log compaction has been, an audit that began later finds each key once before
that offset. Where an operation `left` tells that something was left alone, older values of a key may stay beside a
newer one.

Entry: `check_compaction`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import UNKNOWN, Op
from tidelog.simulation.checkers.index import HistoryIndex, Partition
from tidelog.simulation.checkers.polls import Gap
from tidelog.simulation.checkers.writes import last_high_watermark

RULE = "compaction"


class _Keyed(NamedTuple):
    """A record that was sent."""

    key: int
    tombstone: bool
    send: Op


class _Later(NamedTuple):
    """A record that may replace others of its key."""

    offset: int
    """`UNKNOWN`: nobody knows."""
    since_us: int
    """From when on."""
    send: Op


class _AuditRead(NamedTuple):
    """What an audit has read of a partition."""

    audit: Op
    began_us: int
    offsets: dict[int, Op]


@dataclass(slots=True)
class _KeyedPartition:
    """What is known of the keys of a partition."""

    partition: Partition
    records: dict[int, _Keyed] = field(default_factory=dict)
    """By value."""
    later: dict[int, list[_Later]] = field(default_factory=lambda: defaultdict(list))
    """By key."""

    def at(self, offset: int) -> _Keyed | None:
        """The record that is known to have been written at an offset."""
        return self.records.get(self.partition.value_at[offset])

    def is_replaced(self, key: int, offset: int, time_us: int) -> bool:
        """Whether a record may have been replaced by then."""
        return any(
            each.since_us <= time_us and (each.offset > offset or each.offset == UNKNOWN) for each in self.later[key]
        )


def check_compaction(index: HistoryIndex, partition: Partition, gaps: Iterable[Gap], found: Findings) -> None:
    """Check a partition of a compacted topic. `gaps` are the ranges in which readers were given nothing."""
    table = _table(index, partition)
    _check_contents(table, found)
    left = _check_gaps(index, table, gaps, found)
    _check_unread(index, table, left, found)
    audits = _audits(partition)
    _check_cleaned(table, audits, found)
    _check_returns(index, table, audits, found)


def _table(index: HistoryIndex, partition: Partition) -> _KeyedPartition:
    assert partition.compacted is not None
    table = _KeyedPartition(partition)
    for op in partition.sends:
        tombstones = set(op.tombstones)
        for value, key in zip(op.values, op.keys, strict=False):
            table.records[value] = _Keyed(key, value in tombstones, op)
            since_us = op.began_us
            if op.txn != UNKNOWN:
                if not index.may_be_committed(op.txn):
                    continue
                since_us = max(since_us, index.ends[op.txn].began_us)
            if op.outcome == "fail" and value not in partition.offset_of:
                continue
            offset = partition.offset_of.get(value, UNKNOWN)
            since_us = max(since_us, op.began_us + partition.compacted.lag_us)
            table.later[key].append(_Later(offset, since_us, op))
    return table


def _check_contents(table: _KeyedPartition, found: Findings) -> None:
    """Keys and values are read as they were sent."""
    partition = table.partition
    for op in partition.polls:
        if op.kind != "poll" or not op.values:
            continue
        tombstones = set(op.tombstones)
        keys = op.keys or [UNKNOWN] * len(op.values)
        for value, key, offset in zip(op.values, keys, op.offsets, strict=True):
            sent = table.records.get(value)
            if sent is None or (sent.key, sent.tombstone) == (key, value in tombstones):
                continue
            was = f"key {sent.key}{' and no value' if sent.tombstone else ''}"
            now = f"key {key}{' and no value' if value in tombstones else ''}"
            said = f"{partition.name}, offset {offset}: value {value} was sent with {was}, and read with {now}"
            found.add(RULE, said, sent.send, op, at=(partition.topic, partition.number, offset))


def _check_gaps(index: HistoryIndex, table: _KeyedPartition, gaps: Iterable[Gap], found: Findings) -> list[int]:
    """Check what readers were not given; return the known offsets that nobody has passed over.

    What may be missing at some time may be missing ever after: the first who passes over a record proves the most.
    """
    left = list(table.partition.known())
    for gap in sorted(gaps, key=lambda each: each.ops[-1].ended_us):
        low, high = bisect_left(left, gap.low + 1), bisect_left(left, gap.high)
        op = gap.ops[-1]
        for offset in left[low:high]:
            why = _missing(index, table, offset, op.ended_us)
            if why is not None:
                where = f"process {op.process} went from offset {gap.low} to {gap.high}"
                _say(table, offset, f"{where}, and {why}", gap.ops, found)
        del left[low:high]
    return left


def _missing(index: HistoryIndex, table: _KeyedPartition, offset: int, time_us: int) -> str | None:
    """Return what is wrong if there is no record at a known offset at that time; None: nothing."""
    partition, sent = table.partition, table.at(offset)
    if sent is None or offset < partition.deleted_before(time_us) or not index.is_committed(sent.send.txn):
        return None
    assert partition.compacted is not None
    if sent.tombstone and time_us >= sent.send.began_us + partition.compacted.tombstones_us:
        return None
    if table.is_replaced(sent.key, offset, time_us):
        return None
    if table.is_replaced(sent.key, offset, time_us + partition.compacted.lag_us):
        return f"what has replaced it is younger than {partition.compacted.lag_us / 1e6:.1f} s"
    if sent.tombstone:
        return f"the tombstone is younger than {partition.compacted.tombstones_us / 1e6:.1f} s"
    return "it is the last one of its key"


def _say(table: _KeyedPartition, offset: int, what: str, ops: Sequence[Op], found: Findings) -> None:
    partition, sent = table.partition, table.at(offset)
    assert sent is not None
    value, others = partition.value_at[offset], [each.send for each in table.later[sent.key] if each.offset > offset]
    said = f"{partition.name}: value {value} of key {sent.key} is missing at offset {offset}: {what}"
    found.add(RULE, said, sent.send, *others[:2], *ops, at=(partition.topic, partition.number, offset))


def _check_unread(index: HistoryIndex, table: _KeyedPartition, left: Iterable[int], found: Findings) -> None:
    """Acknowledged records must be found after all faults were healed, or others of their keys."""
    partition, healed, mark = table.partition, index.healed, last_high_watermark(table.partition)
    end_us = max((op.ended_us for op in partition.polls), default=0)
    for offset in left:
        send = partition.acknowledged.get(offset)
        if send is None or offset in partition.seen or _missing(index, table, offset, end_us) is None:
            continue
        if mark is not None and mark.began_us >= send.ended_us and mark.high_watermark <= offset:
            _say(table, offset, f"the partition ends at {mark.high_watermark}", (mark,), found)
        elif healed is not None:
            _say(table, offset, "nobody could read it after all faults were healed", (healed,), found)
    if healed is None or partition.deleted_before(end_us):
        return
    for value, sent in table.records.items():
        send = sent.send
        if not send.ok or send.acks != -1 or send.offsets or value in partition.offset_of or sent.tombstone:
            continue
        if not index.is_committed(send.txn) or any(
            each.send is not send and not 0 <= each.send.ended_us < send.began_us for each in table.later[sent.key]
        ):
            continue
        said = (
            f"{partition.name}: value {value} of key {sent.key} was acknowledged, is its last one, and was never read"
        )
        found.add(RULE, said, send, healed, at=(partition.topic, partition.number, value))


# --- at rest ------------------------------------------------------------------------------------------------------


def _audits(partition: Partition) -> list[_AuditRead]:
    found = []
    for audit in partition.audits:
        polls = [op for op in partition.polls if op.process == audit.process and op.kind == "poll"]
        began_us = min((op.began_us for op in polls), default=audit.began_us)
        found.append(_AuditRead(audit, began_us, {offset: op for op in polls for offset in op.offsets}))
    return found


def _check_cleaned(table: _KeyedPartition, audits: Sequence[_AuditRead], found: Findings) -> None:
    """What was cleaned has each key at most once."""
    partition = table.partition
    for cleaned in partition.cleaned:
        audit = next((each for each in audits if each.began_us >= cleaned.ended_us), None)
        if audit is None:
            continue
        last: dict[int, int] = {}
        for offset in sorted(each for each in audit.offsets if each < cleaned.offset):
            sent = table.at(offset)
            if sent is None or sent.key == UNKNOWN:
                continue
            before = last.setdefault(sent.key, offset)
            last[sent.key] = offset
            if before != offset:
                said = f"{partition.name}: key {sent.key} is at offset {before} and at offset {offset}"
                said += f", though everything before {cleaned.offset} was compacted"
                ops = (audit.offsets[before], audit.offsets[offset], cleaned)
                found.add(RULE, said, *ops, at=(partition.topic, partition.number, offset))


def _check_returns(index: HistoryIndex, table: _KeyedPartition, audits: Sequence[_AuditRead], found: Findings) -> None:
    """A record that an audit did not find has taken with it what is older of its key.

    Where compaction may have left something alone, the older one is followed by a newer one at least.
    """
    partition = table.partition
    for number, audit in enumerate(audits[:-1]):
        gone: dict[int, int] = {}
        for offset in partition.known():
            if offset >= audit.audit.offset or offset in audit.offsets:
                continue
            sent = table.at(offset)
            if sent is not None and index.is_committed(sent.send.txn):
                gone[sent.key] = offset
        for later in audits[number + 1 :]:
            lasts = _last_offsets(table, later) if partition.has_left else {}
            for offset, op in later.offsets.items():
                sent = table.at(offset)
                if sent is None or later.began_us < audit.audit.ended_us or offset >= gone.get(sent.key, UNKNOWN):
                    continue
                if partition.has_left and offset < lasts[sent.key]:
                    continue
                newest = gone[sent.key]
                said = f"{partition.name}: key {sent.key} has its value of offset {offset} back, from before {newest}"
                ops = [each.send for each in (sent, table.at(newest)) if each is not None]
                found.add(RULE, said, *ops, audit.audit, op, at=(partition.topic, partition.number, offset))


def _last_offsets(table: _KeyedPartition, read: _AuditRead) -> dict[int, int]:
    """Return the last offset of each key that an audit has found."""
    found = ((offset, table.at(offset)) for offset in sorted(read.offsets))
    return {sent.key: offset for offset, sent in found if sent is not None}
