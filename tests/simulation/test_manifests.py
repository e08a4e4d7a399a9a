"""The check of a manifest's slices in simulations finds every kind of gap, and takes none for one that is not."""

from __future__ import annotations

import pytest

from tidelog.controller.image.lookup import FoundRange
from tidelog.simulation.actors.manifests import missing_offsets
from tidelog.storage.commits import ObjectSlice


def told(start: int = 0, end: int = 100, log_start: int = 0, committed_end: int = 100) -> FoundRange:
    return FoundRange("orders", "0" * 32, 0, 7, start, end, log_start, committed_end, [])


def slices(*ranges: tuple[int, int]) -> list[ObjectSlice]:
    return [ObjectSlice(number, 0, 1_000, *each) for number, each in enumerate(ranges, 1)]


@pytest.mark.parametrize(
    ("row", "found", "ends_at"),
    [
        (told(), slices((0, 40), (40, 100)), None),
        (told(), slices((0, 60), (40, 100)), None),  # compacted between two pages
        (told(start=30), slices((20, 120)), None),
        (told(log_start=50), slices((40, 100)), None),
        (told(end=200), slices((0, 100)), None),  # the tail is at the brokers
        (told(), slices((0, 40)), 40),
        (told(log_start=100), [], None),
        (told(start=150, end=200), [], None),
    ],
)
def test_complete_slices_are_complete(row: FoundRange, found: list[ObjectSlice], ends_at: int | None) -> None:
    assert missing_offsets(row, found, ends_at) is None


@pytest.mark.parametrize(
    ("row", "found", "ends_at", "missing"),
    [
        (told(), [], None, (0, 100)),
        (told(), slices((10, 100)), None, (0, 10)),
        (told(), slices((0, 40), (41, 100)), None, (40, 41)),
        (told(), slices((0, 99)), None, (99, 100)),
        (told(), slices((0, 40)), 50, (40, 50)),
        (told(log_start=50), slices((60, 100)), None, (50, 60)),
    ],
)
def test_a_gap_is_found(
    row: FoundRange, found: list[ObjectSlice], ends_at: int | None, missing: tuple[int, int]
) -> None:
    assert missing_offsets(row, found, ends_at) == missing
