"""The framing of our own RPC."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.runtime.errors import CorruptData
from tidelog.runtime.wire import HEADER_BYTES, FrameDecoder, FrameTooLarge, encode_frame

FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=200)), max_size=8)


@given(frames=FRAMES, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_frames_survive_any_cut_of_the_byte_stream(frames: list[tuple[int, bytes]], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(kind, payload) for kind, payload in frames)
    decoder = FrameDecoder()
    received: list[tuple[int, bytes]] = []
    position, turn = 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        received += [(frame.kind, frame.payload) for frame in decoder.feed(stream[position : position + size])]
        position += size
        turn += 1
    assert received == frames
    assert decoder.buffered_bytes == 0


@given(payload=st.binary(max_size=64), bit=st.integers(0, 8 * (HEADER_BYTES + 64) - 1))
@settings(max_examples=examples(150), deadline=None)
def test_a_flipped_bit_never_yields_a_wrong_frame(payload: bytes, bit: int) -> None:
    damaged = bytearray(encode_frame(7, payload))
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    decoder = FrameDecoder(max_bytes=1024)
    try:
        assert decoder.feed(damaged) == []  # a longer length: waits for more, within the limit
        with pytest.raises(CorruptData):
            decoder.feed(bytes(2048))
    except (CorruptData, FrameTooLarge):
        pass


def test_a_length_over_the_limit_is_refused_from_the_header_alone() -> None:
    decoder = FrameDecoder(max_bytes=100)
    with pytest.raises(FrameTooLarge):
        decoder.feed(struct.pack(">HBBII", 0x544C, 1, 1, 101, 0))
    with pytest.raises(FrameTooLarge):
        encode_frame(1, bytes(101), max_bytes=100)


def test_a_stranger_and_another_version_are_refused_by_name() -> None:
    with pytest.raises(CorruptData, match="does not use Tidelog"):
        FrameDecoder().feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(CorruptData, match="version is 9"):
        FrameDecoder().feed(struct.pack(">HBBII", 0x544C, 9, 1, 0, 0))
