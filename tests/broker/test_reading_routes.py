"""The admin HTTP for readers outside the cluster, over real sockets and the real controller state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest

from tests.support.admin_world import CLUSTER_ID, NODE_ID, WorldController
from tidelog.broker.admin import reading
from tidelog.broker.admin.http import AdminHttp, AdminSources
from tidelog.broker.admin.reading import READING_PATHS, ReadingRoutes
from tidelog.broker.kafka.services import no_quorum
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.model import commands as c
from tidelog.controller.model.leases import ExpireLeases
from tidelog.controller.rpc.secret import admin_token, read_token
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import CommitObjects, NewObject, pack_ranges

SECRET = b"a secret of enough bytes"
READER = {"Authorization": f"Bearer {read_token(SECRET)}"}
ADMIN = {"Authorization": f"Bearer {admin_token(SECRET)}"}


class World(WorldController):
    """A broker, and a topic `t` with one partition whose offsets 0 to 19 are in two objects."""

    def __init__(self) -> None:
        super().__init__()
        self.register(NODE_ID)
        self.waits: list[int] = []

    async def wait_version(self, version: int) -> None:
        self.waits.append(version)
        if self.image.version < version:
            await asyncio.Event().wait()

    async def fill(self) -> int:
        topic = await self.create_topic("t", 1, {}, assignment=[NODE_ID])
        stream = self.image.partitions(topic.id)[0].first_stream + 1
        self.apply(c.OpenStreams(NODE_ID, 1, ((stream, 1),)))
        for start in (0, 10):
            object_id = self.apply(c.PrepareObjects(1, 60_000))
            new = NewObject(object_id, 1, 100, pack_ranges([(stream, start, start + 10)]))
            self.apply(c.Commit(CommitObjects(NODE_ID, 1, start, start + 10, (new,))))
        return stream


@contextlib.asynccontextmanager
async def serving(*, has_secret: bool = False) -> AsyncIterator[tuple[World, aiohttp.ClientSession]]:
    world, parts = World(), PartRegistry()
    routes = ReadingRoutes(cast("Any", world))
    parts.add_section("leases", routes.status)
    sources = AdminSources(
        node_id=NODE_ID,
        roles=["broker"],
        clock=SystemClock(),
        store=MemoryObjectStore(),
        image=lambda: world.image,
        not_ready=list,
        upload_now=lambda: pytest.fail("nobody asked for an upload"),
        controllers=no_quorum,
        token=admin_token(SECRET) if has_secret else "",
        read_token=read_token(SECRET) if has_secret else "",
    )
    server = AdminHttp(sources, parts, Metrics(process=False), TcpNetwork(), AdminSettings(), [*routes.routes()])
    url = await server.start()
    try:
        async with aiohttp.ClientSession(url) as session:
            yield world, session
    finally:
        await server.close()


async def ask(session: aiohttp.ClientSession, method: str, path: str, status: int = 200, **more: Any) -> Any:
    async with session.request(method, path, **more) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_reader_takes_a_lease_looks_up_objects_moves_on_and_ends_it() -> None:
    async with serving() as (world, session):
        stream = await world.fill()
        lease = await ask(session, "POST", "/leases?holder=a%20job&ttl_ms=5000")
        assert lease == {
            "id": 1, "version": world.image.version, "ttl_ms": 5000, "hold_ms": ANY_HOLD, "cluster_id": CLUSTER_ID,
        }  # fmt: skip
        question = {"version": lease["version"], "ranges": [{"topic": "t", "partition": 0, "start": 5}]}
        found = await ask(session, "POST", "/slices", json=question)
        assert (found["cluster_id"], found["version"], found["next"]) == (CLUSTER_ID, world.image.version, None)
        (row,) = found["ranges"]
        assert row["slices"] == [[1, 1, 100, 0, 10], [2, 1, 100, 10, 20]]
        assert (row["topic"], row["partition"], row["stream"], row["committed_end"]) == ("t", 0, stream, 20)
        listed = await ask(session, "GET", "/leases")
        assert [(each["holder"], each["held_objects"]) for each in listed["leases"]] == [("a job", 0)]

        await world.delete_topic(world.image.topic_ids["t"])
        world.apply(c.Barrier())
        listed = await ask(session, "GET", "/leases")
        assert listed["leases"][0]["held_objects"] == 2
        status = await ask(session, "GET", "/status")
        assert status["leases"]["count"] == 1 and status["leases"]["oldest"]["held_objects"] == 2

        newer = world.image.version
        renewed = await ask(session, "POST", f"/leases/renew?id=1&ttl_ms=5000&version={newer}")
        assert renewed["version"] == newer
        assert (await ask(session, "GET", "/leases"))["leases"][0]["held_objects"] == 0
        assert await ask(session, "POST", "/leases/end?id=1") == {"id": 1}
        assert (await ask(session, "GET", "/leases"))["leases"] == []
        assert "take another lease" in (await ask(session, "POST", "/leases/renew?id=1", 404))["hint"]
        assert (await ask(session, "GET", "/status"))["leases"] == {"count": 0, "oldest": None}


ANY_HOLD = (1 << 63) - 1
"""This world has no active controller that would lower it."""


async def test_an_answer_waits_for_metadata_that_the_reader_has_seen_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (world, session):
        await world.fill()
        question = {"version": world.image.version, "ranges": [{"topic": "t", "partition": 0}]}
        await ask(session, "POST", "/slices", json=question)
        assert world.waits == [world.image.version]
        monkeypatch.setattr(reading, "WAIT_S", 0.05)
        question["version"] = world.image.version + 1
        late = await ask(session, "POST", "/slices", 503, json=question)
        assert f"of version {world.image.version}" in late["error"] and "another broker" in late["hint"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not a question"),
        (b"[]", "not a question"),
        (b'{"ranges": []}', "1 to 1000 ranges"),
        (b'{"ranges": [{"topic": "t", "partition": 0, "begin": 3}]}', "begin"),
        (b'{"ranges": [{"topic": "t", "partition": 0}], "limit": 0}', "limit is 0"),
        (b'{"ranges": [{"topic": "t", "partition": 0, "start": -1}]}', "negative"),
        (b'{"ranges": [{"topic": "t", "partition": "0"}]}', "partition"),
    ],
)
async def test_a_question_that_is_none_says_what_is_wrong(body: bytes, said: str) -> None:
    async with serving() as (world, session):
        await world.fill()
        assert said in (await ask(session, "POST", "/slices", 400, data=body))["error"]


async def test_what_does_not_exist_is_not_found() -> None:
    async with serving() as (world, session):
        await world.fill()
        for topic, partition in (("u", 0), ("t", 1)):
            question = {"ranges": [{"topic": topic, "partition": partition}]}
            await ask(session, "POST", "/slices", 404, json=question)
        for query in ("", "?id=0", "?id=x", f"?id={1 << 63}"):
            await ask(session, "POST", f"/leases/end{query}", 400)
        assert "holder" in (await ask(session, "POST", "/leases", 400))["error"]
        assert "ttl_ms" in (await ask(session, "POST", "/leases?holder=a&ttl_ms=1", 400))["error"]


async def test_the_read_token_opens_what_readers_need_and_nothing_else() -> None:
    async with serving(has_secret=True) as (world, session):
        await world.fill()
        question = {"ranges": [{"topic": "t", "partition": 0}]}
        for headers in (READER, ADMIN):
            lease = await ask(session, "POST", "/leases?holder=a", headers=headers)
            await ask(session, "POST", "/slices", json=question, headers=headers)
            await ask(session, "POST", f"/leases/renew?id={lease['id']}", headers=headers)
            await ask(session, "POST", f"/leases/end?id={lease['id']}", headers=headers)
        for path in sorted(READING_PATHS):
            await ask(session, "POST", path, 401)
            await ask(session, "POST", path, 401, headers={"Authorization": "Bearer "})
        for path in ("/upload", "/brokers/remove?id=1", "/objects/verify", "/leases/", "/leases/renew/x"):
            refused = await ask(session, "POST", path, 401, headers=READER)
            assert "token" in refused["error"]
        await ask(session, "GET", "/leases")


def test_the_read_token_is_not_the_administrators_and_follows_from_the_secret() -> None:
    assert read_token(SECRET) != admin_token(SECRET)
    assert read_token(SECRET) != read_token(SECRET + b"!")
    assert SECRET not in bytes.fromhex(read_token(SECRET)) and len(bytes.fromhex(read_token(SECRET))) == 32


async def test_a_lease_that_has_expired_is_told_as_over() -> None:
    async with serving() as (world, session):
        lease = await ask(session, "POST", "/leases?holder=a&ttl_ms=1000")
        world.state.tables.time_ms += 1_000
        world.apply(ExpireLeases((lease["id"],)))
        over = await ask(session, "POST", f"/leases/renew?id={lease['id']}", 404)
        assert "has ended" in over["error"]
