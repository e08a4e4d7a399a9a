"""The marks of a replica in the epoch file (docs/formats/wal.md)."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.test_epoch_history import histories
from tests.support.examples import examples
from tidelog.runtime.errors import CorruptData
from tidelog.storage.wal.epochs import (
    NO_MARKS,
    NOTHING_OWN,
    EpochHistory,
    ReplicaMarks,
    decode_epoch_file,
    decode_marks,
    encode_epoch_file,
)

INT64 = (1 << 63) - 1


@st.composite
def files(draw: st.DrawFn) -> tuple[EpochHistory, int, ReplicaMarks]:
    durable = draw(st.integers(0, INT64))
    marks = ReplicaMarks(
        draw(st.integers(-1, (1 << 31) - 1)),
        draw(st.one_of(st.just(NOTHING_OWN), st.integers(0, INT64))),
        draw(st.integers(-1, INT64)),
        draw(st.integers(0, durable)),
    )
    return draw(histories()), durable, marks


@given(files())
@settings(max_examples=examples(100))
def test_the_marks_are_read_back(file: tuple[EpochHistory, int, ReplicaMarks]) -> None:
    history, durable, marks = file
    data = encode_epoch_file(history, durable, marks)
    assert decode_epoch_file(data) == (history, durable) and decode_marks(data) == marks
    assert struct.unpack_from(">H", data, 4)[0] == (1 if marks == NO_MARKS else 2)


@given(histories(), st.integers(0, INT64))
@settings(max_examples=examples(50))
def test_a_file_without_marks_is_of_version_1_and_has_the_defaults(history: EpochHistory, durable: int) -> None:
    data = encode_epoch_file(history, durable)
    assert data == encode_epoch_file(history, durable, ReplicaMarks())
    assert (data[4:6], len(data)) == (b"\x00\x01", 20 + 12 * len(history.entries) + 4)
    assert decode_marks(data) == NO_MARKS == (-1, 0, -1, 0)


@given(files(), st.data())
@settings(max_examples=examples(100))
def test_any_damage_is_found(file: tuple[EpochHistory, int, ReplicaMarks], data: st.DataObject) -> None:
    raw = bytearray(encode_epoch_file(*file))
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    for broken in (cut, raw):
        with pytest.raises(CorruptData):
            decode_epoch_file(broken)
        with pytest.raises(CorruptData):
            decode_marks(broken)


@pytest.mark.parametrize(
    ("at", "layout", "value"), [(20, ">i", -2), (24, ">q", -1), (32, ">q", -2), (40, ">q", -1), (40, ">q", 101)]
)
def test_a_value_out_of_range_is_refused(at: int, layout: str, value: int) -> None:
    data = bytearray(encode_epoch_file(EpochHistory([(1, 0)]), 100, ReplicaMarks(promised_epoch=3)))
    struct.pack_into(layout, data, at, value)
    struct.pack_into(">I", data, len(data) - 4, crc32c(data[:-4]))
    with pytest.raises(CorruptData):
        decode_marks(data)


def test_a_later_version_is_refused_by_name() -> None:
    data = bytearray(encode_epoch_file(EpochHistory(), 0, ReplicaMarks(promised_epoch=3)))
    struct.pack_into(">H", data, 4, 3)
    struct.pack_into(">I", data, len(data) - 4, crc32c(data[:-4]))
    with pytest.raises(CorruptData, match="version 3"):
        decode_marks(data)


def test_only_the_confirm_offset_does_not_make_a_replica() -> None:
    assert not ReplicaMarks(confirm_offset=5).is_replica
    for marks in (ReplicaMarks(promised_epoch=0), ReplicaMarks(own_from=1), ReplicaMarks(cut_at=0)):
        assert marks.is_replica


def test_an_epoch_is_found_by_a_byte_of_it() -> None:
    history = EpochHistory([(2, 10), (5, 30)])
    assert [history.entry_at(offset) for offset in (9, 10, 29, 30)] == [None, (2, 10), (2, 10), (5, 30)]
    assert [history.end_after(offset, 50) for offset in (9, 10, 29, 30, 49)] == [10, 30, 30, 50, 50]
