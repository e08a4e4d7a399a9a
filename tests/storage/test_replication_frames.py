"""The frames of a replication connection (`tidelog.storage.replication.frames`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.replication.frames import (
    MAX_BODY_BYTES,
    MAX_EPOCHS,
    PREFIX_BYTES,
    Ack,
    BadFrame,
    FollowerHello,
    Frame,
    Goodbye,
    Records,
    Welcome,
    decode,
    encode,
    read_prefix,
    trimmed_history,
)
from tidelog.storage.wal.epochs import EpochEntry, EpochHistory

I32 = st.integers(-(1 << 31), (1 << 31) - 1)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
EPOCHS = st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 1 << 40)), max_size=40).map(
    lambda steps: tuple(
        EpochEntry(sum(step[0] for step in steps[: index + 1]), sum(step[1] for step in steps[: index + 1]))
        for index in range(len(steps))
    )
)
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(FollowerHello, I32, I32, I64, st.booleans(), I32, I64, I64, I64, st.text(max_size=80), EPOCHS),
    st.builds(Welcome, I32, I64, I64, I64, I64, EPOCHS),
    st.builds(Records, I32, I64, I32, I64, I64, I64, st.binary(max_size=300)),
    st.builds(Ack, I32, I64),
    st.builds(Goodbye, st.integers(0, 65_535), st.text(max_size=80)),
)


def read(data: bytes) -> Frame:
    prefix = read_prefix(data[:PREFIX_BYTES])
    head_end = PREFIX_BYTES + prefix.head_bytes
    return decode(prefix, data[PREFIX_BYTES:head_end], data[head_end : head_end + prefix.body_bytes])


def written(frame: Frame) -> bytes:
    return encode(frame) + (bytes(frame.body) if isinstance(frame, Records) else b"")


@given(FRAMES)
def test_what_is_written_is_read(frame: Frame) -> None:
    assert read(written(frame)) == frame


@given(FRAMES, st.data())
def test_a_changed_bit_is_noticed(frame: Frame, data: st.DataObject) -> None:
    """But for the body of RECORDS, whose records have checksums of their own."""
    good = bytearray(encode(frame))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= 1 << data.draw(st.integers(0, 7))
    body = bytes(frame.body) if isinstance(frame, Records) else b""
    try:
        prefix = read_prefix(bytes(good[:PREFIX_BYTES]))
        head = bytes(good[PREFIX_BYTES:])
        if prefix.head_bytes != len(head) or prefix.body_bytes != len(body):
            return  # a stream would wait for more bytes, and check them
        decode(prefix, head, body)
    except BadFrame:
        return
    raise AssertionError("a damaged frame was taken")


@given(st.binary(min_size=PREFIX_BYTES, max_size=400))
def test_garbage_is_refused_before_anything_is_allocated_for_it(data: bytes) -> None:
    with pytest.raises(BadFrame):
        read(data)


def test_lengths_over_the_limit_are_refused_from_the_first_bytes() -> None:
    prefix = bytearray(encode(Records(1, 0, 1, 0, 0, 0))[:PREFIX_BYTES])
    prefix[8:12] = (MAX_BODY_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(BadFrame, match="over the limit"):
        read_prefix(bytes(prefix))
    prefix = bytearray(encode(Ack(1, 0))[:PREFIX_BYTES])
    prefix[8:12] = (1).to_bytes(4, "big")
    with pytest.raises(BadFrame, match="over the limit"):
        read_prefix(bytes(prefix))
    prefix = bytearray(encode(Ack(1, 0))[:PREFIX_BYTES])
    prefix[2] = 2
    with pytest.raises(BadFrame, match="version 2"):
        read_prefix(bytes(prefix))


def test_epochs_out_of_order_are_refused() -> None:
    bad = Welcome(3, 0, 100, 0, 0, (EpochEntry(2, 0), EpochEntry(2, 50)))
    with pytest.raises(BadFrame, match="out of order"):
        read(encode(bad))


def test_a_long_history_is_sent_without_its_oldest_part() -> None:
    history = EpochHistory((epoch, epoch * 64) for epoch in range(1, MAX_EPOCHS + 10))
    sent = trimmed_history(history)
    assert len(sent) == MAX_EPOCHS
    assert sent[-1] == history.entries[-1]
    frame = Welcome(1, 0, 0, 0, 0, sent)
    assert read(encode(frame)) == frame
