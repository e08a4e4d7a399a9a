"""A proxy for an S3 server that fails on demand: refuses, resets, loses responses, delays, truncates bodies.

`FaultyS3.fault` is called for every request; `None` lets it pass. Everything else is up to the real server, so a test
sees what was really applied.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast

from aiohttp import ClientConnectionResetError, ClientSession, TCPConnector, web
from yarl import URL


@dataclass(frozen=True)
class Fault:
    """The faults of one request, applied in the order of the fields; several may be combined."""

    delay_s: float = 0.0
    status: int = 0
    """Respond with this status and the S3 error `code`, without forwarding."""
    code: str = "SlowDown"
    reset: bool = False
    """Close the connection without forwarding."""
    drop_headers: tuple[str, ...] = ()
    """Forward without these request headers, to simulate a server that ignores them."""
    lose_reply: bool = False
    """Forward, then close the connection."""
    body_bytes: int = -1
    """Send this many bytes of the response's body, then close the connection."""
    answer: bytes = b""
    """Forward, but respond with 200 and this body."""


@dataclass
class Seen:
    """One request received by the proxy."""

    method: str
    path: str
    query: dict[str, str]


class _Server(Protocol):
    """A dataclass with the address of a server."""

    @property
    def endpoint(self) -> str: ...


ServerT = TypeVar("ServerT", bound=_Server)


class FaultyS3(Generic[ServerT]):
    """The proxy; an async context manager. `server` is the address to give to clients.

    Requests are recorded only if it `remembers`, which takes unbounded memory.
    """

    def __init__(self, upstream: ServerT, *, remembers: bool = True) -> None:
        self._upstream = upstream
        self._remembers = remembers
        self.fault: Callable[[Seen], Fault | None] = lambda seen: None
        self.requests: list[Seen] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.server = upstream

    async def __aenter__(self) -> FaultyS3[ServerT]:
        self._session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)
        runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=1)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.server = cast(ServerT, replace(cast(Any, self._upstream), endpoint=f"http://{host}:{port}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def first(self, count: int, fault: Fault, *, method: str = "", path: str = "") -> None:
        """Let the next `count` requests fail whose method is `method` and whose path contains `path`."""
        left = count

        def decide(seen: Seen) -> Fault | None:
            nonlocal left
            if left <= 0 or method not in ("", seen.method) or path not in seen.path:
                return None
            left -= 1
            return fault

        self.fault = decide

    def count(self, method: str, path: str = "") -> int:
        """Return the number of requests with this method and part of a path."""
        return sum(seen.method == method and path in seen.path for seen in self.requests)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        seen = Seen(request.method, request.path, dict(request.query))
        if self._remembers:
            self.requests.append(seen)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request, self.fault(seen) or Fault())
        except ClientConnectionResetError:  # the client has disconnected, for example a killed process
            return self._cut(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse:
        body = await request.content.read()  # request.read() has a bound of 1 MiB
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>as the test wants it</Message></Error>"
            return web.Response(status=fault.status, text=text, content_type="application/xml")
        if fault.reset:
            return self._cut(request)
        dropped = {name.lower() for name in (*fault.drop_headers, "Transfer-Encoding", "Content-Length")}
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        url = URL(self._upstream.endpoint + request.raw_path, encoded=True)
        async with self._session.request(request.method, url, data=io.BytesIO(body), headers=headers) as reply:
            content = await reply.read()
            if fault.lose_reply:
                return self._cut(request)
            return await self._pass_on(request, fault, reply.status, dict(reply.headers), content)

    async def _pass_on(
        self, request: web.BaseRequest, fault: Fault, status: int, headers: dict[str, str], content: bytes
    ) -> web.StreamResponse:
        if fault.answer:
            return web.Response(status=200, body=fault.answer, content_type="application/xml")
        for name in ("Transfer-Encoding", "Connection", "Date", "Server"):
            headers.pop(name, None)
        if request.method != "HEAD":
            headers["Content-Length"] = str(len(content))
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        if request.method != "HEAD":
            await response.write(content if fault.body_bytes < 0 else content[: fault.body_bytes])
        if fault.body_bytes >= 0:
            return self._cut(request)
        await response.write_eof()
        return response

    @staticmethod
    def _cut(request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
