"""Frames out of a stream of bytes (`tidelog.storage.replication.reader`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.test_replication_frames import FRAMES, written
from tidelog.storage.replication.frames import Ack, BadFrame, Frame, Records, encode
from tidelog.storage.replication.reader import SCRATCH_BYTES, ReplicationReader


def feed(reader: ReplicationReader, data: bytes, steps: list[int]) -> list[Frame]:
    """Receive `data`, as much at once as the steps say, and the rest as it fits."""
    found: list[Frame] = []
    at, sizes = 0, iter(steps)
    while at < len(data):
        room = reader.buffer()
        assert len(room) > 0
        size = min(len(room), len(data) - at, next(sizes, len(data)))
        room[:size] = data[at : at + size]
        found += reader.received(size)
        at += size
    return found


def plain(frame: Frame) -> Frame:
    return frame._replace(body=bytes(frame.body)) if isinstance(frame, Records) else frame


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 90), max_size=60))
def test_the_frames_are_those_that_were_sent_however_they_come(frames: list[Frame], steps: list[int]) -> None:
    found = feed(ReplicationReader(), b"".join(written(frame) for frame in frames), steps)
    assert [plain(frame) for frame in found] == frames


@pytest.mark.parametrize("size", [SCRATCH_BYTES - 100, SCRATCH_BYTES, 3 * SCRATCH_BYTES + 1])
def test_a_long_body_is_received_into_a_buffer_of_its_own(size: int) -> None:
    first, second = Records(7, 0, 7, 0, 0, 0, b"x" * size), Records(7, size, 7, 0, 0, 0, b"y" * size)
    reader = ReplicationReader()
    found = feed(reader, written(first) + written(Ack(7, 1)) + written(second), [])
    assert [plain(frame) for frame in found] == [first, Ack(7, 1), second]
    kept = found[0]
    assert isinstance(kept, Records)
    assert bytes(kept.body) == b"x" * size, "the next frame did not overwrite it"
    assert reader.held_bytes == SCRATCH_BYTES


def test_a_body_over_the_limit_is_refused_before_it_is_allocated() -> None:
    reader = ReplicationReader(max_body_bytes=1_000)
    head = encode(Records(7, 0, 7, 0, 0, 0, b"x" * 1_001))
    with pytest.raises(BadFrame, match="1001 bytes is over the limit of 1000"):
        feed(reader, head, [])
    assert reader.held_bytes == SCRATCH_BYTES
