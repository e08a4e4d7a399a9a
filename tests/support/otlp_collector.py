"""A collector of OpenTelemetry traces: a real HTTP server that decodes what is posted to it, by OTLP's own classes.

    with OtlpCollector() as collector:
        ... a broker with tracing.endpoint = collector.endpoint ...
        spans = collector.wait_for("produce t", 3)

`refusing` answers with that HTTP status, and `hanging` never answers, until it is unset or the collector closes.

Entry: `OtlpCollector`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

DEADLINE_S = 30.0


class SeenSpan(NamedTuple):
    """A span as the collector has it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    trace_state: str
    is_error: bool
    resource: dict[str, Any]


class OtlpCollector:
    """See the module."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._spans: list[SeenSpan] = []
        self.refusing = 0
        """HTTP status of every answer; 0: it takes what comes."""
        self.hanging = False
        self.posts = 0
        """Requests that came."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self, body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._closing = threading.Event()

    @property
    def endpoint(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    def die(self) -> None:
        """Close the port; a connection to it is refused from now on."""
        if not self._closing.is_set():
            self._closing.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(DEADLINE_S)

    def take(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Decode a request, and answer it."""
        with self._condition:
            self.posts += 1
            self._condition.notify_all()
        while self.hanging and not self._closing.wait(0.02):
            pass
        status = self.refusing or 200
        if status == 200:
            assert request.path == "/v1/traces", request.path
            found = _decode(body)
            with self._condition:
                self._spans += found
                self._condition.notify_all()
        answer = ExportTraceServiceResponse().SerializeToString()
        request.send_response(status)
        request.send_header("content-type", "application/x-protobuf")
        request.send_header("content-length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    @property
    def spans(self) -> list[SeenSpan]:
        """All that came."""
        with self._condition:
            return list(self._spans)

    def named(self, name: str) -> list[SeenSpan]:
        """Those with this name."""
        return [one for one in self.spans if one.name == name]

    def children(self, of: SeenSpan) -> list[SeenSpan]:
        """Those whose parent it is, by their start."""
        return sorted((one for one in self.spans if one.parent_id == of.span_id), key=lambda one: one.start_ns)

    def wait_for(self, name: str, count: int = 1) -> list[SeenSpan]:
        """Wait until so many spans with this name have come; return them."""
        self.wait_until(lambda: len(self.named(name)) >= count, f"{count} × {name!r}")
        return self.named(name)

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait until something about what came is true."""
        deadline = time.monotonic() + DEADLINE_S
        with self._condition:
            while not is_true():
                left = deadline - time.monotonic()
                assert left > 0, f"no {what} among {[one.name for one in self._spans]}"
                self._condition.wait(left)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def _decode(body: bytes) -> list[SeenSpan]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    found: list[SeenSpan] = []
    for part in request.resource_spans:
        resource = {each.key: _value(each.value) for each in part.resource.attributes}
        for scope in part.scope_spans:
            found += [_seen(span, resource) for span in scope.spans]
    return found


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {each.key: _value(each.value) for each in span.attributes},
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.trace_state,
        span.status.code == 2,
        resource,
    )
