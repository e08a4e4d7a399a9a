"""Configs of groups (resource type 32) and of subscriptions of client metrics (16, KIP-714).

Both are rows of the controllers' table `configs`, under kinds of their own, from feature level `NAMED_CONFIGS_LEVEL`
on. A group need not exist to have configs, and one without any has the defaults. A subscription is the row itself: it
exists while it has a config that is set.

Entry: `entries` for DescribeConfigs, `check` for a client's changes, `named` for what has configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import re2

from tidelog.broker.kafka.broker_config import ConfigEntry
from tidelog.broker.kafka.patterns import compile_pattern
from tidelog.broker.partitions import topic_config
from tidelog.broker.partitions.topic_config import ConfigSource, ConfigType, Synonym, TopicConfig
from tidelog.controller.image.image import Image
from tidelog.controller.model.levels import NAMED_CONFIGS_LEVEL, UnsupportedLevel
from tidelog.runtime.errors import ConfigError, InvalidInput

CLIENT_METRICS = 16
GROUP = 32
MATCH_KEYS = (
    "client_instance_id",
    "client_id",
    "client_software_name",
    "client_software_version",
    "client_source_address",
    "client_source_port",
)
"""What a subscription may select clients by."""
MAX_PATTERN_CHARS = 200
MAX_ELEMENTS = 1_000
"""Elements of a list: every name of a metric that a client pushes is compared with those of `metrics`."""

_INT, _LIST = ConfigType.INT, ConfigType.LIST
_GROUP_ROWS = (
    TopicConfig(
        "consumer.heartbeat.interval.ms", _INT, "5000", "consumer.heartbeat.interval.ms",
        "How often members of a group of the consumer protocol send heartbeats (ms).", 5_000, 15_000,
    ),
    TopicConfig(
        "consumer.session.timeout.ms", _INT, "45000", "consumer.session.timeout.ms",
        "After how long without a heartbeat a member of a group of the consumer protocol is out of it (ms).",
        45_000, 60_000,
    ),
)  # fmt: skip
_METRICS_ROWS = (
    TopicConfig(
        "interval.ms", _INT, "300000", "interval.ms", "How often a client sends its metrics (ms).", 100, 3_600_000
    ),
    TopicConfig(
        "match", _LIST, "", "match",
        "Which clients: a list of KEY=REGULAR EXPRESSION that all must match as a whole. Empty: all clients. Keys:"
        f" {', '.join(MATCH_KEYS)}.",
    ),
    TopicConfig(
        "metrics", _LIST, "", "metrics",
        "Which metrics: a list of prefixes of their names; '*' is all of them, an empty list none.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedConfigs:
    """A type of resource whose configs are rows of their own."""

    kind: str
    """The kind of its rows in the controllers' table `configs`."""
    what: str
    """Its name in messages."""
    rows: Mapping[str, TopicConfig]
    source: ConfigSource


KINDS = {
    CLIENT_METRICS: NamedConfigs(
        "client-metrics",
        "subscription of client metrics",
        {row.name: row for row in _METRICS_ROWS},
        ConfigSource.DYNAMIC_CLIENT_METRICS,
    ),
    GROUP: NamedConfigs("group", "group", {row.name: row for row in _GROUP_ROWS}, ConfigSource.DYNAMIC_GROUP),
}
"""By the number of the resource's type in DescribeConfigs."""


def overrides_of(image: Image, resource_type: int, name: str) -> Mapping[str, str]:
    """Return what is set of a resource of a type in `KINDS`."""
    return image.configs.get((KINDS[resource_type].kind, name), topic_config.NO_OVERRIDES)


def named(image: Image, resource_type: int) -> list[str]:
    """Return the names of a type's resources that have configs, ordered."""
    kind = KINDS[resource_type].kind
    return sorted(name for of, name in image.configs if of == kind)


def entries(image: Image, resource_type: int, name: str) -> list[ConfigEntry]:
    """Return every config of a resource, ordered by name. Raises `InvalidInput` for an empty name."""
    about = _named_kind(resource_type, name)
    found = []
    for key, row in about.rows.items():
        synonyms = [Synonym(key, row.default, ConfigSource.DEFAULT)]
        override = overrides_of(image, resource_type, name).get(key)
        if override is not None:
            synonyms.insert(0, Synonym(key, override, about.source))
        first = synonyms[0]
        found.append(ConfigEntry(key, row.type, first.value, first.source, False, False, row.doc, tuple(synonyms)))
    return found


def check(image: Image, resource_type: int, name: str, asked: Mapping[str, str | None]) -> dict[str, str | None]:
    """Check changes of a resource's configs, and return them as they are stored.

    Raises `InvalidInput` for an empty name, `ConfigError` for a config that is unknown or has a wrong value, and
    `UnsupportedLevel` below feature level `NAMED_CONFIGS_LEVEL`.
    """
    about = _named_kind(resource_type, name)
    if image.level < NAMED_CONFIGS_LEVEL:
        raise UnsupportedLevel(
            f"configs of a {about.what} need feature level {NAMED_CONFIGS_LEVEL}; the cluster is at {image.level}",
            hint="`tidelog cluster upgrade` raises the level",
        )
    current = overrides_of(image, resource_type, name)
    checked: dict[str, str | None] = {}
    for key, value in asked.items():
        row = about.rows.get(key)
        if row is None and not (value is None and key in current):
            raise topic_config.unknown_key(key, about.rows, f"config of a {about.what}")
        if row is not None and value is not None:
            topic_config.parse(row, value, key)
            if row.type is _LIST and (elements := value.count(",") + 1) > MAX_ELEMENTS:
                raise ConfigError(f"{key} has {elements} elements; at most {MAX_ELEMENTS} are allowed")
            if key == "match":
                patterns(value)
        checked[key] = None if value is None else value.strip()
    return checked


def patterns(match: str) -> dict[str, Any]:
    """Return the patterns of a value of `match`, of RE2, by key. Raises `ConfigError`."""
    found: dict[str, Any] = {}
    for element in topic_config.split_list(match):
        key, equals, pattern = (part.strip() for part in element.partition("="))
        if not equals or key not in MATCH_KEYS or len(pattern) > MAX_PATTERN_CHARS:
            raise ConfigError(
                f"invalid element {element[:MAX_PATTERN_CHARS]!r} of match: KEY=REGULAR EXPRESSION is expected, of at"
                f" most {MAX_PATTERN_CHARS} characters",
                hint=f"keys are {', '.join(MATCH_KEYS)}",
            )
        try:
            found[key] = compile_pattern(pattern)
        except re2.error as error:
            raise ConfigError(f"invalid regular expression {pattern!r} for {key}: {error}") from error
    return found


def _named_kind(resource_type: int, name: str) -> NamedConfigs:
    about = KINDS[resource_type]
    if not name:
        raise InvalidInput(f"the name of a {about.what} must not be empty")
    return about
