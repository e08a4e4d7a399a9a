"""The chaos harness's clients, without a cluster: what they note."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from tidelog.chaos.clients import TOPIC, ClientJournal, ClientReader, Clients

NOWHERE = "127.0.0.1:1"


class FakeMessage:
    """A record at one place, with its number."""

    def __init__(self, partition: int, offset: int) -> None:
        self._partition = partition
        self._offset = offset

    def error(self) -> None:
        return None

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def leader_epoch(self) -> int:
        return 0

    def value(self) -> bytes:
        return b"7"


class FakeConsumer:
    """A consumer whose group's coordinator and records are the test."""

    def __init__(self) -> None:
        self.arrived: list[FakeMessage] = []
        """The records that the next poll finds."""
        self._on_assign: Callable[[Any, list[TopicPartition]], None]
        self._on_revoke: Callable[[Any, list[TopicPartition]], None]

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any) -> None:
        assert topics == [TOPIC]
        self._on_assign, self._on_revoke = on_assign, on_revoke

    def assign(self, partitions: list[TopicPartition]) -> None:
        assert {each.topic for each in partitions} == {TOPIC}

    def consume(self, count: int, timeout_s: float) -> list[FakeMessage]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def give(self, *partitions: int) -> None:
        self._on_assign(self, [TopicPartition(TOPIC, each) for each in partitions])

    def take(self, *partitions: int) -> None:
        self._on_revoke(self, [TopicPartition(TOPIC, each) for each in partitions])


def begun(group: str) -> tuple[ClientReader, FakeConsumer]:
    """A reader of three partitions that has begun, and its consumer."""
    consumer: Any = FakeConsumer()
    reader = ClientReader(ClientJournal(NOWHERE, 3, {}), 12, group=group, make_consumer=lambda _: consumer)
    reader.begin()
    return reader, consumer


def test_a_member_of_a_group_has_read_and_commits_nothing_of_what_it_gave_up() -> None:
    member, consumer = begun("g")
    consumer.give(0, 2)
    consumer.arrived = [FakeMessage(2, 16)]
    assert member.poll(0) == 1 and member.position(2) == 17
    consumer.take(0, 2)
    member.commit_all()
    member.poll(0)
    noted = [(op.kind, op.partition, op.offset, op.group) for op in member.journal.history.ops if op.kind != "poll"]
    assert noted == [("assign", 0, -1, "g"), ("assign", 2, -1, "g"), ("revoke", 0, -1, "g"), ("revoke", 2, 17, "g")]
    assert [op.offsets for op in member.journal.history.ops if op.kind == "poll"] == [[16]]
    assert member.position(2) == 0


def test_what_a_member_gives_up_when_it_ends_keeps_nobody_waiting() -> None:
    member, consumer = begun("g")
    consumer.give(0)
    member.stopping.set()
    consumer.take(0)
    assert [op.kind for op in member.journal.history.ops] == ["assign"]


def test_who_reads_everything_is_at_the_beginning_until_something_comes() -> None:
    everything, consumer = begun("")
    consumer.arrived = [FakeMessage(1, 0)]
    everything.poll(0)
    polls = [(op.partition, op.position) for op in everything.journal.history.ops if op.kind == "poll"]
    assert polls == [(0, 0), (2, 0), (1, 1)]


def test_a_client_that_does_not_end_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, goes_on = Clients(ClientJournal(NOWHERE, 0, {})), threading.Event()
    monkeypatch.setattr(clients.readers[0], "poll", lambda timeout_s: goes_on.wait())
    with clients:
        try:
            assert clients.finish(3.0) == ["client 11 does not end"]
        finally:
            goes_on.set()
