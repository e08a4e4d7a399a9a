"""The admin HTTP server over real sockets, a memory bucket and the real controller state."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import ANY

import aiohttp
import pytest

from broker.admin_http import AdminHttp, AdminSources
from broker.bucket_health import WatchedObjectStore
from broker.metrics import Metrics
from broker.settings import AdminSettings
from controller import commands as c
from runtime.clock import SystemClock
from runtime.errors import Unavailable
from runtime.network import AddressInUse, TcpNetwork
from storage.managers import CommitObjects, ObjectKind
from storage.object_format import QUARANTINE_OBJECT_ID
from storage.object_key import object_key, quarantine_key
from storage.object_store_memory import MemoryObjectStore
from storage.object_writer import build_object
from storage.records import StreamRecord
from tests.support.admin_world import CLUSTER_ID, NODE_ID, AdminWorld


class Place:
    """A node's admin side: a world, a bucket and the server."""

    def __init__(self) -> None:
        self.world = AdminWorld(brokers=(1, 2))
        self.memory = MemoryObjectStore()
        self.store = WatchedObjectStore(self.memory, SystemClock())
        self.reasons: list[str] = []
        self.uploads = 0
        self.upload: Callable[[], Awaitable[None]] = self._uploaded
        self.metrics = Metrics(process=False)
        self.settings = AdminSettings()
        sources = AdminSources(
            node_id=NODE_ID,
            roles=["controller", "broker"],
            clock=SystemClock(),
            store=self.store,
            image=lambda: self.world.controller.image,
            not_ready=lambda: self.reasons,
            partitions=lambda: {"led": 1, "open": 1, "failing": 0, "moving": 0},
            wal=lambda: {"end_offset": 10},
            upload=lambda: {"backlog_bytes": 3, "oldest_age_ms": 4},
            memory=lambda: {"resident_bytes": 5},
            bucket=self.store.health.report,
            problems=lambda: ["the disk is nearly full"],
            upload_now=lambda: self.upload(),
        )
        self.server = AdminHttp(sources, self.metrics, TcpNetwork(), self.settings)

    async def _uploaded(self) -> None:
        self.uploads += 1

    async def commit(self, *payloads: bytes) -> int:
        """Write an object with the data stream of a new topic and commit it; returns its id."""
        controller = self.world.controller
        topic = await controller.create_topic(f"t{len(controller.image.topics)}", 1, {}, assignment=[NODE_ID])
        stream = controller.image.partitions(topic.id)[0].first_stream + 1
        controller.apply(c.OpenStreams(NODE_ID, 1, ((stream, 1),)))
        object_id = controller.apply(c.PrepareObjects(1, 60_000))
        records = [StreamRecord(offset, 1, payload) for offset, payload in enumerate(payloads)]
        built = build_object(
            object_id=object_id,
            kind=ObjectKind.STREAM,
            cluster_id=CLUSTER_ID,
            created_ms=5,
            parts=[(stream, records)],
            block_bytes=100,
        )
        await self.store.put(object_key(CLUSTER_ID, object_id), built.body)
        start = controller.image.replica_sets[NODE_ID].committed_wal_offset
        controller.apply(c.Commit(CommitObjects(NODE_ID, 1, start, start + 10, (built.as_new_object(),))))
        return int(object_id)


def serve(test: Callable[[Place, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def run() -> None:
        place = Place()
        url = await place.server.start()
        try:
            async with aiohttp.ClientSession(url) as session:
                await test(place, session)
        finally:
            await place.server.close()

    asyncio.run(run())


async def get(session: aiohttp.ClientSession, path: str, status: int = 200) -> Any:
    async with session.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def post(session: aiohttp.ClientSession, path: str, status: int = 200, **more: Any) -> Any:
    async with session.post(path, **more) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def verify(session: aiohttp.ClientSession, query: str = "") -> list[dict[str, Any]]:
    async with session.post(f"/objects/verify{query}") as response:
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) async for line in response.content]


def test_healthz_is_200_while_the_process_serves_even_when_not_ready() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        place.reasons = ["still opening"]
        assert await get(session, "/healthz") == {"status": "ok"}

    serve(test)


def test_readyz_is_503_with_the_reasons_until_there_are_none() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        place.reasons = ["not registered", "t-0 is still opening"]
        assert await get(session, "/readyz", 503) == {"status": "not ready", "reasons": place.reasons}
        place.reasons = []
        assert await get(session, "/readyz") == {"status": "ready"}

    serve(test)


def test_metrics_are_served_in_the_format_asked_for() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        place.metrics.connection_opened()
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "tidelog_connections 1.0" in await response.text()
        async with session.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")

    serve(test)


def test_status_tells_the_cluster_as_this_node_sees_it() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        await place.commit(b"x")
        place.world.controller.set_alive(2, False)
        status = await get(session, "/status")
        assert status["cluster_id"] == CLUSTER_ID
        first, second = status["nodes"]
        assert (first["id"], first["pid"], first["roles"]) == (1, os.getpid(), ["controller", "broker"])
        assert (first["address"], first["state"]) == ("127.0.0.1:9092", "ready")
        assert (second["id"], second["pid"], second["state"]) == (2, None, "dead")
        assert status["topics"] == 1
        assert status["partitions"] == {"led": 1, "open": 1, "failing": 0, "moving": 0}
        assert status["upload"] == {"backlog_bytes": 3, "oldest_age_ms": 4}
        assert status["memory"] == {"resident_bytes": 5}
        assert status["bucket"]["healthy"]
        assert status["bucket"]["last_success_ms"] > 0
        assert status["problems"] == ["the disk is nearly full"]
        place.reasons = ["t-0 is still opening"]
        status = await get(session, "/status")
        assert status["nodes"][0]["state"] == "starting"
        assert status["problems"] == ["t-0 is still opening", "the disk is nearly full"]

    serve(test)


def test_objects_are_listed_by_id_in_pages() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        ids = [await place.commit(b"x") for _ in range(5)]
        place.world.controller.apply(c.PrepareObjects(1, 1_000))
        first = await get(session, "/objects?limit=3")
        assert [one["id"] for one in first["objects"]] == ids[:3]
        assert first["objects"][0]["key"] == object_key(CLUSTER_ID, ids[0])
        assert (first["objects"][0]["state"], first["objects"][0]["kind"]) == ("committed", "stream")
        rest = await get(session, f"/objects?limit=100&after={first['next_after']}")
        assert [one["state"] for one in rest["objects"]] == ["committed", "committed", "prepared"]
        assert rest["next_after"] is None

    serve(test)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=-2", "after=٣", "limit="])
def test_a_wrong_number_is_400_and_named(query: str) -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        answer = await get(session, f"/objects?{query}", 400)
        assert query.split("=")[0] in answer["error"]

    serve(test)


def test_an_object_is_shown_with_its_index_and_the_owners_of_its_blocks() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        object_id = await place.commit(b"a" * 80, b"b" * 80)
        shown = await get(session, f"/objects/{object_id}")
        assert (shown["records"], shown["created_ms"], shown["kind"]) == (2, 5, "stream")
        assert [(one["topic"], one["partition"], one["part"]) for one in shown["blocks"]] == [("t0", 0, "data")] * 2
        assert [(one["start_offset"], one["end_offset"]) for one in shown["blocks"]] == [(0, 1), (1, 2)]

    serve(test)


def test_an_object_that_is_not_committed_is_404() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        prepared = place.world.controller.apply(c.PrepareObjects(1, 1_000))
        for object_id in (prepared, 99):
            assert str(object_id) in (await get(session, f"/objects/{object_id}", 404))["error"]
        await get(session, "/objects/abc", 400)

    serve(test)


def test_verification_finds_nothing_in_sound_objects() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        ids = [await place.commit(b"a" * 200, b"b") for _ in range(3)]
        lines = await verify(session)
        assert lines[0]["event"] == "start"
        assert (lines[0]["objects"], lines[-1]) == (
            3,
            {"event": "done", "objects": 3, "bytes": lines[0]["bytes"], "findings": 0},
        )
        assert (await verify(session, f"?id={ids[1]}&id={ids[2]}"))[-1]["objects"] == 2

    serve(test)


def test_verification_names_objects_that_are_changed_lost_or_of_another_size() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        changed, lost, longer, sound = [await place.commit(b"payload" * 20) for _ in range(4)]
        key = object_key(CLUSTER_ID, changed)
        data = bytearray(await place.memory.get(key))
        data[60] ^= 1
        await place.memory.put(key, [data])
        await place.memory.delete([object_key(CLUSTER_ID, lost)])
        key = object_key(CLUSTER_ID, longer)
        await place.memory.put(key, [await place.memory.get(key) + b"x"])
        lines = await verify(session)
        found = {line["object"] for line in lines if line["event"] == "finding"}
        assert found == {changed, lost, longer}
        assert lines[-1]["findings"] == 3
        assert lines[-1]["objects"] == 4
        assert sound not in found

    serve(test)


def test_verification_reads_what_was_set_aside_of_quarantined_streams() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        one = await place.commit(b"one")
        stream = place.world.controller.image.objects[one].ranges[0].stream_id
        aside = build_object(
            object_id=QUARANTINE_OBJECT_ID,
            kind=ObjectKind.STREAM,
            cluster_id=CLUSTER_ID,
            created_ms=5,
            parts=[(stream, [StreamRecord(7, 2, b"acknowledged" * 9)])],
            block_bytes=100,
        )
        key, body = quarantine_key(CLUSTER_ID, stream, 64), bytearray(b"".join(aside.body))
        await place.memory.put(key, [body])
        assert (await verify(session))[-1] == {"event": "done", "objects": 2, "bytes": ANY, "findings": 0}
        body[60] ^= 1
        await place.memory.put(key, [body])
        finding, last = [line for line in await verify(session) if line["event"] in ("finding", "done")]
        assert (finding["object"], finding["key"], finding["part"]) == (None, key, "block")
        assert [(each["topic"], each["start_offset"], each["end_offset"]) for each in finding["streams"]] == [
            ("t0", 7, 9)
        ]
        assert last["findings"] == 1
        assert (await verify(session, f"?id={one}"))[-1]["objects"] == 1  # of those named only

    serve(test)


def test_verification_compares_the_index_with_the_metadata() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        one, other = await place.commit(b"one"), await place.commit(b"two")
        stream = place.world.controller.image.objects[other].ranges[0].stream_id
        forged = build_object(
            object_id=one,
            kind=ObjectKind.STREAM,
            cluster_id=CLUSTER_ID,
            created_ms=5,
            parts=[(stream, [StreamRecord(0, 1, b"one")])],
            block_bytes=100,
        )
        await place.memory.put(object_key(CLUSTER_ID, one), forged.body)
        (finding,) = [line for line in await verify(session) if line["event"] == "finding"]
        assert finding["object"] == one
        assert "lacks offsets" in finding["problem"]

    serve(test)


def test_an_object_destroyed_while_it_is_verified_is_no_finding() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        object_id = await place.commit(b"x")
        image = place.world.controller.image
        get_body = place.memory.get_ranges

        async def delete_first(key: str, ranges: Any) -> list[bytes]:
            await place.memory.delete([object_key(CLUSTER_ID, object_id)])
            await place.world.controller.delete_topic(image.topic_ids["t0"])
            return await get_body(key, ranges)

        place.memory.get_ranges = delete_first  # type: ignore[method-assign]
        assert (await verify(session))[-1]["findings"] == 0

    serve(test)


def test_a_bucket_that_does_not_answer_ends_a_verification_with_an_error() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        await place.commit(b"x")

        async def fail(key: str) -> Any:
            raise Unavailable("the bucket answers 503", hint="wait")

        place.memory.head = fail  # type: ignore[method-assign]
        lines = await verify(session)
        assert [line["event"] for line in lines] == ["start", "error"]
        assert lines[1]["error"] == "the bucket answers 503"
        bucket = (await get(session, "/status"))["bucket"]
        assert (bucket["healthy"], bucket["failures_in_a_row"]) == (False, 1)
        assert bucket["last_error"].startswith("the bucket answers 503")

    serve(test)


def test_one_verification_runs_at_a_time() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        await place.commit(b"x")
        begun, go_on = asyncio.Event(), asyncio.Event()
        head = place.memory.head

        async def slow(key: str) -> Any:
            begun.set()
            await go_on.wait()
            return await head(key)

        place.memory.head = slow  # type: ignore[method-assign]
        first = asyncio.create_task(verify(session))
        await begun.wait()
        assert "going on" in (await post(session, "/objects/verify", 409))["error"]
        go_on.set()
        assert (await first)[-1]["event"] == "done"
        assert (await verify(session))[-1]["event"] == "done"

    serve(test)


def test_a_client_that_leaves_ends_its_verification() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        for _ in range(3):
            await place.commit(b"x")
        turns = asyncio.Semaphore(1)
        head = place.memory.head

        async def head_in_turn(key: str) -> Any:
            await turns.acquire()
            return await head(key)

        place.memory.head = head_in_turn  # type: ignore[method-assign]
        response = await session.post("/objects/verify")
        assert b"start" in await response.content.readline()
        response.close()
        async with asyncio.timeout(60):
            while True:
                turns.release()
                async with session.post("/objects/verify") as again:
                    if again.status == 200:
                        break
                    assert again.status == 409
                await asyncio.sleep(0.01)

    serve(test)


def test_upload_answers_when_everything_is_committed() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        answer = await post(session, "/upload")
        assert answer == {"status": "uploaded", "upload": {"backlog_bytes": 3, "oldest_age_ms": 4}}
        assert place.uploads == 1

    serve(test)


def test_an_upload_that_takes_too_long_or_fails_is_told() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        async def forever() -> None:
            await asyncio.Event().wait()

        async def fail() -> None:
            raise Unavailable("no bucket", hint="start it")

        place.upload = forever
        assert "not uploaded" in (await post(session, "/upload?timeout_ms=1", 504))["error"]
        place.upload = fail
        assert await post(session, "/upload", 503) == {"error": "no bucket", "hint": "start it"}

    serve(test)


def test_posts_from_web_pages_are_refused() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        await post(session, "/upload", 403, headers={"Origin": "http://evil.example"})
        assert place.uploads == 0

    serve(test)


def test_an_unknown_path_or_method_is_answered_in_json() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        assert "/nothing" in (await get(session, "/nothing", 404))["error"]
        assert "error" in await post(session, "/status", 405)

    serve(test)


def test_a_port_in_use_is_a_clear_error_and_leaves_nothing_open() -> None:
    async def test(place: Place, session: aiohttp.ClientSession) -> None:
        other = Place()
        other.settings.port = int(place.server.url.rpartition(":")[2])
        with pytest.raises(AddressInUse):
            await other.server.start()
        assert other.server.url == ""

    serve(test)


def test_closing_ends_what_is_in_flight() -> None:
    async def run() -> None:
        place = Place()
        url = await place.server.start()
        begun = asyncio.Event()

        async def forever() -> None:
            begun.set()
            await asyncio.Event().wait()

        place.upload = forever
        async with aiohttp.ClientSession(url) as session:
            request = asyncio.create_task(session.post("/upload"))
            await begun.wait()
            async with asyncio.timeout(60):
                await place.server.close()
                with pytest.raises(aiohttp.ClientError):
                    await request

    asyncio.run(run())


def test_clients_are_told_the_advertised_host() -> None:
    async def check(place: Place, _session: aiohttp.ClientSession) -> None:
        port = place.server.url.rpartition(":")[2]
        place.settings.advertised_host = "broker-1.example"
        assert place.server.url == f"http://broker-1.example:{port}"
        place.settings.advertised_host = "::1"
        assert place.server.url == f"http://[::1]:{port}"

    serve(check)
