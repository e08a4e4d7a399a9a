"""Messages of a Kafka client as Arrow batches: the tail of a partition, some seconds of records.

Entry: `RowCollector`.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pyspark_tidelog.columns import arrow_schema

ROWS = 10_000


class RowCollector:
    """Collects messages of confluent-kafka, and gives them out as Arrow batches."""

    def __init__(self, *, include_headers: bool) -> None:
        self._schema = arrow_schema(include_headers=include_headers)
        self._include_headers = include_headers
        self._rows: list[tuple[Any, ...]] = []

    @property
    def rows(self) -> int:
        """Return the number of rows that were not given out yet."""
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether `take` is due."""
        return len(self._rows) >= ROWS

    def add(self, message: Any) -> None:
        """Add a message."""
        from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

        kind, timestamp_ms = message.timestamp()
        row: tuple[Any, ...] = (
            message.key(),
            message.value(),
            message.topic(),
            message.partition(),
            message.offset(),
            timestamp_ms * 1_000,
            int(kind == TIMESTAMP_LOG_APPEND_TIME),
        )
        if self._include_headers:
            headers = message.headers()
            row = (*row, [{"key": key, "value": value} for key, value in headers] if headers else None)
        self._rows.append(row)

    def take(self) -> pa.RecordBatch:
        """Return the rows collected so far, and begin anew."""
        columns = list(zip(*self._rows, strict=True))
        self._rows = []
        arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
