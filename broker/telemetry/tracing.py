"""OpenTelemetry spans of one broker: what is traced, and what a span says (docs/design/0032-tracing.md).

A span is made when what it describes has ended, from times that were measured anyway: the stages of a request come from
the recorder of slow requests (`tidelog.broker.telemetry.slow_requests`), those of a move from its table. So nothing is
carried through the work, and work that is not traced costs one comparison.

Produce and Fetch requests are sampled at `tracing.sample_ratio`; a Produce request whose records name traces is traced
if one of these is sampled, and not if none is. Its parent is the first context if all are of one trace, and the others
are links; contexts of several traces are links of a new one. Moves, openings and uploads are always traced.

Invariants: no method raises because of what a client sent, or waits. What is read of a request is bounded
(`tidelog.broker.telemetry.trace_headers`), and so is what a span holds.

Only a broker with `tracing.endpoint` imports this module. Entry: `Tracing`.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Concatenate, ParamSpec

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tidelog.broker.settings import TracingSettings
from tidelog.broker.telemetry.metrics import error_name
from tidelog.broker.telemetry.slow_requests import STAGES, Moments, Sender, Timing
from tidelog.broker.telemetry.span_export import SpanExport, quiet_library
from tidelog.broker.telemetry.trace_headers import (
    MAX_PARENT_BYTES,
    MAX_RECORDS,
    TraceHeaderReader,
    TraceHeaders,
    may_name_traces,
)
from tidelog.broker.telemetry.traced import RequestParts, TracedBatch, TracedMove, TracedOpen
from tidelog.runtime.clock import Clock
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.types import Buffer
from tidelog.runtime.version import VERSION
from tidelog.storage.inputs import FinishedUpload

logger = logging.getLogger(__name__)

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
"""The semantic conventions that the attributes follow."""
MAX_NAME = 64
MAX_ERROR = 256
"""Characters of a client's id, and of an error's text, that a span has."""
STEP_BACK_NS = 2_000_000
"""The wall clock was set back if it is this much behind what it was."""

_PRODUCE = 0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NO_CONTEXT = Context()
_FETCH_STAGES = ("queue", "wait", "read", "handler", "response")

Attributes = dict[str, AttributeValue]


_P = ParamSpec("_P")


def _never_raises(method: Callable[Concatenate[Tracing, _P], None]) -> Callable[Concatenate[Tracing, _P], None]:
    """A defect loses a span: an upload, a move or a request must not fail because of it."""

    @functools.wraps(method)
    def guarded(self: Tracing, /, *args: _P.args, **named: _P.kwargs) -> None:
        try:
            method(self, *args, **named)
        except Exception as error:  # noqa: BLE001  # reported, and counted as dropped
            self.failed(error)

    return guarded


class WallTimes:
    """Turns monotonic seconds into nanoseconds of the wall clock, more finely than its milliseconds.

    A wall clock in milliseconds lags by up to one; the largest difference that was seen is the right one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = 0

    def anchor(self) -> None:
        """Compare the clocks."""
        offset_ns = self._clock.time_ms() * 1_000_000 - int(self._clock.monotonic() * 1e9)
        if offset_ns > self._offset_ns or offset_ns < self._offset_ns - STEP_BACK_NS:
            self._offset_ns = offset_ns

    def ns(self, monotonic_s: float) -> int:
        """Return the wall-clock time of a moment, in nanoseconds since the Unix epoch."""
        return self._offset_ns + int(monotonic_s * 1e9)


class Tracing:
    """The traces of one broker. All methods are called on the event loop's thread."""

    def __init__(self, settings: TracingSettings, clock: Clock, rng: random.Random) -> None:
        """`rng` decides which requests are traced, and draws ids."""
        self._settings = settings
        self._ratio = settings.sample_ratio
        self._random, self._bits = rng.random, rng.getrandbits
        self._clock = clock
        self._times = WallTimes(clock)
        self._propagator = TraceContextTextMapPropagator()
        self._resource = Resource({})
        self._scope = InstrumentationScope("tidelog", VERSION, SCHEMA_URL)
        self.export = SpanExport(settings.endpoint)
        self.malformed = 0
        """`traceparent` headers that were ignored."""
        self._limiter = LogLimiter(logger, clock)

    def start(self, cluster_id: str, broker_id: int) -> None:
        """Begin to export, as this broker of this cluster."""
        self._resource = Resource.create(
            {
                "service.name": _text(self._settings.service_name),
                "service.version": VERSION,
                "service.instance.id": f"{cluster_id}/{broker_id}",
                "tidelog.broker.id": broker_id,
            }
        )
        self.export.start()

    async def close(self) -> None:
        """Send what is left, within `span_export.CLOSE_S` seconds."""
        await self.export.close()

    # --- requests --------------------------------------------------------------------------------------------------

    def choose(self, request: RequestParts) -> list[SpanContext] | None:
        """Return the contexts that a request's records name if it is to be traced, else None. Never raises.

        Called for each Produce and Fetch request whose response was written.
        """
        try:
            batches = request.trace_records()
            if any(map(may_name_traces, batches)):
                contexts = self._contexts(batches)
                if contexts:
                    return contexts if any(one.trace_flags.sampled for one in contexts) else None
        except Exception as error:  # noqa: BLE001  # as in `_never_raises`
            self.failed(error)
            return None
        return [] if self._random() < self._ratio else None

    @_never_raises
    def request(self, request: RequestParts, contexts: list[SpanContext], moments: Moments, sender: Sender) -> None:
        """Trace a request that `choose` has chosen, with the contexts that it returned."""
        is_produce = sender.api_key == _PRODUCE
        batches = request.traced()
        if not is_produce:
            if not batches:
                return  # a poll that found nothing
            firsts = [one.records[0] for one in batches if one.records]
            contexts = self._contexts(firsts, limit=1, unpacks=False)
        self._times.anchor()
        timing = request.timing(moments.started, moments.handled, moments.written)
        attributes = _request_attributes(is_produce, batches, timing, sender)
        failed = timing.error_code if sender.is_answered else -1
        status = Status()
        if failed:
            attributes["error.type"] = error_name(failed)
            status = Status(StatusCode.ERROR)
        parent, links = _related(contexts, is_produce)
        name = "produce" if is_produce else "fetch"
        if timing.topic:
            name = f"{name} {timing.topic}"
        root = self._span(
            name, parent, moments.arrived, moments.written, attributes, kind=SpanKind.SERVER, links=links, status=status
        )
        stages = _produce_stages(moments, timing) if is_produce else _fetch_stages(moments, timing)
        self._steps(root, moments.arrived, stages)

    def _contexts(
        self, batches: Iterable[Buffer], limit: int = MAX_RECORDS, *, unpacks: bool = True
    ) -> list[SpanContext]:
        """Return the valid contexts that the records name, each once."""
        reader = TraceHeaderReader(unpacks=unpacks)
        for batch in batches:
            reader.read(batch, limit)
        contexts: dict[tuple[int, int], SpanContext] = {}
        for headers in reader.found:
            context = self._context(headers)
            if context is None:
                self.malformed += 1
            else:
                contexts.setdefault((context.trace_id, context.span_id), context)
        return list(contexts.values())

    def _context(self, headers: TraceHeaders) -> SpanContext | None:
        if len(headers.parent) > MAX_PARENT_BYTES or not headers.parent.isascii():
            return None
        carrier = {"traceparent": headers.parent.decode("ascii")}
        if headers.state.isascii() and headers.state:
            carrier["tracestate"] = headers.state.decode("ascii")
        with quiet_library():  # a client's header is no reason for a line in the log
            found = get_current_span(self._propagator.extract(carrier, _NO_CONTEXT)).get_span_context()
        return found if found.is_valid else None

    # --- partitions and uploads ------------------------------------------------------------------------------------

    @_never_raises
    def moved(self, move: TracedMove) -> None:
        """An attempt to move a partition away has ended. The target's `open` is in the same trace."""
        self._times.anchor()
        attributes = _partition_attributes(move.topic, move.partition, move.leader_epoch)
        attributes["tidelog.move.target"] = move.target
        attributes["tidelog.move.outcome"] = move.outcome
        if move.closed_at:
            attributes["tidelog.move.stall_ms"] = round(move.stall_ms or (move.ended - move.closed_at) * 1000, 3)
        trace_id = _epoch_trace(move.topic_id, move.partition, move.leader_epoch + 1) if move.closed_at else 0
        status = _failed(move.error) if move.outcome == "failed" else Status()
        root = self._span(
            f"move {move.topic}", None, move.began, move.ended, attributes, status=status, trace_id=trace_id
        )
        closed_at = move.closed_at or move.ended
        self._steps(root, move.began, [("upload", closed_at - move.began)])
        if move.closed_at:
            self._steps(root, closed_at, [(name, ms / 1000) for name, ms in move.steps_ms.items()])

    @_never_raises
    def partition(self, what: str, one: TracedOpen) -> None:
        """A partition has opened here (`open`); or closed (`close`), as it is led elsewhere now, or was deleted."""
        self._times.anchor()
        attributes = _partition_attributes(one.topic, one.partition, one.leader_epoch)
        attributes["tidelog.hinted"] = one.hinted
        trace_id = _epoch_trace(one.topic_id, one.partition, one.leader_epoch) if what == "open" else 0
        status = _failed(one.error) if one.error else Status()
        self._span(f"{what} {one.topic}", None, one.began, one.ended, attributes, status=status, trace_id=trace_id)

    @_never_raises
    def uploaded(self, upload: FinishedUpload) -> None:
        """A range of the write-ahead log is in the bucket and committed, or never will be by this term."""
        self._times.anchor()
        attributes: Attributes = {
            "tidelog.replica_set": upload.replica_set,
            "tidelog.wal.start": upload.wal_start,
            "tidelog.wal.end": upload.wal_end,
            "tidelog.objects": upload.objects,
            "tidelog.bytes": upload.size_bytes,
        }
        if upload.objects:
            attributes["tidelog.object.first_id"] = upload.first_object
        status = _failed(upload.error) if upload.error else Status()
        root = self._span("upload", None, upload.began, upload.ended, attributes, status=status)
        put_at = upload.put_at or upload.ended
        self._steps(root, upload.began, [("put", put_at - upload.began), ("commit", upload.ended - put_at)])

    # --- spans -----------------------------------------------------------------------------------------------------

    def _span(
        self,
        name: str,
        parent: SpanContext | None,
        began: float,
        ended: float,
        attributes: Mapping[str, AttributeValue],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        status: Status | None = None,
        trace_id: int = 0,
    ) -> SpanContext:
        """Queue one span; return its context, for its children."""
        trace_id = parent.trace_id if parent is not None else trace_id or self._bits(128) or 1
        state = parent.trace_state if parent is not None else None
        context = SpanContext(trace_id, self._bits(64) or 1, is_remote=False, trace_flags=_SAMPLED, trace_state=state)
        self.export.emit(
            ReadableSpan(
                _text(name),
                context=context,
                parent=parent,
                resource=self._resource,
                attributes={key: _value(value) for key, value in attributes.items()},
                kind=kind,
                links=links,
                status=status or Status(),
                start_time=self._times.ns(began),
                end_time=self._times.ns(max(ended, began)),
                instrumentation_scope=self._scope,
            )
        )
        return context

    def _steps(self, root: SpanContext, began: float, steps: Iterable[tuple[str, float]]) -> None:
        """Add a child for each step that took any time, one after the other."""
        for name, seconds in steps:
            if seconds > 0:
                self._span(name, root, began, began + seconds, {})
                began += seconds

    def failed(self, error: Exception) -> None:
        """A span could not be made."""
        self.export.dropped += 1
        self._limiter.line("defect", logging.ERROR, "something could not be traced", {}, error)

    # --- reports ---------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The section `tracing` of `/status`."""
        return {**self.export.report(), "sample_ratio": self._ratio, "malformed_contexts": self.malformed}

    def problems(self) -> list[str]:
        """What an operator should know."""
        error = self.export.error
        return [f"traces are dropped: the collector at {self.export.url} takes none: {error}"] if error else []


def _related(contexts: list[SpanContext], is_produce: bool) -> tuple[SpanContext | None, list[Link]]:
    """Return the parent, and the links. A Fetch continues no trace: it has links only."""
    if is_produce and contexts and len({one.trace_id for one in contexts}) == 1:
        return contexts[0], [Link(one) for one in contexts[1:]]
    return None, [Link(one) for one in contexts]


def _request_attributes(is_produce: bool, batches: list[TracedBatch], timing: Timing, sender: Sender) -> Attributes:
    attributes: Attributes = {
        "messaging.system": "kafka",
        "messaging.operation.name": "produce" if is_produce else "fetch",
        "messaging.operation.type": "send" if is_produce else "receive",
        "client.address": sender.client_host,
        "tidelog.request.bytes": sender.bytes_in,
        "tidelog.response.bytes": sender.bytes_out,
        "tidelog.partitions": timing.partitions,
    }
    if sender.client_id:
        attributes["messaging.client.id"] = sender.client_id[:MAX_NAME]
    counts = [_record_count(batch) for batch in batches]
    if batches:
        attributes["messaging.batch.message_count"] = sum(counts)
    topics = {batch.topic for batch in batches}
    if len(topics) == 1 and "" not in topics:
        attributes["messaging.destination.name"] = batches[0].topic
    if len(batches) == 1 and (not is_produce or timing.partitions == 1):
        attributes["messaging.destination.partition.id"] = str(batches[0].partition)
        if batches[0].offset >= 0:
            attributes["messaging.kafka.offset"] = batches[0].offset
    elif batches:
        attributes["tidelog.batches"] = [f"{one.topic}-{one.partition}@{one.offset}" for one in batches]
    return attributes


def _record_count(batch: TracedBatch) -> int:
    """The records of all its batches, by their headers; one that was refused may say anything."""
    return sum(
        int.from_bytes(one[57:61], "big") for one in batch.records if len(one) >= 61 and one[16] == 2 and one[57] < 0x80
    )


def _produce_stages(moments: Moments, timing: Timing) -> list[tuple[str, float]]:
    """Return the stages in their order; what no stage accounts for is the handler's, before the response."""
    answered = timing.answered_at or moments.answered or moments.handled or moments.started
    stages = timing.stages._replace(
        queue=max(moments.started - moments.arrived, 0.0), response=max(moments.written - answered, 0.0)
    )
    rest = moments.written - moments.arrived - sum(stages)
    return list(zip(STAGES, stages._replace(handler=max(rest, 0.0)), strict=True))


def _fetch_stages(moments: Moments, timing: Timing) -> list[tuple[str, float]]:
    answered = timing.answered_at or moments.answered or moments.handled or moments.started
    queue, response = max(moments.started - moments.arrived, 0.0), max(moments.written - answered, 0.0)
    rest = moments.written - moments.arrived - queue - response - timing.waited_s - timing.stages.read
    return list(zip(_FETCH_STAGES, (queue, timing.waited_s, timing.stages.read, max(rest, 0.0), response), strict=True))


def _partition_attributes(topic: str, partition: int, leader_epoch: int) -> Attributes:
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": str(partition),
        "tidelog.leader_epoch": leader_epoch,
    }


def _epoch_trace(topic_id: bytes, partition: int, leader_epoch: int) -> int:
    """Return the id of the trace in which a partition changes its leader: two brokers agree on it without a word."""
    named = topic_id + partition.to_bytes(4, "big", signed=True) + leader_epoch.to_bytes(8, "big", signed=True)
    return int.from_bytes(blake2b(named, digest_size=16).digest(), "big") or 1


def _failed(error: str) -> Status:
    return Status(StatusCode.ERROR, _text(error[:MAX_ERROR]))


def _text(text: str) -> str:
    """Return a text with what is no UTF-8, as of paths, replaced: the library cannot send it, nor the batch around."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _value(value: AttributeValue) -> AttributeValue:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [_text(each) if isinstance(each, str) else each for each in value]
    return value
