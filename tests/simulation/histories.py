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
        if kind not in ("heal", "fault", "end_txn", "create_topic", "delete_topic"):
            fields.setdefault("partition", 0)
        if kind not in ("heal", "fault", "end_txn"):
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

    def marks(self, **fields: Any) -> Op:
        return self.op("list_offsets", 9, **fields)
