"""The table of a chaos run is made from the history alone."""

from __future__ import annotations

import pytest

from tidelog.chaos.report import quantile, report, unexpected
from tidelog.simulation.checkers import check
from tidelog.simulation.checkers.history import History

S = 1_000_000


def run() -> History:
    """Two partitions; acknowledgements each second but for a fault from 10 to 14 s that one of them feels."""
    history, offsets = History(), [0, 0]

    def send(partition: int, at_s: int) -> None:
        fields = {"topic": "t", "partition": partition, "values": [len(history)], "idempotent": True}
        op = history.begin("send", 1, at_s * S, **fields)
        history.end(op, "ok", at_s * S + S // 2, offsets=[offsets[partition]])
        offsets[partition] += 1

    for at_s in range(1, 25):
        if at_s == 10:
            history.end(history.begin("fault", 0, 10 * S, name="kill", target="node 1"), "ok", 14 * S)
        if at_s == 20:
            history.end(history.begin("fault", 0, 20 * S, name="cut"), "ok", 21 * S)
        send(0, at_s)
        if not 10 <= at_s < 16:
            send(1, at_s)
    history.note("heal", 0, 25 * S)
    return history


def test_rounds_are_told_apart_and_times_measured() -> None:
    rows = {row.fault: row for row in report(run(), [])}
    assert rows.keys() == {"none", "kill", "cut"}
    assert (rows["none"].rounds, rows["none"].acknowledged) == (0, 18)
    assert (rows["kill"].rounds, rows["kill"].acknowledged) == (1, 10 + 4)
    assert sorted(rows["kill"].unavailable_s) == [1.0, 7.0]
    assert sorted(rows["kill"].first_ack_s) == [0.5, 2.5]
    assert rows["cut"].unavailable_s == [1.0, 1.0]


def test_what_was_lost_belongs_to_the_fault_in_which_it_was_sent() -> None:
    history = run()
    reader = history.begin("poll", 2, 26 * S, topic="t", partition=0)
    sends = [op for op in history.ops if op.kind == "send" and op.partition == 0]
    kept = [op for op in sends if op.began_us != 12 * S]
    history.end(reader, "ok", 26 * S, values=[op.values[0] for op in kept], offsets=[op.offsets[0] for op in kept])
    reader = history.begin("poll", 2, 26 * S, topic="t", partition=1)
    sends = [op for op in history.ops if op.kind == "send" and op.partition == 1]
    values = [op.values[0] for op in sends]
    history.end(reader, "ok", 26 * S, values=[*values, values[-1]], offsets=list(range(len(values) + 1)))
    rows = {row.fault: row for row in report(history, check(history))}
    assert [(name, row.lost, row.doubled, row.other_findings) for name, row in rows.items()] == [
        ("cut", 0, 1, 0),
        ("kill", 1, 0, 0),
        ("none", 0, 0, 0),
    ]


def test_a_partition_that_never_comes_back_is_unavailable_to_the_end() -> None:
    history = run()
    history.ops = [op for op in history.ops if op.kind != "send" or op.partition == 0 or op.began_us < 10 * S]
    rows = {row.fault: row for row in report(history, [])}
    assert max(rows["kill"].unavailable_s) == pytest.approx(20 - 9.5)
    assert len(rows["kill"].first_ack_s) == 1


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.5, 0.99, 1.0)] == [2.0, 3.0, 3.0]


def test_exceptions_in_a_log_that_nobody_expected_are_found() -> None:
    healthy = "12:00:00.123 WARNING bucket it fails error=503"
    failed = "12:00:00.124 ERROR runtime.task_errors unexpected error, trying again place=uploads"
    trace = ["    Traceback (most recent call last):", '      File "x.py", line 1', "        raise error"]
    odd, known = [*trace, "    KeyError: 7"], [*trace, "    tidelog.runtime.errors.StorageFailed: fsync"]
    assert unexpected([healthy, "ready bootstrap=127.0.0.1:9092"]) == []
    assert unexpected([healthy, failed, *odd, healthy, failed, *known, failed, *odd]) == [f"{failed} KeyError"] * 2
    assert unexpected([failed, *odd, "", "    The above exception was the direct cause", *known, healthy]) == []
    assert unexpected(odd) == ["KeyError"]
