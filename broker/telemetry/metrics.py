"""The broker's counters and their export to Prometheus. Every name, unit and label is in docs/metrics.md.

Counting happens on the request path, so it is a few additions to plain slots; prometheus-client's objects are built
only when somebody scrapes. What other parts count already (storage, object store, partitions, controller client) they
tell at the scrape through the registry (`tidelog.broker.telemetry.registry`).

Invariants: a counter never decreases during the life of the process; at most `MAX_TOPICS` topics have series of their
own, the others are summed under the topic `__other__`.

Entry: `Metrics`.
"""

from __future__ import annotations

import bisect
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kio.schema.errors import ErrorCode
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tidelog.broker.telemetry.load import PartitionLoadMeter
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.runtime.tasks import count_tasks
from tidelog.runtime.version import VERSION

LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the latency buckets in seconds: from a cached Metadata to a long poll."""
MAX_TOPICS = 1_000
"""Maximum number of topics with their own series; four series each."""
OTHER_TOPIC = "__other__"
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
TROUBLE = (-1, 2, 7, 19, 20, 56)
"""Error codes of partitions that mean trouble: UNKNOWN_SERVER_ERROR, CORRUPT_MESSAGE, REQUEST_TIMED_OUT,
NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND, KAFKA_STORAGE_ERROR."""
_API_KEYS_WITH_ERRORS = (0, 1)
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
    69: "ConsumerGroupDescribe", 71: "GetTelemetrySubscriptions", 72: "PushTelemetry", 75: "DescribeTopicPartitions",
}  # fmt: skip


def api_name(api_key: int) -> str:
    """The name of an API, or `Api<key>`."""
    return API_NAMES.get(api_key, f"Api{api_key}")


def error_name(code: int) -> str:
    """Kafka's name of an error code, as NOT_LEADER_OR_FOLLOWER; `ERROR_<code>` of one that it does not know."""
    try:
        return str(ErrorCode(code).name).upper()
    except ValueError:
        return f"ERROR_{code}"


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


def _all_exist(_topic: str) -> bool:
    return True


class Metrics(Collector):
    """The broker's counters. All methods are called on the event loop's thread."""

    def __init__(
        self,
        parts: PartRegistry | None = None,
        *,
        process: bool = True,
        load: PartitionLoadMeter | None = None,
        topic_exists: Callable[[str], bool] = _all_exist,
    ) -> None:
        """`parts` tell their own figures at each scrape. `topic_exists`: whether a topic (still) exists; the series of
        others are folded into `__other__`. `process=False` leaves out memory, CPU and garbage-collector series.
        """
        self._parts = parts or PartRegistry()
        self._topic_exists = topic_exists
        self.connections = 0
        self.connections_opened = 0
        self.connections_refused = 0
        self.connections_dropped: dict[str, int] = dict.fromkeys(DROP_REASONS, 0)
        self._partition_errors = Counter(dict.fromkeys(itertools.product(_API_KEYS_WITH_ERRORS, TROUBLE), 0))
        """By API key and error code. Those of `TROUBLE` are there from the start: one that begins with 1 is no increase
        to Prometheus."""
        self.load = load or PartitionLoadMeter()
        """The load of each partition, for the controllers."""
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
        """Count one request: its API key, seconds from complete frame to queued response, and bytes of both frames."""
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

    def partition_error(self, api_key: int, code: int) -> None:
        """Count an error of one partition in an answered request; `code` is Kafka's, not 0."""
        self._partition_errors[api_key, code] += 1

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
        """Count an accepted connection."""
        self.connections += 1
        self.connections_opened += 1

    def connection_closed(self) -> None:
        """Count a closed connection."""
        self.connections -= 1

    def connection_refused(self) -> None:
        """Count a connection refused because of the limits in total or per address."""
        self.connections_refused += 1

    def connection_dropped(self, reason: str) -> None:
        """Count a connection closed by the broker; `reason` is one of `DROP_REASONS`."""
        self.connections_dropped[reason] += 1

    # --- export --------------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return body and content type of a scrape, in the format selected by the `Accept` header.

        A header that does not parse selects the text format.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # of a version that is none
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all Prometheus families (called by the registry)."""
        yield from self._collect_requests()
        yield from self._collect_topics()
        yield from self._collect_connections()
        build = GaugeMetricFamily("tidelog_build_info", "Version of Tidelog and Python", labels=["version", "python"])
        build.add_metric([VERSION, platform.python_version()], 1)
        yield build
        yield GaugeMetricFamily("tidelog_tasks", "Tasks of the broker's event loop", value=count_tasks())
        yield from self._parts.figures()

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
        partitions = CounterMetricFamily(
            "tidelog_partition_errors", "Errors of partitions in answered requests", labels=["api", "error"]
        )
        for (api_key, code), count in self._partition_errors.items():
            partitions.add_metric([api_name(api_key), error_name(code)], count)
        return latency, errors, received, sent, partitions

    def totals(self) -> dict[str, float]:
        """Return sums over topics and APIs since the start, for the broker's history; none ever decreases."""
        topics = self._topics.values()
        produce, fetch = self._apis[0] or _ApiCounts(), self._apis[1] or _ApiCounts()
        return {
            **{name: sum(getattr(counts, name) for counts in topics) for name in _TopicCounts.__slots__},
            "produce_requests": produce.count,
            "produce_seconds": produce.seconds,
            "fetch_requests": fetch.count,
            "request_errors": sum(counts.errors for counts in self._apis if counts is not None),
        }

    def produced_bytes(self) -> dict[str, int]:
        """Bytes appended for producers, by existing topic, and `__other__`."""
        self._forget_topics()
        return {topic: counts.produced_bytes for topic, counts in self._topics.items() if counts.produced_bytes}

    def _forget_topics(self) -> None:
        """Fold the counts of topics that are gone into `__other__`."""
        exists = self._topic_exists
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

    def _collect_connections(self) -> Iterable[Metric]:
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
