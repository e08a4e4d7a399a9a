"""`RpcListener`: a port that takes RPC connections, of controllers' clients or of other brokers.

Invariants: no more than `max_connections` are open, the one too many is dropped with a log line; all share one
`RpcDoor`, which bounds what arrives half; `close` returns when no request is in work any more, those of lost
connections included.

Entry: `RpcListener.start`, `close`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from controller.handshake import Credentials
from controller.rpc import AdoptPeer, Handler, RpcConnection, RpcDoor
from runtime.clock import Clock
from runtime.network import Listener, Network
from runtime.tasks import TaskSet


class RpcListener:
    """See the module. `on_lost` is told of each connection that ends."""

    def __init__(
        self,
        handler: Handler,
        *,
        network: Network,
        clock: Clock,
        credentials: Credentials | None,
        max_connections: int,
        on_lost: Callable[[RpcConnection], None] = lambda connection: None,
        adopt_peer: AdoptPeer | None = None,
    ) -> None:
        self._handler = handler
        self._network = network
        self._credentials = credentials
        self._max_connections = max_connections
        self._on_lost = on_lost
        self._adopt_peer = adopt_peer
        self._door = RpcDoor(clock)
        self._listener: Listener | None = None
        self._connections: dict[RpcConnection, None] = {}
        self._ending: dict[RpcConnection, None] = {}
        """Lost, with requests that may still be in work: `close` must not leave them behind."""
        self._tasks = TaskSet("rpc-listener")
        self._closing = False

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes any. Raises `AddressInUse`."""
        self._listener = await self._network.listen(self._accept, host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._listener is not None, "not started"
        return self._listener.address

    @property
    def connections(self) -> tuple[RpcConnection, ...]:
        """Those that are open."""
        return tuple(self._connections)

    @property
    def receiving_bytes(self) -> int:
        """Bytes of frames that are still arriving, over all connections."""
        return self._door.receiving_bytes

    def _accept(self) -> RpcConnection:
        return RpcConnection(
            handler=self._handler,
            on_made=self._made,
            on_lost=self._lost,
            credentials=self._credentials,
            adopt_peer=self._adopt_peer,
            door=self._door,
        )

    def _made(self, connection: RpcConnection) -> None:
        self._connections[connection] = None
        if len(self._connections) > self._max_connections:
            extra = {"peer": connection.peer, "limit": self._max_connections}
            self._door.logs.line("connections", logging.WARNING, "too many connections; one is refused", extra)
            connection.abort()

    def _lost(self, connection: RpcConnection) -> None:
        self._connections.pop(connection, None)
        self._on_lost(connection)
        self._ending[connection] = None
        if not self._closing:
            self._tasks.spawn(self._end(connection), "closed-connection")

    async def _end(self, connection: RpcConnection) -> None:
        await connection.close()
        self._ending.pop(connection, None)

    async def close(self) -> None:
        """Stop listening, drop the connections, end what they asked for."""
        self._closing = True
        if self._listener is not None:
            await self._listener.close()
        await self._tasks.close()
        closed: set[RpcConnection] = set()
        while left := [one for one in self._connections | self._ending if one not in closed]:
            for connection in left:
                await connection.close()
            closed.update(left)
