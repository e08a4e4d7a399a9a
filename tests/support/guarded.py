"""Transactional batches, as the broker appends them when the coordinator has said yes."""

from __future__ import annotations

from tidelog.batch.batch import parse_header
from tidelog.runtime.types import Buffer
from tidelog.stream.partition_log import AppendResult, PartitionLog


def append_guarded(log: PartitionLog, batch: Buffer) -> AppendResult:
    """Append one batch of a producer, with a guard if it is in a transaction."""
    records = memoryview(bytearray(batch))
    header = parse_header(records)
    if not header.is_transactional:
        return log.append(records)
    return log.append(records, guard=log.begin_verification(header.producer_id, header.producer_epoch))
