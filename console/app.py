"""The console's HTTP application: the pages, sessions, and the JSON API that the pages draw.

    GET  /console/…                   the pages' files; they hold no data, and need no session
    GET  /console/api/session         whether a token is needed, and whether this browser is signed in
    POST /console/api/session         JSON `{"token"}` or `{"key"}`: signs in; DELETE signs out
    GET  /console/api/read/{broker}/… passes a GET on to a broker's admin HTTP: `any`, `all`, or a broker's id
    POST /console/api/change/…        JSON `{"query", "body"}`: passes a POST on, with the session's token
    GET  /console/api/cost            requests and bytes of the bucket with their prices, of all brokers
    GET  /console/api/offsets         ?topic=: the readable offsets of each partition
    GET  /console/api/groups          consumer groups with lag; GET …/group?name=: one of them
    POST /console/api/group/reset     what a reset of offsets would do; with `dry_run: false` does it
    GET  /console/api/records         records by position, key or text; with `follow` the new ones; JSON lines, of which
                                      the last is an `error` if something went wrong after the first
    POST /console/api/produce         writes one record; with `dry_run` says where it would go

Errors are `{"error", "hint"}`. In a cluster with a secret all but the session needs one: by the cookie, or by
`Authorization: Bearer TOKEN`.

Entry: `console_app`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from tidelog.console.assets import Asset, load_assets
from tidelog.console.costs import bill
from tidelog.console.guard import SECURITY_HEADERS, refusal
from tidelog.console.kafka import KafkaAccess, ProduceOrder, ResetOrder
from tidelog.console.link import ClusterLink
from tidelog.console.passed_on import CHANGE, READ, pass_on
from tidelog.console.prices import DEFAULT, Prices
from tidelog.console.records import RecordQuery, RecordReader
from tidelog.console.schemas import SchemaRegistry
from tidelog.console.sessions import Sessions
from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.runtime.version import VERSION

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 2 << 20
"""Of a request: a record to produce is in one."""
SECRET_FOR_S: Final = 30.0
"""How long it is remembered whether the cluster has a secret."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ConsolePlace:
    """Where a console is, and which cluster it shows."""

    admin_url: Callable[[], str]
    """The admin HTTP of the broker to ask first."""
    bootstrap: Callable[[], str]
    """The Kafka listeners, `HOST:PORT`, several separated by commas."""
    host_names: frozenset[str] = frozenset()
    """Names of hosts by which browsers may open it, besides addresses and `localhost`."""
    prices: Prices = DEFAULT
    """Of the bucket."""
    schema_registry: str = ""
    """The address of the registry of the schemas of values, `http://HOST:PORT`; empty: there is none."""
    clock: Clock = field(default_factory=SystemClock)
    cluster_id: Callable[[], str] = str
    """The cluster whose brokers are asked; empty: whoever answers is taken for one of them."""


class SignInNeeded(TidelogError):
    """A request without a session, in a cluster with a secret."""


class _PassedChange(msgspec.Struct, forbid_unknown_fields=True):
    query: dict[str, str] = {}
    body: Any = None
    broker: int | None = None


class _SignIn(msgspec.Struct, forbid_unknown_fields=True):
    token: str = ""
    key: str = ""


def console_app(place: ConsolePlace, *, sign_in_keys: Sessions | None = None) -> web.Application:
    """Return the application, to be mounted at `/console`. `sign_in_keys`: sessions that the caller makes keys of."""
    sessions = Sessions(place.clock.monotonic) if sign_in_keys is None else sign_in_keys
    server = _ConsoleServer(place, sessions)
    app = web.Application(middlewares=[server.shield])
    api = web.Application(middlewares=[server.guard])
    api.add_routes(
        [
            web.get("/session", server.session),
            web.post("/session", server.sign_in),
            web.delete("/session", server.sign_out),
            web.get("/read/{broker}/{path:.+}", server.read),
            web.post("/change/{path:.+}", server.change),
            web.get("/cost", server.cost),
            web.get("/offsets", server.offsets),
            web.get("/groups", server.groups),
            web.get("/group", server.group),
            web.post("/group/reset", server.reset),
            web.get("/records", server.records),
            web.post("/produce", server.produce),
        ]
    )
    app.add_subapp("/api", api)
    app.add_routes([web.get("", _to_folder), web.get("/{path:.*}", server.page)])
    app.on_response_prepare.append(_secure)
    app.on_cleanup.append(server.close)
    return app


async def _secure(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(SECURITY_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")


async def _to_folder(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPPermanentRedirect("/console/")


class _ConsoleServer:
    """The handlers of one console."""

    def __init__(self, place: ConsolePlace, sessions: Sessions) -> None:
        self._place = place
        self._sessions = sessions
        self._assets = load_assets()
        self._link = ClusterLink(place.admin_url, place.clock.monotonic, place.cluster_id)
        self._kafka = KafkaAccess(place.bootstrap)
        url = place.schema_registry.rstrip("/")
        self._registry = SchemaRegistry(url, place.clock) if url else None
        self._reader = RecordReader(self._kafka, place.clock, self._registry)
        self._secret: tuple[float, bool] | None = None
        """When the cluster was asked whether it has a secret, and its answer."""

    async def close(self, _app: web.Application) -> None:
        """Close connections and threads."""
        await self._link.close()
        await self._kafka.close()
        if self._registry is not None:
            await self._registry.close()

    # --- rules ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def shield(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse unknown hosts, and make errors JSON."""
        reason = refusal(request.headers, self._place.host_names, is_api=False)
        if reason is not None:
            return _error(403, reason, None)
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _error(error.status, f"{request.method} {request.path}: {error.reason}", "see docs/console.md")
        except TidelogError as error:
            return _error(_status_of(error), error.message, error.hint)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests of other pages, and those without a session where one is needed."""
        reason = refusal(request.headers, self._place.host_names, is_api=True)
        if reason is not None:
            return _error(403, reason, None)
        if request.match_info.handler not in (self.session, self.sign_in, self.sign_out):
            await self._token_of(request)
        return await handler(request)

    async def _token_of(self, request: web.Request) -> str:
        """The token that the request may use. Raises `SignInNeeded`."""
        token = self._sessions.token_of(request.cookies.get(_cookie(request), ""))
        if token is not None:
            return token
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return await self._proved(given.strip())
        if await self._has_secret():
            raise SignInNeeded("sign in with the token of the cluster's secret", hint="`tidelog cluster admin-token`")
        return ""

    async def _has_secret(self) -> bool:
        now = self._place.clock.monotonic()
        if self._secret is None or now - self._secret[0] >= SECRET_FOR_S:
            self._secret = now, await self._link.needs_token()
        return self._secret[1]

    async def _proved(self, token: str) -> str:
        """Return the token if the cluster accepts it. Raises `SignInNeeded`, `TooManyAttempts`."""
        self._sessions.check_rate()
        if not token or not await self._link.accepts(token):
            self._sessions.failed()
            logger.warning("a wrong token was given to the console")
            raise SignInNeeded("this is not the token of the cluster's secret", hint="`tidelog cluster admin-token`")
        return token

    # --- pages and sessions --------------------------------------------------------------------------------------

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Answer with a file of the pages."""
        asset = self._assets.get(request.match_info["path"] or "index.html")
        if asset is None:
            raise NotFound(f"{request.path} is no page of the console", hint="open /console/")
        return _file(request, asset)

    async def session(self, request: web.Request) -> web.StreamResponse:
        """Tell whether this browser may ask the API."""
        needs_token = await self._has_secret()
        signed_in = self._sessions.token_of(request.cookies.get(_cookie(request), "")) is not None
        return _json({"needs_token": needs_token, "signed_in": signed_in or not needs_token, "version": VERSION})

    async def sign_in(self, request: web.Request) -> web.StreamResponse:
        """Begin a session."""
        asked = await _body(request, _SignIn)
        if asked.key:
            self._sessions.check_rate()
            token = self._sessions.take_key(asked.key)
            if token is None:
                self._sessions.failed()
                raise SignInNeeded("this key was used, or is too old", hint="start `tidelog console` again")
        elif not await self._has_secret():
            token = ""
        else:
            token = await self._proved(asked.token.strip())
        response = _json({"signed_in": True})
        response.set_cookie(
            _cookie(request), self._sessions.begin(token), path="/console/", httponly=True, samesite="Strict",
            secure=request.secure,
        )  # fmt: skip
        return response

    async def sign_out(self, request: web.Request) -> web.StreamResponse:
        """End the session."""
        self._sessions.end(request.cookies.get(_cookie(request), ""))
        response = _json({"signed_in": False})
        response.del_cookie(_cookie(request), path="/console/", httponly=True, samesite="Strict")
        return response

    # --- the cluster ---------------------------------------------------------------------------------------------

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Pass a GET on."""
        asked = pass_on(READ, request.match_info["path"], list(request.query.items()))
        broker = request.match_info["broker"]
        if broker == "all":
            return _json(await self._link.read_all(asked))
        if broker == "any":
            return _json(await self._link.read(asked))
        if not (broker.isascii() and broker.isdecimal() and len(broker) < 11):
            raise InvalidInput(f"{broker[:100]!r} is no broker: its id is expected, `any` or `all`")
        return _json(await self._link.read(asked, int(broker)))

    async def change(self, request: web.Request) -> web.StreamResponse:
        """Pass a POST on."""
        given = await _body(request, _PassedChange)
        asked = pass_on(CHANGE, request.match_info["path"], list(given.query.items()))
        return _json(await self._link.change(asked, given.body, await self._token_of(request)))

    async def cost(self, request: web.Request) -> web.StreamResponse:
        """Tell what the bucket costs, by purpose and topic, of the brokers that answer; `errors` of the others."""
        found = await self._link.read_all(pass_on(READ, "bucket/usage", []))
        usages = list(found["answers"].values())
        if not usages:
            raise Unavailable("no broker tells its use of the bucket", hint="see `tidelog status`")
        return _json({**bill(usages, self._place.prices), "errors": found["errors"]})

    # --- what Kafka clients see ----------------------------------------------------------------------------------

    async def offsets(self, request: web.Request) -> web.StreamResponse:
        """Tell the readable offsets of a topic's partitions; those without a leader are missing."""
        topic = request.query.get("topic", "")
        spans = await self._kafka.spans((topic, partition) for partition in await self._kafka.partitions(topic))
        rows = [{"partition": place[1], "start": span.start, "end": span.end} for place, span in spans.items()]
        return _json({"topic": topic, "partitions": rows})

    async def groups(self, request: web.Request) -> web.StreamResponse:
        """List consumer groups with their lag."""
        return _json(await self._kafka.groups())

    async def group(self, request: web.Request) -> web.StreamResponse:
        """Describe one group."""
        return _json(await self._kafka.group(request.query.get("name", "")))

    async def reset(self, request: web.Request) -> web.StreamResponse:
        """Say what a reset of offsets does, or do it."""
        return _json(await self._kafka.reset(await _body(request, ResetOrder)))

    async def produce(self, request: web.Request) -> web.StreamResponse:
        """Write a record, or say where it would go."""
        return _json(await self._kafka.produce(await _body(request, ProduceOrder)))

    async def records(self, request: web.Request) -> web.StreamResponse:
        """Send records as JSON lines."""
        query = RecordQuery.parse(request.query)
        async with self._reader.reading(query) as lines:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
            await response.prepare(request)
            try:
                async for line in lines:
                    await self._reader.send(response.write, json.dumps(line).encode() + b"\n")
                await response.write_eof()
            except (ConnectionResetError, TimeoutError):
                if request.transport is not None:
                    request.transport.abort()  # the browser left, or does not read
        return response


def _cookie(request: web.Request) -> str:
    """The name of the session's cookie. Browsers send a host's cookies to all of its ports, so the port is in it."""
    return f"tidelog_console_{request.url.port or 0}"


async def _body(request: web.Request, kind: type[T]) -> T:
    """Parse the JSON body. Raises `InvalidInput`."""
    if request.content_type != "application/json":
        raise InvalidInput("the body is JSON, and says so in Content-Type")
    raw = bytearray()
    async for chunk in request.content.iter_chunked(64 << 10):
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise InvalidInput(f"the body is longer than {MAX_BODY_BYTES >> 20} MiB", hint="use `tidelog produce`")
    try:
        return msgspec.json.decode(raw, type=kind)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"the body is not as expected: {error}") from None


def _file(request: web.Request, asset: Asset) -> web.StreamResponse:
    headers = {"Cache-Control": "no-cache", "ETag": f'"{asset.etag}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, headers={**headers, "Content-Type": asset.content_type})


def _json(body: object) -> web.Response:
    return web.json_response(body)


def _error(status: int, message: str, hint: str | None) -> web.Response:
    return web.json_response({"error": message, "hint": hint}, status=status)


def _status_of(error: TidelogError) -> int:
    kinds: list[tuple[type[TidelogError], int]] = [
        (SignInNeeded, 401),
        (NotFound, 404),
        (InvalidInput, 400),
        (Unavailable, 503),
    ]
    for kind, status in kinds:
        if isinstance(error, kind):
            return status
    return 503 if error.retriable else 500
