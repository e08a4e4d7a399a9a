"""One client connection: frames in, requests started in order, responses out in the same order.

Kafka handles one request of a connection at a time. So does this, with one exception: a handler that is a plain
function (Produce) has done what must be ordered when it returns, and hands back an `Answer` for the rest. The next
request may start then, so that a producer with five requests in flight does not wait for the disk five times. An
`async` handler, or a `sequential` one, starts when everything before it is answered, and nothing starts until it is.
A Fetch that only waits for news answers with what it has as soon as another kind of request comes behind it: clients
that ask for a coordinator or metadata on such a connection need not wait for `fetch.max.wait.ms`.

Bounds: requests in flight on a connection (`MAX_PIPELINE`), bytes of requests in flight in the broker (`ByteBudget`),
output that the client does not read (the transport's high-water mark; `UnreadOutput` over all clients). At each bound
the connection stops reading. A request must arrive in time (`close_if_late`), the first one, too.

A request that breaks the protocol, or a handler that fails unexpectedly, closes the connection and nothing else. Every
end that the client did not choose is counted by reason (`tidelog_connections_dropped_total`) and logged, at a rate.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from broker.errors import CloseConnection, MalformedRequest, NotServed, OversizedRequest
from broker.limits import ByteBudget, Seats, UnreadOutput
from broker.services import Answer, ApiHandler, RequestContext, Services
from broker.wire.codec import API_VERSIONS, MessageCodec, RequestHeader, message_codec, parse_header
from broker.wire.frames import RECEIVE_BUFFER_BYTES, FrameReader
from broker.wire.primitives import Buffer
from runtime.log_limit import LogLimiter

log = logging.getLogger(__name__)

MAX_PIPELINE = 128
"""Requests started on one connection and not answered. Clients rarely keep more than 5 in flight; librdkafka may."""
WRITE_HIGH_WATER_BYTES = 256 << 10
"""Output that a client leaves unread before its next requests wait."""
MAX_CONTROL_REQUEST_BYTES = 16 << 20
"""Bound on requests that carry no records: they are decoded field by field on the loop, so size is time."""
REQUEST_OVERHEAD_BYTES = 256
"""What a request costs besides its frame: a read of 128 KiB may hold ten thousand of a few bytes each."""
FETCH_PARTITION_BYTES = 1024
"""What a partition in a waiting Fetch costs; in its frame it takes 16 bytes or more."""
MIN_RECEIVE_BYTES_S = 16 << 10
"""A request that is not in after `receive_timeout_ms` must have come at this rate since then."""

_JOIN_BYTES = 16 << 10
"""Small responses are cheaper to copy than to write from many buffers."""
_MEASURED_BYTES = 128 << 10
"""Responses from this size on tell what it costs to send a byte (`storage.cold_pace`)."""

_PRODUCE, _FETCH = 0, 1
_FETCH_KEY = b"\0\1"
"""How the frame of a Fetch begins."""


@dataclass(frozen=True, slots=True)
class Api:
    """A handler as connections call it."""

    handler: ApiHandler
    pipelined: bool
    """A plain function that has done its ordered part when it returns an `Answer`, or a future."""

    @classmethod
    def of(cls, handler: ApiHandler) -> Api:
        """Find out which kind of handler it is."""
        return cls(handler, not (handler.sequential or inspect.iscoroutinefunction(handler.handle)))


@dataclass(slots=True)
class Shared:
    """What all connections of one server have in common."""

    services: Services
    apis: dict[int, Api]
    unsupported_api_versions: Callable[[], Any]
    """The ApiVersions v0 response for a version that is not served."""
    max_request_bytes: int
    seats: Seats
    budget: ByteBudget
    unread: UnreadOutput
    logs: LogLimiter
    receive_buffer: bytearray = field(default_factory=lambda: bytearray(RECEIVE_BUFFER_BYTES))
    connections: dict[Connection, None] = field(default_factory=dict)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection has ended."""
    cut: bool = False
    """No connection is taken any more."""


class _Exchange:
    """A request that was started, until its response is written."""

    __slots__ = (
        "api_key",
        "buffers",
        "bytes_in",
        "charged",
        "codec",
        "context",
        "correlation_id",
        "done",
        "error",
        "future",
        "started",
    )

    def __init__(self, header: RequestHeader, bytes_in: int, codec: MessageCodec, started: float) -> None:
        self.api_key = header.api_key
        self.correlation_id = header.correlation_id
        self.bytes_in = bytes_in
        self.charged = bytes_in + REQUEST_OVERHEAD_BYTES
        self.codec = codec
        self.started = started
        self.done = False
        self.error = False
        self.buffers: Sequence[Buffer] = ()
        self.future: asyncio.Future[Any] | Answer | None = None
        self.context: RequestContext | None = None
        """While it blocks the connection."""


class Connection(asyncio.BufferedProtocol):
    """See the module."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._clock = shared.services.clock
        self._metrics = shared.services.metrics
        self._frames = FrameReader(
            shared.receive_buffer, shared.max_request_bytes, functools.partial(shared.budget.grant, self)
        )
        self._pending: deque[bytearray] = deque()
        self._exchanges: deque[_Exchange] = deque()
        self._blocker: _Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop
        self._facts: dict[str, Any] = {}
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
        """Since when a request is awaited or arriving, unless it is us who do not read."""
        self._last_active = 0.0

    # --- the transport's side --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or close it at once when there are too many."""
        shared = self._shared
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        if shared.cut:
            self._abort_quietly()
            return
        self._last_active = self._due_since = self._clock.monotonic()
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        bound = shared.seats.take(self._host)
        if bound is not None:
            self._metrics.connection_refused()
            self._drop(bound, f"connection refused: kafka.max_{bound} reached")
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:  # a peer that vanished during a long poll is noticed by the kernel
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        shared.connections[self] = None
        shared.empty.clear()
        self._metrics.connection_opened()
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection. A waiting Fetch is cancelled; what may change state runs to its end unheard."""
        self._transport = None
        reserved = self._frames.reserved_bytes
        self._frames.close()  # it holds us, and may hold megabytes: cycles are looked for seldom (`runtime.memory`)
        if self not in self._shared.connections:
            return
        shared = self._shared
        shared.connections.pop(self, None)
        shared.seats.leave(self._host)
        shared.unread.forget(self)
        self._metrics.connection_closed()
        held = sum(len(frame) + REQUEST_OVERHEAD_BYTES for frame in self._pending)
        self._pending.clear()
        shared.budget.leave(self, reserved, held)
        for exchange in self._exchanges:
            if exchange.api_key == _FETCH and exchange.future is not None:
                exchange.future.cancel()
        if not shared.connections:
            shared.empty.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport receives next."""
        return self._frames.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived: cut frames and start what may start."""
        self._last_active = now = self._clock.monotonic()
        budget = self._shared.budget
        reader = self._frames
        reserved = reader.reserved_bytes  # of a large frame, whose bytes were granted before they came
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
        self._pump()

    def pause_writing(self) -> None:
        """The client does not read its responses: start nothing more."""
        self._write_paused = True
        self._shared.unread.note(self, self._clock.monotonic())

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_paused = False
        self._last_active = self._clock.monotonic()
        self._unwritten_bytes = 0
        self._shared.unread.forget(self)
        self._pump()

    # --- requests --------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start what may start, then decide whether to read on. Not re-entrant: a request may complete at once."""
        if self._pumping or self._transport is None:
            return
        self._pumping = True
        try:
            while self._pending and not self._turn_over and self._may_start() and self._start_next():
                pass
        finally:
            self._pumping = False
        if self._pending and self._blocker is not None:
            self._hurry(self._blocker, self._pending[0])
        if self._turn_over:  # answered at once: a client with many such requests lets others go first
            self._turn_over = False
            if self._pending:
                self._loop.call_soon(self._pump)
        self._choose_reading()

    def _hurry(self, blocker: _Exchange, waiting: bytearray) -> None:
        """Another Fetch behind the one that waits is a client's that keeps several on their way: it has time."""
        context = blocker.context
        if context is not None and context.hurry is not None and waiting[:2] != _FETCH_KEY:
            context.hurry()

    def _start_next(self) -> bool:
        frame = self._pending.popleft()
        try:
            if self._start(frame):
                return True
        except MalformedRequest as error:
            self._shared.budget.release(len(frame) + REQUEST_OVERHEAD_BYTES)
            self._refuse(error)
            return False
        self._pending.appendleft(frame)
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
        """Whether the next bytes have a place. What was granted to a frame must come in whatever happens."""
        frames = self._frames
        if frames.blocked:
            return frames.unblock()
        return frames.reserved_bytes > 0 or not self._shared.budget.full

    def _budget_freed(self) -> None:
        self._waiting_for_budget = False
        self._choose_reading()

    def _may_read(self) -> bool:
        return not self._write_paused and not self._draining and len(self._exchanges) < MAX_PIPELINE

    def _start(self, frame: bytearray) -> bool:
        """Start one request; False if it must wait for those before it."""
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
            exchange = self._begin(header, frame, message_codec(API_VERSIONS, 0))
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
        exchange = self._begin(header, frame, codec)
        if header.api_key == _FETCH:
            extra = FETCH_PARTITION_BYTES * sum([len(topic.partitions) for topic in request.topics])
            exchange.charged += extra
            self._shared.budget.take(extra)
        self._call(exchange, api, context, request)
        return True

    def _begin(self, header: RequestHeader, frame: bytearray, codec: MessageCodec) -> _Exchange:
        exchange = _Exchange(header, len(frame), codec, self._clock.monotonic())
        self._exchanges.append(exchange)
        return exchange

    def _call(self, exchange: _Exchange, api: Api, context: RequestContext, request: Any) -> None:
        future: asyncio.Future[Any]
        try:
            result = api.handler.handle(context, request)
        except Exception as error:  # noqa: BLE001  # one request's defect must not touch other connections
            self._defect(exchange, "request failed: connection closed", error)
            return
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
            future = self._loop.create_task(cast(Any, result))
            self._blocker = exchange
            exchange.context = context
        exchange.future = future
        if future.done():
            self._finished(exchange, future)
        else:
            future.add_done_callback(lambda done: self._finished(exchange, done))

    def _heard(self, exchange: _Exchange, answer: Answer) -> None:
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
        else:
            self._choose_reading()

    def _finished(self, exchange: _Exchange, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._ended(exchange, asyncio.CancelledError(), None)
        elif (error := future.exception()) is not None:
            self._ended(exchange, error, None)
        else:
            self._ended(exchange, None, future.result())

    def _ended(self, exchange: _Exchange, error: BaseException | None, response: Any) -> None:
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

    def _answer(self, exchange: _Exchange, response: Any) -> None:
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
            # One confirmation answers many requests of a producer: they leave together.
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_together)

    def _flush_together(self) -> None:
        self._flush_scheduled = False
        self._flush()
        self._pump()

    def _defect(self, exchange: _Exchange, event: str, error: BaseException) -> None:
        self._metrics.connection_dropped("defect")
        self._shared.logs.line("defect", logging.ERROR, event, self._ids(exchange), error)
        self._abandon(exchange)

    def _abandon(self, exchange: _Exchange) -> None:
        exchange.done = True
        exchange.error = self._transport is not None  # a Fetch cancelled because its client left is no error
        self._abort_quietly()
        self._flush()

    def _flush(self) -> None:
        """Write the responses that are done up to the first one that is not."""
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
        for exchange, bytes_out in left:  # the client need not wait for that
            self._metrics.request(
                exchange.api_key, now - exchange.started, exchange.bytes_in, bytes_out, exchange.error
            )

    def _write(self, transport: asyncio.Transport, out: list[Buffer], size: int, now: float) -> None:
        self._last_active = now
        if size <= _JOIN_BYTES:
            if out:
                transport.write(b"".join(out))
        elif size < _MEASURED_BYTES or (pace := self._shared.services.cold_pace) is None:
            transport.writelines(out)
        else:
            started = pace.thread_s()
            transport.writelines(out)
            pace.sent(size - transport.get_write_buffer_size(), pace.thread_s() - started)
        if self._write_paused:
            self._shared.unread.note(self, now)
        if self._draining and not self._exchanges:
            transport.close()

    # --- ends ------------------------------------------------------------------------------------------------------

    def _ids(self, exchange: _Exchange) -> dict[str, Any]:
        return {"api_key": exchange.api_key, "correlation_id": exchange.correlation_id, "client": self._host}

    def _refuse(self, error: MalformedRequest) -> None:
        self._drop(error.reason, "connection closed: no request that is served here", error=str(error))

    def _drop(self, reason: str, event: str, **fields: Any) -> None:
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
        """Take no more requests; close once what was started is answered and written."""
        self._draining = True
        self._choose_reading()
        if self._transport is not None and not self._exchanges:
            self._transport.close()

    def end(self) -> None:
        """Close now, and stop what still runs for this connection."""
        for exchange in self._exchanges:
            if exchange.future is not None:
                exchange.future.cancel()
        self._abort_quietly()

    @property
    def last_active(self) -> float:
        """When a byte moved in either direction, in monotonic seconds."""
        return self._last_active

    def unread_bytes(self) -> int:
        """Output that the client has not taken; notes whether it took some since the last look."""
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
        """Close if nothing has moved since `deadline`: no request, no answer, no byte of output taken."""
        if self._transport is None:
            return
        self.unread_bytes()
        if self._last_active < deadline and (not self._exchanges or self._write_paused):
            self._metrics.connection_dropped("idle")
            self._abort_quietly()

    def close_if_late(self, now: float, timeout_s: float) -> None:
        """Close if a request that began to arrive, or the first one, is not in and does not come quickly."""
        if self._due_since is None or not self._reading or self._transport is None or self._draining:
            return
        late_s = now - self._due_since - timeout_s
        if late_s > 0 and self._frames.partial_bytes < late_s * MIN_RECEIVE_BYTES_S:
            received = self._frames.partial_bytes
            self._drop("half_sent", "connection closed: a request did not arrive in time", received_bytes=received)
