"""Replicas that are assigned: before their brokers join, with them, and taken back."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.controller.controller_helpers import Driver
from tests.controller.replica_trio import TWO_OF_THREE, Trio
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import BrokerNotDrained, ConfigurationRefused, NotEligible, StaleBrokerEpoch
from tidelog.controller.model.levels import EMPTY_COPY_LEVEL
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.replication import PolicyRecord, ReplicationRecord
from tidelog.runtime.errors import InvalidInput, NotFound
from tidelog.storage.replication.policy import MAX_REPLICAS


def test_a_broker_is_assigned_before_it_joins_and_a_second_time_changes_nothing() -> None:
    trio = Trio()
    trio.broker(3)
    assert list(trio.assigned) == [0, 1, 2], "who joined is assigned"
    trio.run(r.AssignReplica(0, 3))
    assert list(trio.assigned) == [0, 1, 2, 3]
    assert list(trio.record.members) == [0, 1, 2]
    assert not trio.state.apply(trio.envelope(r.AssignReplica(0, 3)), trio.index + 1).mutations
    trio.index += 1
    trio.join(3)
    assert list(trio.record.members) == [0, 1, 2, 3]


def test_an_assignment_of_what_cannot_join_is_refused() -> None:
    trio = Trio()
    trio.run(c.RegisterBroker(9, "check", "a", "host", 9092, "", "", "s3"), int)
    trio.unchanged(r.AssignReplica(0, 9), NotEligible, "in the bucket")
    trio.unchanged(r.AssignReplica(7, 1), NotFound, "no replica set 7")
    trio.unchanged(r.AssignReplica(0, 7), NotFound, "no broker 7")
    trio.broker(4)
    trio.die(9)
    trio.run(c.ElectSuccessor(9, 1, trio.image.replica_sets[9].master_epoch))
    trio.unchanged(r.AssignReplica(9, 4), NotEligible, "taken over by broker 1")


def test_no_more_brokers_are_assigned_than_may_have_replicas() -> None:
    driver = Driver()
    for each in range(MAX_REPLICAS + 1):
        driver.broker(each)
    for each in range(1, MAX_REPLICAS):
        driver.run(r.AssignReplica(0, each))
    with pytest.raises(InvalidInput, match=f"may have {MAX_REPLICAS}"):
        driver.run(r.AssignReplica(0, MAX_REPLICAS))
    driver.run(r.AddReplica(0, 0, 1, "wal-0"))  # the place of the master was kept
    with pytest.raises(InvalidInput, match=f"may have {MAX_REPLICAS}"):
        driver.run(r.AssignReplica(0, MAX_REPLICAS))


def test_an_assignment_is_taken_back_before_the_broker_has_joined_and_with_its_replica() -> None:
    trio = Trio()
    trio.broker(3)
    trio.run(r.AssignReplica(0, 3))
    trio.begin()
    trio.run(r.RemoveReplica(0, 3))  # also while there is an election
    assert list(trio.assigned) == [0, 1, 2]
    trio.promise(0)
    trio.promise(1)
    trio.promise(2)
    master = trio.record.master
    trio.alter((0, 1), 2, master=master)
    trio.run(r.RemoveReplica(0, 2))
    assert list(trio.assigned) == list(trio.record.members) == [0, 1]


def test_a_broker_that_was_removed_does_not_join_again_by_a_request_that_comes_late() -> None:
    trio = Trio()
    trio.broker(3)
    late = r.AddReplica(0, 3, trio.registration(3), "wal-3")
    trio.unchanged(late, NotEligible, "never assigned")
    trio.run(r.AssignReplica(0, 3))
    trio.run(r.RemoveReplica(0, 3))  # an operator has changed their mind before it has joined
    trio.unchanged(late, NotEligible, "it was removed")
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    trio.unchanged(r.AddReplica(0, 2, trio.registration(2), "wal-2"), NotEligible, "it was removed")
    assert list(trio.record.members) == [0, 1]
    trio.run(r.AssignReplica(0, 3))
    trio.run(late)
    assert list(trio.record.members) == [0, 1, 3]


def test_below_level_8_a_broker_joins_that_was_not_assigned() -> None:
    """The same commands give the same state on members of all versions."""
    trio = Trio()
    trio.broker(3)
    command = r.AddReplica(0, 3, trio.registration(3), "wal-3")
    envelope = structs.replace(trio.envelope(command), format_version=EMPTY_COPY_LEVEL)
    trio.apply(envelope)
    assert trio.record.members == (0, 1, 2, 3)


def test_a_set_of_one_keeps_its_assignments_when_its_broker_starts_again() -> None:
    driver = Driver()
    for each in range(2):
        driver.broker(each)
    driver.run(r.SetReplicaSetPolicy(0, TWO_OF_THREE))
    driver.run(r.AddReplica(0, 0, 1, "wal-0"))
    driver.run(r.AssignReplica(0, 1))
    driver.broker(0, "b")
    assert driver.image.replication[0] == ReplicationRecord(0, TWO_OF_THREE, assigned=(0, 1))
    driver.run(r.RemoveReplica(0, 1))
    with pytest.raises(NotEligible, match="in the sync-state set"):
        driver.run(r.RemoveReplica(0, 0))


def test_a_broker_is_removed_when_its_own_set_is_empty_although_that_has_other_members() -> None:
    trio = Trio()
    trio.topic(partitions=3)
    trio.run(c.DrainBroker(0, DrainMode.OPERATOR))
    trio.unchanged(c.RemoveBroker(0), BrokerNotDrained, "owns 1 partitions")
    moves = [c.PartitionMove(each.topic_id, each.index, 1) for each in trio.image.owned(0)]
    trio.run(c.MovePartitions(tuple(moves)))
    trio.run(c.ElectPartitions(tuple((each.topic_id, each.index) for each in trio.image.moving())))
    before = trio.record
    trio.run(c.RemoveBroker(0))
    assert 0 not in trio.image.replication and 0 not in trio.image.replica_sets
    trio.broker(0, "again")
    assert trio.record.master_epoch > before.master_epoch
    assert trio.record.sync_state_set_epoch > before.sync_state_set_epoch
    assert list(trio.record.members) == [0] and 0 not in trio.image.replication


def test_a_broker_with_replicas_of_other_sets_is_not_removed_but_one_that_is_only_assigned_is() -> None:
    trio = Trio()
    trio.die(2)
    trio.unchanged(c.RemoveBroker(2), BrokerNotDrained, r"replicas of replica sets \[0\]")
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    trio.run(r.AssignReplica(0, 2))
    trio.run(c.RemoveBroker(2))
    assert list(trio.assigned) == [0, 1]


def test_a_learner_is_assigned_joins_as_one_and_is_promoted_with_its_wal() -> None:
    trio = Trio()
    trio.broker(3)
    trio.unchanged(r.AssignReplica(0, 2, is_learner=True), NotEligible, "becomes no learner")
    trio.run(r.AssignReplica(0, 3, is_learner=True))
    trio.run(r.AssignReplica(0, 3, is_learner=True))
    row = trio.image.replication[0]
    assert (row.assigned, row.learning) == ((0, 1, 2, 3), (3,))
    trio.unchanged(r.AddReplica(0, 3, trio.registration(3), "wal-3"), NotEligible, "is to be a learner")
    trio.join(3, is_learner=True)
    assert (trio.record.members, trio.record.learners) == ((0, 1, 2), (3,))
    trio.unchanged(r.AddReplica(0, 3, trio.registration(3), "wal-3b"), NotEligible, "is a learner")
    trio.unchanged(trio.alteration((0, 1, 2, 3), 2), ConfigurationRefused, "learner")
    trio.run(r.AssignReplica(0, 3))
    assert (trio.record.members, trio.record.learners) == ((0, 1, 2, 3), ())
    replica = trio.image.replication[0].replica(3)
    assert replica is not None and replica.wal_id == "wal-3" and not replica.is_learner
    assert trio.image.replication[0].learning == ()
    assert list(trio.record.sync_state_set) == [0, 1, 2], "its master asks for it when it has caught up"
    late = r.AddReplica(0, 3, trio.registration(3), "wal-3", True)
    trio.unchanged(late, NotEligible, "is a member of replica set 0 by now")
    trio.alter((0, 1, 2, 3), 2)


def test_a_learner_is_promoted_or_removed_before_it_has_joined_and_removed_afterwards() -> None:
    trio = Trio()
    trio.broker(3)
    trio.broker(4)
    trio.run(r.AssignReplica(0, 3, is_learner=True))
    trio.run(r.AssignReplica(0, 3))
    trio.unchanged(r.AddReplica(0, 3, trio.registration(3), "wal-3", True), NotEligible, "is to be a member")
    trio.join(3)
    assert list(trio.record.members) == [0, 1, 2, 3]
    trio.run(r.AssignReplica(0, 4, is_learner=True))
    trio.run(r.RemoveReplica(0, 4))
    row = trio.image.replication[0]
    assert (row.assigned, row.learning) == ((0, 1, 2, 3), ())
    trio.run(r.AssignReplica(0, 4, is_learner=True))
    trio.join(4, is_learner=True)
    trio.run(r.RemoveReplica(0, 4))
    assert trio.record.learners == () and trio.image.replication[0].learning == ()


def test_a_member_that_is_to_leave_does_not_enter_the_sync_state_set_until_it_is_assigned_anew() -> None:
    trio = Trio()
    trio.unchanged(r.RetireReplica(0, 0), NotEligible, "is the master")
    trio.unchanged(r.RetireReplica(0, 7), NotFound, "has no replica")
    trio.run(r.RetireReplica(0, 2))
    trio.alter((0, 1, 2), 2)  # it is still in it
    trio.alter((0, 1), 2)
    trio.unchanged(trio.alteration((0, 1, 2), 2), ConfigurationRefused, "leaves replica set 0")
    trio.run(r.AssignReplica(0, 2))
    assert trio.image.replication[0].leaving == ()
    trio.alter((0, 1, 2), 2)
    trio.run(r.RetireReplica(0, 2))
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    assert trio.image.replication[0].leaving == () and list(trio.assigned) == [0, 1]


# --- election priorities ---


def test_a_joined_broker_tells_another_priority_and_a_removed_one_does_not_join_by_that() -> None:
    trio = Trio()
    told = r.TellPriority(0, 2, trio.registration(2), 5)
    trio.run(told)
    assert [trio.image.replication[0].priority_of(each) for each in range(4)] == [0, 0, 5, 0]
    version = trio.state.version
    trio.run(told)
    assert trio.state.version == version, "the same again changes nothing"
    trio.join(2, priority=-7)
    assert trio.image.replication[0].priority_of(2) == -7
    trio.unchanged(r.TellPriority(0, 2, trio.registration(2) - 1, 9), StaleBrokerEpoch, "is not current")
    trio.unchanged(r.TellPriority(0, 2, trio.registration(2), 1 << 31), InvalidInput, "has 32 bits")
    trio.unchanged(r.TellPriority(9, 2, trio.registration(2), 1), NotFound, "there is no replica set 9")
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    trio.unchanged(r.TellPriority(0, 2, trio.registration(2), 1), NotEligible, "has not joined")


def test_the_priority_of_an_operator_counts_until_it_is_taken_back_or_the_replica_is_removed() -> None:
    trio = Trio()
    trio.run(r.SetPriority(0, 2, 5))
    trio.restart(2)
    trio.join(2, priority=1)
    trio.run(r.TellPriority(0, 2, trio.registration(2), 2))
    row = trio.image.replication[0]
    assert (row.priorities, row.priority_of(2)) == (((2, 5),), 5)
    trio.run(r.SetPriority(0, 2, None))
    assert trio.image.replication[0].priority_of(2) == 2, "what the broker has told meanwhile"
    version = trio.state.version
    trio.run(r.SetPriority(0, 2, None))
    assert trio.state.version == version
    trio.unchanged(r.SetPriority(0, 7, 1), NotFound, "has no replica")
    trio.unchanged(r.SetPriority(0, 2, -(1 << 31) - 1), InvalidInput, "has 32 bits")
    trio.broker(3)
    trio.run(r.AssignReplica(0, 3))
    trio.run(r.SetPriority(0, 3, 8))
    trio.join(3)
    assert trio.image.replication[0].priority_of(3) == 8, "it was set before it joined"
    trio.run(r.RemoveReplica(0, 3))
    assert trio.image.replication[0].priorities == ()


def test_the_priority_of_an_operator_decides_among_equals() -> None:
    trio = Trio()
    trio.die(0)
    trio.run(r.TellPriority(0, 1, trio.registration(1), 3))
    trio.run(r.SetPriority(0, 2, 4))
    trio.begin()
    trio.promise(1)
    assert trio.promise(2).master == 2
    trio.begin()
    trio.promise(1, end=101)
    assert trio.promise(2).master == 1, "who is ahead has what the other one lacks"


def test_a_set_whose_only_member_starts_again_keeps_the_priorities_that_were_set() -> None:
    trio = Trio()
    trio.run(r.SetPriority(0, 0, 4))
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    trio.run(r.SetReplicaSetPolicy(0, PolicyRecord()))
    trio.alter((0,), 1)
    trio.run(r.RemoveReplica(0, 1))
    trio.restart(0)
    row = trio.image.replication[0]
    assert (row.replicas, row.priorities) == ((), ((0, 4),))
