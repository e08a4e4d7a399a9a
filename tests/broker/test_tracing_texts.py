"""What a span says may come from paths and the environment, which need be no UTF-8."""

from __future__ import annotations

import random

from tests.support.kafka_world import until
from tests.support.otlp_collector import OtlpCollector
from tidelog.broker.settings import TracingSettings
from tidelog.broker.telemetry.traced import TracedMove, TracedOpen
from tidelog.broker.telemetry.tracing import Tracing
from tidelog.runtime.clock import SystemClock

ODD = b"caf\xe9".decode("utf-8", "surrogateescape")
ID = bytes(16)


async def test_what_is_no_utf_8_is_replaced_and_takes_no_other_span_with_it() -> None:
    with OtlpCollector() as collector:
        settings = TracingSettings(endpoint=collector.endpoint, service_name=ODD)
        tracing = Tracing(settings, SystemClock(), random.Random(1))
        tracing.start("c", 1)
        try:
            tracing.partition("open", TracedOpen("fine", ID, 0, 1, 1.0, 2.0, False, ""))
            tracing.partition("open", TracedOpen("t", ID, 0, 1, 1.0, 2.0, False, f"{ODD}/wal cannot be read"))
            tracing.partition("close", TracedOpen(ODD, ID, 0, 1, 1.0, 2.0, False, ""))
            tracing.moved(TracedMove("m", ID, 0, 2, 1, 1.0, 0.0, 2.0, {}, 0.0, "failed", ODD))
            await until(lambda: len(collector.spans) + tracing.export.refused >= 5, "all are sent")
        finally:
            await tracing.close()
    assert tracing.export.refused == tracing.export.dropped == 0
    found = {one.name: one for one in collector.spans}
    assert set(found) == {"open fine", "open t", "close caf?", "move m", "upload"}
    assert found["close caf?"].attributes["messaging.destination.name"] == "caf?"
    assert found["open fine"].resource["service.name"] == "caf?"
    assert found["open t"].is_error and found["move m"].is_error
