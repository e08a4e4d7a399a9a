"""The admin HTTP for readers outside the cluster, over real sockets and the real controller state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from tests.support.admin_world import CLUSTER_ID, NODE_ID, WorldController
from tidelog.broker.admin import reading
from tidelog.broker.admin.http import AdminHttp, AdminSources
from tidelog.broker.admin.reading import READING_PATHS, ReadingRoutes
from tidelog.broker.kafka.services import no_quorum
from tidelog.broker.objects import manifest_writer
from tidelog.broker.objects.manifest_writer import ManifestWriter
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.active.duties import removable
from tidelog.controller.image.lookup import look_up
from tidelog.controller.model import commands as c
from tidelog.controller.model.leases import ExpireLeases, held_version
from tidelog.controller.model.records import ObjectState
from tidelog.controller.rpc.secret import admin_token, read_token
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import CommitObjects, NewObject, ObjectSlice, pack_ranges
from tidelog.storage.objects.manifest import ManifestId, iterate_manifest

SECRET = b"a secret of enough bytes"
READER = {"Authorization": f"Bearer {read_token(SECRET)}"}
ADMIN = {"Authorization": f"Bearer {admin_token(SECRET)}"}


class World(WorldController):
    """A broker, and a topic `t` with one partition whose offsets 0 to 19 are in two objects."""

    def __init__(self) -> None:
        super().__init__()
        self.register(NODE_ID)
        self.waits: list[int] = []
        self.store = MemoryObjectStore()

    async def prepare(self, count: int, ttl_ms: int) -> int:
        return int(self.apply(c.PrepareObjects(count, ttl_ms)))

    async def wait_version(self, version: int) -> None:
        self.waits.append(version)
        if self.image.version < version:
            await asyncio.Event().wait()

    async def fill(self, objects: int = 2) -> int:
        topic = await self.create_topic("t", 1, {}, assignment=[NODE_ID])
        stream = self.image.partitions(topic.id)[0].first_stream + 1
        self.apply(c.OpenStreams(NODE_ID, 1, ((stream, 1),)))
        for start in range(0, 10 * objects, 10):
            object_id = self.apply(c.PrepareObjects(1, 60_000))
            new = NewObject(object_id, 1, 100, pack_ranges([(stream, start, start + 10)]))
            self.apply(c.Commit(CommitObjects(NODE_ID, 1, start, start + 10, (new,))))
        return stream


@contextlib.asynccontextmanager
async def serving(*, has_secret: bool = False) -> AsyncIterator[tuple[World, aiohttp.ClientSession]]:
    world, parts = World(), PartRegistry()
    writer = ManifestWriter(image=lambda: world.image, store=world.store, prepare=world.prepare, clock=SystemClock())
    routes = ReadingRoutes(cast("Any", world), writer)
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
        (b'{"ranges": [{"topic": "\xff"', "not a question"),
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
            await ask(session, "POST", f"/manifests?lease={lease['id']}", json=question, headers=headers)
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


# --- manifests


async def listed(world: World, answer: Any) -> list[ObjectSlice]:
    """All slices of a manifest of one range."""
    found: list[ObjectSlice] = []
    async for number, page in iterate_manifest(world.store, CLUSTER_ID, ManifestId(*answer["manifest"])):
        assert number == 0
        found += page
    return found


ALL = {"ranges": [{"topic": "t", "partition": 0}]}


async def test_a_manifest_has_what_all_answers_together_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_writer, "PAGE_SLICES", 3)
    async with serving() as (world, session):
        await world.fill(20)
        lease = await ask(session, "POST", "/leases?holder=a")
        written = await ask(session, "POST", f"/manifests?lease={lease['id']}", json=ALL)
        found = await ask(session, "POST", "/slices", json=ALL)
        (row,) = written["ranges"]
        assert row == {**found["ranges"][0], "slices": []}
        assert (written["counts"], written["next"], written["cluster_id"]) == ([20], None, CLUSTER_ID)
        assert [list(msgspec.to_builtins(each)) for each in await listed(world, written)] == found["ranges"][0][
            "slices"
        ]

        first = await ask(session, "POST", f"/manifests?lease={lease['id']}", json={**ALL, "limit": 7})
        assert (first["counts"], first["next"]) == ([7], {"range": 0, "start": 70})
        rest = {"ranges": [{"topic": "t", "partition": 0, "start": 70}]}
        second = await ask(session, "POST", f"/manifests?lease={lease['id']}", json=rest)
        assert (second["counts"], second["next"]) == ([13], None)
        assert [*await listed(world, first), *await listed(world, second)] == await listed(world, written)


async def test_ranges_without_slices_need_no_manifest() -> None:
    async with serving() as (world, session):
        await world.fill()
        lease = await ask(session, "POST", "/leases?holder=a")
        nothing = {"ranges": [{"topic": "t", "partition": 0, "start": 20, "end": 30}]}
        written = await ask(session, "POST", f"/manifests?lease={lease['id']}", json=nothing)
        assert (written["manifest"], written["counts"], written["next"]) == (None, [0], None)
        assert [each async for each in world.store.list("")] == []


async def test_a_manifest_is_kept_by_its_lease_and_deleted_after_it() -> None:
    async with serving() as (world, session):
        await world.fill()
        lease = await ask(session, "POST", "/leases?holder=a&ttl_ms=3600000")
        written = await ask(session, "POST", f"/manifests?lease={lease['id']}", json=ALL)
        object_id, _ = written["manifest"]

        def due() -> tuple[int, ...]:
            return removable(world.image, 1 << 60, held_version(world.image.leases.values()))

        assert world.image.objects[object_id].state == ObjectState.PREPARED and due() == ()
        world.state.tables.time_ms += manifest_writer.TTL_MS
        world.apply(c.ExpireObjects((object_id,)))
        assert world.image.objects[object_id].state == ObjectState.DESTROYED
        assert due() == (), "the lease is older than the end of the id"
        assert len(await listed(world, written)) == 2
        await ask(session, "POST", f"/leases/end?id={lease['id']}")
        assert due() == (object_id,)


async def test_a_manifest_needs_a_lease_that_has_not_ended() -> None:
    async with serving() as (world, session):
        await world.fill()
        for query, status in (("", 400), ("?lease=0", 400), ("?lease=5", 404)):
            await ask(session, "POST", f"/manifests{query}", status, json=ALL)
        lease = await ask(session, "POST", "/leases?holder=a")
        await ask(session, "POST", f"/leases/end?id={lease['id']}")
        refused = await ask(session, "POST", f"/manifests?lease={lease['id']}", 404, json=ALL)
        assert "take a lease" in refused["hint"]
        assert (
            "limit is 0" in (await ask(session, "POST", "/manifests?lease=1", 400, json={**ALL, "limit": 0}))["error"]
        )


async def test_the_manifests_of_a_lease_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_writer, "MAX_PER_LEASE", 2)
    async with serving() as (world, session):
        await world.fill()
        for _ in range(2):
            lease = await ask(session, "POST", "/leases?holder=a")
            for _ in range(2):
                await ask(session, "POST", f"/manifests?lease={lease['id']}", json=ALL)
            refused = await ask(session, "POST", f"/manifests?lease={lease['id']}", 503, json=ALL)
            assert "take another lease" in refused["hint"]


async def test_a_lease_that_moves_on_may_have_manifests_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_writer, "MAX_PER_LEASE", 2)
    async with serving() as (world, session):
        await world.fill()
        lease = await ask(session, "POST", "/leases?holder=a%20query%20that%20runs%20for%20months")
        for batch in range(3):
            assert batch == 0 or lease["version"] < world.image.version
            renewed = f"/leases/renew?id={lease['id']}&version={world.image.version}"
            lease = await ask(session, "POST", renewed)
            for _ in range(2):
                await ask(session, "POST", f"/manifests?lease={lease['id']}", json=ALL)
        refused = await ask(session, "POST", f"/manifests?lease={lease['id']}", 503, json=ALL)
        assert "move the lease on" in refused["hint"]


async def test_a_range_that_is_trimmed_between_two_pages_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_writer, "PAGE_SLICES", 2)
    async with serving() as (world, session):
        stream = await world.fill(6)
        lease = await ask(session, "POST", "/leases?holder=a")
        pages = 0

        def trims(*arguments: Any, **options: Any) -> Any:
            nonlocal pages
            pages += 1
            if pages == 2:  # offsets 0 to 19 were found
                world.apply(c.TrimStream(stream, 1, 35, NODE_ID, 1))
            return look_up(*arguments, **options)

        monkeypatch.setattr(manifest_writer, "look_up", trims)
        written = await ask(session, "POST", f"/manifests?lease={lease['id']}", json=ALL)
        assert written["ranges"][0]["log_start"] == 35
        assert [(each.start_offset, each.end_offset) for each in await listed(world, written)] == [
            (30, 40), (40, 50), (50, 60),
        ]  # fmt: skip


async def test_one_manifest_is_written_at_a_time_and_a_slow_one_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_writer, "WRITE_S", 2.0)
    monkeypatch.setattr(manifest_writer, "TURN_S", 0.05)
    async with serving() as (world, session):
        await world.fill()
        lease = await ask(session, "POST", "/leases?holder=a")
        path = f"/manifests?lease={lease['id']}"
        stuck = asyncio.Event()

        async def hangs(*_arguments: Any, **_more: Any) -> None:
            stuck.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(world.store, "put", hangs)
        first = asyncio.create_task(ask(session, "POST", path, 503, json=ALL))
        await stuck.wait()
        assert "another broker" in (await ask(session, "POST", path, 503, json=ALL))["hint"]
        assert "was not written within" in (await first)["error"]
        monkeypatch.undo()
        await ask(session, "POST", path, json=ALL)
