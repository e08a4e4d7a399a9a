"""The interface of handlers: the parts of a broker that they may use, and the type of a handler.

`Services` is built once by `tidelog.broker.node` and passed to every handler inside a `RequestContext`. Handlers have
no state of their own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import msgspec

from tidelog.broker.kafka.errors import COORDINATOR_NOT_AVAILABLE
from tidelog.broker.kafka.wire.codec import EncodedBody, encode_body, is_long
from tidelog.broker.kafka.wire.messages.base import KafkaResponse
from tidelog.broker.partitions.read_replicas import LeaderOnly
from tidelog.broker.settings import GroupSettings, KafkaSettings, LogSettings
from tidelog.broker.telemetry.traced import RequestParts
from tidelog.runtime.clock import Clock
from tidelog.runtime.deadlines import Deadlines
from tidelog.runtime.errors import InvalidInput

if TYPE_CHECKING:
    from tidelog.broker.groups.coordinator import GroupCoordinator
    from tidelog.broker.kafka.client_telemetry import ClientTelemetry
    from tidelog.broker.kafka.election_waits import ElectionWaits
    from tidelog.broker.kafka.fetch_sessions import FetchSessions
    from tidelog.broker.kafka.producer_ids import ProducerIds
    from tidelog.broker.kafka.wire.codec import AnyResponse
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.broker.partitions.read_replicas import ReadReplicas
    from tidelog.broker.telemetry.metrics import Metrics
    from tidelog.broker.telemetry.slow_requests import SlowRequests
    from tidelog.broker.telemetry.tracing import Tracing
    from tidelog.broker.txn.coordinator import TxnCoordinator
    from tidelog.broker.txn.marker_writer import MarkerWriter
    from tidelog.broker.txn.requests import TxnRequests
    from tidelog.controller.client.client import ControllerClient
    from tidelog.storage.reads.throttle import ColdThrottle


async def no_quorum() -> dict[str, Any]:
    """The report of a broker without information about controllers."""
    return {"members": [], "problems": []}


async def no_removal(broker_id: int) -> int:
    """Refuse to remove a broker: this one was not made to do so. Raises `InvalidInput`."""
    raise InvalidInput(f"this broker cannot remove broker {broker_id}")


async def nothing_to_prepare(_replica_set: int) -> None:
    """Prepare no hand-over: nothing leads here."""


class TransactionPartitions(Protocol):
    """Asks the coordinators of transactional ids about the partitions of their transactions."""

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        add: bool,
        timeout_s: float,
    ) -> dict[tuple[str, int], int]:
        """Return a Kafka error code (0: it is in the transaction) for each topic and partition; never raises
        `TidelogError`.

        `add`: add those that are missing to the transaction; else they are only looked up. After `timeout_s` seconds
        the answer is a retriable code.
        """
        ...


class NoCoordinators:
    """A broker that reaches no coordinator of transactions, with the methods of `TransactionPartitions`."""

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        add: bool,
        timeout_s: float,
    ) -> dict[tuple[str, int], int]:
        """Return COORDINATOR_NOT_AVAILABLE for each."""
        return dict.fromkeys(partitions, COORDINATOR_NOT_AVAILABLE)


@dataclass(slots=True)
class Services:
    """The parts of one running broker."""

    node_id: int
    clock: Clock
    kafka: KafkaSettings
    log: LogSettings
    group: GroupSettings
    controller: ControllerClient
    """Client for commands, with `tidelog.controller.image.image`, the local copy of the metadata."""
    partitions: PartitionManager
    """The partition logs that this broker leads."""
    groups: GroupCoordinator
    txn: TxnCoordinator
    """The transactional ids of the state partitions that this broker leads."""
    txn_requests: TxnRequests
    """Asks the coordinator of a transactional id, wherever it is."""
    marker_writer: MarkerWriter
    producer_ids: ProducerIds
    metrics: Metrics
    fetch_sessions: FetchSessions
    elections: ElectionWaits
    telemetry: ClientTelemetry
    """What clients are to send of their metrics, and have sent (KIP-714)."""
    read_replicas: ReadReplicas | LeaderOnly = field(default_factory=LeaderOnly)
    """The partitions that this broker follows, for consumers near it (KIP-392)."""
    transactions: TransactionPartitions = field(default_factory=NoCoordinators)
    """Asks coordinators about the first batch of a transaction in a partition."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Time-outs of requests."""
    cold_throttle: ColdThrottle | None = None
    """Receives from connections the measured cost of sending large responses."""
    slow_requests: SlowRequests | None = None
    """Receives from connections the requests that took long; None: nothing is recorded."""
    tracing: Tracing | None = None
    """Receives from connections each Produce and Fetch request; None: nothing is traced."""
    quorum: Callable[[], Awaitable[dict[str, Any]]] = no_quorum
    """Report of the controllers (`tidelog.broker.admin.quorum.QuorumView.report`)."""
    remove_broker: Callable[[int], Awaitable[object]] = no_removal
    """Takes a broker that owns nothing out of the cluster (`tidelog.broker.admin.brokers.BrokerRoutes.remove`)."""
    prepare_hand_over: Callable[[int], Awaitable[None]] = nothing_to_prepare
    """Has the master of a replica set prepare its end (`tidelog.broker.partitions.hand_overs`). Never fails."""
    broker_configs: Callable[[], dict[str, str]] = dict
    """This broker's effective configuration for DescribeConfigs, by dotted key (`kafka.port`, `wal.flush`, …)."""

    def topic_name(self, topic_id: bytes) -> str:
        """Return the name of the topic that has an id; empty if there is none."""
        record = self.controller.image.topics.get(topic_id)
        return record.name if record is not None else ""

    @property
    def named_controller(self) -> int:
        """Return the broker that clients are told to send their controller requests to; -1 if none is alive.

        Every broker accepts them and asks the active controller. So this one is named, which the client has just
        reached: of another one that has died nobody knows until its session ends. Kafka's brokers name any one that
        lives (KIP-590). One that is not alive to the controllers names the live one with the smallest id.
        """
        brokers = self.controller.image.brokers
        mine = brokers.get(self.node_id)
        if mine is not None and mine.alive:
            return self.node_id
        return min((broker.id for broker in brokers.values() if broker.alive), default=-1)


class RequestContext(msgspec.Struct):
    """One request: its header and its connection."""

    services: Services
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    extra: dict[str, str] = {}
    """Per-connection facts: software name and version of the client, and its port."""
    wake: Callable[[], None] | None = None
    """Set by a long-polling Fetch: completes it immediately with the available records. May be called twice."""
    timed: RequestParts | None = None
    """Set by handlers that measure their stages."""


R = TypeVar("R")


class Answer(Generic[R]):
    """The response to one request, given once, now or later; what a handler that is a plain function returns.

    The listener is called inside `give`, without an iteration of the event loop between a sync of the WAL and the
    response. So it must not raise and must be fast. An `Answer` can also be awaited.
    """

    __slots__ = ("_heard", "done", "error", "response")

    def __init__(self) -> None:
        self.done = False
        self.response: R | None = None
        self.error: BaseException | None = None
        """Why there is no response; None if there is one or it is pending."""
        self._heard: Callable[[], None] | None = None

    def give(self, response: R) -> None:
        """The response (None: none is sent). Ignored if there is an end already."""
        self._end(response, None)

    def fail(self, error: BaseException) -> None:
        """Complete without a response. Ignored if already completed."""
        self._end(None, error)

    def cancel(self) -> None:
        """Complete with `CancelledError`; the listener is called in the next iteration of the event loop."""
        if not self.done:
            heard, self._heard = self._heard, None
            self._end(None, asyncio.CancelledError())
            if heard is not None:
                asyncio.get_running_loop().call_soon(heard)

    def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard` at the completion, which is still pending. There is one listener."""
        assert not self.done and self._heard is None
        self._heard = heard

    def _end(self, response: R | None, error: BaseException | None) -> None:
        if self.done:
            return
        self.done = True
        self.response = response
        self.error = error
        if self._heard is not None:
            heard, self._heard = self._heard, None  # the listener holds this answer: leave no cycle for the collector
            heard()

    def __await__(self) -> Generator[Any, None, R]:
        if not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.listen(lambda: None if future.done() else future.set_result(None))
            yield from future
        if self.error is not None:
            raise self.error
        return cast(R, self.response)


Handle = Callable[[RequestContext, Any], Awaitable[object]]
"""Takes the decoded request, returns the response to encode; None means no reply (Produce with acks=0).

A plain function does what must be in order before it returns, and returns an `Answer` or another awaitable; an `async`
one has done nothing yet. Which request and response an API has is not known here: `serve` has compared them.
"""


@dataclass(frozen=True, slots=True)
class ApiHandler:
    """One API key with the version range this broker serves."""

    api_key: int
    min_version: int
    max_version: int
    handle: Handle
    sequential: bool = False
    """A plain function that, like an `async` one, starts only when all before it is answered."""


class KeyedRequest(Protocol):
    """A class of requests, which knows its API."""

    API_KEY: ClassVar[int]


Q = TypeVar("Q", bound=KeyedRequest)


def serve(
    request: type[Q],
    min_version: int,
    max_version: int,
    handle: Callable[[RequestContext, Q], Awaitable[AnyResponse | None]],
    *,
    sequential: bool = False,
) -> ApiHandler:
    """The handler of an API that takes what the codec of its key decodes. Of an `async` one, long responses are encoded
    beside the event loop."""
    if inspect.iscoroutinefunction(handle):
        handle = _encoding_long(handle)
    return ApiHandler(request.API_KEY, min_version, max_version, handle, sequential=sequential)


def _encoding_long(
    handle: Callable[[RequestContext, Q], Awaitable[AnyResponse | None]],
) -> Callable[[RequestContext, Q], Awaitable[AnyResponse | None]]:
    @functools.wraps(handle)
    async def handle_and_encode(context: RequestContext, request: Q) -> AnyResponse | None:
        response = await handle(context, request)
        if isinstance(response, KafkaResponse) and is_long(response):
            encode = functools.partial(encode_body, context.api_key, context.api_version, response)
            return EncodedBody(await asyncio.to_thread(encode))
        return response

    return handle_and_encode
