"""Errors of record batches, each with its Kafka code.

Entry: `InvalidRecord`; `tidelog.batch.batch` re-exports all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tidelog.runtime.errors import CorruptData, InvalidInput


class InvalidRecord(InvalidInput):
    """A batch or record breaks a rule of the format or the topic. Kafka: INVALID_RECORD (87)."""

    kafka_code = 87

    def __init__(self, message: str, *, hint: str | None = None, record_errors: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(message, hint=hint)
        self.record_errors: tuple[tuple[int, str], ...] = tuple(record_errors)
        """`(index of the record in its batch, reason)`, for the Produce response's record_errors."""


class CorruptRecord(CorruptData):
    """A batch's bytes fail their CRC32C or do not parse. Kafka: CORRUPT_MESSAGE (2), retriable for the client."""

    retriable: ClassVar[bool] = True


class RecordTooLarge(InvalidInput):
    """A batch, or its decompressed size, exceeds the limit. Kafka: MESSAGE_TOO_LARGE (10)."""

    kafka_code = 10


class UnsupportedCompression(InvalidInput):
    """The batch names a codec that does not exist. Kafka: UNSUPPORTED_COMPRESSION_TYPE (76)."""

    kafka_code = 76


class InvalidTimestamp(InvalidInput):
    """A CreateTime timestamp is too far from the broker's clock. Kafka: INVALID_TIMESTAMP (32)."""

    kafka_code = 32
