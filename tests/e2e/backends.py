"""What the end-to-end tests share: flags for an S3 server, a faulty proxy in a thread, and small Kafka helpers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.clients import value_of, wait_until
from tests.support.s3_servers import S3Server, new_bucket
from tidelog.chaos.faulty_s3 import FaultyS3

QUIET = {"log_level": 0}


def s3_flags(server: S3Server, bucket: str = "") -> list[str]:
    """The flags that point `tidelog up` at a bucket of its own on `server`."""
    return [
        *("--s3-endpoint", server.endpoint, "--bucket", bucket or new_bucket()),
        *("--set", f"s3.access_key_id={server.access_key_id}"),
        *("--set", f"s3.secret_access_key={server.secret_access_key}"),
    ]


@contextlib.contextmanager
def faulty_proxy(server: S3Server) -> Iterator[FaultyS3[S3Server]]:
    """A `FaultyS3` before `server`, on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    started: Future[FaultyS3[S3Server]] = Future()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with FaultyS3(server) as proxy:
            started.set_result(proxy)
            await stopping.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield started.result(30)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30)
        loop.close()


def create_topic(bootstrap: str, topic: str, partitions: int = 1, **configs: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    admin.create_topics([NewTopic(topic, num_partitions=partitions, config=configs)])[topic].result(60)


def read_topic(bootstrap: str, topic: str, partitions: int = 1) -> list[tuple[int, int, int, bytes | None, bytes]]:
    """Everything in a topic: (partition, offset, timestamp, key, value), each partition in offset order."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False, "check.crcs": True, **QUIET}
    )
    found: list[tuple[int, int, int, bytes | None, bytes]] = []
    try:
        for partition in range(partitions):
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=60)
            wanted = high - low
            mine: list[tuple[int, int, int, bytes | None, bytes]] = []
            consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])

            def arrived(
                mine: list[tuple[int, int, int, bytes | None, bytes]] = mine, wanted: int = wanted, at: int = partition
            ) -> bool:
                for message in consumer.consume(5000, 0.2) if len(mine) < wanted else []:
                    assert message.error() is None, message.error()
                    offset = message.offset()
                    assert offset is not None
                    mine.append((at, offset, message.timestamp()[1], message.key(), value_of(message)))
                return len(mine) >= wanted

            wait_until(arrived, f"{topic}-{partition} is readable from {low} to {high}")
            found += mine
    finally:
        consumer.close()
    return found
