"""Decoding of requests, every API and version, against kio's own decoder.

Input: two bytes that choose API and version, then the body. The oracle: `MalformedRequest` or a request; what was
accepted is what kio reads from the same bytes (where kio accepts them), also when kio has written that again.
"""

from __future__ import annotations

import contextlib
import random
import uuid
from typing import Any

from kio.index import load_request_schema
from kio.serial import entity_reader

from tests.fuzz import samples
from tests.fuzz.base import Mutate, flip
from tests.support import schema
from tidelog.broker.kafka.apis import all_apis
from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire.codec import message_codec, parse_header
from tidelog.broker.kafka.wire.messages import REQUESTS

PRODUCE, FETCH, API_VERSIONS = 0, 1, 18
FIRST_OF_KIO = {PRODUCE: 3}


class Requests:
    """See the module."""

    def __init__(self) -> None:
        self._versions = [
            (api.api_key, version) for api in all_apis() for version in range(api.min_version, api.max_version + 1)
        ]
        self._versions += [(API_VERSIONS, version) for version in range(5)]

    def _chosen(self, data: bytes) -> tuple[int, int]:
        return self._versions[int.from_bytes(data[:2], "big") % len(self._versions)]

    def _valid(self, index: int, rng: random.Random) -> bytes:
        api_key, version = self._versions[index]
        head = index.to_bytes(2, "big")
        if version < FIRST_OF_KIO.get(api_key, 0):
            return head + bytes.fromhex("0001000003e800000001000174000000010000000000000003616263")
        return head + samples.body(samples.entity(load_request_schema(api_key, version), rng))

    def seeds(self) -> list[bytes]:
        """Three requests of each version."""
        rng = random.Random(1)
        return [self._valid(index, rng) for index in range(len(self._versions)) for _ in range(3)]

    def mutate(self, data: bytes, limit: int, rng: random.Random, mutate: Mutate) -> bytes:
        """A new request, a damaged one, or libFuzzer's idea of the body."""
        choice = rng.randrange(4)
        if choice == 0 or len(data) < 3:
            data = self._valid(rng.randrange(len(self._versions)), rng)
        elif choice == 1:
            data = data[:2] + flip(data[2:], rng)
        else:
            data = data[:2] + mutate(data[2:], limit - 2)
        return data[:limit]

    def one(self, data: bytes) -> None:
        """Decode one body."""
        api_key, version = self._chosen(data)
        if version < FIRST_OF_KIO.get(api_key, 0):
            frame = bytearray(samples.header(api_key, version, 7, flexible=False) + data[2:])
            with contextlib.suppress(MalformedRequest):
                message_codec(api_key, version).decode(frame)
            return
        cls = load_request_schema(api_key, version)
        head = samples.header(api_key, version, 7, cls.__flexible__)
        frame = bytearray(head + data[2:])
        assert parse_header(frame) == (api_key, version, 7)
        try:
            _, request = message_codec(api_key, version).decode(frame)
        except MalformedRequest:
            return
        try:
            theirs, _ = entity_reader(cls)(bytes(frame), len(head))
        except Exception:  # noqa: BLE001  # kio is stricter: unknown tags, booleans, instants out of range
            return
        if api_key == PRODUCE:
            _same_produce(version, request, theirs)
        elif api_key == FETCH:
            _same_fetch(version, request, theirs)
        else:
            assert _comparable(request) == _comparable(schema.as_message(theirs, REQUESTS[api_key])), (request, theirs)
            self._again(api_key, version, head, theirs)

    @staticmethod
    def _again(api_key: int, version: int, head: bytes, entity: Any) -> None:
        written = bytearray(head + samples.body(entity))
        _, again = message_codec(api_key, version).decode(written)
        # Not `entity` itself: kio writes durations through a float, which loses a millisecond past 285 years.
        theirs, _ = entity_reader(type(entity))(bytes(written), len(head))
        assert _comparable(again) == _comparable(schema.as_message(theirs, REQUESTS[api_key])), (again, theirs)

    def close(self) -> None:
        """Nothing is held."""


def _comparable(value: Any) -> str:
    return repr(value)  # NaN equals itself there


def _topic_id(value: uuid.UUID | None) -> bytes:
    return bytes(16) if value is None else value.bytes


def _same_produce(version: int, ours: Any, theirs: Any) -> None:
    assert (ours.transactional_id, ours.acks) == (theirs.transactional_id, theirs.acks)
    assert ours.timeout_ms == schema.to_ms(theirs.timeout)
    if version >= 13:
        assert [topic.topic_id for topic in ours.topics] == [_topic_id(topic.topic_id) for topic in theirs.topic_data]
    else:
        assert [topic.name for topic in ours.topics] == [topic.name for topic in theirs.topic_data]
    assert [[(part.index, part.records) for part in topic.partitions] for topic in ours.topics] == [
        [(part.index, part.records) for part in topic.partition_data] for topic in theirs.topic_data
    ]


def _same_fetch(version: int, ours: Any, theirs: Any) -> None:
    assert ours.max_wait_ms == schema.to_ms(theirs.max_wait)
    for name in ("min_bytes", "max_bytes", "isolation_level"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.session_epoch == getattr(theirs, "session_epoch", -1)
    for topic, other in zip(ours.topics, theirs.topics, strict=True):
        assert (topic.topic_id == _topic_id(other.topic_id)) if version >= 13 else (topic.name == other.topic)
        for part, same in zip(topic.partitions, other.partitions, strict=True):
            assert all(getattr(part, name) == getattr(same, name, -1) for name in part._fields)
