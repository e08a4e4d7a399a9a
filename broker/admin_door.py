"""Bounds for the admin HTTP listener, around aiohttp's own protocol: how many connections, and for how long.

aiohttp bounds the size of a request's head; it does not bound the number of connections, nor the time that a head, a
body nobody reads, or an answer the client does not take may need. One rule covers these: outside of a handler a
connection lives `timeout_s` at a time. That is from its start, or the end of its last request, to the beginning of
the next handler; so an idle keep-alive connection ends with it, too.

Entry: `AdminDoor`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from runtime.clock import Clock
from runtime.log_limit import LogLimiter

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
OUTSIDE_S = 30.0


class AdminDoor:
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
        self.logs = LogLimiter(log, clock)
        self.max_connections = max_connections
        self.timeout_s = timeout_s
        self.dropped: dict[str, int] = {"connections": 0, "late": 0}
        """Connections that were ended here, by reason."""

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of one connection."""
        return _Guard(self, cast(asyncio.Protocol, self._inner()))

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._guards)

    def admit(self, guard: _Guard, inner: asyncio.BaseProtocol) -> bool:
        """Seat a connection if there is room."""
        if len(self._guards) >= self.max_connections:
            return False
        self._guards[inner] = guard
        return True

    def leave(self, inner: asyncio.BaseProtocol) -> None:
        """A connection has ended."""
        self._guards.pop(inner, None)

    def enter_handler(self, inner: object) -> None:
        """A handler begins on the connection whose aiohttp protocol this is."""
        guard = self._guards.get(cast(asyncio.BaseProtocol, inner))
        if guard is not None:
            guard.pause()

    def leave_handler(self, inner: object) -> None:
        """A handler has ended: its answer is still to be taken."""
        guard = self._guards.get(cast(asyncio.BaseProtocol, inner))
        if guard is not None:
            guard.resume()


class _Guard(asyncio.Protocol):
    """Hands everything on to aiohttp, and ends the connection when its time is over."""

    def __init__(self, door: AdminDoor, inner: asyncio.Protocol) -> None:
        self._door = door
        self._inner = inner
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._admitted = self._door.admit(self, self._inner)
        if not self._admitted:
            self._drop("connections", "admin connection refused: too many")
            return
        self._inner.connection_made(transport)
        self.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.pause()
        if self._admitted:
            self._door.leave(self._inner)
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

    def pause(self) -> None:
        """Inside a handler: it has its own bounds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Outside of one: time runs."""
        self.pause()
        if self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(self._door.timeout_s, self._late)

    def _late(self) -> None:
        self._drop("late", "admin connection closed: no request came, or its answer was not taken, in time")

    def _drop(self, reason: str, event: str) -> None:
        self._door.dropped[reason] += 1
        if self._transport is None:
            return
        peer = self._transport.get_extra_info("peername")
        self._door.logs.line(reason, logging.INFO, event, {"client": str(peer[0]) if peer else ""})
        self._transport.abort()
