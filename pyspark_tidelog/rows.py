"""Messages of a Kafka client as Arrow batches: the tail of a partition, some seconds of records.

Entry: `RowCollector`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pyspark_tidelog.columns import HEADERS, LAST_MS, arrow_schema, column_names
from tidelog.runtime.errors import Unavailable

ROWS = 10_000
BYTES = 16 << 20
"""Bytes of keys, values and headers after which an Arrow batch is given out, as of what is in the bucket."""
AT_ONCE = 100
"""Messages that a client is asked for at once: it holds them all as Python objects, however large they are."""


class RowCollector:
    """Collects messages of confluent-kafka, and gives `columns` of them out as Arrow batches."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._schema = arrow_schema(columns)
        self._include_headers = HEADERS in columns
        self._collected = column_names(include_headers=self._include_headers)
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    @property
    def rows(self) -> int:
        """Return the number of rows that were not given out yet."""
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether `take` is due."""
        return len(self._rows) >= ROWS or self._size >= BYTES

    def add(self, message: Any) -> None:
        """Add a message. Raises `Unavailable` if a header's name is no UTF-8."""
        from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

        kind, timestamp_ms = message.timestamp()
        key, value = message.key(), message.value()
        self._size += len(key or b"") + len(value or b"")
        row: tuple[Any, ...] = (
            key,
            value,
            message.topic(),
            message.partition(),
            message.offset(),
            min(max(timestamp_ms, -LAST_MS), LAST_MS) * 1_000,
            int(kind == TIMESTAMP_LOG_APPEND_TIME),
        )
        if self._include_headers:
            headers = _headers_of(message)
            self._size += sum(len(name) + len(each or b"") for name, each in headers)
            row = (*row, [{"key": name, "value": each} for name, each in headers] or None)
        self._rows.append(row)

    def take(self) -> pa.RecordBatch:
        """Return the rows collected so far, and begin anew."""
        columns = dict(zip(self._collected, zip(*self._rows, strict=True), strict=True))
        self._rows, self._size = [], 0
        arrays = [pa.array(columns[field.name], type=field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _headers_of(message: Any) -> Sequence[tuple[str, bytes | None]]:
    try:
        return message.headers() or ()
    except (SystemError, UnicodeDecodeError) as error:  # the library raises the second, and the interpreter the first
        place = f"{message.topic()}-{message.partition()}: offset {message.offset()}"
        raise Unavailable(
            f"{place} has a header whose name is no UTF-8, which the client library does not give",
            hint="it is read from the bucket once it is there: wait for its upload, or read with tail=skip",
        ) from error
