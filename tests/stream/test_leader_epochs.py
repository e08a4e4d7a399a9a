"""Leader epochs: which epoch wrote what, and where it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.stream.leader_epochs import LeaderEpochs


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    epochs = LeaderEpochs([(2, 0), (5, 10), (6, 30)])
    assert epochs.end_offset(2, 40) == (2, 10)
    assert epochs.end_offset(5, 40) == (5, 30)
    assert epochs.end_offset(6, 40) == (6, 40)


def test_the_largest_epoch_not_above_the_asked_one_answers() -> None:
    epochs = LeaderEpochs([(2, 0), (5, 10), (9, 30)])
    assert epochs.end_offset(4, 40) == (2, 10)
    assert epochs.end_offset(8, 40) == (5, 30)


def test_unknown_epochs_answer_minus_one() -> None:
    assert LeaderEpochs().end_offset(0, 7) == (-1, -1)
    epochs = LeaderEpochs([(2, 0)])
    assert epochs.end_offset(3, 7) == (-1, -1)
    assert epochs.end_offset(-1, 7) == (-1, -1)


def test_an_epoch_older_than_all_known_ends_at_the_first_start() -> None:
    epochs = LeaderEpochs([(2, 0), (5, 10), (6, 30)])
    epochs.truncate_start(12)
    assert epochs.entries() == [(5, 12), (6, 30)]
    assert epochs.end_offset(2, 40) == (2, 12)


def test_an_epoch_in_which_nothing_was_written_is_replaced() -> None:
    epochs = LeaderEpochs([(1, 0), (2, 10)])
    assert epochs.assign(3, 10)
    assert epochs.entries() == [(1, 0), (3, 10)]
    assert not epochs.assign(3, 20)
    assert not epochs.assign(2, 20)


def test_epoch_at_an_offset() -> None:
    epochs = LeaderEpochs([(1, 5), (4, 10)])
    assert [epochs.epoch_at(offset) for offset in (4, 5, 9, 10, 99)] == [-1, 1, 1, 4, 4]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000)), max_size=30), st.integers(0, 1000))
def test_epochs_and_starts_always_grow_and_snapshots_round_trip(entries: list[tuple[int, int]], cut: int) -> None:
    epochs = LeaderEpochs()
    start = 0
    for epoch, step in entries:
        start += step
        epochs.assign(epoch, start)
    epochs.truncate_start(cut)
    found = epochs.entries()
    assert found == sorted(found)
    assert len({epoch for epoch, _ in found}) == len(found) == len({at for _, at in found})
    assert LeaderEpochs.decode(epochs.encode()).entries() == found
