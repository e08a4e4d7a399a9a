"""The queue of spans at its edges: full, in a forked process, and closed before the collector has answered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from tests.support.kafka_world import until
from tests.support.otlp_collector import OtlpCollector
from tidelog.broker.telemetry.span_export import BATCH_SPANS, MAX_QUEUED, SpanExport

FORKS = """
import asyncio, os, sys, time
from tests.broker.test_span_export import span
from tidelog.broker.telemetry.span_export import DELAY_MS, SpanExport

async def main():
    export = SpanExport(sys.argv[1])
    export.start()
    export.emit(span(1))
    if not (child := os.fork()):
        time.sleep(2 * DELAY_MS / 1000)  # what it has inherited it would have sent by then
        os._exit(0)
    os.waitpid(child, 0)
    export.emit(span(2))
    await export.close()

asyncio.run(main())
"""


def span(number: int) -> ReadableSpan:
    context = SpanContext(number, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return ReadableSpan("s", context=context, resource=Resource({}), start_time=1, end_time=2)


@asynccontextmanager
async def exporting(collector: OtlpCollector) -> AsyncIterator[SpanExport]:
    export = SpanExport(collector.endpoint)
    export.start()
    try:
        yield export
    finally:
        await export.close()


async def test_a_full_queue_drops_what_comes_and_sends_what_waited() -> None:
    with OtlpCollector() as collector:
        collector.hanging = True
        async with exporting(collector) as export:
            for number in range(1, BATCH_SPANS + 1):
                export.emit(span(number))
            await until(lambda: collector.posts > 0, "a post")  # the first batch is on its way, and stays there
            more = MAX_QUEUED + 100
            for number in range(BATCH_SPANS + 1, BATCH_SPANS + more + 1):
                export.emit(span(number))
            assert (export.queued, export.dropped, export.exported) == (MAX_QUEUED, 100, 0)
            collector.hanging = False
            await until(lambda: export.exported == BATCH_SPANS + MAX_QUEUED, "all are sent")
            assert export.queued == export.refused == 0
            export.emit(span(1_000_000))  # there is room again
            await until(lambda: export.exported == BATCH_SPANS + MAX_QUEUED + 1, "all are sent")
            assert export.dropped == 100
    ids = [int(one.trace_id, 16) for one in collector.spans]
    assert ids == [*range(1, BATCH_SPANS + MAX_QUEUED + 1), 1_000_000]


async def test_a_close_does_not_wait_for_a_collector_that_hangs() -> None:
    with OtlpCollector() as collector:
        collector.hanging = True
        async with exporting(collector) as export:
            export.emit(span(1))
            await until(lambda: collector.posts > 0, "a post")
            export.emit(span(2))
        # that the block has ended shows it: the collector hangs until it is closed
        export.emit(span(3))
        assert export.dropped == 1, "after the end nothing is queued"
        assert collector.spans == []


@pytest.mark.processes
def test_no_span_is_sent_twice_after_a_fork() -> None:
    with OtlpCollector() as collector:
        arguments = [sys.executable, "-c", FORKS, collector.endpoint]
        subprocess.run(arguments, check=True, timeout=60)
        ids = sorted(int(one.trace_id, 16) for one in collector.spans)
    assert ids == [1, 2]
