"""A benchmark whose requests are refused measures how fast a server refuses, and ends with an error instead."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from bench import partitions, produce_requests
from bench._clients import Address, replay_produce
from bench.limit_socket import TOPIC
from tidelog.broker.kafka.wire.produce import (
    PartitionProduceResponse,
    ProduceResponse,
    TopicProduceResponse,
    encode_response,
)

NOT_LEADER = 6


def refusal() -> bytes:
    """A whole Produce response."""
    body = bytearray()
    refused = TopicProduceResponse(TOPIC, b"", [PartitionProduceResponse(0, NOT_LEADER)])
    encode_response(9, ProduceResponse([refused]), body)
    return (5 + len(body)).to_bytes(4, "big") + (1).to_bytes(4, "big") + bytes(1) + bytes(body)


def refuse_all(one: socket.socket) -> None:
    with one, one.makefile("rb") as requests, suppress(ConnectionError):
        while size := requests.read(4):
            requests.read(int.from_bytes(size, "big"))
            one.sendall(refusal())


@pytest.fixture
def refusing() -> Iterator[Address]:
    """A server that refuses every Produce request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=refuse_all, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[:2]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    listener.close()


def test_prepared_requests_to_many_partitions_have_to_be_taken(refusing: Address) -> None:
    with pytest.raises(RuntimeError, match="error 6"):
        partitions.produce_raw(refusing, None, partitions.raw_frames([(TOPIC, 0)], records=1), 0.1)


def test_requests_of_one_record_have_to_be_taken(refusing: Address) -> None:
    load = argparse.Namespace(connections=2, in_flight=2, partitions=1, value_bytes=10, requests=40)
    with pytest.raises(RuntimeError, match="error 6"):
        produce_requests.send_requests(refusing, load, lambda _found: None)


def test_replayed_requests_have_to_be_taken(refusing: Address) -> None:
    with pytest.raises(RuntimeError, match="error 6"):
        replay_produce(refusing, TOPIC, 1, 10, 100, 1, 0.1, lambda _found: None)
