"""The admin HTTP server: health, metrics, status and the objects in the bucket.

    GET  /healthz            200 while the process serves
    GET  /readyz             200 once registered and all partitions are open; else 503 with the reasons
    GET  /metrics            Prometheus (docs/metrics.md)
    GET  /status             the cluster as this node sees it
    GET  /failover           what dead brokers left and who recovers it, from this node's memory: it asks nobody
    GET  /objects            ?limit=1–1000&after=ID: objects by id
    GET  /objects/{id}       an object's footer and index
    POST /objects/verify     ?id=ID…: reads every byte of all (or the named) objects; JSON lines as it goes
    GET  /compaction         ?eager=true&topic=NAME…: what the compaction does and has done, and what it would do now
    POST /compaction         ?eager=true&topic=NAME…&full_pace=true: compacts now; JSON lines as it goes
    POST /orphans            ?dry_run=true&min_age_ms=: finds what crashes left in the bucket, and deletes it
    GET  /bucket/usage       requests and bytes of the bucket by purpose and topic, and what is stored
    GET  /moves              partitions that leave this broker or have left it, and those that it opened
    POST /moves              new placements of partitions
    GET  /partitions         ?topic=NAME…: where partitions are; without names, those that move
    GET  /brokers            the brokers, with what they own and whether they are drained
    GET  /brokers/plan       ?id=ID: where a drain would send the broker's partitions
    POST /brokers/drain      ?id=ID&cancel=true: has a broker give its partitions away, or stops that
    POST /brokers/remove     ?id=ID: forgets a drained or dead broker that owns nothing, and its WAL in the bucket
    GET  /balancer           what the brokers carry; /balancer/plan: the moves that would even it out
    POST /balancer/run       makes them
    GET  /scale              how many brokers the load needs, and why
    GET  /losses             ?id=ID: what removing a dead broker with all that only its WAL has would give up
    POST /losses/accept      ?id=ID&force=true: gives it up
    GET  /quarantine         quarantined streams, and what of them was set aside
    POST /quarantine/release ?stream=ID…: has them go on at what is committed
    POST /upload             ?timeout_ms=: uploads everything confirmed so far, answers when it is committed

Answers are JSON; an error is `{"error": …, "hint": …}` with a fitting status. It has no authentication: it listens on
loopback unless configured otherwise, and refuses POSTs that a browser sends from another page.

Entry: `AdminHttp`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from broker.admin_door import AdminDoor
from broker.http_answers import integer, json_answer, number, write_line
from broker.metrics import Metrics
from broker.object_report import (
    damage_of,
    describe_object,
    describe_problem,
    describe_set_aside,
    list_objects,
    stream_owners,
    verify_object,
    verify_set_aside,
)
from broker.quorum import merge_nodes
from broker.settings import AdminSettings
from controller.drain_plan import is_drained
from controller.model import ObjectRecord, ObjectState
from runtime.clock import Clock
from runtime.errors import InvalidInput, NotFound, TidelogError
from runtime.network import Listener, Network
from storage.damage import DamageLog
from storage.object_key import all_quarantined_prefix, object_key
from storage.object_store import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from controller.image import Image

MAX_MOVES_SHOWN = 20
MAX_PAGE = 1_000
PROGRESS_INTERVAL_S = 0.5
"""Least time between two progress lines of a verification."""
UPLOAD_TIMEOUT_MS = 60_000
MAX_BODY_BYTES = 64 << 10
"""No request has a body."""
SHUTDOWN_S = 1.0
"""How long requests in flight may take to end when the server closes."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class AdminSources:
    """What the server reports, as callables of the node. Each is quick and does not block."""

    node_id: int
    roles: Sequence[str]
    clock: Clock
    store: ObjectStore
    image: Callable[[], Image]
    not_ready: Callable[[], list[str]]
    """Why this node is not ready, one sentence each; empty when it is."""
    partitions: Callable[[], Mapping[str, int]]
    """`PartitionManager.counts()`."""
    wal: Callable[[], Mapping[str, Any]]
    """Offsets and sizes of the WAL."""
    upload: Callable[[], Mapping[str, Any]]
    """`backlog_bytes` (confirmed and not uploaded) and `oldest_age_ms` at least."""
    memory: Callable[[], Mapping[str, int]]
    """What the accounts of memory hold, and their bounds, in bytes; `resident_bytes` of the whole process."""
    bucket: Callable[[], Mapping[str, Any]]
    """`BucketHealth.report()`."""
    problems: Callable[[], list[str]]
    """What an operator should look at, one sentence each."""
    upload_now: Callable[[], Awaitable[None]]
    controllers: Callable[[], Awaitable[Mapping[str, Any]]] | None = None
    """`QuorumView.report()`."""
    failover: Callable[[], Mapping[str, Any]] = dict
    """`Salvager.report()`: what dead brokers left, and what becomes of it."""
    damage: DamageLog = field(default_factory=DamageLog)
    """What is known to be damaged in the bucket; verification adds to it and clears it."""
    on_sound: Callable[[int], None] = lambda object_id: None
    """An object was verified and is right."""


class AdminHttp:
    """The HTTP listener of one node."""

    def __init__(
        self,
        sources: AdminSources,
        metrics: Metrics,
        network: Network,
        settings: AdminSettings,
        routes: Sequence[web.RouteDef] = (),
    ) -> None:
        """`routes` are those of other parts, such as `broker.object_jobs`."""
        self._routes = routes
        self._sources = sources
        self._metrics = metrics
        self._network = network
        self._settings = settings
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None
        self._verifying = False
        self.door: AdminDoor
        """Set by `start`."""

    @property
    def url(self) -> str:
        """`http://host:port` as clients are told, once started; else empty."""
        if self._listener is None:
            return ""
        host, port = self._listener.address
        host = self._settings.advertised_host or host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> str:
        """Listen, and return the URL. Raises `AddressInUse`."""
        app = web.Application(middlewares=[self._bounded, _errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
                web.get("/status", self._status),
                web.get("/failover", self._failover),
                web.get("/objects", self._objects),
                web.post("/objects/verify", self._verify),
                web.get("/objects/{id}", self._object),
                web.post("/upload", self._upload),
                *self._routes,
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        self._runner = runner
        server = runner.server
        assert server is not None
        self.door = AdminDoor(server, self._sources.clock)
        try:
            self._listener = await self._network.listen(self.door, self._settings.host, self._settings.port)
        except BaseException:
            await self.close()
            raise
        return self.url

    async def close(self) -> None:
        """Stop listening and end what is in flight."""
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tell the door that the request's own bounds hold now."""
        self.door.enter_handler(request.protocol)
        try:
            return await handler(request)
        finally:
            self.door.leave_handler(request.protocol)

    # --- health, metrics, status ---------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return json_answer({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        reasons = self._sources.not_ready()
        if reasons:
            return json_answer({"status": "not ready", "reasons": reasons}, status=503)
        return json_answer({"status": "ready"})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, request: web.Request) -> web.Response:
        sources = self._sources
        quorum = await sources.controllers() if sources.controllers is not None else {"members": [], "problems": []}
        image = sources.image()
        return json_answer(
            {
                "cluster_id": image.cluster_id,
                "node_id": sources.node_id,
                "time_ms": sources.clock.time_ms(),
                "image_version": image.version,
                "nodes": merge_nodes(self._nodes(image), quorum["members"]),
                "topics": len(image.topics),
                "partitions": dict(sources.partitions()),
                "wal": dict(sources.wal()),
                "upload": dict(sources.upload()),
                "memory": dict(sources.memory()),
                "bucket": dict(sources.bucket()),
                "failover": dict(sources.failover()),
                "moves": _moves(image),
                "problems": [*sources.not_ready(), *sources.problems(), *quorum["problems"]],
            }
        )

    async def _failover(self, request: web.Request) -> web.Response:
        return json_answer(dict(self._sources.failover()))

    def _nodes(self, image: Image) -> list[dict[str, Any]]:
        """The brokers. Roles and process id are known of this node only; others are asked for theirs."""
        nodes = []
        for broker in sorted(image.brokers.values(), key=lambda broker: broker.id):
            here = broker.id == self._sources.node_id
            state = "alive" if broker.alive else "dead"
            if broker.alive and broker.draining:
                state = "drained" if is_drained(image, broker.id) else "draining"
            elif here:
                state = "starting" if self._sources.not_ready() else "ready"
            nodes.append(
                {
                    "id": broker.id,
                    "roles": list(self._sources.roles) if here else ["broker"],
                    "pid": os.getpid() if here else None,
                    "address": f"{broker.host}:{broker.port}",
                    "admin_url": broker.admin_url,
                    "rack": broker.rack or None,
                    "state": state,
                }
            )
        return nodes

    # --- objects -------------------------------------------------------------------------------------------------

    async def _objects(self, request: web.Request) -> web.Response:
        limit = number(request, "limit", 100, 1, MAX_PAGE)
        after = number(request, "after", -1, -1, (1 << 63) - 1)
        image = self._sources.image()
        page = list_objects(image, after=after, limit=limit)
        return json_answer({"objects": page, "next_after": page[-1]["id"] if len(page) == limit else None})

    async def _object(self, request: web.Request) -> web.Response:
        image = self._sources.image()
        record = _committed(image, request.match_info["id"])
        return json_answer(await describe_object(image, self._sources.store, record))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        image = self._sources.image()
        wanted = request.query.getall("id", [])
        records = [_committed(image, text) for text in wanted] or _all_committed(image)
        set_aside = [] if wanted else await self._set_aside(image)
        if self._verifying:
            return json_answer({"error": "a verification is going on", "hint": "wait for it to end"}, status=409)
        self._verifying = True
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            async for line in self._verification(image, records, set_aside):
                await write_line(response, line)
            await response.write_eof()
        except (ConnectionResetError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return response  # the client went away, or does not read: nobody is interested in the result
        finally:
            self._verifying = False
        return response

    async def _set_aside(self, image: Image) -> list[ObjectInfo]:
        """Records of quarantined streams, which nothing else has."""
        return [each async for each in self._sources.store.list(all_quarantined_prefix(image.cluster_id))]

    async def _verification(
        self, image: Image, records: list[ObjectRecord], set_aside: list[ObjectInfo]
    ) -> AsyncIterator[dict[str, Any]]:
        clock = self._sources.clock
        total = sum(record.size for record in records) + sum(each.size for each in set_aside)
        checked = found = size = 0
        told = clock.monotonic()
        yield {"event": "start", "objects": len(records) + len(set_aside), "bytes": total}
        for record in records:
            try:
                problems = await verify_object(image, self._sources.store, record)
            except TidelogError as error:
                yield {"event": "error", "object": record.id, "error": error.message, "hint": error.hint}
                return
            self._sources.damage.forget_object(record.id)
            owners = stream_owners(image) if problems else {}
            if not problems:
                self._sources.on_sound(record.id)
            for problem in problems:
                found += 1
                self._sources.damage.note(damage_of(image, record, problem))
                key = object_key(image.cluster_id, record.id)
                yield {"event": "finding", **describe_problem(key, record, problem, owners)}
            checked += 1
            size += record.size
            if clock.monotonic() - told >= PROGRESS_INTERVAL_S:
                told = clock.monotonic()
                yield {"event": "progress", "objects": checked, "bytes": size, "findings": found}
        for each in set_aside:
            try:
                problems = await verify_set_aside(self._sources.store, each.key)
            except TidelogError as error:
                yield {"event": "error", "object": each.key, "error": error.message, "hint": error.hint}
                return
            owners = stream_owners(image) if problems else {}
            for problem in problems:
                found += 1
                yield {"event": "finding", **describe_set_aside(each.key, problem, owners)}
            checked += 1
            size += each.size
        yield {"event": "done", "objects": checked, "bytes": size, "findings": found}

    # --- actions -------------------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.Response:
        timeout_ms = number(request, "timeout_ms", UPLOAD_TIMEOUT_MS, 1, 3_600_000)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._sources.upload_now()
        except TimeoutError:
            body = {"error": f"not uploaded within {timeout_ms} ms; it goes on", "hint": "see bucket in /status"}
            return json_answer(body, status=504)
        return json_answer({"status": "uploaded", "upload": dict(self._sources.upload())})


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON; a POST from a browser's page of another origin is refused."""
    if request.method == "POST" and "Origin" in request.headers:
        return json_answer({"error": "requests from web pages are refused", "hint": None}, status=403)
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = {"error": f"{request.method} {request.path}: {error.reason}", "hint": "see docs/operations.md"}
        return json_answer(body, status=error.status)
    except TidelogError as error:
        if isinstance(error, NotFound):
            status = 404
        elif isinstance(error, InvalidInput):
            status = 400
        else:
            status = 503 if error.retriable else 500
        return json_answer({"error": error.message, "hint": error.hint}, status=status)


def _moves(image: Image) -> dict[str, Any]:
    """How many partitions are on their way to another broker, and the first of them."""
    moving = image.moving()
    rows = [
        {
            "topic": image.topics[one.topic_id].name,
            "partition": one.index,
            "from": one.replica_set,
            "to": one.target,
            "since_ms": one.moving_since_ms,
        }
        for one in moving[:MAX_MOVES_SHOWN]
    ]
    return {"total": len(moving), "first": rows}


def _committed(image: Image, text: str) -> ObjectRecord:
    object_id = integer(text, "id", 0, (1 << 63) - 1)
    record = image.objects.get(object_id)
    if record is None or record.state != ObjectState.COMMITTED:
        raise NotFound(f"no committed object has the id {object_id}", hint="GET /objects lists them")
    return record


def _all_committed(image: Image) -> list[ObjectRecord]:
    committed = [record for record in image.objects.values() if record.state == ObjectState.COMMITTED]
    return sorted(committed, key=lambda record: record.id)
