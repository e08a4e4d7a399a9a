"""`DiskWatch`: a disk that does nothing while something waits for it, and none of the disks that are only slow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.replication.disk_watch import DiskWatch

LOOKS = 4


def make() -> DiskWatch:
    return DiskWatch(1.0, 1.0 / LOOKS)


def test_a_disk_that_completes_nothing_hangs_and_is_reported_again_after_as_long() -> None:
    watch = make()
    watch.look(10, 20)
    assert [watch.look(10, 20 + each) for each in range(2 * LOOKS)] == [*[False] * (LOOKS - 1), True] * 2


def test_a_disk_that_has_nothing_to_do_does_not_hang() -> None:
    watch = make()
    assert not any(watch.look(10, 10) for _ in range(3 * LOOKS))
    assert not any(watch.look(10, 20) for _ in range(LOOKS - 1))
    assert watch.look(10, 20)


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_it_is_reported_exactly_when_enough_looks_in_a_row_found_the_same_durable_offset_behind(
    steps: list[tuple[int, int]],
) -> None:
    watch, durable, end, in_a_row, last = make(), 0, 0, 0, -1
    for written, appended in steps:
        end += appended
        durable = min(end, durable + written)
        in_a_row = in_a_row + 1 if durable == last and durable < end else 0
        last = durable
        is_reported = watch.look(durable, end)
        assert is_reported == (in_a_row == LOOKS)
        if is_reported:
            in_a_row = 0
