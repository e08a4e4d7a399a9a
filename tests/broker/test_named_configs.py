"""Configs of groups, of subscriptions of client metrics and of loggers, and ListConfigResources."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.broker.test_admin_configs import (
    APPEND,
    BROKER,
    DELETE,
    DESCRIBE,
    SET,
    SUBTRACT,
    TOPIC,
    by_name,
    change,
    describe,
    replace,
)
from tests.support.admin_world import AdminWorld, versions
from tidelog.broker.kafka.handlers import config_resources, configs
from tidelog.broker.kafka.loggers import BROKER_LOGGER
from tidelog.broker.kafka.named_configs import CLIENT_METRICS, GROUP, MAX_ELEMENTS
from tidelog.controller.model.levels import NAMED_CONFIGS_LEVEL

LIST = 74
SESSION, HEARTBEAT = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
LOGGER = "tidelog.tests.named_configs"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger(LOGGER)
    yield found
    found.setLevel(logging.NOTSET)


# --- Groups and client metrics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(configs.APIS, DESCRIBE))
def test_a_group_that_nobody_configured_has_the_defaults(version: int) -> None:
    found = by_name(describe(AdminWorld(), GROUP, "g", version=version, synonyms=True, documentation=True))
    assert {name: (config.value, config.config_source) for name, config in found.items()} == {
        SESSION: ("45000", 5),
        HEARTBEAT: ("5000", 5),
    }


def test_a_groups_configs_are_set_shown_with_their_source_and_removed() -> None:
    world = AdminWorld()
    assert change(world, GROUP, "g", (SESSION, SET, " 50000 ")) == (0, "")
    assert world.controller.image.configs[("group", "g")] == {SESSION: "50000"}
    session = by_name(describe(world, GROUP, "g", synonyms=True))[SESSION]
    assert (session.value, session.config_source, session.config_type) == ("50000", 8, 3)
    assert [(one.value, one.source) for one in session.synonyms] == [("50000", 8), ("45000", 5)]
    assert by_name(describe(world, GROUP, "another"))[SESSION].value == "45000"
    world.controller.commands.clear()
    assert change(world, GROUP, "g", (SESSION, SET, "50000"), (HEARTBEAT, DELETE, None)) == (0, "")
    assert world.controller.commands == [], "nothing has changed"
    assert change(world, GROUP, "g", (SESSION, DELETE, None)) == (0, "")
    assert ("group", "g") not in world.controller.image.configs


@pytest.mark.parametrize(
    ("kind", "key", "operation", "value", "said"),
    [
        (GROUP, SESSION, SET, "44999", "at least 45000"),
        (GROUP, SESSION, SET, "60001", "at most 60000"),
        (GROUP, HEARTBEAT, SET, "x", "32-bit integer"),
        (GROUP, "consumer.session.timeout", SET, "1", f"did you mean {SESSION}?"),
        (GROUP, SESSION, APPEND, "1", "not a list"),
        (GROUP, "no.such.key", SUBTRACT, "1", "unknown config of a group"),
        (CLIENT_METRICS, "interval.ms", SET, "99", "at least 100"),
        (CLIENT_METRICS, "match", SET, "client_id", "KEY=REGULAR EXPRESSION is expected"),
        (CLIENT_METRICS, "match", SET, "colour=blue", "keys are client_instance_id"),
        (CLIENT_METRICS, "match", SET, "client_id=(", "invalid regular expression"),
        (CLIENT_METRICS, "match", SET, "client_id=" + "a" * 201, "at most 200 characters"),
        (CLIENT_METRICS, "metric", SET, "*", "did you mean metrics?"),
    ],
)
def test_a_wrong_config_is_refused_with_40(kind: int, key: str, operation: int, value: str, said: str) -> None:
    world = AdminWorld()
    code, message = change(world, kind, "x", (key, operation, value))
    assert (code, said in message) == (40, True), message
    assert not any(of in ("group", "client-metrics") for of, _ in world.controller.image.configs)


def test_a_subscription_of_client_metrics_is_made_changed_and_removed() -> None:
    world = AdminWorld()
    made = change(
        world, CLIENT_METRICS, "s",
        ("metrics", SET, "org.apache.kafka.producer."),
        ("interval.ms", SET, "60000"),
        ("match", SET, "client_id=app-.*,client_software_name=apache-kafka-java"),
    )  # fmt: skip
    assert made == (0, "")
    assert change(world, CLIENT_METRICS, "s", ("metrics", APPEND, "org.apache.kafka.consumer.")) == (0, "")
    found = by_name(describe(world, CLIENT_METRICS, "s"))
    assert {name: (config.value, config.config_source) for name, config in found.items()} == {
        "interval.ms": ("60000", 7),
        "match": ("client_id=app-.*,client_software_name=apache-kafka-java", 7),
        "metrics": ("org.apache.kafka.producer.,org.apache.kafka.consumer.", 7),
    }
    assert [(int(kind), name) for kind, name in listed(world, 1, CLIENT_METRICS)] == [(CLIENT_METRICS, "s")]
    assert change(world, CLIENT_METRICS, "s", *((key, DELETE, None) for key in found)) == (0, "")
    assert listed(world, 1, CLIENT_METRICS) == []


@pytest.mark.parametrize("kind", [GROUP, CLIENT_METRICS])
def test_an_empty_name_is_an_invalid_request(kind: int) -> None:
    assert int(describe(AdminWorld(), kind, "").error_code) == 42
    assert change(AdminWorld(), kind, "", (SESSION, SET, "50000"))[0] == 42


def test_below_the_level_that_knows_them_they_have_no_configs() -> None:
    world = AdminWorld(level=NAMED_CONFIGS_LEVEL - 1)
    code, message = change(world, GROUP, "g", (SESSION, SET, "50000"))
    assert (code, f"feature level {NAMED_CONFIGS_LEVEL}" in message) == (95, True)
    assert by_name(describe(world, GROUP, "g"))[SESSION].value == "45000"


def test_validate_only_checks_and_changes_nothing() -> None:
    world = AdminWorld()
    assert change(world, GROUP, "g", (SESSION, SET, "50000"), validate_only=True) == (0, "")
    assert change(world, GROUP, "g", (SESSION, SET, "5"), validate_only=True)[0] == 40
    assert world.controller.image.configs == {}


def test_alter_configs_replaces_a_groups_configs() -> None:
    world = AdminWorld()
    assert replace(world, 2, GROUP, "g", **{SESSION: "50000"}) == 0
    assert replace(world, 2, GROUP, "g", **{HEARTBEAT: "6000"}) == 0
    assert world.controller.image.configs[("group", "g")] == {HEARTBEAT: "6000"}


# --- Loggers -----------------------------------------------------------------------------------------------------


def test_loggers_are_described_with_the_level_that_counts(logger: logging.Logger) -> None:
    world = AdminWorld()
    found = by_name(describe(world, BROKER_LOGGER, "1", synonyms=True, documentation=True))
    assert {"root", "tidelog", LOGGER} <= set(found)
    assert (found[LOGGER].config_source, found[LOGGER].read_only) == (6, False)
    logger.setLevel(logging.DEBUG)
    assert by_name(describe(world, BROKER_LOGGER, "1", [LOGGER]))[LOGGER].value == "DEBUG"


def test_a_loggers_level_is_changed_and_given_back(logger: logging.Logger) -> None:
    world = AdminWorld()
    above = by_name(describe(world, BROKER_LOGGER, "1"))[LOGGER].value
    for level, number in (("TRACE", 5), ("DEBUG", 10), ("info", 20), ("WARN", 30), ("ERROR", 40), ("FATAL", 50)):
        assert change(world, BROKER_LOGGER, "1", (LOGGER, SET, level)) == (0, "")
        assert logger.getEffectiveLevel() == number
        assert by_name(describe(world, BROKER_LOGGER, "1"))[LOGGER].value == level.upper()
    assert change(world, BROKER_LOGGER, "1", (LOGGER, DELETE, None)) == (0, "")
    assert by_name(describe(world, BROKER_LOGGER, "1"))[LOGGER].value == above


@pytest.mark.parametrize(
    ("name", "operation", "level", "code", "said"),
    [
        (LOGGER, SET, "LOUD", 40, "allowed are FATAL, ERROR, WARN, INFO, DEBUG, TRACE"),
        (LOGGER + "x", SET, "INFO", 40, "unknown logger"),
        (LOGGER, APPEND, "INFO", 40, "not a list"),
        ("root", DELETE, None, 42, "cannot be removed"),
    ],
)
def test_what_is_no_level_or_logger_is_refused_and_nothing_is_changed(
    logger: logging.Logger, name: str, operation: int, level: str | None, code: int, said: str
) -> None:
    refused = change(AdminWorld(), BROKER_LOGGER, "1", ("tidelog", SET, "FATAL"), (name, operation, level))
    assert (refused[0], said in refused[1]) == (code, True), refused
    assert logger.getEffectiveLevel() < logging.CRITICAL


def test_a_broker_has_its_own_loggers_and_no_others() -> None:
    world = AdminWorld(brokers=(1, 2))
    for name in ("2", ""):
        assert int(describe(world, BROKER_LOGGER, name).error_code) == 42
        assert change(world, BROKER_LOGGER, name, ("root", SET, "INFO"))[0] == 42
    assert replace(world, 2, BROKER_LOGGER, "1", root="INFO") == 42, "the old request would reset all others"


# --- ListConfigResources -----------------------------------------------------------------------------------------


def listed(world: AdminWorld, version: int, *kinds: int) -> list[tuple[Any, str]]:
    fields = {"resource_types": kinds} if version else {}
    answer = world.call(config_resources.APIS, LIST, version, **fields)
    assert int(answer.error_code) == 0
    return [(getattr(each, "resource_type", None), each.resource_name) for each in answer.config_resources]


def test_every_type_of_resource_is_listed() -> None:
    world = AdminWorld(brokers=(1, 2))
    world.topic("b")
    world.topic("a")
    change(world, GROUP, "g", (SESSION, SET, "50000"))
    change(world, CLIENT_METRICS, "s", ("metrics", SET, "*"))
    assert listed(world, 1) == [
        (TOPIC, "a"), (TOPIC, "b"), (BROKER, "1"), (BROKER, "2"), (BROKER_LOGGER, "1"), (BROKER_LOGGER, "2"),
        (CLIENT_METRICS, "s"), (GROUP, "g"),
    ]  # fmt: skip
    assert listed(world, 1, GROUP, TOPIC) == [(TOPIC, "a"), (TOPIC, "b"), (GROUP, "g")]
    assert [name for _, name in listed(world, 0)] == ["s"], "v0 knows client metrics only"


def test_a_type_that_is_unknown_is_answered_with_35() -> None:
    answer = AdminWorld().call(config_resources.APIS, LIST, 1, resource_types=(TOPIC, 3))
    assert (int(answer.error_code), list(answer.config_resources)) == (35, [])


# --- Long lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [SET, APPEND])
def test_a_subscription_has_no_more_metrics_than_the_bound(operation: int) -> None:
    world = AdminWorld()
    names = [f"m{index}" for index in range(MAX_ELEMENTS + 1)]
    code, message = change(world, CLIENT_METRICS, "s", ("metrics", operation, ",".join(names)))
    assert code == 40 and "at most 1000" in message
    assert change(world, CLIENT_METRICS, "s", ("metrics", operation, ",".join(names[1:]))) == (0, "")
    assert change(world, CLIENT_METRICS, "s", ("metrics", APPEND, "one.more"))[0] == 40


def test_long_lists_are_changed_in_time_that_grows_with_their_length() -> None:
    world = AdminWorld()
    world.topic("t", 1)
    key = "leader.replication.throttled.replicas"
    kept = ",".join(f"{index}:1" for index in range(4_000))
    others = ",".join(f"{index}:1" for index in range(4_000, 300_000))
    assert change(world, TOPIC, "t", (key, SET, kept))[0] == 0
    began = time.process_time()
    assert change(world, TOPIC, "t", (key, APPEND, others))[0] == 42
    assert change(world, TOPIC, "t", (key, SUBTRACT, others))[0] == 0
    assert time.process_time() - began < 5, "a billion comparisons take longer"
    assert by_name(describe(world, TOPIC, "t"))[key].value == kept
