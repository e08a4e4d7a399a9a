"""Topics by Kafka's admin protocol, for jobs that write to one, or read one of another cluster. On the driver.

Entry: `TopicAdmin`, `client_settings`, `sink_options`, `prepare_copy`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pyspark_tidelog.cluster import retried
from pyspark_tidelog.jobs.frame import ClusterAccess
from tidelog.runtime.errors import AlreadyExists, ConfigError, InvalidInput, NotFound, Unavailable

_T = TypeVar("_T")
CONNECT_S = 10.0
ANSWER_S = 30.0
COPIED_CONFIGS = (
    "retention.ms",
    "retention.bytes",
    "max.message.bytes",
    "message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms",
)
"""What a topic that a job makes takes over from its source, where it was set there."""
DEFAULT_MAX_BYTES = 1_048_588
"""Kafka's max.message.bytes, for a broker that tells none."""
BATCH_BYTES = 1_000_000
"""librdkafka's batch.size, where a topic accepts that."""
_TIMESTAMP_TYPE = "message.timestamp.type"
_ANY_MS = (1 << 63) - 1


class TopicAdmin:
    """The topics of a cluster, of any kind."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """`settings` are librdkafka's, `bootstrap.servers` among them. Raises `ConfigError`."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        self._bootstrap = settings["bootstrap.servers"]
        try:
            self._admin = AdminClient({"log_level": 0, **settings})
        except KafkaException as error:
            raise ConfigError(f"the settings of the client of {self._bootstrap} are not right: {error}") from error

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions of a topic, None if there is no such topic. Raises `Unavailable`."""
        from confluent_kafka import KafkaException

        try:
            known = self._admin.list_topics(timeout=CONNECT_S).topics.get(topic)
        except KafkaException as error:
            raise Unavailable(
                f"no broker answers at {self._bootstrap}: {error}", hint="is it the right one?"
            ) from error
        return len(known.partitions) if known is not None and known.partitions else None

    def existing(self, topic: str) -> int:
        """As `partitions`. Raises `NotFound`."""
        found = self.partitions(topic)
        if found is None:
            raise NotFound(f"there is no topic {topic!r} at {self._bootstrap}", hint="`tidelog topic list` shows them")
        return found

    def configs(self, topic: str) -> dict[str, str]:
        """Return the configs that were set for a topic itself. Raises `Unavailable`."""
        return {name: each.value for name, each in self._describe(topic).items() if not each.is_default}

    def config(self, topic: str, name: str) -> str | None:
        """Return a config of a topic, wherever it was set. Raises `Unavailable`."""
        entry = self._describe(topic).get(name)
        return None if entry is None else entry.value

    def max_message_bytes(self, topic: str) -> int:
        """Return how large a batch of records of a topic may be. Raises `Unavailable`."""
        return int(self.config(topic, "max.message.bytes") or DEFAULT_MAX_BYTES)

    def _describe(self, topic: str) -> dict[str, Any]:
        from confluent_kafka.admin import ConfigResource

        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        future = self._admin.describe_configs([resource], request_timeout=ANSWER_S)[resource]
        return dict(self._wait(future, f"the configs of topic {topic} are not known"))

    def timestamps(self, topic: str) -> tuple[int, int]:
        """Return the first and last timestamp (ms) that a topic takes now. Raises `Unavailable`."""
        told, now_ms = self._describe(topic), int(time.time() * 1000)
        if told.get(_TIMESTAMP_TYPE) is not None and told[_TIMESTAMP_TYPE].value == "LogAppendTime":
            return -_ANY_MS, _ANY_MS  # it replaces them
        before, after = (told.get(f"message.timestamp.{side}.max.ms") for side in ("before", "after"))
        first = now_ms - int(before.value) if before is not None else -_ANY_MS
        return first, min(now_ms + int(after.value), _ANY_MS) if after is not None else _ANY_MS

    def check_timestamps(self, topic: str) -> None:
        """Raise `InvalidInput` if a topic replaces timestamps by the time of the append."""
        if self.config(topic, _TIMESTAMP_TYPE) == "LogAppendTime":
            raise InvalidInput(
                f"topic {topic} has {_TIMESTAMP_TYPE} = LogAppendTime: timestamps would not be preserved",
                hint=f"`tidelog topic alter {topic} --config {_TIMESTAMP_TYPE}=CreateTime`",
            )

    def create(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Create a topic. Raises `AlreadyExists`, `InvalidInput`, `Unavailable`."""
        from confluent_kafka.admin import NewTopic

        wanted = NewTopic(topic, num_partitions=partitions, config=dict(configs))
        future = self._admin.create_topics([wanted], request_timeout=ANSWER_S)[topic]
        self._wait(future, f"topic {topic} cannot be created")

    def bounds(self, topic: str, partitions: Sequence[int], *, committed: bool) -> dict[int, tuple[int, int]]:
        """Return the first offset, and the one after the last, of partitions; `committed`: the last stable one.

        Raises `Unavailable`.
        """
        return retried(lambda: self._bounds(topic, partitions, committed))

    def _bounds(self, topic: str, partitions: Sequence[int], committed: bool) -> dict[int, tuple[int, int]]:
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        kind: Any = OffsetSpec
        sides = []
        for spec in (kind.earliest(), kind.latest()):
            asked = {TopicPartition(topic, index): spec for index in partitions}
            futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=ANSWER_S)
            sides.append(
                {
                    each.partition: self._wait(future, f"the offsets of {topic}-{each.partition} are not known").offset
                    for each, future in futures.items()
                }
            )
        return {index: (sides[0][index], sides[1][index]) for index in partitions}

    def _wait(self, future: Any, problem: str) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        try:
            return future.result(2 * ANSWER_S)
        except KafkaException as error:
            code, text = error.args[0].code(), error.args[0].str()
            if code == KafkaError.TOPIC_ALREADY_EXISTS:
                raise AlreadyExists(f"{problem}: {text}") from error
            if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise NotFound(f"{problem}: {text}") from error
            if code in (KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION):
                raise InvalidInput(f"{problem}: {text}") from error
            raise Unavailable(f"{problem}: {text}", hint=f"does {self._bootstrap} answer?") from error
        except TimeoutError as error:
            raise Unavailable(f"{problem}: no answer within {2 * ANSWER_S:g} s") from error


def client_settings(access: ClusterAccess) -> dict[str, str]:
    """Return librdkafka's settings for a cluster of Tidelog."""
    options = access.read_options()
    return {**options.kafka, "bootstrap.servers": options.bootstrap}


def sink_options(access: ClusterAccess, topic: str, *, keeps_timestamps: bool) -> dict[str, str]:
    """Return options of the sink for a topic, which accepts any record that the topic accepts. Raises `Unavailable`."""
    settings = client_settings(access)
    bound = TopicAdmin(settings).max_message_bytes(topic)
    sizes = {
        "batch.size": str(min(BATCH_BYTES, bound)),
        "message.max.bytes": str(max(BATCH_BYTES, bound)),
        "queue.buffering.max.kbytes": str(max(64 << 10, 2 * bound >> 10)),
    }
    found = {f"kafka.{name}": value for name, value in {**sizes, **settings}.items()}
    return {**found, "topic": topic, "keepTimestamps": str(keeps_timestamps).lower()}


def copy_settings(access: ClusterAccess, target: str) -> dict[str, str]:
    """Return librdkafka's settings for a copy into a topic, whose batches the topic accepts. Raises `Unavailable`."""
    settings = client_settings(access)
    bound = TopicAdmin(settings).max_message_bytes(target)
    return {"batch.size": str(min(BATCH_BYTES, bound)), **settings}


def prepare_copy(
    topics: TopicAdmin, target: str, counts: tuple[int, int], configs: Mapping[str, str], source: str
) -> None:
    """Create the target of a copy, if it is not there, with configs of the source.

    `counts`: the partitions that it gets then, and those that it needs.

    Raises `InvalidInput` for a topic that cannot have the copy, `Unavailable`.
    """
    known = topics.partitions(target)
    if known is None:
        topics.create(target, counts[0], {name: configs[name] for name in COPIED_CONFIGS if name in configs})
    elif known < counts[1]:
        raise InvalidInput(
            f"topic {target} has {known} partitions, and {source} has {counts[1]}",
            hint=f"`tidelog topic alter {target} --partitions {counts[1]}`",
        )
    topics.check_timestamps(target)
