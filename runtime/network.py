"""`Network`, the door to byte streams between processes.

It is asyncio's protocol interface and nothing more: a factory makes a protocol object for each connection, a transport
is handed to it. The real door asks the running event loop (uvloop in production); the simulated one joins two
protocols in memory and may delay, cut or slow what flows between them. Byte streams keep their order on a connection;
nothing is promised across connections.

Entry: `TcpNetwork`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Protocol

from runtime.errors import TidelogError, Unavailable

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class AddressInUse(TidelogError):
    """Another process listens on the wanted port."""

    exit_code = 8


class ConnectionRefused(Unavailable):
    """The host answers, and says that nobody listens at the port."""


class Listener(Protocol):
    """A listening endpoint."""

    @property
    def address(self) -> tuple[str, int]:
        """The bound host and port; the port is the one the system chose where 0 was asked for."""
        ...

    async def close(self) -> None:
        """Stop accepting. Connections already accepted are left to their protocols, which all have got theirs then."""
        ...


class Network(Protocol):
    """Opens and accepts byte streams."""

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """Accept connections on `host`:`port` (0–65535, 0: any free one). Raises `AddressInUse`."""
        ...

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """Open a connection within `timeout_s` seconds. Raises `Unavailable`, where it is so `ConnectionRefused`."""
        ...


def cannot_connect(host: str, port: int, error: Exception) -> Unavailable:
    """What a `Network` raises."""
    kind = ConnectionRefused if isinstance(error, ConnectionRefusedError) else Unavailable
    return kind(f"cannot connect to {host}:{port}: {error or 'timed out'}", hint="is the process up?")


async def refuses(network: Network, host: str, port: int, timeout_s: float) -> bool:
    """Whether nobody listens there for certain: no answer in time is none, and neither is another error."""
    try:
        transport, _ = await network.connect(asyncio.Protocol, host, port, timeout_s=timeout_s)
    except ConnectionRefused:
        return True
    except Unavailable:
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
    """Close a server of the running loop; every connection that it has accepted is with its protocol then.

    A connection that asyncio has accepted and not handed over yet when its server closes would be lost, and left open.
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
    """Return when what the loop has accepted before is handed over: a turn makes the protocol, another one calls it."""
    for _ in range(2):
        await asyncio.sleep(0)


class TcpNetwork:
    """Real TCP on the running event loop. Sets TCP_NODELAY on both ends."""

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """See `Network.listen`."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(factory, host, port, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE or "address already in use" in str(error):
                raise AddressInUse(
                    f"port {port} on {host} is in use by another process",
                    hint=f"stop it (`ss -tanp 'sport = :{port}'` shows it) or choose another port",
                ) from error
            raise AddressInUse(
                f"cannot listen on {host}:{port}: {error}", hint="check the host and port in the configuration"
            ) from error
        return _TcpListener(server)

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """See `Network.connect`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                transport, protocol = await loop.create_connection(factory, host, port)
            sock = transport.get_extra_info("socket")
            if sock is not None:  # closed already, if the peer was so quick to reset the connection
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, TimeoutError) as error:
            raise cannot_connect(host, port, error) from error
        return transport, protocol
