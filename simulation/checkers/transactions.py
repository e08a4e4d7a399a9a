"""Check transactions: G0, G1b, G1c, atomicity, zombie-accepted, lso-stuck, txn-unsettled; G1a is in `writes`.

A *segment* is what one producer has written to one partition up to its next marker: the unit that a marker decides. The
segments are known where an audit has read a whole partition with all its markers (`read_uncommitted`), after everything
else had ended; what a read_committed reader gets of them is compared with that.

Only what the client was surely told counts: of a transaction whose end is `info` either outcome is right, but the same
one everywhere. One whose end was never asked for may only be aborted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import UNKNOWN, Op
from tidelog.simulation.checkers.index import HistoryIndex, Partition
from tidelog.simulation.checkers.polls import Gap


@dataclass(slots=True)
class TxnSegment:
    """Records of one producer in one partition that share a decision."""

    partition: Partition
    reader: Op
    """The audit that has read them."""
    sends: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    """By transaction."""
    values: list[int] = field(default_factory=list)
    offset: int = UNKNOWN
    """Of the first record."""
    marker: Op | None = None
    """None: it is not decided."""


def check_committed_gaps(index: HistoryIndex, partition: Partition, gaps: Sequence[Gap], found: Findings) -> None:
    """A read_committed reader may pass over what is aborted or not known to be committed, and nothing else."""
    if not gaps or partition.compacted is not None:
        return
    got: dict[int, set[int]] = defaultdict(set)  # process → transactions that it was given something of
    for op in partition.polls:
        if op.committed_only:
            got[op.process].update(
                source.txn for value in op.values if (source := index.sent.get(value)) and source.txn != UNKNOWN
            )
    for gap in gaps:
        op = gap.ops[-1]
        for offset in partition.known_between(gap.low, gap.high):
            source = index.sent.get(partition.value_at[offset])
            if source is None or offset < partition.deleted_before(op.ended_us):
                continue
            end = index.ends.get(source.txn)
            if source.txn != UNKNOWN and (end is None or not (end.ok and end.commits)):
                continue
            some = source.txn != UNKNOWN and source.txn in got[op.process]
            proof = [source, *gap.ops] if end is None else [source, end, *gap.ops]
            found.add(
                "G1b" if some else "poll-skip",
                f"{partition.name}: read_committed process {op.process} went from offset {gap.low} to {gap.high}, past "
                f"{offset}, which is committed" + (", and was given others of its transaction" if some else ""),
                *proof,
                at=(partition.topic, partition.number, offset),
            )
            break  # one proof for a gap is enough


def check_transactions(index: HistoryIndex, found: Findings) -> None:
    """Check what concerns several partitions."""
    _check_zombies(index, found)
    _check_cycles(index, found)
    _check_settled(index, found)
    segments = [each for partition in index.partitions.values() for each in _segments(index, partition)]
    for segment in segments:
        _check_segment(segment, index, found)
    _check_once(segments, found)
    _check_atomic(index, segments, found)
    for partition in index.partitions.values():
        _check_audit(partition, segments, found)


# --- segments -----------------------------------------------------------------------------------------------------


def _segments(index: HistoryIndex, partition: Partition) -> list[TxnSegment]:
    audit = next((op for op in partition.audits if not op.committed_only), None)
    if audit is None:
        return []
    rows: list[tuple[int, int, Op | None]] = []  # offset, value, marker
    for op in partition.polls:
        if op.process == audit.process and op.kind == "poll":
            rows += [(offset, value, None) for offset, value in zip(op.offsets, op.values, strict=True)]
    rows += [(op.offset, UNKNOWN, op) for op in partition.markers if op.process == audit.process]
    found: list[TxnSegment] = []
    going_on: dict[int, TxnSegment] = {}
    for offset, value, marker in sorted(rows, key=lambda row: row[0]):
        if marker is not None:
            ended = going_on.pop(marker.producer, None)
            if ended is not None:
                ended.marker = marker
            continue
        source = index.sent.get(value)
        if source is None or source.txn == UNKNOWN:
            continue
        segment = going_on.get(source.producer)
        if segment is None:
            segment = going_on[source.producer] = TxnSegment(partition, audit, offset=offset)
            found.append(segment)
        segment.sends[source.txn].append(source)
        segment.values.append(value)
    return found


def _proof(segment: TxnSegment, *more: Op) -> list[Op]:
    sends = [op for ops in segment.sends.values() for op in ops[:2]]
    return [*sends, *([segment.marker] if segment.marker is not None else []), *more]


def _check_segment(segment: TxnSegment, index: HistoryIndex, found: Findings) -> None:
    partition = segment.partition
    at = (partition.topic, partition.number, segment.offset)
    where = f"{partition.name}, from offset {segment.offset} on"
    if len(segment.sends) > 1:
        numbers = ", ".join(map(str, sorted(segment.sends)))
        found.add("G0", f"{where}: one marker decides transactions {numbers}", *_proof(segment), at=at)
    if segment.marker is None:
        what = f"{where}: the transaction is still open after all faults and clients had ended"
        found.add("lso-stuck", what, *_proof(segment, segment.reader), at=at)
        return
    for txn in segment.sends:
        end = index.ends.get(txn)
        if segment.marker.commits:
            wrong = end is None or not end.commits or end.outcome == "fail"
        else:
            wrong = end is not None and end.commits and end.ok
        if wrong:
            was = "committed" if segment.marker.commits else "aborted"
            told = "which nobody has asked for" if end is None else "and its client was told otherwise"
            more = [end] if end is not None else []
            found.add("atomicity", f"{where}: transaction {txn} is {was}, {told}", *_proof(segment, *more), at=at)


def _check_once(segments: list[TxnSegment], found: Findings) -> None:
    """The writes of a transaction to one partition have one marker."""
    seen: dict[tuple[str, int], TxnSegment] = {}
    for segment in segments:
        for txn in segment.sends:
            first = seen.setdefault((segment.partition.name, txn), segment)
            if first is not segment:
                found.add(
                    "G0",
                    f"{segment.partition.name}: transaction {txn} is written before and after its marker",
                    *_proof(first),
                    *_proof(segment),
                    at=(segment.partition.topic, segment.partition.number, segment.offset),
                )


def _check_atomic(index: HistoryIndex, segments: list[TxnSegment], found: Findings) -> None:
    """All of a transaction is committed, or nothing."""
    by_txn: dict[int, list[TxnSegment]] = defaultdict(list)
    for segment in segments:
        for txn in segment.sends:
            by_txn[txn].append(segment)
    for txn, those in by_txn.items():
        commits = {segment.marker.commits for segment in those if segment.marker is not None}
        if len(commits) == 2:
            proof = [op for segment in those for op in _proof(segment)]
            found.add(
                "atomicity",
                f"transaction {txn} is committed in one partition and aborted in another",
                *proof,
                at=("", -1, txn),
            )


def _check_audit(partition: Partition, segments: list[TxnSegment], found: Findings) -> None:
    """A read_committed reader of the whole partition gets what is committed, and nothing else.

    What log compaction may have removed between the two audits need not be there.
    """
    audit = next((op for op in partition.audits if op.committed_only), None)
    if audit is None:
        return
    own = [op for op in partition.polls if op.process == audit.process and op.kind == "poll"]
    got = {value: op for op in own for value in op.values}
    for segment in segments:
        if segment.partition is not partition or segment.marker is None:
            continue
        for value in segment.values:
            if (value in got) == segment.marker.commits or partition.offset_of[value] >= audit.offset:
                continue
            if partition.compacted is not None and segment.marker.commits:
                continue
            was, does = ("committed", "does not get") if segment.marker.commits else ("aborted", "gets")
            found.add(
                "atomicity",
                f"{partition.name}: value {value} is {was}, and a read_committed reader {does} it",
                *_proof(segment, got.get(value, audit)),
                at=(partition.topic, partition.number, partition.offset_of[value]),
            )


# --- fences, cycles, rest -----------------------------------------------------------------------------------------


def _check_zombies(index: HistoryIndex, found: Findings) -> None:
    """What a session asks for after the next one of its transactional id has begun is refused."""
    session_of = {op.process: op for op in index.sessions}
    fences: dict[str, list[Op]] = defaultdict(list)
    for op in index.sessions:
        if op.ok:
            fences[op.name].append(op)
    for op in index.in_transactions:
        session = session_of.get(op.process)
        if not op.ok or session is None:
            continue
        for fence in fences[session.name]:
            if session.ended_us < fence.began_us and fence.ended_us < op.began_us:
                found.add(
                    "zombie-accepted",
                    f"process {op.process} of {session.name} was fenced by process {fence.process}, and its "
                    f"{op.kind} that it began after that was accepted",
                    session,
                    fence,
                    op,
                    at=(op.topic, op.partition, op.index),
                )
                break


def _check_cycles(index: HistoryIndex, found: Findings) -> None:
    """No transaction has read what was made of its own writes."""
    reads: dict[int, dict[int, Op]] = defaultdict(dict)  # transaction → those that it has read of, and the send
    for op in index.in_transactions:
        for cause in op.causes:
            source = index.sent.get(cause)
            if source is not None and source.txn != UNKNOWN and index.may_be_committed(op.txn):
                reads[op.txn].setdefault(source.txn, op)
    readers: dict[int, list[int]] = defaultdict(list)
    for txn, others in reads.items():
        for other in others:
            readers[other].append(txn)
    left = {txn: len(others) for txn, others in reads.items()}
    free = [txn for txn in readers if txn not in left]
    while free:  # whoever has read only of what is in no cycle is in none
        for txn in readers[free.pop()]:
            left[txn] -= 1
            if not left[txn]:
                del left[txn]
                free.append(txn)
    if not left:
        return
    path = [min(left)]
    while path.count(path[-1]) == 1:
        path.append(next(other for other in reads[path[-1]] if other in left))
    cycle = path[path.index(path[-1]) :]
    proof = [reads[txn][other] for txn, other in pairwise(cycle)]
    what = f"transactions {', '.join(map(str, cycle[:-1]))} have read of each other"
    found.add("G1c", what, *proof, at=("", -1, min(cycle)))


def _check_settled(index: HistoryIndex, found: Findings) -> None:
    """After everything has ended no transaction is open, and everybody may read everything."""
    for op in index.described:
        if not op.ok:
            what = f"the state of {op.name} cannot be read: {op.error}"
            found.add("txn-unsettled", what, op, at=(op.name, -1, -1))
        elif op.target not in ("", "Empty", "CompleteCommit", "CompleteAbort"):
            what = f"{op.name} is in state {op.target} after all faults and clients had ended"
            found.add("txn-unsettled", what, op, at=(op.name, -1, -1))
        elif not op.target and any(each.ok and each.name == op.name for each in index.sessions):
            found.add("txn-unsettled", f"{op.name} is forgotten", op, at=(op.name, -1, -1))
    for partition in index.partitions.values():
        stable = next((op for op in reversed(partition.marks) if op.kind == "list_offsets" and op.committed_only), None)
        if stable is None or not partition.audits:
            continue
        if not stable.ok:
            what = f"{partition.name}: nobody tells the last stable offset after all faults and clients had ended"
            found.add("lso-stuck", what, stable, at=(partition.topic, partition.number, UNKNOWN))
            continue
        high = max(op.high_watermark for op in partition.marks if op.process == stable.process)
        if stable.offset < high:
            what = f"{partition.name}: the last stable offset is {stable.offset}, the high watermark {high}"
            found.add("lso-stuck", what, stable, at=(partition.topic, partition.number, stable.offset))
