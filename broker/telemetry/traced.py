"""What a broker tells of its work for traces: plain data, without the library. Made only while traces are on.

Entry: `RequestParts`, `TracedBatch`, `TracedMove`, `TracedOpen`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from tidelog.broker.telemetry.slow_requests import Timing
from tidelog.runtime.types import Buffer

MAX_BATCHES = 32
"""Partitions of a request that are looked at."""


class TracedBatch(NamedTuple):
    """What a request wrote to one partition, or read from it."""

    topic: str
    partition: int
    offset: int
    """Of its first record; -1: it was not appended."""
    records: Sequence[Buffer]
    """Batches; the first one is read for trace headers."""
    error_code: int


class RequestParts(Protocol):
    """A request in progress, or done, that says what it spends its time on, and what it did."""

    def timing(self, started_at: float, handled_at: float, now: float) -> Timing:
        """Return the stages of the handler. Called when the response was written, if that took long or is traced.

        `handled_at`: when the handler returned; monotonic seconds all.
        """
        ...

    def trace_records(self) -> Sequence[Buffer]:
        """Return the batches of a Produce request that may name traces, at most `MAX_BATCHES`; of a Fetch none."""
        ...

    def traced(self) -> list[TracedBatch]:
        """Return what it did to its first `MAX_BATCHES` partitions that it did anything to."""
        ...


class TracedMove(NamedTuple):
    """One attempt to move a partition away from this broker. Times are monotonic seconds."""

    topic: str
    topic_id: bytes
    partition: int
    target: int
    leader_epoch: int
    """The last one here; -1: it was not closed."""
    began: float
    closed_at: float
    """Since when the partition did not serve; 0: it always did."""
    ended: float
    steps_ms: Mapping[str, float]
    """Of the time since `closed_at`, in order."""
    stall_ms: float
    outcome: str
    """`done`, `cancelled`, or `failed`."""
    error: str


class TracedOpen(NamedTuple):
    """A partition that opened or closed here. Times are monotonic seconds."""

    topic: str
    topic_id: bytes
    partition: int
    leader_epoch: int
    began: float
    ended: float
    hinted: bool
    """Whether the broker it came from sent a hint."""
    error: str = ""
