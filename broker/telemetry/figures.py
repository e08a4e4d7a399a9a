"""What the parts of a broker count, as Prometheus families. Every name, unit and label is in docs/metrics.md.

Each function takes the plain figures of one part; `tidelog.broker.telemetry.registry` ties the two together.

Entry: the functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tidelog.broker.telemetry.disk_space import DiskSpace
from tidelog.controller.model.load import HeartbeatReply

STORAGE_COUNTERS = frozenset(
    {
        "block_cache_hits",
        "block_cache_misses",
        "block_get_bytes",
        "block_gets",
        "cold_throttle_wait_seconds",
        "cold_throttle_waits",
        "failed_checks",
        "quarantined_records",
        "refused_reads",
        "upload_bytes",
        "upload_commits",
        "upload_objects",
        "upload_rebuilt",
        "upload_retries",
    }
)
"""Figures of `Storage.stats()` that only grow."""
COMPACTION_GAUGES = frozenset({"excluded", "tasks_left"})
LOG_COMPACTION_GAUGES = frozenset({"keys", "max_dirty_ratio", "uncleanable_partitions"})
"""Figures of `Compactor.figures()` that go up and down."""
MAX_EXPORTED_OFFSETS: Final = 2_000
"""Partitions with a series of their high watermark, and committed offsets with one."""
MAX_NAME_CHARS: Final = 255
"""Groups with a longer id have no series: an id may be as long as a request. Topics have at most 249."""


def listener_families(held: tuple[int, int]) -> Iterable[Metric]:
    """What the Kafka listener holds in memory for its clients: bytes of requests, bytes of responses."""
    in_flight, unread = held
    yield GaugeMetricFamily(
        "tidelog_requests_in_flight_bytes", "Bytes of requests being received or handled", value=in_flight
    )
    yield GaugeMetricFamily("tidelog_responses_unread_bytes", "Bytes of responses clients do not read", value=unread)


def connection_bound_families(bound: int) -> Iterable[Metric]:
    """`kafka.max_connections` as it is in force: `ulimit -n` may have lowered it."""
    yield GaugeMetricFamily("tidelog_connections_bound", "Client connections at most", value=bound)


def clock_families(time_ms: int) -> Iterable[Metric]:
    """The wall clock of this host."""
    text = "Wall clock of this host, since the Unix epoch"
    yield GaugeMetricFamily("tidelog_clock_seconds", text, value=time_ms / 1000)


def certificate_families(left_s: float) -> Iterable[Metric]:
    """`TlsNetwork.certificate_left_s`."""
    text = "Time until this broker's certificate expires; below 0 it has"
    yield GaugeMetricFamily("tidelog_certificate_left_seconds", text, value=left_s)


def disk_families(space: DiskSpace | None) -> Iterable[Metric]:
    """`DiskSpaceMeter.latest`: the file system of the data directory; absent if it cannot be measured."""
    if space is None:
        return
    text = "Bytes free on the disk of the data directory"
    yield GaugeMetricFamily("tidelog_disk_free_bytes", text, value=space.free_bytes)
    yield GaugeMetricFamily("tidelog_disk_bytes", "Bytes of the same disk", value=space.total_bytes)


def task_error_families(counts: Mapping[str, int]) -> Iterable[Metric]:
    """`TaskErrors.counts()`, all only growing."""
    yield _counters("tidelog_unexpected_errors", "Exceptions that nobody expected", "place", counts)


def tracing_families(report: Mapping[str, Any]) -> Iterable[Metric]:
    """`Tracing.report()`."""
    spans = {"exported": report["exported"], "refused": report["refused"], "dropped": report["dropped"]}
    yield _counters("tidelog_trace_spans", "Spans by what became of them", "outcome", spans)
    yield GaugeMetricFamily("tidelog_trace_spans_queued", "Spans that wait for the collector", value=report["queued"])
    text = "Headers `traceparent` of records that are none, and were ignored"
    yield CounterMetricFamily("tidelog_trace_contexts_malformed", text, value=report["malformed_contexts"])


def partition_families(counts: Mapping[str, int]) -> Iterable[Metric]:
    """`PartitionManager.counts()`."""
    yield _gauges("tidelog_partitions", "Partitions of this broker by state", "state", counts)


def move_families(counts: Mapping[str, int]) -> Iterable[Metric]:
    """`PartitionMoves.counts`: `done`, `cancelled`, `failed_attempts`, all only growing."""
    yield _counters("tidelog_partition_moves", "Moves of partitions from here", "outcome", counts)


def hint_families(counts: Mapping[str, int]) -> Iterable[Metric]:
    """`HintBox.counts`, all only growing."""
    yield _counters("tidelog_move_hints", "Hints between source and target of a move", "outcome", counts)


def takeover_families(counts: Mapping[str, int]) -> Iterable[Metric]:
    """`TakeoverRunner.counts`: `done`, `superseded`, `failed_attempts`, all only growing."""
    yield _counters("tidelog_takeovers", "Dead brokers' WALs recovered from the bucket here", "outcome", counts)


def leaderless_families(counts: Mapping[str, int]) -> Iterable[Metric]:
    """`TakeoverRunner.waiting()`: partitions of the cluster without a living broker, by what becomes of them."""
    text = "Partitions in the cluster without a living broker"
    yield _gauges("tidelog_partitions_leaderless", text, "state", counts)


def fetch_session_families(figures: tuple[int, int, int]) -> Iterable[Metric]:
    """`FetchSessions.figures()`: sessions, partitions in them, sessions pushed out since the start."""
    sessions, members, evicted = figures
    yield GaugeMetricFamily("tidelog_fetch_sessions", "Fetch sessions (KIP-227)", value=sessions)
    yield GaugeMetricFamily("tidelog_fetch_session_partitions", "Partitions in fetch sessions", value=members)
    yield CounterMetricFamily("tidelog_fetch_sessions_evicted", "Fetch sessions pushed out by others", value=evicted)


def group_families(stats: Mapping[str, int]) -> Iterable[Metric]:
    """`GroupCoordinator.stats()`."""
    yield GaugeMetricFamily("tidelog_groups", "Groups coordinated by this broker", value=stats["groups"])


def offset_families(
    offsets: tuple[Iterable[tuple[str, int, int]], Iterable[tuple[str, str, int, int]]],
) -> Iterable[Metric]:
    """High watermarks as `(topic, partition, offset)`, committed offsets as `(group, topic, partition, offset)`.

    A group's lag is their difference, which may be of two brokers: whoever asks joins them. Only as much is read as has
    a series, so a scrape takes no longer with more partitions and groups.
    """
    ends, committed = offsets
    text = "Offset up to which consumers see records, of partitions that this broker leads"
    of_partitions = GaugeMetricFamily("tidelog_partition_high_watermark", text, labels=["topic", "partition"])
    text = "Offsets committed by groups that this broker coordinates"
    of_groups = GaugeMetricFamily("tidelog_group_committed_offset", text, labels=["group", "topic", "partition"])
    text = "1 while some have no series: there are too many, or a name is too long"
    left_out = GaugeMetricFamily("tidelog_offset_series_left_out", text, labels=["family"])
    left_out.add_metric(["partition_high_watermark"], _fill(of_partitions, ends))
    left_out.add_metric(["group_committed_offset"], _fill(of_groups, committed))
    return [of_partitions, of_groups, left_out]


def _fill(family: GaugeMetricFamily, rows: Iterable[tuple[Any, ...]]) -> int:
    """Add as many rows as may be, whose last item is the value; return 1 if some were left out."""
    left_out = 0
    for number, (*labels, value) in enumerate(islice(rows, MAX_EXPORTED_OFFSETS + 1)):
        if number == MAX_EXPORTED_OFFSETS or len(labels[0]) > MAX_NAME_CHARS:
            left_out = 1
        else:
            family.add_metric([str(label) for label in labels], value)
    return left_out


def transaction_families(stats: Mapping[str, int]) -> Iterable[Metric]:
    """`TxnCoordinator.stats()`."""
    text = "Transactional ids that this broker coordinates"
    yield GaugeMetricFamily("tidelog_transactional_ids", text, value=stats["transactional_ids"])
    text = "Their transactions that are open or being ended"
    yield GaugeMetricFamily("tidelog_transactions_open", text, value=stats["open"])
    text = "Requests of clients that another broker has answered as the coordinator"
    yield CounterMetricFamily("tidelog_transaction_requests_forwarded", text, value=stats["forwarded"])
    text = "Transactions in partitions led here that nobody ends"
    yield GaugeMetricFamily("tidelog_transactions_hanging", text, value=stats["hanging"])
    text = "Partitions that wait for the marker of an ended transaction"
    yield GaugeMetricFamily("tidelog_transaction_markers_waiting", text, value=stats["markers_waiting"])
    for name, text in (
        ("written", "Partitions that have got their marker from this coordinator"),
        ("retried", "Partitions that were asked again to take a marker"),
    ):
        yield CounterMetricFamily(f"tidelog_transaction_markers_{name}", text, value=stats[f"markers_{name}"])


def image_families(version: int) -> Iterable[Metric]:
    """Version of the local metadata image."""
    yield GaugeMetricFamily("tidelog_image_version", "Local metadata version", value=version)


def lease_families(status: Mapping[str, Any]) -> Iterable[Metric]:
    """`ReadingRoutes.status`: the leases of readers outside the cluster, the same on every broker."""
    oldest = status["oldest"] or {"held_objects": 0}
    yield GaugeMetricFamily("tidelog_leases", "Leases of readers outside the cluster", value=status["count"])
    yield GaugeMetricFamily(
        "tidelog_lease_held_objects",
        "Deleted objects that leases keep in the bucket",
        value=oldest["held_objects"],
    )


def snapshot_families(status: Mapping[str, Any]) -> Iterable[Metric]:
    """`SnapshotRoutes.status`: snapshots and branches of topics, the same on every broker."""
    yield GaugeMetricFamily("tidelog_snapshots", "Named snapshots of topics", value=status["count"])
    yield GaugeMetricFamily(
        "tidelog_held_partitions",
        "Partitions that snapshots and branches hold, each as often as it is held",
        value=status["partitions"] + status["branched_partitions"],
    )


def bucket_state_families(state: Mapping[str, Any] | None) -> Iterable[Metric]:
    """`ControllerNode.bucket_state`: absent unless the active controller is in this process and has written one."""
    if state is None or state["at_ms"] is None:
        return
    text = "Age of the newest metadata in the bucket"
    yield GaugeMetricFamily("tidelog_metadata_state_age_seconds", text, value=state["age_s"])
    yield GaugeMetricFamily("tidelog_metadata_state_bytes", "Size of the same", value=state["size_bytes"])


def balance_families(told: HeartbeatReply | None) -> Iterable[Metric]:
    """What the active controller last told: the same on every broker; absent while no controller is active."""
    if told is None:
        return
    yield GaugeMetricFamily("tidelog_brokers", "Brokers alive and not draining", value=told.brokers)
    yield GaugeMetricFamily("tidelog_brokers_wanted", "Brokers that the load needs", value=told.wanted_brokers)
    yield GaugeMetricFamily(
        "tidelog_balancer_planned_moves",
        "Moves the balancer would make, or has yet to make",
        value=told.planned_moves,
    )
    yield CounterMetricFamily(
        "tidelog_balancer_moves",
        "Moves issued since the controller became active",
        value=told.balancer_moves,
    )


def storage_families(stats: Mapping[str, int | float]) -> Iterable[Metric]:
    """`Storage.stats()`: each is a counter if it is one of `STORAGE_COUNTERS`."""
    for name, value in stats.items():
        text = f"Storage: {name.replace('_', ' ')}"
        if name in STORAGE_COUNTERS:
            yield CounterMetricFamily(f"tidelog_storage_{name}", text, value=value)
        else:
            yield GaugeMetricFamily(f"tidelog_storage_{name}", text, value=value)


def compaction_families(figures: Mapping[str, int]) -> Iterable[Metric]:
    """`Compactor.figures()`: each is a counter unless it is one of `COMPACTION_GAUGES`."""
    for name, value in figures.items():
        kind = GaugeMetricFamily if name in COMPACTION_GAUGES else CounterMetricFamily
        yield kind(f"tidelog_compaction_{name}", f"Compaction: {name.replace('_', ' ')}", value=value)


def log_compaction_families(figures: Mapping[str, float]) -> Iterable[Metric]:
    """`LogCleaner.figures()`: each is a counter unless it is one of `LOG_COMPACTION_GAUGES`."""
    for name, value in figures.items():
        kind = GaugeMetricFamily if name in LOG_COMPACTION_GAUGES else CounterMetricFamily
        yield kind(f"tidelog_log_compaction_{name}", f"Log compaction: {name.replace('_', ' ')}", value=value)


def followed_families(figures: Mapping[str, int]) -> Iterable[Metric]:
    """`FollowerPrefetch.figures()`, and the bytes of the followed WALs in memory: gauges."""
    yield GaugeMetricFamily(
        "tidelog_followed_partitions", "Partitions of replica sets that this broker follows", value=figures["followed"]
    )
    yield GaugeMetricFamily(
        "tidelog_followed_partitions_ready", "Those that would open here without the bucket", value=figures["ready"]
    )
    yield GaugeMetricFamily(
        "tidelog_followed_log_cache_bytes", "Bytes of followed WALs in memory", value=figures["log_cache_bytes"]
    )


def orphan_families(figures: Mapping[str, int]) -> Iterable[Metric]:
    """`OrphanCleaner.figures()`: counters."""
    for name, value in figures.items():
        yield CounterMetricFamily(f"tidelog_orphan_{name}", f"Orphans: {name}", value=value)


def replica_set_families(led: Mapping[int, Mapping[str, Any]]) -> Iterable[Metric]:
    """`ReplicaMaster.status` of each replica set that this broker leads: series by set, and by set and follower.

    A set has at most `tidelog.storage.replication.policy.MAX_REPLICAS` members.
    """
    by_set = {
        name: GaugeMetricFamily(f"tidelog_replica_set_{name}", text, labels=["replica_set"])
        for name, text in _OF_A_SET.items()
    }
    by_member = {
        name: GaugeMetricFamily(f"tidelog_replica_{name}", text, labels=["replica_set", "broker"])
        for name, text in _OF_A_FOLLOWER.items()
    }
    for replica_set, status in led.items():
        label = str(replica_set)
        values = {
            "master_epoch": status["epoch"],
            "confirm_offset": status["confirm_offset"],
            "unconfirmed_bytes": status["end_offset"] - status["confirm_offset"],
            "replicas": status["total_replicas"],
            "quorum": status["quorum"],
            "need": status["need"],
            "in_sync": len(status["in_sync"]),
            "members": len(status["sync_state_set"]),
            "degraded": int(status["degraded"]),
            "refuses": int(bool(status["refusal"])),
        }
        for name, value in values.items():
            by_set[name].add_metric([label], value)
        for one in status["followers"]:
            labels = [label, str(one["broker"])]
            by_member["connected"].add_metric(labels, int(one["connected"]))
            by_member["lag_bytes"].add_metric(labels, one["gap_bytes"])
            if one["caught_up_ms"] is not None:
                by_member["caught_up_age_seconds"].add_metric(labels, one["caught_up_ms"] / 1000)
    yield from by_set.values()
    yield from by_member.values()


_OF_A_SET = {
    "master_epoch": "Master epoch of a replica set that this broker leads",
    "confirm_offset": "WAL offset up to which the quorum has everything",
    "unconfirmed_bytes": "Bytes of the WAL that the quorum does not have yet",
    "replicas": "Members that the policy asks for",
    "quorum": "Members that must have a record before it is confirmed",
    "need": "Members that must be in sync for acks=all to be taken",
    "in_sync": "Members in sync now, the master included",
    "members": "Members of the SyncStateSet",
    "degraded": "1 while the quorum is smaller than the policy asks for",
    "refuses": "1 while acks=all is refused because too few members are in sync",
}
_OF_A_FOLLOWER = {
    "connected": "1 while a follower of a set that this broker leads is connected",
    "lag_bytes": "Bytes of the WAL that a follower is not known to have",
    "caught_up_age_seconds": "Time since a follower had everything that its master had",
}


def object_store_families(operations: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """`StoreStats.snapshot()`: figures by operation."""
    label = ["operation"]
    latency = HistogramMetricFamily(
        "tidelog_object_store_seconds", "Time of object store calls, retries included", labels=label
    )
    counters = {
        "errors": CounterMetricFamily("tidelog_object_store_errors", "Calls that failed", labels=label),
        "retries": CounterMetricFamily("tidelog_object_store_retries", "Attempts repeated", labels=label),
        "bytes_in": CounterMetricFamily("tidelog_object_store_received_bytes", "Bytes received", labels=label),
        "bytes_out": CounterMetricFamily("tidelog_object_store_sent_bytes", "Bytes sent", labels=label),
    }
    in_flight = GaugeMetricFamily("tidelog_object_store_in_flight", "Calls going on", labels=label)
    for operation, figures in operations.items():
        buckets = [(bound, float(count)) for bound, count in figures["latency_buckets"].items()]
        latency.add_metric([operation], buckets, figures["latency_sum_s"])
        for field, family in counters.items():
            family.add_metric([operation], figures[field])
        in_flight.add_metric([operation], figures["in_flight"])
    return [latency, *counters.values(), in_flight]


def _gauges(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _counters(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
