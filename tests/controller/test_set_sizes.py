"""A partition goes to no replica set with fewer replicas than its topic asked for, while there is a larger one."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.controller_helpers import TOPIC, Driver
from tests.support.examples import examples
from tidelog.controller.active.balance_picture import Picture, Piece, Target, picture_of
from tidelog.controller.active.balance_plan import make_plan
from tidelog.controller.active.drain_plan import plan_drain_of, plan_drains
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import ErrorInfo, InvalidReplicationFactor, from_wire
from tidelog.controller.model.load import LoadTable, Rates
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.settings import BalancerSettings
from tidelog.controller.model.topic_replicas import replicas_key, topic_replicas
from tidelog.runtime.steps import at_once

OTHER = bytes(15) + b"o"


def sized(*wanted: int, wal_kind: str = "disk") -> Driver:
    """As many brokers as are given, whose sets want so many replicas."""
    driver = Driver()
    for broker, total in enumerate(wanted):
        driver.run(c.RegisterBroker(broker, "check", "a", "host", 9092, "", "", wal_kind), int)
        driver.run(c.Elect(broker, broker))
        if total > 1:
            driver.run(r.SetReplicaSetPolicy(broker, PolicyRecord(total)))
    return driver


def create(driver: Driver, replicas: int, partitions: int = 4, topic: bytes = TOPIC) -> None:
    driver.run(c.CreateTopic(topic, f"t{topic[-1]}", partitions, {}, False, False, None, (), replicas))


def owners(driver: Driver, topic: bytes = TOPIC) -> Counter[int]:
    return Counter(each.replica_set for each in driver.image.partitions(topic))


def moved(driver: Driver, target: int, topic: bytes = TOPIC) -> ErrorInfo | None:
    """The refusal of a move of partition 0."""
    command = c.MovePartitions((c.PartitionMove(topic, 0, target),))
    found = msgspec.convert(driver.run(command), list[ErrorInfo | None])
    return found[0]


def drain(driver: Driver, broker: int) -> None:
    """Empty a broker."""
    driver.run(c.DrainBroker(broker, DrainMode.OPERATOR))
    while moves := plan_drains(driver.image):
        assert set(driver.run(c.MovePartitions(tuple(moves)))) == {None}
        driver.run(c.ElectPartitions(tuple((one.topic_id, one.index) for one in moves)))


def test_the_replication_factor_is_kept_with_the_topic_and_a_topic_that_grows_keeps_it() -> None:
    driver = sized(1, 3, 3)
    create(driver, 3, 2)
    assert topic_replicas(driver.image.kv, TOPIC) == 3
    driver.run(r.SetReplicaSetPolicy(1, PolicyRecord(2)))
    driver.run(c.CreatePartitions(TOPIC, 4, None, False, ()))
    assert owners(driver) == {1: 1, 2: 3}
    assert topic_replicas(driver.image.kv, TOPIC) == 3


def test_the_number_goes_with_the_topic_and_a_topic_that_asked_for_none_has_no_entry() -> None:
    driver = sized(1, 3, 3)
    create(driver, 3, 2)
    driver.run(c.DeleteTopic(TOPIC))
    assert replicas_key(TOPIC) not in driver.image.kv
    create(driver, 0, 2)
    assert replicas_key(TOPIC) not in driver.image.kv
    assert topic_replicas(driver.image.kv, TOPIC) == 0


def test_a_move_to_a_smaller_set_is_refused_while_a_larger_one_takes_partitions() -> None:
    driver = sized(1, 2, 3, 3)
    create(driver, 3, 1)
    (owner,) = owners(driver)
    other = 5 - owner
    for small in (0, 1):
        error = moved(driver, small)
        assert error is not None
        refusal = from_wire(error)
        assert isinstance(refusal, InvalidReplicationFactor) and refusal.kafka_code == 38
        assert f"has replication factor 3; replica set {small} has {small + 1}" in str(refusal)
    assert moved(driver, other) is None and moved(driver, owner) is None
    driver.run(c.DrainBroker(owner, DrainMode.OPERATOR))
    assert moved(driver, 1) is not None
    driver.run(c.SetBrokerAlive(other, 1, False))
    assert moved(driver, 0) is not None, "there is one of two"
    assert moved(driver, 1) is None, "the largest that is left"


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_a_topic_that_asks_for_less_goes_anywhere_with_as_many(replicas: int) -> None:
    driver = sized(2, 3, 3)
    create(driver, replicas, 1)
    for target in (1, 0, 2, 0):
        assert moved(driver, target) is None


def test_a_drain_keeps_to_sets_that_are_large_enough_and_evens_these_out() -> None:
    driver = sized(3, 1, 3, 3, 1)
    driver.run(c.CreateTopic(TOPIC, "t", 8, {}, False, False, (0,) * 8, None, 3))
    driver.run(c.CreateTopic(OTHER, "o", 8, {}, False, False, (0,) * 8))
    assert {one.replica_set for one in plan_drain_of(driver.image, 0) if one.topic_id == TOPIC} == {2, 3}
    drain(driver, 0)
    assert owners(driver).keys() <= {2, 3}
    every = owners(driver) + owners(driver, OTHER)
    assert every == {1: 4, 2: 4, 3: 4, 4: 4}


def test_a_drain_goes_on_with_the_largest_sets_if_none_is_large_enough() -> None:
    driver = sized(3, 1, 2, 2)
    driver.run(c.CreateTopic(TOPIC, "t", 6, {}, False, False, (0,) * 6, None, 3))
    drain(driver, 0)
    assert owners(driver) == {2: 3, 3: 3}


def test_partitions_of_a_broker_that_is_given_up_go_where_there_are_as_many_replicas() -> None:
    driver = sized(1, 1, 3, 3)
    driver.run(c.CreateTopic(TOPIC, "t", 4, {}, False, False, (0,) * 4, None, 3))
    driver.run(c.CreateTopic(OTHER, "o", 2, {}, False, False, (0,) * 2))
    driver.run(c.SetBrokerAlive(0, 1, False))
    keys = tuple((each.topic_id, each.index) for each in driver.image.all_partitions())
    driver.run(c.Abandon(0, driver.image.replica_sets[0].master_epoch, keys))
    assert owners(driver) == {2: 2, 3: 2} and owners(driver, OTHER) == {1: 2}


def test_partitions_that_are_taken_over_go_where_there_are_as_many_replicas() -> None:
    driver = sized(1, 1, 2, wal_kind="s3")
    driver.run(c.CreateTopic(TOPIC, "t", 4, {}, False, False, (0,) * 4, None, 2))
    driver.run(c.SetBrokerAlive(0, 1, False))
    record = driver.run(c.ElectSuccessor(0, 1, driver.image.replica_sets[0].master_epoch))
    keys = tuple((each.topic_id, each.index) for each in driver.image.partitions(TOPIC))
    driver.run(c.PlaceTakenOver(0, int(record[4]), 0, keys))
    assert owners(driver) == {2: 4}


def test_the_balancer_sees_what_a_partition_needs_and_a_set_has() -> None:
    driver = sized(1, 3, 3)
    create(driver, 3, 4)
    create(driver, 0, 4, OTHER)
    picture = at_once(picture_of(driver.image, LoadTable(), 0.0))
    assert [each.replicas for each in picture.places] == [1, 3, 3]
    assert {(each.key[0], each.replicas) for each in picture.pieces} == {(TOPIC, 3), (OTHER, 0)}
    driver.run(r.SetReplicaSetPolicy(1, PolicyRecord(2)))
    driver.run(r.SetReplicaSetPolicy(2, PolicyRecord(2)))
    picture = at_once(picture_of(driver.image, LoadTable(), 0.0))
    assert {each.replicas for each in picture.pieces} == {0, 2}, "no set has more"


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_balancer_moves_no_partition_to_a_set_that_is_too_small(seed: int) -> None:
    rng = random.Random(seed)
    racks = rng.choice([[""], ["a", "b"]])
    places = [Target(number, rng.choice(racks), rng.randint(1, 3)) for number in range(rng.randint(2, 6))]
    pieces = [
        Piece(
            (rng.choice([TOPIC, OTHER]), index),
            rng.choice(places[:2]).id,
            Rates(rng.randint(0, 100_000)),
            True,
            rng.randint(0, max(each.replicas for each in places)),
        )
        for index in range(rng.randint(1, 40))
    ]
    limits = BalancerSettings(min_bytes_per_s=0, min_requests_per_s=0)
    needed, sizes = {each.key: each.replicas for each in pieces}, {each.id: each.replicas for each in places}
    for _ in range(60):
        plan = at_once(make_plan(Picture(places, pieces, []), limits, str))
        targets = {move.key: move.target for move in plan.moves}
        assert all(sizes[target] >= needed[key] for key, target in targets.items())
        pieces = [each._replace(place=targets.get(each.key, each.place)) for each in pieces]
        if not plan.moves:
            return
    raise AssertionError("planning does not end")
