"""A broker's configuration for Kafka's tools: Kafka's names, then Tidelog's dotted names.

There are four kinds of entries. Topic defaults (`log.retention.ms`, `message.max.bytes`: the broker keys of
`tidelog.broker.partitions.topic_config`) may be changed at run time, for this broker or for the cluster. Some settings
of the controllers (`controller.session_timeout_ms`; `tidelog.controller.model.overrides`) may be, too, for the cluster
only; the value shown without an override is the one of this process's configuration. Kafka's static
names that tools look for (`num.partitions`, `inter.broker.protocol.version`) and Tidelog's own dotted keys
(`wal.flush`, `tidelog.admin.url`) are read-only. Secrets are listed without their value.

Entry: `broker_entries`, `cluster_entries`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.broker.kafka.replicas import default_replicas
from tidelog.broker.kafka.services import Services
from tidelog.broker.partitions import topic_config
from tidelog.broker.partitions.topic_config import ConfigSource, ConfigType, Layers, Synonym, TopicConfig
from tidelog.controller.model.features import METADATA_NAMES, METADATA_VERSION, finalized
from tidelog.controller.model.overrides import DYNAMIC

SENSITIVE_PARTS = ("secret", "password", "access_key", "token", "credential")
_SELECTORS = {"rack": "org.apache.kafka.common.replica.RackAwareReplicaSelector", "leader": None}
"""Kafka's names of `kafka.replica_selector`; None is its default."""
_OF_CONTROLLERS = "A setting of the controllers, changed for the cluster as a whole; see docs/configuration.md."
_THROTTLED = (
    " Accepted for kafka-reassign-partitions, which sets and removes it. It has no effect: a move copies nothing, so"
    " there is nothing to throttle."
)
THROTTLES = {
    name: TopicConfig(name, ConfigType.LONG, str(topic_config.INT64_MAX), name, doc + _THROTTLED, minimum=0)
    for name, doc in (
        ("follower.replication.throttled.rate", "Bytes per second that a follower replicates of throttled partitions."),
        ("leader.replication.throttled.rate", "Bytes per second that a leader sends of throttled partitions."),
        ("replica.alter.log.dirs.io.max.bytes.per.second", "Bytes per second moved between directories of a broker."),
    )
}
"""Configs of a broker that are no topic's default, by key."""
CHANGEABLE = {**topic_config.BROKER_KEYS, **THROTTLES}
"""Configs of a broker that may change at run time, by key, without the settings of the controllers."""
DATA_DIR_KEYS = ("log.dirs", "data_dir", "node.data_dir")


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One config of a resource, ready for DescribeConfigs."""

    name: str
    type: ConfigType
    value: str | None
    source: ConfigSource
    read_only: bool
    sensitive: bool
    doc: str
    synonyms: tuple[Synonym, ...]


def is_sensitive(name: str) -> bool:
    """Whether the value of a dotted key is secret. The name of a file with a secret is not."""
    return not name.endswith("_file") and any(part in name.lower() for part in SENSITIVE_PARTS)


def layers(services: Services) -> Layers:
    """The current config layers of this broker below a topic's overrides."""
    configs = services.controller.image.configs
    return Layers(
        static=topic_config.static_layer(services.kafka, services.log),
        cluster=configs.get(("cluster", ""), {}),
        broker=configs.get(("broker", str(services.node_id)), {}),
    )


def log_dir(configs: Mapping[str, str]) -> str:
    """The log directory of a broker, from its effective configuration."""
    for key in DATA_DIR_KEYS:
        if configs.get(key):
            return configs[key]
    return "tidelog"


def broker_entries(services: Services) -> list[ConfigEntry]:
    """Every config of this broker, ordered by name; Kafka's entry wins if a name occurs twice."""
    entries: dict[str, ConfigEntry] = {}
    for name, value in services.broker_configs().items():
        sensitive = is_sensitive(name)
        shown = None if sensitive else value
        entries[name] = _static(name, ConfigType.PASSWORD if sensitive else ConfigType.STRING, shown, sensitive)
    for name, (kind, text, doc) in _kafka_names(services).items():
        entries[name] = _static(name, kind, text, doc=doc)
    below = layers(services)
    for key, row in CHANGEABLE.items():
        synonyms = tuple(topic_config.resolve(row, {}, below))
        doc = row.doc if key in THROTTLES else f"Default of the topic config {row.name}. {row.doc}"
        first = synonyms[0]
        entries[key] = ConfigEntry(key, row.type, first.value, first.source, False, False, doc, synonyms)
    for key in DYNAMIC:
        entries[key] = _controllers_setting(services, key)
    return [entries[name] for name in sorted(entries)]


def _controllers_setting(services: Services, key: str) -> ConfigEntry:
    row = DYNAMIC[key]
    configured = services.broker_configs().get(key, str(row.default).lower())
    found = [Synonym(key, configured, ConfigSource.STATIC_BROKER)]
    override = services.controller.image.cluster_configs.get(key)
    if override is not None:
        found.insert(0, Synonym(key, override, ConfigSource.DYNAMIC_DEFAULT_BROKER))
    kind = ConfigType.BOOLEAN if row.is_flag else ConfigType.LONG
    return ConfigEntry(key, kind, found[0].value, found[0].source, False, False, _OF_CONTROLLERS, tuple(found))


def _static(name: str, kind: ConfigType, value: str | None, sensitive: bool = False, doc: str = "") -> ConfigEntry:
    source = ConfigSource.STATIC_BROKER
    synonyms = () if value is None else (Synonym(name, value, source),)
    doc = doc or "Tidelog's own; see docs/configuration.md."
    return ConfigEntry(name, kind, value, source, True, sensitive, doc, synonyms)


def cluster_entries(services: Services) -> list[ConfigEntry]:
    """The cluster-wide dynamic values that are set (broker resource with an empty name)."""
    entries = []
    for key, value in sorted(services.controller.image.configs.get(("cluster", ""), {}).items()):
        if key in DYNAMIC:
            entries.append(_controllers_setting(services, key))
            continue
        row = CHANGEABLE.get(key)
        if row is None:  # set by a newer version of Tidelog
            continue
        source = ConfigSource.DYNAMIC_DEFAULT_BROKER
        entries.append(ConfigEntry(key, row.type, value, source, False, False, row.doc, (Synonym(key, value, source),)))
    return entries


def _kafka_names(services: Services) -> dict[str, tuple[ConfigType, str | None, str]]:
    """Static configs by Kafka's names: (type, value, documentation)."""
    kafka, log = services.kafka, services.log
    text, integer, long, boolean, names = (
        ConfigType.STRING,
        ConfigType.INT,
        ConfigType.LONG,
        ConfigType.BOOLEAN,
        ConfigType.LIST,
    )
    below = layers(services)
    retention_ms = int(topic_config.effective("retention.ms", {}, below))
    roll_ms = int(topic_config.effective("segment.ms", {}, below))
    here = services.controller.image.brokers.get(services.node_id)
    port = here.port if here is not None else kafka.advertised_port or kafka.port
    advertised = f"{here.host if here is not None else kafka.advertised_host or kafka.host}:{port}"
    image = services.controller.image
    replicas = str(default_replicas(image))
    protocol = METADATA_NAMES[finalized(image.level, image.kv)[METADATA_VERSION]]
    hour, minute = 3_600_000, 60_000
    return {
        "advertised.listeners": (text, f"PLAINTEXT://{advertised}", "The address that clients connect to."),
        "authorizer.class.name": (text, "", "No authorizer: ACL requests answer SECURITY_DISABLED."),
        "auto.create.topics.enable": (boolean, str(kafka.auto_create_topics).lower(), "kafka.auto_create_topics."),
        "broker.id": (integer, str(services.node_id), "This broker's node id."),
        "broker.rack": (text, kafka.rack or None, "kafka.rack."),
        "connections.max.idle.ms": (long, str(kafka.idle_timeout_ms), "kafka.idle_timeout_ms."),
        "default.replication.factor": (
            integer,
            replicas,
            "Replicas of a topic that asks for no number. Replication belongs to the replica set, not to the topic.",
        ),
        "delete.topic.enable": (boolean, "true", "Topics may be deleted."),
        "fetch.max.bytes": (integer, str(kafka.fetch_max_bytes), "kafka.fetch_max_bytes."),
        "inter.broker.protocol.version": (text, protocol, "The name of metadata.version, for tools that go by it."),
        "listeners": (names, f"PLAINTEXT://{kafka.host}:{kafka.port}", "kafka.host and kafka.port."),
        "log.dir": (text, log_dir(services.broker_configs()), "Where the write-ahead log is; data is in the bucket."),
        "log.dirs": (text, log_dir(services.broker_configs()), "Where the write-ahead log is; data is in the bucket."),
        "log.retention.check.interval.ms": (long, str(log.retention_check_interval_ms), "See log."),
        "log.retention.hours": (integer, str(_ceil(retention_ms, hour)), "log.retention.ms, rounded up."),
        "log.retention.minutes": (
            integer,
            str(_ceil(retention_ms, minute)),
            "log.retention.ms, rounded up.",
        ),
        "log.roll.hours": (integer, str(_ceil(roll_ms, hour)), "log.roll.ms, rounded up."),
        "max.connections": (integer, str(kafka.max_connections), "kafka.max_connections."),
        "max.connections.per.ip": (
            integer,
            str(kafka.max_connections_per_address),
            "kafka.max_connections_per_address.",
        ),
        "node.id": (integer, str(services.node_id), "This broker's node id."),
        "num.partitions": (integer, str(kafka.num_partitions), "Partitions of a topic created without a number."),
        "process.roles": (names, services.broker_configs().get("node.roles", "broker"), "Roles of this process."),
        "producer.id.expiration.ms": (integer, str(log.producer_id_expiration_ms), "See log."),
        "remote.log.storage.system.enable": (boolean, "false", "Kafka's tiering; data is in the bucket without it."),
        "replica.selector.class": (text, _SELECTORS[kafka.replica_selector], "kafka.replica_selector."),
        "sasl.enabled.mechanisms": (names, "", "None."),
        "security.inter.broker.protocol": (
            text,
            "PLAINTEXT",
            "Brokers do not use the Kafka protocol between each other.",
        ),
        "socket.request.max.bytes": (integer, str(kafka.max_request_bytes), "kafka.max_request_bytes."),
        **_group_names(services),
    }


def _group_names(services: Services) -> dict[str, tuple[ConfigType, str | None, str]]:
    """Static configs of groups and of their topic, as `_kafka_names`."""
    group, integer, long = services.group, ConfigType.INT, ConfigType.LONG
    names, minute = ConfigType.LIST, 60_000
    replicas = str(default_replicas(services.controller.image))
    return {
        "group.coordinator.rebalance.protocols": (names, "classic", "Group protocols served."),
        "group.initial.rebalance.delay.ms": (integer, str(group.initial_rebalance_delay_ms), "See group."),
        "group.max.session.timeout.ms": (integer, str(group.max_session_timeout_ms), "See group."),
        "group.max.size": (integer, str(group.max_size), "See group."),
        "group.min.session.timeout.ms": (integer, str(group.min_session_timeout_ms), "See group."),
        "offset.metadata.max.bytes": (integer, str(group.offset_metadata_max_bytes), "See group."),
        "offsets.retention.check.interval.ms": (long, str(group.offsets_check_interval_ms), "See group."),
        "offsets.retention.minutes": (integer, str(_ceil(group.offsets_retention_ms, minute)), "Rounded up."),
        "offsets.topic.num.partitions": (integer, str(group.offsets_topic_partitions), "See group."),
        "transaction.state.log.num.partitions": (integer, str(group.transaction_topic_partitions), "See group."),
        "offsets.topic.replication.factor": (
            ConfigType.SHORT,
            replicas,
            "Replication belongs to the replica set.",
        ),
    }


def _ceil(milliseconds: int, unit: int) -> int:
    return -1 if milliseconds < 0 else -(-milliseconds // unit)
