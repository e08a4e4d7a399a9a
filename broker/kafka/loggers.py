"""Levels of this process's loggers (resource type 8), to look at and to change while it runs (KIP-412).

A logger is one of Python's `logging`, with its dotted name, or `root`. Its level is its own, or that of the nearest
logger above it that has one. A change counts for this process only, until it ends.

Entry: `entries` for DescribeConfigs, `change` for IncrementalAlterConfigs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tidelog.broker.kafka.broker_config import ConfigEntry
from tidelog.broker.partitions.topic_config import ConfigSource, ConfigType, Synonym, unknown_key
from tidelog.runtime.errors import ConfigError, InvalidInput

BROKER_LOGGER = 8
ROOT = "root"
LEVELS = {
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG // 2,
}
"""Python's levels by Kafka's names, the highest first."""


def names() -> list[str]:
    """Return the names of all loggers, ordered; also of those that are only above others."""
    return sorted({ROOT, *logging.Logger.manager.loggerDict})


def entries() -> list[ConfigEntry]:
    """Return every logger with its level, ordered by name."""
    found = []
    for name in names():
        level = _name_of(logging.getLogger(_python_name(name)).getEffectiveLevel())
        synonyms = (Synonym(name, level, ConfigSource.DYNAMIC_BROKER_LOGGER),)
        found.append(
            ConfigEntry(
                name, ConfigType.STRING, level, ConfigSource.DYNAMIC_BROKER_LOGGER, False, False,
                f"Level of the log of {name}: {', '.join(LEVELS)}.", synonyms,
            )
        )  # fmt: skip
    return found


def change(asked: Mapping[str, str | None], *, validate_only: bool) -> None:
    """Set levels by logger; None gives a logger the level of the one above it.

    All are checked first. Raises `ConfigError` for an unknown logger or level, `InvalidInput` for `root` without one.
    """
    known = set(names())
    for name, level in asked.items():
        if name not in known:
            raise unknown_key(name, known, "logger")
        if level is None and name == ROOT:
            raise InvalidInput(f"the level of the logger {ROOT} cannot be removed", hint="set it to another level")
        if level is not None and level.strip().upper() not in LEVELS:
            raise ConfigError(f"invalid level {level!r} for the logger {name}: allowed are {', '.join(LEVELS)}")
    if validate_only:
        return
    for name, level in asked.items():
        wanted = logging.NOTSET if level is None else LEVELS[level.strip().upper()]
        logging.getLogger(_python_name(name)).setLevel(wanted)


def _python_name(name: str) -> str:
    return "" if name == ROOT else name


def _name_of(level: int) -> str:
    """Return the name of the highest level that is not above `level`."""
    return next((name for name, number in LEVELS.items() if number <= level), "TRACE")
