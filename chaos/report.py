"""The table of a chaos run, computed from its history and the checkers' findings, and what nodes' logs have of defects.

The table has one row per kind of fault.

A round lasts from its fault's beginning until the next one's. A partition's *unavailability* in a round is the longest
time between two acknowledgements for it, the one before the fault included; *first ack* is from the fault's end until
the first acknowledgement for the partition after that.

Entry: `report`, `unexpected`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.history import History, Op

LOST = frozenset({"lost-write", "unseen"})
DOUBLED = frozenset({"duplicate"})
OURS = "tidelog."
"""What the names of exceptions begin with that callers know."""
LAST_OF_TRACEBACK = re.compile(r" {4}([A-Za-z_][\w.]*)(: |$)")
"""A traceback is indented by four spaces in a node's log."""


class Row(msgspec.Struct, kw_only=True):
    """One kind of fault. Times in seconds, one value for each partition and round."""

    fault: str
    rounds: int = 0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    other_findings: int = 0
    unavailable_s: list[float] = []
    first_ack_s: list[float] = []


def report(history: History, findings: Iterable[Finding]) -> list[Row]:
    """Return a row per kind of fault, ordered by name; data outside of rounds is in `none`."""
    faults = sorted((op for op in history.ops if op.kind == "fault"), key=lambda op: op.began_us)
    starts = [op.began_us for op in faults]
    end_us = max((op.ended_us for op in history.ops), default=0)
    ends = [*starts[1:], next((op.began_us for op in history.ops if op.kind == "heal"), end_us)] if faults else []
    rows: dict[str, Row] = {}
    acks: dict[int, list[int]] = defaultdict(list)

    def row_at(time_us: int) -> Row:
        at = bisect_right(starts, time_us) - 1
        name = faults[at].name if at >= 0 else "none"
        return rows.setdefault(name, Row(fault=name))

    for op in history.ops:
        if op.kind == "send" and op.ok:
            row_at(op.began_us).acknowledged += len(op.values)
            acks[op.partition].append(op.ended_us)
    for times in acks.values():
        times.sort()
    for fault, until_us in zip(faults, ends, strict=True):
        row = row_at(fault.began_us)
        row.rounds += 1
        for times in acks.values():
            _measure(row, fault, until_us, times)
    for finding in findings:
        row = row_at(_when(finding))
        if finding.rule in LOST:
            row.lost += 1
        elif finding.rule in DOUBLED:
            row.doubled += 1
        else:
            row.other_findings += 1
    return [rows[name] for name in sorted(rows)]


def _when(finding: Finding) -> int:
    return min((op.began_us for op in finding.ops if op.kind == "send"), default=finding.ops[-1].began_us)


def _measure(row: Row, fault: Op, until_us: int, times: list[int]) -> None:
    first = bisect_left(times, fault.began_us)
    last = bisect_left(times, until_us)
    seen = [times[first - 1] if first else fault.began_us, *times[first:last], until_us]
    if last < len(times):
        seen[-1] = times[last]
    row.unavailable_s.append(max(b - a for a, b in pairwise(seen)) / 1e6)
    after = bisect_left(times, fault.ended_us)
    if fault.ended_us >= 0 and after < len(times):
        row.first_ack_s.append((times[after] - fault.ended_us) / 1e6)


def unexpected(output: Iterable[str]) -> list[str]:
    """Return the lines of a node's text log whose traceback is of an exception that is no `TidelogError`."""
    found, event, error, traced = [], "", "", False
    for line in [*output, "the end"]:
        if "Traceback (most recent call last)" in line:
            traced = True
        elif line and not line.startswith(" "):
            if traced and error and not error.startswith(OURS):
                found.append(f"{event} {error}".strip())
            event, error, traced = line, "", False
        elif traced and (last := LAST_OF_TRACEBACK.match(line)):
            error = last[1]
    return found


def quantile(values: list[float], share: float) -> float | None:
    """Return the quantile of the values, rounded up to the next value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
