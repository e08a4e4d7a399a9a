"""KIP-714 with the clients that push: Kafka's Java producer and librdkafka, to a broker's `/metrics`."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.backends import QUIET, create_topic
from tests.support import schema
from tests.support.clients import wait_until
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_tools import KafkaTools
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.broker.kafka.named_configs import CLIENT_METRICS
from tidelog.cli.client import ClusterConnection

PREFIX = "org.apache.kafka.producer."
INTERVAL_MS = 500
ALTER_CONFIGS = 44


@pytest.fixture
def tidelog(tmp_path: Path) -> Iterator[TidelogProcess]:
    with running(tmp_path / "data") as process:
        create_topic(process.bootstrap, "t", 1)
        yield process


def pushed(tidelog: TidelogProcess, client_id: str) -> dict[str, float]:
    """The largest value of each metric that a client pushed."""
    url = ClusterConnection(tidelog.bootstrap).admin_url + "/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("tidelog_client_metric_") and sample.labels.get("client_id") == client_id:
                name = sample.labels["metric"]
                assert len(sample.labels["client_instance_id"]) == 22
                found[name] = max(found.get(name, sample.value), sample.value)
    return found


def subscribe(tidelog: TidelogProcess) -> None:
    """Ask every client for `PREFIX`, as no librdkafka can."""
    make = schema.request(ALTER_CONFIGS, 1).make
    values = {"metrics": PREFIX, "interval.ms": str(INTERVAL_MS)}
    configs = [make("AlterableConfig", name=name, config_operation=0, value=value) for name, value in values.items()]
    resource = make("AlterConfigsResource", resource_type=CLIENT_METRICS, resource_name="s", configs=configs)

    async def alter() -> None:
        async with KafkaClient("127.0.0.1", tidelog.port) as client:
            response = await client.send(ALTER_CONFIGS, 1, resources=[resource], validate_only=False)
            assert [one.error_code for one in response.responses] == [0]

    asyncio.run(alter())


def test_without_a_subscription_a_client_writes_nothing_to_the_terminal(
    tidelog: TidelogProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    producer = Producer({"bootstrap.servers": tidelog.bootstrap})  # with librdkafka's default level
    for _ in range(100):  # it asks as soon as it is connected, so it is told during some of these
        producer.produce("t", b"x")
        assert producer.flush(30) == 0
    assert not capfd.readouterr().err


def test_librdkafka_pushes_what_a_subscription_asks_for(tidelog: TidelogProcess) -> None:
    subscribe(tidelog)
    producer = Producer({"bootstrap.servers": tidelog.bootstrap, "client.id": "rd", **QUIET})
    producer.produce("t", b"x")
    producer.flush(30)
    wait_until(lambda: bool(pushed(tidelog, "rd")), "metrics of librdkafka")
    found = pushed(tidelog, "rd")
    assert all(name.startswith(PREFIX) for name in found), found
    assert found[f"{PREFIX}connection.creation.total"] >= 1, found


@pytest.mark.long
@pytest.mark.servers("kafka")
def test_kafkas_producer_pushes_what_kafka_client_metrics_asks_for(tidelog: TidelogProcess, kafka: Path) -> None:
    tools = KafkaTools(kafka, tidelog.bootstrap)
    asked = ["--name", "s", "--metrics", PREFIX, "--interval", str(INTERVAL_MS), "--match", "client_id=perf.*"]
    assert "Altered client metrics config" in tools.ask("kafka-client-metrics", "--alter", *asked)
    load = ["--topic", "t", "--num-records", "3000", "--record-size", "100", "--throughput", "1000"]
    properties = ["--producer-props", f"bootstrap.servers={tidelog.bootstrap}", "client.id=perf-1"]
    assert "3000 records sent" in tools.run("kafka-producer-perf-test", *load, *properties)
    found = pushed(tidelog, "perf-1")
    assert 0 < found[f"{PREFIX}record.send.total"] <= 3000, "a producer that is closed may end without its last push"
    assert found[f"{PREFIX}connection.creation.total"] >= 1
    assert all(name.startswith(PREFIX) for name in found), found
