"""Violations of the rule of compacted topics, planted for `test_checkers.py`, and their clean twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.histories import STEP_US, Story

Plant = Callable[[Story, bool], None]
COMPACTED: dict[str, tuple[str, Plant]] = {}
K, L = 7, 8
"""Keys."""
EVERYTHING = 99


def plant(function: Plant) -> Plant:
    """A story that takes whether to break the rule."""
    COMPACTED[function.__name__] = ("compaction", function)
    return function


def create(story: Story, **fields: Any) -> None:
    story.op("create_topic", 0, compacts=True, **fields)


def send(story: Story, value: int, key: int, at: int, process: int = 1, **fields: Any) -> None:
    story.send(process, value, at=at, keys=[key], **fields)


def read(story: Story, process: int, *records: tuple[int, int, int], end: int, **fields: Any) -> None:
    """From offset 0 on; `records` are (offset, value, key)."""
    story.op("assign", process, offset=0)
    pairs = [(offset, value) for offset, value, _ in records]
    story.poll(process, *pairs, offset=0, next_offset=end, keys=[key for _, _, key in records], **fields)


def audit(story: Story, process: int, *records: tuple[int, int, int], end: int, **fields: Any) -> None:
    read(story, process, *records, end=end, **fields)
    story.op("audit", process, offset=end, **fields)


@plant
def the_last_value_of_a_key_is_missing(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, L if broken else K, 1)
    read(story, 2, (1, 12, L if broken else K), end=2)


@plant
def a_reader_from_the_middle_misses_the_last_value(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1)
    send(story, 13, L, 2)
    story.op("assign", 2, offset=1)
    rest = [] if broken else [(1, 12)]
    story.poll(2, *rest, (2, 13), offset=1, keys=[*([] if broken else [K]), L])


@plant
def a_later_record_replaces_one_before_it_was_sent(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, L, 1)
    if not broken:
        send(story, 13, K, 2)
    read(story, 2, (1, 12, L), end=2)
    if broken:
        send(story, 13, K, 2)


@plant
def a_failed_send_replaces_nothing(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, L, 1)
    send(story, 13, K, -1, outcome="fail" if broken else "info")
    read(story, 2, (1, 12, L), end=2)


@plant
def an_aborted_record_replaces_nothing(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1, process=3, txn=5, producer=3)
    story.op("end_txn", 3, txn=5, commits=not broken)
    send(story, 13, L, 3)
    rest = [] if broken else [(1, 12, K)]
    read(story, 2, *rest, (3, 13, L), end=4)


@plant
def an_open_transaction_replaces_nothing_yet(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1, process=3, txn=5, producer=3)
    if not broken:
        story.op("end_txn", 3, txn=5, commits=True)
    read(story, 2, (1, 12, K), end=2)
    if broken:
        story.op("end_txn", 3, txn=5, commits=True)


@plant
def a_read_committed_reader_misses_the_last_value(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0, process=3, txn=5, producer=3)
    story.op("end_txn", 3, txn=5, commits=True, outcome="ok" if broken else "info")
    send(story, 12, L, 2)
    read(story, 2, (2, 12, L), end=3, committed_only=True)


@plant
def a_tombstone_goes_before_its_time(story: Story, broken: bool) -> None:
    create(story, tombstones_us=30 * STEP_US if broken else STEP_US)
    send(story, 11, K, 0, tombstones=[11])
    send(story, 12, L, 1)
    send(story, 13, L, 2)
    read(story, 2, (2, 13, L), end=3)


@plant
def what_is_young_is_replaced(story: Story, broken: bool) -> None:
    create(story, lag_us=30 * STEP_US if broken else STEP_US // 2)
    send(story, 11, K, 0)
    send(story, 12, K, 1)
    send(story, 13, L, 2)
    read(story, 2, (1, 12, K), (2, 13, L), end=3)


@plant
def a_value_is_read_with_another_key(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    read(story, 2, (0, 11, L if broken else K), end=1)


@plant
def a_value_is_read_as_a_tombstone(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    read(story, 2, (0, 11, K), end=1, tombstones=[11] if broken else [])


@plant
def the_log_ends_before_the_last_value(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1)
    story.marks(high_watermark=1 if broken else 2)
    if not broken:
        read(story, 2, (1, 12, K), end=2)


@plant
def a_last_value_that_nobody_can_read_at_rest(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, L if broken else K, -1)
    story.op("heal", 0)
    read(story, 2, (0, 11, K), end=1)
    if not broken:
        send(story, 13, K, 2)


@plant
def a_compacted_part_has_a_key_twice(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1)
    story.op("cleaned", 0, offset=2 if broken else 1)
    audit(story, 2, (0, 11, K), (1, 12, K), end=2)


@plant
def a_key_comes_back_after_its_tombstone_has_gone(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1, tombstones=[12])
    send(story, 13, L, 2)
    rest = [(0, 11, K)] if broken else []
    audit(story, 2, *rest, (2, 13, L), end=3)
    audit(story, 3, *rest, (2, 13, L), end=3, committed_only=True)


@plant
def an_older_value_is_the_last_one_where_something_was_left_alone(story: Story, broken: bool) -> None:
    create(story)
    send(story, 11, K, 0)
    send(story, 12, K, 1)
    send(story, 13, K, 2, tombstones=[13])
    send(story, 14, L, 3)
    story.op("left", 0)
    rest = [(0, 11, K)] if broken else [(0, 11, K), (2, 13, K)]
    audit(story, 2, *rest, (3, 14, L), end=4, tombstones=[] if broken else [13])
    audit(story, 3, *rest, (3, 14, L), end=4, tombstones=[] if broken else [13], committed_only=True)
