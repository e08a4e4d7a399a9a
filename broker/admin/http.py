"""The admin HTTP server: health, metrics, status and the objects in the bucket.

    GET  /healthz            200 while the process serves
    GET  /readyz             200 once registered and all partitions are open; else 503 with the reasons
    GET  /metrics            Prometheus (docs/metrics.md)
    GET  /status             the cluster as seen by this node
    GET  /failover           backlog of dead brokers and the successors, from this node's memory, without requests
    GET  /objects            ?limit=1–1000&after=ID: objects by id
    GET  /objects/{id}       an object's footer and index
    POST /objects/verify     ?id=ID…&suspects=true: reads every byte of all (or the given) objects, or only of those
                             that this broker takes for damaged or does not compact; streams JSON lines
    GET  /compaction         ?eager=true&topic=NAME…: running and completed compactions, and the current plan
    POST /compaction         ?eager=true&topic=NAME…&unthrottled=true: compacts now; streams JSON lines
    POST /compaction/…       `tasks`, `task`, `prepare`, `commit`: compaction by a job outside of the brokers
                             (`tidelog.broker.admin.outside_compaction`)
    POST /orphans            ?dry_run=true&min_age_ms=: finds and deletes objects left in the bucket by crashes
    GET  /bucket/usage       requests and bytes of the bucket by purpose and topic, and stored bytes
    GET  /moves              partitions that move or moved away from this broker, and those that it opened
    POST /moves              new placements of partitions
    GET  /topics             ?after=NAME&limit=1–1000: topics with their partitions and configurations
    GET  /partition          ?topic=NAME&partition=N: where the records of one partition are
    GET  /history            this broker's figures of the last hour; /history/offsets for lag over time
    GET  /timeline           the last events of the cluster: brokers, drains, elections, moves
    POST /token              200 if the request proves itself; changes nothing
    GET  /partitions         ?topic=NAME…: placement of partitions; without names, moving partitions
    GET  /brokers            the brokers with their partitions and states
    GET  /brokers/plan       ?id=ID: the targets of a drain of the broker's partitions
    POST /brokers/drain      ?id=ID&cancel=true: moves all partitions off a broker, or cancels that
    POST /brokers/remove     ?id=ID: removes a drained or dead broker that owns nothing, and its WAL in the bucket
    GET  /balancer           load of the brokers; /balancer/plan: the moves that would balance it
    POST /balancer/run       makes them
    GET  /scale              number of brokers that the load needs, and why
    GET  /losses             ?id=ID: records that the removal of a dead broker with its WAL would discard
    POST /losses/accept      ?id=ID&force=true: discards them
    GET  /quarantine         quarantined streams, and their records set aside
    POST /quarantine/release ?stream=ID…: reopens them at their committed ends
    GET  /cluster            ?level=N: the feature level, and what every member supports
    POST /cluster/upgrade    ?level=N: raises it
    GET  /restart            the brokers, and what speaks against restarting each of them now
    POST /restart            ?id=ID&registration_epoch=E: this process hands over, ends, and is started again
    POST /upload             ?timeout_ms=: uploads everything confirmed so far, responds when it is committed
    GET  /clock, /node       who this is, what time it has; what the process knows of itself
    POST /checkup, /stacks   disks, bucket and other nodes tried; tasks and threads (`tidelog.broker.admin.checkup`)
    GET  /leases             leases of readers outside the cluster; POST takes, renews and ends them
    POST /slices             which objects hold ranges of offsets (`tidelog.broker.admin.reading`)
    POST /manifests          ?lease=ID: the same as an object in the bucket
    GET  /explain            ?topic=NAME&partition=N&offset=N: what the leader knows of a record's way
    GET  /explain/groups     ?topic=NAME&partition=N: committed offsets of the groups that this broker coordinates
    GET  /requests/slow      ?limit=N&api=NAME&topic=NAME: the slowest requests of the last hour here

Responses are JSON; an error is `{"error": …, "hint": …}` with the HTTP status. A request with the header
`Tidelog-Broker: ID` that reaches another broker is answered with 421, and so is one with `Tidelog-Cluster: ID` that
reaches a broker of another cluster. In a cluster with a secret every
request but GET and HEAD needs `Authorization: Bearer TOKEN`, with the token of
`tidelog.controller.rpc.secret.admin_token`; else it is answered with 401. Those of `READING_PATHS` are answered with
the read token, too. GET shows nothing of the contents of records.
The server refuses POSTs that a browser sends, but those of the console at `/console/`, which has rules of its own
(`tidelog.console.app`).

Entry: `AdminHttp`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import integer, json_answer, number, status_of, write_line
from tidelog.broker.admin.limits import AdminLimits, bounded, bounded_runner
from tidelog.broker.admin.quorum import merge_nodes, metadata_in_bucket
from tidelog.broker.admin.reading import READING_PATHS
from tidelog.broker.objects.report import (
    damage_of,
    describe_object,
    describe_problem,
    describe_set_aside,
    list_objects,
    stream_owners,
    verify_object,
    verify_set_aside,
)
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.active.drain_plan import is_drained
from tidelog.controller.model.records import ObjectRecord, ObjectState
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import NotFound, TidelogError
from tidelog.runtime.network import BROKER_HEADER, CLUSTER_HEADER, AddressInUse, Listener, Network
from tidelog.storage.bucket.store import ObjectInfo, ObjectStore
from tidelog.storage.objects.key import all_quarantined_prefix, object_key
from tidelog.storage.reads.damage import DamageLog

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

MAX_MOVES_SHOWN = 20
MAX_PAGE = 1_000
PROGRESS_INTERVAL_S = 0.5
"""Minimum time between two progress lines of a verification."""
UPLOAD_TIMEOUT_MS = 60_000
MAX_BODY_BYTES = 64 << 10
"""Maximum size of a body: requests have none."""
DEFAULT_PORTS = range(9644, 9660)
"""Ports of brokers without `admin.port`: the first one, if one broker runs on a machine."""
READING_METHODS = frozenset({"GET", "HEAD"})
"""Methods whose handlers change nothing."""
DECIDING_PATHS = frozenset({
    "/branches", "/brokers/remove", "/controllers/config", "/losses/accept", "/moves", "/quarantine/release",
    "/replica-sets/add-member", "/replica-sets/elect", "/replica-sets/policy", "/replica-sets/priority",
    "/replica-sets/remove-member", "/restart", "/snapshots", "/snapshots/delete",
})  # fmt: skip
"""POSTs whose handlers decide by this broker's metadata, which may be old: they are brought up to date before."""
CONSOLE_PATH = "/console"
SHUTDOWN_S = 1.0
"""Time-out for requests in flight when the server closes."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ignore_sound(_object_id: int) -> None:
    """Nobody listens."""


async def nothing_to_check() -> None:
    """Everything is known."""


@dataclass(frozen=True, slots=True)
class AdminSources:
    """What the server's own pages need of the node. Each callable is quick and does not block.

    The sections and problems of `/status` come from the registry.
    """

    node_id: int
    roles: Sequence[str]
    clock: Clock
    store: ObjectStore
    image: Callable[[], Image]
    not_ready: Callable[[], list[str]]
    """Why this node is not ready, one sentence each; empty when it is."""
    upload_now: Callable[[], Awaitable[Mapping[int, int]]]
    """Uploads everything confirmed; returns the master epochs of the replica sets of which all is committed then."""
    controllers: Callable[[], Awaitable[Mapping[str, Any]]]
    """`QuorumView.report()`."""
    damage: DamageLog = field(default_factory=DamageLog)
    """What is known to be damaged in the bucket; verification adds to it and clears it."""
    check: Callable[[], Awaitable[None]] = nothing_to_check
    """Returns soon, when what `/status` tells of the bucket is recent."""
    catch_up: Callable[[], Awaitable[None]] = nothing_to_check
    """Returns when the image has everything that was acknowledged before; see `ControllerClient.catch_up`."""
    token: str = ""
    """What a request that may change something proves itself with; empty: the cluster has no secret."""
    read_token: str = ""
    """What a reader outside the cluster may prove itself with instead, on `READING_PATHS`."""
    suspects: Callable[[], Collection[int]] = tuple
    """Ids of the objects that this broker takes for damaged, or leaves out of compaction."""
    on_sound: Callable[[int], None] = ignore_sound
    """An object was verified and is right."""


class AdminHttp:
    """The HTTP listener of one node."""

    def __init__(
        self,
        sources: AdminSources,
        parts: PartRegistry,
        metrics: Metrics,
        network: Network,
        settings: AdminSettings,
        routes: Sequence[web.RouteDef] = (),
        console: web.Application | None = None,
    ) -> None:
        """`parts` tell the sections `upload` and `failover` at least. `routes` are those of other parts, such as
        `tidelog.broker.admin.object_jobs`. `console` is served at `/console/`, and guards itself.
        """
        self._console = console
        self._parts = parts
        self._routes = routes
        self._sources = sources
        self._metrics = metrics
        self._network = network
        self._settings = settings
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None
        self._verifying = False
        self.limits: AdminLimits
        """Set by `start`."""

    @property
    def url(self) -> str:
        """The advertised `http://host:port`, once started; else empty."""
        if self._listener is None:
            return ""
        host, port = self._listener.address
        host = self._settings.advertised_host or host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> str:
        """Listen, and return the URL. Raises `AddressInUse`."""
        middlewares = [bounded(lambda: self.limits), self._errors, self._addressed, self._authorized, self._caught_up]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
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
                web.post("/token", self._token),
                *self._routes,
            ]
        )
        if self._console is not None:
            app.add_subapp(CONSOLE_PATH, self._console)
        runner = bounded_runner(app, self._sources.clock, shutdown_s=SHUTDOWN_S)
        await runner.setup()
        self._runner = runner
        server = runner.server
        assert server is not None
        self.limits = AdminLimits(server, self._sources.clock)
        try:
            self._listener = await self._listen(self.limits)
        except BaseException:
            await self.close()
            raise
        return self.url

    async def _listen(self, limits: AdminLimits) -> Listener:
        """Listen at the configured port or, without one, at the first free port of `DEFAULT_PORTS`, else at any."""
        host, port = self._settings.host, self._settings.port
        for default in DEFAULT_PORTS if port < 0 else ():
            try:
                return await self._network.listen(limits, host, default)
            except AddressInUse:
                continue  # another broker of this machine has it, or another program
        return await self._network.listen(limits, host, max(port, 0))

    async def close(self) -> None:
        """Stop listening and end the requests in flight."""
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _is_of_console(self, request: web.Request) -> bool:
        """Return whether the console answers the request; its own middleware lets nothing pass that is not allowed."""
        return self._console is not None and self._console in request.match_info.apps

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert errors to JSON; refuse POSTs from a browser's page."""
        if self._is_of_console(request):
            return await handler(request)
        if request.method == "POST" and "Origin" in request.headers:
            return json_answer({"error": "requests from web pages are refused", "hint": None}, status=403)
        try:
            return await handler(request)
        except web.HTTPException as error:
            body = {"error": f"{request.method} {request.path}: {error.reason}", "hint": "see docs/operations.md"}
            return json_answer(body, status=error.status)
        except TidelogError as error:
            return json_answer({"error": error.message, "hint": error.hint}, status=status_of(error))

    @web.middleware
    async def _addressed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request that is meant for another broker, or a broker of another cluster."""
        ours, theirs = self._sources.image().cluster_id, request.headers.get(CLUSTER_HEADER)
        if theirs not in (None, ours):
            body = {
                "error": f"a broker of cluster {ours} answers at {request.host}, not one of cluster {theirs}",
                "hint": "set admin.host or admin.advertised_host of that cluster's brokers to what reaches them from"
                " here, or run this on their machine",
            }
            return json_answer(body, status=421)
        meant = request.headers.get(BROKER_HEADER)
        if meant in (None, str(self._sources.node_id)):
            return await handler(request)
        body = {
            "error": f"broker {self._sources.node_id} answers at {request.host}, not broker {meant}",
            "hint": f"set admin.host or admin.advertised_host of broker {meant} to what reaches it from here",
        }
        return json_answer(body, status=421)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request that may change something and does not prove that it knows the cluster's secret."""
        token = self._sources.token
        if (
            token
            and not self._is_of_console(request)
            and request.method not in READING_METHODS
            and not (
                _proves(request, token)
                or (request.path in READING_PATHS and _proves(request, self._sources.read_token))
            )
        ):
            body = {
                "error": f"{request.method} {request.path} needs the token of the cluster's secret",
                "hint": "give the cluster's secret with --secret-file FILE; docs/operations.md, section Security",
            }
            if "Authorization" in request.headers:
                extra = {"peer": str(request.remote), "path": request.path}
                self.limits.logs.line("token", logging.WARNING, "a request with a wrong token was refused", extra)
            return web.json_response(body, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    @web.middleware
    async def _caught_up(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bring the metadata up to date for a request that decides by them. Raises `Unavailable`."""
        if request.method == "POST" and request.path in DECIDING_PATHS:
            await self._sources.catch_up()
        return await handler(request)

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
        quorum, _ = await asyncio.gather(sources.controllers(), sources.check())
        image = sources.image()
        return json_answer(
            {
                "cluster_id": image.cluster_id,
                "node_id": sources.node_id,
                "time_ms": sources.clock.time_ms(),
                "image_version": image.version,
                "level": image.cluster.level if image.cluster is not None else 0,
                "nodes": merge_nodes(self._nodes(image), quorum["members"]),
                "topics": len(image.topics),
                "metadata_in_bucket": metadata_in_bucket(quorum["members"]),
                **self._parts.sections(),
                "moves": _moves(image),
                "problems": [*sources.not_ready(), *self._parts.problems(), *quorum["problems"]],
            }
        )

    async def _failover(self, request: web.Request) -> web.Response:
        return json_answer(self._parts.section("failover"))

    def _nodes(self, image: Image) -> list[dict[str, Any]]:
        """The brokers. Roles and process id are known for this node only."""
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
        only_suspects = request.query.get("suspects") == "true"
        if only_suspects:
            suspects = set(self._sources.suspects())
            records = [record for record in records if record.id in suspects]
        set_aside = [] if wanted or only_suspects else await self._set_aside(image)
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
            return response  # the client disconnected, or does not read: the result is not needed
        finally:
            self._verifying = False
        return response

    async def _set_aside(self, image: Image) -> list[ObjectInfo]:
        """Verify records of quarantined streams, which exist nowhere else."""
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

    async def _token(self, request: web.Request) -> web.Response:
        return json_answer({"status": "accepted"})

    # --- actions -------------------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.Response:
        timeout_ms = number(request, "timeout_ms", UPLOAD_TIMEOUT_MS, 1, 3_600_000)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                whole = await self._sources.upload_now()
        except TimeoutError:
            body = {
                "error": f"not uploaded within {timeout_ms} ms; the upload continues",
                "hint": "see bucket in /status",
            }
            return json_answer(body, status=504)
        epochs = {str(each): epoch for each, epoch in whole.items()}
        return json_answer({"status": "uploaded", "upload": self._parts.section("upload"), "master_epochs": epochs})


def _proves(request: web.Request, token: str) -> bool:
    if not token:
        return False
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    proof = given.strip().encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(proof, token.encode())


def _moves(image: Image) -> dict[str, Any]:
    """The number of partitions that are moving to another broker, and the first of them."""
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
