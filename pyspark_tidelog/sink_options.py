"""The options of the sink, checked: names and meanings of Spark's Kafka sink.

`kafka.NAME` is passed to librdkafka. A setting is refused if with it a record that a task took for written could be
lost, or could be there twice or out of order because of the client's own retries.

Entry: `write_options`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark_tidelog.options import bootstrap_servers, flag, is_read_option, refuse_unknown
from tidelog.runtime.errors import ConfigError

MAX_RECORD_BYTES = 1 << 20
"""The default of `kafka.message.max.bytes`: that of Java's client, with which Spark's Kafka sink writes."""
QUEUE_KIB = 64 << 10
"""The default of `kafka.queue.buffering.max.kbytes`: what one task holds that is not acknowledged yet."""

PREFIX = "tidelog-spark"
"""The default of `transactionalIdPrefix`."""
TRANSACTION_TIMEOUT_MS = 900_000
"""The default of `kafka.transaction.timeout.ms`: the largest that a broker allows by default."""

_NAMES = (
    "kafka.bootstrap.servers",
    "topic",
    "includeHeaders",
    "keepTimestamps",
    "exactlyOnce",
    "transactionalIdPrefix",
)
_KNOWN = {name.lower(): name for name in _NAMES}
_PREFIXES = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""It becomes a part of the name of a topic."""
_SPARKS_OWN = frozenset({"checkpointlocation"})
_DEFAULTS = {
    "log_level": "0",  # what is wrong is in the task's error
    "partitioner": "murmur2_random",  # Java's: keys stay in the partitions where Spark's Kafka sink puts them
    "message.max.bytes": str(MAX_RECORD_BYTES),
    "queue.buffering.max.kbytes": str(QUEUE_KIB),
}
_ALL_REPLICAS = "or a record that is acknowledged could be lost"
_IN_ORDER = "or a retry could write a record twice or in another order"
_ONLY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "acks": (("all", "-1"), _ALL_REPLICAS),
    "request.required.acks": (("all", "-1"), _ALL_REPLICAS),
    "enable.idempotence": (("true",), _IN_ORDER),
    "queuing.strategy": (("fifo",), _IN_ORDER),
    "max.in.flight": (("1", "2", "3", "4", "5"), _IN_ORDER),
    "max.in.flight.requests.per.connection": (("1", "2", "3", "4", "5"), _IN_ORDER),
}
_RETRIES = ("retries", "message.send.max.retries")
_REFUSED = {
    "transactional.id": "tasks with one transactional id would fence each other; see exactlyOnce",
    "key.serializer": "keys are written as they are: cast them in the frame",
    "value.serializer": "values are written as they are: cast them in the frame",
    "metadata.broker.list": "kafka.bootstrap.servers names the brokers",
    "delivery.report.only.error": "the sink sets it",
}
_JAVA = {
    "max.request.size": "message.max.bytes",
    "buffer.memory": "queue.buffering.max.kbytes",
    "sasl.jaas.config": "sasl.username and sasl.password",
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "partitioner.class": "partitioner",
}
"""Settings of Java's client that librdkafka has under another name."""
_CONNECTION = ("bootstrap.servers", "broker.address.", "client.dns.", "socket.")


@dataclass(frozen=True)
class WriteOptions:
    """Checked options of a write. Pickled to the executors."""

    topic: str = ""
    """Of all rows; empty: the column `topic` has it."""
    kafka: Mapping[str, str] = field(default_factory=dict)
    """All settings of the producer."""
    keeps_timestamps: bool = False
    """The column `timestamp` has the records' timestamps; else they get the time at which they are written."""
    transactional_id_prefix: str = ""
    """Of an exactly-once write; empty: it is at least once."""

    @property
    def connection(self) -> dict[str, str]:
        """Those settings that other clients of the same brokers need, too."""
        return {name: value for name, value in self.kafka.items() if name.startswith(_CONNECTION)}


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a write. Raises `ConfigError`, which names the option."""
    options = {name.lower(): value for name, value in given.items()}
    if "path" in options or "paths" in options:
        raise ConfigError("a topic has no path", hint='.option("topic", NAME), and save() or start() without a path')
    mine = {name: value for name, value in given.items() if name.lower() not in _SPARKS_OWN}
    for name in mine:
        if name.lower() not in _KNOWN and is_read_option(name):
            raise ConfigError(f"option {name} is one of reads; a write has no use for it", hint="leave it out")
    refuse_unknown(mine, _KNOWN)
    bootstrap = bootstrap_servers(options)
    topic = options.get("topic", "").strip()
    if "topic" in options and not topic:
        raise ConfigError("option topic is empty", hint="leave it out where a column topic names the topics")
    flag(options, "includeHeaders", default=False)
    settings = {name[6:]: value.strip() for name, value in options.items() if name.startswith("kafka.")}
    _check(settings)
    kafka = {**_DEFAULTS, **settings, "bootstrap.servers": bootstrap, "enable.idempotence": "true", "acks": "all"}
    kafka.pop("request.required.acks", None)  # a synonym
    _check_sizes(kafka)
    prefix = _prefix(options, settings)
    if prefix:
        kafka.setdefault("transaction.timeout.ms", str(TRANSACTION_TIMEOUT_MS))
    return WriteOptions(topic, kafka, flag(options, "keepTimestamps", default=False), prefix)


def _prefix(options: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return the prefix of transactional ids; empty without `exactlyOnce`."""
    given = options.get("transactionalidprefix", PREFIX).strip()
    if not flag(options, "exactlyOnce", default=False):
        if "transactionalidprefix" in options:
            raise ConfigError("option transactionalIdPrefix has no use without exactlyOnce", hint="exactlyOnce = true")
        return ""
    if not _PREFIXES.fullmatch(given):
        raise ConfigError(
            f"option transactionalIdPrefix is {given!r}; it must be of letters, digits, - and _, up to 100"
        )
    protocol = settings.get("security.protocol", "plaintext")
    if protocol.lower() != "plaintext":
        raise ConfigError(f"option kafka.security.protocol is {protocol!r}; with exactlyOnce it must be plaintext")
    return given


def _check(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        if name in _REFUSED:
            raise ConfigError(f"option kafka.{name} cannot be set: {_REFUSED[name]}", hint="leave it out")
        if name in _JAVA:
            raise ConfigError(
                f"option kafka.{name} is a setting of Java's client", hint=f"librdkafka has kafka.{_JAVA[name]}"
            )
        allowed, why = _ONLY.get(name, ((), ""))
        if allowed and value.lower() not in allowed:
            raise ConfigError(f"option kafka.{name} is {value!r}; it must be {' or '.join(allowed)}, {why}")
        if name in _RETRIES and value == "0":
            raise ConfigError(f"option kafka.{name} is 0: a record that needs a second attempt would fail the task")


def _check_sizes(kafka: Mapping[str, str]) -> None:
    """Refuse a queue into which not even one record fits. What is no number librdkafka refuses."""
    record, queue = kafka["message.max.bytes"], kafka["queue.buffering.max.kbytes"]
    if record.isdecimal() and queue.isdecimal() and int(record) > int(queue) << 10:
        raise ConfigError(
            f"option kafka.message.max.bytes is {record}: such a record has no room in a queue of {queue} KiB",
            hint="raise kafka.queue.buffering.max.kbytes",
        )
