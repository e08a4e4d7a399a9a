"""The chaos harness's clients, without a cluster: what they note."""

from __future__ import annotations

from confluent_kafka import TopicPartition

from simulation.chaos_clients import TOPIC, Journal, Reader

NOWHERE = "127.0.0.1:1"


def reader(group: str) -> Reader:
    return Reader(Journal(NOWHERE, 3, {}), 12, group=group)


def test_a_member_of_a_group_has_read_and_commits_nothing_of_what_it_gave_up() -> None:
    member = reader("g")
    try:
        member._assigned(member._consumer, [TopicPartition(TOPIC, each) for each in (0, 2)])
        member._ends[2] = 17
        member._revoked(member._consumer, [TopicPartition(TOPIC, each) for each in (0, 2)])
        member._commit()
        member._note_empty(0, {})
    finally:
        member._consumer.close()
    noted = [(op.kind, op.partition, op.offset, op.group) for op in member.journal.history.ops]
    assert noted == [("assign", 0, -1, "g"), ("assign", 2, -1, "g"), ("revoke", 0, -1, "g"), ("revoke", 2, 17, "g")]
    assert member.position(2) == 0


def test_what_a_member_gives_up_when_it_ends_keeps_nobody_waiting() -> None:
    member = reader("g")
    try:
        member._assigned(member._consumer, [TopicPartition(TOPIC, 0)])
        member.stopping.set()
        member._revoked(member._consumer, [TopicPartition(TOPIC, 0)])
    finally:
        member._consumer.close()
    assert [op.kind for op in member.journal.history.ops] == ["assign"]


def test_who_reads_everything_is_at_the_beginning_until_something_comes() -> None:
    everything = reader("")
    try:
        everything.assign_all()
        everything._note_empty(0, {1})
    finally:
        everything._consumer.close()
    polls = [(op.partition, op.position) for op in everything.journal.history.ops if op.kind == "poll"]
    assert polls == [(0, 0), (2, 0)]
