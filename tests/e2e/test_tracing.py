"""Traces of a real broker as a real collector gets them, from real clients."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.support.otlp_collector import OtlpCollector, SeenSpan
from tests.testing.test_local_brokers import consume
from tidelog.chaos.ports import free_port
from tidelog.testing import LocalBroker, LocalCluster
from tidelog.testing.options import Value

pytestmark = pytest.mark.processes
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
WAIT_S = 30.0


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as one:
        yield one


def settings(collector: OtlpCollector, ratio: str = "0", more: dict[str, Value] | None = None) -> dict[str, Value]:
    return {"tracing.endpoint": collector.endpoint, "tracing.sample_ratio": ratio, **(more or {})}


@pytest.fixture
def admin_port() -> int:
    return free_port()


def produce(
    broker: LocalBroker | LocalCluster, topic: str, headers: list[Any], *, linger_ms: int = 0, compression: str = "none"
) -> None:
    """One record for each element of `headers`: a list of headers, or None; with `linger_ms` in one batch."""
    errors: list[Any] = []
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "linger.ms": linger_ms, "log_level": 0, "compression.type": compression}
    )
    for each in headers:
        producer.produce(topic, b"v", headers=each, on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    assert errors == [None] * len(headers)


def ask(admin_port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}{path}", timeout=WAIT_S) as answer:
        return str(answer.read(), "utf-8")


def status(admin_port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(admin_port, "/status"))
    return found


def section(admin_port: int) -> dict[str, Any]:
    found: dict[str, Any] = status(admin_port)["tracing"]
    return found


def parents(headers: list[str]) -> list[Any]:
    return [[("traceparent", each.encode())] for each in headers]


def inside(child: SeenSpan, parent: SeenSpan) -> bool:
    return parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns + 1_000


def test_a_produce_continues_the_trace_of_its_record_and_has_its_stages(collector: OtlpCollector) -> None:
    with LocalBroker(settings=settings(collector)) as broker:
        broker.create_topic("t", partitions=1)
        produce(broker, "t", [[("traceparent", SAMPLED.encode()), ("tracestate", b"vendor=1")]])
        produce(broker, "t", [None])  # ratio 0: not traced
        produce(broker, "t", parents([NOT_SAMPLED]))
        produce(broker, "t", parents([SAMPLED]), compression="lz4")
        first, second = collector.wait_for("produce t", 2)
        assert (first.trace_id, first.parent_id, first.trace_state) == (TRACE, SPAN, "vendor=1")
        assert first.kind == 2 and not first.is_error and not first.links
        expected = {
            "messaging.system": "kafka",
            "messaging.operation.name": "produce",
            "messaging.operation.type": "send",
            "messaging.destination.name": "t",
            "messaging.destination.partition.id": "0",
            "messaging.kafka.offset": 0,
            "messaging.batch.message_count": 1,
            "client.address": "127.0.0.1",
        }
        assert expected.items() <= first.attributes.items()
        assert second.attributes["messaging.kafka.offset"] == 3
        assert first.resource["service.name"] == "tidelog" and first.resource["tidelog.broker.id"] == 1
        stages = collector.children(first)
        assert {"append", "sync", "response"} & {one.name for one in stages}
        assert all(one.trace_id == TRACE and inside(one, first) for one in stages)
        assert abs(first.end_ns / 1e9 - time.time()) < WAIT_S
    assert len(collector.named("produce t")) == 2, "the stop sends what is left, and nothing else was traced"


def test_a_batch_with_many_contexts_has_bounded_links(collector: OtlpCollector) -> None:
    same = [f"00-{TRACE}-{number:016x}-01" for number in range(1, 4)]
    several = [f"00-{number:032x}-{number:016x}-0{number % 2}" for number in range(1, 501)]
    with LocalBroker(settings=settings(collector)) as broker:
        broker.create_topic("t", partitions=1)
        produce(broker, "t", parents(same), linger_ms=1_000)
        (found,) = collector.wait_for("produce t")
        assert (found.trace_id, found.parent_id) == (TRACE, f"{1:016x}")
        assert found.links == [(TRACE, f"{number:016x}") for number in (2, 3)]
        produce(broker, "t", parents(several), linger_ms=1_000)
        found = collector.wait_for("produce t", 2)[1]
        assert found.parent_id == "" and found.trace_id not in {f"{number:032x}" for number in range(501)}
        assert found.links == [(f"{number:032x}", f"{number:016x}") for number in range(1, 33)]
        assert found.attributes["messaging.batch.message_count"] == 500


def test_a_share_of_requests_is_traced_and_a_fetch_names_the_traces_it_returned(collector: OtlpCollector) -> None:
    with LocalBroker(settings=settings(collector, "1")) as broker:
        broker.create_topic("t", partitions=1)
        produce(broker, "t", [None])
        produce(broker, "t", parents([SAMPLED]))
        consume(broker.bootstrap, "t", 2)
        roots = collector.wait_for("produce t", 2)
        assert roots[0].parent_id == "" and roots[1].trace_id == TRACE
        fetch = collector.wait_for("fetch t")[0]
        assert fetch.parent_id == "" and fetch.trace_id != TRACE
        assert fetch.attributes["messaging.operation.type"] == "receive"
        assert fetch.attributes["messaging.batch.message_count"] >= 1
        assert {one.name for one in collector.children(fetch)} <= {"queue", "wait", "read", "handler", "response"}


def test_uploads_and_openings_are_always_traced(collector: OtlpCollector) -> None:
    with LocalBroker(settings=settings(collector, more={"upload.age_ms": 100})) as broker:
        broker.create_topic("t", partitions=1)
        produce(broker, "t", [None])
        (opened,) = collector.wait_for("open t")
        assert opened.attributes["messaging.destination.partition.id"] == "0"
        collector.wait_until(
            lambda: any(one.attributes["tidelog.bytes"] for one in collector.named("upload")), "upload"
        )
        upload = next(one for one in collector.named("upload") if one.attributes["tidelog.bytes"])
        assert upload.attributes["tidelog.wal.end"] > upload.attributes["tidelog.wal.start"]
        assert upload.attributes["tidelog.objects"] >= 1 and upload.attributes["tidelog.object.first_id"] >= 0
        assert [one.name for one in collector.children(upload)] == ["put", "commit"]
        assert not upload.links and not upload.is_error


def test_a_move_is_one_trace_of_both_brokers(collector: OtlpCollector) -> None:
    with LocalCluster(2, child=False, settings=settings(collector)) as cluster:
        cluster.create_topic("t", partitions=1)
        produce(cluster, "t", [None])
        target = cluster.move("t")
        (move,) = collector.wait_for("move t")
        assert move.attributes["tidelog.move.outcome"] == "done" and move.attributes["tidelog.move.target"] == target
        assert move.attributes["tidelog.move.stall_ms"] > 0
        names = [one.name for one in collector.children(move)]
        assert names == ["upload", "close", "drain", "hand_over"], names
        opened = next(one for one in collector.wait_for("open t", 2) if one.trace_id == move.trace_id)
        assert opened.resource["tidelog.broker.id"] == target != move.resource["tidelog.broker.id"]


BAD = [
    b"",
    b"00",
    SAMPLED.upper().encode(),
    f"ff-{TRACE}-{SPAN}-01".encode(),
    f"00-{'0' * 32}-{SPAN}-01".encode(),
    f"00-{TRACE}-{'0' * 16}-01".encode(),
    f"{SAMPLED}-more".encode(),
    b"\xff\xfe" * 20,
    b"0" * 100_000,
]


def test_bad_headers_are_counted_and_no_client_notices(
    collector: OtlpCollector, admin_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalBroker(settings=settings(collector, more={"admin.port": admin_port})) as broker:
        broker.create_topic("t", partitions=1)
        for bad in BAD:
            produce(broker, "t", [[("traceparent", bad)]])
        huge = b",".join(b"k%d=v" % number for number in range(20_000))
        for state in (huge, b"k=1,k=2", b"\xff", b"=,=,="):
            produce(broker, "t", [[("traceparent", SAMPLED.encode()), ("tracestate", state)]])
        found = collector.wait_for("produce t", 4)
        assert all(one.trace_id == TRACE and len(one.trace_state) < 600 for one in found)
        assert section(admin_port)["malformed_contexts"] == len(BAD)
        assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


@pytest.mark.parametrize("fault", ["refuses", "hangs", pytest.param("dies", marks=pytest.mark.long)])
def test_producers_notice_no_collector_that_is_away(
    collector: OtlpCollector, admin_port: int, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    with LocalBroker(settings=settings(collector, "1", {"admin.port": admin_port})) as broker:
        broker.create_topic("t", partitions=1)
        produce(broker, "t", [None])
        collector.wait_for("produce t")
        if fault == "refuses":
            collector.refusing = 400
        elif fault == "hangs":
            collector.hanging = True
        else:
            collector.die()
        began = time.monotonic()
        for _ in range(3):
            produce(broker, "t", [None] * 200)
        assert time.monotonic() - began < 10
        if fault == "refuses":
            collector.wait_until(lambda: section(admin_port)["refused"] > 0, "refusal")
            produce(broker, "t", [None])
            collector.wait_until(lambda: section(admin_port)["queued"] == 0, "empty queue")
            assert [line for line in status(admin_port)["problems"] if "traces are dropped" in line]
            assert len([line for line in caplog.messages if "takes no traces" in line]) == 1
            collector.refusing = 0
            produce(broker, "t", [None])
            collector.wait_until(lambda: section(admin_port)["error"] is None, "recovery")
        began = time.monotonic()
        broker.stop()
        assert time.monotonic() - began < 8, "a stop waits for the collector 2 s at most"
        broker.restart()
        produce(broker, "t", [None])


def test_status_and_metrics_tell_of_traces_only_where_there_are_any(collector: OtlpCollector, admin_port: int) -> None:
    with LocalBroker(settings={"admin.port": admin_port}):
        assert "tracing" not in status(admin_port)
    with LocalBroker(settings=settings(collector, more={"admin.port": admin_port})):
        report = section(admin_port)
        assert report["endpoint"] == f"{collector.endpoint}/v1/traces" and report["sample_ratio"] == 0
        assert "tidelog_trace_spans_total" in ask(admin_port, "/metrics")
