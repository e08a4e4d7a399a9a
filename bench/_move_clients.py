"""The clients of `bench.partition_moves`, each in a separate process: they write or read and record the times.

    python -m bench._move_clients '{"role": "produce", "client": "aiokafka", …}'

The process prints `ready`, works until a line arrives on its standard input, and then writes its results to the file
`out`: for each of its partitions the monotonic times (one clock for all processes of a machine) of acknowledgements or
arrivals, and errors. Record n of a partition has n as its first 8 bytes, and the partition has one producer: an
acknowledged offset must equal the number, and a reader must receive the numbers from 0 on, in order, once each.

`back_off_ms` 0 keeps each client's default back-off: librdkafka 100 ms for a producer and 500 ms for a consumer,
aiokafka 100 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer
from confluent_kafka import TopicPartition as ConfluentPartition

LINGER_MS = 2
TICK_S = 0.02
"""Sleep of a producer between batches of due records."""

FETCH_BYTES, FETCH_WAIT_MS = 64 << 10, 5
"""A consumer polls for 5 ms or 16 records, not for single records."""


class Job(msgspec.Struct, kw_only=True):
    """The task of a process."""

    role: str
    """`produce` or `consume`."""
    client: str
    """`confluent` or `aiokafka`."""
    bootstrap: str
    topic: str
    partitions: list[int]
    rate_bytes: float
    """Rate of a producer, over all its partitions."""
    record_bytes: int
    back_off_ms: int
    out: str


class Seen:
    """The times and the errors of one process."""

    def __init__(self, job: Job) -> None:
        self._out = Path(job.out)
        self.times: dict[int, list[float]] = {each: [] for each in job.partitions}
        self.faults: list[str] = []

    def note(self, partition: int, number: int, offset: int) -> None:
        """Record that `number` was acknowledged or has arrived at `offset`, which must be next and equal."""
        due = len(self.times[partition])
        if not number == offset == due and len(self.faults) < 20:
            self.faults.append(f"partition {partition}: record {number} at offset {offset}, {due} was due")
        self.times[partition].append(time.monotonic())

    def save(self) -> None:
        self._out.write_text(json.dumps({"times": self.times, "faults": self.faults}))


def _records(job: Job) -> Iterator[tuple[float, int, int, bytes]]:
    """`(seconds from the start, partition, number, value)`, partition after partition, at the rate."""
    payload = bytes(job.record_bytes - 8)
    step_s = job.record_bytes / job.rate_bytes
    for turn in itertools.count():
        number = turn // len(job.partitions)
        partition = job.partitions[turn % len(job.partitions)]
        yield turn * step_s, partition, number, number.to_bytes(8, "big") + payload


def _stop_line() -> threading.Event:
    stopping = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        stopping.set()

    threading.Thread(target=wait, daemon=True).start()
    print("ready", flush=True)
    return stopping


def produce_confluent(job: Job, seen: Seen) -> None:
    """Produce with librdkafka."""
    config: dict[str, Any] = {"bootstrap.servers": job.bootstrap, "enable.idempotence": True, "log_level": 0}
    config |= {"linger.ms": LINGER_MS, "queue.buffering.max.messages": 1_000_000}
    if job.back_off_ms:
        config["retry.backoff.ms"] = job.back_off_ms
    producer = Producer(config)

    def acked(error: KafkaError | None, message: Message) -> None:
        value, partition, offset = message.value(), message.partition(), message.offset()
        if error is not None or value is None or partition is None or offset is None:
            seen.faults.append(str(error))
            return
        seen.note(partition, int.from_bytes(bytes(value)[:8], "big"), offset)

    stopping, began = _stop_line(), time.monotonic()
    for due, partition, _, value in _records(job):
        if due > time.monotonic() - began:
            until = due + TICK_S
            while not stopping.is_set() and (left := began + until - time.monotonic()) > 0:
                producer.poll(max(left, 0.001))  # librdkafka counts in ms: a shorter time spins
        if stopping.is_set():
            break
        producer.produce(job.topic, value, partition=partition, on_delivery=acked)
    if producer.flush(60):
        seen.faults.append("not everything was acknowledged")


def consume_confluent(job: Job, seen: Seen) -> None:
    """Consume with librdkafka."""
    config: dict[str, Any] = {"bootstrap.servers": job.bootstrap, "group.id": "bench", "log_level": 0}
    if job.back_off_ms:
        config |= {"retry.backoff.ms": job.back_off_ms, "fetch.error.backoff.ms": job.back_off_ms}
    config |= {"fetch.min.bytes": FETCH_BYTES, "fetch.wait.max.ms": FETCH_WAIT_MS}
    consumer = Consumer({**config, "enable.auto.commit": False})
    consumer.assign([ConfluentPartition(job.topic, each, OFFSET_BEGINNING) for each in job.partitions])
    stopping = _stop_line()
    quiet_since = 0.0
    while True:
        messages = consumer.consume(1_000, 0.005)
        for message in messages:
            value, partition, offset = message.value(), message.partition(), message.offset()
            if message.error() is None and value is not None and partition is not None and offset is not None:
                seen.note(partition, int.from_bytes(bytes(value)[:8], "big"), offset)
        now = time.monotonic()
        quiet_since = now if messages or not quiet_since else quiet_since
        if stopping.is_set() and now - quiet_since > 2.0:
            break
    consumer.close()


async def produce_aiokafka(job: Job, seen: Seen) -> None:
    """Produce with aiokafka."""
    options: dict[str, Any] = {"retry_backoff_ms": job.back_off_ms} if job.back_off_ms else {}
    producer = AIOKafkaProducer(
        bootstrap_servers=job.bootstrap, enable_idempotence=True, linger_ms=LINGER_MS, acks="all", **options
    )
    await producer.start()
    pending: set[asyncio.Future[Any]] = set()
    numbers: dict[asyncio.Future[Any], int] = {}

    def acked(future: asyncio.Future[Any]) -> None:
        pending.discard(future)
        number = numbers.pop(future)
        if future.exception() is not None:
            seen.faults.append(repr(future.exception()))
            return
        found = future.result()
        seen.note(found.partition, number, found.offset)

    stopping, began = _stop_line(), time.monotonic()
    for due, partition, number, value in _records(job):
        if due > time.monotonic() - began:
            await asyncio.sleep(began + due + TICK_S - time.monotonic())
        if stopping.is_set():
            break
        future = await producer.send(job.topic, value, partition=partition)
        pending.add(future)
        numbers[future] = number
        future.add_done_callback(acked)
    await producer.flush()
    if pending:
        await asyncio.wait(pending, timeout=60)
    await producer.stop()


async def consume_aiokafka(job: Job, seen: Seen) -> None:
    """Consume with aiokafka."""
    options: dict[str, Any] = {"retry_backoff_ms": job.back_off_ms} if job.back_off_ms else {}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=job.bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_min_bytes=FETCH_BYTES,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        **options,
    )
    await consumer.start()
    consumer.assign([TopicPartition(job.topic, each) for each in job.partitions])
    stopping = _stop_line()
    quiet_since = time.monotonic()
    while not stopping.is_set() or time.monotonic() - quiet_since < 2.0:
        found = await consumer.getmany(timeout_ms=20)
        for where, messages in found.items():
            quiet_since = time.monotonic()
            for message in messages:
                seen.note(where.partition, int.from_bytes(message.value[:8], "big"), message.offset)
    await consumer.stop()


def main() -> None:
    """Run the job given on the command line."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # it warns of each retry
    job = msgspec.json.decode(sys.argv[1], type=Job)
    seen = Seen(job)
    if job.client == "confluent":
        (produce_confluent if job.role == "produce" else consume_confluent)(job, seen)
    else:
        asyncio.run((produce_aiokafka if job.role == "produce" else consume_aiokafka)(job, seen))
    seen.save()


if __name__ == "__main__":
    main()
