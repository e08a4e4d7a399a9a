"""What a master confirms, and which configuration it asks for (`tidelog.storage.replication.master`)."""

from __future__ import annotations

import pytest

from tidelog.runtime.errors import InvalidInput
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.master import Master
from tidelog.storage.replication.policy import ReplicationPolicy

A, B, C = (WalReplica(number, f"wal-{number}") for number in (1, 2, 3))
TWO_OF_THREE = ReplicationPolicy(total_replicas=3, in_sync_replicas=2)
AUTO = ReplicationPolicy(total_replicas=3, in_sync_replicas=2, enable_auto_in_sync_replicas=True)
ALL_ACK = ReplicationPolicy(total_replicas=3, in_sync_replicas=3, all_ack_in_sync_state_set=True)
START = 1_000
"""After the start record of the epoch."""


def configuration(*members: WalReplica, quorum: int = 2, number: int = 7) -> SetConfiguration:
    return SetConfiguration(number, frozenset(members), quorum).check()


def master(
    policy: ReplicationPolicy = TWO_OF_THREE, present: SetConfiguration | None = None, *, durable: int = START
) -> Master:
    return Master(
        A,
        policy,
        present or configuration(A, B, C),
        epoch_confirmable_at=START,
        durable_offset=durable,
        confirm_offset=100,
    )


def accept(one: Master, wanted: SetConfiguration | None) -> None:
    """The controller takes what was asked for."""
    assert wanted is not None
    one.told(wanted._replace(number=wanted.number + 1))


def test_the_quorum_confirms_and_the_master_counts_with_what_is_durable() -> None:
    one = master()
    one.attached(B, START, 0.0)
    assert one.confirm_offset == START
    one.appended(5_000)
    one.acknowledged(B, 3_000, 0.1)
    assert one.confirm_offset == START, "the master's own disk does not have it yet"
    one.durable(2_000)
    assert one.confirm_offset == 2_000
    one.durable(5_000)
    assert one.confirm_offset == 3_000
    one.attached(C, 5_000, 0.2)
    assert one.confirm_offset == 5_000


def test_bytes_of_an_older_epoch_are_not_confirmed_by_counting() -> None:
    """Figure 8 of the Raft paper: a later master without them may still win."""
    one = master(durable=START)
    one.attached(B, 900, 0.0)
    assert one.confirm_offset == 100, "B has the old bytes, not the start record of this epoch"
    one.acknowledged(B, 950, 0.1)
    assert one.confirm_offset == 100
    one.acknowledged(B, START, 0.2)
    assert one.confirm_offset == START


def test_an_acknowledgement_outlives_its_connection_and_a_returning_follower_says_anew_where_it_ends() -> None:
    one = master()
    one.durable(4_000)
    one.attached(B, 4_000, 0.0)
    one.detached(B)
    assert one.confirm_offset == 4_000
    one.durable(6_000)
    one.attached(B, 3_000, 1.0)  # its unsynced end was lost with the power
    assert one.confirm_offset == 4_000
    one.acknowledged(B, 6_000, 1.1)
    assert one.confirm_offset == 6_000


def test_a_learner_is_never_counted_and_never_joins() -> None:
    one = master(present=configuration(A, B))
    one.attached(C, START, 0.0, learner=True)
    assert one.confirm_offset == 100
    one.attached(B, START, 0.0)
    assert one.change(0.1) is None


def test_a_member_without_a_connection_freezes_all_ack() -> None:
    one = master(ALL_ACK, configuration(A, B, C, quorum=3))
    one.attached(B, START, 0.0)
    one.attached(C, START, 0.0)
    one.durable(2_000)
    one.acknowledged(B, 2_000, 0.1)
    one.detached(C)
    assert one.confirm_offset == START
    wanted = one.change(0.2)
    assert wanted == configuration(A, B, quorum=2)
    assert one.confirm_offset == START, "both count until the controller has answered"
    accept(one, wanted)
    assert one.confirm_offset == 2_000


def test_a_master_that_the_controller_does_not_answer_confirms_nothing_alone() -> None:
    one = master(ALL_ACK, configuration(A, B, C, quorum=3))
    assert one.change(100.0) == configuration(A, quorum=1)
    one.durable(9_000)
    assert one.confirm_offset == 100
    assert one.change(200.0) == configuration(A, quorum=1), "it asks again, for the same"


def test_who_does_not_keep_up_leaves_after_a_time_and_who_has_nothing_to_get_does_not() -> None:
    one = master(ALL_ACK, configuration(A, B, C, quorum=3))
    for each in (B, C):
        one.attached(each, START, 0.0)
    one.appended(2_000)
    one.durable(2_000)
    for each in (B, C):
        one.sent(each, 1.0)
    one.acknowledged(B, 2_000, 1.1)
    one.acknowledged(C, 1_500, 1.1)
    assert one.change(15.0) is None
    one.sent(B, 20.0)  # nothing new for B: it counts as caught up
    assert one.change(20.0) == configuration(A, B, quorum=2)


def test_a_member_that_has_just_connected_is_given_time_to_catch_up() -> None:
    """Otherwise each election would shrink the set, and widen it again a moment later."""
    one = master(durable=9_000)
    one.attached(B, 9_000, 10.0)
    one.attached(C, 2_000, 10.0)
    assert one.change(10.1) is None
    later = 10.2 + one.policy.max_behind_s
    one.sent(B, later)
    wanted = one.change(later)
    assert wanted is not None and C not in wanted.members


def test_caught_up_is_what_a_follower_was_at_the_time_its_bytes_were_sent() -> None:
    one = master()
    one.attached(B, START, 0.0)
    one.appended(2_000)
    one.sent(B, 3.0)
    one.appended(9_000_000)
    one.acknowledged(B, 2_000, 5.0)
    (state,) = one.followers()
    assert state.caught_up_at == 3.0


def test_a_follower_joins_a_master_under_load() -> None:
    """Whatever it acknowledges, a master of one has confirmed more: so both configurations count before it joins."""
    one = master(AUTO, configuration(A, quorum=1), durable=2_000)
    assert one.confirm_offset == 2_000
    one.attached(B, 1_500, 0.0)
    one.sent(B, 0.0)
    one.durable(3_000)
    one.acknowledged(B, 2_000, 0.1)
    assert one.change(0.2) is None
    assert one.prepared == configuration(A, B, quorum=2)
    one.durable(4_000)
    assert one.confirm_offset == 3_000, "from here on B is needed, too"
    one.acknowledged(B, 2_900, 0.3)
    assert one.change(0.3) is None, "B lacks a byte that A alone has confirmed"
    one.acknowledged(B, 3_500, 0.4)
    wanted = one.change(0.4)
    assert wanted == configuration(A, B, quorum=2)
    accept(one, wanted)
    assert one.confirm_offset == 3_500


def test_a_new_master_keeps_the_members_until_the_others_have_all_that_it_began_with() -> None:
    """The master before may have confirmed bytes with C that this one does not know to be confirmed, and B lacks: with
    A and B alone as members, each of them could be elected by its own promise."""
    one = master()
    one.attached(B, 500, 0.0)
    assert one.change(60.0) is None
    one.acknowledged(B, START - 1, 60.1)
    assert one.change(60.2) is None
    one.acknowledged(B, START, 60.3)
    wanted = one.change(60.4)
    assert wanted is not None and wanted.members == {A, B} and wanted.quorum == 2


def test_a_new_master_goes_on_alone_where_the_policy_lets_it() -> None:
    """It has all that it began with."""
    one = master(AUTO)
    wanted = one.change(60.0)
    assert wanted is not None and wanted.members == {A} and wanted.quorum == 1


def test_what_was_only_prepared_is_given_up_when_the_follower_goes() -> None:
    one = master(AUTO, configuration(A, quorum=1), durable=2_000)
    one.attached(B, 1_500, 0.0)
    one.sent(B, 0.0)
    one.acknowledged(B, 2_000, 0.1)
    one.durable(3_000)
    one.acknowledged(B, 2_500, 0.2)
    one.change(0.2)
    one.detached(B)
    one.durable(5_000)
    assert one.change(0.3) is None
    assert one.confirm_offset == 5_000


def test_a_follower_without_the_epochs_start_does_not_join() -> None:
    one = master(AUTO, configuration(A, quorum=1), durable=START)
    one.attached(B, 900, 0.0)
    one.sent(B, 0.0)
    assert one.change(0.1) is None
    assert one.prepared is None


def test_the_quorum_stays_when_members_go_and_is_lowered_by_auto_degrade_alone() -> None:
    strict = master(present=configuration(A, B))
    strict.attached(B, START, 0.0)
    strict.detached(B)
    assert strict.change(60.0) is None
    assert "1 replicas are in sync" in strict.refusal(60.0)
    auto = master(AUTO, configuration(A, B))
    auto.attached(B, START, 0.0)
    auto.detached(B)
    wanted = auto.change(60.0)
    assert wanted == configuration(A, quorum=1)
    assert not auto.refusal(60.0)
    auto.durable(2_000)
    assert auto.confirm_offset == START, "not before the controller has committed it"
    accept(auto, wanted)
    assert auto.confirm_offset == 2_000
    assert auto.is_degraded


def test_a_broker_that_connects_twice_is_counted_once() -> None:
    one = master(ReplicationPolicy(total_replicas=3, in_sync_replicas=3), configuration(A, B, C, quorum=3))
    for at in (0.0, 0.1):
        one.attached(B, START, at)
        one.acknowledged(B, START, at)
    assert one.confirm_offset == 100, "C has nothing"
    one.attached(C, START, 0.2)
    assert one.confirm_offset == START


def test_a_broker_that_comes_back_with_another_wal_is_another_replica() -> None:
    one = master(present=configuration(A, B))
    one.attached(B, START, 0.0)
    other = WalReplica(B.broker_id, "another disk")
    one.durable(3_000)
    one.attached(other, 3_000, 1.0)
    assert one.confirm_offset == START, "it is no member, whatever it holds"
    wanted = one.change(1.1)
    assert wanted == configuration(A, other)
    accept(one, wanted)
    assert one.confirm_offset == 3_000


def test_a_refused_request_counts_no_more_and_an_older_configuration_is_ignored() -> None:
    one = master(ALL_ACK, configuration(A, B, quorum=2))
    one.attached(B, START, 0.0)
    one.attached(C, START, 0.0)
    assert one.change(0.1) == configuration(A, B, C, quorum=3)
    one.durable(2_000)
    one.acknowledged(B, 2_000, 0.2)
    assert one.confirm_offset == START
    one.refused()
    assert one.confirm_offset == 2_000
    one.told(configuration(A, quorum=1, number=6))
    assert one.configuration == configuration(A, B, quorum=2)


def test_a_gap_is_no_lag_while_the_follower_keeps_catching_up() -> None:
    one = master()
    one.attached(B, START, 0.0)
    one.appended(START + (10 << 20))
    assert B in one.in_sync(1.0), "it had everything a second ago"
    assert B not in one.in_sync(10.0)
    one.acknowledged(B, START + (10 << 20) - 1_000, 10.0)
    assert B in one.in_sync(10.0), "less than the gap is missing"


@pytest.mark.parametrize(
    ("total", "in_sync", "least"), [(0, 1, 1), (10, 1, 1), (2, 3, 1), (3, 2, 3), (3, 2, 0), (1, 0, 0)]
)
def test_contradicting_settings_are_refused(total: int, in_sync: int, least: int) -> None:
    with pytest.raises(InvalidInput):
        ReplicationPolicy(total, in_sync, least).check()


@pytest.mark.parametrize(
    ("policy", "in_sync", "size", "quorum"),
    [
        (TWO_OF_THREE, 3, 3, 2),
        (TWO_OF_THREE, 1, 1, 2),
        (AUTO, 1, 3, 1),
        (AUTO, 2, 3, 2),
        (AUTO, 3, 3, 2),
        (ALL_ACK, 1, 3, 3),
        (ALL_ACK, 1, 1, 1),
    ],
)
def test_the_quorum_follows_the_policy(policy: ReplicationPolicy, in_sync: int, size: int, quorum: int) -> None:
    assert policy.quorum(in_sync, size) == quorum


def test_all_ack_refuses_when_the_set_is_too_small() -> None:
    policy = ReplicationPolicy(3, 3, 2, all_ack_in_sync_state_set=True)
    one = Master(
        A, policy, configuration(A, quorum=1), epoch_confirmable_at=START, durable_offset=START, confirm_offset=0
    )
    assert "min_in_sync_replicas is 2" in one.refusal(0.0)


def test_a_follower_that_is_to_leave_is_let_go_of_when_the_quorum_allows_it() -> None:
    one = master()
    for each in (B, C):
        one.attached(each, START, 0.0)
    one.leaving = frozenset({C.broker_id})
    wanted = one.change(0.1)
    assert wanted is not None and (wanted.members, wanted.quorum) == (frozenset({A, B}), 2)
    accept(one, wanted)
    one.acknowledged(C, START, 0.2)
    assert one.change(0.2) is None, "it follows, and does not come back"
    one.leaving = frozenset({B.broker_id, C.broker_id})
    assert one.change(0.3) is None, "two must hold a byte"
    one.leaving = frozenset()
    back = one.change(0.4)
    assert back is not None and back.members == {A, B, C}
