"""`Network`, the interface to byte streams between processes.

It is asyncio's protocol interface: a factory creates a protocol object for each connection, which gets a transport. The
real implementation uses the running event loop (uvloop in production); the simulated one connects two protocols in
memory and may delay, cut or throttle the data. Bytes keep their order on a connection; there is no order between
connections.

Entry: `TcpNetwork`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Protocol

from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.task_errors import ERRORS, as_unavailable

ProtocolFactory = Callable[[], asyncio.BaseProtocol]

BROKER_HEADER = "Tidelog-Broker"
"""Header of a request to an admin HTTP: the id of the broker that it is meant for. Another one answers 421, because an
address may mean another machine to who was told it (loopback), or be another broker's since. Older ones ignore it."""

CLUSTER_HEADER = "Tidelog-Cluster"
"""The same with the id of the cluster: a broker of another one may well have the same id."""


class AddressInUse(TidelogError):
    """Another process listens on the wanted port."""

    exit_code = 8


class ConnectionRefused(Unavailable):
    """The host responds that the port has no listener."""


class Listener(Protocol):
    """A listening endpoint."""

    @property
    def address(self) -> tuple[str, int]:
        """Return the bound host and port; the port is the one the system selected if 0 was requested."""
        ...

    async def close(self) -> None:
        """Stop accepting. Accepted connections stay open, and all have been passed to their protocols."""
        ...


class Network(Protocol):
    """Opens and accepts byte streams."""

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """Accept connections on `host`:`port` (0–65535, 0: any free one). Raises `AddressInUse`."""
        ...

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """Open a connection within `timeout_s` seconds. Raises `Unavailable`, or its subclass `ConnectionRefused`."""
        ...


def cannot_connect(host: str, port: int, error: Exception) -> Unavailable:
    """Return the error that a `Network` raises."""
    kind = ConnectionRefused if isinstance(error, ConnectionRefusedError) else Unavailable
    return kind(f"cannot connect to {host}:{port}: {error or 'timed out'}", hint="check that the process is running")


def cannot_listen(host: str, port: int, error: OSError) -> AddressInUse:
    """Return the error that a `Network` raises for a port that it cannot listen on."""
    if error.errno == errno.EADDRINUSE or "address already in use" in str(error):
        hint = f"stop it (`ss -tanp 'sport = :{port}'` shows it) or choose another port"
        return AddressInUse(f"port {port} on {host} is in use by another process", hint=hint)
    hint = "check the host and port in the configuration"
    return AddressInUse(f"cannot listen on {host}:{port}: {error}", hint=hint)


async def refuses(network: Network, host: str, port: int, timeout_s: float) -> bool:
    """Whether the address certainly has no listener. A time-out or another error proves nothing."""
    try:
        transport, _ = await network.connect(asyncio.Protocol, host, port, timeout_s=timeout_s)
    except ConnectionRefused:
        return True
    except Unavailable:
        return False
    except Exception as error:  # noqa: BLE001  # noted; it proves nothing
        ERRORS.note("network", error, ended=False)
        return False
    transport.close()
    return False


class _TcpListener:
    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        name = server.sockets[0].getsockname()
        self._address = (str(name[0]), int(name[1]))

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    async def close(self) -> None:
        await close_server(self._server)


async def close_server(server: asyncio.Server) -> None:
    """Close a server of the running loop after all accepted connections were passed to their protocols.

    A connection that asyncio has accepted and not passed on when its server closes would be lost and left open.
    """
    loop = asyncio.get_running_loop()
    try:
        for sock in server.sockets:
            loop.remove_reader(sock)
        await _hand_over()
    finally:
        server.close()
    await _hand_over()


async def _hand_over() -> None:
    """Return when all accepted connections are passed on: one iteration creates the protocol, another calls it."""
    for _ in range(2):
        await asyncio.sleep(0)


class TcpNetwork:
    """Real TCP on the running event loop. Sets TCP_NODELAY on both ends."""

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """See `Network.listen`."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(factory, host, port, backlog=1024)
            if None in server.sockets:  # uvloop says nothing when another process listens there since the bind
                server.close()
                raise OSError(errno.EADDRINUSE, "another process has just begun to listen there")
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        except UnicodeError as error:  # a label of the name is empty or too long
            raise cannot_listen(host, port, OSError(errno.EADDRNOTAVAIL, str(error))) from error
        return _TcpListener(server)

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """See `Network.connect`. A connection lost while it is made is `Unavailable` on every loop."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                transport, protocol = await loop.create_connection(factory, host, port)
            if transport.is_closing():  # by a peer that reset it immediately, or by the protocol
                raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was lost while it was made")
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, TimeoutError) as error:
            raise cannot_connect(host, port, error) from error
        except Exception as error:  # such as of a socket that is closed already: its descriptor is -1
            raise as_unavailable("network", error) from error
        return transport, protocol
