"""A history indexed by partition: positions of values, readers, possible deletions. Built in one pass, with findings.

Knowledge of an offset comes from acknowledgements and reads; the first operation is kept as proof. The pass itself
finds contradictions: another value at the offset (`inconsistent-offsets`), the value at another offset (`duplicate`).

Entry: `build`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import UNKNOWN, History, Op

FOREVER = 2**63 - 1


@dataclass(slots=True)
class Partition:
    """The history of one partition."""

    topic: str
    number: int
    sends: list[Op] = field(default_factory=list)
    polls: list[Op] = field(default_factory=list)
    """`poll`, `assign` and `revoke`, in the order of their start times."""
    marks: list[Op] = field(default_factory=list)
    """Operations that report a high watermark or a log start, or that delete."""
    commits: dict[str, list[Op]] = field(default_factory=dict)
    """By group: `commit` and `committed`. A `txn_commit` is here as the commit that the end of its transaction was."""
    lookups: list[Op] = field(default_factory=list)
    """`offset_for_time` and `epoch_end`."""
    markers: list[Op] = field(default_factory=list)
    audits: list[Op] = field(default_factory=list)
    value_at: dict[int, int] = field(default_factory=dict)
    """offset → value."""
    told_by: dict[int, Op] = field(default_factory=dict)
    """offset → the first operation that reported it."""
    offset_of: dict[int, int] = field(default_factory=dict)
    """value → its first known offset."""
    seen: dict[int, Op] = field(default_factory=dict)
    """offset → the first operation that read it."""
    acknowledged: dict[int, Op] = field(default_factory=dict)
    """offset → the `send` with acks=all that it was acknowledged to."""
    displaced: list[tuple[int, Op]] = field(default_factory=list)
    """(offset, `send`): acknowledged at an offset of another acknowledged send."""
    read_instead: dict[int, int] = field(default_factory=dict)
    """offset → value, if the first read value differs from `value_at`."""
    believes_log_start: bool = False
    """Retention may delete."""
    keeps: int = 0
    """So many of the newest records retention leaves at least."""
    compacted: Op | None = None
    """The creation of a compacted topic."""
    cleaned: list[Op] = field(default_factory=list)
    """Up to where log compaction has been."""
    has_left: bool = False
    """Log compaction may have left something alone."""
    gone_from_us: int = FOREVER
    """Time at which its topic's deletion began."""
    _known: list[int] | None = None
    _deletions: list[tuple[int, int]] | None = None

    @property
    def name(self) -> str:
        """Name of the partition in Kafka's format."""
        return f"{self.topic}-{self.number}"

    def read_at(self, offset: int) -> int:
        """Return the value first read at an offset. Raises `KeyError` if it was never read."""
        return self.read_instead.get(offset, self.value_at[offset])

    def known(self) -> list[int]:
        """The offsets of known records, ascending. Valid after the pass."""
        if self._known is None:
            self._known = sorted(self.value_at)
        return self._known

    def known_between(self, low: int, high: int) -> list[int]:
        """Known offsets, both bounds excluded."""
        known = self.known()
        return known[bisect_left(known, low + 1) : bisect_left(known, high)]

    def deleted_before(self, time_us: int) -> int:
        """Return the offset below which records may be deleted at that time."""
        if self.gone_from_us <= time_us:
            return FOREVER
        if self._deletions is None:
            self._deletions = self._all_deletions()
        at = bisect_left(self._deletions, (time_us + 1, -1))
        return self._deletions[at - 1][1] if at else 0

    def _all_deletions(self) -> list[tuple[int, int]]:
        """(start time, offset), both increasing."""
        found = []
        for op in self.marks:
            if op.kind == "delete_records" and op.outcome != "fail":
                everything = op.log_start if op.log_start >= 0 else FOREVER
                found.append((op.began_us, op.offset if op.offset >= 0 else everything))
            elif self.believes_log_start and op.ok and op.log_start > 0:
                found.append((0, op.log_start))  # the time of a deletion by retention is unknown
        found.sort()
        highest, grown = 0, []
        for time_us, offset in found:
            if offset > highest:
                highest = offset
                grown.append((time_us, offset))
        return grown


@dataclass(slots=True)
class HistoryIndex:
    """A whole history."""

    partitions: dict[tuple[str, int], Partition]
    sent: dict[int, Op]
    """value → its `send`."""
    ends: dict[int, Op]
    """Transaction → its `end_txn`."""
    healed: Op | None
    """The last `heal`."""
    sessions: list[Op] = field(default_factory=list)
    """Every `init_txn`."""
    in_transactions: list[Op] = field(default_factory=list)
    """Every `send`, `txn_commit` and `end_txn` of a transaction."""
    configs: list[Op] = field(default_factory=list)
    """Every `set_config`, `append_config` and `config`."""
    described: list[Op] = field(default_factory=list)
    """Every `describe_txn`."""

    def is_committed(self, txn: int) -> bool:
        """Whether a transaction is surely committed; `UNKNOWN`: what is in none always is."""
        end = self.ends.get(txn)
        return txn == UNKNOWN or (end is not None and end.ok and end.commits)

    def may_be_committed(self, txn: int) -> bool:
        """Whether the commit of a transaction was asked for, and not surely refused."""
        end = self.ends.get(txn)
        return end is not None and end.commits and end.outcome != "fail"


def build(history: History, found: Findings) -> HistoryIndex:
    """Build the index in one pass."""
    index = HistoryIndex({}, {}, {}, None)
    partitions = index.partitions
    created: dict[str, Op] = {}
    gone: dict[str, int] = {}
    for op in history.ops:
        kind = op.kind
        if op.txn != UNKNOWN:
            index.in_transactions.append(op)
        if kind == "end_txn":
            index.ends[op.txn] = op
        elif kind == "init_txn":
            index.sessions.append(op)
        elif kind in ("set_config", "append_config", "config"):
            index.configs.append(op)
        elif kind == "describe_txn":
            index.described.append(op)
        elif kind == "heal":
            index.healed = op
        elif kind == "create_topic" and (op.deletes or op.compacts):
            created[op.topic] = op
        elif kind == "delete_topic" and op.outcome != "fail":
            gone.setdefault(op.topic, op.began_us)
        if op.partition < 0:
            continue
        key = (op.topic, op.partition)
        partition = partitions.get(key)
        if partition is None:
            partition = partitions[key] = Partition(op.topic, op.partition)
        if kind == "send":
            partition.sends.append(op)
            for value in op.values:
                index.sent[value] = op
            if op.outcome == "ok" and op.acks == -1:
                _acknowledge(partition, op, found)
        elif kind == "poll":
            partition.polls.append(op)
            if op.high_watermark >= 0 or op.log_start >= 0 or op.values:
                partition.marks.append(op)
        elif kind in ("assign", "revoke"):
            partition.polls.append(op)
        elif kind in ("commit", "committed", "txn_commit"):
            partition.commits.setdefault(op.group, []).append(op)
        elif kind in ("offset_for_time", "epoch_end"):
            partition.lookups.append(op)
        elif kind == "marker":
            partition.markers.append(op)
        elif kind == "audit":
            partition.audits.append(op)
        elif kind == "cleaned":
            partition.cleaned.append(op)
        elif kind == "left":
            partition.has_left = True
        else:
            partition.marks.append(op)
    for partition in partitions.values():
        creation = created.get(partition.topic)
        partition.believes_log_start = creation is not None and creation.deletes
        partition.keeps = creation.keeps if creation is not None else 0
        partition.compacted = creation if creation is not None and creation.compacts else None
        partition.commits = {group: _decided(index, ops) for group, ops in partition.commits.items()}
        partition.gone_from_us = gone.get(partition.topic, FOREVER)
        partition.sends.sort(key=lambda op: op.began_us)  # threads may have recorded operations out of order
        _read(partition, index, found)
    return index


def _decided(index: HistoryIndex, ops: list[Op]) -> list[Op]:
    """Replace the commits in transactions by those that their ends were, or may have been."""
    found: list[Op] = []
    for op in ops:
        if op.kind != "txn_commit":
            found.append(op)
        elif op.outcome != "fail" and index.may_be_committed(op.txn):
            end = index.ends[op.txn]
            outcome = end.outcome if op.ok else "info"
            times = {"began_us": end.began_us, "ended_us": end.ended_us}
            found.append(msgspec.structs.replace(op, kind="commit", outcome=outcome, **times))
    return found


def _acknowledge(partition: Partition, op: Op, found: Findings) -> None:
    for value, offset in zip(op.values, op.offsets, strict=False):
        if offset < 0:
            continue  # the response had no offset, e.g. for a duplicate recognised by the broker
        if partition.acknowledged.setdefault(offset, op) is not op:
            partition.displaced.append((offset, op))
        _note(partition, op, value, offset, op.idempotent, found)


def _read(partition: Partition, index: HistoryIndex, found: Findings) -> None:
    value_at, seen, sent = partition.value_at, partition.seen, index.sent
    for op in partition.polls:
        if not op.values or op.kind != "poll":
            continue
        for value, offset in zip(op.values, op.offsets, strict=True):
            if value_at.get(offset) != value:
                source = sent.get(value)
                _note(partition, op, value, offset, source is not None and source.idempotent, found)
                if offset not in seen and value_at[offset] != value:
                    partition.read_instead[offset] = value
            if offset not in seen:
                seen[offset] = op


def _note(partition: Partition, op: Op, value: int, offset: int, once: bool, found: Findings) -> None:
    """Record that `value` was reported at `offset`; `once`: it may be at no other offset."""
    before = partition.value_at.get(offset)
    if before is None:
        partition.value_at[offset] = value
        partition.told_by[offset] = op
    elif before != value:
        other = partition.told_by[offset]
        found.add(
            "inconsistent-offsets",
            f"{partition.name}, offset {offset} holds value {before} and value {value}",
            other,
            op,
            at=(partition.topic, partition.number, offset),
        )
    if value == UNKNOWN:
        return
    first = partition.offset_of.setdefault(value, offset)
    if first != offset and once:
        found.add(
            "duplicate",
            f"{partition.name}: value {value} of an idempotent producer is at offset {first} and at offset {offset}",
            partition.told_by[first],
            op,
            at=(partition.topic, partition.number, value),
        )
