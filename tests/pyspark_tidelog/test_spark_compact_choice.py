"""Which planned compactions a run of Spark carries out: it ends under producers, and tries nothing for ever."""

from __future__ import annotations

import pytest

from pyspark_tidelog.jobs.compact_choice import TRIES, CompactionChoice


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ((1, 2), True),
        ((1, 2, 100, 101), True),
        ((99, 100), False),
        ((100, 101), False),
        ((5,), True),
        ((100,), False),
    ],
)
def test_objects_of_after_the_beginning_are_put_together_only_with_older_ones(
    inputs: tuple[int, ...], wanted: bool
) -> None:
    assert CompactionChoice(100).wants(inputs) is wanted


def test_what_the_run_has_written_counts_as_old() -> None:
    choice = CompactionChoice(100)
    assert not choice.wants((110, 111))
    choice.committed([110])
    assert not choice.wants((110, 111))
    assert choice.wants((7, 110))
    choice.committed([111])
    assert choice.wants((110, 111))


def test_the_same_objects_are_tried_a_few_times_and_then_left_alone() -> None:
    choice = CompactionChoice(100)
    for _ in range(TRIES):
        assert choice.wants((1, 2)) and choice.excluded == set()
        choice.begins((1, 2))
        choice.gave_up((1, 2))
    assert not choice.wants((1, 2)) and choice.excluded == {1, 2}
    assert choice.wants((3, 4))


def test_a_damaged_object_is_left_out_at_once_and_its_neighbours_are_not() -> None:
    choice = CompactionChoice(100)
    choice.begins((1, 2, 3))
    choice.gave_up((1, 2, 3), damaged=2)
    assert choice.excluded == {2} and choice.wants((1, 3))
