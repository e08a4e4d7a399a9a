"""The table of topic configs: Kafka's names, types, defaults and limits, and the sources of a value.

A config's value for a topic is found in layers, as in Kafka (KIP-226): the topic's own override, then this broker's
dynamic value, then the cluster-wide dynamic value (both under the *broker key*: `log.retention.ms` for `retention.ms`),
then the broker's configuration file, then Kafka's default. `resolve` does this for one config and returns every layer
that has a value (the synonyms of DescribeConfigs); `log_config` does it for the configs of a partition log.

Invariant: `log_config` converts everything that `validate` accepted into a `LogConfig` without an error.

Entry: `validate` for a client's changes, `log_config` for a partition that opens, `resolve` for DescribeConfigs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from tidelog.broker.settings import KafkaSettings, LogSettings
from tidelog.runtime.errors import ConfigError
from tidelog.stream.log_config import LogConfig

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
MESSAGE_MAX_BYTES = 1_048_588
"""Kafka's default of message.max.bytes."""

NO_OVERRIDES: Mapping[str, str] = {}

INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state"})
"""Topics that are internal by name, whoever creates them."""


class ConfigType(IntEnum):
    """Kafka's config types (int8 in DescribeConfigs v3+)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class ConfigSource(IntEnum):
    """The source of a value (int8 in DescribeConfigs)."""

    DYNAMIC_TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    DYNAMIC_BROKER_LOGGER = 6
    DYNAMIC_CLIENT_METRICS = 7
    DYNAMIC_GROUP = 8


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """One row of the table."""

    name: str
    type: ConfigType
    default: str
    broker_key: str
    """The broker's config of the same meaning, which is the default of the topic config."""
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    """Allowed values; for a list, allowed elements."""
    also: tuple[float, ...] = ()
    """Numbers allowed outside `minimum`–`maximum`."""
    elements: re.Pattern[str] | None = None
    """What every element of a list must be, unless '*' is the only one."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The broker's own layers, by broker key."""

    static: Mapping[str, str] = field(default_factory=dict)
    cluster: Mapping[str, str] = field(default_factory=dict)
    broker: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Synonym:
    """One layer that has a value."""

    name: str
    value: str
    source: ConfigSource


_B, _S, _I, _L, _D, _LIST = (
    ConfigType.BOOLEAN,
    ConfigType.STRING,
    ConfigType.INT,
    ConfigType.LONG,
    ConfigType.DOUBLE,
    ConfigType.LIST,
)
_NO_EFFECT = " Accepted for compatibility; Tidelog has no such files."
_CODECS = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
_MAX = str(INT64_MAX)
_REPLICAS = re.compile(r"[0-9]+:[0-9]+")

_ROWS = (
    TopicConfig(
        "cleanup.policy", _LIST, "delete", "log.cleanup.policy",
        "What happens to old data: 'delete' drops segments past retention, 'compact' keeps the newest record of a key;"
        " an empty list keeps everything.",
        choices=("compact", "delete"),
    ),
    TopicConfig(
        "compression.gzip.level", _I, "-1", "compression.gzip.level", "Level of gzip when the broker recompresses.",
        1, 9, also=(-1,),
    ),
    TopicConfig(
        "compression.lz4.level", _I, "9", "compression.lz4.level", "Level of lz4 when the broker recompresses.", 1, 17
    ),
    TopicConfig(
        "compression.type", _S, "producer", "compression.type",
        "'producer' keeps batches as they come; any other codec repacks the batches that differ.",
        choices=_CODECS,
    ),
    TopicConfig(
        "compression.zstd.level", _I, "3", "compression.zstd.level", "Level of zstd when the broker recompresses.",
        -131_072, 22,
    ),
    TopicConfig(
        "delete.retention.ms", _L, "86400000", "log.cleaner.delete.retention.ms",
        "How long tombstones of a compacted topic stay (ms).", 0,
    ),
    TopicConfig(
        "file.delete.delay.ms", _L, "60000", "log.segment.delete.delay.ms",
        "Delay before a file is deleted (ms)." + _NO_EFFECT, 0,
    ),
    TopicConfig(
        "flush.messages", _L, _MAX, "log.flush.interval.messages",
        "Records between two syncs." + _NO_EFFECT + " See wal.flush.", 1,
    ),
    TopicConfig(
        "flush.ms", _L, _MAX, "log.flush.interval.ms", "Time between two syncs (ms)." + _NO_EFFECT + " See wal.flush.",
        0,
    ),
    TopicConfig(
        "follower.replication.throttled.replicas", _LIST, "", "follower.replication.throttled.replicas",
        "Replicas to throttle on followers: a list of PARTITION:BROKER, or '*'. Accepted for compatibility.",
        elements=_REPLICAS,
    ),
    TopicConfig(
        "index.interval.bytes", _I, "4096", "log.index.interval.bytes", "Bytes between two entries of the time index.",
        0,
    ),
    TopicConfig(
        "leader.replication.throttled.replicas", _LIST, "", "leader.replication.throttled.replicas",
        "Replicas to throttle on leaders: a list of PARTITION:BROKER, or '*'. Accepted for compatibility.",
        elements=_REPLICAS,
    ),
    TopicConfig(
        "local.retention.bytes", _L, "-2", "log.local.retention.bytes",
        "Local bytes of a tiered topic. Accepted for compatibility: all data lies in the bucket.", -2,
    ),
    TopicConfig(
        "local.retention.ms", _L, "-2", "log.local.retention.ms",
        "Local time of a tiered topic (ms). Accepted for compatibility: all data lies in the bucket.", -2,
    ),
    TopicConfig(
        "max.compaction.lag.ms", _L, _MAX, "log.cleaner.max.compaction.lag.ms",
        "Longest time a record may stay uncompacted (ms).", 1,
    ),
    TopicConfig(
        "max.message.bytes", _I, str(MESSAGE_MAX_BYTES), "message.max.bytes",
        "Largest record batch accepted (bytes, after compression).", 0,
    ),
    TopicConfig(
        "message.timestamp.after.max.ms", _L, "3600000", "log.message.timestamp.after.max.ms",
        "How far a record's timestamp may lie after the broker's clock (ms).", 0,
    ),
    TopicConfig(
        "message.timestamp.before.max.ms", _L, _MAX, "log.message.timestamp.before.max.ms",
        "How far a record's timestamp may lie before the broker's clock (ms).", 0,
    ),
    TopicConfig(
        "message.timestamp.type", _S, "CreateTime", "log.message.timestamp.type",
        "Whether a record's timestamp is the producer's or the time of the append.",
        choices=("CreateTime", "LogAppendTime"),
    ),
    TopicConfig(
        "min.cleanable.dirty.ratio", _D, "0.5", "log.cleaner.min.cleanable.ratio",
        "Share of uncompacted data that starts a compaction.", 0, 1,
    ),
    TopicConfig(
        "min.compaction.lag.ms", _L, "0", "log.cleaner.min.compaction.lag.ms",
        "Shortest time a record stays uncompacted (ms).", 0,
    ),
    TopicConfig(
        "min.insync.replicas", _I, "1", "min.insync.replicas",
        "Replicas that must be in sync for a write of acks=all, if the replica set has several. How many must have it"
        " is the set's policy.", 1,
    ),
    TopicConfig("preallocate", _B, "false", "log.preallocate", "Preallocate segment files." + _NO_EFFECT),
    TopicConfig(
        "remote.log.copy.disable", _B, "false", "remote.log.copy.disable",
        "Stop copying of a tiered topic. Accepted for compatibility: all data lies in the bucket.",
        choices=("false",),
    ),
    TopicConfig(
        "remote.log.delete.on.disable", _B, "false", "remote.log.delete.on.disable",
        "Delete remote data when tiering is turned off. Accepted for compatibility.",
    ),
    TopicConfig(
        "remote.storage.enable", _B, "false", "remote.storage.enable",
        "Kafka's tiered storage. Every topic's data lies in the bucket already, so it stays false.",
        choices=("false",),
    ),
    TopicConfig(
        "retention.bytes", _L, "-1", "log.retention.bytes",
        "Oldest segments of a partition are dropped beyond this size (bytes); -1: no limit.", -1,
    ),
    TopicConfig(
        "retention.ms", _L, "604800000", "log.retention.ms",
        "Segments whose newest record is older are dropped (ms); -1: no limit.", -1,
    ),
    TopicConfig(
        "segment.bytes", _I, "1073741824", "log.segment.bytes",
        "Size at which a new segment begins: the grain of retention (bytes).", 14,
    ),
    TopicConfig(
        "segment.index.bytes", _I, "10485760", "log.index.size.max.bytes", "Size of an index file." + _NO_EFFECT, 4
    ),
    TopicConfig(
        "segment.jitter.ms", _L, "0", "log.roll.jitter.ms",
        "Random time taken off segment.ms (ms). Accepted for compatibility.", 0,
    ),
    TopicConfig(
        "segment.ms", _L, "604800000", "log.roll.ms", "Age at which a new segment begins (ms).", 1
    ),
    TopicConfig(
        "unclean.leader.election.enable", _B, "false", "unclean.leader.election.enable",
        "Whether a replica that is not in sync may become leader. Elections belong to the replica set.",
    ),
)  # fmt: skip

TOPIC_CONFIGS: dict[str, TopicConfig] = {row.name: row for row in _ROWS}
"""Every topic config by its name, in the order of names."""

BROKER_KEYS: dict[str, TopicConfig] = {row.broker_key: row for row in _ROWS}
"""The same rows by broker key: the broker configs that may change at run time."""


NOT_SERVED = frozenset({
    "file.delete.delay.ms", "flush.messages", "flush.ms",
    "follower.replication.throttled.replicas", "leader.replication.throttled.replicas", "local.retention.bytes",
    "local.retention.ms", "preallocate", "remote.log.delete.on.disable", "segment.index.bytes", "segment.jitter.ms",
    "unclean.leader.election.enable",
})  # fmt: skip
"""What is kept with a topic and has no effect."""


def warning(overrides: Mapping[str, str]) -> str | None:
    """Tell which of a topic's overrides have no effect; None if all have, or are the defaults."""
    idle = [
        f"{name}={value}"
        for name, value in sorted(overrides.items())
        if name in NOT_SERVED and value != TOPIC_CONFIGS[name].default
    ]
    return f"accepted, but not served yet: {', '.join(idle)}" if idle else None


MAX_COMPARED_CHARS = 200
"""Of a name that a similar one is looked for: to compare takes time with its length, and no name is as long."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None."""
    if len(name) > MAX_COMPARED_CHARS:
        return None
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_key(name: str, known: Iterable[str], what: str = "topic config") -> ConfigError:
    """Return the error for an unknown config, with the nearest name."""
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else "DescribeConfigs lists what exists"
    return ConfigError(f"unknown {what} {name!r}", hint=hint)


def split_list(value: str) -> list[str]:
    """Return the elements of a LIST value."""
    return [part.strip() for part in value.split(",") if part.strip()]


def parse(row: TopicConfig, value: str, name: str = "") -> bool | int | float | str | list[str]:
    """Return the typed value of one config. Raises `ConfigError` naming it (or `name`), the value and the allowed
    ones."""
    text = value.strip()
    label = name or row.name
    try:
        parsed = _PARSERS[row.type](text)
    except ValueError:
        raise ConfigError(f"invalid value {value!r} for {label}: {_EXPECTED[row.type]} is expected") from None
    if isinstance(parsed, (int, float)) and not isinstance(parsed, bool):
        _check_range(row, label, parsed)
    if row.choices:
        elements = split_list(text) if row.type is ConfigType.LIST else [text.lower() if row.type is _B else text]
        is_blank_list = not elements and text != ""
        if is_blank_list or any(element not in row.choices for element in elements):
            raise ConfigError(f"invalid value {value!r} for {label}: allowed are {', '.join(row.choices)}. {row.doc}")
    if row.elements and text != "*" and not all(map(row.elements.fullmatch, split_list(text))):
        raise ConfigError(f"invalid value {value!r} for {label}. {row.doc}")
    return parsed


def _check_range(row: TopicConfig, label: str, number: float) -> None:
    if number in row.also:
        return
    if row.minimum is not None and number < row.minimum:
        raise ConfigError(f"invalid value {number} for {label}: at least {row.minimum} is expected")
    if row.maximum is not None and not number <= row.maximum:
        raise ConfigError(f"invalid value {number} for {label}: at most {row.maximum} is expected")


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise ValueError(text)
    return lowered == "true"


def _integer(limit: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.lstrip("+-").isascii() or not text.lstrip("+-").isdigit():
            raise ValueError(text)
        number = int(text)
        if not -limit - 1 <= number <= limit:
            raise ValueError(text)
        return number

    return read


_PARSERS: dict[ConfigType, Callable[[str], bool | int | float | str | list[str]]] = {
    ConfigType.BOOLEAN: _boolean,
    ConfigType.STRING: str,
    ConfigType.INT: _integer(INT32_MAX),
    ConfigType.LONG: _integer(INT64_MAX),
    ConfigType.DOUBLE: float,
    ConfigType.LIST: split_list,
}
_EXPECTED: dict[ConfigType, str] = {
    ConfigType.BOOLEAN: "true or false",
    ConfigType.STRING: "a string",
    ConfigType.INT: "a 32-bit integer",
    ConfigType.LONG: "a 64-bit integer",
    ConfigType.DOUBLE: "a number",
    ConfigType.LIST: "a comma-separated list",
}


def validate(overrides: Mapping[str, str | None]) -> dict[str, str]:
    """Check a topic's overrides as a whole and return them with blanks trimmed.

    Raises `ConfigError` for an unknown name (with the nearest one), a null, a value outside its range, and values that
    contradict each other.
    """
    nulls = sorted(name for name, value in overrides.items() if value is None)
    if nulls:
        raise ConfigError(f"null value not supported for topic configs: {', '.join(nulls)}")
    checked: dict[str, str] = {}
    for name, value in overrides.items():
        row = TOPIC_CONFIGS.get(name)
        if row is None:
            raise unknown_key(name, TOPIC_CONFIGS)
        assert value is not None
        parse(row, value)
        checked[name] = value.strip()
    low = int(checked.get("min.compaction.lag.ms", TOPIC_CONFIGS["min.compaction.lag.ms"].default))
    high = int(checked.get("max.compaction.lag.ms", TOPIC_CONFIGS["max.compaction.lag.ms"].default))
    if low > high:
        raise ConfigError(f"min.compaction.lag.ms ({low}) is larger than max.compaction.lag.ms ({high})")
    return checked


def static_layer(kafka: KafkaSettings, log: LogSettings) -> dict[str, str]:
    """Return the values of sections `[kafka]` and `[log]`, by broker key; Kafka's defaults are left out."""
    values = {
        "log.retention.ms": log.retention_ms,
        "log.retention.bytes": log.retention_bytes,
        "log.segment.bytes": log.segment_bytes,
        "log.roll.ms": log.segment_ms,
        "log.message.timestamp.type": log.timestamp_type,
        "message.max.bytes": kafka.message_max_bytes,
    }
    return {key: str(value) for key, value in values.items() if str(value) != BROKER_KEYS[key].default}


def resolve(row: TopicConfig, overrides: Mapping[str, str], layers: Layers) -> list[Synonym]:
    """Return all layers that have a value of this config, the effective one first; never empty."""
    found = []
    if row.name in overrides:
        found.append(Synonym(row.name, overrides[row.name], ConfigSource.DYNAMIC_TOPIC))
    key = row.broker_key
    for layer, source in (
        (layers.broker, ConfigSource.DYNAMIC_BROKER),
        (layers.cluster, ConfigSource.DYNAMIC_DEFAULT_BROKER),
        (layers.static, ConfigSource.STATIC_BROKER),
    ):
        if key in layer:
            found.append(Synonym(key, layer[key], source))
    found.append(Synonym(key, row.default, ConfigSource.DEFAULT))
    return found


def effective(name: str, overrides: Mapping[str, str], layers: Layers) -> str:
    """Return the effective value of one config for a topic."""
    return resolve(TOPIC_CONFIGS[name], overrides, layers)[0].value


def log_config(
    overrides: Mapping[str, str],
    kafka: KafkaSettings,
    defaults: LogSettings,
    *,
    cluster: Mapping[str, str] = NO_OVERRIDES,
    broker: Mapping[str, str] = NO_OVERRIDES,
) -> LogConfig:
    """Return the configuration of a partition log of a topic with these overrides.

    `cluster` and `broker` are the dynamic layers of the image (`image.configs`), by broker key. Names that this version
    does not know are ignored. Raises `ConfigError` if a value does not parse (never after `validate`).
    """
    layers = Layers(static_layer(kafka, defaults), cluster, broker)

    def text(name: str) -> str:
        return effective(name, overrides, layers).strip()

    def number(name: str) -> int:
        parsed = parse(TOPIC_CONFIGS[name], text(name))
        assert isinstance(parsed, int), name
        return parsed

    codec = text("compression.type")
    level = f"compression.{codec}.level"
    return LogConfig(
        retention_ms=number("retention.ms"),
        retention_bytes=number("retention.bytes"),
        segment_bytes=number("segment.bytes"),
        segment_ms=number("segment.ms"),
        max_message_bytes=number("max.message.bytes"),
        timestamp_type=text("message.timestamp.type"),
        cleanup_policy=",".join(split_list(text("cleanup.policy"))),
        message_timestamp_before_max_ms=number("message.timestamp.before.max.ms"),
        message_timestamp_after_max_ms=number("message.timestamp.after.max.ms"),
        producer_id_expiration_ms=defaults.producer_id_expiration_ms,
        producers_per_piece=defaults.producers_per_piece,
        min_cleanable_dirty_ratio=float(text("min.cleanable.dirty.ratio")),
        min_compaction_lag_ms=number("min.compaction.lag.ms"),
        max_compaction_lag_ms=number("max.compaction.lag.ms"),
        delete_retention_ms=number("delete.retention.ms"),
        compression_type=codec,
        compression_level=number(level) if level in TOPIC_CONFIGS else None,
        index_interval_bytes=number("index.interval.bytes"),
        min_insync_replicas=number("min.insync.replicas"),
    )
