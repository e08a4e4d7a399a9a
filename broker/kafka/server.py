"""The Kafka listener: accepts and closes connections.

Connections are in `tidelog.broker.kafka.connection`; only the given `ApiHandler`s are served (ApiVersions is generated
from that list).

Close: stop accepting, answer started requests, then close; connections still open at the deadline are aborted. When a
broker was replaced, all connections are aborted immediately (`KafkaServer.cut`).

Entry: `KafkaServer`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Sequence

from tidelog.broker.kafka.connection import Api, Connection, Shared
from tidelog.broker.kafka.handlers.api_versions import ApiVersions
from tidelog.broker.kafka.limits import ByteBudget, Seats, UnreadOutput
from tidelog.broker.kafka.services import ApiHandler, Services
from tidelog.broker.settings import KafkaSettings
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.network import Listener, Network
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

_SWEEPS_A_TIMEOUT = 4
_LONGEST_SWEEP_S = 5.0


class KafkaServer:
    """One listener and its connections."""

    def __init__(
        self, services: Services, apis: Sequence[ApiHandler], network: Network, settings: KafkaSettings
    ) -> None:
        keys = [api.api_key for api in apis]
        assert len(set(keys)) == len(keys), f"an API has two handlers: {sorted(keys)}"
        api_versions = ApiVersions(apis)
        self._network = network
        self._settings = settings
        self._clock = services.clock
        self._shared = Shared(
            services=services,
            apis={api.api_key: Api.of(api) for api in [*apis, api_versions.api]},
            unsupported_api_versions=api_versions.unsupported,
            max_request_bytes=settings.max_request_bytes,
            seats=Seats(settings.max_connections, settings.max_connections_per_address),
            budget=ByteBudget(settings.max_in_flight_bytes),
            unread=UnreadOutput(settings.max_unread_bytes),
            logs=LogLimiter(logger, services.clock),
        )
        self._tasks = TaskSet("kafka-server")
        self._listener: Listener | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The bound host and port, once started."""
        assert self._listener is not None, "the server has not been started"
        return self._listener.address

    @property
    def connections(self) -> int:
        """Number of connected clients."""
        return len(self._shared.connections)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of requests that are being received or handled."""
        return self._shared.budget.used

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses that slow clients have not read, as of the last sweep."""
        return self._shared.unread.used

    @property
    def held_bytes(self) -> tuple[int, int]:
        """`in_flight_bytes` and `unread_bytes`."""
        return self.in_flight_bytes, self.unread_bytes

    def running(self, limit: int) -> list[tuple[float, int, str]]:
        """Return age in seconds, API key and client id of requests without an answer, the oldest; no long polls."""
        now = self._clock.monotonic()
        found = (one for connection in self._shared.connections for one in connection.running(now))
        return heapq.nlargest(limit, found)

    async def start(self) -> None:
        """Listen on the configured address. Raises `AddressInUse`."""
        self._listener = await self._network.listen(
            lambda: Connection(self._shared), self._settings.host, self._settings.port
        )
        self._tasks.keep(self._sweep, "sweep")

    async def _sweep(self) -> None:
        """Close, periodically, connections that are idle, late with a request, or do not read."""
        idle_s = self._settings.idle_timeout_ms / 1000
        receive_s = self._settings.receive_timeout_ms / 1000
        while True:
            await self._clock.sleep(min(idle_s / _SWEEPS_A_TIMEOUT, receive_s / _SWEEPS_A_TIMEOUT, _LONGEST_SWEEP_S))
            now = self._clock.monotonic()
            for connection in list(self._shared.connections):
                connection.close_if_idle(now - idle_s)
                connection.close_if_late(now, receive_s)
            self._shared.unread.sweep(now)

    def cut(self) -> None:
        """Abort all connections now, and every new one, because this broker has been replaced.

        Clients retry their pending requests at the right broker without waiting for a time-out.
        """
        self._shared.cut = True
        for connection in list(self._shared.connections):
            connection.end()

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop accepting, let requests in flight finish for `grace_s` seconds, then abort the rest."""
        if self._listener is not None:
            await self._listener.close()
        await self._tasks.close()
        for connection in list(self._shared.connections):
            connection.drain()
        if not self._shared.connections:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._shared.empty.wait()
        except TimeoutError:
            logger.warning("connections aborted at shutdown", extra={"connections": len(self._shared.connections)})
            for connection in list(self._shared.connections):
                connection.end()
            await self._shared.empty.wait()
