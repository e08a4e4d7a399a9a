"""Clients for measurements: raw sockets with negligible cost, and librdkafka.

- `replay_produce` sends one prepared Produce frame repeatedly, with a fixed number in flight on each connection: the
  result is the server's speed, not the client's.
- `Consumer` fetches the next records of one partition and reads only the batches' headers.
- `produce_with_librdkafka` is `confluent_kafka.Producer.produce_batch`: without a Python call per record, librdkafka's
  threads are the limit.

All functions named in `bench._common.background` and `in_process` take `put` as the last argument, which returns the
result.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.support import schema
from tests.support.kafka_client import encode_request, request_entity
from tidelog.batch.batch import HEADER_BYTES, Record, build_batch
from tidelog.broker.kafka.wire import fetch, produce
from tidelog.runtime.memory import keep_freed_memory

Address = tuple[str, int]
PRODUCE_VERSION = 9
FETCH_VERSION = 12
FETCH_BYTES = 1 << 20
"""`max.partition.fetch.bytes` of Java's and librdkafka's consumers."""
MAX_RESPONSE_BYTES = 8 << 20
RECORD_OVERHEAD_BYTES = 12
"""Maximum overhead of a record in batches of a megabyte."""
SENT_AT_A_TIME = 1000
FULL_S = 0.005
"""Pause before a full queue is offered records again: less than a tenth of what it takes to send 64 MiB."""
_HEADER = struct.Struct(">ii")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_OFFSET_MARK = 0x1122334455667788
CLIENT_ID = "bench"


def connect(address: Address) -> socket.socket:
    """A blocking connection without Nagle's delay."""
    one = socket.create_connection(address)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def receive(one: socket.socket, into: memoryview) -> None:
    """Fill `into`."""
    while into:
        count = one.recv_into(into, len(into), socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the server closed the connection")
        into = into[count:]


# --- produce ---------------------------------------------------------------------------------------------------------


def records_a_batch(record_bytes: int, batch_bytes: int) -> int:
    """Return the number of records of that size in a batch."""
    return max(1, (batch_bytes - HEADER_BYTES) // (record_bytes + RECORD_OVERHEAD_BYTES))


def produce_frame(topic: str, partition: int, record_bytes: int, batch_bytes: int) -> bytes:
    """A Produce request (acks=all) with one batch of records of random bytes, all of `record_bytes`; with its size."""
    now_ms = time.time_ns() // 1_000_000
    value = os.urandom(record_bytes)
    count = records_a_batch(record_bytes, batch_bytes)
    batch = build_batch([Record(0, now_ms, None, value)] * count)
    make = schema.request(produce.ProduceRequest.API_KEY, PRODUCE_VERSION).make
    part = make("PartitionProduceData", index=partition, records=batch)
    data = make("TopicProduceData", name=topic, partition_data=[part])
    return encode_request(
        request_entity(
            produce.ProduceRequest.API_KEY,
            PRODUCE_VERSION,
            transactional_id=None,
            acks=-1,
            timeout=30_000,
            topic_data=[data],
        ),
        1,
        CLIENT_ID,
    )


_ERROR_AT = 4 + 5 + 1  # size, correlation id and tags, count of topics; then the name, and the partition's index


def check_produced(response: bytes | memoryview) -> None:
    """Raise `RuntimeError` if a Produce response (with its size) of one partition has an error."""
    at = _ERROR_AT + response[_ERROR_AT] + 1 + 4  # a compact string: its length and 1, then the name
    error = int.from_bytes(response[at : at + 2], "big", signed=True)
    if error:
        raise RuntimeError(f"Produce failed with error {error}")


def read_produced(reader: Any) -> None:
    """Read one response from the buffered file of a connection and check it."""
    head = reader.read(_INT32.size)
    if len(head) < _INT32.size:
        raise ConnectionError("the server closed the connection")
    check_produced(head + reader.read(*_INT32.unpack(head)))


def produce_once(one: socket.socket, scratch: memoryview) -> None:
    """Read one response and check it."""
    receive(one, scratch[:4])
    (size,) = _INT32.unpack_from(scratch)
    receive(one, scratch[4 : 4 + size])
    check_produced(scratch)


def replay_produce(
    address: Address,
    topic: str,
    partitions: int,
    record_bytes: int,
    batch_bytes: int,
    in_flight: int,
    seconds: float,
    put: Callable[[Any], None],
) -> None:
    """Put (payload bytes acknowledged, seconds) of `partitions` connections, each with `in_flight` requests."""
    frames = [produce_frame(topic, index, record_bytes, batch_bytes) for index in range(partitions)]
    totals: list[int] = []
    started = time.perf_counter()

    def send(frame: bytes) -> None:
        scratch = memoryview(bytearray(4096))
        acknowledged = 0
        with connect(address) as one:
            for _ in range(in_flight):
                one.sendall(frame)
            while time.perf_counter() < started + seconds:
                produce_once(one, scratch)
                acknowledged += 1
                one.sendall(frame)
            for _ in range(in_flight):
                produce_once(one, scratch)
                acknowledged += 1
        totals.append(acknowledged)

    run_threads([partial(send, frame) for frame in frames])
    payload = records_a_batch(record_bytes, batch_bytes) * record_bytes
    put((sum(totals) * payload, time.perf_counter() - started))


def run_threads(works: list[Callable[[], None]]) -> None:
    """Run all concurrently; raise the first exception."""
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result()


def produce_with_librdkafka(
    bootstrap: str,
    topic: str,
    record_bytes: int,
    seconds: float,
    settings: dict[str, Any],
    put: Callable[[Any], None],
) -> None:
    """Put (payload bytes acknowledged, seconds). The caller checks the offsets for completeness."""
    from confluent_kafka import KafkaException, Producer

    def failed(error: Any) -> None:
        raise KafkaException(error)

    keep_freed_memory()
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "error_cb": failed, **settings})
    producer.list_topics(topic, 10)
    value = os.urandom(record_bytes)
    sent, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        sent += send_batch(producer, topic, value)
    flush(producer)
    put((sent * record_bytes, time.perf_counter() - started))


def send_batch(producer: Any, topic: str, value: bytes) -> int:
    """Pass `SENT_AT_A_TIME` records to librdkafka at its speed; return their number.

    While its queue is full, this waits: records that are refused cost as much time as those that are taken.
    """
    records = [{"value": value} for _ in range(SENT_AT_A_TIME)]
    done = producer.produce_batch(topic, records)
    while done < SENT_AT_A_TIME:
        producer.poll(FULL_S)
        done += producer.produce_batch(topic, records[done:])
    producer.poll(0)
    return SENT_AT_A_TIME


def flush(producer: Any) -> None:
    """Wait until all is acknowledged, for a minute."""
    producer.flush(60)
    assert len(producer) == 0, f"{len(producer)} records were not acknowledged in time"


def create_topic(
    bootstrap: str, topic: str, partitions: int, config: Mapping[str, str] | None = None, *, replicas: int = 1
) -> None:
    """Create a topic, whose partitions have so many replicas, and wait until it exists. Raises `TimeoutError`."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, replicas, config=dict(config or {}))])[topic].result(30)
    deadline = time.monotonic() + 30
    while (found := len(admin.list_topics(topic, 10).topics[topic].partitions)) < partitions:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{found} of {partitions} partitions of {topic} are known after 30 s")
        time.sleep(0.05)


def records_in(bootstrap: str, topic: str, partitions: int) -> int:
    """Sum of the partitions' high watermarks."""
    from confluent_kafka import Consumer as RdConsumer
    from confluent_kafka import TopicPartition

    consumer = RdConsumer({"bootstrap.servers": bootstrap, "group.id": "bench"})
    try:
        found = [consumer.get_watermark_offsets(TopicPartition(topic, n), 30) for n in range(partitions)]
        return sum(high for _, high in found)
    finally:
        consumer.close()


# --- fetch -----------------------------------------------------------------------------------------------------------


class Consumer:
    """Reads one partition over a separate connection."""

    def __init__(self, address: Address, topic: str, partition: int, max_bytes: int = FETCH_BYTES) -> None:
        self._socket = connect(address)
        self._view = memoryview(bytearray(MAX_RESPONSE_BYTES))
        self._request = bytearray(_fetch_request(topic, partition, max_bytes))
        self._offset_at = self._request.index(_INT64.pack(_OFFSET_MARK))
        # size, header, throttle, error, session | topics, name, partitions, index | error, 3 offsets, aborted, replica
        self._error_at = 4 + 5 + 4 + 2 + 4 + 1 + 1 + len(topic) + 1 + 4
        self._records_at = self._error_at + 2 + 24 + 1 + 4

    def fetch(self, offset: int) -> tuple[int, int]:
        """Fetch from `offset`; return the next offset and the bytes received. Waits up to 500 ms."""
        view = self._view
        _INT64.pack_into(self._request, self._offset_at, offset)
        self._socket.sendall(self._request)
        receive(self._socket, view[:4])
        (size,) = _INT32.unpack_from(view)
        receive(self._socket, view[4 : 4 + size])
        error = int.from_bytes(view[self._error_at : self._error_at + 2], "big", signed=True)
        if error:
            raise RuntimeError(f"Fetch at {offset} failed with error {error}")
        length, at, shift = 0, self._records_at, 0
        while True:
            byte = view[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        length -= 1
        return (_after_last_batch(view, at, at + length) if length > 0 else offset), size + 4

    def find_end(self) -> int:
        """Read from offset 0 to the end and return it, without concurrent writes. Waits 500 ms, so do not time it."""
        offset = 0
        while (after := self.fetch(offset)[0]) != offset:
            offset = after
        return offset

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _after_last_batch(view: memoryview, at: int, end: int) -> int:
    offset = 0
    while at < end:
        (base,) = _INT64.unpack_from(view, at)
        (length,) = _INT32.unpack_from(view, at + 8)
        (delta,) = _INT32.unpack_from(view, at + 23)
        offset = base + delta + 1
        at += 12 + length
    return offset


def _fetch_request(topic: str, partition: int, max_bytes: int) -> bytes:
    make = schema.request(fetch.FetchRequest.API_KEY, FETCH_VERSION).make
    wanted = make(
        "FetchPartition",
        partition=partition,
        fetch_offset=_OFFSET_MARK,
        partition_max_bytes=max_bytes,
        current_leader_epoch=-1,
        last_fetched_epoch=-1,
        log_start_offset=-1,
    )
    return encode_request(
        request_entity(
            fetch.FetchRequest.API_KEY,
            FETCH_VERSION,
            replica_id=-1,
            max_wait=500,
            min_bytes=1,
            max_bytes=50 << 20,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[make("FetchTopic", topic=topic, partitions=[wanted])],
            forgotten_topics_data=[],
            rack_id="",
        ),
        1,
        CLIENT_ID,
    )
