"""`TlsNetwork`: the network between brokers, when it has TLS (`tidelog.runtime.tls`).

Whoever uses it gets connections on which both sides have shown a certificate of the cluster's authority: a protocol's
`connection_made` is called after that. What the cluster's secret proves comes on top of it.

A listener accepts connections, and begins TLS on them itself, so it knows those that have not finished it: they are
bounded as other unproven connections are (`tidelog.controller.rpc.doors`) and end after `HANDSHAKE_S`; each refusal
is logged, within limits, with what was wrong, and the last one is a problem for a while.

Invariants: no byte that was not encrypted reaches a protocol; `close` ends connections in the handshake.

Entry: `TlsNetwork`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from tidelog.controller.rpc.doors import ConnectionDoors
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.network import ConnectionRefused, Listener, ProtocolFactory, cannot_connect, cannot_listen
from tidelog.runtime.task_errors import as_unavailable
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.tls import MutualTls, tls_reason

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
"""Time for a TLS handshake, from the accepted connection on."""
SHUTDOWN_S: Final = 1.0
"""How long the end of TLS is waited for when a connection is closed."""
BACKLOG: Final = 1024
ACCEPTED_AT_ONCE: Final = 64
REST_S: Final = 1.0
"""Pause after no connection could be accepted."""
PROBLEM_S: Final = 60.0
"""How long a refused connection is a problem for the operator."""
SILENT: Final = "it ended before TLS had begun"
NOT_TLS: Final = "it does not begin with TLS: has that broker the settings tls_cert_file, tls_key_file and tls_ca_file?"
_NOT_TLS_REASONS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})


class _Arrival(NamedTuple):
    """An accepted connection that has not finished TLS."""

    sock: socket.socket
    host: str


class _TlsListener:
    """Accepts by itself: asyncio's listeners tell nobody of connections before TLS is finished on them."""

    def __init__(self, factory: ProtocolFactory, network: TlsNetwork) -> None:
        self._factory = factory
        self._network = network
        self._doors: ConnectionDoors[_Arrival] = ConnectionDoors(0)
        self._begun: dict[_Arrival, asyncio.Task[None]] = {}
        self._tasks = TaskSet("tls-listener")
        self._sockets: list[socket.socket] = []
        self._pause: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen at all addresses of the host. Raises `AddressInUse`."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, place in dict.fromkeys(found):
                chosen = port or (self.address[1] if self._sockets else 0)
                self._sockets.append(_listening(family, (place[0], chosen, *place[2:])))
        except OSError as error:
            await self.close()
            raise cannot_listen(host, port, error) from error
        self._accept_from_now_on()

    @property
    def address(self) -> tuple[str, int]:
        """See `Listener.address`."""
        name = self._sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """See `Listener.close`. What has not finished TLS is dropped."""
        if self._pause is not None:
            self._pause.cancel()
        loop = asyncio.get_running_loop()
        sockets, self._sockets = self._sockets, []
        for sock in sockets:
            loop.remove_reader(sock)
            sock.close()
        await self._tasks.close()

    def _accept_from_now_on(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file is left: who has one must close it first
                self._rest(error)
                return
            sock.setblocking(False)
            self._arrived(_Arrival(sock, str(address[0])))

    def _rest(self, error: OSError) -> None:
        self._network.say("connections between brokers cannot be accepted", {"error": str(error)})
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
        self._pause = loop.call_later(REST_S, self._accept_from_now_on)

    def _arrived(self, arrival: _Arrival) -> None:
        dropped = self._doors.enter(arrival, arrival.host)
        if dropped is not None:
            self._begun[dropped].cancel()
            self._network.refused(dropped.host, "too many connections have not finished TLS; this was the oldest")
        self._begun[arrival] = task = self._tasks.spawn(self._begin(arrival), "tls")
        task.add_done_callback(partial(self._ended, arrival))

    async def _begin(self, arrival: _Arrival) -> None:
        """Begin TLS on an accepted connection; its protocol gets it when both sides are proven."""
        options: dict[str, Any] = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": SHUTDOWN_S}
        try:
            arrival.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._factory, arrival.sock, ssl=self._network.tls.server(), **options
                )
        except TimeoutError:
            arrival.sock.close()
            self._network.refused(arrival.host, f"TLS was not finished within {HANDSHAKE_S:.0f} s")
        except OSError as error:  # those of TLS are
            arrival.sock.close()
            self._network.refused(arrival.host, _why_refused(error))

    def _ended(self, arrival: _Arrival, task: asyncio.Task[None]) -> None:
        self._doors.leave(arrival)
        self._begun.pop(arrival, None)
        if task.cancelled() or task.exception() is not None:  # perhaps before it had begun
            arrival.sock.close()


def _listening(family: int, place: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class TlsNetwork:
    """See the module, and `tidelog.runtime.network.Network`."""

    def __init__(self, tls: MutualTls, clock: Clock) -> None:
        self.tls = tls
        self._clock = clock
        self._logs = LogLimiter(logger, clock)
        self._refusal = ("", "")
        self._refused_at = float("-inf")

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """See `Network.listen`. `factory` is called when a connection is accepted, `connection_made` after TLS."""
        listener = _TlsListener(factory, self)
        await listener.start(host, port)
        return listener

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """See `Network.connect`. Raises `Unavailable` if there is no TLS with that listener, and says why."""
        options: dict[str, Any] = {"ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": SHUTDOWN_S}
        try:
            async with asyncio.timeout(timeout_s):
                transport, protocol = await asyncio.get_running_loop().create_connection(
                    factory, host, port, ssl=self.tls.client(), server_hostname=host, **options
                )
            if transport.is_closing():
                raise ConnectionAbortedError("the connection was lost while it was made")
            _no_delay(transport)
        except ConnectionRefusedError as error:
            raise ConnectionRefused(f"cannot connect to {host}:{port}: {error}") from error
        except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError) as error:
            raise _no_tls(host, port, error) from error
        except (OSError, TimeoutError) as error:
            raise cannot_connect(host, port, error) from error
        except Exception as error:
            raise as_unavailable("network", error) from error
        return transport, protocol

    def refused(self, host: str, why: str) -> None:
        """Take note of a connection that was refused."""
        if why == SILENT:
            return  # whoever looks whether anybody listens here does that
        self._refusal, self._refused_at = (host, why), self._clock.monotonic()
        self.say("a connection without valid TLS was refused", {"peer": host, "why": why})

    def say(self, event: str, extra: Mapping[str, Any]) -> None:
        """Log what peers have caused, within limits."""
        self._logs.line(event, logging.WARNING, event, extra)

    def problems(self) -> list[str]:
        """Return what an operator has to see to, one sentence each."""
        found = self.tls.problems()
        if self._clock.monotonic() - self._refused_at < PROBLEM_S:
            found.append("a connection from {} to the port for other brokers was refused: {}".format(*self._refusal))
        return found


def _no_delay(transport: asyncio.BaseTransport) -> None:
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _why_refused(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {tls_reason(error)}"
    if isinstance(error, ssl.SSLError):
        if error.reason in _NOT_TLS_REASONS:
            return NOT_TLS
        return f"TLS failed: {tls_reason(error)}"
    return SILENT


def _no_tls(host: str, port: int, error: OSError) -> Unavailable:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unavailable(
            f"the certificate of {host}:{port} is not accepted: {tls_reason(error)}",
            hint="it must be signed by an authority in replication.tls_ca_file, be valid, and name this host"
            " (replication.tls_check_host_names)",
        )
    reason = tls_reason(error) if isinstance(error, ssl.SSLError) else "the connection was closed"
    return Unavailable(
        f"no TLS with {host}:{port}: {reason}",
        hint="replication.tls_* must be set on all brokers or on none; the log of that broker says why it refused",
    )
