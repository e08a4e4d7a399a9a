"""Reads a range of offsets of a partition of any Kafka cluster, in a task.

Entry: `read_range`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark_tidelog.columns import column_names
from pyspark_tidelog.reading import lost
from pyspark_tidelog.rows import AT_ONCE, RowCollector
from tidelog.runtime.errors import NotFound, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

IDLE_S = 60.0
"""A broker that tells nothing new for so long ends the task with an error."""


def read_range(
    settings: Mapping[str, str], topic: str, partition: int, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records of committed transactions, and those of none, in `[start, end)`, as rows of the data source.

    `settings` are librdkafka's, `bootstrap.servers` among them. Raises `DataLoss`, `NotFound`, `Unavailable`.
    """
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "log_level": 0,
            "fetch.message.max.bytes": 8 << 20,
            **settings,
            "group.id": "tidelog-spark-range",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "isolation.level": "read_committed",
            "allow.auto.create.topics": False,
        }
    )
    place = TopicPartition(topic, partition, start)
    rows = RowCollector(column_names(include_headers=True))
    at, problem, heard_s = start, "it tells nothing", time.monotonic()
    try:
        _check_exists(consumer, topic, partition)
        consumer.assign([place])
        while at < end:
            before = at
            message: Any
            for message in consumer.consume(AT_ONCE, 1.0):
                error = message.error()
                if error is None:
                    offset = message.offset()
                    at = offset + 1
                    if offset < end:
                        rows.add(message)
                    if rows.is_full:
                        yield rows.take()
                elif error.code() == KafkaError._PARTITION_EOF:
                    at = max(at, message.offset())
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    first, _ = consumer.get_watermark_offsets(place, timeout=IDLE_S)
                    raise lost(topic, partition, at, max(first, at + 1))
                else:
                    problem = str(error)  # a broker may be away for a while: time decides
            if at > before:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > IDLE_S:
                _check_exists(consumer, topic, partition)
                raise Unavailable(f"{topic}-{partition}: no broker gives offset {at} within {IDLE_S:g} s: {problem}")
    finally:
        consumer.close()
    if rows.rows:
        yield rows.take()


def _check_exists(consumer: Any, topic: str, partition: int) -> None:
    """Raise `NotFound` where there is no such partition: a consumer waits for it in silence."""
    from confluent_kafka import KafkaException

    try:
        known = consumer.list_topics(topic, timeout=IDLE_S).topics[topic]
    except KafkaException as error:
        raise Unavailable(f"no broker tells where {topic}-{partition} is: {error}") from error
    if partition not in known.partitions:
        raise NotFound(f"there is no {topic}-{partition}")
