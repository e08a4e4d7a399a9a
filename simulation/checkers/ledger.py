"""Check transfers: exactly-once, balance.

Values with `causes` were made of records that their transaction has consumed, and whose offset it has committed. At
rest an audit reads what is committed of both topics, and the committed offsets. A record below the committed offset was
carried out once, one above it never, and the amounts of everything that is committed cancel out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import UNKNOWN, Op
from tidelog.simulation.checkers.index import HistoryIndex, Partition


def check_ledger(index: HistoryIndex, found: Findings) -> None:
    """Check all partitions together; nothing is checked unless each of them was read to its end."""
    transactional = [each for each in index.partitions.values() if any(op.txn != UNKNOWN for op in each.sends)]
    audits = [_audit_of(each) for each in transactional]
    if not transactional or not all(audits):
        return
    visible = [_read_by(partition, op) for partition, op in zip(transactional, audits, strict=True) if op]
    made = _made_of(index, visible)
    everything = {value for values in visible for value in values}
    balance = sum(_amount(index, value) for value in everything)
    if balance:
        what = f"all accounts together have {balance} and not 0"
        found.add("balance", what, *[op for op in audits if op], at=("", -1, -1))
    for partition, orders in zip(transactional, visible, strict=True):
        _check_consumed(index, partition, orders, made, found)
    for cause in made.keys() - everything:
        sends = [index.sent[value] for value in made[cause]]
        what = f"value {cause}, which is not committed, was carried out"
        found.add("exactly-once", what, *sends, at=("", -1, cause))


def _audit_of(partition: Partition) -> Op | None:
    return next((op for op in partition.audits if op.committed_only), None)


def _read_by(partition: Partition, audit: Op) -> dict[int, int]:
    """value → offset."""
    return {
        value: offset
        for op in partition.polls
        if op.process == audit.process
        for value, offset in zip(op.values, op.offsets, strict=True)
    }


def _made_of(index: HistoryIndex, visible: Iterable[dict[int, int]]) -> dict[int, list[int]]:
    """cause → the committed values that were made of it."""
    made: dict[int, list[int]] = defaultdict(list)
    for values in visible:
        for value in values:
            source = index.sent.get(value)
            if source is not None and source.causes:
                cause = source.causes[source.values.index(value)]
                if cause != UNKNOWN:
                    made[cause].append(value)
    return made


def _amount(index: HistoryIndex, value: int) -> int:
    source = index.sent.get(value)
    return source.amounts[source.values.index(value)] if source is not None and source.amounts else 0


def _check_consumed(
    index: HistoryIndex, partition: Partition, orders: dict[int, int], made: dict[int, list[int]], found: Findings
) -> None:
    for group, ops in partition.commits.items():
        last = ops[-1]
        if last.kind != "committed" or not any(op.txn != UNKNOWN for op in ops):
            continue
        if not last.ok:
            what = f"{partition.name}: the committed offset of group {group} cannot be read at rest: {last.error}"
            found.add("exactly-once", what, last, at=(partition.topic, partition.number, last.index))
            continue
        for value, offset in orders.items():
            transactions = {index.sent[each].txn for each in made.get(value, ())}
            wanted = 1 if offset < last.offset else 0
            if len(transactions) == wanted:
                continue
            ends = [index.ends[txn] for txn in sorted(transactions) if txn in index.ends]
            sends = [index.sent[each] for each in made.get(value, ())]
            times = {0: "never", 1: "once", 2: "twice"}.get(len(transactions), f"{len(transactions)} times")
            found.add(
                "exactly-once",
                f"{partition.name}, offset {offset}: value {value} was carried out {times}, and group {group} is at "
                f"offset {last.offset}",
                *sends,
                *ends,
                last,
                at=(partition.topic, partition.number, offset),
            )
