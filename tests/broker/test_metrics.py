"""The broker's counters and what a scrape shows of them."""

from __future__ import annotations

import itertools
import platform
import random
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.compaction_world import CompactionWorld
from tests.support.orphan_world import cleaner
from tidelog import __version__
from tidelog.broker.kafka.client_telemetry import ClientTelemetry
from tidelog.broker.partitions.log_cleaner import LogCleaner
from tidelog.broker.settings import LogSettings
from tidelog.broker.telemetry import figures
from tidelog.broker.telemetry import metrics as module
from tidelog.broker.telemetry.bucket_metrics import collect_accounts
from tidelog.broker.telemetry.disk_space import DiskSpace
from tidelog.broker.telemetry.health import health_families
from tidelog.broker.telemetry.metrics import Metrics, api_name
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.controller.model.load import HeartbeatReply
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.accounts import BucketAccounts
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import CommitObjects, ObjectSlice
from tidelog.storage.inputs import ReplicaSetData
from tidelog.storage.settings import StorageSettings, WalSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.memory import MemoryWal

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


class NoObjects:
    """A controller without any objects."""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        raise AssertionError("nothing is uploaded here")

    async def commit_objects(self, commit: CommitObjects) -> None:
        raise AssertionError("nothing is uploaded here")

    def check_current(self) -> None:
        """The metadata is current here."""

    async def catch_up(self) -> None:
        """The metadata is current here."""

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        return stream_id, end_offset

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> list[ObjectSlice]:
        return []

    def committed_wal_offset(self, replica_set_id: int) -> int:
        return 0

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        raise AssertionError("nothing is quarantined here")

    def quarantined(self, stream_id: int) -> str:
        return ""


def busy_metrics() -> Metrics:
    parts = PartRegistry()
    storage: dict[str, float] = {"log_cache_bytes": 7, "upload_pending_bytes": 1.5}
    parts.add_figures("storage", lambda: storage, figures.storage_families)
    operations = {"put": MemoryObjectStore().stats.operation("put").snapshot()}
    parts.add_figures("object store", lambda: operations, figures.object_store_families)
    parts.add_figures("partitions", lambda: {"led": 3, "open": 2, "failing": 1}, figures.partition_families)
    parts.add_figures("image", lambda: 42, figures.image_families)
    parts.add_figures("groups", lambda: {"groups": 5}, figures.group_families)
    metrics = Metrics(parts)
    metrics.request(0, 0.003, 100, 50, False)
    metrics.request(0, 99.0, 100, 50, True)
    metrics.request(3, 0.0001, 1, 2, False)
    metrics.produced("t", 10, 1000)
    metrics.fetched("t", 5, 500)
    metrics.connection_opened()
    metrics.connection_opened()
    metrics.connection_closed()
    metrics.connection_refused()
    return metrics


def test_requests_are_counted_by_api_with_their_latency_bytes_and_errors() -> None:
    found = scrape(busy_metrics())
    api = (("api", "Produce"),)
    assert found["tidelog_request_seconds_count", api] == 2
    assert found["tidelog_request_seconds_sum", api] == pytest.approx(99.003)
    assert found["tidelog_request_seconds_bucket", (*api, ("le", "0.0025"))] == 0
    assert found["tidelog_request_seconds_bucket", (*api, ("le", "0.005"))] == 1
    assert found["tidelog_request_seconds_bucket", (*api, ("le", "+Inf"))] == 2
    assert found["tidelog_request_errors_total", api] == 1
    assert found["tidelog_request_received_bytes_total", api] == 200
    assert found["tidelog_request_sent_bytes_total", api] == 100
    assert found["tidelog_request_seconds_count", (("api", "Metadata"),)] == 1


def test_errors_of_partitions_are_counted_by_name_and_those_that_mean_trouble_begin_at_0() -> None:
    metrics = Metrics(process=False)
    metrics.partition_error(1, 6)
    metrics.partition_error(0, 56)
    metrics.partition_error(0, 32_000)
    name = "tidelog_partition_errors_total"
    found = {labels: value for (series, labels), value in scrape(metrics).items() if series == name}

    def of(api: str, error: str) -> float:
        return found[("api", api), ("error", error)]

    assert of("Fetch", "NOT_LEADER_OR_FOLLOWER") == of("Produce", "KAFKA_STORAGE_ERROR") == 1
    assert of("Produce", "ERROR_32000") == 1
    assert of("Fetch", "CORRUPT_MESSAGE") == of("Produce", "REQUEST_TIMED_OUT") == 0


def test_topics_connections_and_sources_are_shown() -> None:
    found = scrape(busy_metrics())
    topic = (("topic", "t"),)
    assert found["tidelog_topic_produced_records_total", topic] == 10
    assert found["tidelog_topic_produced_bytes_total", topic] == 1000
    assert found["tidelog_topic_fetched_records_total", topic] == 5
    assert found["tidelog_topic_fetched_bytes_total", topic] == 500
    assert found["tidelog_connections", ()] == 1
    assert found["tidelog_connections_opened_total", ()] == 2
    assert found["tidelog_connections_refused_total", ()] == 1
    assert found["tidelog_partitions", (("state", "failing"),)] == 1
    assert found["tidelog_image_version", ()] == 42
    assert found["tidelog_groups", ()] == 5
    assert found["tidelog_storage_log_cache_bytes", ()] == 7
    assert found["tidelog_object_store_seconds_count", (("operation", "put"),)] == 0


def test_the_build_is_told() -> None:
    labels = (("python", platform.python_version()), ("version", __version__))
    assert scrape(Metrics(process=False))["tidelog_build_info", labels] == 1


def test_the_process_itself_is_measured() -> None:
    found = scrape(Metrics())
    assert found["process_resident_memory_bytes", ()] > 0
    assert ("process_cpu_seconds_total", ()) in found


def test_open_metrics_is_served_to_those_who_ask() -> None:
    body, content_type = busy_metrics().render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_topics_beyond_the_bound_share_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOPICS", 3)
    metrics = Metrics(process=False)
    for number in range(10):
        metrics.produced(f"t{number}", 1, 10)
    found = {
        labels[0][1]: value
        for (name, labels), value in scrape(metrics).items()
        if name.endswith("produced_bytes_total")
    }
    assert found == {"t0": 10, "t1": 10, "t2": 10, "__other__": 70}


def test_offsets_beyond_the_bound_have_no_series_and_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_EXPORTED_OFFSETS", 3)
    ends, committed = itertools.count(), itertools.count()
    parts = PartRegistry()
    rows = ((("t", at, 10) for at in ends), (("g", "t", at, 5) for at in committed))
    parts.add_figures("offsets", lambda: rows, figures.offset_families)
    found = scrape(Metrics(parts, process=False))
    names = [name for name, _ in found]
    assert names.count("tidelog_partition_high_watermark") == names.count("tidelog_group_committed_offset") == 3
    assert found["tidelog_group_committed_offset", (("group", "g"), ("partition", "2"), ("topic", "t"))] == 5
    left_out = {labels[0][1]: value for (name, labels), value in found.items() if name.endswith("series_left_out")}
    assert left_out == {"partition_high_watermark": 1, "group_committed_offset": 1}
    assert next(ends) == next(committed) == 4


def test_a_group_with_a_huge_name_has_no_series() -> None:
    rows = [("g" * 30_000, "t", 0, 5), ("h", "t", 0, 6)]
    parts = PartRegistry()
    parts.add_figures("offsets", lambda: ((), rows), figures.offset_families)
    found = scrape(Metrics(parts, process=False))
    assert [value for (name, _), value in found.items() if name == "tidelog_group_committed_offset"] == [6]
    assert found["tidelog_offset_series_left_out", (("family", "group_committed_offset"),)] == 1
    assert found["tidelog_offset_series_left_out", (("family", "partition_high_watermark"),)] == 0


def test_an_api_without_a_name_is_shown_by_its_key() -> None:
    assert (api_name(18), api_name(99)) == ("ApiVersions", "Api99")


def test_counting_a_request_makes_few_calls() -> None:
    """It is on the path of every request: what a call costs, `bench.produce_requests` measures."""
    metrics = Metrics(process=False)
    metrics.request(0, 0.003, 100, 50, False)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        metrics.request(0, 0.003, 100, 50, False)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 3, calls  # the last one ends the counting


def test_replica_sets_have_series_by_set_and_by_follower() -> None:
    follower = {"broker": 2, "connected": True, "gap_bytes": 70, "caught_up_ms": 1500}
    status = {
        "epoch": 4,
        "confirm_offset": 900,
        "end_offset": 1000,
        "total_replicas": 3,
        "quorum": 1,
        "need": 2,
        "in_sync": [1, 2],
        "sync_state_set": [1, 2, 3],
        "degraded": True,
        "refusal": "too few",
        "followers": [follower, {"broker": 3, "connected": False, "gap_bytes": 1000, "caught_up_ms": None}],
    }
    parts = PartRegistry()
    parts.add_figures("replica sets", lambda: {1: status}, figures.replica_set_families)
    found = scrape(Metrics(parts, process=False))
    of_set = (("replica_set", "1"),)
    values = {
        name: found[f"tidelog_replica_set_{name}", of_set] for name in ("unconfirmed_bytes", "in_sync", "members")
    }
    assert values == {"unconfirmed_bytes": 100, "in_sync": 2, "members": 3}
    assert found["tidelog_replica_set_degraded", of_set] == found["tidelog_replica_set_refuses", of_set] == 1
    second, third = [tuple(sorted([*of_set, ("broker", each)])) for each in ("2", "3")]
    lags = {labels: value for (name, labels), value in found.items() if name == "tidelog_replica_lag_bytes"}
    assert {tuple(sorted(labels)): value for labels, value in lags.items()} == {second: 70, third: 1000}
    ages = [value for (name, _), value in found.items() if name == "tidelog_replica_caught_up_age_seconds"]
    assert ages == [1.5], "one that never caught up has no age"


def _log_cleaner(world: CompactionWorld) -> LogCleaner:
    return LogCleaner(
        logs=tuple,
        is_internal=lambda topic: False,
        objects=world.metadata,
        compactor=world.compactor(),
        clock=world.clock,
        rng=world.rng,
        settings=LogSettings(),
    )


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    documented = set(re.findall(r"^\| `(tidelog_[a-z_]+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    storage = Storage(
        ReplicaSetData("c", 1, MemoryWal(WalSettings()), MemoryObjectStore(), NoObjects()),
        StorageSettings(),
        SystemClock(),
        random.Random(1),
    )
    families = [
        *Metrics(process=False).collect(),
        *figures.storage_families(storage.stats()),
        *figures.balance_families(HeartbeatReply(4, 3, 2, 1)),
        *figures.orphan_families(cleaner(CompactionWorld()).figures()),
        *figures.compaction_families(CompactionWorld().compactor().figures()),
        *figures.log_compaction_families(_log_cleaner(CompactionWorld()).figures()),
        *figures.object_store_families({}),
        *figures.listener_families((1, 2)),
        *figures.connection_bound_families(1),
        *figures.clock_families(1),
        *figures.certificate_families(1.0),
        *figures.disk_families(DiskSpace(1, 2)),
        *figures.partition_families({}),
        *figures.task_error_families({}),
        *figures.tracing_families({"exported": 1, "refused": 0, "dropped": 0, "queued": 0, "malformed_contexts": 0}),
        *figures.move_families({}),
        *figures.hint_families({}),
        *figures.takeover_families({}),
        *figures.leaderless_families({}),
        *figures.fetch_session_families((1, 2, 3)),
        *ClientTelemetry(1, random.Random(1), tuple).families(0.0),
        *figures.group_families({"groups": 1}),
        *figures.offset_families(((), ())),
        *figures.transaction_families(
            {
                "transactional_ids": 1,
                "open": 1,
                "hanging": 0,
                "forwarded": 0,
                "markers_waiting": 0,
                "markers_written": 1,
                "markers_retried": 0,
            }
        ),
        *figures.replica_set_families({}),
        *figures.followed_families({"followed": 3, "ready": 2, "log_cache_bytes": 1}),
        *health_families({}),
        *figures.image_families(1),
        *figures.lease_families({"count": 0, "oldest": None}),
        *figures.snapshot_families({"count": 0, "partitions": 0, "branched_partitions": 0}),
        *figures.bucket_state_families({"at_ms": 1, "age_s": 2.0, "size_bytes": 3}),
        *collect_accounts(BucketAccounts()),
    ]
    exported = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert documented == exported
