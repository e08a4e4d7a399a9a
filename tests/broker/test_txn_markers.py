"""The sender of markers: every partition of a transaction gets one, whatever leaders and calls do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.loops import VIRTUAL_LOOP, LoopClock
from tidelog.broker.coordinators.topic import TRANSACTION_TOPIC
from tidelog.broker.txn.calls import (
    MARKERS,
    MAX_PARTITIONS,
    AdmitParams,
    MarkerParams,
    MarkersParams,
    read_admit,
    read_codes,
    read_codes_of_markers,
    read_markers,
)
from tidelog.broker.txn.markers import MAX_PARTITIONS_A_CALL, MarkerJob, MarkerSender
from tidelog.broker.txn.state import Markers
from tidelog.runtime.errors import CorruptData, InvalidInput, Unavailable

LOOPS = VIRTUAL_LOOP
HERE, THERE = 1, 2
FENCED, STALE, NOT_LEADER = 52, 47, 6


class Leaders:
    """An image of which only topics and leaders are known."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, int], int] = {}
        self.brokers = {HERE: object(), THERE: object()}
        self.ids: dict[str, bytes] = {}
        """Of topics that were created again."""

    def topic(self, name: str) -> Any:
        found = SimpleNamespace(name=name, id=self.ids.get(name, name.encode()))
        return found if any(topic == name for topic, _ in self.of) else None

    def partition(self, topic_id: bytes, index: int) -> Any:
        return next((each for each in self.of if self.topic(each[0]).id == topic_id and each[1] == index), None)

    def leader(self, partition: tuple[str, int]) -> tuple[int, int]:
        return self.of[partition], 1


class World:
    """Two brokers: what a partition answers is scripted, 0 by default."""

    def __init__(self) -> None:
        self.image = Leaders()
        self.answers: dict[tuple[str, int], list[int | Exception]] = {}
        self.written: list[tuple[int, tuple[str, int], MarkerParams]] = []
        self.calls = 0
        self.in_flight = 0
        self.told: list[tuple[str, int]] = []
        image: Any = self.image
        self.sender = MarkerSender(
            node_id=HERE,
            image=lambda: image,
            calls=self,
            write_here=self.write_here,
            clock=LoopClock(),
            rng=random.Random(1),
        )

    async def write_here(self, markers: list[MarkerParams]) -> list[list[int]]:
        return await self._write(HERE, markers)

    async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        assert (broker_id, method) == (THERE, MARKERS) and isinstance(params, MarkersParams)
        read = read_markers(msgspec.Raw(msgspec.msgpack.encode(params)))
        return msgspec.Raw(msgspec.msgpack.encode(await self._write(broker_id, read.markers)))

    async def _write(self, broker_id: int, markers: list[MarkerParams]) -> list[list[int]]:
        self.calls += 1
        assert sum(len(marker.partitions) for marker in markers) <= MAX_PARTITIONS_A_CALL
        await asyncio.sleep(0.001)
        return [[self._code(broker_id, each, marker) for each in marker.partitions] for marker in markers]

    def _code(self, broker_id: int, partition: tuple[str, int], marker: MarkerParams) -> int:
        partition = (partition[0], partition[1])
        if self.image.of.get(partition) != broker_id:
            return NOT_LEADER
        script = self.answers.get(partition, [])
        answer = script.pop(0) if script else 0
        if isinstance(answer, Exception):
            raise answer
        if answer == 0:
            self.written.append((broker_id, partition, marker))
        return answer

    def job(self, owner: str, partitions: Iterable[tuple[str, int]], *, number: int = 1) -> MarkerJob:
        markers = Markers(number, 7, 3, True, frozenset(partitions), 2)

        def marked(given: Markers, found: Iterable[tuple[str, int]]) -> None:
            assert given is markers
            self.told.extend(found)

        return MarkerJob(owner, 5, markers, marked)

    async def settled(self) -> None:
        async with asyncio.timeout(60):
            while self.sender.waiting():  # noqa: ASYNC110  # virtual time: it waits for nobody
                await asyncio.sleep(0.01)


@pytest.fixture
async def world() -> Any:
    world = World()
    yield world
    await world.sender.close()


def spread(topic: str, count: int) -> Iterator[tuple[tuple[str, int], int]]:
    return (((topic, index), HERE if index % 2 else THERE) for index in range(count))


async def test_each_partition_gets_its_marker_from_its_leader(world: World) -> None:
    world.image.of = dict(spread("t", 2 * MAX_PARTITIONS_A_CALL + 10))
    world.sender.send(world.job("shard", world.image.of))
    await world.settled()
    assert sorted(world.told) == sorted(world.image.of)
    assert {partition: broker for broker, partition, _ in world.written} == world.image.of
    assert {(m.producer_id, m.producer_epoch, m.commit, m.coordinator_epoch, m.transaction_version)
            for _, _, m in world.written} == {(7, 3, True, 5, 2)}  # fmt: skip
    assert world.calls == 4


async def test_what_fails_is_asked_again_at_the_present_leader(world: World) -> None:
    world.image.of = dict(spread("t", 6))
    world.answers[("t", 0)] = [NOT_LEADER, 19, 7, 56, 3, -1, Unavailable("reset"), OSError("nobody expected it")]
    world.image.of[("t", 3)] = -1
    world.sender.send(world.job("shard", world.image.of))
    await asyncio.sleep(0.2)
    assert ("t", 3) not in world.told
    world.image.of[("t", 3)] = THERE
    await world.settled()
    assert sorted(world.told) == sorted(world.image.of)


async def test_an_assertion_that_fails_in_a_call_takes_no_marker_along(world: World) -> None:
    world.image.of = {("t", index): HERE for index in range(3)}
    world.answers[("t", 0)] = [AssertionError("a defect")]
    world.sender.send(world.job("shard", [("t", 0)]))
    world.sender.send(world.job("other", [("t", 1)]))
    await asyncio.sleep(0)  # the next one waits for the end of the call
    world.sender.send(world.job("third", [("t", 2)]))
    await world.settled()
    assert sorted(world.told) == sorted(world.image.of)


async def test_what_the_owner_of_a_job_raises_concerns_no_other(world: World) -> None:
    world.image.of = {("t", 0): -1, ("t", 1): HERE}
    world.answers[("t", 1)] = [NOT_LEADER, NOT_LEADER]

    def odd(given: Markers, found: Iterable[tuple[str, int]]) -> None:
        raise KeyError("a defect")

    job = world.job("odd", [("t", 0)])
    job.marked = odd
    world.sender.send(job)
    await asyncio.sleep(1)
    del world.image.of["t", 0]  # told to the owner when it is routed again
    await world.settled()
    world.sender.send(world.job("shard", [("t", 1)]))
    await world.settled()
    assert world.told == [("t", 1)]


async def test_a_deleted_topic_needs_no_marker(world: World) -> None:
    world.image.of = {("t", 0): THERE}
    world.sender.send(world.job("shard", [("t", 0), ("gone", 0)]))
    await world.settled()
    assert sorted(world.told) == [("gone", 0), ("t", 0)]


async def test_transaction_state_gets_no_marker(world: World) -> None:
    world.image.of = {(TRANSACTION_TOPIC, 0): HERE, ("t", 0): THERE}
    world.sender.send(world.job("shard", [(TRANSACTION_TOPIC, 0), ("t", 0)]))
    await world.settled()
    assert [partition for _, partition, _ in world.written] == [("t", 0)]
    assert sorted(world.told) == [(TRANSACTION_TOPIC, 0), ("t", 0)]


async def test_a_newer_epoch_of_the_producer_counts_as_marked(world: World) -> None:
    world.image.of = {("t", 0): THERE}
    world.answers[("t", 0)] = [STALE]
    world.sender.send(world.job("shard", [("t", 0)]))
    await world.settled()
    assert world.told == [("t", 0)] and world.written == []


async def test_a_newer_coordinator_ends_the_job(world: World) -> None:
    world.image.of = dict(spread("t", 2))
    world.answers[("t", 0)] = [FENCED]
    world.answers[("t", 1)] = [NOT_LEADER] * 1_000
    world.sender.send(world.job("shard", world.image.of))
    await world.settled()
    assert world.told == [] and world.sender.counts["fenced"] == 1


async def test_nothing_is_told_after_a_drop(world: World) -> None:
    world.image.of = dict(spread("t", 4))
    world.answers = {partition: [NOT_LEADER] * 5 for partition in world.image.of}
    world.sender.send(world.job("lost", world.image.of))
    world.sender.send(world.job("kept", world.image.of))
    await asyncio.sleep(0.002)
    world.sender.drop("lost")
    await world.settled()
    assert sorted(world.told) == sorted(world.image.of)


async def test_a_topic_that_was_created_again_gets_no_marker_of_the_one_before(world: World) -> None:
    """The producer's next transaction may be open in it, and with an older client it has the same epoch."""
    world.image.of = {("t", 0): THERE, ("t", 1): HERE, ("u", 0): THERE}
    world.answers[("t", 0)] = [NOT_LEADER] * 3
    world.sender.send(world.job("a", world.image.of))
    async with asyncio.timeout(60):
        while len(world.told) < 2:  # noqa: ASYNC110  # virtual time: it waits for nobody
            await asyncio.sleep(0.001)
    assert {partition: marker.topic_ids for _, partition, marker in world.written} == {
        ("t", 1): {"t": b"t"},
        ("u", 0): {"t": b"t", "u": b"u"},
    }
    world.image.ids["t"] = b"again"
    await world.settled()
    assert sorted(world.told) == [("t", 0), ("t", 1), ("u", 0)]
    assert {partition for _, partition, _ in world.written} == {("t", 1), ("u", 0)}


def test_calls_of_brokers_are_checked_before_they_are_acted_on() -> None:
    def raw(value: Any) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(value))

    many = [("t", index) for index in range(MAX_PARTITIONS + 1)]
    wrong: list[Any] = [None, [1], ["x", 1, 1, many, True]]
    for params in wrong:
        with pytest.raises(InvalidInput):
            read_admit(raw(params))
    too_many: list[Any] = [None, [[["x"]]], MarkersParams([MarkerParams(1, 1, True, 1, 2, many)])]
    for params in too_many:
        with pytest.raises(InvalidInput):
            read_markers(raw(params))
    admit = AdmitParams("x", 1, 2, [("t", 0)], add=True)
    assert read_admit(raw([*msgspec.structs.astuple(admit), "of a newer version"])) == admit
    assert read_codes(raw([0, 51]), 2) == [0, 51]
    for codes in ([0], "x", [[0, 0]]):
        with pytest.raises(CorruptData):
            read_codes(raw(codes), 2)
        with pytest.raises(CorruptData):
            read_codes_of_markers(raw(codes), [MarkerParams(1, 1, True, 1, 2, [("t", 0)])])
