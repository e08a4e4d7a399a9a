"""Creates what a broker remembers for operators: its history, the cluster's timeline, and the console that shows them.

Entry: `build_history`, `follow_timeline`, `console_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from aiohttp import web

from tidelog.broker.base import BrokerBase
from tidelog.broker.data_parts import DataParts
from tidelog.broker.partition_parts import PartitionParts
from tidelog.broker.telemetry.history import (
    MAX_OFFSET_SERIES,
    HistoryRecorder,
    committed_series,
    end_series,
)
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.timeline import BrokerView, LeaderView, MoveView, Timeline
from tidelog.console.app import ConsolePlace, console_app
from tidelog.controller.image.image import Delta
from tidelog.controller.model.records import NO_REPLICA_SET
from tidelog.runtime.memory import resident_bytes

HALF = MAX_OFFSET_SERIES // 2
"""Ends of partitions take at most half of the places, so that committed offsets have the others."""
FOLLOWED_TABLES = ("brokers", "replica_sets")


def build_history(base: BrokerBase, data: DataParts, partitions: PartitionParts, metrics: Metrics) -> HistoryRecorder:
    """Create the broker's history, which samples from the start of the health monitor on."""
    world = base.world

    def figures() -> list[tuple[str, float]]:
        stats, counts = data.reports.stats(), partitions.manager.counts()
        bucket = world.store.stats.snapshot().values()
        memory = {
            "resident_bytes": resident_bytes(),
            "log_cache_bytes": stats.get("log_cache_bytes", 0),
            "block_cache_bytes": stats["block_cache_bytes"],
            "not_uploaded_bytes": data.storages.not_uploaded_bytes,
        }
        requests = {
            "bucket_requests": sum(each["count"] for each in bucket),
            "bucket_errors": sum(each["errors"] for each in bucket),
            "bucket_sent_bytes": sum(each["bytes_out"] for each in bucket),
            "bucket_received_bytes": sum(each["bytes_in"] for each in bucket),
        }
        placed = {"partitions_led": counts["led"], "partitions_open": counts["open"], "moving": counts["moving"]}
        process = {"cpu_seconds": world.cpu.times().process_s, "connections": metrics.connections}
        return [*metrics.totals().items(), *memory.items(), *requests.items(), *placed.items(), *process.items()]

    def offsets() -> Iterator[tuple[str, float]]:
        for log in islice(partitions.manager.all(), HALF):
            yield end_series(log.topic, log.partition), log.high_watermark
        for key, offset in islice(partitions.groups.all_committed(), HALF):
            yield committed_series(key.topic, key.partition, key.group), offset

    history = HistoryRecorder(world.clock.monotonic, world.clock.time_ms, figures=figures, offsets=offsets)
    base.health.on_tick(history.tick)
    return history


def follow_timeline(base: BrokerBase) -> Callable[[], dict[str, Any]]:
    """Follow the metadata from now on; return the timeline's report."""
    timeline, clock = Timeline(), base.world.clock

    def look() -> None:
        image = base.image()
        brokers = {each.id: BrokerView(each.alive, bool(each.draining)) for each in image.brokers.values()}
        leaders = {}
        for each in image.replica_sets.values():
            master = image.brokers.get(each.master)
            leaders[each.id] = LeaderView(each.master if master is not None and master.alive else -1, each.master_epoch)
        timeline.look(clock.monotonic(), clock.time_ms(), brokers, leaders)

    def partitions(delta: Delta) -> Iterator[tuple[tuple[bytes, int], MoveView | None]]:
        image = base.image()
        for _, key, record in delta.of("partitions"):
            topic = image.topics.get(key[0])
            if record is None or topic is None:
                yield key, None
            else:
                target = record.target if record.target != NO_REPLICA_SET else -1
                yield key, MoveView(f"{topic.name}:{record.index}", record.replica_set, target)

    def changed(delta: Delta) -> None:
        if any(mutation.table in FOLLOWED_TABLES for mutation in delta.mutations):
            look()
        timeline.partitions(clock.monotonic(), clock.time_ms(), partitions(delta))

    look()
    base.controller.subscribe(changed)
    return lambda: timeline.report(clock.monotonic())


def console_of(base: BrokerBase, admin_url: Callable[[], str]) -> web.Application | None:
    """Return the console for the admin HTTP of this broker; None unless `admin.console` is set."""
    admin, kafka = base.settings.admin, base.settings.kafka
    if not admin.console:
        return None

    def bootstrap() -> str:
        return ",".join(f"{each.host}:{each.port}" for each in base.image().brokers.values() if each.alive)

    names = {admin.host, admin.advertised_host, kafka.advertised_host} - {""}
    return console_app(
        ConsolePlace(
            admin_url=admin_url,
            bootstrap=bootstrap,
            host_names=frozenset(names),
            schema_registry=admin.schema_registry,
            cluster_id=lambda: base.image().cluster_id,
        )
    )
