"""What a handler may use: the parts of a broker, by name, and the shape of a handler.

`Services` is built once by `broker.node` and passed to every handler inside a `RequestContext`. Handlers hold no state
of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.settings import GroupSettings, KafkaSettings, LogSettings
from runtime.clock import Clock
from runtime.deadlines import Deadlines

if TYPE_CHECKING:
    from broker.fetch_sessions import FetchSessions
    from broker.groups.coordinator import GroupCoordinator
    from broker.metrics import Metrics
    from broker.partitions import PartitionManager
    from broker.producer_ids import ProducerIds
    from controller.client import ControllerClient
    from storage.cold_pace import ColdPace


async def no_quorum() -> dict[str, Any]:
    """Where nobody knows of controllers."""
    return {"members": [], "problems": []}


@dataclass(slots=True)
class Services:
    """The parts of one running broker."""

    node_id: int
    clock: Clock
    kafka: KafkaSettings
    log: LogSettings
    group: GroupSettings
    controller: ControllerClient
    """Commands, and `controller.image`, the local copy of the metadata."""
    partitions: PartitionManager
    """The partition logs that this broker leads now."""
    groups: GroupCoordinator
    producer_ids: ProducerIds
    metrics: Metrics
    fetch_sessions: FetchSessions
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Time-outs of requests."""
    cold_pace: ColdPace | None = None
    """Is told by connections what sending large responses costs."""
    quorum: Callable[[], Awaitable[dict[str, Any]]] = no_quorum
    """What is known of the controllers (`broker.quorum.QuorumView.report`)."""
    broker_configs: Callable[[], dict[str, str]] = dict
    """This broker's effective configuration for DescribeConfigs, by dotted key (`kafka.port`, `wal.flush`, …)."""


@dataclass(slots=True)
class RequestContext:
    """One request: its header and where it came from."""

    services: Services
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    extra: dict[str, Any] = field(default_factory=dict)
    """Per-connection facts (client software name and version)."""
    hurry: Callable[[], None] | None = None
    """Set by a handler that waits for news (Fetch): has it answer now with what there is. May be called twice."""


class Answer:
    """The response to one request, given once, now or later; what a handler that is a plain function returns.

    Whoever listens is called inside `give`, without a turn of the loop in between: between a sync of the WAL and the
    reply lies nothing else. So it must not raise and must be quick. It can be awaited instead.
    """

    __slots__ = ("_heard", "done", "error", "response")

    def __init__(self) -> None:
        self.done = False
        self.response: Any = None
        self.error: BaseException | None = None
        """Why there is no response; None while there is one or none yet."""
        self._heard: Callable[[], None] | None = None

    def give(self, response: Any) -> None:
        """The response (None: none is sent). Ignored if there is an end already."""
        self._end(response, None)

    def fail(self, error: BaseException) -> None:
        """There will be no response. Ignored if there is an end already."""
        self._end(None, error)

    def cancel(self) -> None:
        """Nobody waits any more: ends it with `CancelledError`, which is heard in the loop's next turn."""
        if not self.done:
            heard, self._heard = self._heard, None
            self._end(None, asyncio.CancelledError())
            if heard is not None:
                asyncio.get_running_loop().call_soon(heard)

    def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard` at the end, which has not come yet. There is one listener."""
        assert not self.done and self._heard is None
        self._heard = heard

    def _end(self, response: Any, error: BaseException | None) -> None:
        if self.done:
            return
        self.done = True
        self.response = response
        self.error = error
        if self._heard is not None:
            heard, self._heard = self._heard, None  # it holds this answer: no cycle is left for the collector
            heard()

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.listen(lambda: None if future.done() else future.set_result(None))
            yield from future
        if self.error is not None:
            raise self.error
        return self.response


Handle = Callable[[RequestContext, Any], Awaitable[Any]]
"""Takes the decoded request, returns the response to encode; None means no reply (Produce with acks=0)."""


@dataclass(frozen=True, slots=True)
class ApiHandler:
    """One API key with the version range this broker serves."""

    api_key: int
    min_version: int
    max_version: int
    handle: Handle
    advertised_min: int | None = None
    """What ApiVersions says, where it differs from what is served (KAFKA-18659: Produce says 0)."""
    sequential: bool = False
    """A plain function that, like an `async` one, starts only when all before it is answered."""
