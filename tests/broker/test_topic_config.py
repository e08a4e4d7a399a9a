"""The table of topic configs, its layers, and what a partition log gets of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.partitions.topic_config import (
    BROKER_KEYS,
    TOPIC_CONFIGS,
    ConfigSource,
    ConfigType,
    Layers,
    log_config,
    nearest,
    parse,
    resolve,
    static_layer,
    validate,
    warning,
)
from tidelog.broker.settings import KafkaSettings, LogSettings
from tidelog.runtime.errors import ConfigError
from tidelog.stream.log_config import LogConfig


def test_every_default_is_a_legal_value_and_every_row_is_documented() -> None:
    for row in TOPIC_CONFIGS.values():
        parse(row, row.default)
        assert row.doc.endswith(".")
    assert list(TOPIC_CONFIGS) == sorted(TOPIC_CONFIGS)
    assert len(BROKER_KEYS) == len(TOPIC_CONFIGS)


def test_without_overrides_the_log_gets_kafkas_defaults() -> None:
    assert log_config({}, KafkaSettings(), LogSettings()) == LogConfig()


def test_overrides_reach_the_log() -> None:
    got = log_config(
        validate(
            {
                "retention.ms": "-1",
                "retention.bytes": "10",
                "segment.bytes": "100",
                "segment.ms": "5",
                "max.message.bytes": "7",
                "message.timestamp.type": "LogAppendTime",
                "cleanup.policy": " compact , delete ",
                "message.timestamp.before.max.ms": "1",
                "message.timestamp.after.max.ms": "2",
                "compression.type": "zstd",
                "compression.zstd.level": "-7",
                "compression.gzip.level": "9",
                "index.interval.bytes": "3",
                "min.insync.replicas": "2",
            }
        ),
        KafkaSettings(),
        LogSettings(producer_id_expiration_ms=77),
    )
    assert got == LogConfig(
        retention_ms=-1,
        retention_bytes=10,
        segment_bytes=100,
        segment_ms=5,
        max_message_bytes=7,
        timestamp_type="LogAppendTime",
        cleanup_policy="compact,delete",
        message_timestamp_before_max_ms=1,
        message_timestamp_after_max_ms=2,
        compression_type="zstd",
        compression_level=-7,
        index_interval_bytes=3,
        min_insync_replicas=2,
        producer_id_expiration_ms=77,
    )


def test_a_value_comes_from_topic_then_broker_then_cluster_then_file_then_default() -> None:
    kafka, log = KafkaSettings(message_max_bytes=50), LogSettings(retention_ms=1)
    cluster, broker = {"log.retention.ms": "2"}, {"log.retention.ms": "3"}
    assert log_config({}, kafka, log).retention_ms == 1
    assert log_config({}, kafka, log).max_message_bytes == 50
    assert log_config({}, kafka, log, cluster=cluster).retention_ms == 2
    assert log_config({}, kafka, log, cluster=cluster, broker=broker).retention_ms == 3
    assert log_config({"retention.ms": "4"}, kafka, log, cluster=cluster, broker=broker).retention_ms == 4
    layers = Layers(static_layer(kafka, log), cluster, broker)
    found = resolve(TOPIC_CONFIGS["retention.ms"], {"retention.ms": "4"}, layers)
    assert [(one.value, one.source) for one in found] == [
        ("4", ConfigSource.DYNAMIC_TOPIC),
        ("3", ConfigSource.DYNAMIC_BROKER),
        ("2", ConfigSource.DYNAMIC_DEFAULT_BROKER),
        ("1", ConfigSource.STATIC_BROKER),
        ("604800000", ConfigSource.DEFAULT),
    ]


def test_settings_equal_to_kafkas_defaults_are_no_layer_of_their_own() -> None:
    assert static_layer(KafkaSettings(), LogSettings()) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "-2"),
        ("retention.ms", "9223372036854775808"),
        ("retention.ms", ""),
        ("retention.ms", "1.5"),
        ("retention.ms", "١"),
        ("segment.bytes", "13"),
        ("segment.bytes", "2147483648"),
        ("max.message.bytes", "-1"),
        ("min.cleanable.dirty.ratio", "nan"),
        ("min.cleanable.dirty.ratio", "1.1"),
        ("cleanup.policy", ","),
        ("cleanup.policy", "delete,forget"),
        ("message.timestamp.type", "createtime"),
        ("compression.type", "brotli"),
        ("compression.gzip.level", "0"),
        ("preallocate", "yes"),
        ("remote.storage.enable", "true"),
        ("leader.replication.throttled.replicas", "maybe"),
        ("follower.replication.throttled.replicas", "0:1,2"),
    ],
)
def test_a_value_out_of_its_range_is_refused_and_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({name: value})
    assert name in refused.value.message
    assert refused.value.kafka_code == 40


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "-1"),
        ("compression.gzip.level", "-1"),
        ("cleanup.policy", "compact,delete"),
        ("cleanup.policy", ""),
        ("preallocate", "TRUE"),
        ("remote.storage.enable", "False"),
        ("min.cleanable.dirty.ratio", "0.25"),
        ("follower.replication.throttled.replicas", ""),
        ("follower.replication.throttled.replicas", "*"),
        ("leader.replication.throttled.replicas", "0:1,12:3"),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(name: str, value: str) -> None:
    assert validate({name: value}) == {name: value}


def test_the_nearest_name_is_suggested_only_when_it_is_near() -> None:
    assert nearest("retention.mss", TOPIC_CONFIGS) == "retention.ms"
    assert nearest("xyzzy", TOPIC_CONFIGS) is None


_VALUES = st.one_of(st.integers(-3, 1 << 65).map(str), st.sampled_from(["", "true", "delete", "compact", "0.5", " 7 "]))


@given(st.dictionaries(st.sampled_from(sorted(TOPIC_CONFIGS)), _VALUES, max_size=6))
def test_what_validates_can_be_obeyed(overrides: dict[str, str | None]) -> None:
    try:
        checked = validate(overrides)
    except ConfigError:
        return
    log_config(checked, KafkaSettings(), LogSettings())


def test_an_empty_cleanup_policy_neither_deletes_nor_compacts() -> None:
    config = log_config(validate({"cleanup.policy": ""}), KafkaSettings(), LogSettings())
    assert (config.deletes, config.compacts) == (False, False)


def test_settings_without_effect_are_told() -> None:
    told = warning({"flush.ms": "5", "retention.ms": "5", "cleanup.policy": "compact", "preallocate": "false"})
    assert told == "accepted, but not served yet: flush.ms=5"
    assert warning({"cleanup.policy": "delete", "segment.bytes": "100"}) is None


def test_values_keep_their_types() -> None:
    assert parse(TOPIC_CONFIGS["preallocate"], "False") is False
    assert parse(TOPIC_CONFIGS["cleanup.policy"], "delete") == ["delete"]
    assert parse(TOPIC_CONFIGS["segment.ms"], "+5") == 5
    assert TOPIC_CONFIGS["segment.ms"].type is ConfigType.LONG
