"""Destroyed objects that the bucket does not delete hold up no others, and are told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.controller.controller_helpers import DELAY_MS, Driver, make_client, make_node
from tests.support.storage_world import FastClock, until
from tidelog.broker.admin.quorum import QuorumView
from tidelog.controller.active import lifecycle as lifecycle_module
from tidelog.controller.active import removals as removals_module
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.lifecycle import Lifecycle
from tidelog.controller.active.readers import Readers
from tidelog.controller.active.removals import FIRST_RETRY_S, MAX_ASIDE, RETRY_S, Removals
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.errors import Unavailable
from tidelog.storage.bucket.common import StoreRefused
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.cleaning.deleter import ObjectCleaner
from tidelog.storage.objects.key import object_key, object_prefix

CLUSTER = "cluster"
MANY = 1_300
"""More than one command removes."""


class LockingBucket(MemoryObjectStore):
    """As a server with locks: of a batch it deletes all other keys, and then says that it refused some."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__(clock)
        self.locked: set[str] = set()
        self.is_down = False

    async def delete(self, keys: Sequence[str]) -> None:
        if self.is_down:
            raise Unavailable("no answer")
        await super().delete([key for key in keys if key not in self.locked])
        if refused := [key for key in keys if key in self.locked]:
            raise StoreRefused(f"delete of {refused[0]} was refused: it is locked")


class RemovalWorld:
    """An active controller that removes destroyed objects from a bucket with locks."""

    def __init__(self) -> None:
        self.clock = FastClock()
        self.driver = Driver()
        self.bucket = LockingBucket(self.clock)
        role = ActiveRole(self.image, self.propose, lambda: True, lambda: self.driver.now_ms)
        sessions = BrokerSessions(10.0)
        self.lifecycle = Lifecycle(
            role,
            sessions=sessions,
            readers=Readers(60.0),
            clock=self.clock,
            delete=ObjectCleaner(self.bucket, CLUSTER).delete,
            duties=Duties(role.image, sessions, dict, ControllerSettings()),
        )

    def image(self) -> Image:
        return self.driver.image

    async def propose(self, command: c.AnyCommand) -> None:
        self.driver.run(command)

    async def destroyed(self, count: int) -> list[int]:
        """So many objects that are in the bucket, and that nothing names any more."""
        found: list[int] = []
        while len(found) < count:
            some = min(1_000, count - len(found))
            first = self.driver.prepare(some, 1_000)
            found += range(first, first + some)
        self.driver.now_ms += 1_000
        for first in range(0, count, 1_000):
            self.driver.run(c.ExpireObjects(tuple(found[first : first + 1_000])))
        self.driver.now_ms += DELAY_MS
        for object_id in found:
            await self.bucket.put(object_key(CLUSTER, object_id), [b"x"])
        return found

    async def in_bucket(self) -> int:
        return len([info async for info in self.bucket.list(object_prefix(CLUSTER))])

    @asynccontextmanager
    async def removing(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.lifecycle.run_removals())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def pass_rounds(self, count: int) -> None:
        """So many rounds, in virtual time."""
        end_s = self.clock.now_s + count
        await until(lambda: self.clock.now_s >= end_s)


async def test_objects_that_the_bucket_refuses_to_delete_hold_up_no_others() -> None:
    """One locked object among the first thousand kept all garbage in the bucket, and in the metadata, for good."""
    world = RemovalWorld()
    objects = await world.destroyed(MANY)
    locked = {objects[0], objects[500], objects[-1]}
    world.bucket.locked = {object_key(CLUSTER, each) for each in locked}
    async with world.removing():
        await until(lambda: set(world.image().objects) <= locked)
        assert await world.in_bucket() == len(locked)
        await until(lambda: " and 2 more, which no metadata names: " in world.lifecycle.not_deleted)
        later = await world.destroyed(5)
        await until(lambda: world.image().objects.keys().isdisjoint(later))
        world.bucket.locked.clear()
        await until(lambda: not world.image().objects)
    assert world.lifecycle.not_deleted == ""
    assert await world.in_bucket() == 0


async def test_after_an_outage_everything_is_deleted_soon() -> None:
    world = RemovalWorld()
    await world.destroyed(MANY)
    world.bucket.is_down = True
    async with world.removing():
        await world.pass_rounds(100)
        assert len(world.image().objects) == MANY
        world.bucket.is_down = False
        began_s = world.clock.now_s
        await until(lambda: not world.image().objects)
        assert world.clock.now_s - began_s < 5 * RETRY_S
    assert world.lifecycle.not_deleted == ""


def fail_for_long(removals: Removals, object_id: int) -> list[int | None]:
    return [removals.failed((object_id,), 0.0, "locked") for _ in range(8)]


def test_what_was_put_aside_takes_turns_with_the_others() -> None:
    removals = Removals()
    assert removals.choose([1]) == (1,)
    removals.failed((1,), 0.0, "locked")
    assert 1 in removals.waiting(FIRST_RETRY_S / 2)
    assert 1 not in removals.waiting(FIRST_RETRY_S)
    assert removals.choose([1, 2, 3]) == (1,)
    removals.failed((1,), FIRST_RETRY_S, "locked")
    assert 1 in removals.waiting(2 * FIRST_RETRY_S), "the pauses grow"
    assert removals.choose([1, 2, 3]) == (2, 3)
    removals.succeeded((2, 3))
    assert removals.choose([1]) == (1,)
    removals.succeeded((1,))
    assert 1 not in removals.waiting(0.0)


def test_what_fails_for_long_is_told_once() -> None:
    removals = Removals()
    assert fail_for_long(removals, 1) == [None] * 6 + [1, None]
    assert removals.problem == "object 1, which no metadata names: locked"
    removals.failed((2,), 0.0, "no answer")
    assert "more" not in removals.problem, "the bucket may be away for a moment"
    removals.succeeded((1,))
    assert removals.problem == ""


def test_what_is_put_aside_is_bounded_and_forgotten_by_the_next_term() -> None:
    removals = Removals()
    for each in range(MAX_ASIDE + 1):
        fail_for_long(removals, each)
    assert 0 not in removals.waiting(0.0)
    assert f" and {MAX_ASIDE - 1} more" in removals.problem
    removals.activated()
    assert removals.problem == ""


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals_module, "RETRY_S", 0.01)
    monkeypatch.setattr(removals_module, "FIRST_RETRY_S", 0.005)
    monkeypatch.setattr(lifecycle_module, "INTERVAL_S", 0.01)


@pytest.mark.usefixtures("quick_pauses")
@pytest.mark.parametrize("is_locked", [True, False])
async def test_the_status_tells_of_objects_that_are_not_deleted(tmp_path: Path, is_locked: bool) -> None:
    asked = asyncio.Event()

    async def delete(object_ids: Sequence[int]) -> None:
        asked.set()
        if is_locked:
            raise StoreRefused("the object is locked")

    node = make_node(tmp_path, delete_objects=delete, delete_delay_ms=0)
    await node.start()
    try:
        await node.wait_active(10.0)
        client = make_client(node.address)
        await client.start()
        try:
            await client.prepare_objects(1, 1)
            async with asyncio.timeout(30.0):
                for _ in range(3 if is_locked else 1):
                    asked.clear()
                    await asked.wait()
            await until(lambda: bool(node.status()["not_deleted"]) == is_locked)
            problems = (await QuorumView(client).report())["problems"]
            told = "the active controller 0 cannot delete from the bucket object 1, which no metadata names: "
            assert any(each.startswith(told) for each in problems) == is_locked
        finally:
            await client.close()
    finally:
        await node.close()
