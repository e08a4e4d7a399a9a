"""The admin HTTP server over real sockets, a memory bucket and the real controller state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from unittest.mock import ANY

import aiohttp
import pytest
from aiohttp import web

from tests.support.admin_world import CLUSTER_ID, NODE_ID, AdminWorld
from tidelog.broker.admin import http
from tidelog.broker.admin.controller_config import ControllerConfigRoutes
from tidelog.broker.admin.http import DECIDING_PATHS, DEFAULT_PORTS, AdminHttp, AdminSources
from tidelog.broker.kafka.services import no_quorum
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.model import commands as c
from tidelog.controller.model.overrides import SESSION_TIMEOUT
from tidelog.controller.rpc.secret import admin_token
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import BROKER_HEADER, AddressInUse, TcpNetwork
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import View
from tidelog.storage.commits import CommitObjects, ObjectKind
from tidelog.storage.objects.format import QUARANTINE_OBJECT_ID
from tidelog.storage.objects.key import object_key, quarantine_key
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry


class Place:
    """A node's admin side: a world, a bucket and the server."""

    def __init__(
        self,
        token: str = "",
        catch_up: Callable[[], Awaitable[None]] | None = None,
        console: web.Application | None = None,
    ) -> None:
        self.world = AdminWorld(brokers=(1, 2))
        self.memory = MemoryObjectStore()
        self.store = GuardedObjectStore(self.memory, PriorityGate(64), SystemClock())
        self.reasons: list[str] = []
        self.uploads = 0
        self.suspects: list[int] = []
        self.sound: list[int] = []
        self.upload: Callable[[], Awaitable[Mapping[int, int]]] = self._uploaded
        self.metrics = Metrics(process=False)
        self.settings = AdminSettings()
        sources = AdminSources(
            node_id=NODE_ID,
            roles=["controller", "broker"],
            clock=SystemClock(),
            store=self.store,
            image=lambda: self.world.controller.image,
            not_ready=lambda: self.reasons,
            upload_now=lambda: self.upload(),
            controllers=no_quorum,
            catch_up=catch_up or self.world.controller.catch_up,
            token=token,
            suspects=lambda: self.suspects,
            on_sound=self.sound.append,
        )
        parts = PartRegistry()
        parts.add_section("partitions", lambda: {"led": 1, "open": 1, "failing": 0, "moving": 0})
        parts.add_section("wal", lambda: {"end_offset": 10})
        parts.add_section("upload", lambda: {"backlog_bytes": 3, "oldest_age_ms": 4})
        parts.add_section("memory", lambda: {"resident_bytes": 5})
        parts.add_section("bucket", self.store.health.report)
        parts.add_section("failover", dict)
        parts.add_problems("disk", lambda: ["the disk is nearly full"])
        client: Any = self.world.controller
        routes = ControllerConfigRoutes(client, dict).routes()
        self.server = AdminHttp(sources, parts, self.metrics, TcpNetwork(), self.settings, routes, console)

    async def _uploaded(self) -> Mapping[int, int]:
        self.uploads += 1
        return {7: 2}

    async def commit(self, *payloads: bytes) -> int:
        """Write an object with the data stream of a new topic and commit it; returns its id."""
        controller = self.world.controller
        topic = await controller.create_topic(f"t{len(controller.image.topics)}", 1, {}, assignment=[NODE_ID])
        stream = controller.image.partitions(topic.id)[0].first_stream + 1
        controller.apply(c.OpenStreams(NODE_ID, 1, ((stream, 1),)))
        object_id = controller.apply(c.PrepareObjects(1, 60_000))
        records = [StreamEntry(offset, 1, payload) for offset, payload in enumerate(payloads)]
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


@contextlib.asynccontextmanager
async def serving(
    token: str = "",
    catch_up: Callable[[], Awaitable[None]] | None = None,
    console: web.Application | None = None,
) -> AsyncIterator[tuple[Place, aiohttp.ClientSession]]:
    place = Place(token, catch_up, console)
    url = await place.server.start()
    try:
        async with aiohttp.ClientSession(url) as session:
            yield place, session
    finally:
        await place.server.close()


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


async def test_healthz_is_200_while_the_process_serves_even_when_not_ready() -> None:
    async with serving() as (place, session):
        place.reasons = ["still opening"]
        assert await get(session, "/healthz") == {"status": "ok"}


async def test_a_request_that_is_meant_for_another_broker_is_refused_and_has_no_effect() -> None:
    async with serving() as (place, session):
        for meant in ("2", "x"):
            answer = await post(session, "/upload", 421, headers={BROKER_HEADER: meant})
            assert answer["error"].startswith(f"broker {NODE_ID} answers at 127.0.0.1:")
            assert answer["error"].endswith(f"not broker {meant}")
        assert place.uploads == 0
        await post(session, "/upload", headers={BROKER_HEADER: str(NODE_ID)})
        assert place.uploads == 1


async def test_readyz_is_503_with_the_reasons_until_there_are_none() -> None:
    async with serving() as (place, session):
        place.reasons = ["not registered", "t-0 is still opening"]
        assert await get(session, "/readyz", 503) == {"status": "not ready", "reasons": place.reasons}
        place.reasons = []
        assert await get(session, "/readyz") == {"status": "ready"}


async def test_metrics_are_served_in_the_format_asked_for() -> None:
    async with serving() as (place, session):
        place.metrics.connection_opened()
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "tidelog_connections 1.0" in await response.text()
        async with session.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        for wrong in ("application/openmetrics-text;version=x.y", "text/plain;version=x;escaping=zz"):
            async with session.get("/metrics", headers={"Accept": wrong}) as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_status_tells_the_cluster_as_this_node_sees_it() -> None:
    async with serving() as (place, session):
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


async def test_objects_are_listed_by_id_in_pages() -> None:
    async with serving() as (place, session):
        ids = [await place.commit(b"x") for _ in range(5)]
        place.world.controller.apply(c.PrepareObjects(1, 1_000))
        first = await get(session, "/objects?limit=3")
        assert [one["id"] for one in first["objects"]] == ids[:3]
        assert first["objects"][0]["key"] == object_key(CLUSTER_ID, ids[0])
        assert (first["objects"][0]["state"], first["objects"][0]["kind"]) == ("committed", "stream")
        rest = await get(session, f"/objects?limit=100&after={first['next_after']}")
        assert [one["state"] for one in rest["objects"]] == ["committed", "committed", "prepared"]
        assert rest["next_after"] is None


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=-2", "after=٣", "limit="])
async def test_a_wrong_number_is_400_and_named(query: str) -> None:
    async with serving() as (_place, session):
        answer = await get(session, f"/objects?{query}", 400)
        assert query.split("=")[0] in answer["error"]


async def test_an_object_is_shown_with_its_index_and_the_owners_of_its_blocks() -> None:
    async with serving() as (place, session):
        object_id = await place.commit(b"a" * 80, b"b" * 80)
        shown = await get(session, f"/objects/{object_id}")
        assert (shown["records"], shown["created_ms"], shown["kind"]) == (2, 5, "stream")
        assert [(one["topic"], one["partition"], one["part"]) for one in shown["blocks"]] == [("t0", 0, "data")] * 2
        assert [(one["start_offset"], one["end_offset"]) for one in shown["blocks"]] == [(0, 1), (1, 2)]


async def test_an_object_that_is_not_committed_is_404() -> None:
    async with serving() as (place, session):
        prepared = place.world.controller.apply(c.PrepareObjects(1, 1_000))
        for object_id in (prepared, 99):
            assert str(object_id) in (await get(session, f"/objects/{object_id}", 404))["error"]
        await get(session, "/objects/abc", 400)


async def test_verification_finds_nothing_in_sound_objects() -> None:
    async with serving() as (place, session):
        ids = [await place.commit(b"a" * 200, b"b") for _ in range(3)]
        lines = await verify(session)
        assert lines[0]["event"] == "start"
        assert (lines[0]["objects"], lines[-1]) == (
            3,
            {"event": "done", "objects": 3, "bytes": lines[0]["bytes"], "findings": 0},
        )
        assert (await verify(session, f"?id={ids[1]}&id={ids[2]}"))[-1]["objects"] == 2


async def test_verification_names_objects_that_are_changed_lost_or_of_another_size() -> None:
    async with serving() as (place, session):
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


async def test_verification_reads_what_was_set_aside_of_quarantined_streams() -> None:
    async with serving() as (place, session):
        one = await place.commit(b"one")
        stream = place.world.controller.image.objects[one].ranges[0].stream_id
        aside = build_object(
            object_id=QUARANTINE_OBJECT_ID,
            kind=ObjectKind.STREAM,
            cluster_id=CLUSTER_ID,
            created_ms=5,
            parts=[(stream, [StreamEntry(7, 2, b"acknowledged" * 9)])],
            block_bytes=100,
        )
        key, body = quarantine_key(CLUSTER_ID, stream, 3, 64), bytearray(b"".join(aside.body))
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


async def test_verification_compares_the_index_with_the_metadata() -> None:
    async with serving() as (place, session):
        one, other = await place.commit(b"one"), await place.commit(b"two")
        stream = place.world.controller.image.objects[other].ranges[0].stream_id
        forged = build_object(
            object_id=one,
            kind=ObjectKind.STREAM,
            cluster_id=CLUSTER_ID,
            created_ms=5,
            parts=[(stream, [StreamEntry(0, 1, b"one")])],
            block_bytes=100,
        )
        await place.memory.put(object_key(CLUSTER_ID, one), forged.body)
        (finding,) = [line for line in await verify(session) if line["event"] == "finding"]
        assert finding["object"] == one
        assert "lacks offsets" in finding["problem"]


async def test_an_object_destroyed_while_it_is_verified_is_no_finding() -> None:
    async with serving() as (place, session):
        object_id = await place.commit(b"x")
        image = place.world.controller.image
        get_body = place.memory.get_ranges

        async def delete_first(key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
            await place.memory.delete([object_key(CLUSTER_ID, object_id)])
            await place.world.controller.delete_topic(image.topic_ids["t0"])
            return await get_body(key, ranges)

        place.memory.get_ranges = delete_first  # type: ignore[method-assign]
        assert (await verify(session))[-1]["findings"] == 0


async def test_a_bucket_that_does_not_answer_ends_a_verification_with_an_error() -> None:
    async with serving() as (place, session):
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


async def test_one_verification_runs_at_a_time() -> None:
    async with serving() as (place, session):
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


async def test_a_client_that_leaves_ends_its_verification() -> None:
    async with serving() as (place, session):
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


async def test_upload_answers_when_everything_is_committed() -> None:
    async with serving() as (place, session):
        answer = await post(session, "/upload")
        told = {"status": "uploaded", "upload": {"backlog_bytes": 3, "oldest_age_ms": 4}, "master_epochs": {"7": 2}}
        assert answer == told
        assert place.uploads == 1


async def test_an_upload_that_takes_too_long_or_fails_is_told() -> None:
    async with serving() as (place, session):

        async def forever() -> Mapping[int, int]:
            await asyncio.Event().wait()
            return {}

        async def fail() -> Mapping[int, int]:
            raise Unavailable("no bucket", hint="start it")

        place.upload = forever
        assert "not uploaded" in (await post(session, "/upload?timeout_ms=1", 504))["error"]
        place.upload = fail
        assert await post(session, "/upload", 503) == {"error": "no bucket", "hint": "start it"}


async def test_posts_from_web_pages_are_refused() -> None:
    async with serving() as (place, session):
        await post(session, "/upload", 403, headers={"Origin": "http://evil.example"})
        assert place.uploads == 0


TOKEN = admin_token(b"a secret of enough bytes")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0", "Bearer é"],
)
async def test_a_change_without_the_token_of_the_secret_is_refused(authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with serving(TOKEN) as (place, session):
        refused = await post(session, "/upload", 401, headers=headers)
        assert "token" in refused["error"] and "--secret-file" in refused["hint"]
        await post(session, "/objects/verify", 401, headers=headers)
        await post(session, "/brokers/remove?id=1", 401, headers=headers)  # also where there is no such route
        async with session.delete("/upload", headers=headers) as response:
            assert response.status == 401
        assert place.uploads == 0


async def test_a_change_with_the_token_is_made_and_reading_needs_none() -> None:
    async with serving(TOKEN) as (place, session):
        await post(session, "/upload", headers={"Authorization": f"Bearer {TOKEN}"})
        assert place.uploads == 1
        for path in ("/healthz", "/readyz", "/status", "/objects"):
            await get(session, path)


async def test_a_setting_is_set_back_that_was_changed_through_another_broker() -> None:
    """This broker has not heard of the change, and would find that there is nothing to do."""
    override: dict[str, str | None] = {SESSION_TIMEOUT: "20000"}
    async with serving() as (place, session):
        controller = place.world.controller
        controller.apply(c.AlterConfigs("cluster", "", override))
        controller.late = []
        controller.apply(c.AlterConfigs("cluster", "", {SESSION_TIMEOUT: "30000"}))
        answer = await post(session, f"/controllers/config?key={SESSION_TIMEOUT}&value=20000")
    assert answer["changed"]
    assert controller.image.cluster_configs == override


async def test_what_is_decided_by_metadata_is_refused_while_no_controller_answers() -> None:
    async def catch_up() -> None:
        raise Unavailable("no controller answers")

    async with serving(catch_up=catch_up) as (_, session):
        for path in DECIDING_PATHS:
            assert (await post(session, path, 503))["error"] == "no controller answers"
        await post(session, "/upload")


def test_the_token_is_of_the_secret_and_does_not_contain_it() -> None:
    assert admin_token(b"one secret, long enough") != admin_token(b"another secret of length")
    assert b"one secret, long enough" not in bytes.fromhex(TOKEN) and len(bytes.fromhex(TOKEN)) == 32


async def test_an_unknown_path_or_method_is_answered_in_json() -> None:
    async with serving() as (_place, session):
        assert "/nothing" in (await get(session, "/nothing", 404))["error"]
        assert "error" in await post(session, "/status", 405)


async def test_a_port_in_use_is_a_clear_error_and_leaves_nothing_open() -> None:
    async with serving() as (place, _session):
        other = Place()
        other.settings.port = int(place.server.url.rpartition(":")[2])
        with pytest.raises(AddressInUse):
            await other.server.start()
        assert other.server.url == ""


async def test_closing_ends_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SHUTDOWN_S", 0.1)
    place = Place()
    url = await place.server.start()
    begun = asyncio.Event()

    async def forever() -> Mapping[int, int]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    place.upload = forever
    async with aiohttp.ClientSession(url) as session:
        request = asyncio.create_task(session.post("/upload"))
        await begun.wait()
        async with asyncio.timeout(60):
            await place.server.close()
            with pytest.raises(aiohttp.ClientError):
                await request


async def test_clients_are_told_the_advertised_host() -> None:
    async with serving() as (place, __session):
        port = place.server.url.rpartition(":")[2]
        place.settings.advertised_host = "broker-1.example"
        assert place.server.url == f"http://broker-1.example:{port}"
        place.settings.advertised_host = "::1"
        assert place.server.url == f"http://[::1]:{port}"


async def test_a_verification_of_the_suspects_reads_only_those_and_clears_the_sound_ones() -> None:
    async with serving() as (place, session):
        ids = [await place.commit(b"x") for _ in range(3)]
        place.suspects = [ids[1], 1_000_000]
        lines = await verify(session, "?suspects=true")
        assert [line["event"] for line in lines] == ["start", "done"] and lines[-1]["objects"] == 1
        assert place.sound == [ids[1]]
        lines = await verify(session, f"?suspects=true&id={ids[0]}")
        assert lines[-1]["objects"] == 0, "named, and nothing is suspected of it"


async def test_a_denied_verification_marks_nothing_and_says_that_it_may_be_repeated() -> None:
    async with serving() as (place, session):
        await place.commit(b"x")

        async def deny(key: str, ranges: Any) -> Any:
            raise StoreAccessDenied("403 AccessDenied", hint="check the credentials")

        place.memory.get_ranges = deny  # type: ignore[method-assign]
        lines = await verify(session)
        assert lines[-1]["event"] == "error" and "403" in lines[-1]["error"]
        assert place.sound == []


async def test_a_broker_without_an_admin_port_has_the_default_one_or_the_next_free_one() -> None:
    places = [Place() for _ in range(3)]
    assert {place.settings.port for place in places} == {-1}
    try:
        ports = [int((await place.server.start()).rpartition(":")[2]) for place in places]
    finally:
        for place in places:
            await place.server.close()
    assert ports == sorted(set(ports)) and set(ports) <= set(DEFAULT_PORTS), ports


async def test_an_admin_port_that_was_given_is_not_replaced_by_another_one() -> None:
    async with serving() as (place, _session):
        other = Place()
        other.settings.port = int(place.server.url.rpartition(":")[2])
        with pytest.raises(AddressInUse):
            await other.server.start()
