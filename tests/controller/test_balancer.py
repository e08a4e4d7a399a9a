"""The balancer over a real state machine: when it plans, what it issues, and what makes it stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.controller.controller_helpers import TOPIC, Driver
from tidelog.controller.active import balance_picture
from tidelog.controller.active.balance_schedule import MODE_KEY, STEADY_S, STUCK_MS
from tidelog.controller.active.balancer import Balancer
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.image.image import Delta
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.load import BrokerLoad, PartitionLoad
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.settings import BalancerSettings, ScaleSettings
from tidelog.runtime.steps import at_once


class Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return int(self.now_s * 1000)

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class World:
    """Brokers 1 to 3, a topic, and a balancer that commits to their state."""

    def __init__(self, partitions: int = 12, brokers: int = 3, **settings: Any) -> None:
        self.driver = Driver()
        self.clock = Clock()
        self.driver.now_ms = self.clock.time_ms()
        for broker in range(1, brokers + 1):
            self.driver.broker(broker)
        self.driver.run(c.CreateTopic(TOPIC, "t", partitions, {}, False, False, (1,) * partitions))
        self.commands: list[c.MovePartitions] = []
        defaults = {"mode": "on", "min_bytes_per_s": 0, "min_requests_per_s": 1_000}
        self.balancer = Balancer(
            BalancerSettings(**{**defaults, **settings}),
            ScaleSettings(),
            ActiveRole(lambda: self.driver.image, self.propose, lambda: True, lambda: self.driver.now_ms),
            self.clock,
        )
        self.schedule = self.balancer.schedule
        self.schedule.activated(self.clock.now_s)

    async def propose(self, command: c.AnyCommand) -> None:
        assert isinstance(command, c.MovePartitions)
        self.commands.append(command)
        assert self.driver.run(command) == [None] * len(command.moves)
        moved = [(each.topic_id, each.index) for each in command.moves]
        rows = [RowChange("partitions", key, self.driver.image.partition(*key)) for key in moved]
        self.schedule.note(Delta(self.driver.index, rows), self.clock.now_s)

    def report(self, rate: int = 1_000_000) -> None:
        """Every partition takes `rate` bytes a second."""
        for broker in self.driver.image.brokers:
            owned = [one for one in self.driver.image.all_partitions() if one.replica_set == broker]
            rows = tuple(PartitionLoad(one.first_stream, rate, 0, 0) for one in owned)
            self.schedule.loads.note(broker, 1, BrokerLoad(rate * len(rows), 0, 0, 0, rows), self.clock.now_s)

    def look(self, seconds: float = 0.0) -> None:
        self.clock.now_s += seconds
        self.report()
        run(self.balancer.look(self.clock.now_s))

    def settle(self) -> None:
        """From the first look to a plan."""
        self.look()
        self.look(STEADY_S)

    def finish_moves(self) -> int:
        moving = tuple((one.topic_id, one.index) for one in self.driver.image.moving())
        if moving:
            self.driver.run(c.ElectPartitions(moving))
        return len(moving)

    def owners(self) -> Counter[int]:
        return Counter(one.replica_set for one in self.driver.image.all_partitions())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_it_waits_for_quiet_and_then_evens_out() -> None:
    world = World()
    world.look()
    world.look(STEADY_S / 2)
    assert not world.commands
    world.look(STEADY_S / 2)
    assert len(world.commands) == 1  # one command for all
    world.finish_moves()
    assert world.owners() == {1: 4, 2: 4, 3: 4}
    world.look(1_000.0)
    assert len(world.commands) == 1


def test_advising_moves_nothing_and_says_what_it_would_do() -> None:
    world = World(mode="advise")
    world.settle()
    assert not world.commands
    status = world.schedule.status(world.clock.now_s)
    assert (status["planned"], status["issued"]) == (8, 0)
    plan = at_once(world.schedule.plan(world.clock.now_s, world.clock.time_ms()))
    assert plan["total"] == 8 and {move["from"] for move in plan["moves"]} == {1}
    assert all(move["why"].startswith("t-") for move in plan["moves"])
    told = world.schedule.told()
    assert told is not None and told.planned_moves == 8


def test_off_plans_nothing_by_itself_but_does_when_asked() -> None:
    world = World(mode="off")
    world.settle()
    assert world.schedule.status(world.clock.now_s)["planned"] == 0
    run(world.balancer.carry_out())
    told = world.schedule.told()
    assert told is not None and (told.planned_moves, told.balancer_moves) == (0, 8)
    world.finish_moves()
    assert world.owners() == {1: 4, 2: 4, 3: 4}


def test_an_operators_mode_wins_over_the_configured_one_until_it_is_taken_back() -> None:
    world = World(mode="off")
    world.driver.run(c.PutKv(MODE_KEY, b"advise"))
    world.settle()
    assert world.schedule.status(world.clock.now_s)["planned"] == 8 and not world.commands
    world.driver.run(c.PutKv(MODE_KEY, b"on"))
    world.look(60.0)
    assert len(world.commands) == 1
    status = world.schedule.status(world.clock.now_s)
    assert (status["mode"], status["configured_mode"]) == ("on", "off")
    world.driver.run(c.PutKv(MODE_KEY, b"of a newer version"))
    assert world.schedule.mode == "off"
    world.driver.run(c.DeleteKv(MODE_KEY))
    assert world.schedule.mode == "off"


def test_switched_off_it_issues_nothing_more_of_its_own_plan() -> None:
    world = World(partitions=60, max_moves_in_flight=8)
    world.settle()
    assert len(world.commands) == 1
    world.driver.run(c.PutKv(MODE_KEY, b"advise"))
    world.finish_moves()
    world.look(1.0)
    assert len(world.commands) == 1 and world.schedule.status(world.clock.now_s)["left"] == 0
    run(world.balancer.carry_out())  # somebody asks: that goes on
    world.finish_moves()
    world.look(1.0)
    assert len(world.commands) == 3 and world.schedule.status(world.clock.now_s)["left"] > 0


def test_no_more_move_at_a_time_than_allowed() -> None:
    world = World(partitions=60, max_moves_in_flight=8)
    world.settle()
    most = 0
    for _ in range(20):
        most = max(most, len(world.driver.image.moving()))
        world.finish_moves()
        world.look(1.0)
    assert most == 8
    assert all(18 <= count <= 22 for count in world.owners().values())
    assert all(len(command.moves) <= 8 for command in world.commands)


def test_moves_of_others_count_and_it_waits_until_they_are_over() -> None:
    world = World()
    world.look()
    world.driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 0, 2),)))
    world.look(STEADY_S)
    assert not world.commands
    world.finish_moves()
    world.look(1.0)
    assert len(world.commands) == 1


def test_moves_that_wait_for_a_dead_target_do_not_hold_up_those_to_others() -> None:
    world = World(partitions=60, brokers=2, max_moves_in_flight=8)
    world.settle()
    assert len(world.commands) == 1, "all to broker 2"
    world.driver.run(c.SetBrokerAlive(2, world.driver.image.brokers[2].registration_epoch, False))
    world.driver.broker(3)  # in its place
    world.settle()
    world.look(STUCK_MS / 1000 + 1)
    later = world.commands[1:]
    assert [move.replica_set for command in later for move in command.moves] == [3] * 8
    world.look(1.0)
    assert world.commands[1:] == later, "those that go on count"
    assert len(world.driver.image.moving()) == 16


def test_moves_from_a_dead_source_do_not_hold_up_those_of_others() -> None:
    world = World(partitions=60, max_moves_in_flight=8)
    world.look()
    world.driver.run(c.MovePartitions(tuple(c.PartitionMove(TOPIC, index, 2) for index in range(30))))
    world.finish_moves()
    world.driver.run(c.MovePartitions(tuple(c.PartitionMove(TOPIC, index, 3) for index in range(30, 40))))
    world.driver.run(c.SetBrokerAlive(1, world.driver.image.brokers[1].registration_epoch, False))
    world.settle()
    world.look(STUCK_MS / 1000 + 1)
    assert {move.replica_set for command in world.commands for move in command.moves} == {3}
    assert world.schedule.status(world.clock.now_s)["issued"] > 0


def test_what_has_moved_rests_unless_brokers_come_or_go() -> None:
    world = World(cooldown_ms=100_000, interval_ms=1_000)
    world.look()  # the cool-down begins with known brokers
    run(world.propose(c.MovePartitions(tuple(c.PartitionMove(TOPIC, index, 2) for index in range(12)))))
    world.finish_moves()
    world.look(STEADY_S)
    assert len(world.commands) == 1, "an operator's move is not taken back"
    world.driver.broker(9)
    world.settle()
    assert len(world.commands) == 2


def test_brokers_that_go_void_the_plan() -> None:
    world = World(partitions=60, max_moves_in_flight=8)
    world.settle()
    world.driver.run(c.DrainBroker(3, DrainMode.OPERATOR))
    world.look(1.0)
    assert world.schedule.status(world.clock.now_s)["left"] == 0
    for _ in range(30):
        world.finish_moves()
        world.look(1.0)
    later = [move.replica_set for command in world.commands[1:] for move in command.moves]
    assert 3 not in later and later


def test_a_new_active_controller_plans_anew() -> None:
    world = World(partitions=60, max_moves_in_flight=8)
    world.settle()
    world.finish_moves()
    world.schedule.activated(world.clock.now_s)
    assert world.schedule.status(world.clock.now_s)["left"] == 0
    world.settle()
    for _ in range(20):
        world.finish_moves()
        world.look(1.0)
    assert all(18 <= count <= 22 for count in world.owners().values())


def test_a_partition_that_somebody_else_moved_meanwhile_is_passed_over() -> None:
    world = World(partitions=60, max_moves_in_flight=8)
    world.settle()
    world.finish_moves()
    left = world.schedule.status(world.clock.now_s)["left"]
    queued = world.schedule.shown()["moves"][-left]
    world.driver.run(c.MovePartitions((c.PartitionMove(TOPIC, queued["partition"], 2 if queued["to"] == 3 else 3),)))
    world.finish_moves()
    world.look(1.0)
    issued = [(move.topic_id, move.index) for command in world.commands for move in command.moves]
    assert (TOPIC, queued["partition"]) not in issued


def test_others_run_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for 100,000 partitions held everything that the controller's process does for half a second."""
    monkeypatch.setattr(balance_picture, "STEP_PARTITIONS", 1, raising=False)
    world = World(partitions=50)
    world.look()
    world.clock.now_s += STEADY_S
    world.report()
    turns = 0

    async def look() -> None:
        nonlocal turns
        planning = asyncio.ensure_future(world.balancer.look(world.clock.now_s))
        while not planning.done():
            await asyncio.sleep(0)
            turns += 1
        await planning

    run(look())
    assert len(world.commands) == 1
    assert turns > 50, "a step of its own for each partition"


def test_a_plan_that_others_have_made_obsolete_is_dropped() -> None:
    world = World()
    world.look()
    world.clock.now_s += STEADY_S
    world.report()
    now_s, now_ms = world.clock.now_s, world.clock.time_ms()
    planning = world.schedule.look(now_s, now_ms)
    next(planning)
    world.driver.broker(4)
    assert at_once(planning) is None and world.schedule.status(now_s)["planned"] == 0
    world.look(1.0)
    world.look(STEADY_S)
    assert len(world.commands) == 1 and {each.replica_set for each in world.commands[0].moves} == {2, 3, 4}


def test_one_who_asks_while_a_plan_is_made_gets_one_and_it_begins_once() -> None:
    world = World(max_moves_in_flight=4)
    world.look()
    world.clock.now_s += STEADY_S
    world.report()
    planning = world.schedule.look(world.clock.now_s, world.clock.time_ms())
    next(planning)
    assert run(world.balancer.carry_out())["total"] == 8
    assert at_once(planning) is None
    assert len(world.commands) == 1 and world.schedule.status(world.clock.now_s)["left"] == 4


def test_a_plan_that_was_being_made_when_the_term_ended_is_dropped() -> None:
    world = World()
    world.look()
    world.clock.now_s += STEADY_S
    world.report()
    planning = world.schedule.look(world.clock.now_s, world.clock.time_ms())
    next(planning)
    world.schedule.activated(world.clock.now_s)
    assert at_once(planning) is None and not world.commands
