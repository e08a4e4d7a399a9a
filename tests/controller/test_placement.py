"""New topics spread over racks and go where there is least."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.controller_helpers import TOPIC, Driver
from tests.controller.replica_trio import Trio
from tidelog.controller.active.drain_plan import plan_drains
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import InvalidReplicationFactor
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.replication import PolicyRecord

OTHER = bytes(15) + b"o"
Loads = tuple[tuple[int, int], ...]


def cluster(racks: list[str]) -> Driver:
    driver = Driver()
    for broker, rack in enumerate(racks):
        driver.run(c.RegisterBroker(broker, "check", "a", "host", 9092, rack, ""), int)
        driver.run(c.Elect(broker, broker))
    return driver


def create(driver: Driver, partitions: int, loads: Loads | None = (), topic: bytes = TOPIC) -> Counter[int]:
    driver.run(c.CreateTopic(topic, f"t{topic[-1]}", partitions, {}, False, False, None, loads))
    return owners(driver, topic)


def owners(driver: Driver, topic: bytes = TOPIC) -> Counter[int]:
    return Counter(each.replica_set for each in driver.image.partitions(topic))


def test_numbers_decide_where_nothing_else_is_known() -> None:
    assert create(cluster(["", "", ""]), 7) == {0: 3, 1: 2, 2: 2}


def test_what_carries_more_gets_fewer() -> None:
    driver = cluster(["", "", ""])
    create(driver, 9)
    found = create(driver, 9, ((0, 9_000), (1, 0), (2, 0)), OTHER)  # all bytes are broker 0's
    assert found[0] == 0 and abs(found[1] - found[2]) <= 1


def test_a_topic_is_spread_over_racks_by_their_brokers() -> None:
    driver = cluster(["a", "a", "b", "c"])
    found = create(driver, 8)
    assert found[0] + found[1] == 4 and found[2] == 2 and found[3] == 2


def test_the_racks_of_the_partitions_that_are_there_count_when_a_topic_grows() -> None:
    driver = cluster(["a", "b"])
    driver.run(c.CreateTopic(TOPIC, "t", 3, {}, False, False, (0, 0, 0)))
    driver.run(c.CreatePartitions(TOPIC, 6, None, False, ()))
    assert owners(driver) == {0: 3, 1: 3}


def test_a_broker_without_a_rack_makes_racks_count_for_nothing() -> None:
    assert create(cluster(["a", "a", ""]), 6) == {0: 2, 1: 2, 2: 2}


def test_a_command_without_loads_goes_by_numbers_as_it_always_did() -> None:
    assert create(cluster(["a", "a", "b"]), 6, None) == {0: 2, 1: 2, 2: 2}


def test_nothing_is_placed_on_brokers_that_drain_or_are_dead() -> None:
    driver = cluster(["a", "b", "c"])
    driver.run(c.DrainBroker(0, DrainMode.OPERATOR))
    driver.run(c.SetBrokerAlive(1, 1, False))
    assert create(driver, 4) == {2: 4}
    driver.run(c.SetBrokerAlive(2, 1, False))
    with pytest.raises(InvalidReplicationFactor):
        create(driver, 1, (), OTHER)


def test_a_drain_keeps_racks_apart() -> None:
    driver = cluster(["a", "a", "b", "b"])
    create(driver, 8)
    driver.run(c.DrainBroker(0, DrainMode.OPERATOR))
    moves = plan_drains(driver.image)
    assert driver.run(c.MovePartitions(tuple(moves))) == [None, None]
    driver.run(c.ElectPartitions(tuple((one.topic_id, one.index) for one in moves)))
    found = owners(driver)
    assert found[0] == 0 and found[1] >= 2 and found[2] + found[3] <= 6
    driver = cluster(["a", "a", "b"])
    driver.run(c.CreateTopic(TOPIC, "t", 4, {}, False, False, (0, 0, 2, 2)))
    driver.run(c.CreateTopic(OTHER, "o", 4, {}, False, False, (1, 1, 1, 1)))
    driver.run(c.DrainBroker(0, DrainMode.OPERATOR))
    assert {move.replica_set for move in plan_drains(driver.image)} == {
        1
    }  # broker 2 has fewer, but its rack has enough


def sized(*wanted: int) -> Driver:
    """As many brokers as are given, whose sets want so many replicas."""
    driver = cluster(["" for _ in wanted])
    for replica_set, total in enumerate(wanted):
        driver.run(r.SetReplicaSetPolicy(replica_set, PolicyRecord(total)))
    return driver


def create_replicated(driver: Driver, replicas: int, partitions: int = 4, topic: bytes = TOPIC) -> Counter[int]:
    driver.run(c.CreateTopic(topic, f"t{topic[-1]}", partitions, {}, False, False, None, (), replicas))
    return owners(driver, topic)


def test_a_topic_is_placed_on_the_smallest_sets_with_as_many_replicas_as_it_asks_for() -> None:
    found = {replicas: create_replicated(sized(1, 3, 3, 2, 4), replicas) for replicas in range(5)}
    assert found == {0: {0: 1, 1: 1, 2: 1, 3: 1}, 1: {0: 4}, 2: {3: 4}, 3: {1: 2, 2: 2}, 4: {4: 4}}
    assert create_replicated(sized(3, 3, 3), 1) == {0: 2, 1: 1, 2: 1}  # more than it asks for


def test_more_replicas_than_a_set_has_are_refused_with_the_largest() -> None:
    driver = sized(2, 3, 3)
    with pytest.raises(InvalidReplicationFactor, match=r"replication factor 4: the largest .* has 3") as caught:
        create_replicated(driver, 4)
    assert "replication.total_replicas" in str(caught.value)
    driver.run(c.DrainBroker(1, DrainMode.OPERATOR))
    driver.run(c.SetBrokerAlive(2, 1, False))
    with pytest.raises(InvalidReplicationFactor, match=r"the largest .* has 2"):
        create_replicated(driver, 3)


def test_a_set_gets_no_more_replicas_than_there_are_brokers_until_another_registers() -> None:
    driver = sized(3, 3)
    with pytest.raises(InvalidReplicationFactor, match=r"the largest .* has 2"):
        create_replicated(driver, 3)
    driver.broker(2)
    assert create_replicated(driver, 3) == {0: 2, 1: 2}


def test_a_set_that_has_more_members_than_its_policy_wants_counts_them() -> None:
    trio = Trio()
    trio.run(r.SetReplicaSetPolicy(0, PolicyRecord(1)))
    trio.run(c.CreateTopic(OTHER, "other", 2, {}, False, False, None, (), 3))
    assert owners(trio, OTHER) == {0: 2}


def test_a_topic_grows_on_sets_with_no_fewer_replicas_than_it_has() -> None:
    driver = sized(1, 3, 3)
    create_replicated(driver, 3, 2)
    driver.run(c.CreatePartitions(TOPIC, 6, None, False, ()))
    assert owners(driver) == {1: 3, 2: 3}
    for broker in (1, 2):
        driver.run(c.DrainBroker(broker, DrainMode.OPERATOR))
    with pytest.raises(InvalidReplicationFactor, match=r"the largest .* has 1"):
        driver.run(c.CreatePartitions(TOPIC, 7, None, False, ()))


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.integers(1, 40),
    st.lists(st.integers(0, 100_000), min_size=8, max_size=8),
)
def test_no_rack_gets_more_than_its_share(racks: list[str], partitions: int, rates: list[int]) -> None:
    found = create(cluster(racks), partitions, tuple(enumerate(rates)))
    assert found.total() == partitions
    brokers = Counter(racks)
    for rack, count in brokers.items():
        mine = sum(number for broker, number in found.items() if racks[broker] == rack)
        assert mine <= -(-partitions * count // len(racks)) + len(brokers)
