"""Sends the spans of one broker to an OpenTelemetry collector, by OTLP over HTTP, in a thread of its own.

`emit` is called on the event loop and never waits: spans go into the bounded queue of the library's
`BatchSpanProcessor`, and those that find it full are dropped and counted. The thread sends batches; what a collector
does not take within `TIMEOUT_S`, retries included, is dropped and counted, too. That it takes nothing is logged once,
and once more when it takes them again; the library's own lines, one for each attempt, are not passed on.

Nothing here is shared between brokers of a process, and nothing is global: an application that embeds a broker keeps
its own provider. In a forked child the library empties the queue, so no span is sent twice.

Only this module and `tidelog.broker.telemetry.tracing` import OpenTelemetry's SDK, and only a broker with
`tracing.endpoint` imports them.

Entry: `SpanExport`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

MAX_QUEUED = 4_096
"""Spans that are kept while the collector is slow or away, some 2 KB each."""
BATCH_SPANS = 512
DELAY_MS = 1_000
"""How long a span waits for others."""
TIMEOUT_S = 10.0
"""For one batch, retries included."""
CLOSE_S = 2.0
"""For the last spans, at the broker's end."""

_LIBRARY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.trace.span",
    "opentelemetry.trace.propagation.tracecontext",
    "urllib3.connectionpool",
)
_quiet = threading.local()
"""`heard` of a thread that calls the library for a broker: takes the text of its lines."""


class _QuietLibrary(logging.Filter):
    """Keeps the library's lines about our own calls out of the log. Those of an application around us pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        heard: Callable[[str], None] | None = getattr(_quiet, "heard", None)
        if heard is None:
            return True
        heard(record.getMessage())
        return False


_QUIET_LIBRARY = _QuietLibrary()


def _ignore(_line: str) -> None:
    """Nobody wants to know."""


@contextmanager
def quiet_library(heard: Callable[[str], None] = _ignore) -> Iterator[None]:
    """Give what the library would log in here to `heard` instead."""
    _quiet.heard = heard
    try:
        yield
    finally:
        _quiet.heard = None


def traces_url(endpoint: str) -> str:
    """Return where spans are posted: `endpoint`, with `/v1/traces` if it has no path of its own."""
    return endpoint.rstrip("/") + "/v1/traces" if urlsplit(endpoint).path in ("", "/") else endpoint


class _Counted(SpanExporter):
    """The library's exporter, counted. Called in the thread of the processor."""

    def __init__(self, url: str) -> None:
        self.tell: Callable[[str], None] = _ignore
        """Called with the error when the collector begins to refuse, and with nothing when it takes again."""
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self.taken = self.exported = self.refused = 0
        self._reason = self.error = ""
        """The library's newest line; and why the collector takes nothing now, or empty."""
        self._is_ended = False

    def _hear(self, line: str) -> None:
        self._reason = line

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self.taken += len(spans)
        self._reason = ""
        with quiet_library(self._hear):
            result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            if self.error:
                self.error = ""
                self.tell("")
        else:
            self.refused += len(spans)
            is_new, self.error = not self.error, self._reason or "no answer"
            if is_new:
                self.tell(self.error)
        return result

    def shutdown(self) -> None:
        """Give up what is being sent. May be called again, and in any thread."""
        if not self._is_ended:
            self._is_ended = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return True


class SpanExport:
    """The way of one broker's spans to a collector. `emit` and the reports are for the event loop's thread."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: http or https URL. Nothing is sent before `start`."""
        self.url = traces_url(endpoint)
        self._exporter = _Counted(self.url)
        self._processor: BatchSpanProcessor | None = None
        self._emitted = 0
        self.dropped = 0
        """Spans that found the queue full, or came before the start or after the end."""

    def start(self) -> None:
        """Begin to send. Called on the event loop."""
        loop = asyncio.get_running_loop()

        def tell(error: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._log, error)

        self._exporter.tell = tell
        for name in _LIBRARY_LOGGERS:
            logging.getLogger(name).addFilter(_QUIET_LIBRARY)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=DELAY_MS,
            max_export_batch_size=BATCH_SPANS,
        )

    def _log(self, error: str) -> None:
        """Say it in the broker's own thread, once for each change."""
        if error:
            text = "the collector takes no traces; they are dropped, and clients do not notice it"
            logger.warning(text, extra={"url": self.url, "error": error})
        else:
            logger.info("the collector takes traces again", extra={"url": self.url})

    @property
    def queued(self) -> int:
        """Spans that wait."""
        return max(self._emitted - self._exporter.taken, 0)

    @property
    def exported(self) -> int:
        """Spans that the collector has taken."""
        return self._exporter.exported

    @property
    def refused(self) -> int:
        """Spans that were sent, or not even that, and not taken."""
        return self._exporter.refused

    @property
    def error(self) -> str:
        """Why the collector takes none now; empty: it does."""
        return self._exporter.error

    def emit(self, span: ReadableSpan) -> None:
        """Queue a span. Returns at once."""
        if self._processor is None or self.queued >= MAX_QUEUED:
            self.dropped += 1
            return
        self._emitted += 1
        self._processor.on_end(span)

    async def close(self) -> None:
        """Send what is queued, for at most `CLOSE_S` seconds. What is left then is dropped."""
        processor, self._processor = self._processor, None
        if processor is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # nobody waits any more, and the loop is closed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=_shut_down, args=(processor, tell), daemon=True, name="traces-close").start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await ended.wait()
        except TimeoutError:
            self._exporter.shutdown()
            logger.info("traces were not all sent", extra={"url": self.url, "spans": self.queued})

    def report(self) -> dict[str, Any]:
        """The state, for `/status`."""
        return {
            "endpoint": self.url,
            "exported": self.exported,
            "refused": self.refused,
            "dropped": self.dropped,
            "queued": self.queued,
            "error": self.error or None,
        }


def _shut_down(processor: BatchSpanProcessor, ended: Callable[[], None]) -> None:
    processor.shutdown()  # type: ignore[no-untyped-call]
    ended()
