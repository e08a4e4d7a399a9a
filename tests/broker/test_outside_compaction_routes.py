"""The admin HTTP for compaction by a job outside of the brokers: tasks, facts, ids and commits, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support.compaction_world import CLUSTER, CompactionWorld
from tidelog.broker.admin import outside_compaction
from tidelog.broker.admin.http import AdminHttp, AdminSources
from tidelog.broker.admin.outside_compaction import OutsideCompactionRoutes
from tidelog.broker.kafka.services import no_quorum
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.model.records import ObjectState
from tidelog.controller.rpc.secret import admin_token, read_token
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.commits import ObjectKind
from tidelog.storage.compaction.outside import OutsideCompaction
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object

SECRET = b"a secret of enough bytes"
ADMIN = {"Authorization": f"Bearer {admin_token(SECRET)}"}
READER = {"Authorization": f"Bearer {read_token(SECRET)}"}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[CompactionWorld, aiohttp.ClientSession]]:
    world = CompactionWorld()
    compactor = world.compactor()
    outside = OutsideCompaction(compactor.data, SystemClock(), random.Random(1))
    routes = OutsideCompactionRoutes(compactor=compactor, outside=outside, image=lambda: world.image)
    sources = AdminSources(
        node_id=0,
        roles=["broker"],
        clock=SystemClock(),
        store=world.store,
        image=lambda: world.image,
        not_ready=list,
        upload_now=lambda: pytest.fail("nobody asked for an upload"),
        controllers=no_quorum,
        token=admin_token(SECRET),
        read_token=read_token(SECRET),
    )
    server = AdminHttp(sources, PartRegistry(), Metrics(process=False), TcpNetwork(), AdminSettings(), routes.routes())
    url = await server.start()
    try:
        async with aiohttp.ClientSession(url, headers=ADMIN) as session:
            yield world, session
    finally:
        await server.close()


async def ask(session: aiohttp.ClientSession, path: str, status: int = 200, **more: Any) -> Any:
    async with session.post(path, **more) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def filled(world: CompactionWorld) -> tuple[int, list[int]]:
    """A topic whose five records are in five objects: its stream, and their ids."""
    (stream,) = world.topic("t")
    ids = [(await world.upload({stream: [b"record %d" % number]}))[0] for number in range(5)]
    return stream, ids


async def test_a_task_is_planned_described_given_ids_and_committed() -> None:
    async with serving() as (world, session):
        stream, ids = await filled(world)
        plan = await ask(session, "/compaction/tasks?target_bytes=8192&max_objects=4&topic=t")
        assert (plan["cluster_id"], plan["target_bytes"]) == (CLUSTER, 8_192)
        assert [(task["kind"], task["inputs"]) for task in plan["tasks"]] == [("gather", ids[:4])]
        left = await ask(session, "/compaction/tasks", json={"excluded": [ids[0], ids[3]]})
        assert [task["inputs"] for task in left["tasks"]] == [ids[1:3]]

        end = world.image.streams[stream].end_offset
        facts = await ask(session, "/compaction/task", json={"inputs": ids})
        assert facts["starts"] == [[stream, 0]] and [each[0] for each in facts["inputs"]] == ids
        assert [each[4] for each in facts["inputs"]][-1] == [[stream, end - 1 - len(b"record 4") % 3, end]]

        first = (await ask(session, "/compaction/prepare?count=2&ttl_ms=60000"))["first"]
        assert {world.image.objects[first + each].state for each in range(2)} == {ObjectState.PREPARED}
        built = build_object(
            object_id=first,
            kind=ObjectKind.STREAM,
            cluster_id=CLUSTER,
            created_ms=1,
            parts=[(stream, world.acked[stream])],
            block_bytes=1_024,
        )
        output = {"id": first, "kind": 2, "size": built.size, "ranges": [[stream, 0, end]]}
        request = {"cluster_id": CLUSTER, "inputs": ids, "outputs": [output]}
        early = await ask(session, "/compaction/commit", json=request)
        assert early["committed"] is False and "not in the bucket" in early["refused"]
        await world.store.put(object_key(CLUSTER, first), built.body)
        lacking = {**request, "inputs": ids[:4]}
        assert "which the inputs do not hold" in (await ask(session, "/compaction/commit", json=lacking))["refused"]
        for _ in range(2):
            assert await ask(session, "/compaction/commit", json=request) == {"committed": True}
        assert world.committed() == {first}
        assert await ask(session, "/compaction/task", json={"inputs": [first, ids[2]]}) == {"gone": ids[2]}
        await world.check()


async def test_a_missing_object_is_judged_by_metadata_that_are_proven_current() -> None:
    async with serving() as (world, session):
        _, ids = await filled(world)
        assert "inputs" in await ask(session, "/compaction/task?current=true", json={"inputs": ids})
        world.metadata.cut_off = True
        await ask(session, "/compaction/task", json={"inputs": ids})
        await ask(session, "/compaction/task?current=true", 503, json={"inputs": ids})


async def test_what_is_no_request_says_what_is_wrong_and_changes_nothing() -> None:
    async with serving() as (world, session):
        _, ids = await filled(world)
        before = world.metadata.index
        for path in (
            "/compaction/tasks?target_bytes=1",
            "/compaction/tasks?max_objects=1",
            "/compaction/prepare?count=0",
        ):
            await ask(session, path, 400)
        await ask(session, "/compaction/tasks?topic=nothing", 404)
        for path in ("/compaction/tasks", "/compaction/task", "/compaction/commit"):
            for body in (b"{", b"[]", b'{"inputs": "x"}', b'{"inputs": [-1]}', b'{"more": 1}', b'{"inputs": "\xff"}'):
                await ask(session, path, 400, data=body)
        for inputs in ([], list(range(1_025))):
            await ask(session, "/compaction/task", 400, json={"inputs": inputs})
        output = {"id": 1 << 40, "kind": 2, "size": 100, "ranges": [[1, 0, 5]]}
        wrong = {"cluster_id": "another", "inputs": ids, "outputs": [output]}
        assert "written for cluster another" in (await ask(session, "/compaction/commit", 400, json=wrong))["error"]
        assert world.metadata.index == before


async def test_a_body_that_is_too_large_or_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_compaction, "MAX_COMMIT_BYTES", 100_000)
    monkeypatch.setattr(outside_compaction, "BODY_S", 0.2)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    async with serving() as (_, session):
        refused = await ask(session, "/compaction/commit", 400, data=b" " * 100_001)
        assert "more than 100000 bytes" in refused["error"]
        assert "did not come" in (await ask(session, "/compaction/commit", 503, data=endless()))["error"]


async def test_only_administrators_compact_from_outside() -> None:
    async with serving() as (_, session):
        for path in ("/compaction/tasks", "/compaction/task", "/compaction/prepare", "/compaction/commit"):
            for headers in (READER, {"Authorization": ""}):
                await ask(session, path, 401, headers=headers)
