"""Record batches that no Kafka client of Python would make, written as they are.

Entry: `write_batch`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from confluent_kafka.admin import AdminClient

from tests.support import schema
from tests.support.kafka_client import KafkaClient
from tidelog.batch.batch import Record

UNREADABLE = Record(0, 1_000, b"k", b"v", ((b"\xff\xfe".decode(errors="surrogateescape"), b"h"),))
"""A header's name is no UTF-8: Kafka's protocol has any bytes there, and librdkafka and Go write them."""


def write_batch(bootstrap: str, topic: str, batch: bytes) -> None:
    """Write one batch to partition 0 of a topic, at its leader."""
    metadata = AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=60)
    leader = metadata.brokers[metadata.topics[topic].partitions[0].leader]
    host = str(leader.host)

    async def write() -> Any:
        make = schema.request(0, 9).make
        data = (make("PartitionProduceData", index=0, records=batch),)
        topics = (make("TopicProduceData", name=topic, partition_data=data),)
        async with KafkaClient(host, leader.port) as client:
            return await client.send(0, 9, transactional_id=None, acks=-1, timeout=10_000, topic_data=topics)

    assert asyncio.run(write()).responses[0].partition_responses[0].error_code == 0
