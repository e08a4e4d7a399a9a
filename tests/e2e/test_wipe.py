"""Once uploaded, everything survives the loss of the local disk (issue: What it must show, 4)."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource

from tests.e2e.backends import QUIET, create_topic, read_topic, s3_flags
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.batch.batch import Record, build_batch

Row = tuple[int, int, int, bytes | None, bytes]
TOPIC = "kept"
PARTITIONS = 3
PRODUCER_ID_KEY = 22
PRODUCE_KEY = 0


def fill(bootstrap: str) -> None:
    """Records with keys and timestamps of our own, over several codecs; and a committed group."""
    for codec in ("none", "zstd", "lz4"):
        producer = Producer({"bootstrap.servers": bootstrap, "compression.type": codec, **QUIET})
        for n in range(300):
            producer.produce(
                TOPIC, f"{codec} {n} ".encode() + b"v" * (n * 13 % 2000), f"k{n}".encode(),
                partition=n % PARTITIONS, timestamp=1_700_000_000_000 + n,
            )  # fmt: skip
        assert producer.flush(60) == 0
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "kept-group", **QUIET})
    consumer.commit(
        offsets=[TopicPartition(TOPIC, partition, 10 + partition) for partition in range(PARTITIONS)],
        asynchronous=False,
    )
    consumer.close()


def committed(bootstrap: str) -> list[int]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "kept-group", **QUIET})
    try:
        places = consumer.committed([TopicPartition(TOPIC, p) for p in range(PARTITIONS)], timeout=60)
        return [place.offset for place in places]
    finally:
        consumer.close()


def send_idempotent(port: int, producer_id: int | None) -> tuple[int, int]:
    """Send the batch with sequence 0 of an idempotent producer (a new one without an id); → (producer id, offset)."""

    async def run() -> tuple[int, int]:
        async with KafkaClient("127.0.0.1", port) as client:
            the_id = producer_id
            if the_id is None:
                answer = await client.send(PRODUCER_ID_KEY, 4, transactional_id=None, transaction_timeout=60_000)
                the_id = int(answer.producer_id)
            batch = build_batch(
                [Record(0, 1_700_000_000_000, b"key", b"once and only once")],
                producer_id=the_id, producer_epoch=0, base_sequence=0,
            )  # fmt: skip
            from tests.support import schema

            s = schema.request(PRODUCE_KEY, 8)
            partition = s.make("PartitionProduceData", index=0, records=bytes(batch))
            topic = s.make("TopicProduceData", name=TOPIC, partition_data=[partition])
            client.post(
                request_entity(PRODUCE_KEY, 8, transactional_id=None, acks=-1, timeout=30_000, topic_data=[topic])
            )
            response = await client.receive()
            result = response.responses[0].partition_responses[0]
            assert int(result.error_code) == 0, result
            return the_id, int(result.base_offset)

    return asyncio.run(run())


def upload_everything(bootstrap: str) -> None:
    """Ask the broker, over its admin HTTP endpoint, to upload all that is confirmed."""
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    resource = ConfigResource(ConfigResource.Type.BROKER, "1")
    url = admin.describe_configs([resource])[resource].result(30)["tidelog.admin.url"].value
    request = urllib.request.Request(f"{url}/upload", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        json.load(answer)


def check_all(
    process: TidelogProcess, before: list[tuple[int, int, int, bytes | None, bytes]], pid: int, at: int
) -> None:
    assert read_topic(process.bootstrap, TOPIC, PARTITIONS) == before
    assert committed(process.bootstrap) == [10, 11, 12]
    assert send_idempotent(process.port, pid) == (pid, at), "the producer's state was forgotten"
    assert len(read_topic(process.bootstrap, TOPIC, PARTITIONS)) == len(before), "a retry was written again"


@pytest.mark.gate_cases("kill -9")
@pytest.mark.parametrize("end", ["stop", "kill -9"])
def test_all_is_readable_from_the_bucket_after_the_wal_is_deleted(
    end: str, tmp_path: Path, moto_server: S3Server
) -> None:
    flags = s3_flags(moto_server)
    with running(tmp_path / "data", flags) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)
        producer_id, offset = send_idempotent(process.port, None)
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        assert len(before) == 901
        if end == "stop":
            assert process.stop() == 0, process.tail()
        else:
            upload_everything(process.bootstrap)
            process.kill()
        port = process.port
    shutil.rmtree(tmp_path / "data" / "wal")
    with running(tmp_path / "data", flags, port) as process:
        check_all(process, before, producer_id, offset)
        more = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        more.produce(TOPIC, b"life goes on", partition=0)
        assert more.flush(60) == 0
        assert process.stop() == 0, process.tail()


@pytest.mark.long
def test_with_the_wal_in_the_bucket_a_killed_broker_needs_nothing_but_the_controllers_state(
    tmp_path: Path, minio_server: S3Server
) -> None:
    """Nothing is uploaded before the kill: what was acknowledged is in WAL objects alone."""
    flags = [*s3_flags(minio_server), "--wal", "s3", "--set", "upload.age_ms=3600000"]
    with running(tmp_path / "data", flags) as process:
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        fill(process.bootstrap)
        producer_id, offset = send_idempotent(process.port, None)
        before = read_topic(process.bootstrap, TOPIC, PARTITIONS)
        assert len(before) == 901
        process.kill()
        port = process.port
    for left in (tmp_path / "data").iterdir():
        if left.name not in ("controller", "identity.json"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    with running(tmp_path / "data", flags, port) as process:
        check_all(process, before, producer_id, offset)
        upload_everything(process.bootstrap)
        assert process.stop() == 0, process.tail()
    with running(tmp_path / "data", flags, port) as process:  # now out of objects, behind a trimmed WAL
        check_all(process, before, producer_id, offset)
        assert process.stop() == 0, process.tail()
