"""How a follower makes its WAL a prefix of its master's, elections, and what a master sends.

Of `tidelog.storage.replication`: `following`, `election`, `sending`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.runtime.errors import Fenced
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica, confirmable
from tidelog.storage.replication.election import Promise, elected, settled
from tidelog.storage.replication.following import Diverged, LocalWal, Match, Step, WalFollower
from tidelog.storage.replication.frames import Ack, BadFrame, FollowerHello, Records, Welcome
from tidelog.storage.replication.sending import FollowerLink, LinkSettings, LinkState, NextBatch
from tidelog.storage.wal.epochs import EpochEntry, EpochHistory

A, B, C = (WalReplica(number, f"wal-{number}") for number in (1, 2, 3))


def wal(*epochs: tuple[int, int], start: int = 0, end: int, confirm: int = 0, promised: int = 0) -> LocalWal:
    return LocalWal(start, end, confirm, promised, EpochHistory(epochs))


def welcome(*epochs: tuple[int, int], start: int = 0, end: int, epoch: int = 9, confirm: int = 0) -> Welcome:
    return Welcome(epoch, start, end, confirm, 0, tuple(EpochEntry(*each) for each in epochs))


@pytest.mark.parametrize(
    ("mine", "master", "committed", "match"),
    [
        pytest.param(wal((1, 0), end=50), welcome((1, 0), (9, 80), end=90), 0, (Step.KEEP, 50), id="a prefix"),
        pytest.param(wal((1, 0), end=99), welcome((1, 0), (9, 80), end=90), 0, (Step.TRUNCATE, 80), id="a dirty tail"),
        pytest.param(
            wal((1, 0), (2, 60), end=99), welcome((1, 0), (9, 80), end=90), 0, (Step.TRUNCATE, 60), id="another epoch"
        ),
        pytest.param(wal(end=0), welcome((1, 0), (9, 80), end=90), 0, (Step.KEEP, 0), id="empty, from the start"),
        pytest.param(wal(end=0), welcome((9, 80), start=70, end=90), 70, (Step.RESTART, 70), id="empty, trimmed there"),
        pytest.param(
            wal(end=0), welcome((9, 0), end=90), 70, (Step.RESTART, 70), id="empty, and the master has not trimmed yet"
        ),
        pytest.param(
            wal((1, 0), start=10, end=60), welcome((9, 80), start=80, end=90), 80, (Step.RESTART, 80), id="all uploaded"
        ),
        pytest.param(
            wal((3, 0), end=16), welcome((4, 0), end=40), 0, (Step.REPLACE, 0), id="a first epoch that reached nobody"
        ),
        pytest.param(
            wal((1, 0), start=30, end=60),
            welcome((1, 0), (9, 50), start=40, end=90),
            40,
            (Step.TRUNCATE, 50),
            id="both",
        ),
        pytest.param(
            wal((6, 24), start=24, end=32, confirm=24),
            welcome((2, 0), (5, 16), (8, 24), end=32),
            24,
            (Step.REPLACE, 24),
            id="trimmed here to what only this one has",
        ),
        pytest.param(
            wal(start=24, end=24, confirm=24), welcome((2, 0), end=40), 24, (Step.KEEP, 24), id="empty, trimmed here"
        ),
        pytest.param(
            wal((3, 0), end=16, confirm=16), welcome((4, 0), end=40), 32, (Step.RESTART, 32), id="what is committed"
        ),
        pytest.param(
            wal((3, 0), end=16, confirm=16), welcome((4, 0), end=24), 32, (Step.RESTART, 24), id="no longer than theirs"
        ),
    ],
)
def test_where_a_followers_wal_is_cut(mine: LocalWal, master: Welcome, committed: int, match: tuple[Step, int]) -> None:
    follower = WalFollower()
    assert follower.matched(mine, master, committed) == Match(*match)
    assert follower.master_epoch == 9


@pytest.mark.parametrize(
    ("mine", "master", "committed", "match"),
    [
        pytest.param(wal((1, 0), end=50), welcome((1, 0), (9, 80), end=90), 0, (Step.KEEP, 50), id="a prefix"),
        pytest.param(
            wal((1, 0), end=99, confirm=60), welcome((1, 0), (9, 80), end=90), 40, (Step.REPLACE, 40), id="a tail"
        ),
        pytest.param(
            wal((1, 0), end=60), welcome((9, 80), start=80, end=90), 80, (Step.REPLACE, 80), id="all uploaded"
        ),
    ],
)
def test_what_was_given_up_is_kept_aside(
    mine: LocalWal, master: Welcome, committed: int, match: tuple[Step, int]
) -> None:
    assert WalFollower().matched(mine, master, committed, given_up=True) == Match(*match)


@pytest.mark.parametrize(
    ("mine", "master", "committed"),
    [
        pytest.param(
            wal((1, 0), end=99, confirm=85), welcome((1, 0), (9, 80), end=90), 0, id="a confirmed byte would be cut"
        ),
        pytest.param(
            wal((3, 0), end=50, confirm=40), welcome((4, 0), end=90), 30, id="nothing in common, and confirmed bytes"
        ),
        pytest.param(
            wal((1, 0), end=50, confirm=50), welcome((9, 80), start=70, end=90), 40, id="trimmed, not all in the bucket"
        ),
    ],
)
def test_confirmed_bytes_are_never_given_up(mine: LocalWal, master: Welcome, committed: int) -> None:
    with pytest.raises(Diverged):
        WalFollower().matched(mine, master, committed)


@pytest.mark.parametrize("mine", [wal((1, 0), end=5, promised=10), wal((11, 0), end=5)])
def test_a_master_of_an_older_epoch_than_promised_is_refused(mine: LocalWal) -> None:
    with pytest.raises(Fenced):
        WalFollower().matched(mine, welcome((1, 0), end=90), 0)


def test_records_must_follow_and_be_of_this_master() -> None:
    follower = WalFollower()
    follower.matched(wal(end=0), welcome((9, 0), end=90), 0)
    assert follower.fits(Records(9, 0, 9, 0, 0, 0, b"12345678"), 0)
    assert not follower.fits(Records(9, 8, 9, 0, 40, 3), 8), "a heartbeat"
    assert (follower.confirm_offset, follower.committed_offset) == (40, 3)
    assert follower.confirmed(8) == 8
    with pytest.raises(BadFrame, match="this WAL ends at 8"):
        follower.fits(Records(9, 16, 9, 0, 0, 0, b"12345678"), 8)
    with pytest.raises(BadFrame, match="of epoch 10"):
        follower.fits(Records(9, 8, 10, 8, 0, 0, b"12345678"), 8)
    with pytest.raises(Fenced):
        follower.fits(Records(8, 8, 8, 0, 0, 0, b"12345678"), 8)


# --- elections ---


def members(*replicas: WalReplica, quorum: int) -> SetConfiguration:
    return SetConfiguration(4, frozenset(replicas), quorum).check()


def test_enough_promises_elect_the_newest_epoch_then_the_largest_end() -> None:
    three = members(A, B, C, quorum=2)
    assert elected([Promise(A, 5, 100)], three) is None
    assert elected([Promise(A, 5, 100), Promise(B, 6, 90)], three) == Promise(B, 6, 90)
    assert elected([Promise(A, 6, 1 << 40), Promise(B, 6, 90)], three) == Promise(A, 6, 1 << 40)
    assert elected([Promise(A, 6, 90), Promise(B, 6, 90, priority=1)], three) == Promise(B, 6, 90, 1)
    assert elected([Promise(B, 6, 90), Promise(A, 6, 90)], three) == Promise(A, 6, 90)


def test_a_replica_with_another_wal_is_no_promise() -> None:
    three = members(A, B, C, quorum=2)
    stranger = WalReplica(C.broker_id, "another disk")
    assert elected([Promise(A, 5, 100), Promise(stranger, 9, 900)], three) is None


def test_a_designated_candidate_is_elected_only_if_it_lacks_nothing() -> None:
    three = members(A, B, C, quorum=2)
    assert elected([Promise(A, 5, 100), Promise(C, 5, 100)], three, designated=3) == Promise(C, 5, 100)
    assert elected([Promise(A, 5, 100), Promise(C, 5, 99)], three, designated=3) == Promise(A, 5, 100)


def test_a_designated_candidate_is_elected_although_another_is_ahead_if_enough_are_not() -> None:
    three = members(A, B, C, quorum=2)
    promises = [Promise(A, 5, 100), Promise(B, 5, 98), Promise(C, 5, 99)]
    assert elected(promises, three, designated=3) == Promise(C, 5, 99), "as if A had not promised"
    assert elected(promises, three, designated=2) == Promise(A, 5, 100)
    assert elected(promises, members(A, B, C, quorum=1), designated=3) == Promise(A, 5, 100), (
        "A may have confirmed alone"
    )
    assert elected(promises, members(A, B, C, quorum=3), designated=2) == Promise(B, 5, 98), (
        "each has what is confirmed"
    )


def test_the_promise_of_a_living_master_is_waited_for() -> None:
    three = members(A, B, C, quorum=2)
    two = [Promise(B, 5, 100), Promise(C, 5, 100)]
    assert elected(two, three, waits_for=[1, 99]) is None
    assert elected([*two, Promise(A, 5, 200)], three, waits_for=[1]) == Promise(A, 5, 200)


def test_the_set_after_an_election() -> None:
    three = members(A, B, C, quorum=2)
    assert settled(three, master=B, alive=[2, 3], all_ack=False) == three._replace(number=5)
    two = members(B, C, quorum=2)
    assert settled(two, master=B, alive=[2], all_ack=False) == two._replace(number=5), "the quorum does not shrink"
    everybody = members(A, B, C, quorum=3)
    assert settled(everybody, master=B, alive=[3], all_ack=True) == SetConfiguration(5, frozenset({B, C}), 2)


@given(st.sets(st.integers(1, 9), min_size=1), st.dictionaries(st.integers(1, 9), st.integers(0, 100)), st.data())
def test_every_set_that_may_elect_holds_what_is_confirmed(
    ids: set[int], ends: dict[int, int], data: st.DataObject
) -> None:
    replicas = {each: WalReplica(each, "x") for each in range(1, 10)}
    quorum = data.draw(st.integers(1, len(ids)))
    one = members(*(replicas[each] for each in ids), quorum=quorum)
    confirmed = confirmable([one], {replicas[each]: end for each, end in ends.items()})
    electors = data.draw(st.permutations(sorted(ids)))[: one.promises_needed]
    assert max(ends.get(each, -1) for each in electors) >= confirmed


# --- sending ---

SETTINGS = LinkSettings(batch_bytes=100, window_bytes=250)
HISTORY = EpochHistory([(1, 0), (2, 120), (3, 500)])


def transferring(at: int) -> FollowerLink:
    link = FollowerLink(3, SETTINGS, 0.0)
    link.hello(FollowerHello(0, 2, 1, False, 0, 0, at, 0, "wal-2", ()), 1.0)
    assert link.acked(Ack(3, at), 2.0, start_offset=0, end_offset=1_000)
    return link


def test_a_batch_is_of_one_epoch_and_the_window_bounds_what_is_on_its_way() -> None:
    link = transferring(60)
    assert link.batch(HISTORY, 1_000) == NextBatch(60, 1, 0, 120, 120)
    link.sent(120, 2.1)
    assert link.batch(HISTORY, 1_000) == NextBatch(120, 2, 120, 220, 500)
    link.sent(220, 2.2)
    assert link.batch(HISTORY, 1_000) == NextBatch(220, 2, 120, 310, 500), "as much as the window has room for"
    link.sent(310, 2.3)
    assert link.batch(HISTORY, 1_000) is None
    assert not link.acked(Ack(3, 220), 2.4, start_offset=0, end_offset=1_000)
    assert link.batch(HISTORY, 1_000) == NextBatch(310, 2, 120, 410, 500)
    assert link.batch(HISTORY, 310) is None, "nothing is there"


def test_nothing_is_sent_before_the_first_acknowledgement() -> None:
    link = FollowerLink(3, SETTINGS, 0.0)
    assert link.batch(HISTORY, 1_000) is None
    with pytest.raises(BadFrame, match="ACK in the state READY"):
        link.acked(Ack(3, 0), 1.0, start_offset=0, end_offset=1_000)
    link.hello(FollowerHello(0, 2, 1, False, 0, 0, 0, 0, "wal-2", ()), 1.0)
    assert link.batch(HISTORY, 1_000) is None
    with pytest.raises(BadFrame, match="HELLO"):
        link.hello(FollowerHello(0, 2, 1, False, 0, 0, 0, 0, "wal-2", ()), 1.0)


@pytest.mark.parametrize("ack", [Ack(3, 59), Ack(3, 61), Ack(2, 60)])
def test_an_acknowledgement_of_what_was_not_sent_ends_the_connection(ack: Ack) -> None:
    with pytest.raises(BadFrame):
        transferring(60).acked(ack, 3.0, start_offset=0, end_offset=1_000)


def test_a_follower_that_begins_outside_of_the_wal_is_refused() -> None:
    link = FollowerLink(3, SETTINGS, 0.0)
    link.hello(FollowerHello(0, 2, 1, False, 0, 0, 0, 0, "wal-2", ()), 1.0)
    with pytest.raises(BadFrame, match="trimmed"):
        link.acked(Ack(3, 10), 2.0, start_offset=50, end_offset=1_000)


def test_a_new_epoch_of_the_same_master_goes_on_over_the_same_connection() -> None:
    link = transferring(60)
    link.sent(120, 2.1)
    assert link.new_epoch(4, 3.0)
    assert link.state is LinkState.HANDSHAKE
    assert link.batch(HISTORY, 1_000) is None
    assert not link.acked(Ack(3, 120), 3.1, start_offset=0, end_offset=1_000), "of the epoch before: late"
    assert link.acked(Ack(4, 120), 3.2, start_offset=0, end_offset=1_000)
    assert link.next_offset == 120


def test_heartbeats_and_silence() -> None:
    link = transferring(60)
    assert not link.heartbeat_due(5.9)
    link.sent(60, 3.0)
    assert not link.heartbeat_due(7.9)
    assert link.heartbeat_due(8.0)
    assert not link.is_silent(22.0)
    assert link.is_silent(22.1)
    link.acked(Ack(3, 60), 22.1, start_offset=0, end_offset=1_000)
    assert not link.is_silent(30.0)
