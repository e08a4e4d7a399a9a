"""Replicas move to brokers that come later, one at a time, until nothing is uneven, and no set loses anything by it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.replica_cluster import REPAIR_S, ReplicaCluster
from tests.support.examples import examples
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.replica_balance import PAUSE_S, best_move
from tidelog.controller.active.replica_picture import planned_sets, takes_replicas
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.records import NO_BROKER, DrainMode
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.errors import TidelogError


def grown(racks: list[str], later: list[str], **options: Any) -> ReplicaCluster:
    """A cluster whose replicas are where they shall be, to which brokers are added."""
    cluster = ReplicaCluster(racks, **options)
    cluster.settle()
    for rack in later:
        add(cluster, rack)
    return cluster


def add(cluster: ReplicaCluster, rack: str = "") -> None:
    broker_id = len(cluster.image.brokers)
    policy = cluster.image.replication[0].policy
    cluster.start(broker_id, rack)
    cluster.run(r.SetReplicaSetPolicy(broker_id, policy))
    cluster.join(broker_id, broker_id)


def another_active_controller(cluster: ReplicaCluster) -> None:
    cluster.term += 1
    cluster.run(c.BecomeActive(1, cluster.term, "cluster", 1_000))
    cluster.duties = Duties(lambda: cluster.image, BrokerSessions(10.0), dict, ControllerSettings())


def exchanges(cluster: ReplicaCluster) -> list[tuple[int, int, int]]:
    """What was begun: replica set, the broker that leaves, the one that comes."""
    begun = (each for each in cluster.done if isinstance(each, r.AssignReplica) and each.instead_of != NO_BROKER)
    return [(each.replica_set_id, each.instead_of, each.broker_id) for each in begun]


def under_way(cluster: ReplicaCluster) -> dict[int, tuple[int, int]]:
    rows = cluster.image.replication.values()
    return {row.id: (row.replaced, row.newcomer) for row in rows if row.newcomer != NO_BROKER}


def until_begun(cluster: ReplicaCluster) -> tuple[int, int, int]:
    """Tick until an exchange is under way; replica set, the broker that leaves, the one that comes."""
    for _ in range(60):
        cluster.tick()
        for set_id, (replaced, newcomer) in under_way(cluster).items():
            return set_id, replaced, newcomer
    raise AssertionError("no exchange was begun")


def test_a_fourth_broker_gets_replicas_of_other_sets_until_all_have_three() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(60)
    assert cluster.loads() == {0: 3, 1: 3, 2: 3, 3: 3}
    assert all(len(cluster.assigned(each)) == 3 == len(cluster.record(each).sync_state_set) for each in range(4))
    assert len(exchanges(cluster)) == 2 and not under_way(cluster)
    done = len(cluster.done)
    cluster.settle(1_000)
    assert cluster.done[done:] == []


def test_a_move_waits_until_the_cluster_has_been_calm_and_so_does_the_next_one() -> None:
    cluster = grown(["", "", ""], [""])
    times = []
    for _ in range(60):
        before = len(exchanges(cluster))
        cluster.tick()
        if len(exchanges(cluster)) > before:
            times.append(cluster.now_s)
        assert len(under_way(cluster)) <= 1
    assert len(times) == 2 and times[1] - times[0] > PAUSE_S
    assert times[0] > 20 + PAUSE_S, "the own replicas of the broker come first"


def test_the_one_that_is_replaced_leaves_only_when_the_newcomer_is_in_sync() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {3}
    set_id, replaced, newcomer = until_begun(cluster)
    cluster.settle(100)
    assert newcomer == 3 and replaced in cluster.record(set_id).sync_state_set
    assert len(exchanges(cluster)) == 1, "nothing else begins meanwhile"
    cluster.hung = set()
    cluster.settle(5)
    assert cluster.assigned(set_id) == sorted({0, 1, 2, 3} - {replaced})


def test_nobody_leaves_while_another_member_is_dead() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {3}
    set_id, replaced, newcomer = until_begun(cluster)
    third = next(each for each in range(3) if each not in (set_id, replaced))
    cluster.set_alive(third, False)
    cluster.hung = set()
    cluster.settle(100)
    assert cluster.record(set_id).sync_state_set == tuple(sorted((set_id, replaced, newcomer)))
    cluster.set_alive(third, True)
    cluster.settle(5)
    assert cluster.record(set_id).sync_state_set == tuple(sorted((set_id, third, newcomer)))


def test_a_newcomer_that_never_catches_up_is_given_up_after_the_repair_time() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {3}
    set_id, replaced, newcomer = until_begun(cluster)
    cluster.settle(int(REPAIR_S) + 5)
    assert r.RemoveReplica(set_id, newcomer) in cluster.done
    assert replaced in cluster.assigned(set_id)


def test_a_new_rack_gets_a_replica_of_each_set_that_is_in_one_rack_twice() -> None:
    cluster = grown(["a", "a", "b", "b"], ["c", "c"])
    cluster.settle(300)
    for each in range(6):
        assert sorted(cluster.image.brokers[one].rack for one in cluster.assigned(each)) == ["a", "b", "c"]
    assert max(cluster.loads().values()) - min(cluster.loads().values()) <= 1


def test_racks_stay_as_spread_as_they_are_when_numbers_are_evened_out() -> None:
    cluster = grown(["a", "b", "c"], ["a"])
    cluster.settle(200)
    for each in range(4):
        assert sorted(cluster.image.brokers[one].rack for one in cluster.assigned(each)) == ["a", "b", "c"]
    assert cluster.loads()[3] >= 2, "it takes over from the other broker in its rack"


def test_neither_the_home_broker_nor_the_master_is_replaced() -> None:
    cluster = grown(["", "", ""], [], settings=ControllerSettings(preferred_master_enable=False))
    for set_id in range(3):  # everything is led by broker 0
        cluster.run(r.BeginElection(set_id, cluster.record(set_id).master_epoch, "a test", 0))
        cluster.settle(2)
    assert {cluster.record(each).master for each in range(3)} == {0}
    add(cluster)
    cluster.settle(100)
    assert exchanges(cluster)
    for set_id, replaced, _ in exchanges(cluster):
        assert replaced not in (0, set_id)


def test_the_newcomer_goes_if_the_one_that_it_was_to_replace_has_become_the_master() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {3}
    set_id, replaced, newcomer = until_begun(cluster)
    cluster.run(r.BeginElection(set_id, cluster.record(set_id).master_epoch, "a test", replaced))
    cluster.settle(2)
    assert cluster.record(set_id).master == replaced
    cluster.hung = set()
    cluster.settle(5)
    assert newcomer not in cluster.assigned(set_id) and replaced in cluster.assigned(set_id)


@pytest.mark.parametrize("mode", [DrainMode.SHUTDOWN, DrainMode.OPERATOR])
def test_nothing_begins_while_a_broker_drains(mode: DrainMode) -> None:
    cluster = grown(["", "", ""], [""])
    cluster.drain(3, mode)
    cluster.settle(100)
    assert exchanges(cluster) == []


def test_nothing_begins_while_a_broker_is_dead_and_not_replaced() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(3)
    cluster.set_alive(1, False)
    cluster.settle(100)
    assert exchanges(cluster) == []
    cluster.set_alive(1, True)
    cluster.settle(60)
    assert len(exchanges(cluster)) == 2


def test_what_another_active_controller_began_is_ended_by_the_next_one() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {3}
    set_id, replaced, newcomer = until_begun(cluster)
    another_active_controller(cluster)
    cluster.hung = set()
    cluster.settle(4)
    assert cluster.assigned(set_id) == sorted({0, 1, 2, 3} - {replaced}) and newcomer == 3
    cluster.settle(60)
    assert cluster.loads() == {0: 3, 1: 3, 2: 3, 3: 3}


def test_it_can_be_switched_off() -> None:
    cluster = grown(["", "", ""], [""], settings=ControllerSettings(replica_balance_enable=False))
    cluster.settle(1_000)
    assert cluster.loads()[3] == 1 and exchanges(cluster) == []
    cluster.run(c.AlterConfigs("cluster", "", {"controller.replica_balance_enable": "true"}))
    cluster.settle(60)
    assert cluster.loads()[3] == 3


def test_a_member_that_an_operator_adds_beyond_the_policy_stays_and_so_do_the_others() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(60)
    set_id = next(each for each in range(4) if 3 not in cluster.assigned(each))
    cluster.run(r.AssignReplica(set_id, 3))
    cluster.settle(2_000)
    assert cluster.record(set_id).sync_state_set == (0, 1, 2, 3), "all four, until an operator removes one"


def test_an_operator_may_keep_both_and_the_exchange_is_over() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {3}
    set_id, _, newcomer = until_begun(cluster)
    cluster.run(r.AssignReplica(set_id, newcomer))
    assert under_way(cluster) == {}
    cluster.hung = set()
    cluster.settle(1_000)
    assert cluster.assigned(set_id) == [0, 1, 2, 3]


def test_a_policy_that_wants_one_more_keeps_both() -> None:
    cluster = grown(["", "", ""], [""])
    cluster.settle(5)
    set_id, _, _ = until_begun(cluster)
    cluster.run(r.SetReplicaSetPolicy(set_id, PolicyRecord(4, 2, 1)))
    assert under_way(cluster) == {}
    cluster.settle(100)
    assert cluster.assigned(set_id) == [0, 1, 2, 3]


def test_the_newcomer_takes_the_place_of_a_member_that_an_operator_removes_meanwhile() -> None:
    cluster = grown(["", "", "", ""], [""])
    cluster.settle(5)
    cluster.hung = {4}
    set_id, replaced, newcomer = until_begun(cluster)
    third = next(each for each in cluster.assigned(set_id) if each not in (set_id, replaced, newcomer))
    cluster.run(r.RetireReplica(set_id, third))
    cluster.tick()
    cluster.tick()
    assert under_way(cluster).get(set_id) is None
    assert {set_id, replaced, newcomer} <= {*cluster.assigned(set_id)}


def test_who_is_to_be_replaced_is_checked() -> None:
    cluster = grown(["", "", ""], [""], settings=ControllerSettings(replica_balance_enable=False))
    cluster.settle(5)
    set_id = next(each for each in range(3) if 3 not in cluster.assigned(each))
    other = next(each for each in range(3) if each != set_id)
    for wrong in (set_id, 3, 9):
        with pytest.raises(TidelogError):
            cluster.run(r.AssignReplica(set_id, 3, instead_of=wrong))
    with pytest.raises(TidelogError):
        cluster.run(r.AssignReplica(set_id, 3, is_learner=True, instead_of=other))
    for _ in range(2):
        cluster.run(r.AssignReplica(set_id, 3, instead_of=other))
        assert under_way(cluster) == {set_id: (other, 3)}
    cluster.run(r.RemoveReplica(set_id, 3))
    assert under_way(cluster) == {}


def test_a_row_of_a_build_without_exchanges_is_read() -> None:
    cluster = grown(["", "", ""], [])
    row = cluster.image.replication[0]
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(row))[:-2])
    assert msgspec.msgpack.decode(old, type=type(row)) == row


# --- properties ------------------------------------------------------------------------------------------------------


def disorder(cluster: ReplicaCluster) -> tuple[int, int]:
    """What each move lowers: the squares of the members of each set by rack, then those of the replicas by broker."""
    spread = 0
    for row in cluster.image.replication.values():
        members = {*row.assigned} - {*row.leaving, *row.learning, row.replaced}
        spread += sum(count**2 for count in Counter(cluster.image.brokers[each].rack for each in members).values())
    gone = Counter(row.replaced for row in cluster.image.replication.values() if row.newcomer != NO_BROKER)
    gone += Counter(each for row in cluster.image.replication.values() for each in row.leaving)
    return spread, sum((count - gone[each]) ** 2 for each, count in cluster.loads().items())


def check(cluster: ReplicaCluster) -> None:
    for set_id, row in cluster.image.replication.items():
        in_sync = {*cluster.record(set_id).sync_state_set}
        assert in_sync <= {*row.assigned} and set_id in row.assigned
        assert len(in_sync) >= min(row.policy.total_replicas, len(row.assigned) - 1), "nobody left too early"
        pair = {row.newcomer, row.replaced}
        assert pair == {NO_BROKER} or (pair <= {*row.assigned} - {*row.leaving} and len(pair) == 2)
        assert row.replaced not in (set_id, cluster.record(set_id).master)
    assert len(under_way(cluster)) <= 1


RACKS = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=3, max_size=5)


@settings(max_examples=examples(40), deadline=None)
@given(
    racks=RACKS,
    later=st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=4),
    total=st.integers(2, 4),
    pause=st.integers(0, 12),
    restarts=st.sets(st.integers(0, 200), max_size=5),
)
def test_moves_end_each_lowers_the_disorder_and_no_set_loses_anything(
    racks: list[str], later: list[str], total: int, pause: int, restarts: set[int]
) -> None:
    """Brokers come at any time, and the active controller changes at any time; nothing else happens."""
    cluster = ReplicaCluster(racks, PolicyRecord(total, min(total, 2), 1))
    cluster.settle()
    for rack in later:
        add(cluster, rack)
        cluster.settle(pause)
    cluster.settle(4)  # they have their own replicas
    lowest: tuple[int, int] | None = None
    for second in range(400):
        if second in restarts:
            another_active_controller(cluster)
        begun = len(exchanges(cluster))
        before = disorder(cluster)
        cluster.tick()
        check(cluster)
        if len(exchanges(cluster)) > begun:
            assert disorder(cluster) < before and (lowest is None or before <= lowest)
            lowest = disorder(cluster)
    done = len(cluster.done)
    cluster.settle(20)
    assert cluster.done[done:] == [], "moves have ended"
    image = cluster.image
    assert best_move(image, planned_sets(image, ())) is None
    assert all(len(row.assigned) == min(total, len(image.brokers)) for row in image.replication.values())
    assert all(takes_replicas(each) for each in image.brokers.values())
