"""Limits of the admin HTTP listener and the console's, around aiohttp's protocol: number and lifetime of connections.

aiohttp bounds the size of a request's head; it bounds neither the number of connections nor the time for a head, for a
body, or for a response that the client does not read. One rule covers these: a connection may be outside of a handler,
or in one whose request has not arrived in full, for at most `timeout_s` at a time. The time starts with the connection,
with the head of a request and with the end of its handler, and ends when a handler has the whole request; so it also
closes idle keep-alive connections.

aiohttp logs a traceback for each request that is not valid HTTP; with `bounded_runner` it logs a line, within limits.
It also decompresses bodies, those that no handler wants included: 260 kB of anybody who connects take half a second of
the event loop. That is switched off: no client compresses its requests.

Entry: `AdminLimits`, `bounded`, `bounded_runner`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from tidelog.runtime.clock import Clock
from tidelog.runtime.log_limit import LogLimiter

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
OUTSIDE_S = 30.0


class AdminLimits:
    """A protocol factory for the listener, in place of aiohttp's (`inner`)."""

    def __init__(
        self,
        inner: Callable[[], asyncio.BaseProtocol],
        clock: Clock,
        *,
        max_connections: int = MAX_CONNECTIONS,
        timeout_s: float = OUTSIDE_S,
    ) -> None:
        self._inner = inner
        self._guards: dict[asyncio.BaseProtocol, _Guard] = {}
        self.logs = LogLimiter(logger, clock)
        self.max_connections = max_connections
        self.timeout_s = timeout_s
        self.dropped: dict[str, int] = {"connections": 0, "late": 0}
        """Connections closed by these limits, by reason."""

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of one connection."""
        return _Guard(self, cast(asyncio.Protocol, self._inner()))

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._guards)

    def admit(self, guard: _Guard, inner: asyncio.BaseProtocol) -> bool:
        """Admit a connection, unless the limit is reached."""
        if len(self._guards) >= self.max_connections:
            return False
        self._guards[inner] = guard
        return True

    def leave(self, inner: asyncio.BaseProtocol) -> None:
        """Release the place of a closed connection."""
        self._guards.pop(inner, None)

    def enter_handler(self, inner: object, body: StreamReader) -> None:
        """Note that a handler begins on the connection of this aiohttp protocol; it may wait for the request's body."""
        guard = self._guards.get(cast(asyncio.BaseProtocol, inner))
        if guard is not None:
            guard.enter(body)

    def leave_handler(self, inner: object) -> None:
        """Note that a handler has ended; the client still has to read the response."""
        guard = self._guards.get(cast(asyncio.BaseProtocol, inner))
        if guard is not None:
            guard.leave()


def bounded(limits: Callable[[], AdminLimits]) -> Middleware:
    """Return the outermost middleware of an application whose listener has these limits, which are made after it.

    It suspends a connection's limits while a handler, with bounds of its own, runs and has the whole request.
    """

    @web.middleware
    async def suspended(request: web.Request, handler: Handler) -> web.StreamResponse:
        found = limits()
        found.enter_handler(request.protocol, request.content)
        try:
            return await handler(request)
        except ConnectionResetError:
            if request.transport is not None:
                raise
            return web.Response()  # the client left, or was too slow to send its body: nobody reads this
        finally:
            found.leave_handler(request.protocol)

    return suspended


def bounded_runner(app: web.Application, clock: Clock, *, shutdown_s: float) -> web.AppRunner:
    """Return the runner of an application whose listener has `AdminLimits`; `shutdown_s`: for requests in flight."""
    log = _ServerLog(LogLimiter(logger, clock))
    return web.AppRunner(app, access_log=None, logger=log, auto_decompress=False, shutdown_timeout=shutdown_s)


class _ServerLog:
    """What aiohttp's server logs with, in place of a logger: any peer can cause its lines."""

    def __init__(self, logs: LogLimiter) -> None:
        self._logs = logs

    def debug(self, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log as `logging.Logger` does."""
        logger.debug(text, *args, exc_info=exc_info)

    def exception(self, text: str, *client: object, exc_info: BaseException | None = None) -> None:
        """Log a request that is not valid HTTP in one line, and the failure of a handler with its traceback."""
        extra = {"client": str(client[0]) if client else ""}
        if isinstance(exc_info, (HttpProcessingError, web.RequestPayloadError)):
            said = str(getattr(exc_info, "message", exc_info)).partition("\n")[0]
            event = "admin request refused: it is not valid HTTP"
            self._logs.line("not_http", logging.INFO, event, {**extra, "error": said})
            return
        self._logs.line("failed", logging.ERROR, "admin request failed", {**extra, "what": text}, error=exc_info)


class _Guard(asyncio.Protocol):
    """Forwards all events to aiohttp, and closes the connection at its time-out."""

    def __init__(self, limits: AdminLimits, inner: asyncio.Protocol) -> None:
        self._limits = limits
        self._inner = inner
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._admitted = False
        self._awaited: StreamReader | None = None
        """The body of the request that a handler has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._admitted = self._limits.admit(self, self._inner)
        if not self._admitted:
            self._drop("connections", "admin connection refused: too many")
            return
        self._inner.connection_made(transport)
        self.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.pause()
        if self._admitted:
            self._limits.leave(self._inner)
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._admitted else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def enter(self, body: StreamReader) -> None:
        """A handler begins: stop the timer once it has the whole request, for it has bounds of its own."""
        self._awaited = body
        self.resume()
        body.on_eof(lambda: self._arrived(body))

    def _arrived(self, body: StreamReader) -> None:
        if self._awaited is body:  # else its handler has ended without it
            self.pause()

    def leave(self) -> None:
        """The handler has ended: start the timer."""
        self._awaited = None
        self.resume()

    def pause(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Start the timer anew."""
        self.pause()
        if self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.timeout_s, self._late)

    def _late(self) -> None:
        self._drop("late", "admin connection closed: no whole request came, or its answer was not taken, in time")

    def _drop(self, reason: str, event: str) -> None:
        self._limits.dropped[reason] += 1
        if self._transport is None:
            return
        peer = self._transport.get_extra_info("peername")
        self._limits.logs.line(reason, logging.INFO, event, {"client": str(peer[0]) if peer else ""})
        self._transport.abort()
