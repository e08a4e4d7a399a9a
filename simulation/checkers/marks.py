"""Check values that may only increase: high-watermark-back, log-start-back, log-start-ahead, out-of-range,
committed-offset-back, epoch-back.

A mark reported in a response is a lower bound for every request sent after that response. An acknowledged or a read
record is such a mark, too: the high watermark is past it from then on. Only real time orders marks: responses to
overlapping requests may be in any order. A log start moves only past what somebody has asked to delete, unless
retention deletes: readers begin there, so nobody passes over what is gone before it.

Committed offsets are a register: a group may commit smaller offsets. A committed offset that is read must come from a
commit that was not overwritten by another one (entirely after it) before the request, and that began before the
response.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from tidelog.simulation.checkers.finding import CheckOptions, Findings
from tidelog.simulation.checkers.history import OUT_OF_RANGE, UNKNOWN, Op
from tidelog.simulation.checkers.index import FOREVER, Partition

Told = Iterator[tuple[int, Op]]


def check_marks(partition: Partition, options: CheckOptions, found: Findings) -> None:
    """High watermark, log start and leader epochs of one partition."""
    asked = (each for each in _high_asked(partition) if not (options.tail_waits and each[1].kind == "poll"))
    _only_grows(partition, "high-watermark-back", "high watermark", _high_told(partition), asked, found)
    _only_grows(partition, "log-start-back", "log start", _start_told(partition), _start_asked(partition), found)
    _check_starts(partition, found)
    _check_retention(partition, found)
    _check_deletions(partition, found)
    _check_refused(partition, found)
    _check_epochs(partition, found)
    for group, ops in partition.commits.items():
        _check_commits(partition, group, ops, found)


def _high_told(partition: Partition) -> Told:
    for op in partition.sends:
        if op.outcome == "ok" and op.acks == -1 and op.offsets:
            yield max(op.offsets) + 1, op
    for op in partition.marks:
        if op.outcome == "ok":
            highest = max(op.high_watermark, op.offsets[-1] + 1 if op.offsets else UNKNOWN)
            if highest >= 0:
                yield highest, op


def _high_asked(partition: Partition) -> Told:
    return ((op.high_watermark, op) for op in partition.marks if op.ok and op.high_watermark >= 0)


def _start_told(partition: Partition) -> Told:
    return ((op.log_start, op) for op in partition.marks if op.ok and op.log_start >= 0)


def _start_asked(partition: Partition) -> Told:
    return _start_told(partition)


def _only_grows(partition: Partition, rule: str, what: str, told: Told, asked: Told, found: Findings) -> None:
    """Compare each mark with the highest one reported before its request."""
    for mark, highest, op, proof in _after(told, asked):
        if mark < highest:
            found.add(
                rule,
                f"{partition.name}: the {what} was {highest} at least, and {mark} later",
                proof,
                op,
                at=(partition.topic, partition.number, mark),
            )


def _check_starts(partition: Partition, found: Findings) -> None:
    """No record that was read lies between what anybody asked to delete and a log start; for others see `writes`."""
    if partition.believes_log_start:
        return
    for log_start, op in _start_told(partition):
        deleted = partition.deleted_before(op.ended_us)
        if log_start <= deleted:
            continue
        gone = next((one for one in partition.known_between(deleted - 1, log_start) if one in partition.seen), None)
        if gone is not None:
            said = f"{partition.name}: the log start is {log_start}, past the record at {gone}"
            said += f"; nobody asked to delete beyond {deleted}" if deleted else "; nobody asked to delete any"
            place = (partition.topic, partition.number, gone)
            found.add("log-start-ahead", said, partition.seen[gone], op, at=place)


def _check_retention(partition: Partition, found: Findings) -> None:
    """Where retention leaves a number of records, a log start that nobody asked for has had as many behind it.

    What was sent by then, and is not known to be before the log start, may have been there, and lost later.
    """
    if not partition.keeps:
        return
    told: dict[int, Op] = {}
    for log_start, op in sorted(_start_told(partition), key=lambda each: each[1].ended_us):
        told.setdefault(log_start, op)
    deletions = [op for op in partition.marks if op.kind == "delete_records" and op.outcome != "fail"]
    for log_start, op in told.items():
        asked = [one.offset if one.offset >= 0 else FOREVER for one in deletions if one.began_us <= op.ended_us]
        deleted = max(asked, default=0)
        gone = next(iter(partition.known_between(deleted - 1, log_start)), None)
        if gone is None or partition.gone_from_us <= op.ended_us:
            continue
        sent = [value for one in partition.sends if one.began_us <= op.ended_us for value in one.values]
        left = sum(partition.offset_of.get(value, log_start) >= log_start for value in sent)
        if left < partition.keeps:
            said = f"{partition.name}: the log start is {log_start}, with {left} records behind it at most"
            said += f"; retention leaves {partition.keeps} at least"
            place = (partition.topic, partition.number, gone)
            found.add("log-start-ahead", said, partition.told_by[gone], op, at=place)


def _check_deletions(partition: Partition, found: Findings) -> None:
    """What was deleted is gone: the log starts behind it at once, and nothing before a log start is read any more."""
    place = partition.topic, partition.number
    for op in partition.marks:
        if op.ok and op.kind == "delete_records" and 0 <= op.log_start < op.offset:
            said = f"{partition.name}: what lies before {op.offset} was deleted, and the log start is {op.log_start}"
            found.add("log-start-back", said, op, at=(*place, op.offset))
    read = ((op.offsets[0], op) for op in partition.marks if op.ok and op.log_start >= 0 and op.offsets)
    for first, start, op, proof in _after(_start_told(partition), read):
        if first < start:
            said = f"{partition.name}: the log start was {start} at least, and a record at {first} was read later"
            found.add("log-start-back", said, proof, op, at=(*place, first))


def _check_refused(partition: Partition, found: Findings) -> None:
    """A reader is refused only an offset that may be deleted, or that is past everything that was told before.

    What lies before all records that are known may have been deleted before the history begins.
    """
    refused = ((op.offset, op) for op in partition.polls if op.outcome == "fail" and op.error == OUT_OF_RANGE)
    for offset, end, op, proof in _after(_high_told(partition), refused):
        first = max(partition.deleted_before(op.ended_us), next(iter(partition.known()), FOREVER))
        if first <= offset <= end:
            said = f"{partition.name}: offset {offset} was refused as out of range, and the log ended at {end} at least"
            found.add("out-of-range", said, proof, op, at=(partition.topic, partition.number, offset))


def _after(told: Told, asked: Told) -> Iterator[tuple[int, int, Op, Op]]:
    """Yield each mark that was asked for, the highest one told before that, the question, and who told it."""
    questions = sorted(asked, key=lambda each: each[1].began_us)
    if not questions:
        return
    answers = sorted(told, key=lambda each: each[1].ended_us)
    highest, proof, at = UNKNOWN, questions[0][1], 0
    for mark, op in questions:
        while at < len(answers) and answers[at][1].ended_us < op.began_us:
            if answers[at][0] > highest:
                highest, proof = answers[at]
            at += 1
        yield mark, highest, op, proof


def _check_epochs(partition: Partition, found: Findings) -> None:
    """Leader epochs increase with the offset, and the epoch of a record does not change."""
    epoch_at: dict[int, tuple[int, Op]] = {}
    for op in partition.polls:
        for offset, epoch in zip(op.offsets, op.epochs, strict=False):
            known = epoch_at.setdefault(offset, (epoch, op))
            if known[0] != epoch:
                said = f"{partition.name}, offset {offset} has leader epoch {known[0]} and leader epoch {epoch}"
                found.add("epoch-back", said, known[1], op, at=(partition.topic, partition.number, offset))
    for op in partition.sends:
        if op.outcome == "ok" and op.epoch >= 0:
            for offset in op.offsets:
                known = epoch_at.setdefault(offset, (op.epoch, op))
                if known[0] != op.epoch:
                    said = (
                        f"{partition.name}, offset {offset}: acknowledged under epoch {op.epoch}, read with {known[0]}"
                    )
                    found.add("epoch-back", said, op, known[1], at=(partition.topic, partition.number, offset))
    for op in partition.lookups:
        if op.ok and op.kind == "offset_for_time" and op.offset != UNKNOWN:
            known = epoch_at.setdefault(op.offset, (op.epoch, op))
            if known[0] != op.epoch:
                said = (
                    f"{partition.name}, offset {op.offset}: found by time with epoch {op.epoch}, read with {known[0]}"
                )
                found.add("epoch-back", said, op, known[1], at=(partition.topic, partition.number, op.offset))
    highest = UNKNOWN
    proof: Op | None = None
    for offset in sorted(epoch_at):
        epoch, op = epoch_at[offset]
        if epoch < highest and proof is not None:
            said = f"{partition.name}, offset {offset} has leader epoch {epoch}, an earlier one has {highest}"
            found.add("epoch-back", said, proof, op, at=(partition.topic, partition.number, offset))
        elif epoch > highest:
            highest, proof = epoch, op


def _check_commits(partition: Partition, group: str, ops: list[Op], found: Findings) -> None:
    writes = [op for op in ops if op.kind == "commit" and op.outcome != "fail"]
    done = sorted((op for op in writes if op.ok), key=lambda op: op.ended_us)
    ends = [op.ended_us for op in done]
    latest: list[Op] = []  # of the first n completed commits, the one that began last
    for op in done:
        latest.append(op if not latest or op.began_us > latest[-1].began_us else latest[-1])
    by_offset: dict[int, list[Op]] = defaultdict(list)
    for op in writes:
        by_offset[op.offset].append(op)
    for op in ops:
        if op.kind != "committed" or not op.ok:
            continue
        count = bisect_left(ends, op.began_us)
        overwriting = latest[count - 1] if count else None
        since_us = overwriting.began_us if overwriting is not None else -1
        if op.offset == UNKNOWN:
            explained = overwriting is None or partition.gone_from_us <= op.ended_us  # deleted with the topic
        else:
            explained = any(_may_stand(write, since_us, op) for write in by_offset[op.offset])
        if not explained:
            _say_commit(partition, group, op, overwriting, found)


def _may_stand(write: Op, since_us: int, asked: Op) -> bool:
    ended_us = write.ended_us if write.ok else FOREVER
    return ended_us >= since_us and write.began_us <= asked.ended_us


def _say_commit(partition: Partition, group: str, op: Op, overwriting: Op | None, found: Findings) -> None:
    had = "none" if op.offset == UNKNOWN else f"{op.offset}"
    said = f"{partition.name}: the committed offset of group {group} is {had}, "
    said += "which was never committed" if overwriting is None else f"after {overwriting.offset} was acknowledged"
    proof = (op,) if overwriting is None else (overwriting, op)
    found.add("committed-offset-back", said, *proof, at=(partition.topic, partition.number, op.index))
