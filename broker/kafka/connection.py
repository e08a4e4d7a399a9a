"""A client connection: receive frames, start requests in order, send responses in the same order.

Kafka handles one request of a connection at a time. This connection does so, too, with one exception: a handler that is
a plain function (Produce) has completed its ordered part when it returns, and returns an `Answer` for the rest. The
next request may then start, so a producer with five requests in flight does not wait for the disk five times. An
`async` handler, or a `sequential` one, starts when all requests before it are answered, and nothing starts until it has
completed. A long-polling Fetch returns immediately when another kind of request arrives behind it: clients that send
FindCoordinator or Metadata on the same connection need not wait for `fetch.max.wait.ms`.

Bounds: requests in flight on a connection (`MAX_PIPELINE`), bytes of requests in flight in the broker (`ByteBudget`),
output that the client does not read (the transport's high-water mark; `UnreadOutput` for all clients). At each bound
the connection stops reading. A request, including the first, must arrive in time (`close_if_late`).

A request that violates the protocol, or a handler that fails unexpectedly, closes only its connection. Every close by
the broker is counted by reason (`tidelog_connections_dropped_total`) and logged at a limited rate.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tidelog.broker.kafka.errors import CloseConnection, MalformedRequest, NotServed, OversizedRequest
from tidelog.broker.kafka.limits import ByteBudget, Seats, UnreadOutput
from tidelog.broker.kafka.services import Answer, ApiHandler, RequestContext, Services
from tidelog.broker.kafka.wire.codec import API_VERSIONS, MessageCodec, RequestHeader, message_codec, parse_header
from tidelog.broker.kafka.wire.frames import RECEIVE_BUFFER_BYTES, FrameReader
from tidelog.broker.telemetry.slow_requests import API_KEYS, NOT_MEASURED, Moments, Sender, SlowRequests, describe
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.task_errors import ERRORS
from tidelog.runtime.types import Buffer

if TYPE_CHECKING:
    from tidelog.broker.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

MAX_PIPELINE = 128
"""Maximum number of unanswered requests of one connection. Clients rarely keep more than 5 in flight; librdkafka may.
"""
WRITE_HIGH_WATER_BYTES = 256 << 10
"""Unread output from which a client's next requests wait."""
MAX_CONTROL_REQUEST_BYTES = 16 << 20
"""Maximum size of requests without records: decoding on the event loop takes time proportional to the size."""
REQUEST_OVERHEAD_BYTES = 256
"""Cost of a request in addition to its frame: a read of 128 KiB may contain ten thousand small requests."""
FETCH_PARTITION_BYTES = 1024
"""Cost of a partition in a waiting Fetch; its frame has 16 bytes or more for it."""
MIN_RECEIVE_BYTES_S = 16 << 10
"""Minimum rate of a request that is incomplete after `receive_timeout_ms`."""

_JOIN_BYTES = 16 << 10
"""Responses up to this size are copied, which is cheaper than writing many buffers."""
_MEASURED_BYTES = 128 << 10
"""Responses from this size on are used to measure the cost of sending a byte (`tidelog.storage.reads.throttle`)."""

_PRODUCE, _FETCH = 0, 1
_API_MASK = API_KEYS - 1
_FETCH_KEY = b"\0\1"
"""The first bytes of the frame of a Fetch."""


@dataclass(frozen=True, slots=True)
class Api:
    """A handler, prepared for calls by connections."""

    handler: ApiHandler
    pipelined: bool
    """A plain function whose ordered part is complete when it returns an `Answer` or a future."""

    @classmethod
    def of(cls, handler: ApiHandler) -> Api:
        """Determine the kind of handler."""
        return cls(handler, not (handler.sequential or inspect.iscoroutinefunction(handler.handle)))


@dataclass(slots=True)
class Shared:
    """The state shared by all connections of one server."""

    services: Services
    apis: dict[int, Api]
    unsupported_api_versions: Callable[[], object]
    """The ApiVersions v0 response for a version that is not served."""
    max_request_bytes: int
    seats: Seats
    budget: ByteBudget
    unread: UnreadOutput
    logs: LogLimiter
    receive_buffer: bytearray = field(default_factory=lambda: bytearray(RECEIVE_BUFFER_BYTES))
    connections: dict[Connection, None] = field(default_factory=dict)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection has closed."""
    cut: bool = False
    """No further connection is accepted."""


class _Exchange(msgspec.Struct, eq=False):
    """A request from its start until its response is written."""

    api_key: int
    correlation_id: int
    bytes_in: int
    charged: int
    """Bytes taken from the budget for it."""
    codec: MessageCodec[Any, Any]
    arrived: float
    """Monotonic seconds of its last byte."""
    started: float
    context: RequestContext | None = None
    handled: float = 0.0
    """When its handler returned."""
    answered: float = 0.0
    """When its handler ended, if that was later and nobody else knows."""
    done: bool = False
    error: bool = False
    buffers: Sequence[Buffer] = ()
    future: asyncio.Future[object] | Answer[object] | None = None


def _moments(exchange: _Exchange, now: float) -> Moments:
    return Moments(exchange.arrived, exchange.started, exchange.handled, exchange.answered, now)


class Connection(asyncio.BufferedProtocol):
    """The protocol of one client connection."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._clock = shared.services.clock
        self._metrics = shared.services.metrics
        self._frames = FrameReader(
            shared.receive_buffer, shared.max_request_bytes, functools.partial(shared.budget.grant, self)
        )
        self._slow = shared.services.slow_requests
        self._tracing = shared.services.tracing
        self._pending: deque[bytearray] = deque()
        self._arrivals: deque[float] = deque()
        """When those arrived, of the first ones; the others at `_arrived_at`."""
        self._arrived_at = 0.0
        self._now = 0.0
        """When the last request was handled, or the next one could start: so each takes one reading of the clock."""
        self._exchanges: deque[_Exchange] = deque()
        self._blocker: _Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop
        self._facts: dict[str, str] = {}
        self._host = ""
        self._reading = True
        self._write_paused = False
        self._flush_scheduled = False
        self._waiting_for_budget = False
        self._unwritten_bytes = 0
        self._draining = False
        self._pumping = False
        self._turn_over = False
        self._due_since: float | None = None
        """Time since which a request is awaited or arriving; None while reading is paused."""
        self._last_active = 0.0

    # --- transport callbacks ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or close it if a limit is reached."""
        shared = self._shared
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        if shared.cut:
            self._abort_quietly()
            return
        self._last_active = self._due_since = self._clock.monotonic()
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple) and peer:
            self._host, self._facts["client_source_port"] = str(peer[0]), str(peer[1])
        bound = shared.seats.take(self._host)
        if bound is not None:
            self._metrics.connection_refused()
            self._drop(bound, f"connection refused: kafka.max_{bound} reached")
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:  # the kernel detects a peer that disappeared during a long poll
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        shared.connections[self] = None
        shared.empty.clear()
        self._metrics.connection_opened()
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the connection. A waiting Fetch is cancelled; requests that may change state still complete."""
        self._transport = None
        reserved = self._frames.reserved_bytes
        self._frames.close()  # a reference cycle that may hold megabytes (`tidelog.runtime.memory`)
        if self not in self._shared.connections:
            return
        shared = self._shared
        shared.connections.pop(self, None)
        shared.seats.leave(self._host)
        shared.unread.forget(self)
        self._metrics.connection_closed()
        held = sum(len(frame) + REQUEST_OVERHEAD_BYTES for frame in self._pending)
        self._pending.clear()
        self._arrivals.clear()
        shared.budget.leave(self, reserved, held)
        for exchange in self._exchanges:
            if exchange.api_key == _FETCH and exchange.future is not None:
                exchange.future.cancel()
        if not shared.connections:
            shared.empty.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes received."""
        return self._frames.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes: split them into frames and start requests."""
        self._last_active = self._arrived_at = now = self._clock.monotonic()
        budget = self._shared.budget
        reader = self._frames
        reserved = reader.reserved_bytes  # of a large frame, whose bytes were granted before they arrived
        try:
            frames = reader.received(nbytes)
        except MalformedRequest as error:
            self._refuse(error)
            return
        if frames:
            if reserved:
                budget.received(reserved)
            for frame in frames:
                budget.take(REQUEST_OVERHEAD_BYTES if reserved else len(frame) + REQUEST_OVERHEAD_BYTES)
                self._pending.append(frame)
            self._due_since = now if reader.incomplete else None
        elif self._due_since is None:
            self._due_since = now
        self._pump(now)
        if self._pending:
            self._arrivals.extend([now] * (len(self._pending) - len(self._arrivals)))

    def pause_writing(self) -> None:
        """The client does not read its responses: start no more requests."""
        self._write_paused = True
        self._shared.unread.note(self, self._clock.monotonic())

    def resume_writing(self) -> None:
        """The client has caught up: resume."""
        self._write_paused = False
        self._last_active = self._clock.monotonic()
        self._unwritten_bytes = 0
        self._shared.unread.forget(self)
        self._pump()

    # --- requests --------------------------------------------------------------------------------------------------

    def _pump(self, now: float = 0.0) -> None:
        """Start pending requests, then resume or pause reading. Not re-entrant: a request may complete immediately.

        `now`: monotonic seconds, if they were just read.
        """
        if self._pumping or self._transport is None:
            return
        self._pumping = True
        if self._pending:
            self._now = now or self._clock.monotonic()
        try:
            while self._pending and not self._turn_over and self._may_start() and self._start_next():
                pass
        finally:
            self._pumping = False
        if self._pending and self._blocker is not None:
            self._wake(self._blocker, self._pending[0])
        if self._turn_over:  # answered immediately: yield so that other clients are served
            self._turn_over = False
            if self._pending:
                self._loop.call_soon(self._pump)
        self._choose_reading()

    def _wake(self, blocker: _Exchange, waiting: bytearray) -> None:
        """Complete the waiting Fetch if another kind of request follows. A client that pipelines Fetches waits for
        data anyway.
        """
        context = blocker.context
        if context is not None and context.wake is not None and waiting[:2] != _FETCH_KEY:
            context.wake()

    def _start_next(self) -> bool:
        frame = self._pending.popleft()
        arrived = self._arrivals.popleft() if self._arrivals else self._arrived_at
        try:
            if self._start(frame, arrived):
                return True
        except MalformedRequest as error:
            self._shared.budget.release(len(frame) + REQUEST_OVERHEAD_BYTES)
            self._refuse(error)
            return False
        self._pending.appendleft(frame)
        self._arrivals.appendleft(arrived)
        return False

    def _may_start(self) -> bool:
        return (
            self._blocker is None
            and not self._write_paused
            and not self._draining
            and self._transport is not None
            and len(self._exchanges) < MAX_PIPELINE
        )

    def _choose_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        budget = self._shared.budget
        if not self._waiting_for_budget and not self._has_room():
            self._waiting_for_budget = True
            budget.wait(self, self._budget_freed)
        wanted = not self._pending and not self._waiting_for_budget and self._may_read()
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                if self._frames.incomplete:
                    self._due_since = self._clock.monotonic()
                transport.resume_reading()
            else:
                transport.pause_reading()

    def _has_room(self) -> bool:
        """Whether there is room for the next bytes. Bytes granted to a frame must always be received."""
        frames = self._frames
        if frames.blocked:
            return frames.unblock()
        return frames.reserved_bytes > 0 or not self._shared.budget.full

    def _budget_freed(self) -> None:
        self._waiting_for_budget = False
        self._choose_reading()

    def _may_read(self) -> bool:
        return not self._write_paused and not self._draining and len(self._exchanges) < MAX_PIPELINE

    def _start(self, frame: bytearray, arrived: float) -> bool:
        """Start one request; False if it must wait for earlier requests."""
        header = parse_header(frame)
        api = self._shared.apis.get(header.api_key)
        if api is None:
            raise NotServed(f"API {header.api_key} is not served")
        if self._exchanges and not api.pipelined:
            return False
        handler = api.handler
        if not handler.min_version <= header.api_version <= handler.max_version:
            if header.api_key != API_VERSIONS:
                raise NotServed(f"version {header.api_version} of API {header.api_key} is not served")
            exchange = self._begin(header, frame, message_codec(API_VERSIONS, 0), arrived)
            self._answer(exchange, self._shared.unsupported_api_versions())
            return True
        if len(frame) > MAX_CONTROL_REQUEST_BYTES and header.api_key != _PRODUCE:
            raise OversizedRequest(f"a request of API {header.api_key} with {len(frame)} bytes is too large")
        if header.api_key == _FETCH and self._shared.unread.full:
            self._shared.unread.wait(self, self._pump)
            return False
        codec = message_codec(header.api_key, header.api_version)
        client_id, request = codec.decode(frame)
        context = RequestContext(
            self._shared.services,
            header.api_key,
            header.api_version,
            header.correlation_id,
            client_id,
            self._host,
            self._facts,
        )
        exchange = self._begin(header, frame, codec, arrived, context)
        if header.api_key == _FETCH:
            extra = FETCH_PARTITION_BYTES * sum([len(topic.partitions) for topic in request.topics])
            exchange.charged += extra
            self._shared.budget.take(extra)
        self._call(exchange, api, context, request)
        return True

    def _begin(
        self,
        header: RequestHeader,
        frame: bytearray,
        codec: MessageCodec[Any, Any],
        arrived: float,
        context: RequestContext | None = None,
    ) -> _Exchange:
        size = len(frame)
        exchange = _Exchange(
            header.api_key,
            header.correlation_id,
            size,
            size + REQUEST_OVERHEAD_BYTES,
            codec,
            arrived,
            self._now,
            context,
        )
        self._exchanges.append(exchange)
        return exchange

    def _call(self, exchange: _Exchange, api: Api, context: RequestContext, request: object) -> None:
        future: asyncio.Future[object]
        try:
            result = api.handler.handle(context, request)
        except Exception as error:  # noqa: BLE001  # one request's defect must not touch other connections
            self._defect(exchange, "request failed: connection closed", error)
            return
        exchange.handled = self._now = self._clock.monotonic()
        if isinstance(result, Answer):
            if result.done:
                self._turn_over = not api.pipelined
                self._ended(exchange, result.error, result.response)
            else:
                exchange.future = result
                result.listen(functools.partial(self._heard, exchange, result))
            return
        if asyncio.isfuture(result):
            future = result
        else:
            future = self._loop.create_task(cast(Coroutine[Any, Any, object], result))
            self._blocker = exchange
        exchange.future = future
        if future.done():
            self._finished(exchange, future)
        else:
            future.add_done_callback(lambda done: self._finished(exchange, done))

    def _heard(self, exchange: _Exchange, answer: Answer[object]) -> None:
        """An `Answer` was given, in the midst of a confirmation that others wait for, too: start nothing in here."""
        pumping, self._pumping = self._pumping, True
        try:
            self._ended(exchange, answer.error, answer.response)
        except Exception as error:  # noqa: BLE001  # it must not touch others: reported as of any callback of the loop
            self._loop.call_exception_handler({"message": "a response could not be written", "exception": error})
        finally:
            self._pumping = pumping
        if pumping or self._pending:
            self._loop.call_soon(self._pump)
        elif self._write_paused or not self._reading:
            self._choose_reading()

    def _finished(self, exchange: _Exchange, future: asyncio.Future[object]) -> None:
        exchange.answered = self._clock.monotonic()
        if future.cancelled():
            self._ended(exchange, asyncio.CancelledError(), None)
        elif (error := future.exception()) is not None:
            self._ended(exchange, error, None)
        else:
            self._ended(exchange, None, future.result())

    def _ended(self, exchange: _Exchange, error: BaseException | None, response: object) -> None:
        """A handler ended: encode its response, and write all that are next in order."""
        exchange.future = None
        if self._blocker is exchange:
            self._blocker = None
        if error is None:
            self._answer(exchange, response)
        elif isinstance(error, asyncio.CancelledError):
            self._abandon(exchange)
        elif isinstance(error, CloseConnection):
            self._metrics.connection_dropped("unanswerable")
            extra = {**self._ids(exchange), "reason": str(error)}
            self._shared.logs.line("unanswerable", logging.INFO, "connection closed", extra)
            self._abandon(exchange)
        else:
            self._defect(exchange, "request failed: connection closed", error)

    def _answer(self, exchange: _Exchange, response: object) -> None:
        if self._transport is not None and response is not None:
            try:
                exchange.buffers = exchange.codec.encode(exchange.correlation_id, response)
            except Exception as error:  # noqa: BLE001  # a defect of the handler, which ends only this connection
                self._defect(exchange, "response does not encode: connection closed", error)
                return
        exchange.done = True
        exchanges = self._exchanges
        if len(exchanges) == 1:
            self._flush()
            self._pump()
        elif exchanges[0].done and not self._flush_scheduled:
            # One confirmation completes many requests of a producer: their responses are written together.
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_together)

    def _flush_together(self) -> None:
        self._flush_scheduled = False
        self._flush()
        self._pump()

    def _defect(self, exchange: _Exchange, event: str, error: BaseException) -> None:
        self._metrics.connection_dropped("defect")
        self._shared.logs.line("defect", logging.ERROR, event, self._ids(exchange), error)
        ERRORS.count("Kafka requests", error, ended=False)
        self._abandon(exchange)

    def _abandon(self, exchange: _Exchange) -> None:
        exchange.done = True
        exchange.error = self._transport is not None  # a Fetch cancelled because its client disconnected is no error
        self._abort_quietly()
        self._flush()

    def _flush(self) -> None:
        """Write the completed responses up to the first incomplete one."""
        exchanges = self._exchanges
        now = self._clock.monotonic()
        out: list[Buffer] = []
        left: list[tuple[_Exchange, int]] = []
        size = 0
        while exchanges and exchanges[0].done:
            exchange = exchanges.popleft()
            bytes_out = sum(map(len, exchange.buffers))
            out += exchange.buffers
            size += bytes_out
            self._shared.budget.release(exchange.charged)
            left.append((exchange, bytes_out))
        if self._transport is not None:
            self._write(self._transport, out, size, now)
        slow = self._slow
        for exchange, bytes_out in left:  # the client need not wait for this
            self._metrics.request(
                exchange.api_key, now - exchange.started, exchange.bytes_in, bytes_out, exchange.error
            )
            if slow is not None and (
                now - exchange.arrived > slow.floors[exchange.api_key & _API_MASK] or now >= slow.minute_end_s
            ):
                self._offer(slow, exchange, bytes_out, now)
            if self._tracing is not None:
                self._trace(self._tracing, exchange, bytes_out, now)

    def _offer(self, slow: SlowRequests, exchange: _Exchange, bytes_out: int, now: float) -> None:
        """Hand a request that took long to the recorder."""
        context, timing = exchange.context, NOT_MEASURED
        if context is not None and context.timed is not None:
            timing = context.timed.timing(exchange.started, exchange.handled, now)
        moments = _moments(exchange, now)
        slow.offer(describe(moments, timing, self._sender(exchange, bytes_out), self._clock.time_ms()), now)

    def _trace(self, tracing: Tracing, exchange: _Exchange, bytes_out: int, now: float) -> None:
        """Hand a Produce or Fetch request to the traces, which choose."""
        context = exchange.context
        if context is None or context.timed is None:
            return
        contexts = tracing.choose(context.timed)
        if contexts is not None:
            sender = self._sender(exchange, bytes_out)
            tracing.request(context.timed, contexts, _moments(exchange, now), sender)

    def _sender(self, exchange: _Exchange, bytes_out: int) -> Sender:
        client_id = exchange.context.client_id if exchange.context is not None else None
        return Sender(
            exchange.api_key, client_id, self._host, exchange.bytes_in, bytes_out, is_answered=not exchange.error
        )

    def running(self, now: float) -> list[tuple[float, int, str]]:
        """Return age in seconds, API key and client id of the requests without an answer, but for long polls."""
        return [
            (now - one.arrived, one.api_key, one.context.client_id or "")
            for one in self._exchanges
            if not one.done and one.context is not None and one.context.wake is None
        ]

    def _write(self, transport: asyncio.Transport, out: list[Buffer], size: int, now: float) -> None:
        self._last_active = now
        if size <= _JOIN_BYTES:
            if out:
                transport.write(b"".join(out))
        elif size < _MEASURED_BYTES or (throttle := self._shared.services.cold_throttle) is None:
            transport.writelines(out)
        else:
            started = throttle.thread_s()
            transport.writelines(out)
            throttle.sent(size - transport.get_write_buffer_size(), throttle.thread_s() - started)
        if self._write_paused:
            self._shared.unread.note(self, now)
        if self._draining and not self._exchanges:
            transport.close()

    # --- closing ---------------------------------------------------------------------------------------------------

    def _ids(self, exchange: _Exchange) -> dict[str, object]:
        return {"api_key": exchange.api_key, "correlation_id": exchange.correlation_id, "client": self._host}

    def _refuse(self, error: MalformedRequest) -> None:
        self._drop(error.reason, "connection closed: no request that is served here", error=str(error))

    def _drop(self, reason: str, event: str, **fields: object) -> None:
        """End a connection that does not behave: count it, say so (at a rate), cut it."""
        self._metrics.connection_dropped(reason)
        extra = {"client": self._host, "reason": reason, **fields}
        self._shared.logs.line(reason, logging.WARNING, event, extra)
        self._abort_quietly()

    def _abort_quietly(self) -> None:
        if self._transport is not None:
            self._draining = True
            self._transport.abort()

    def drain(self) -> None:
        """Accept no more requests; close once the started ones are answered and written."""
        self._draining = True
        self._choose_reading()
        if self._transport is not None and not self._exchanges:
            self._transport.close()

    def end(self) -> None:
        """Close now, and cancel the requests that are still running."""
        for exchange in self._exchanges:
            if exchange.future is not None:
                exchange.future.cancel()
        self._abort_quietly()

    @property
    def idle(self) -> bool:
        """Whether no request is being handled or waits for its turn."""
        return not self._exchanges and not self._pending

    @property
    def last_active(self) -> float:
        """Time of the last byte in either direction, in monotonic seconds."""
        return self._last_active

    def unread_bytes(self) -> int:
        """Output that the client has not read; records whether it read some since the last call."""
        transport = self._transport
        if transport is None:
            return 0
        unwritten = transport.get_write_buffer_size()
        if unwritten < self._unwritten_bytes:
            self._last_active = self._clock.monotonic()
        self._unwritten_bytes = unwritten
        return unwritten

    def drop_slow_reader(self) -> None:
        """Free the memory of responses that the client does not read."""
        self._drop("slow_reader", "connection closed: the client does not read its responses")

    def close_if_idle(self, deadline: float) -> None:
        """Close if idle since `deadline`: no request, no response, no byte of output read."""
        if self._transport is None:
            return
        self.unread_bytes()
        if self._last_active < deadline and (not self._exchanges or self._write_paused):
            self._metrics.connection_dropped("idle")
            self._abort_quietly()

    def close_if_late(self, now: float, timeout_s: float) -> None:
        """Close if a partly received request, or the first one, is late and arrives too slowly."""
        if self._due_since is None or not self._reading or self._transport is None or self._draining:
            return
        late_s = now - self._due_since - timeout_s
        if late_s > 0 and self._frames.partial_bytes < late_s * MIN_RECEIVE_BYTES_S:
            received = self._frames.partial_bytes
            self._drop("half_sent", "connection closed: a request did not arrive in time", received_bytes=received)
