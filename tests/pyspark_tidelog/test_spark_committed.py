"""Records of aborted transactions are left out, in any interleaving, in any pieces, also where markers are not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_tidelog import committed
from pyspark_tidelog.committed import CommittedRows
from pyspark_tidelog.decode import RecordDecoder
from tidelog.batch.batch import ControlType, build_batch, build_control_batch, set_base_offset
from tidelog.batch.codec import Record
from tidelog.batch.errors import CorruptRecord

PRODUCERS = 3


class Log(NamedTuple):
    batches: list[tuple[int, int, bytes]]
    """First offset, the one behind the last, bytes; also those of markers."""
    wanted: list[int]
    """Offsets of records that are not aborted."""


def marker(kind: ControlType, producer: int, offset: int) -> bytes:
    built = bytearray(
        build_control_batch(kind, producer_id=producer, producer_epoch=0, coordinator_epoch=0, timestamp=5)
    )
    set_base_offset(built, offset)
    return bytes(built)


def log_of(steps: Sequence[tuple[int, int, bool]]) -> Log:
    """A step is a batch of `size` records of a producer (the last one has no transactions), or, of none, a marker."""
    found, wanted, at = Log([], []), set[int](), 0
    is_open: dict[int, list[range]] = {}

    def end(producer: int, offset: int, *, is_committed: bool) -> None:
        if is_committed:
            wanted.update(each for some in is_open[producer] for each in some)
        del is_open[producer]
        kind = ControlType.COMMIT if is_committed else ControlType.ABORT
        found.batches.append((offset, offset + 1, marker(kind, producer, offset)))

    for producer, size, is_committed in steps:
        if size == 0:
            if producer in is_open:
                end(producer, at, is_committed=is_committed)
                at += 1
            continue
        built = build_batch(
            [Record(0, 5, None, b"v")] * size,
            base_offset=at,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=0,
            transactional=producer < PRODUCERS,
        )
        found.batches.append((at, at + size, built))
        if producer < PRODUCERS:
            is_open.setdefault(producer, []).append(range(at, at + size))
        else:
            wanted.update(range(at, at + size))
        at += size
    for number, producer in enumerate(list(is_open)):
        end(producer, at, is_committed=number % 2 == 0)
        at += 1
    return Log(found.batches, sorted(wanted))


STEPS = st.lists(st.tuples(st.integers(0, PRODUCERS), st.integers(0, 3), st.booleans()), min_size=1, max_size=20)


@given(STEPS, st.data())
def test_the_rows_of_any_part_are_those_of_no_aborted_transaction(
    steps: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    log = log_of(steps)
    last = max((end for _, end, _ in log.batches), default=1)
    start = data.draw(st.integers(0, last - 1))
    end = data.draw(st.integers(start + 1, last))
    asked: list[Sequence[range]] = []

    def ask(batches: Sequence[range]) -> bool:
        asked.append(batches)
        told = {each in log.wanted for some in batches for each in some}
        assert len(told) == 1, "batches of one transaction"
        return told.pop()

    rows = CommittedRows(RecordDecoder("t", 0), ask)
    found, at = [], start
    for first, behind, batch in log.batches:
        if first < end and behind > start:
            at = rows.add(batch, at, end)
            assert at == min(behind, end)
            found += list(rows.full())
    found += list(rows.rest())
    offsets = [each for part in found for each in part.column("offset").to_pylist()]
    assert offsets == [each for each in log.wanted if start <= each < end]
    if end == last:
        assert not asked, "all markers were read"


def test_what_is_held_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "HELD_BYTES", 500)
    log = log_of([(0, 3, True)] * 30)
    asked: list[Sequence[range]] = []

    def ask(batches: Sequence[range]) -> bool:
        asked.append(batches)
        return True

    rows = CommittedRows(RecordDecoder("t", 0), ask)
    at = 0
    for _, _, batch in log.batches:
        at = rows.add(batch, at, 91)
        list(rows.full())
    assert len(asked) >= 4
    assert max(map(len, asked)) < 10
    assert [each for part in rows.rest() for each in part.column("offset").to_pylist()] == list(range(90))


def test_a_marker_that_is_damaged_decides_nothing() -> None:
    rows = CommittedRows(RecordDecoder("t", 0), lambda _batches: True)
    damaged = bytearray(marker(ControlType.ABORT, 1, 7))
    damaged[-3] ^= 1
    with pytest.raises(CorruptRecord, match="control batch 7"):
        rows.add(bytes(damaged), 0, 100)
