"""Client telemetry (KIP-714): which metrics a client is to send and how often, and which pushes are taken.

Subscriptions are configs of the cluster (`tidelog.broker.kafka.client_subscriptions`). A client is told the union of
the metrics of the subscriptions that match it, and the smallest of their intervals. The number of that (the
subscription id) is the same on every broker, so a client that pushes to another broker need not ask again.

A client that asks or pushes before its interval is over is refused, but for its first push after it has asked, its last
one (`terminating`), and a question after an error that a new answer mends. After the last push nothing more is taken.

Bounds: clients that are remembered (`MAX_CLIENTS`, the least recently used goes), bytes of a push, and what they unpack
to (`MAX_UNPACKED_BYTES`), before they are decoded.

Sans-I/O: `now` is monotonic seconds. Entry: `ClientTelemetry.subscribe`, `ClientTelemetry.push`.
"""

from __future__ import annotations

import base64
import math
import random
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import crc32c
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidelog.batch.compression import Compression, decompress
from tidelog.batch.errors import CorruptRecord, RecordTooLarge
from tidelog.broker.kafka.errors import (
    INVALID_RECORD,
    INVALID_REQUEST,
    NONE,
    TELEMETRY_TOO_LARGE,
    THROTTLING_QUOTA_EXCEEDED,
    UNKNOWN_SUBSCRIPTION_ID,
    UNSUPPORTED_COMPRESSION_TYPE,
)
from tidelog.broker.kafka.wire.messages.telemetry import PushTelemetryRequest
from tidelog.broker.telemetry.client_metrics import (
    MAX_LABEL_CHARS,
    MAX_SERIES,
    ClientLabels,
    ClientMetrics,
    InvalidTelemetry,
)

DEFAULT_INTERVAL_MS: Final = 300_000
"""How often a client without a subscription asks again (Kafka's value)."""
ALL_METRICS: Final = "*"
ACCEPTED_CODECS: Final = (Compression.ZSTD, Compression.LZ4, Compression.GZIP, Compression.SNAPPY)
"""In the order of preference (Kafka's)."""
MAX_CLIENTS: Final = 16_384
MAX_UNPACKED_BYTES: Final = 2 << 20
"""Decoded, tiny elements take some thirty times as much, until the push is answered."""
MAX_PREFIXES: Final = 1_000
"""A client that would be told to send the metrics of more prefixes is told to send all: each metric that it pushes is
compared with all of them."""
KEPT_INTERVALS: Final = 3
"""A series outlives its last push for so many intervals."""
OUTCOMES: Final = {
    NONE: "taken",
    THROTTLING_QUOTA_EXCEEDED: "too_early",
    UNKNOWN_SUBSCRIPTION_ID: "unknown_subscription",
    UNSUPPORTED_COMPRESSION_TYPE: "unsupported_compression",
    TELEMETRY_TOO_LARGE: "too_large",
    INVALID_RECORD: "invalid",
    INVALID_REQUEST: "refused",
}
_MENDED_BY_ASKING = (UNKNOWN_SUBSCRIPTION_ID, UNSUPPORTED_COMPRESSION_TYPE)


@dataclass(frozen=True, slots=True)
class TelemetrySubscription:
    """Which metrics the clients that match are to send, and how often."""

    metrics: tuple[str, ...]
    interval_ms: int
    match: Mapping[str, Any]
    """Patterns of RE2 by what they are for, one of `named_configs.MATCH_KEYS`."""

    def matches(self, facts: Mapping[str, str]) -> bool:
        """Whether all patterns match the whole of what they are for."""
        return all(pattern.fullmatch(facts.get(key, "")) is not None for key, pattern in self.match.items())


class TelemetryInstance:
    """What a broker knows of one client."""

    __slots__ = (
        "asked_at", "has_asked", "id", "interval_ms", "last_error", "metrics", "pushed_at", "subscription_id",
        "subscriptions", "terminated",
    )  # fmt: skip

    def __init__(self, instance_id: uuid.UUID) -> None:
        self.id = instance_id
        self.metrics: tuple[str, ...] = ()
        """Prefixes of the names that it is to send; an empty one for all."""
        self.interval_ms = DEFAULT_INTERVAL_MS
        self.subscription_id = 0
        self.subscriptions: tuple[TelemetrySubscription, ...] | None = None
        """Those that the fields above were made of."""
        self.asked_at = self.pushed_at = -math.inf
        self.has_asked = False
        """Whether it has asked since it pushed."""
        self.last_error = NONE
        self.terminated = False

    def follow(self, subscriptions: tuple[TelemetrySubscription, ...], facts: Mapping[str, str]) -> None:
        """Apply the subscriptions that there are now. A client with another one may ask and push at once."""
        matching = [one for one in subscriptions if one.matches(facts)]
        wanted = {metric for one in matching for metric in one.metrics}
        is_all = ALL_METRICS in wanted or len(wanted) > MAX_PREFIXES
        self.metrics = ("",) if is_all else tuple(sorted(wanted))
        self.interval_ms = min((one.interval_ms for one in matching), default=DEFAULT_INTERVAL_MS)
        told = ",".join((*self.metrics, str(self.interval_ms))).encode()
        number = int.from_bytes(crc32c.crc32c(told + self.id.bytes).to_bytes(4, "big"), "big", signed=True)
        if number != self.subscription_id:
            self.subscription_id = number
            self.asked_at = self.pushed_at = -math.inf
        self.subscriptions = subscriptions

    def may_ask(self, now: float) -> bool:
        """Whether a question is not too early; it counts as asked if so."""
        since = now - max(self.asked_at, self.pushed_at)
        if since < self.interval_ms / 1000 and self.last_error not in _MENDED_BY_ASKING:
            return False
        self.asked_at, self.has_asked = now, True
        return True

    def may_push(self, now: float) -> bool:
        """Whether a push is not too early; it counts as pushed if so."""
        if not self.has_asked and now - self.pushed_at < self.interval_ms / 1000:
            return False
        self.pushed_at, self.has_asked = now, False
        return True

    def wants(self, metric: str) -> bool:
        """Whether the client was asked for a metric."""
        return metric.startswith(self.metrics) if self.metrics else False


class ClientTelemetry:
    """The clients' instances, and what they pushed."""

    def __init__(
        self,
        max_bytes: int,
        ids: random.Random,
        current: Callable[[], tuple[TelemetrySubscription, ...]],
        max_series: int = MAX_SERIES,
    ) -> None:
        """`max_bytes`: the largest payload of a push, as it is sent. `current`: the subscriptions of the cluster, the
        same object until one changes."""
        self.max_bytes = max_bytes
        self._ids = ids
        self._current = current
        self._metrics = ClientMetrics(max_series)
        self._instances: dict[uuid.UUID, TelemetryInstance] = {}
        self._pushes = dict.fromkeys(OUTCOMES.values(), 0)

    @property
    def is_wanted(self) -> bool:
        """Whether there is a subscription."""
        return bool(self._current())

    def subscribe(self, instance_id: uuid.UUID | None, facts: Mapping[str, str], now: float) -> TelemetryInstance | int:
        """Return what a client is to send, with a new id if it has none; or an error code.

        `facts`: what subscriptions may select it by, as in `named_configs.MATCH_KEYS`, but for its instance id.
        """
        if instance_id is None:
            instance_id = uuid.UUID(bytes=self._ids.randbytes(16), version=4)
        instance = self._instance(instance_id, facts)
        if not instance.may_ask(now):
            return THROTTLING_QUOTA_EXCEEDED
        instance.last_error = NONE
        return instance

    def push(self, request: PushTelemetryRequest, facts: Mapping[str, str], now: float) -> int:
        """Take what a client pushed; return an error code."""
        code = self._push(request, facts, now)
        self._pushes[OUTCOMES[code]] += 1
        return code

    def _push(self, request: PushTelemetryRequest, facts: Mapping[str, str], now: float) -> int:
        if request.client_instance_id is None:
            return INVALID_REQUEST
        instance = self._instance(request.client_instance_id, facts)
        if instance.terminated:
            return INVALID_REQUEST
        if not instance.may_push(now) and not request.terminating:
            return THROTTLING_QUOTA_EXCEEDED
        instance.last_error = self._check(instance, request)
        if instance.last_error != NONE:
            return instance.last_error
        instance.terminated = request.terminating
        client = _labels(instance.id, facts)
        if request.metrics:
            kept_s = KEPT_INTERVALS * instance.interval_ms / 1000
            try:
                unpacked = decompress(memoryview(request.metrics), request.compression_type, MAX_UNPACKED_BYTES)
                self._metrics.take(client, bytes(unpacked), instance.wants, now, kept_s)
            except RecordTooLarge:
                instance.last_error = TELEMETRY_TOO_LARGE
            except (CorruptRecord, InvalidTelemetry):
                instance.last_error = INVALID_RECORD
        if instance.terminated:
            self._metrics.terminated(client, now)
        return instance.last_error

    def _check(self, instance: TelemetryInstance, request: PushTelemetryRequest) -> int:
        if request.subscription_id != instance.subscription_id:
            return UNKNOWN_SUBSCRIPTION_ID
        if request.compression_type not in (Compression.NONE, *ACCEPTED_CODECS):
            return UNSUPPORTED_COMPRESSION_TYPE
        if len(request.metrics) > self.max_bytes:
            return TELEMETRY_TOO_LARGE
        return NONE

    def families(self, now: float) -> Iterable[Metric]:
        """Return the clients' metrics, and those of this exchange, as Prometheus families."""
        yield from self._metrics.families(now)
        yield GaugeMetricFamily(
            "tidelog_client_telemetry_instances", "Clients that asked or pushed", value=len(self._instances)
        )
        pushes = CounterMetricFamily("tidelog_client_telemetry_pushes", "Pushes of clients", labels=["outcome"])
        for outcome, count in self._pushes.items():
            pushes.add_metric([outcome], count)
        yield pushes

    # --- instances -------------------------------------------------------------------------------------------------

    def _instance(self, instance_id: uuid.UUID, facts: Mapping[str, str]) -> TelemetryInstance:
        instance = self._instances.pop(instance_id, None) or TelemetryInstance(instance_id)
        self._instances[instance_id] = instance
        if len(self._instances) > MAX_CLIENTS:
            del self._instances[next(iter(self._instances))]
        subscriptions = self._current()
        if instance.subscriptions is not subscriptions:
            instance.follow(subscriptions, {**facts, "client_instance_id": instance_text(instance_id)})
        return instance


def instance_text(instance_id: uuid.UUID) -> str:
    """Return an instance id as Kafka's clients print it."""
    return base64.urlsafe_b64encode(instance_id.bytes).rstrip(b"=").decode()


def _labels(instance_id: uuid.UUID, facts: Mapping[str, str]) -> ClientLabels:
    return ClientLabels(
        instance_text(instance_id),
        facts.get("client_id", "")[:MAX_LABEL_CHARS],
        facts.get("client_software_name", "")[:MAX_LABEL_CHARS],
        facts.get("client_software_version", "")[:MAX_LABEL_CHARS],
    )
