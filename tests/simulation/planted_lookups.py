"""Wrong answers to lookups of offsets, planted for `test_checkers.py`, and their clean twins."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.histories import Story
from tidelog.simulation.checkers.history import LARGEST_TIME

Plant = Callable[[Story, bool], None]
LOOKUPS: dict[str, tuple[str, Plant]] = {}


def plant(rule: str) -> Callable[[Plant], Plant]:
    """A story that takes whether to break the rule."""

    def keep(function: Plant) -> Plant:
        LOOKUPS[function.__name__] = (rule, function)
        return function

    return keep


@plant("offset-for-time")
def a_lookup_passes_over_a_record(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, 13, at=0, times=[100, 300, 200])
    story.op("offset_for_time", 2, time_ms=150, offset=2 if broken else 1, found_ms=200 if broken else 300)


@plant("offset-for-time")
def a_lookup_finds_nothing_though_there_is_something(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, times=[100], outcome="ok" if broken else "info")
    story.op("offset_for_time", 2, time_ms=100, offset=-1)
    story.poll(3, (0, 11))


@plant("offset-for-time")
def a_lookup_tells_another_time_than_the_record_has(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, times=[100])
    story.op("offset_for_time", 2, time_ms=50, offset=0, found_ms=90 if broken else 100)


@plant("offset-for-time")
def a_lookup_finds_a_deleted_record(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0, times=[100, 200])
    story.op("delete_records", 3, offset=1, log_start=1)
    story.op("offset_for_time", 2, time_ms=50, offset=0 if broken else 1, found_ms=100 if broken else 200)


@plant("offset-for-time")
def the_largest_time_is_not_the_largest(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0, times=[300, 200])
    offset, found_ms = (1, 200) if broken else (0, 300)
    story.op("offset_for_time", 2, time_ms=LARGEST_TIME, offset=offset, found_ms=found_ms)


@plant("offset-for-time")
def a_lookup_passes_over_a_record_that_compaction_keeps(story: Story, broken: bool) -> None:
    story.op("create_topic", 0, compacts=True)
    story.send(1, 11, 12, at=0, times=[100, 200], keys=[1, 1])
    story.op("offset_for_time", 2, time_ms=50, offset=1, found_ms=200)
    story.poll(3, *(((0, 11), (1, 12)) if broken else ((1, 12),)), keys=[1, 1] if broken else [1])


@plant("epoch-back")
def a_lookup_tells_another_epoch_than_the_record_has(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, times=[100])
    story.poll(3, (0, 11), epochs=[4])
    story.op("offset_for_time", 2, time_ms=50, offset=0, found_ms=100, epoch=5 if broken else 4)


@plant("epoch-end")
def an_epoch_ends_behind_the_next_one(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(3, (0, 11), (1, 12), epochs=[1, 2])
    story.op("epoch_end", 2, wanted_epoch=1, epoch=1, offset=2 if broken else 1)


@plant("epoch-end")
def an_epoch_ends_before_its_last_record(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(3, (0, 11), (1, 12), epochs=[1, 1])
    story.op("epoch_end", 2, wanted_epoch=1, epoch=1, offset=1 if broken else 2)


@plant("epoch-end")
def the_end_of_a_newer_epoch_is_told(story: Story, broken: bool) -> None:
    story.op("epoch_end", 2, wanted_epoch=1, epoch=2 if broken else 1, offset=0)


@plant("epoch-end")
def an_epoch_has_no_end_though_it_has_a_record(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0)
    story.poll(3, (0, 11), epochs=[3])
    story.op("epoch_end", 2, wanted_epoch=3 if broken else 4)


@plant("config-lost")
def a_config_is_what_it_was_before_the_last_change(story: Story, broken: bool) -> None:
    story.op("set_config", 1, name="retention.ms", target="1")
    story.op("set_config", 2, "ok" if broken else "info", name="retention.ms", target="2")
    story.op("config", 3, name="retention.ms", target="1")


@plant("config-lost")
def what_was_appended_to_a_config_is_missing(story: Story, broken: bool) -> None:
    story.op("append_config", 1, name="list", target="a")
    story.op("append_config", 2, "ok" if broken else "info", name="list", target="b")
    story.op("config", 3, name="list", target="a")
