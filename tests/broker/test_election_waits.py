"""Metadata requests wait for elections: bounded for each outage, and only for the replica sets that concern them."""

from __future__ import annotations

from collections.abc import Callable

from tests.controller.replica_trio import Trio
from tidelog.broker.kafka.election_waits import GRACE_S, WAIT_S, ElectionWaits
from tidelog.controller.image.image import Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import NO_BROKER
from tidelog.runtime.clock import SystemClock

TOPIC = b"t" * 16


class StepClock(SystemClock):
    """Time passes when somebody sleeps; what happens meanwhile is a list of times and calls."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        while self.due and self.due[0][0] <= self.now_s:
            self.due.pop(0)[1]()


class Waiting:
    """A replica set with a topic, and the waits of one broker."""

    def __init__(self) -> None:
        self.trio = Trio()
        self.trio.run(c.CreateTopic(TOPIC, "t", 1, {}, False, False, (0,)))
        self.clock = StepClock()
        self.suspects: set[int] = set()
        self.waits = ElectionWaits(lambda: self.trio.image, self.clock, lambda: self.suspects)

    def kill(self) -> None:
        self.trio.run(c.SetBrokerAlive(0, self.trio.registration(0), False))
        self.trio.begin()

    def elect(self) -> None:
        for each in range(3):
            if self.trio.image.brokers[each].alive and self.trio.record.master == NO_BROKER:
                self.trio.promise(each)
        assert self.trio.record.master != NO_BROKER

    async def waited(self, topics: list[bytes] | None = None) -> float:
        before = self.clock.now_s
        await self.waits.wait(topics)
        return self.clock.now_s - before


async def test_nobody_waits_for_long_while_there_is_a_master() -> None:
    assert 0 < await Waiting().waited() < 2 * GRACE_S


async def test_nobody_waits_where_nothing_is_replicated() -> None:
    world = Waiting()
    image = Image()
    assert image.replica_sets == {}
    waits = ElectionWaits(lambda: image, world.clock, lambda: world.suspects)
    await waits.wait(None)
    assert world.clock.now_s == 100.0


async def test_who_asks_before_the_broker_has_seen_that_the_connection_ended_waits_too() -> None:
    world = Waiting()
    world.clock.due = [(100.01, lambda: world.suspects.add(0)), (100.1, world.kill), (100.3, world.elect)]
    assert 0.3 <= await world.waited([TOPIC]) < 0.4


async def test_an_answer_waits_from_the_lost_connection_to_the_next_master() -> None:
    world = Waiting()
    world.suspects.add(0)
    world.clock.due = [(100.1, world.kill), (100.3, world.elect)]
    assert 0.3 <= await world.waited([TOPIC]) < 0.4
    assert await world.waited([TOPIC]) < 2 * GRACE_S


async def test_a_connection_that_comes_back_ends_the_wait() -> None:
    world = Waiting()
    world.suspects.add(0)
    world.clock.due = [(100.1, world.suspects.clear)]
    assert 0.1 <= await world.waited() < 0.2


async def test_a_long_outage_holds_up_one_request_and_then_none() -> None:
    world = Waiting()
    world.trio.begin()
    assert WAIT_S <= await world.waited() < WAIT_S + 0.1
    assert await world.waited() < 2 * GRACE_S
    world.elect()
    assert await world.waited() < 2 * GRACE_S
    world.trio.begin()  # another outage
    assert await world.waited() >= WAIT_S


async def test_topics_of_other_replica_sets_are_answered_at_once() -> None:
    world = Waiting()
    world.trio.begin()
    assert await world.waited([b"u" * 16]) == 0
    assert await world.waited([]) == 0
