"""The Kafka listener: accepts connections and ends them.

What a connection does is in `broker.connection`; what is served is the list of `ApiHandler`s given here, and nothing
else (ApiVersions is added, made from that list).

Close: stop accepting, answer what was started, then close; what is not done at the deadline is cut. Of a broker that
was replaced everything is cut at once (`KafkaServer.cut`).

Entry: `KafkaServer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from broker.connection import Api, Connection, Shared
from broker.handlers.api_versions import ApiVersions
from broker.limits import ByteBudget, Seats, UnreadOutput
from broker.metrics import DoorSources
from broker.services import ApiHandler, Services
from broker.settings import KafkaSettings
from runtime.log_limit import LogLimiter
from runtime.network import Listener, Network
from runtime.tasks import TaskSet

log = logging.getLogger(__name__)

_SWEEPS_A_TIMEOUT = 4
_LONGEST_SWEEP_S = 5.0


class KafkaServer:
    """One listener and its connections."""

    def __init__(
        self, services: Services, apis: Sequence[ApiHandler], network: Network, settings: KafkaSettings
    ) -> None:
        keys = [api.api_key for api in apis]
        assert len(set(keys)) == len(keys), f"an API is served twice: {sorted(keys)}"
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
            logs=LogLimiter(log, services.clock),
        )
        services.metrics.door = DoorSources(lambda: self.in_flight_bytes, lambda: self.unread_bytes)
        self._tasks = TaskSet("kafka-server")
        self._listener: Listener | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The bound host and port, once started."""
        assert self._listener is not None, "the server has not been started"
        return self._listener.address

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._shared.connections)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of requests that are being received or handled."""
        return self._shared.budget.used

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses that clients who are behind have not read, as of the last look."""
        return self._shared.unread.used

    async def start(self) -> None:
        """Listen on the configured address. Raises `AddressInUse`."""
        self._listener = await self._network.listen(
            lambda: Connection(self._shared), self._settings.host, self._settings.port
        )
        self._tasks.spawn(self._sweep(), "sweep")

    async def _sweep(self) -> None:
        """End, again and again, connections that are idle, late with a request, or do not read."""
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
        """End all connections now, and every new one: this broker has been replaced and has nothing to say any more.

        What its clients have on the way they ask again, of the broker that is right: they do not wait for a time-out.
        """
        self._shared.cut = True
        for connection in list(self._shared.connections):
            connection.end()

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop accepting, let requests in flight finish for `grace_s` seconds, then cut what is left."""
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
            log.warning("connections cut at the end", extra={"connections": len(self._shared.connections)})
            for connection in list(self._shared.connections):
                connection.end()
            await self._shared.empty.wait()
