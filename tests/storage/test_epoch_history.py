"""Epoch history (docs/protocols.md, Epoch history) and the epoch file."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.runtime.errors import CorruptData, Fenced
from tidelog.storage.wal.epochs import EpochHistory, decode_epoch_file, encode_epoch_file


@st.composite
def histories(draw: st.DrawFn) -> EpochHistory:
    history = EpochHistory()
    epoch = start = 0
    for _ in range(draw(st.integers(0, 6))):
        history.append(epoch, start)
        epoch += draw(st.integers(1, 1000))
        start += draw(st.integers(0, 1 << 40))
    return history


def test_an_epoch_is_appended_at_the_end_of_the_log() -> None:
    history = EpochHistory()
    assert (history.last_epoch, history.epoch_at(0)) == (-1, -1)
    history.append(3, 10)
    history.append(5, 20)
    assert history.entries == ((3, 10), (5, 20))
    assert [history.epoch_at(offset) for offset in (9, 10, 19, 20, 1 << 50)] == [-1, 3, 3, 5, 5]


def test_an_epoch_in_which_nothing_was_written_is_replaced() -> None:
    history = EpochHistory([(1, 0), (2, 100)])
    history.append(4, 100)
    assert history.entries == ((1, 0), (4, 100))


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_that_is_not_newer_is_fenced(epoch: int) -> None:
    history = EpochHistory([(2, 0)])
    with pytest.raises(Fenced):
        history.append(epoch, 50)
    assert history.entries == ((2, 0),)


def test_truncation_drops_the_epochs_of_which_nothing_is_left() -> None:
    history = EpochHistory([(1, 0), (2, 100), (3, 200)])
    history.truncate_to(200)
    assert history.last_epoch == 2
    history.truncate_to(101)
    assert history.last_epoch == 2
    history.truncate_to(0)
    assert history.entries == ()


def test_trimming_forgets_whole_epochs_but_never_the_last() -> None:
    history = EpochHistory([(1, 0), (2, 100), (3, 200)])
    history.forget_before(99)
    assert list(history.entries) == [(1, 0), (2, 100), (3, 200)]
    history.forget_before(100)
    assert list(history.entries) == [(2, 100), (3, 200)]
    history.forget_before(1 << 50)
    assert list(history.entries) == [(3, 200)]


def test_common_point_needs_equal_epoch_and_equal_start() -> None:
    old_master = EpochHistory([(1, 0), (2, 100)])
    # Epoch 2 wrote 100..150 here; the new master took over at 120 with epoch 3.
    assert old_master.common_point(150, EpochHistory([(1, 0), (2, 100), (3, 120)]), 300) == 120
    # The new master never saw epoch 2.
    assert old_master.common_point(150, EpochHistory([(1, 0), (3, 100)]), 300) == 100
    # Same epoch, other start: the label is not trusted, the epoch before is.
    assert old_master.common_point(150, EpochHistory([(1, 0), (2, 90)]), 300) == 90
    assert old_master.common_point(150, EpochHistory([(7, 0)]), 300) is None
    assert EpochHistory().common_point(0, EpochHistory([(1, 0)]), 10) is None


@given(st.data())
@settings(max_examples=examples(150))
def test_common_point_is_where_the_logs_really_part(data: st.DataObject) -> None:
    """Two logs share a past, then each lives on with epochs of its own: the cut is exactly the shared bytes."""

    def live_on(log: list[int], history: EpochHistory, step: int) -> None:
        epoch = max(history.last_epoch, 0)
        for _ in range(data.draw(st.integers(0, 3))):
            epoch += step
            history.append(epoch, len(log))
            log.extend([epoch] * data.draw(st.integers(0, 5)))

    shared: list[int] = []
    history = EpochHistory()
    live_on(shared, history, 10)
    mine, my_log = history.copy(), shared[: data.draw(st.integers(0, len(shared)))]
    mine.truncate_to(len(my_log))
    live_on(my_log, mine, 3)  # at most 9 on: no epoch of this side is one of the other's
    theirs, their_log = history.copy(), shared.copy()
    live_on(their_log, theirs, 10)
    really = 0
    while really < min(len(my_log), len(their_log)) and my_log[really] == their_log[really]:
        really += 1
    point = mine.common_point(len(my_log), theirs, len(their_log))
    assert (point or 0) == really


@given(histories(), st.integers(0, (1 << 63) - 1))
@settings(max_examples=examples(60))
def test_the_file_is_read_back(history: EpochHistory, durable_offset: int) -> None:
    assert decode_epoch_file(encode_epoch_file(history, durable_offset)) == (history, durable_offset)


@given(histories(), st.data())
@settings(max_examples=examples(60))
def test_any_damage_to_the_file_is_found(history: EpochHistory, data: st.DataObject) -> None:
    raw = bytearray(encode_epoch_file(history, 5))
    with pytest.raises(CorruptData):
        decode_epoch_file(raw[: data.draw(st.integers(0, len(raw) - 1))])
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptData):
        decode_epoch_file(raw)
