"""Cutting a byte stream into frames: any chunking gives the same frames, and bounds come before memory."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire.frames import RECEIVE_BUFFER_BYTES, SMALL_FRAME_BYTES, FrameReader, Grant

LARGE = SMALL_FRAME_BYTES + 1


def feed(reader: FrameReader, data: bytes) -> list[bytearray]:
    """As a transport does: fill what the reader offers, as far as the data goes."""
    frames = []
    while data:
        room = reader.buffer()
        part, data = data[: len(room)], data[len(room) :]
        room[: len(part)] = part
        frames += reader.received(len(part))
    return frames


def whole(_capacity: int, _filled: int, size: int) -> int:
    return size


def stream(*frames: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)


sizes = st.integers(1, 50) | st.integers(SMALL_FRAME_BYTES - 2, SMALL_FRAME_BYTES + 2) | st.integers(1, 400_000)


def stepwise(_capacity: int, filled: int, size: int) -> int:
    return min(size, filled + 1000)


@pytest.mark.parametrize("grant", [whole, stepwise])
@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(sizes, min_size=1, max_size=5), chunks=st.lists(st.integers(1, 300_000), max_size=30))
def test_any_chunking_gives_the_same_frames(grant: Grant, lengths: list[int], chunks: list[int]) -> None:
    sent = [bytes([index]) * length for index, length in enumerate(lengths)]
    data = stream(*sent)
    shared = bytearray(RECEIVE_BUFFER_BYTES)
    reader = FrameReader(shared, 1 << 20, grant)
    got = []
    for chunk in [*chunks, len(data)]:
        got += feed(reader, data[:chunk])
        data = data[chunk:]
        shared[:] = b"\xee" * len(shared)  # other connections use it in between
    assert [bytes(frame) for frame in got] == sent
    assert not reader.incomplete


def test_a_frame_byte_by_byte() -> None:
    reader = FrameReader(bytearray(RECEIVE_BUFFER_BYTES), 1 << 20, whole)
    got = [frame for byte in stream(b"hello", b"you") for frame in feed(reader, bytes([byte]))]
    assert got == [b"hello", b"you"]


@pytest.mark.parametrize("size", [0, -1, 1001, 2**31 - 1])
def test_a_size_outside_the_bound_is_refused_at_once(size: int) -> None:
    def never(_capacity: int, _filled: int, _size: int) -> int:
        raise AssertionError("memory was asked for")

    reader = FrameReader(bytearray(RECEIVE_BUFFER_BYTES), 1000, never)
    with pytest.raises(MalformedRequest):
        feed(reader, struct.pack(">i", size))


def test_a_large_frame_waits_for_its_memory() -> None:
    allowed = False

    def grant(capacity: int, _filled: int, size: int) -> int:
        return size if allowed else capacity

    reader = FrameReader(bytearray(RECEIVE_BUFFER_BYTES), 1 << 20, grant)
    data = stream(b"small", b"x" * LARGE)
    assert feed(reader, data[:1000]) == [b"small"]
    assert (reader.blocked, reader.reserved_bytes, reader.unblock()) == (True, 0, False)
    allowed = True
    assert (reader.unblock(), reader.blocked, reader.reserved_bytes) == (True, False, LARGE)
    assert feed(reader, data[1000:]) == [b"x" * LARGE]


def test_the_rest_of_a_large_frame_is_received_in_place() -> None:
    reader = FrameReader(bytearray(RECEIVE_BUFFER_BYTES), 1 << 20, whole)
    data = stream(b"x" * 500_000)
    feed(reader, data[:10])
    assert len(reader.buffer()) == 500_000 - 6
    (frame,) = feed(reader, data[10:])
    assert frame == b"x" * 500_000
