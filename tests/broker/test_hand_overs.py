"""What a master writes before its replica set is handed over, whoever has been asked for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.support.fake_storage import FakeClock
from tidelog.broker.partitions.hand_overs import AGAIN_S, MOST_S, PREPARE, WAIT_S, HandOverPreparation, PrepareParams
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.peers import PeerListener, PeerMethod
from tidelog.controller.client.client import ControllerClient
from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable

ME, OTHER, DEAD = 1, 2, 3


class World:
    """A broker that leads set 1; broker 2 leads set 2, and set 3 has no living master."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.waits: asyncio.Event | None = None
        self.clock = FakeClock()
        self.calls: list[tuple[int, str, PrepareParams, float]] = []
        self.refusal: TidelogError | None = None
        self.methods: dict[str, PeerMethod] = {}
        self.announce: Callable[[tuple[int, ...]], None] = lambda _sets: None
        masters = {1: ME, 2: OTHER, 3: DEAD}
        image = SimpleNamespace(
            replica_sets={each: SimpleNamespace(master=at, master_epoch=7) for each, at in masters.items()},
            master_of=lambda each: None if masters[each] == DEAD else masters[each],
        )
        controller = SimpleNamespace(image=image, on_hand_overs=lambda callback: setattr(self, "announce", callback))
        self.hand_overs = HandOverPreparation(
            ME,
            cast(ControllerClient, controller),
            cast(PeerCalls, SimpleNamespace(call=self.call)),
            self.clock,
            self.write,
        )
        self.hand_overs.serve(cast(PeerListener, SimpleNamespace(serve=self.methods.__setitem__)))

    async def write(self, replica_set: int) -> None:
        if self.waits is not None:
            await self.waits.wait()
        self.written.append(replica_set)

    async def call(self, broker: int, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        self.calls.append((broker, method, params, timeout_s))
        if self.refusal is not None:
            raise self.refusal
        return msgspec.Raw(b"\xc0")

    async def asked(self, replica_set: int, epoch: int) -> bytes:
        return await self.methods[PREPARE](msgspec.Raw(msgspec.msgpack.encode(PrepareParams(replica_set, epoch))))


async def test_the_master_writes_itself() -> None:
    world = World()
    await world.hand_overs.prepare(1)
    assert (world.written, world.calls) == ([1], [])


async def test_another_broker_asks_the_master() -> None:
    world = World()
    await world.hand_overs.prepare(2)
    assert world.calls == [(OTHER, PREPARE, PrepareParams(2, 7), WAIT_S)]
    assert await world.asked(1, 7) == b"\xc0" and world.written == [1]


@pytest.mark.parametrize("replica_set", [3, 99], ids=["dead", "unknown"])
async def test_without_a_master_nobody_is_asked(replica_set: int) -> None:
    world = World()
    await world.hand_overs.prepare(replica_set)
    assert (world.written, world.calls) == ([], [])


@pytest.mark.parametrize("refusal", [InvalidInput("there is no method"), Unavailable("no answer")], ids=["old", "cut"])
async def test_an_election_does_not_fail_with_its_preparation(refusal: TidelogError) -> None:
    """A broker of an earlier version does not know the method."""
    world = World()
    world.refusal = refusal
    await world.hand_overs.prepare(2)
    assert len(world.calls) == 1


@pytest.mark.parametrize(("replica_set", "epoch"), [(1, 6), (1, 8), (2, 7), (99, 7)])
async def test_only_the_master_of_that_term_writes(replica_set: int, epoch: int) -> None:
    world = World()
    assert await world.asked(replica_set, epoch) == b"\xc0"
    assert world.written == []


async def test_an_announced_set_is_written_at_once_and_then_now_and_again() -> None:
    world = World()

    async def announced() -> int:
        world.announce((1,))
        await world.hand_overs.prepare(2)  # lets the task run
        await asyncio.sleep(0)
        return len(world.written)

    assert await announced() == 1
    await world.clock.sleep(AGAIN_S / 2)
    assert await announced() == 1
    await world.clock.sleep(AGAIN_S / 2)
    assert await announced() == 2
    await world.clock.sleep(AGAIN_S)
    assert await announced() == 2, "the election does not come: it is written less and less often"
    await world.clock.sleep(AGAIN_S)
    assert await announced() == 3
    for written in range(4, 10):
        await world.clock.sleep(MOST_S)
        assert await announced() == written
    world.announce(())
    assert await announced() == 10, "it was over: this is another hand-over"


async def test_who_asks_while_it_is_written_waits_for_the_same() -> None:
    world = World()
    world.waits = asyncio.Event()
    both = [asyncio.create_task(world.hand_overs.prepare(1)), asyncio.create_task(world.asked(1, 7))]
    world.announce((1,))
    done, _ = await asyncio.wait(both, timeout=0.01)
    assert not done
    world.waits.set()
    await asyncio.gather(*both)
    assert world.written == [1]


async def test_a_caller_that_gives_up_does_not_end_it_for_the_others() -> None:
    world = World()
    world.waits = asyncio.Event()
    first, second = (asyncio.create_task(world.hand_overs.prepare(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    world.waits.set()
    await second
    assert world.written == [1]


async def test_after_its_end_nothing_is_begun_and_nobody_waits() -> None:
    world = World()
    world.waits = asyncio.Event()
    waiting = asyncio.create_task(world.hand_overs.prepare(1))
    await asyncio.sleep(0)
    await world.hand_overs.close()
    await waiting
    world.waits.set()
    world.announce((1,))
    await world.hand_overs.prepare(1)
    assert world.written == []
