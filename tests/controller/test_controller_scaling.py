"""Draining and removing brokers in the controller's state, and the plan of a drain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.controller.controller_helpers import TOPIC, Driver
from tests.support.examples import examples
from tidelog.controller.active.drain_plan import is_drained, plan_drain_of, plan_drains
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import (
    BrokerNotDrained,
    InvalidReplicationFactor,
    NoPlaceToDrain,
    StaleBrokerEpoch,
)
from tidelog.controller.model.records import NO_REPLICA_SET, DrainMode, PartitionRecord
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError


def make(partitions: int = 9, brokers: int = 3) -> Driver:
    driver = Driver()
    for broker in range(brokers):
        driver.broker(broker)
    driver.topic(partitions)
    return driver


def drain(driver: Driver, broker: int, mode: DrainMode = DrainMode.OPERATOR, epoch: int = -1) -> None:
    driver.run(c.DrainBroker(broker, mode, epoch))


def commit_plan(driver: Driver, limit: int = 64) -> int:
    """One round of the active controller; how many placements it committed."""
    moves = plan_drains(driver.image, limit)
    if moves:
        errors = driver.run(c.MovePartitions(tuple(moves)))
        assert errors == [None] * len(moves)
    return len(moves)


def finish_moves(driver: Driver) -> None:
    """All streams are closed here, so targets can be elected."""
    moving = tuple((one.topic_id, one.index) for one in driver.image.moving())
    if moving:
        driver.run(c.ElectPartitions(moving))


def owners(driver: Driver) -> Counter[int]:
    return Counter(record.replica_set for record in driver.image.all_partitions())


def drain_fully(driver: Driver, broker: int) -> None:
    drain(driver, broker)
    for _ in range(100):
        if not commit_plan(driver):
            break
        finish_moves(driver)
    assert is_drained(driver.image, broker)


def test_a_drained_brokers_partitions_are_spread_evenly_over_the_others() -> None:
    driver = make(partitions=30)
    drain_fully(driver, 1)
    assert owners(driver) == {0: 15, 2: 15}
    assert commit_plan(driver) == 0


def test_new_partitions_are_not_placed_on_a_draining_broker_and_none_is_moved_there() -> None:
    driver = make(partitions=3)
    drain(driver, 1)
    driver.topic(6, "u", bytes(reversed(TOPIC)))
    assert {one.replica_set for one in driver.image.partitions(bytes(reversed(TOPIC)))} == {0, 2}
    index = next(one.index for one in driver.image.partitions(TOPIC) if one.replica_set == 0)
    (error,) = driver.run(c.MovePartitions((c.PartitionMove(TOPIC, index, 1),)))
    assert "is being drained" in error[1]
    drain(driver, 1, DrainMode.NONE)
    assert driver.run(c.MovePartitions((c.PartitionMove(TOPIC, index, 1),))) == [None]


def test_few_are_under_way_at_a_time_and_a_cancel_leaves_the_rest() -> None:
    driver = make(partitions=60)
    drain(driver, 0)
    assert commit_plan(driver, 8) == 8
    assert commit_plan(driver, 8) == 0  # they are under way
    finish_moves(driver)
    drain(driver, 0, DrainMode.NONE)
    assert commit_plan(driver, 8) == 0
    assert owners(driver)[0] == 12


def test_a_dry_run_names_every_move_and_changes_nothing() -> None:
    driver = make(partitions=60)
    before = driver.state.dump()
    moves = plan_drain_of(driver.image, 2)
    assert Counter(move.replica_set for move in moves) == {0: 10, 1: 10}
    assert driver.state.dump() == before


def test_a_target_that_dies_or_drains_is_replaced_and_moves_to_a_draining_broker_are_left() -> None:
    driver = make(partitions=8, brokers=4)
    drain(driver, 0)
    commit_plan(driver)
    driver.run(c.SetBrokerAlive(1, 1, False))
    drain(driver, 2)
    commit_plan(driver)
    assert {one.target for one in driver.image.moving()} == {3}
    drain(driver, 0, DrainMode.NONE)
    drain(driver, 3)
    commit_plan(driver)
    targets = {(one.replica_set, one.target) for one in driver.image.moving()}
    assert all(target not in (2, 3) for _, target in targets), targets
    assert not any(owner == 0 for owner, _ in targets)


def test_the_last_broker_cannot_be_drained_of_partitions() -> None:
    driver = make(partitions=2, brokers=1)
    with pytest.raises(NoPlaceToDrain):
        drain(driver, 0)
    with pytest.raises(NotFound):
        drain(driver, 9)
    with pytest.raises(InvalidInput):
        driver.run(c.DrainBroker(0, 3))


def test_with_all_brokers_draining_a_topic_waits_for_one_that_takes_it() -> None:
    driver = Driver()
    driver.broker(0)
    drain(driver, 0)
    with pytest.raises(InvalidReplicationFactor, match="not draining"):
        driver.topic(1)


def test_the_drain_of_a_shutdown_ends_with_the_process_and_one_of_an_operator_does_not() -> None:
    driver = make()
    with pytest.raises(StaleBrokerEpoch):
        drain(driver, 1, DrainMode.SHUTDOWN, 7)
    drain(driver, 1, DrainMode.SHUTDOWN, 1)
    assert driver.image.brokers[1].draining == DrainMode.SHUTDOWN
    driver.broker(1, "b")
    assert driver.image.brokers[1].draining == DrainMode.NONE
    drain(driver, 1)
    drain(driver, 1, DrainMode.SHUTDOWN, 2)
    assert driver.image.brokers[1].draining == DrainMode.OPERATOR
    driver.broker(1, "c")
    assert driver.image.brokers[1].draining == DrainMode.OPERATOR


def test_a_broker_in_use_is_not_removed_and_a_removed_one_leaves_nothing() -> None:
    driver = make()
    driver.run(c.AlterConfigs("broker", "1", {"a": "b"}))
    with pytest.raises(BrokerNotDrained, match="owns 3 partitions"):
        driver.run(c.RemoveBroker(1))
    driver.run(c.SetBrokerAlive(1, 1, False))
    with pytest.raises(BrokerNotDrained, match="dead"):
        driver.run(c.RemoveBroker(1))
    driver.run(c.SetBrokerAlive(1, 1, True))
    drain_fully(driver, 1)
    driver.run(c.RemoveBroker(1))
    assert 1 not in driver.image.brokers and 1 not in driver.image.replica_sets
    assert ("broker", "1") not in driver.image.configs
    with pytest.raises(NotFound):
        driver.run(c.RemoveBroker(1))


def test_an_idle_live_broker_is_removed_only_after_a_drain_and_a_dead_one_at_once() -> None:
    driver = make(partitions=1)
    idle = next(broker for broker in range(3) if not owners(driver)[broker])
    with pytest.raises(BrokerNotDrained, match="alive"):
        driver.run(c.RemoveBroker(idle))
    driver.run(c.SetBrokerAlive(idle, 1, False))
    driver.run(c.RemoveBroker(idle))


def test_a_broker_that_something_moves_to_is_not_removed() -> None:
    driver = make(partitions=1)
    index_owner = driver.image.partitions(TOPIC)[0].replica_set
    target = (index_owner + 1) % 3
    driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 0, target),)))
    driver.run(c.SetBrokerAlive(target, 1, False))
    with pytest.raises(BrokerNotDrained, match="moving to"):
        driver.run(c.RemoveBroker(target))


def test_epochs_go_on_when_the_id_of_a_removed_broker_comes_again() -> None:
    driver = make(partitions=0 + 3)
    for turn in range(4):
        driver.broker(1, f"turn{turn}")
    before_broker, before_set = driver.image.brokers[1], driver.image.replica_sets[1]
    drain_fully(driver, 1)
    driver.run(c.RemoveBroker(1))
    loaded = ControllerState()
    loaded.load(driver.state.dump())  # it is part of snapshots
    driver.state = loaded
    driver.broker(1, "again")
    assert driver.image.brokers[1].registration_epoch > before_broker.registration_epoch
    assert driver.image.replica_sets[1].master_epoch > before_set.master_epoch
    assert driver.image.replica_sets[1].committed_wal_offset == before_set.committed_wal_offset
    assert driver.image.brokers[1].draining == DrainMode.NONE


class Scaling(RuleBasedStateMachine):
    """Brokers come, drain, die and are removed in any order; partitions always have an owner that exists."""

    brokers = st.integers(0, 4)

    @initialize()
    def start(self) -> None:
        self.driver = make(partitions=5, brokers=2)
        self.topics = 0
        self.epochs: dict[int, tuple[int, int]] = {}
        self.leader_epochs: dict[tuple[bytes, int], int] = {}

    def _try(self, command: c.AnyCommand) -> Any:
        try:
            return self.driver.run(command)
        except TidelogError as error:
            return error

    @rule(broker=brokers, incarnation=st.sampled_from("abc"))
    def register(self, broker: int, incarnation: str) -> None:
        self.driver.broker(broker, incarnation)

    @rule(broker=brokers, alive=st.booleans())
    def live(self, broker: int, alive: bool) -> None:
        record = self.driver.image.brokers.get(broker)
        if record is not None:
            self.driver.run(c.SetBrokerAlive(broker, record.registration_epoch, alive))

    @rule(broker=brokers, mode=st.sampled_from(DrainMode))
    def drain(self, broker: int, mode: DrainMode) -> None:
        record = self.driver.image.brokers.get(broker)
        self._try(c.DrainBroker(broker, mode, record.registration_epoch if record is not None else 0))

    @rule(broker=brokers)
    def remove(self, broker: int) -> None:
        owned = [one for one in self.driver.image.all_partitions() if broker in (one.replica_set, one.target)]
        if self._try(c.RemoveBroker(broker)) is None:
            assert not owned

    @rule(limit=st.integers(1, 4))
    def plan(self, limit: int) -> None:
        commit_plan(self.driver, limit)

    @rule()
    def elect(self) -> None:
        finish_moves(self.driver)

    @rule(partitions=st.integers(1, 4))
    def create(self, partitions: int) -> None:
        self.topics += 1
        topic_id = bytes([self.topics]) * 16
        made = self._try(c.CreateTopic(topic_id, f"t{self.topics}", partitions, {}, False, False, None))
        if not isinstance(made, TidelogError):
            for record in self.driver.image.partitions(topic_id):
                assert not self._master(record.replica_set).draining

    def _master(self, replica_set: int) -> Any:
        return self.driver.image.brokers[self.driver.image.replica_sets[replica_set].master]

    @rule()
    def settle(self) -> None:
        """Left alone, every drain ends as soon as there is a place to go."""
        image = self.driver.image
        for _ in range(200):
            if not commit_plan(self.driver, 4) and not image.moving():
                break
            finish_moves(self.driver)
        places = [one for one in image.brokers.values() if one.alive and not one.draining]
        for record in image.brokers.values():
            if record.draining and places:
                assert is_drained(image, record.id), record

    @invariant()
    def every_partition_has_an_owner_that_exists(self) -> None:
        for record in self.driver.image.all_partitions():
            self._check(record)

    def _check(self, record: PartitionRecord) -> None:
        image = self.driver.image
        assert record.replica_set in image.replica_sets
        assert record.target == NO_REPLICA_SET or record.target in image.replica_sets
        key = (record.topic_id, record.index)
        epoch = image.leader(record)[1]
        assert epoch >= self.leader_epochs.get(key, 0)
        self.leader_epochs[key] = epoch

    @invariant()
    def epochs_never_go_back(self) -> None:
        for broker, record in self.driver.image.brokers.items():
            now = (record.registration_epoch, self.driver.image.replica_sets[broker].master_epoch)
            old = self.epochs.get(broker, (0, 0))
            assert now[0] >= old[0] and now[1] >= old[1]
            self.epochs[broker] = now


TestScaling = Scaling.TestCase
TestScaling.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
