"""Replica sets of several members: each refusal, repetition and election (docs/design/0015-hot-tier.md)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tests.controller.replica_trio import ALL_ACK, TWO_OF_THREE, Trio
from tidelog.controller.image.lost import TakeoverState, lost_replica_sets
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import (
    BrokerNotDrained,
    ConfigsChanged,
    ConfigurationRefused,
    NotEligible,
    StaleBrokerEpoch,
    from_wire,
)
from tidelog.controller.model.levels import EMPTY_COPY_LEVEL, SET_BACK_LEVEL, UnsupportedLevel
from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.controller.model.replication import PastElectionRecord, PolicyRecord, ReplicationRecord
from tidelog.controller.model.wal_notes import WalLost, WalNote, losses_in
from tidelog.controller.rebuild.adopt import Adoption, adopt
from tidelog.controller.rebuild.plan import RebuildPlan
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound, TidelogError
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica


def wals(*brokers: int) -> frozenset[WalReplica]:
    return frozenset(WalReplica(each, f"wal-{each}") for each in brokers)


# --- levels ---


COMMANDS: list[c.AnyCommand] = [
    r.AlterSyncStateSet(0, 0, 1, 1, 1, (r.ReportedMember(0, "w"),), 1),
    r.BeginElection(0, 1, "why"),
    r.PromiseEpoch(0, 1, 0, 1, "w", 0, 0, 0),
    r.SetReplicaSetPolicy(0, PolicyRecord()),
    r.AddReplica(0, 0, 1, "w"),
    r.RemoveReplica(0, 0),
    r.ElectUnclean(0, 1, 0),
    r.AssignReplica(0, 0),
    r.RetireReplica(0, 0),
    r.TellPriority(0, 0, 1, 2),
    r.SetPriority(0, 0, 2),
    c.BeginRestart(0, 1),
]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: type(each).__name__)
def test_below_level_2_no_command_of_replica_sets_is_written_or_applied(command: c.AnyCommand, level: int) -> None:
    with pytest.raises(UnsupportedLevel, match="needs feature level 2; the cluster is at level"):
        c.encode_envelope(c.Envelope(0, 1, 5, "", 0, 0, command, 1), level)
    state = ControllerState()
    elapsed_ms = 1 if level else -1
    state.apply(c.Envelope(level + 1, 1, 5, "", 0, 0, c.BecomeActive(0, 1, "id", 5), elapsed_ms), 1)
    for version in (level + 1, 3):
        applied = state.apply(c.Envelope(version, 1, 5, "", 0, 0, command, elapsed_ms), state.applied_index + 1)
        refusal = c.decode_result(applied.result).error
        assert refusal is not None and refusal.name == "UnsupportedLevel"
        assert not applied.mutations


@pytest.mark.parametrize(("level", "version"), [(0, 1), (1, 2), (2, 3)])
def test_a_state_below_level_2_does_not_name_the_table(level: int, version: int) -> None:
    state = ControllerState()
    envelope = c.Envelope(level + 1, 1, 5, "", 0, 0, c.BecomeActive(0, 1, "id", 5), 1 if level else -1)
    state.apply(envelope, 1)
    body = msgspec.msgpack.decode(state.dump())
    assert (state.level, body[0]) == (level, version)
    assert ("replication" in dict(body[4])) == (level == 2)


def test_the_rows_are_in_the_snapshot_and_in_both_images() -> None:
    trio = Trio()
    trio.begin()
    trio.promise(1)
    again = ControllerState()
    again.load(trio.state.dump())
    assert again.tables.replication.rows == trio.state.tables.replication.rows == trio.image.replication
    assert trio.local_image.replication == trio.image.replication
    assert again.dump() == trio.state.dump()
    assert [each.broker_id for each in trio.election().promises] == [1]
    assert trio.image.configuration(0) == SetConfiguration(trio.record.sync_state_set_epoch, wals(0, 1, 2), 2)
    assert trio.image.configuration(1) is None and trio.image.election(1) is None


# --- joining and leaving ---


def test_the_master_tells_its_wal_before_others_join_outside_the_sync_state_set() -> None:
    driver = Driver()
    for each in range(2):
        driver.broker(each)
    driver.run(r.AssignReplica(0, 1))
    with pytest.raises(NotEligible, match="has not told its WAL"):
        driver.run(r.AddReplica(0, 1, 1, "wal-1"))
    with pytest.raises(StaleBrokerEpoch):
        driver.run(r.AddReplica(0, 0, 7, "wal-0"))
    driver.run(r.AddReplica(0, 0, 1, "wal-0"))
    with pytest.raises(InvalidInput, match="its directory is a copy"):
        driver.run(r.AddReplica(0, 1, 1, "wal-0"))
    driver.run(r.AddReplica(0, 1, 1, "wal-1"))
    record = driver.image.replica_sets[0]
    assert (record.members, record.sync_state_set, record.master) == ((0, 1), (0,), 0)
    version = driver.state.version
    driver.run(r.AddReplica(0, 1, 1, "wal-1"))
    assert driver.state.version == version, "a repetition changes nothing"


def test_a_master_of_one_tells_its_wal_anew_after_each_start() -> None:
    """Else another broker could join between its registration and its election, which would be refused then."""
    driver = Driver()
    for each in range(2):
        driver.broker(each)
    driver.run(r.SetReplicaSetPolicy(0, TWO_OF_THREE))
    driver.run(r.AddReplica(0, 0, 1, "wal-0"))
    driver.run(r.AssignReplica(0, 1))
    driver.run(c.RegisterBroker(0, "check", "b", "host", 9092, "", ""), int)
    with pytest.raises(NotEligible, match="has not told its WAL"):
        driver.run(r.AddReplica(0, 1, 1, "wal-1"))
    assert driver.run(c.Elect(0, 0), ReplicaSetRecord).master_epoch == 2
    driver.run(r.AddReplica(0, 0, 2, "wal-0"))
    driver.run(r.AddReplica(0, 1, 1, "wal-1"))
    assert driver.image.replication[0].policy == TWO_OF_THREE


def test_a_set_of_one_keeps_its_path() -> None:
    trio = Trio()
    before = trio.image.replica_sets[1]
    assert trio.run(c.Elect(1, 1), ReplicaSetRecord).master_epoch == before.master_epoch + 1
    trio.unchanged(r.BeginElection(1, 2, "test"), NotEligible, "has one member")
    trio.unchanged(r.BeginElection(9, 2, "test"), NotFound, "no replica set 9")
    trio.unchanged(r.SetReplicaSetPolicy(9, TWO_OF_THREE), NotFound)
    trio.unchanged(r.SetReplicaSetPolicy(0, PolicyRecord(3, 4, 1)), InvalidInput, "in_sync_replicas 4")


def test_the_paths_of_sets_of_one_are_closed_to_those_of_several() -> None:
    trio = Trio()
    trio.unchanged(c.Elect(0, 1), NotEligible, "several members")
    trio.die(0)
    epoch = trio.record.master_epoch
    trio.unchanged(c.ElectSuccessor(0, 1, epoch), NotEligible, "several members")
    trio.unchanged(c.Abandon(0, epoch, ()), NotEligible, "several members")
    trio.die(2)
    trio.unchanged(c.RemoveBroker(2), BrokerNotDrained, r"replica sets \[0\]")


def test_a_member_leaves_the_sync_state_set_before_it_leaves_the_set() -> None:
    trio = Trio()
    trio.unchanged(r.RemoveReplica(0, 2), NotEligible, "in the sync-state set")
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    assert {*trio.record.members} == {0, 1}
    trio.run(r.RemoveReplica(0, 2))
    trio.alter((0,), 1)
    trio.run(r.RemoveReplica(0, 1))
    assert {*trio.record.members} == {0}
    epoch = trio.record.master_epoch
    assert trio.run(c.Elect(0, 0), ReplicaSetRecord).master_epoch == epoch + 1, "one member: the path of such sets"


def test_the_home_broker_stays_a_member_of_its_set() -> None:
    """A set of one is elected by its home broker alone: another last member could not lead again after a restart."""
    trio = Trio()
    trio.begin(designated=1)
    for each in (0, 1, 2):
        trio.promise(each)
    assert trio.record.master == 1
    trio.unchanged(r.RetireReplica(0, 0), NotEligible, "home")
    trio.alter((1, 2), 2, master=1)
    trio.unchanged(r.RemoveReplica(0, 0), NotEligible, "home")


def test_a_learner_receives_and_is_never_in_the_sync_state_set() -> None:
    trio = Trio()
    trio.alter((0, 1), 2)
    trio.run(r.RemoveReplica(0, 2))
    trio.run(r.AssignReplica(0, 2, is_learner=True))
    trio.join(2, is_learner=True)
    assert (trio.record.members, trio.record.learners) == ((0, 1), (2,))
    trio.unchanged(trio.alteration((0, 1, 2), 2), ConfigurationRefused, "learner")
    trio.unchanged(r.AddReplica(0, 1, trio.registration(1), "wal-1", True), NotEligible, "is no learner")
    trio.begin()
    with pytest.raises(NotEligible, match="not one of replica set 0"):
        trio.promise(2)


def test_a_broker_with_its_wal_in_the_bucket_joins_nothing() -> None:
    trio = Trio()
    trio.run(c.RegisterBroker(3, "check", "a", "host", 9092, "", "", "s3"), int)
    trio.unchanged(r.AddReplica(0, 3, 1, "wal-3"), NotEligible, "in the bucket")


# --- the SyncStateSet ---


def test_members_and_quorum_change_together_and_the_same_request_again_is_success() -> None:
    trio = Trio()
    request = trio.alteration((0, 1), 1)
    first = trio.run(request, ReplicaSetRecord)
    assert first.sync_state_set == (0, 1)
    version = trio.state.version
    assert trio.run(request, ReplicaSetRecord) == first
    assert trio.state.version == version
    trio.alter((0, 1, 2), 2)
    trio.unchanged(request, Fenced, "is over")
    assert trio.image.configuration(0) == SetConfiguration(first.sync_state_set_epoch + 1, wals(0, 1, 2), 2)


def test_a_request_for_what_is_in_force_only_reports() -> None:
    trio = Trio()
    number = trio.record.sync_state_set_epoch
    trio.alter((0, 1, 2), 2, end=500, confirm=400)
    assert trio.record.sync_state_set_epoch == number
    assert {(each.end_offset, each.confirm_offset) for each in trio.image.replication[0].in_sync} == {(500, 400)}
    trio.alter((0, 1, 2), 2, end=300, confirm=200)
    assert {each.known_end for each in trio.image.replication[0].in_sync} == {500}, "a report takes nothing back"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"registration": 99}, StaleBrokerEpoch),
        ({"epoch": 7}, Fenced),
        ({"number": 1}, Fenced),
        ({"number": 99}, Fenced),
        ({"master": 1}, Fenced),
    ],
)
def test_only_the_present_master_may_ask_with_the_present_epochs(
    changes: dict[str, int], error: type[TidelogError]
) -> None:
    trio = Trio()
    trio.unchanged(trio.alteration((0, 1), 2, **changes), error)


@pytest.mark.parametrize(
    ("members", "quorum", "error", "match"),
    [
        ((), 1, InvalidInput, "1 to 9 members"),
        ((0, 0), 1, InvalidInput, "each broker once"),
        ((0, 1), 3, InvalidInput, "quorum of 3"),
        ((0, 1), 0, InvalidInput, "quorum of 0"),
        ((1, 2), 2, InvalidInput, "stays in"),
        ((0, 1, 3), 2, ConfigurationRefused, "has not joined"),
    ],
)
def test_what_a_sync_state_set_may_be(
    members: tuple[int, ...], quorum: int, error: type[TidelogError], match: str
) -> None:
    trio = Trio()
    trio.unchanged(trio.alteration(members, quorum), error, match)


def test_who_enters_is_alive_and_has_joined_with_that_wal() -> None:
    trio = Trio()
    trio.alter((0, 1), 2)
    trio.die(2)
    trio.unchanged(trio.alteration((0, 1, 2), 2), ConfigurationRefused, "not alive")
    trio.restart(2)
    trio.join(2, "another disk")
    trio.unchanged(trio.alteration((0, 1, 2), 2), ConfigurationRefused, "has not joined")
    trio.die(1)
    trio.alter((0, 1), 1)
    assert trio.record.sync_state_set == (0, 1), "a dead member may stay"


def test_a_policy_that_was_computed_from_another_one_is_refused() -> None:
    driver = Driver()
    driver.broker(0)
    before, after = PolicyRecord(), TWO_OF_THREE
    driver.run(r.SetReplicaSetPolicy(0, after, before))
    assert driver.image.replication[0].policy == after
    with pytest.raises(ConfigsChanged, match="the policy of replica set 0 was changed by somebody else"):
        driver.run(r.SetReplicaSetPolicy(0, before, before))
    driver.run(r.SetReplicaSetPolicy(0, before))
    assert driver.image.replication[0].policy == before


def test_the_policy_bounds_the_quorum() -> None:
    trio = Trio(PolicyRecord(3, 3, 2), 3)
    trio.unchanged(trio.alteration((0, 1, 2), 1), ConfigurationRefused, "below min_in_sync_replicas")
    trio.alter((0,), 1)  # a smaller set than that has a smaller quorum
    every = Trio(ALL_ACK, 3)
    every.unchanged(every.alteration((0, 1, 2), 2), ConfigurationRefused, "the write quorum is 3")


# --- elections ---


def test_an_election_ends_the_epoch_and_the_promises_elect_in_one_command() -> None:
    trio = Trio()
    before = trio.record
    trio.die(0)
    begun = trio.begin()
    assert (begun.master, begun.master_epoch) == (-1, before.master_epoch + 1)
    assert trio.image.master_of(0) is None
    assert trio.promise(1, end=100).master == -1
    after = trio.promise(2, end=200)
    assert (after.master, after.master_epoch) == (2, before.master_epoch + 1)
    assert after.sync_state_set == (0, 1, 2), "who is behind is not known"
    assert after.sync_state_set_epoch == before.sync_state_set_epoch + 1
    assert trio.image.election(0) is None
    version = trio.state.version
    assert trio.promise(1).master == 2, "a late promise is harmless"
    assert trio.state.version == version


def test_a_second_begin_with_the_same_epoch_begins_no_other() -> None:
    trio = Trio()
    command = r.BeginElection(0, trio.record.master_epoch, "test")
    begun = trio.run(command, ReplicaSetRecord)
    trio.promise(1)
    version = trio.state.version
    assert trio.run(command, ReplicaSetRecord) == begun
    assert trio.state.version == version and len(trio.election().promises) == 1
    trio.begin()
    assert not trio.election().promises, "a newer epoch needs new promises"
    trio.promise(0)
    trio.promise(1)
    trio.unchanged(command, Fenced, "is over")


@pytest.mark.parametrize(
    ("first", "second", "master"),
    [
        ((1, 100), (2, 50), 2),
        ((2, 50), (2, 1 << 40), 2),
        ((2, 100), (2, 100), 1),
    ],
    ids=["the newest epoch", "then the largest end", "then the smaller id"],
)
def test_who_is_elected(first: tuple[int, int], second: tuple[int, int], master: int) -> None:
    trio = Trio()
    trio.die(0)
    for _ in range(2):
        trio.begin()
    trio.promise(1, last=first[0], end=first[1])
    assert trio.promise(2, last=second[0], end=second[1]).master == master


def test_priority_decides_among_equals_and_a_designated_one_before_it() -> None:
    trio = Trio()
    trio.die(0)
    trio.join(2, priority=5)
    trio.begin()
    trio.promise(1)
    assert trio.promise(2).master == 2
    trio.begin(designated=1)
    trio.promise(2)
    assert trio.promise(1).master == 1
    trio.begin(designated=1)
    trio.promise(2, end=200)
    assert trio.promise(1, end=150).master == 2, "0 is dead, so 2 may have confirmed bytes that 1 lacks"
    trio.unchanged(r.BeginElection(0, trio.record.master_epoch, "", 0), NotEligible, "broker 0 is not alive")
    trio.unchanged(r.BeginElection(0, trio.record.master_epoch, "", 9), NotEligible, "broker 9 is not alive")


def test_a_designated_broker_is_elected_although_the_old_master_is_ahead_by_what_nobody_confirmed() -> None:
    trio = Trio()
    trio.begin(designated=1)
    trio.promise(1, end=150)
    assert trio.promise(0, end=200).master == -1, "2 lives, and its promise may show that 0 alone has the rest"
    assert trio.promise(2, end=140).master == 1
    trio.begin(designated=2)
    trio.promise(1, end=300)
    trio.promise(0, end=290)
    assert trio.promise(2, end=280).master == 1, "two are ahead, and may have confirmed it"


def test_who_might_help_a_designated_broker_is_waited_for_until_it_dies() -> None:
    trio = Trio()
    trio.begin(designated=1)
    trio.promise(1, end=150)
    trio.promise(0, end=200)
    trio.die(2)
    assert trio.record.master == 0
    trio = Trio()
    trio.begin(designated=1)
    trio.promise(0, end=200)
    trio.promise(2, end=140)
    trio.die(1)
    assert trio.record.master == 0, "the designated one"


def test_a_designated_broker_that_lacks_what_is_known_to_be_confirmed_is_not_elected() -> None:
    trio = Trio()
    trio.begin(designated=1)
    trio.promise(1, end=150)
    trio.promise(2, end=140)
    assert trio.promise(0, end=200, confirm=180).master == 0, "two disks have lost something"


def test_a_living_master_is_waited_for_until_it_dies() -> None:
    trio = Trio()
    trio.begin()
    trio.promise(1)
    assert trio.promise(2).master == -1
    trio.die(0)
    assert trio.record.master == 1, "the command that told of its death elected"
    trio.begin()
    trio.promise(2)
    assert trio.promise(1).master in (1, 2)


def test_an_impatient_election_waits_for_nobody_who_is_not_needed() -> None:
    trio = Trio()
    trio.begin()
    trio.promise(1)
    trio.promise(2)
    trio.begin(is_patient=False)
    trio.promise(1)
    assert trio.promise(2).master == 1


def test_a_master_with_another_disk_is_not_waited_for() -> None:
    trio = Trio()
    trio.restart(0)
    trio.promise(1)
    assert trio.promise(2).master == -1
    trio.join(0, "another disk")
    assert trio.record.master == 1


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"registration": 9}, StaleBrokerEpoch, "not current"),
        ({"epoch": 1}, Fenced, "not for the present"),
        ({"epoch": 99}, Fenced, "not for the present"),
        ({"wal": "another disk"}, NotEligible, "not one of replica set 0"),
        ({"wal": ""}, InvalidInput, "1 to 64 characters"),
        ({"end": -1}, InvalidInput, "ends at -1"),
        ({"end": 100, "confirm": 101}, InvalidInput, "not confirmed up to"),
        ({"last": 99}, InvalidInput, "not older than"),
    ],
)
def test_a_promise_that_does_not_count(changes: dict[str, Any], error: type[TidelogError], match: str) -> None:
    trio = Trio()
    trio.die(0)
    trio.begin()
    version = trio.state.version
    with pytest.raises(error, match=match):
        trio.promise(1, **changes)
    assert trio.state.version == version


def test_a_disk_that_was_rolled_back_is_a_missing_promise() -> None:
    trio = Trio()
    trio.alter((0, 1, 2), 2, end=500, confirm=500)
    trio.die(0)
    trio.begin()
    with pytest.raises(WalLost, match="ends at 499; it had offsets up to 500"):
        trio.promise(1, end=499)
    trio.promise(1, end=600)
    trio.begin()
    with pytest.raises(WalLost, match="up to 600"):
        trio.promise(1, end=599)
    trio.promise(1, end=600)
    assert trio.promise(2, end=500).master == 1
    trio.die(1)
    trio.restart(0)
    trio.begin()
    trio.promise(2, end=500)  # truncated to the confirmed bytes, perhaps: that is no loss
    with pytest.raises(WalLost):
        trio.promise(0, end=499)


def test_a_disk_that_was_rolled_back_does_not_count_although_all_that_is_known_of_it_is_in_the_bucket() -> None:
    """It may have had more than was told, and confirmed that with the master that is gone."""
    trio = Trio()
    (first,) = trio.topic(1)
    epoch = trio.record.master_epoch
    trio.run(c.OpenStreams(0, epoch, tuple((first + step, epoch) for step in range(4))))
    trio.alter((0, 1, 2), 2, end=50, confirm=50)
    trio.commit(epoch, (0, 100), new_object(trio.prepare(1), (first, 0, 2)))
    trio.die(0)
    trio.begin()
    with pytest.raises(WalLost, match="ends at 49; it had offsets up to 50"):
        trio.promise(1, end=49)
    assert trio.promise(2, end=120).master == NO_BROKER, "one promise of three, and the write quorum is two"


def test_a_quorum_of_promises_that_lacks_confirmed_bytes_elects_nobody() -> None:
    """More disks are gone than may be: the best of what is left ends before what another knows to be confirmed."""
    trio = Trio()
    trio.die(0)
    for _ in range(2):
        trio.begin()
    trio.promise(1, last=1, end=900, confirm=900)
    assert trio.promise(2, last=2, end=50).master == -1
    assert trio.promise(1, last=1, end=900, confirm=900).master == -1
    trio.restart(0)
    assert trio.promise(0, last=2, end=950, confirm=900).master == 0
    trio.begin()
    trio.commit(trio.record.master_epoch, (0, 900))
    trio.die(0)
    trio.promise(1, last=1, end=900, confirm=900)
    assert trio.promise(2, last=-1, end=0).master == 1, "what is in the bucket needs no replica"


class TrioBelow(Trio):
    """At the level below that from which on disks that were rolled back elect nobody."""

    version = SET_BACK_LEVEL
    """Of envelopes: the level plus one."""

    def envelope(self, command: c.AnyCommand, client: str = "", sequence: int = 0, done: int = 0) -> c.Envelope:
        """See `Driver.envelope`."""
        return c.Envelope(self.version, self.term, self.now_ms, client, sequence, done, command)


class TrioAtSeven(TrioBelow):
    """At the level below that from which on copies without a record elect nobody."""

    version = EMPTY_COPY_LEVEL


def uploaded(kind: type[Trio] = Trio) -> Trio:
    """A trio of which nothing is known but that its WAL is in the bucket up to 100, and whose master has died."""
    trio = kind()
    (first, *_) = trio.topic(partitions=3)
    epoch = trio.record.master_epoch
    trio.run(c.OpenStreams(0, epoch, tuple((first + step, epoch) for step in range(4))))
    trio.commit(epoch, (0, 100), new_object(trio.prepare(1), (first, 0, 2)))
    trio.die(0)
    trio.begin()
    return trio


def rolled_back(kind: type[Trio] = Trio) -> Trio:
    """The same, when both others have promised with older copies of their disks."""
    trio = uploaded(kind)
    trio.promise(1, end=60)
    trio.promise(2, end=50)
    return trio


def test_two_disks_that_were_rolled_back_elect_nobody_while_a_third_one_has_what_was_confirmed() -> None:
    """What is in the bucket was confirmed: of a quorum's promises one has all of it, and may have more."""
    trio = uploaded()
    trio.promise(1, end=60)
    assert trio.promise(2, end=50).master == NO_BROKER
    lost = lost_replica_sets(trio.image)[0]
    assert (lost.missing, lost.silent) == (0, (0,))
    assert (
        "disks were rolled back: the WALs on brokers 1, 2 end at 60, and the bucket has offsets up to 100. Put back the"
        " disks that the brokers had last (that of broker 0 is enough), or give up" in lost.sentence()
    )
    trio.restart(0)
    assert trio.promise(0, end=130).master == 0


def test_what_was_promised_with_an_older_copy_elects_nobody_when_the_first_right_disk_is_back() -> None:
    """The promise of broker 2 stands until it registers anew, and its right disk may have more than that of 1."""
    trio = rolled_back()
    trio.restart(1)
    assert trio.promise(1, end=120).master == NO_BROKER
    told = lost_replica_sets(trio.image)[0].sentence()
    assert "the WALs on brokers 2 end at 50" in told and "(that of broker 0 is enough)" in told
    trio.begin(is_patient=False)
    assert trio.promise(2, end=50).master == NO_BROKER, "another attempt knows what the one before has seen"
    assert trio.promise(1, end=120).master == NO_BROKER
    trio.restart(2)
    assert trio.promise(2, end=130).master == 2


def test_a_refused_copy_shows_that_disks_were_rolled_back() -> None:
    """More was known of the disk of broker 1 than its copy has, and nothing of that of broker 2."""
    trio = uploaded()
    trio.promise(1, end=120)
    trio.restart(1)
    with pytest.raises(WalLost):
        trio.promise(1, end=60)
    assert trio.election().set_back
    trio.promise(2, end=50)
    trio.restart(1)
    assert trio.promise(1, end=120).master == NO_BROKER
    trio.restart(2)
    assert trio.promise(2, end=130).master == 2


def test_a_follower_that_is_behind_what_is_in_the_bucket_votes() -> None:
    trio = uploaded()
    trio.promise(2, end=50)
    assert trio.promise(1, end=100).master == 1


def test_an_older_copy_counts_again_when_it_has_what_the_new_master_had() -> None:
    """If that one dies before, the copy would elect a follower without what the right disk had confirmed with it."""
    trio = rolled_back()
    trio.restart(0)
    assert trio.promise(0, end=130).master == 0
    trio.die(0)
    trio.begin()
    with pytest.raises(WalLost, match="ends at 120; it had offsets up to 130"):
        trio.promise(1, end=120)
    trio.promise(1, end=130)
    assert trio.promise(2, end=140).master == 2


def test_a_refused_copy_counts_again_when_it_has_what_the_new_master_had() -> None:
    """Its broker was started again meanwhile, and follows: if the master dies before, it would elect a follower."""
    trio = uploaded()
    trio.promise(1, end=120)
    trio.restart(1)
    with pytest.raises(WalLost, match="ends at 110; it had offsets up to 120"):
        trio.promise(1, end=110)
    trio.begin(is_patient=False)
    trio.promise(2, end=105)
    trio.restart(0)
    assert trio.promise(0, end=130).master == 0
    trio.die(0)
    trio.begin()
    with pytest.raises(WalLost, match="ends at 110; it had offsets up to 130"):
        trio.promise(1, end=110)
    assert trio.promise(2, end=105).master == NO_BROKER
    assert trio.promise(1, end=130).master == 1


def test_a_right_disk_that_promises_after_a_refused_copy_counts_as_ever() -> None:
    trio = uploaded()
    trio.promise(1, end=120)
    trio.restart(1)
    with pytest.raises(WalLost):
        trio.promise(1, end=110)
    trio.restart(1)
    trio.promise(1, end=120)
    trio.restart(0)
    assert trio.promise(0, end=130).master == 0
    trio.die(0)
    trio.begin()
    trio.promise(1, end=120)
    assert trio.promise(2, end=105).master == 1


def test_a_designated_follower_is_not_elected_by_an_older_copy_beside_the_last_master() -> None:
    """The right disk of broker 1 may have confirmed what only the last master's has among those that are there."""
    trio = rolled_back()
    trio.restart(0)
    trio.begin(designated=2, is_patient=False)
    trio.promise(1, end=60)
    trio.promise(2, end=110)
    assert trio.promise(0, end=130).master == 0


def test_promises_with_older_copies_count_beside_the_last_masters() -> None:
    """It has all that was confirmed, and is not waited for when it has promised with an older copy itself."""
    trio = uploaded()
    trio.restart(0)
    trio.promise(0, end=60)
    assert trio.promise(1, end=60).master == NO_BROKER
    assert trio.promise(2, end=130).master == NO_BROKER
    trio.restart(0)
    assert trio.promise(0, end=130).master == 0


def test_an_older_copy_of_the_last_masters_disk_elects_nobody_beside_a_follower_that_lags() -> None:
    """It had all that is in the bucket. What it has confirmed with one follower the other one lacks."""
    trio = uploaded()
    trio.restart(0)
    trio.promise(0, end=60)
    assert trio.promise(1, end=120).master == NO_BROKER
    assert "the WALs on brokers 0 end at 60" in lost_replica_sets(trio.image)[0].sentence()
    assert trio.promise(2, end=130).master == 2


def test_an_older_copy_of_the_last_masters_disk_elects_until_all_members_know_the_rule() -> None:
    trio = uploaded(TrioAtSeven)
    trio.restart(0)
    trio.promise(0, end=60)
    assert trio.promise(1, end=120).master == 1


def test_what_enough_promises_lack_is_told() -> None:
    """A master told what was confirmed, and died while the others received what they lacked."""
    trio = uploaded()
    trio.restart(0)
    trio.promise(2, end=100)
    assert trio.promise(0, end=130, confirm=120).master == 0
    trio.die(0)
    trio.begin()
    trio.promise(1, end=110)
    assert trio.promise(2, end=105).master == NO_BROKER
    told = lost_replica_sets(trio.image)[0].sentence()
    assert "the WALs on brokers 1, 2 end at 110, and offsets up to 120 were confirmed" in told
    assert "another WAL, that of 0; or give up" in told and "replica-set elect 0 --broker B --accept-loss" in told
    trio.restart(0)
    assert trio.promise(0, end=130, last=2, confirm=120).master == 0


def test_one_right_disk_is_elected_beside_older_copies_until_all_members_know_the_rule() -> None:
    trio = rolled_back(TrioAtSeven)
    assert not trio.election().set_back
    trio.restart(1)
    assert trio.promise(1, end=120).master == 1


def test_disks_that_were_rolled_back_elect_as_before_until_all_members_know_the_rule() -> None:
    trio = uploaded(TrioBelow)
    assert trio.state.level == SET_BACK_LEVEL - 1
    trio.promise(1, end=60)
    assert trio.promise(2, end=50).master == 1


def test_three_disks_that_were_rolled_back_elect_nobody_until_an_operator_accepts_the_loss() -> None:
    trio = uploaded()
    trio.restart(0)
    for each in range(3):
        assert trio.promise(each, end=60).master == NO_BROKER
    told = lost_replica_sets(trio.image)[0].sentence()
    assert "`tidelog replica-set elect 0 --broker B --accept-loss`" in told and "end at 60" in told
    epoch = trio.record.master_epoch
    assert trio.run(r.ElectUnclean(0, epoch, 1), ReplicaSetRecord).master == 1
    (loss,) = losses_in(trio.image.kv)
    assert (loss.replica_set, loss.end_offset, loss.may_be_more) == (0, 100, True)
    trio.die(1)  # before its WAL begins behind what is in the bucket
    trio.restart(1)
    trio.begin()
    assert trio.promise(1, end=60).master == 1, "this loss was accepted already"
    assert len(losses_in(trio.image.kv)) == 1


def test_a_wal_that_began_behind_what_is_in_the_bucket_and_has_received_nothing_counts() -> None:
    trio = uploaded()
    trio.promise(1, last=-1, end=0)
    assert trio.promise(2, last=-1, end=0).master != NO_BROKER


@pytest.mark.parametrize(("kind", "says"), [(Trio, "empty no WAL"), (TrioAtSeven, "let it join with an empty WAL")])
def test_the_advice_for_an_old_copy_keeps_it_where_it_may_be_the_best_one(kind: type[Trio], says: str) -> None:
    trio = uploaded(kind)
    trio.promise(1, end=130)
    with pytest.raises(WalLost) as refused:
        trio.promise(1, end=120)
    assert says in (refused.value.hint or "")


def test_an_old_copy_that_had_received_nothing_elects_nobody() -> None:
    """It tells the offset at which it began, and would not be in sync if that were behind what is in the bucket."""
    trio = uploaded()
    trio.promise(1, last=-1, end=64)
    assert trio.promise(2, last=-1, end=64).master == NO_BROKER
    trio.restart(0)
    assert trio.promise(0, end=130).master == 0


def test_an_old_copy_that_had_received_nothing_elects_as_before_until_all_members_know_the_rule() -> None:
    trio = uploaded(TrioAtSeven)
    assert trio.state.level == EMPTY_COPY_LEVEL - 1
    trio.promise(1, last=-1, end=64)
    assert trio.promise(2, last=-1, end=64).master != NO_BROKER


def test_all_ack_goes_on_with_the_living() -> None:
    trio = Trio(ALL_ACK, 3)
    trio.die(0)
    trio.begin()
    after = trio.promise(2)
    assert (after.master, after.sync_state_set) == (2, (1, 2))
    assert trio.image.configuration(0) == SetConfiguration(after.sync_state_set_epoch, wals(1, 2), 2)


def test_a_new_registration_ends_a_masters_term_and_voids_its_promise() -> None:
    trio = Trio()
    epoch = trio.record.master_epoch
    again = c.RegisterBroker(0, "check", "a", "host", 9092, "", "")
    trio.run(again, int)
    assert trio.record.master == 0, "the same process once more"
    trio.restart(0)
    assert (trio.record.master, trio.record.master_epoch) == (-1, epoch + 1)
    trio.promise(0)
    trio.restart(0)
    assert trio.record.master_epoch == epoch + 1 and not trio.election().promises
    trio.promise(1)
    assert trio.promise(2).master == -1, "the last master lives"
    assert trio.promise(0).master == 0


def test_the_election_that_ended_last_is_kept_with_its_reason() -> None:
    trio = Trio()

    def last() -> PastElectionRecord | None:
        return trio.image.replication[0].last_election

    assert last() is None
    epoch = trio.record.master_epoch
    trio.begin(designated=1)
    assert last() is None, "it has not ended"
    began_ms = trio.election().began_ms
    for each in (1, 2, 0):
        trio.promise(each)
    ended = last()
    assert ended is not None and ended.began_ms == began_ms <= ended.elected_ms
    assert ended == PastElectionRecord(epoch + 1, 1, "test", began_ms, ended.elected_ms, 0, 1)
    trio.restart(1)
    assert last() == ended, "the next one is under way"
    for each in (0, 1, 2):
        trio.promise(each)
    after = last()
    assert after is not None and after.reason == "broker 1 was started again" and after.last_master == 1
    again = ControllerState()
    again.load(trio.state.dump())
    assert again.tables.replication.rows == trio.state.tables.replication.rows == trio.local_image.replication


# --- losses ---


def test_an_operator_may_go_on_with_less_and_the_loss_is_recorded() -> None:
    trio = Trio()
    trio.topic(partitions=3)  # one of them on each broker
    owned = len(trio.image.owned(0))
    trio.alter((0, 1, 2), 2, end=500, confirm=450)
    trio.unchanged(r.ElectUnclean(0, trio.record.master_epoch, 1), NotEligible, "no election")
    trio.die(0, 2)
    trio.begin()
    epoch = trio.record.master_epoch
    trio.unchanged(r.ElectUnclean(0, epoch, 1), NotEligible, "has not promised")
    trio.restart(1)
    trio.join(1, "another disk")
    trio.promise(1, wal="another disk", end=20, last=0)
    assert trio.record.master == -1
    trio.unchanged(r.ElectUnclean(0, epoch - 1, 1), Fenced)
    after = trio.run(r.ElectUnclean(0, epoch, 1), ReplicaSetRecord)
    assert (after.master, after.sync_state_set) == (1, (1,))
    assert trio.image.configuration(0) == SetConfiguration(
        after.sync_state_set_epoch, frozenset({WalReplica(1, "another disk")}), 1
    )
    (loss,) = losses_in(trio.image.kv)
    assert (loss.replica_set, loss.end_offset, loss.may_be_more, len(loss.partitions)) == (0, 500, True, owned)


def test_an_unclean_election_loses_nothing_of_a_topic_that_is_being_deleted() -> None:
    trio = Trio()
    trio.topic(partitions=3)
    trio.run(c.DeleteTopic(TOPIC, 1))
    trio.die(0, 2)
    trio.begin()
    trio.restart(1)
    trio.join(1, "another disk")
    trio.promise(1, wal="another disk", end=20, last=0)
    assert trio.image.owned(0), "partitions of the deleted topic are left"
    after = trio.run(r.ElectUnclean(0, trio.record.master_epoch, 1), ReplicaSetRecord)
    assert after.master == 1
    (loss,) = losses_in(trio.image.kv)
    assert (loss.replica_set, loss.partitions) == (0, ())


def test_what_was_given_up_holds_up_no_later_election() -> None:
    """A replica outside the SyncStateSet may know that bytes were confirmed that an operator has given up since."""
    trio = Trio()
    trio.alter((0, 1, 2), 2, end=500, confirm=450)
    trio.die(0, 2)
    trio.begin()
    trio.restart(1)
    trio.join(1, "another disk")
    trio.promise(1, wal="another disk", end=20, last=0)
    epoch = trio.record.master_epoch
    assert trio.run(r.ElectUnclean(0, epoch, 1), ReplicaSetRecord).sync_state_set == (1,)
    trio.restart(0)
    trio.join(0)
    trio.begin()
    trio.promise(0, end=500, confirm=450)
    assert trio.record.master == NO_BROKER, "it is no member, and elects nobody"
    after = trio.promise(1, wal="another disk", end=60, last=epoch, confirm=60)
    assert (after.master, after.sync_state_set) == (1, (1,))
    assert len(losses_in(trio.image.kv)) == 1


def test_an_election_that_loses_nothing_is_never_unclean() -> None:
    trio = Trio()
    trio.begin()
    trio.promise(1)
    trio.promise(2)
    trio.unchanged(r.ElectUnclean(0, trio.record.master_epoch, 1), NotEligible, "loses nothing")


def test_a_rebuilt_cluster_has_sets_of_one_keeps_their_policies_and_records_what_was_in_their_wals() -> None:
    trio = Trio()
    trio.topic(partitions=3)
    trio.run(c.NoteWal(0, WalNote("disk", "bucket", trio.record.master_epoch, 1, 0, False)))
    trio.begin()
    rebuilt = adopt(trio.state, RebuildPlan({}, {}, (), ()), Adoption((0, 1, 2), 2, 0, 5_000))
    record = rebuilt.tables.replica_sets.rows[0]
    assert (record.members, record.learners, record.sync_state_set) == ((0,), (), (0,))
    assert rebuilt.tables.replication.rows == {0: ReplicationRecord(0, TWO_OF_THREE, assigned=(0, 1, 2))}
    assert [each.replica_set for each in losses_in(rebuilt.tables.kv.rows)] == [0], "a note of before proves nothing"


def test_a_dead_master_of_several_members_is_not_taken_over() -> None:
    trio = Trio()
    trio.topic(partitions=3)
    trio.die(0)
    (lost,) = lost_replica_sets(trio.image)
    assert lost.state is TakeoverState.ELECTING and lost.sentence().endswith("wait for an election")
    trio.begin()
    assert TOPIC in trio.image.topics and lost_replica_sets(trio.image)


def test_a_set_without_a_master_tells_whose_wals_its_election_needs() -> None:
    trio = Trio()
    trio.topic(partitions=3)
    trio.die(0, 1)
    trio.begin()
    trio.promise(2)
    lost = lost_replica_sets(trio.image)[0]
    assert (lost.missing, lost.silent) == (1, (0, 1))
    assert "needs 1 more of the WALs on brokers 0, 1" in lost.sentence()
    trio.restart(1)  # it is alive, and that is not what is missing
    lost = lost_replica_sets(trio.image)[0]
    assert (lost.missing, lost.silent) == (1, (0, 1))


def test_an_error_says_the_same_on_the_wire() -> None:
    trio = Trio()
    refused = trio.apply(trio.envelope(trio.alteration((0, 1, 3), 2))).error
    assert refused is not None and isinstance(from_wire(refused), ConfigurationRefused)
