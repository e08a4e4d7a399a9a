"""Histories for the tests of the checkers, written short: times are steps, one operation after another."""

from __future__ import annotations

from typing import Any

from tidelog.simulation.checkers.history import History, Op, Outcome

T = "orders"
STEP_US = 1_000_000


class Story:
    """Each call is an operation that begins a second after the one before, and takes half a second."""

    def __init__(self) -> None:
        self.history = History()
        self._now_us = 0

    def op(self, kind: Any, process: int, outcome: Outcome = "ok", **fields: Any) -> Op:
        self._now_us += STEP_US
        nowhere = ("heal", "fault", "end_txn", "init_txn", "describe_txn")
        if kind not in (*nowhere, "create_topic", "delete_topic", "set_config", "append_config", "config"):
            fields.setdefault("partition", 0)
        if kind not in nowhere:
            fields.setdefault("topic", T)
        op = self.history.begin(kind, process, self._now_us, **fields)
        self.history.end(op, outcome, self._now_us + STEP_US // 2)
        return op

    def send(self, process: int, *values: int, at: int = -1, outcome: Outcome = "ok", **fields: Any) -> Op:
        offsets = list(range(at, at + len(values))) if at >= 0 else []
        return self.op("send", process, outcome, values=list(values), **{"offsets": offsets, **fields})

    def poll(self, process: int, *records: tuple[int, int], **fields: Any) -> Op:
        """`records` are (offset, value)."""
        offsets, values = [each[0] for each in records], [each[1] for each in records]
        return self.op("poll", process, offsets=offsets, values=values, **fields)

    def txn(self, process: int, txn: int, *values: int, at: int, end: Outcome = "ok", **fields: Any) -> None:
        """One send of a transaction, and its commit."""
        self.send(process, *values, at=at, txn=txn, **{"producer": process, **fields})
        self.op("end_txn", process, end, txn=txn, commits=True)

    def audit(self, process: int, *records: tuple[int, int], markers: dict[int, bool], **fields: Any) -> None:
        """Read a whole partition with either isolation level, of producer 1: `markers` are offset → commits."""
        self.poll(process, *records, offset=0, **fields)
        for offset, commits in markers.items():
            self.op("marker", process, offset=offset, producer=1, commits=commits, **fields)
        self.op("audit", process, offset=99, **fields)

    def audit_committed(self, process: int, *records: tuple[int, int], **fields: Any) -> None:
        """Read a whole partition as read_committed."""
        self.poll(process, *records, offset=0, committed_only=True, **fields)
        self.op("audit", process, offset=99, committed_only=True, **fields)

    def marks(self, **fields: Any) -> Op:
        return self.op("list_offsets", 9, **fields)
