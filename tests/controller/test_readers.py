"""Up to which metadata version every reader has followed: objects are deleted up to there (rule 6)."""

from __future__ import annotations

import pytest

from tidelog.controller.active.readers import ALL, NEVER, SILENCE_GRACES, Readers
from tidelog.controller.model.records import BrokerRecord

GRACE_S = 10.0
SILENCE_S = GRACE_S * SILENCE_GRACES


def broker(broker_id: int, registration_epoch: int = 1, *, alive: bool = True) -> BrokerRecord:
    return BrokerRecord(broker_id, "check", "host", 9092, "", "", "a", registration_epoch, alive)


@pytest.fixture
def readers() -> Readers:
    found = Readers(GRACE_S)
    found.activated(0.0)
    return found


def test_without_brokers_nobody_reads(readers: Readers) -> None:
    assert readers.passed([], 0.0) == ALL


def test_the_slowest_reader_counts(readers: Readers) -> None:
    readers.heartbeat(1, 1, 70, 1.0)
    readers.heartbeat(2, 1, 50, 1.0)
    assert readers.passed([broker(1), broker(2)], 1.0) == 50
    readers.heartbeat(2, 1, 90, 2.0)
    assert readers.passed([broker(1), broker(2)], 2.0) == 70
    readers.heartbeat(1, 1, 60, 3.0)
    assert readers.passed([broker(1), broker(2)], 3.0) == 70, "a registration never goes back"
    assert readers.versions() == {1: 70, 2: 90}


def test_a_removed_broker_is_forgotten(readers: Readers) -> None:
    readers.heartbeat(1, 1, 70, 1.0)
    readers.heartbeat(2, 1, 50, 1.0)
    assert readers.passed([broker(1)], 1.0) == 70
    assert readers.versions() == {1: 70}


def test_a_dead_broker_holds_deletions_up_until_it_knows_that_it_is_cut_off(readers: Readers) -> None:
    readers.heartbeat(1, 1, 50, 3.0)
    dead = broker(1, alive=False)
    assert readers.passed([dead], 3.0 + SILENCE_S) == 50, "its session has ended, and it still reads"
    assert readers.passed([dead], 3.1 + SILENCE_S) == ALL


def test_a_broker_that_was_never_heard_holds_everything_up_for_as_long(readers: Readers) -> None:
    assert readers.passed([broker(1)], 5.0) == NEVER
    assert readers.passed([broker(1)], 5.0 + SILENCE_S) == NEVER
    assert readers.passed([broker(1)], 5.1 + SILENCE_S) == ALL


def test_a_new_registration_starts_anew(readers: Readers) -> None:
    readers.heartbeat(1, 1, 50, 3.0)
    assert readers.passed([broker(1, 2)], 4.0) == NEVER, "it may load an old image"
    readers.heartbeat(1, 2, 45, 5.0)
    assert readers.passed([broker(1, 2)], 5.0) == 45


def test_a_broker_of_an_older_version_holds_everything_up_while_it_lives(readers: Readers) -> None:
    readers.heartbeat(1, 1, NEVER, 100.0)
    assert readers.passed([broker(1)], 100.0) == NEVER


def test_a_new_active_controller_does_not_know_whom_its_predecessor_answered(readers: Readers) -> None:
    readers.heartbeat(1, 1, 50, 1.0)
    readers.activated(100.0)
    assert readers.passed([broker(1)], 100.0 + SILENCE_S) == 50
    assert readers.passed([broker(1)], 100.1 + SILENCE_S) == ALL
