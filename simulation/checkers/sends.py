"""Check the order of records: int-nonmonotonic-send, int-send-skip, nonmonotonic-send, send-skip.

`int-` applies inside one record batch: its offsets are consecutive. `nonmonotonic-send` applies to one process: later
records of an idempotent producer have greater offsets, with any number of requests in flight; a record that a plain
producer sends after an acknowledgement has a greater offset than the acknowledged one. `send-skip` is the same between
processes: a record has a smaller offset than one that was acknowledged before its send began, so the acknowledged one
had skipped an offset that was filled later.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import Op
from tidelog.simulation.checkers.index import Partition


def check_sends(partition: Partition, found: Findings) -> None:
    """Check all four rules for sends with acks=all, and for sends of unknown outcome that were read."""
    highest_of: dict[int, tuple[int, Op]] = {}  # process → its highest offset so far: idempotent, or ended before
    pending: list[tuple[int, int, int, Op]] = []  # acknowledged: (ended, index, highest offset, op)
    ended: tuple[int, Op] | None = None  # the highest offset acknowledged before the present op began
    of_plain: dict[int, tuple[int, Op]] = {}
    for op in partition.sends:
        if op.acks != -1 or op.outcome == "fail":
            continue
        while pending and pending[0][0] < op.began_us:
            _, _, highest, other = heappop(pending)
            if ended is None or highest > ended[0]:
                ended = (highest, other)
            if not other.idempotent and highest > of_plain.get(other.process, (-1, other))[0]:
                of_plain[other.process] = (highest, other)
        offsets = op.offsets if op.outcome == "ok" else []
        if len(offsets) > 1:
            _inside(partition, op, found)
        if not offsets:
            offsets = [partition.offset_of[value] for value in op.values if value in partition.offset_of]
        if not offsets or min(offsets) < 0:
            continue
        first, last = min(offsets), max(offsets)
        before = (highest_of if op.idempotent else of_plain).get(op.process)
        if before is not None and first < before[0]:
            _say(partition, "nonmonotonic-send", before, first, op, found)
        elif ended is not None and first < ended[0]:
            _say(partition, "send-skip", ended, first, op, found)
        if op.idempotent and (before is None or last > before[0]):
            highest_of[op.process] = (last, op)
        if op.outcome == "ok":
            heappush(pending, (op.ended_us, op.index, last, op))


def _say(partition: Partition, rule: str, before: tuple[int, Op], first: int, op: Op, found: Findings) -> None:
    how = "earlier" if rule == "nonmonotonic-send" else "and acknowledged before it began"
    found.add(
        rule,
        f"{partition.name}: a send of process {op.process} is at offset {first}, "
        f"one of process {before[1].process}, sent {how}, at {before[0]}",
        before[1],
        op,
        at=(partition.topic, partition.number, first),
    )


def _inside(partition: Partition, op: Op, found: Findings) -> None:
    for earlier, later in pairwise(op.offsets):
        if later == earlier + 1:
            continue
        rule = "int-nonmonotonic-send" if later <= earlier else "int-send-skip"
        found.add(
            rule,
            f"{partition.name}: one batch is at offset {earlier} and then at offset {later}",
            op,
            at=(partition.topic, partition.number, later),
        )
