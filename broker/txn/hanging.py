"""Finds transactions that nobody ends: open in a partition for longer than any transaction may last.

A coordinator aborts what is over its time-out, so a transaction that is open for longer than the longest time-out
allowed and `MARGIN_MS` has lost its coordinator's record or was prepared by a client that did not come back (KIP-939).
It holds the last stable offset of its partition, and read_committed consumers with it, until somebody writes its
marker (KIP-664: `kafka-transactions.sh abort`). Kafka counts the same transactions as late.

Ages are told, and decide nothing: what is shown here is never ended by itself.

Entry: `HangingTransactions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.runtime.clock import Clock

if TYPE_CHECKING:
    from tidelog.stream.partition_log import PartitionLog
    from tidelog.stream.producer_state import OpenTransaction

MARGIN_MS = 300_000
"""Time for the markers of a transaction that was over its time-out."""
MAX_LISTED = 100
"""Bound of the transactions in a report; the rest is counted."""
MAX_NAMED = 5
"""Bound of the transactions that become problems; the rest is counted."""


class _Hanging(NamedTuple):
    log: PartitionLog
    transaction: OpenTransaction
    age_ms: int


class HangingTransactions:
    """The open transactions of the partitions that this broker leads."""

    def __init__(self, logs: Callable[[], Iterable[PartitionLog]], max_timeout_ms: int, clock: Clock) -> None:
        """`max_timeout_ms`: the longest time-out that a transaction may have."""
        self._logs = logs
        self._bound_ms = max_timeout_ms + MARGIN_MS
        self._clock = clock

    def _found(self) -> Iterator[_Hanging]:
        now_ms = self._clock.time_ms()
        for log in self._logs():
            if log.closed:
                continue
            for transaction in log.open_transactions():
                age_ms = now_ms - transaction.since_ms
                if age_ms > self._bound_ms:
                    yield _Hanging(log, transaction, age_ms)

    def count(self) -> int:
        """Return the number of transactions that hang."""
        return sum(1 for _ in self._found())

    def report(self) -> dict[str, Any]:
        """Return the transactions that hang as JSON, the oldest first, at most `MAX_LISTED`."""
        found = sorted(self._found(), key=lambda each: -each.age_ms)
        listed = [
            {
                "topic": log.topic,
                "partition": log.partition,
                "producer_id": transaction.producer_id,
                "producer_epoch": transaction.producer_epoch,
                "first_offset": transaction.first_offset,
                "age_ms": age_ms,
                "last_stable_offset": log.last_stable_offset,
            }
            for log, transaction, age_ms in found[:MAX_LISTED]
        ]
        return {"hanging": len(found), "transactions": listed}

    def problems(self) -> list[str]:
        """Return a sentence for each transaction that hangs, with the command that ends it."""
        found = sorted(self._found(), key=lambda each: -each.age_ms)
        told = [
            f"{log.topic}-{log.partition}: a transaction of producer {transaction.producer_id} is open for "
            f"{age_ms // 60_000} minutes and holds back read_committed consumers at offset {log.last_stable_offset}; "
            f"if its application is gone: kafka-transactions.sh abort --topic {log.topic} "
            f"--partition {log.partition} --start-offset {transaction.first_offset}"
            for log, transaction, age_ms in found[:MAX_NAMED]
        ]
        if len(found) > MAX_NAMED:
            told.append(f"{len(found) - MAX_NAMED} more transactions hang: see `transactions` in the status")
        return told
