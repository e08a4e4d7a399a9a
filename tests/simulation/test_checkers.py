"""Each rule on a history with a planted violation, which it must find and nothing else, and on its clean twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.histories import STEP_US, Story, T
from tests.simulation.planted_compaction import COMPACTED
from tests.simulation.planted_lookups import LOOKUPS
from tests.simulation.planted_transactions import TRANSACTIONS
from tidelog.simulation.checkers import RULES, CheckOptions, check, lag_of
from tidelog.simulation.checkers.history import OUT_OF_RANGE

Plant = Callable[[Story, bool], None]
PLANTS: dict[str, tuple[str, Plant]] = {}
OPTIONS = CheckOptions(max_lag_us=3 * STEP_US, settle_us=2 * STEP_US)


def plant(rule: str) -> Callable[[Plant], Plant]:
    """A story that takes whether to break the rule."""

    def keep(function: Plant) -> Plant:
        PLANTS[function.__name__] = (rule, function)
        return function

    return keep


@plant("lost-write")
def a_consumer_reads_past_an_acknowledged_record(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0)
    story.send(1, 12, outcome="info" if not broken else "ok", at=1 if broken else -1)
    story.send(1, 13, at=2)
    story.op("assign", 2, offset=0)
    story.poll(2, (0, 11))
    story.poll(2, (2, 13))


@plant("lost-write")
def one_poll_reads_past_an_acknowledged_record(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, 13, at=0, acks=-1 if broken else 1)
    story.poll(2, (0, 11), (2, 13))


@plant("lost-write")
def the_partition_ends_before_an_acknowledged_record(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0)
    story.send(1, 12, at=1, acks=-1 if broken else 1)
    story.poll(2, (0, 11))
    story.marks(high_watermark=1)


@plant("lost-write")
def an_acknowledged_record_was_deleted_by_nobody(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    if not broken:
        story.op("delete_records", 3, "info", offset=1)
    story.poll(2, (1, 12), offset=0, log_start=1)


@plant("unseen")
def nobody_reads_the_last_record(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0)
    story.send(1, 12, at=1)
    story.op("heal", 0)
    story.poll(2, (0, 11))
    if not broken:
        story.poll(2, (1, 12))


@plant("duplicate")
def an_idempotent_record_is_there_twice(story: Story, broken: bool) -> None:
    story.send(1, 11, outcome="info", idempotent=broken)
    story.poll(2, (0, 11), (1, 11))


@plant("inconsistent-offsets")
def two_consumers_read_different_records(story: Story, broken: bool) -> None:
    story.send(1, 11, outcome="info")
    story.send(1, 12, outcome="info")
    story.poll(2, (0, 11))
    story.poll(3, (0, 12 if broken else 11))


@plant("phantom-read")
def a_record_that_nobody_sent(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0)
    story.poll(2, (0, 11), (1, 99 if broken else -1))


@plant("phantom-read")
def a_record_of_another_partition(story: Story, broken: bool) -> None:
    story.send(1, 11, outcome="info", partition=1 if broken else 0)
    story.poll(2, (0, 11))


@plant("G1a")
def a_record_that_failed(story: Story, broken: bool) -> None:
    story.send(1, 11, outcome="fail" if broken else "info")
    story.poll(2, (0, 11))


@plant("G1a")
def a_record_of_an_aborted_transaction(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, txn=5)
    story.op("end_txn", 1, txn=5, commits=not broken)
    story.poll(2, (0, 11), committed_only=True)


@plant("precommitted-read")
def a_record_of_an_open_transaction(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, txn=5)
    story.poll(2, (0, 11), committed_only=broken)
    story.op("end_txn", 1, txn=5, commits=True)


@plant("int-nonmonotonic-poll")
def a_poll_in_the_wrong_order(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(2, *([(1, 12), (0, 11)] if broken else [(0, 11), (1, 12)]))


@plant("nonmonotonic-poll")
def a_poll_of_what_was_polled(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(2, (0, 11), (1, 12))
    if not broken:
        story.op("assign", 2)
    story.poll(2, (1, 12))


@plant("int-poll-skip")
def a_poll_past_what_another_one_read(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, 13, at=0)
    story.poll(2, (0, 11), (1, 12), (2, 13))
    story.poll(3, *([(0, 11), (2, 13)] if broken else [(1, 12), (2, 13)]))


@plant("poll-skip")
def two_polls_past_what_another_one_read(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, 13, at=0)
    story.poll(2, (0, 11), (1, 12), (2, 13))
    story.poll(3, (0, 11))
    if not broken:
        story.op("assign", 3, offset=2)
    story.poll(3, (2, 13))


@plant("poll-skip")
def a_consumer_that_does_not_begin_where_it_was_assigned(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(2, (0, 11), (1, 12))
    story.op("assign", 3, offset=0 if broken else 1)
    story.poll(3, (1, 12))


@plant("int-nonmonotonic-send")
def a_batch_in_the_wrong_order(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, offsets=[1, 0] if broken else [0, 1])


@plant("int-send-skip")
def a_batch_with_a_hole(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, offsets=[0, 2 if broken else 1])


@plant("nonmonotonic-send")
def an_idempotent_producer_out_of_order(story: Story, broken: bool) -> None:
    first = story.send(1, 11, at=1, idempotent=broken)
    second = story.send(1, 12, at=0, idempotent=broken)
    first.ended_us = second.ended_us  # both in flight: a plain producer may see this


@plant("nonmonotonic-send")
def a_plain_producer_out_of_order(story: Story, broken: bool) -> None:
    first = story.send(1, 11, at=1)
    second = story.send(1, 12, at=0)
    if not broken:
        first.ended_us = second.began_us  # at the same time: in either order


@plant("send-skip")
def a_record_before_one_that_was_acknowledged(story: Story, broken: bool) -> None:
    late = None if broken else story.send(2, 12, outcome="info")
    story.send(1, 11, at=1)
    if late is None:
        story.send(2, 12, outcome="info")
    story.poll(3, (0, 12), (1, 11))


@plant("high-watermark-back")
def a_high_watermark_that_goes_back(story: Story, broken: bool) -> None:
    story.marks(high_watermark=5)
    story.marks(high_watermark=4 if broken else 5)


@plant("high-watermark-back")
def a_high_watermark_below_a_record_that_was_read(story: Story, broken: bool) -> None:
    story.send(1, 11, outcome="info")
    story.poll(2, (0, 11))
    story.marks(high_watermark=0 if broken else 1)


@plant("log-start-back")
def a_log_start_that_goes_back(story: Story, broken: bool) -> None:
    story.op("delete_records", 3, offset=5, log_start=5)
    story.marks(log_start=4 if broken else 6)


@plant("log-start-back")
def a_deletion_is_acknowledged_and_not_done(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(2, (0, 11), (1, 12), offset=0)
    story.op("delete_records", 3, offset=2, log_start=1 if broken else 2)


@plant("log-start-back")
def what_was_deleted_is_read(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.op("delete_records", 3, offset=1, log_start=1)
    story.poll(2, *([(0, 11)] if broken else []), (1, 12), offset=0 if broken else 1, log_start=1)


@plant("out-of-range")
def a_reader_is_refused_at_the_end_of_the_log(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0, outcome="ok")
    story.poll(2, (0, 11), (1, 12), offset=0)
    story.poll(2, offset=2 if broken else 3, outcome="fail", error=OUT_OF_RANGE)


@plant("out-of-range")
def a_reader_is_refused_what_nobody_has_deleted(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(2, (0, 11), (1, 12), offset=0)
    story.op("delete_records", 3, "info", offset=1 if broken else 2)
    story.poll(4, offset=1, outcome="fail", error=OUT_OF_RANGE)


@plant("out-of-range")
def a_reader_is_refused_in_a_log_that_had_a_past(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=1 << 31)
    story.poll(2, (1 << 31, 11), ((1 << 31) + 1, 12), offset=1 << 31)
    story.poll(4, offset=1 << 31 if broken else 0, outcome="fail", error=OUT_OF_RANGE)


@plant("log-start-ahead")
def what_was_read_is_deleted_by_nobody(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, 13, at=0)
    story.poll(2, (0, 11), (1, 12), (2, 13), offset=0)
    if not broken:
        story.op("delete_records", 3, "info", offset=2)
    story.marks(log_start=2)
    story.op("assign", 4, offset=2)
    story.poll(4, (2, 13), offset=2)


@plant("log-start-ahead")
def more_is_deleted_than_was_asked_for(story: Story, broken: bool) -> None:
    story.op("create_topic", 0, deletes=not broken)
    story.send(1, 11, 12, 13, at=0)
    story.poll(2, (0, 11), (1, 12), (2, 13), offset=0)
    story.op("delete_records", 3, offset=1, log_start=3)


@plant("log-start-ahead")
def retention_leaves_less_than_it_must(story: Story, broken: bool) -> None:
    story.op("create_topic", 0, deletes=True, keeps=3)
    story.send(1, 11, 12, 13, at=0)
    story.poll(2, (0, 11), (1, 12), (2, 13), offset=0, log_start=0)
    if not broken:
        story.send(1, 14, outcome="info")
    story.marks(log_start=1)
    story.op("delete_records", 3, "info", offset=2)
    story.marks(log_start=2)


@plant("committed-offset-back")
def a_commit_that_is_forgotten(story: Story, broken: bool) -> None:
    story.op("commit", 2, group="g", offset=3)
    story.op("commit", 2, "ok" if broken else "info", group="g", offset=7)
    story.op("committed", 2, group="g", offset=3)


@plant("committed-offset-back")
def all_commits_are_forgotten(story: Story, broken: bool) -> None:
    story.op("commit", 2, "ok" if broken else "fail", group="g", offset=3)
    story.op("committed", 2, group="g", offset=-1)


@plant("committed-offset-back")
def a_commit_is_forgotten_before_its_topic_is_deleted(story: Story, broken: bool) -> None:
    story.op("commit", 2, group="g", offset=3)
    if broken:
        story.op("committed", 2, group="g", offset=-1)
    story.op("delete_topic", 3)
    story.op("committed", 2, group="g", offset=-1)


@plant("committed-offset-back")
def a_commit_that_nobody_made(story: Story, broken: bool) -> None:
    story.op("commit", 2, "info", group="g", offset=3)
    story.op("committed", 2, group="g", offset=4 if broken else 3)


@plant("epoch-back")
def a_leader_epoch_that_goes_back(story: Story, broken: bool) -> None:
    story.send(1, 11, 12, at=0)
    story.poll(2, (0, 11), (1, 12), epochs=[2, 1 if broken else 3])


@plant("epoch-back")
def an_acknowledgement_under_another_epoch(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, epoch=2 if broken else 3)
    story.poll(2, (0, 11), epochs=[3])


@plant("lag")
def a_poll_that_finds_nothing_for_long(story: Story, broken: bool) -> None:
    send = story.send(1, 11, at=0)
    if not broken:
        send.ended_us += STEP_US
    for _ in range(4):
        story.poll(2, offset=0)
    story.poll(2, (0, 11))


@plant("failed-after-heal")
def a_send_that_fails_long_after_the_healing(story: Story, broken: bool) -> None:
    story.op("heal", 0)
    for _ in range(2 if broken else 1):
        story.op("committed", 5, group="g", offset=-1)
    story.send(1, 11, outcome="info")


PLANTS.update(TRANSACTIONS)
PLANTS.update(COMPACTED)
PLANTS.update(LOOKUPS)


@pytest.mark.parametrize("name", PLANTS)
def test_finds_what_is_planted_and_nothing_else(name: str) -> None:
    rule, tell = PLANTS[name]
    story = Story()
    tell(story, True)
    (finding,) = [one for one in check(story.history, OPTIONS) if not _follows(one.rule, rule)]
    assert finding.rule == rule
    assert finding.ops
    assert finding.message in finding.text() and all(f"#{op.index} " in finding.text() for op in finding.ops)


def _follows(other: str, planted: str) -> bool:
    """A partition that ends before an acknowledged record is proof of two things, and says both."""
    return planted in ("lost-write", "compaction") and other == "high-watermark-back"


@pytest.mark.parametrize("name", PLANTS)
def test_is_silent_on_the_clean_twin(name: str) -> None:
    story = Story()
    PLANTS[name][1](story, False)
    assert check(story.history, OPTIONS) == []


def test_every_rule_has_a_plant() -> None:
    assert {rule for rule, _ in PLANTS.values()} == set(RULES)


def test_a_topic_that_is_being_deleted_promises_nothing() -> None:
    story = Story()
    story.send(1, 11, 12, at=0)
    story.op("delete_topic", 3, "info")
    story.op("heal", 0)
    assert check(story.history) == []


def test_what_retention_deletes_is_not_lost() -> None:
    for deletes in (True, False):
        story = Story()
        story.op("create_topic", 0, deletes=deletes)
        story.send(1, 11, 12, at=0)
        story.marks(log_start=1, high_watermark=2)
        story.poll(2, (1, 12), offset=0)
        assert [one.rule for one in check(story.history)] == ([] if deletes else ["lost-write"])


def test_topics_with_gaps_allowed_have_no_lost_writes() -> None:
    story = Story()
    story.send(1, 11, 12, 13, at=0)
    story.poll(2, (0, 11), (2, 13))
    assert check(story.history, CheckOptions(gaps_allowed=frozenset({T}))) == []
    assert [one.rule for one in check(story.history)] == ["lost-write"]


def test_a_lost_record_whose_offset_was_given_to_another_is_both() -> None:
    story = Story()
    story.send(1, 11, at=0)
    story.send(2, 12, outcome="info")
    story.poll(3, (0, 12))
    assert [one.rule for one in check(story.history)] == ["lost-write", "inconsistent-offsets"]


def test_of_two_acknowledged_at_one_offset_one_is_lost_whichever_is_read() -> None:
    for read in (11, 12):
        story = Story()
        first, second = story.send(1, 11, at=0), story.send(2, 12, at=0)
        first.ended_us = second.ended_us
        story.poll(3, (0, read))
        lost = [one for one in check(story.history) if one.rule == "lost-write"]
        assert [one.message.split("value ")[1].split()[0] for one in lost] == [str(23 - read)]


def test_a_leader_may_count_what_it_has_not_confirmed_as_the_end_of_its_epoch() -> None:
    """It was lost with the leader, and the next one wrote other records there."""
    for was_read in (False, True):
        story = Story()
        if was_read:
            story.poll(3, (0, 11), (1, 12), epochs=[1, 2])
        story.op("epoch_end", 2, wanted_epoch=1, epoch=1, offset=3)
        story.poll(3, (0, 11), (1, 12), epochs=[1, 2])
        assert [one.rule for one in check(story.history) if one.rule == "epoch-end"] == ["epoch-end"] * was_read


def test_the_worst_lag_is_measured() -> None:
    story = Story()
    send = story.send(1, 11, at=0)
    story.poll(2, offset=0)
    worst = story.poll(2, offset=0)
    story.poll(2, (0, 11))
    story.poll(2)
    lag = lag_of(story.history)
    assert lag is not None
    assert (lag.send, lag.reader, lag.lag_us) == (send, worst, worst.began_us - send.ended_us)


def test_who_reads_what_is_old_waits_since_it_began_or_got_something() -> None:
    story = Story()
    for value in range(40):
        story.send(1, value, at=value)
    story.op("assign", 2, offset=0)
    story.poll(2, *((each, each) for each in range(10)))
    read = story.poll(2, *((each, each) for each in range(10, 20)))
    story.poll(2, offset=20)
    empty = story.poll(2, offset=20)
    story.poll(2, *((each, each) for each in range(20, 40)))
    lag = lag_of(story.history)
    assert lag is not None
    assert (lag.reader, lag.lag_us) == (empty, empty.began_us - read.ended_us)


def test_the_wait_for_the_first_record_after_an_assignment_is_a_lag() -> None:
    story = Story()
    story.send(1, 11, at=0)
    assigned = story.op("assign", 2)
    story.send(1, 12, partition=1, at=0)
    first = story.poll(2, (0, 11))
    lag = lag_of(story.history)
    assert lag is not None
    assert (lag.reader, lag.lag_us) == (first, first.began_us - assigned.began_us)


@pytest.mark.parametrize("returns", [True, False])
def test_a_group_that_gave_a_partition_up_waits_until_somebody_is_assigned_it(returns: bool) -> None:
    story = Story()
    story.op("assign", 2, group="g")
    story.send(1, 11, at=0)
    story.poll(2, (0, 11))
    revoked = story.op("revoke", 2, group="g", offset=1)
    send = story.send(1, 12, at=1)
    fault = story.op("fault", 0, name="kill", target="node 1")
    story.send(1, 13, at=2)
    story.op("assign", 4, group="another")
    last = story.op("assign", 3, group="g") if returns else story.send(1, 14, at=3)
    lag = lag_of(story.history)
    assert lag is not None
    until_us = last.began_us if returns else last.ended_us
    assert (lag.reader, lag.send, lag.lag_us) == (revoked, send, until_us - send.ended_us)
    assert lag.faults == ["kill (node 1)"] and fault.ended_us > send.ended_us
    assert "between two assignments" in lag.text() and "kill (node 1)" in lag.text()


def test_a_group_that_gave_up_what_it_had_read_waits_for_nothing() -> None:
    story = Story()
    story.op("assign", 2, group="g")
    story.send(1, 11, at=0)
    first = story.poll(2, (0, 11))
    story.op("revoke", 2, group="g", offset=1)
    story.op("assign", 3, group="g")
    lag = lag_of(story.history)
    assert lag is not None and lag.reader is first


def test_the_worst_lag_tells_what_its_consumer_read_meanwhile() -> None:
    story = Story()
    story.op("assign", 2, offset=0)
    story.op("assign", 2, offset=0, partition=1)
    story.send(1, 11, at=0)
    story.send(1, 12, 13, at=0, partition=1)
    story.poll(2, (0, 12), (1, 13), partition=1)
    story.poll(2, offset=0)
    lag = lag_of(story.history)
    assert lag is not None and lag.read_meanwhile == 2
    assert "process 2 had found nothing of orders-0" in lag.text() and "2 records of others" in lag.text()
