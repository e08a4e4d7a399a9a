"""Check that consumers get all records, in order: int-nonmonotonic-poll, nonmonotonic-poll, int-poll-skip, poll-skip.

`int-` applies inside one poll, the others between two consecutive polls of one process; `assign` restarts. Only a poll
past a record that is *known* to exist, and may not have been deleted, is a skip: control records, aborted transactions
and compacted records leave legitimate holes. If no process read it, it is a lost write (`writes`), not a skip. What a
read_committed reader passes over is judged by the outcomes of transactions (`transactions`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from tidelog.simulation.checkers.finding import CheckOptions, Findings
from tidelog.simulation.checkers.history import UNKNOWN, Op
from tidelog.simulation.checkers.index import Partition


class Gap(NamedTuple):
    """A consumer read up to `low` and continued at `high` without records in between."""

    low: int
    high: int
    ops: tuple[Op, ...]


def check_polls(partition: Partition, options: CheckOptions, found: Findings) -> tuple[list[Gap], list[Gap]]:
    """Check each process's polls; return the gaps, for lost writes, and those of read_committed readers."""
    gaps: list[Gap] = []
    of_committed: list[Gap] = []
    last: dict[int, tuple[int, Op | None]] = {}  # process → the last offset that it is past, and by which poll
    for op in partition.polls:
        if op.kind == "assign":
            last[op.process] = (op.offset - 1, None) if op.offset >= 0 else (UNKNOWN - 1, None)
            continue
        if op.outcome != "ok" or op.kind != "poll":
            continue
        before, previous = last.get(op.process, (UNKNOWN - 1, None))
        those = of_committed if op.committed_only else gaps
        _inside(partition, op, those, found)
        began = before if before >= UNKNOWN else op.offset - 1 if op.offset >= 0 else None
        if op.offsets:
            if began is not None:
                _between(partition, began, previous, op, those, found)
            if op.next_offset > op.offsets[-1] + 1:
                those.append(Gap(op.offsets[-1], op.next_offset, (op,)))
        elif began is not None and op.next_offset > began + 1:
            those.append(Gap(began, op.next_offset, (op,)))
        if op.offsets or op.position - 1 > before:
            last[op.process] = (op.position - 1, op)
    if partition.compacted is None and partition.topic not in options.gaps_allowed:
        for gap in gaps:
            _skipped(partition, gap, found)
    return gaps, of_committed


def _inside(partition: Partition, op: Op, gaps: list[Gap], found: Findings) -> None:
    offsets = op.offsets
    count = len(offsets)
    if count < 2 or offsets == list(range(offsets[0], offsets[0] + count)):
        return
    for earlier, later in pairwise(offsets):
        if later <= earlier:
            found.add(
                "int-nonmonotonic-poll",
                f"{partition.name}: one poll got offset {earlier} and then offset {later}",
                op,
                at=(partition.topic, partition.number, later),
            )
        elif later > earlier + 1:
            gaps.append(Gap(earlier, later, (op,)))


def _between(partition: Partition, before: int, previous: Op | None, op: Op, gaps: list[Gap], found: Findings) -> None:
    first = op.offsets[0]
    ops = (op,) if previous is None else (previous, op)
    if first <= before:
        found.add(
            "nonmonotonic-poll",
            f"{partition.name}: process {op.process} was past offset {before} and then got offset {first}",
            *ops,
            at=(partition.topic, partition.number, first),
        )
    elif first > before + 1:
        gaps.append(Gap(before, first, ops))


def _skipped(partition: Partition, gap: Gap, found: Findings) -> None:
    op = gap.ops[-1]
    for offset in partition.known_between(gap.low, gap.high):
        reader = partition.seen.get(offset)
        if reader is None or offset < partition.deleted_before(op.ended_us):
            continue
        rule = "int-poll-skip" if len(gap.ops) == 1 and gap.low in op.offsets else "poll-skip"
        who = "one poll" if rule == "int-poll-skip" else f"process {op.process}"
        found.add(
            rule,
            f"{partition.name}: {who} went from offset {gap.low} to {gap.high}, past {offset}, which is there",
            reader,
            *gap.ops,
            at=(partition.topic, partition.number, offset),
        )
        return  # one proof for a gap is enough
