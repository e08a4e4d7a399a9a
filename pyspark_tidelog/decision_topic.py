"""The log of a query's decisions, as a topic of one partition whose records time does not delete.

Entry: `DecisionTopic`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark_tidelog.cluster import retried
from pyspark_tidelog.decisions import Decisions, Query
from tidelog.runtime.errors import InvalidInput, Unavailable

logger = logging.getLogger(__name__)

BUDGET_S = 120.0
"""How long a read or an append waits for brokers that are away, as in a failover (rule 11)."""
ANSWER_S = 30.0
MAX_RECORD_BYTES = 1_000_000
"""A decision has some 40 bytes for each task."""
MOST = 10_000
"""Records that are taken at once; without trouble there are two."""
_CONFIG = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}


class DecisionTopic:
    """See `DecisionLog`. `settings` are librdkafka's."""

    def __init__(self, query: Query, settings: Mapping[str, str], budget_s: float = BUDGET_S) -> None:
        self._topic = query.topic
        self._settings = {"log_level": "0", **settings}
        self._budget_s = budget_s

    def append(self, record: bytes) -> Decisions:
        """See `DecisionLog.append`."""
        from confluent_kafka import KafkaError, Message, Producer

        if len(record) > MAX_RECORD_BYTES:
            raise InvalidInput(
                f"a decision of {len(record)} bytes: the micro-batch has too many tasks", hint="coalesce"
            )
        self._make()
        told: list[tuple[KafkaError | None, int]] = []

        def hear(error: KafkaError | None, message: Message) -> None:
            told.append((error, message.offset() or 0))

        timeout_ms = round(self._budget_s * 1_000)
        # Not idempotent: a record that is there twice counts once, and to get a producer id takes half a second.
        more = {"acks": "all", "linger.ms": 0, "delivery.timeout.ms": timeout_ms}
        producer: Any = Producer({**self._settings, **more})
        producer.produce(self._topic, record, partition=0, on_delivery=hear)
        producer.flush(self._budget_s + ANSWER_S)
        if not told or told[0][0] is not None:
            why = told[0][0] if told else "no answer"
            raise Unavailable(f"a decision was not acknowledged in topic {self._topic}: {why}")
        offset = told[0][1]
        return retried(lambda: Decisions(self._records(offset + 1)), self._budget_s)

    def read(self) -> Decisions:
        """See `DecisionLog.read`."""
        return retried(lambda: Decisions(self._records(0)), self._budget_s)

    def trim(self, before: int) -> None:
        """See `DecisionLog.trim`."""
        from confluent_kafka import KafkaException, TopicPartition

        if not before:
            return
        admin = self._admin()  # without it its answers do not come
        asked = admin.delete_records([TopicPartition(self._topic, 0, before)], request_timeout=ANSWER_S)
        try:
            for future in asked.values():
                future.result(ANSWER_S)
        except (KafkaException, TimeoutError) as error:  # the next commit does it
            logger.warning("topic %s is not trimmed: %s", self._topic, error)

    def _admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        settings: Any = self._settings
        return AdminClient(settings)

    def _make(self) -> None:
        """Create the topic, if it does not exist."""
        retried(self._make_once, self._budget_s)

    def _make_once(self) -> None:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        with self._consumer() as consumer:
            if self._is_there(consumer):
                return
        wanted = NewTopic(self._topic, num_partitions=1, config=_CONFIG)
        admin = self._admin()
        try:
            admin.create_topics([wanted], request_timeout=ANSWER_S)[self._topic].result(ANSWER_S)
        except (KafkaException, TimeoutError) as error:
            told = error.args[0] if isinstance(error, KafkaException) else None
            if told is None or told.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise Unavailable(f"topic {self._topic} cannot be created: {error}") from error

    @contextlib.contextmanager
    def _consumer(self) -> Iterator[Any]:
        """A consumer of all records. Raises `Unavailable` for what it does."""
        from confluent_kafka import Consumer, KafkaException

        more = {
            "group.id": "tidelog-spark",  # the client wants one; nothing is committed
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_uncommitted",
            "allow.auto.create.topics": False,
        }
        consumer = Consumer({**self._settings, **more})
        try:
            yield consumer
        except KafkaException as error:
            raise Unavailable(f"topic {self._topic} cannot be read: {error}") from error
        finally:
            consumer.close()

    def _is_there(self, consumer: Any) -> bool:
        known = consumer.list_topics(self._topic, timeout=ANSWER_S).topics.get(self._topic)
        return known is not None and bool(known.partitions)

    def _records(self, end: int) -> list[tuple[int, bytes]]:
        """Return all records up to the end of the log, which is not before `end`. Raises `Unavailable`."""
        from confluent_kafka import TopicPartition

        with self._consumer() as consumer:
            if self._is_there(consumer):
                return self._consume(consumer, TopicPartition(self._topic, 0), end)
        if end:
            raise Unavailable(f"topic {self._topic} is not there yet")
        return []

    def _consume(self, consumer: Any, place: Any, end: int) -> list[tuple[int, bytes]]:
        first, last = consumer.get_watermark_offsets(place, timeout=ANSWER_S, cached=False)
        last = max(last, end)
        if first >= last:
            return []
        place.offset = first
        consumer.assign([place])
        found: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + ANSWER_S
        while not found or found[-1][0] < last - 1:
            if time.monotonic() > deadline:
                raise Unavailable(f"topic {self._topic} was not read up to {last} within {ANSWER_S:g} s")
            for message in consumer.consume(min(MOST, last - (found[-1][0] + 1 if found else first)), 1.0):
                if message.error() is not None:
                    raise Unavailable(f"topic {self._topic} cannot be read: {message.error()}")
                found.append((message.offset(), message.value() or b""))
        return found
