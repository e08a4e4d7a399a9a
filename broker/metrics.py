"""What a broker counts, and how Prometheus reads it. Every name, unit and label is in docs/metrics.md.

Counting happens on the request path, so it is a few additions to plain slots; prometheus-client's objects are built
only when somebody scrapes. What other parts count already (storage, object store, partitions, controller client) is
asked for at the scrape through `MetricSources`.

Invariants: a counter never goes back while the process lives; at most `MAX_TOPICS` topics have series of their own, the
rest are summed under the topic `__other__`.

Entry: `Metrics`.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from broker.bucket_metrics import collect_accounts
from broker.load import LoadMeter
from controller.load import HeartbeatReply
from storage.bucket_accounts import BucketAccounts

LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the latency buckets in seconds: a cached Metadata at one end, a long poll at the other."""
MAX_TOPICS = 1_000
"""Topics with series of their own; each costs four series."""
OTHER_TOPIC = "__other__"
STORAGE_COUNTERS = frozenset(
    {
        "block_cache_hits",
        "block_cache_misses",
        "block_get_bytes",
        "block_gets",
        "cold_pace_wait_seconds",
        "cold_pace_waits",
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
DROP_REASONS = (
    "connections",
    "connections_per_address",
    "not_kafka",
    "oversized",
    "malformed",
    "not_served",
    "half_sent",
    "idle",
    "slow_reader",
    "unanswerable",
    "defect",
)
"""Why the broker ended a connection that its client did not end."""
COMPACTION_GAUGES = frozenset({"quarantined", "tasks_left"})
"""Figures of `Compactor.figures()` that go up and down."""
_KEYS = 128
_BUCKETS = len(LATENCY_BOUNDS_S) + 1

API_NAMES: dict[int, str] = {
    0: "Produce", 1: "Fetch", 2: "ListOffsets", 3: "Metadata", 8: "OffsetCommit", 9: "OffsetFetch",
    10: "FindCoordinator", 11: "JoinGroup", 12: "Heartbeat", 13: "LeaveGroup", 14: "SyncGroup", 15: "DescribeGroups",
    16: "ListGroups", 17: "SaslHandshake", 18: "ApiVersions", 19: "CreateTopics", 20: "DeleteTopics",
    21: "DeleteRecords", 22: "InitProducerId", 23: "OffsetForLeaderEpoch", 24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn", 26: "EndTxn", 28: "TxnOffsetCommit", 29: "DescribeAcls", 30: "CreateAcls", 31: "DeleteAcls",
    32: "DescribeConfigs", 33: "AlterConfigs", 35: "DescribeLogDirs", 36: "SaslAuthenticate", 37: "CreatePartitions",
    42: "DeleteGroups", 43: "ElectLeaders", 44: "IncrementalAlterConfigs", 45: "AlterPartitionReassignments",
    46: "ListPartitionReassignments", 47: "OffsetDelete", 48: "DescribeClientQuotas", 60: "DescribeCluster",
    61: "DescribeProducers", 65: "DescribeTransactions", 66: "ListTransactions", 68: "ConsumerGroupHeartbeat",
    69: "ConsumerGroupDescribe", 75: "DescribeTopicPartitions",
}  # fmt: skip


def api_name(api_key: int) -> str:
    """The name of an API, or `Api<key>`."""
    return API_NAMES.get(api_key, f"Api{api_key}")


class _ApiCounts:
    __slots__ = ("buckets", "bytes_in", "bytes_out", "count", "errors", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.errors = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.seconds = 0.0
        self.buckets = [0] * _BUCKETS


class _TopicCounts:
    __slots__ = ("fetched_bytes", "fetched_records", "produced_bytes", "produced_records")

    def __init__(self) -> None:
        self.produced_bytes = 0
        self.produced_records = 0
        self.fetched_bytes = 0
        self.fetched_records = 0


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(slots=True)
class MetricSources:
    """Figures that other parts keep, asked for at each scrape. Each must be quick and must not block."""

    storage: Callable[[], Mapping[str, int | float]] = _nothing
    """`Storage.stats()`: each becomes `tidelog_storage_<name>`, a counter if it is one of `STORAGE_COUNTERS`."""
    object_store: Callable[[], Mapping[str, Mapping[str, Any]]] = _nothing
    """`store.stats.snapshot()`: figures by operation."""
    accounts: BucketAccounts = dataclasses.field(default_factory=BucketAccounts)
    """Requests and bytes of the bucket by purpose and topic."""
    topic_exists: Callable[[str], bool] = lambda topic: True
    """Whether a topic (still) exists: the series of others are folded into `__other__`."""
    compaction: Callable[[], Mapping[str, int]] = _nothing
    """`Compactor.figures()`: each becomes `tidelog_compaction_<name>`, a counter unless it is one of
    `COMPACTION_GAUGES`."""
    orphans: Callable[[], Mapping[str, int]] = _nothing
    """`OrphanCleaner.figures()`: each becomes the counter `tidelog_orphan_<name>`."""
    partitions: Callable[[], Mapping[str, int]] = _nothing
    """`PartitionManager.counts()`: `led`, `open`, `failing`."""
    moves: Callable[[], Mapping[str, int]] = _nothing
    """`PartitionMoves.counts`: `done`, `cancelled`, `failed_attempts`, all only growing."""
    hints: Callable[[], Mapping[str, int]] = _nothing
    """`HintBox.counts`, all only growing."""
    salvages: Callable[[], Mapping[str, int]] = _nothing
    """`Salvager.counts`: `done`, `superseded`, `failed_attempts`, all only growing."""
    leaderless: Callable[[], Mapping[str, int]] = _nothing
    """`Salvager.waiting()`: partitions of the cluster without a living broker, by what becomes of them."""
    image_version: Callable[[], int] = lambda: 0
    """Version of the local metadata image."""
    controller_lag: Callable[[], int] | None = None
    """Versions that the controller is known to be ahead of the local image; None: not known, and not exported."""
    balance: Callable[[], HeartbeatReply | None] = lambda: None
    """What the active controller last told of its balancer and of the number of brokers; None: not known now."""
    groups: Callable[[], int] = lambda: 0
    """Groups that this broker coordinates."""
    fetch_sessions: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    """`FetchSessions.figures()`: sessions, partitions in them, sessions pushed out since the start."""


@dataclass(frozen=True, slots=True)
class DoorSources:
    """What the Kafka listener holds in memory for its clients."""

    in_flight_bytes: Callable[[], int] = lambda: 0
    unread_bytes: Callable[[], int] = lambda: 0


class Metrics(Collector):
    """The broker's counters. All methods are called on the event loop's thread."""

    def __init__(
        self, sources: MetricSources | None = None, *, process: bool = True, load: LoadMeter | None = None
    ) -> None:
        """`process=False` leaves out memory, CPU and garbage-collector series."""
        self.sources = sources or MetricSources()
        self.connections = 0
        self.connections_opened = 0
        self.connections_refused = 0
        self.connections_dropped: dict[str, int] = dict.fromkeys(DROP_REASONS, 0)
        self.door = DoorSources()
        self.load = load or LoadMeter()
        """What each partition carries, for the controllers."""
        self._apis: list[_ApiCounts | None] = [None] * _KEYS
        self._topics: dict[str, _TopicCounts] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        if process:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    # --- counting ------------------------------------------------------------------------------------------------

    def request(self, api_key: int, seconds: float, bytes_in: int, bytes_out: int, error: bool) -> None:
        """Count one request: its API key, seconds from whole frame to queued reply, and bytes of both frames."""
        counts = self._apis[api_key & 127] or self._first(api_key)
        counts.count += 1
        counts.seconds += seconds
        counts.bytes_in += bytes_in
        counts.bytes_out += bytes_out
        counts.buckets[bisect.bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        if error:
            counts.errors += 1

    def _first(self, api_key: int) -> _ApiCounts:
        counts = self._apis[api_key & 127] = _ApiCounts()
        return counts

    def produced(self, topic: str, records: int, size_bytes: int) -> None:
        """Count records appended for producers, and the bytes of their batches."""
        counts = self._topics.get(topic) or self._topic(topic)
        counts.produced_records += records
        counts.produced_bytes += size_bytes

    def fetched(self, topic: str, records: int, size_bytes: int) -> None:
        """Count records sent to consumers, and the bytes of their batches."""
        counts = self._topics.get(topic) or self._topic(topic)
        counts.fetched_records += records
        counts.fetched_bytes += size_bytes

    def _topic(self, topic: str) -> _TopicCounts:
        if len(self._topics) >= MAX_TOPICS:
            topic = OTHER_TOPIC
        return self._topics.setdefault(topic, _TopicCounts())

    def connection_opened(self) -> None:
        """A client connected."""
        self.connections += 1
        self.connections_opened += 1

    def connection_closed(self) -> None:
        """A client's connection ended."""
        self.connections -= 1

    def connection_refused(self) -> None:
        """A connection was closed at once because there are too many, in all or from its address."""
        self.connections_refused += 1

    def connection_dropped(self, reason: str) -> None:
        """The broker ended a connection; `reason` is one of `DROP_REASONS`."""
        self.connections_dropped[reason] += 1

    # --- export --------------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The scrape's body and content type, in the format that the `Accept` header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Everything as Prometheus families (called by the registry)."""
        yield from self._collect_requests()
        yield from self._collect_topics()
        yield from self._collect_broker()
        yield from _collect_storage(self.sources.storage())
        yield from _collect_compaction(self.sources.compaction())
        for name, value in self.sources.orphans().items():
            yield CounterMetricFamily(f"tidelog_orphan_{name}", f"Orphans: {name}", value=value)
        yield from collect_accounts(self.sources.accounts)
        yield from _collect_object_store(self.sources.object_store())

    def _collect_requests(self) -> Iterable[Metric]:
        label = ["api"]
        latency = HistogramMetricFamily(
            "tidelog_request_seconds", "Time from a whole request to its queued reply", labels=label
        )
        errors = CounterMetricFamily("tidelog_request_errors", "Requests that failed", labels=label)
        received = CounterMetricFamily("tidelog_request_received_bytes", "Bytes of request frames", labels=label)
        sent = CounterMetricFamily("tidelog_request_sent_bytes", "Bytes of response frames", labels=label)
        for api_key, counts in enumerate(self._apis):
            if counts is None:
                continue
            name = [api_name(api_key)]
            total = 0
            buckets = []
            for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), counts.buckets, strict=True):
                total += count
                buckets.append((bound, float(total)))
            latency.add_metric(name, buckets, counts.seconds)
            errors.add_metric(name, counts.errors)
            received.add_metric(name, counts.bytes_in)
            sent.add_metric(name, counts.bytes_out)
        return latency, errors, received, sent

    def produced_bytes(self) -> dict[str, int]:
        """Bytes appended for producers, by topic: of those that exist, and `__other__`."""
        self._forget_topics()
        return {topic: counts.produced_bytes for topic, counts in self._topics.items() if counts.produced_bytes}

    def _forget_topics(self) -> None:
        """Fold the counts of topics that are gone into `__other__`."""
        exists = self.sources.topic_exists
        for topic in [each for each in self._topics if each != OTHER_TOPIC and not exists(each)]:
            gone, other = self._topics.pop(topic), self._topics.setdefault(OTHER_TOPIC, _TopicCounts())
            for name in _TopicCounts.__slots__:
                setattr(other, name, getattr(other, name) + getattr(gone, name))

    def _collect_topics(self) -> Iterable[Metric]:
        self._forget_topics()
        families = []
        for field, text in (
            ("produced_records", "Records appended for producers"),
            ("produced_bytes", "Bytes of record batches appended for producers"),
            ("fetched_records", "Records sent to consumers"),
            ("fetched_bytes", "Bytes of record batches sent to consumers"),
        ):
            family = CounterMetricFamily(f"tidelog_topic_{field}", text, labels=["topic"])
            for topic, counts in self._topics.items():
                family.add_metric([topic], getattr(counts, field))
            families.append(family)
        return families

    def _collect_broker(self) -> Iterable[Metric]:
        sources = self.sources
        yield GaugeMetricFamily("tidelog_connections", "Open client connections", value=self.connections)
        yield CounterMetricFamily("tidelog_connections_opened", "Connections accepted", value=self.connections_opened)
        yield CounterMetricFamily(
            "tidelog_connections_refused", "Connections over the limit", value=self.connections_refused
        )
        dropped = CounterMetricFamily(
            "tidelog_connections_dropped", "Connections ended by the broker, by reason", labels=["reason"]
        )
        for reason, count in self.connections_dropped.items():
            dropped.add_metric([reason], count)
        yield dropped
        yield GaugeMetricFamily(
            "tidelog_requests_in_flight_bytes",
            "Bytes of requests being received or handled",
            value=self.door.in_flight_bytes(),
        )
        yield GaugeMetricFamily(
            "tidelog_responses_unread_bytes", "Bytes of responses clients do not read", value=self.door.unread_bytes()
        )
        yield GaugeMetricFamily("tidelog_tasks", "Tasks of the broker's event loop", value=_tasks())
        partitions = GaugeMetricFamily("tidelog_partitions", "Partitions of this broker by state", labels=["state"])
        for state, count in sources.partitions().items():
            partitions.add_metric([state], count)
        yield partitions
        moves = CounterMetricFamily("tidelog_partition_moves", "Moves of partitions from here", labels=["outcome"])
        for outcome, count in sources.moves().items():
            moves.add_metric([outcome], count)
        yield moves
        hints = CounterMetricFamily(
            "tidelog_move_hints", "Hints between source and target of a move", labels=["outcome"]
        )
        for outcome, count in sources.hints().items():
            hints.add_metric([outcome], count)
        yield hints
        salvages = CounterMetricFamily(
            "tidelog_salvages", "Dead brokers' WALs recovered from the bucket here", labels=["outcome"]
        )
        for outcome, count in sources.salvages().items():
            salvages.add_metric([outcome], count)
        yield salvages
        leaderless = GaugeMetricFamily(
            "tidelog_partitions_leaderless", "Partitions in the cluster without a living broker", labels=["state"]
        )
        for state, count in sources.leaderless().items():
            leaderless.add_metric([state], count)
        yield leaderless
        sessions, members, evicted = sources.fetch_sessions()
        yield GaugeMetricFamily("tidelog_fetch_sessions", "Fetch sessions (KIP-227)", value=sessions)
        yield GaugeMetricFamily("tidelog_fetch_session_partitions", "Partitions in fetch sessions", value=members)
        yield CounterMetricFamily(
            "tidelog_fetch_sessions_evicted", "Fetch sessions pushed out by others", value=evicted
        )
        yield from _collect_balance(sources.balance())
        yield GaugeMetricFamily("tidelog_groups", "Groups coordinated by this broker", value=sources.groups())
        yield GaugeMetricFamily("tidelog_image_version", "Local metadata version", value=sources.image_version())
        if sources.controller_lag is not None:
            yield GaugeMetricFamily(
                "tidelog_image_lag_versions", "Metadata versions behind the controller", value=sources.controller_lag()
            )


def _collect_balance(told: HeartbeatReply | None) -> Iterable[Metric]:
    """The same on every broker; absent while no controller is active."""
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


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # rendered outside of a loop
        return 0


def _collect_storage(stats: Mapping[str, int | float]) -> Iterable[Metric]:
    for name, value in stats.items():
        text = f"Storage: {name.replace('_', ' ')}"
        if name in STORAGE_COUNTERS:
            yield CounterMetricFamily(f"tidelog_storage_{name}", text, value=value)
        else:
            yield GaugeMetricFamily(f"tidelog_storage_{name}", text, value=value)


def _collect_compaction(figures: Mapping[str, int]) -> Iterable[Metric]:
    for name, value in figures.items():
        kind = GaugeMetricFamily if name in COMPACTION_GAUGES else CounterMetricFamily
        yield kind(f"tidelog_compaction_{name}", f"Compaction: {name.replace('_', ' ')}", value=value)


def _collect_object_store(operations: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
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
