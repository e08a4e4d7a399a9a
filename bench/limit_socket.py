"""The limit of a Kafka server on this machine's sockets: a server that only reads and responds.

    python -m bench.limit_socket [--seconds 3] [--runs 3] [--connections 4] [--batch-bytes 1000000]

A thread per connection receives into a reused buffer, finds the frames by their size and responds to each with prepared
bytes: Produce with success, Fetch with the same megabyte, ApiVersions and Metadata so that librdkafka can start. With
`stored_mb` a Fetch gets one of that many megabytes in turn, which then do not fit in a CPU cache. The server stores
nothing, checks nothing and waits for no disk. `bare_server` runs it in a separate process, so that the same client can
measure it and a broker alternately.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench._clients import FETCH_BYTES, FETCH_VERSION, Address, Consumer, replay_produce, run_threads
from bench._common import Spread, background, in_process, interleaved, quick
from tests.support import schema
from tidelog.batch.batch import Record, build_batch
from tidelog.broker.kafka.wire import fetch, produce
from tidelog.broker.kafka.wire.codec import EncodedBody, message_codec
from tidelog.broker.kafka.wire.fetch import FetchResponse, FetchTopicResponse, PartitionData
from tidelog.broker.kafka.wire.primitives import read_compact_string, skip_tags
from tidelog.broker.kafka.wire.produce import PartitionProduceResponse, ProduceResponse, TopicProduceResponse

TOPIC = "bench"
_METADATA, _API_VERSIONS = 3, 18
_VERSIONS = {
    produce.ProduceRequest.API_KEY: (3, 9),
    fetch.FetchRequest.API_KEY: (4, 12),
    _METADATA: (4, 9),
    _API_VERSIONS: (0, 3),
}
_RECEIVE_BYTES = 1 << 20
_HEAD_BYTES = 192
"""Bytes of a frame that determine the response."""
_INT32 = struct.Struct(">i")


class Answers:
    """The responses of the bare server."""

    def __init__(self, address: Address, partitions: int, topics: Sequence[str], stored_mb: int) -> None:
        self._address = address
        self._partitions = partitions
        self._topics = topics
        self._turns = itertools.cycle([(FETCH_VERSION, number) for number in range(stored_mb)])
        for _ in range(stored_mb):
            self._fetched(*next(self._turns))

    def to(self, head: bytes) -> bytes:
        """Return the whole response to a frame that begins (without its size) with `head`."""
        api_key, version, correlation_id = struct.unpack_from(">hhi", head)
        if api_key == produce.ProduceRequest.API_KEY:
            return self._produced(head, version, correlation_id)
        if api_key == fetch.FetchRequest.API_KEY:
            if version != FETCH_VERSION:
                raise ValueError(f"the bare server takes Fetch v{FETCH_VERSION}, not v{version}")
            return self._fetched(*next(self._turns))
        size, body = self._described(api_key, version)
        return size + _INT32.pack(correlation_id) + body

    @functools.cache  # noqa: B019 — lives as long as its process
    def _described(self, api_key: int, version: int) -> tuple[bytes, bytes]:
        """The bytes before and after the correlation id of a constant response."""
        if api_key == _METADATA:
            response = self._metadata(version)
        elif api_key == _API_VERSIONS:
            response = self._versions(version)
        else:
            raise ValueError(f"the bare server does not serve API {api_key}")
        encoded = b"".join(message_codec(api_key, version).encode(0, EncodedBody(schema.body(response))))
        return encoded[:4], encoded[8:]

    def _produced(self, head: bytes, version: int, correlation_id: int) -> bytes:
        if version != produce.FIRST_FLEXIBLE:
            raise ValueError(f"the bare server takes Produce v{produce.FIRST_FLEXIBLE}, not v{version}")
        (client_bytes,) = struct.unpack_from(">h", head, 8)
        _, at = read_compact_string(head, skip_tags(head, 10 + client_bytes))
        name, at = read_compact_string(head, at + 6 + 1)  # behind acks, timeout and the count of topics
        (index,) = _INT32.unpack_from(head, at + 1)
        body = _produced_body(version, str(name), index)
        return struct.pack(">iib", 5 + len(body), correlation_id, 0) + body

    @functools.cache  # noqa: B019 — lives as long as its process
    def _fetched(self, version: int, number: int) -> bytes:
        """A megabyte in one batch, with the correlation id of the raw client."""
        batch = build_batch([Record(0, 0, None, bytes(FETCH_BYTES - 100))])
        data = PartitionData(0, 0, 1 << 40, 1 << 40, 0, records=[batch])
        response = FetchResponse([FetchTopicResponse(TOPIC, b"", [data])])
        return b"".join(message_codec(fetch.FetchRequest.API_KEY, version).encode(1, response))

    def _versions(self, version: int) -> Any:
        make = schema.response(_API_VERSIONS, version).make
        keys = [make("ApiVersion", api_key=key, min_version=a, max_version=b) for key, (a, b) in _VERSIONS.items()]
        return make("ApiVersionsResponse", error_code=0, throttle_time=0, api_keys=keys)

    def _metadata(self, version: int) -> Any:
        make = schema.response(_METADATA, version).make
        host, port = self._address
        partitions = [
            make(
                "MetadataResponsePartition",
                error_code=0,
                partition_index=index,
                leader_id=1,
                leader_epoch=0,
                replica_nodes=[1],
                isr_nodes=[1],
                offline_replicas=[],
            )
            for index in range(self._partitions)
        ]
        return make(
            "MetadataResponse",
            throttle_time=0,
            brokers=[make("MetadataResponseBroker", node_id=1, host=host, port=port, rack=None)],
            cluster_id="bare",
            controller_id=1,
            topics=[
                make("MetadataResponseTopic", error_code=0, name=name, is_internal=False, partitions=partitions)
                for name in self._topics
            ],
        )


@functools.lru_cache(1 << 14)
def _produced_body(version: int, name: str, index: int) -> bytes:
    out = bytearray()
    outcome = PartitionProduceResponse(index, base_offset=0, log_start_offset=0)
    produce.encode_response(version, ProduceResponse([TopicProduceResponse(name, b"", [outcome])]), out)
    return bytes(out)


def _answer_connection(one: socket.socket, answers: Answers) -> None:
    """Read frames and respond until the client disconnects."""
    buffer = memoryview(bytearray(_RECEIVE_BYTES))
    start = end = 0  # what of the buffer is received and not looked at yet
    skip = 0  # bytes of the current frame that are still to come
    answer = b""
    while True:
        while end - start < skip or not skip:
            if skip:
                skip -= end - start
                start = end = 0
            else:
                found = _cut(buffer, start, end)
                if found is not None:
                    start, size, head = found
                    answer, skip = answers.to(head), size
                    continue
                buffer[: end - start] = bytes(buffer[start:end])
                start, end = 0, end - start
            received = one.recv_into(buffer[end:])
            if received == 0:
                return
            end += received
        start += skip
        skip = 0
        one.sendall(answer)


def _cut(buffer: memoryview, start: int, end: int) -> tuple[int, int, bytes] | None:
    """Return position, size and head of the frame at `start`; None if too few bytes have arrived."""
    if end - start < 4:
        return None
    (size,) = _INT32.unpack_from(buffer, start)
    head_end = start + 4 + min(size, _HEAD_BYTES)
    return None if end < head_end else (start + 4, size, bytes(buffer[start + 4 : head_end]))


def _serve(partitions: int, topics: Sequence[str], stored_mb: int, put: Callable[[Any], None]) -> None:
    """Listen, put the address, and serve until the process is killed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = listener.getsockname()[:2]
    answers = Answers(address, partitions, topics, stored_mb)
    put(address)
    while True:
        one, _ = listener.accept()
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer_quietly, args=(one, answers), daemon=True).start()


def _answer_quietly(one: socket.socket, answers: Answers) -> None:
    with one, contextlib.suppress(ConnectionError):
        _answer_connection(one, answers)


@contextlib.contextmanager
def bare_server(
    partitions: int = 1, cores: set[int] | None = None, topics: Sequence[str] = (TOPIC,), stored_mb: int = 1
) -> Iterator[Address]:
    """Run the server in a separate process; yield its address. Each topic has `partitions` partitions."""
    with background(_serve, partitions, topics, stored_mb, cores=cores, ends=False) as result:
        yield result()


def consume(address: Address, topic: str, partitions: list[int], seconds: float, put: Callable[[Any], None]) -> None:
    """Put (bytes received, seconds) of one consumer per entry, each restarting at the end.

    They do not fetch past the end: a broker would hold such a request for 500 ms, the bare server would not.
    """
    totals: list[int] = []
    finder = Consumer(address, topic, partitions[0])
    end = finder.find_end()
    finder.close()
    started = time.perf_counter()

    def read(partition: int) -> None:
        consumer = Consumer(address, topic, partition)
        offset = total = 0
        while time.perf_counter() < started + seconds:
            after, size = consumer.fetch(offset)
            offset, total = (0 if after >= end else after), total + size
        consumer.close()
        totals.append(total)

    run_threads([functools.partial(read, partition) for partition in partitions])
    put((sum(totals), time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 3.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--batch-bytes", type=int, default=1_000_000)
    args = parser.parse_args()
    with bare_server(args.connections, cores={0}) as address:

        def ingest() -> float:
            load = (address, TOPIC, args.connections, 1024, args.batch_bytes, 5, args.seconds)
            size, seconds = in_process(replay_produce, *load, cores={1})
            return float(size / 1e6 / seconds)

        def serve(consumers: int) -> float:
            size, seconds = in_process(consume, address, TOPIC, [0] * consumers, args.seconds, cores={1})
            return float(size / 1e6 / seconds)

        found = interleaved(args.runs, ingest=ingest, serve_1=lambda: serve(1), serve_10=lambda: serve(10))
    for name, values in found.items():
        print(f"{name:10s} {Spread.of(values).text('MB/s')}", flush=True)


if __name__ == "__main__":
    main()
