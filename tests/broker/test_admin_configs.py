"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.admin_world import AdminWorld, part, versions
from tidelog.broker.kafka.handlers import configs
from tidelog.broker.partitions.topic_config import BROKER_KEYS, TOPIC_CONFIGS
from tidelog.controller.model import commands as c
from tidelog.runtime.errors import Unavailable

DESCRIBE, ALTER, INCREMENTAL = 32, 33, 44
TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)


def describe(
    world: AdminWorld,
    kind: int,
    name: str,
    keys: list[str] | None = None,
    *,
    version: int = 4,
    synonyms: bool = False,
    documentation: bool = False,
) -> Any:
    resource = part(
        DESCRIBE, version, "DescribeConfigsResource", resource_type=kind, resource_name=name, configuration_keys=keys
    )
    more = {"include_documentation": documentation} if version >= 3 else {}
    answer = world.call(configs.APIS, DESCRIBE, version, resources=[resource], include_synonyms=synonyms, **more)
    (result,) = answer.results
    return result


def by_name(result: Any) -> dict[str, Any]:
    assert int(result.error_code) == 0, result.error_message
    return {config.name: config for config in result.configs}


@pytest.mark.parametrize("version", versions(configs.APIS, DESCRIBE))
def test_every_version_describes_every_topic_config_with_its_source(version: int) -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1000")
    found = by_name(describe(world, TOPIC, "t", version=version, synonyms=True, documentation=True))
    assert set(found) == set(TOPIC_CONFIGS)
    retention = found["retention.ms"]
    assert (retention.value, retention.config_source, retention.read_only, retention.is_sensitive) == (
        "1000",
        1,
        False,
        False,
    )
    assert [(one.name, one.value, one.source) for one in retention.synonyms] == [
        ("retention.ms", "1000", 1),
        ("log.retention.ms", "604800000", 5),
    ]
    assert (found["segment.bytes"].config_source, found["cleanup.policy"].value) == (5, "delete")
    if version >= 3:
        types = {name: config.config_type for name, config in found.items()}
        assert (types["retention.ms"], types["cleanup.policy"], types["segment.bytes"]) == (5, 7, 3)
        assert (types["preallocate"], types["min.cleanable.dirty.ratio"], types["compression.type"]) == (1, 6, 2)
        assert all(config.documentation for config in found.values())


def test_synonyms_and_documentation_are_left_out_unless_asked_for() -> None:
    world = AdminWorld()
    world.topic("t")
    found = by_name(describe(world, TOPIC, "t"))
    assert not any(config.synonyms or config.documentation for config in found.values())


def test_only_the_keys_asked_for_are_described_and_none_means_all() -> None:
    world = AdminWorld()
    world.topic("t")
    assert list(by_name(describe(world, TOPIC, "t", ["segment.ms", "no.such.key"]))) == ["segment.ms"]
    assert len(by_name(describe(world, TOPIC, "t", []))) == len(TOPIC_CONFIGS)


def test_an_unknown_topic_is_answered_with_3() -> None:
    assert int(describe(AdminWorld(), TOPIC, "absent").error_code) == 3
    for name in ("a b", "", ".", "x" * 250):
        assert int(describe(AdminWorld(), TOPIC, name).error_code) == 17


def test_the_broker_resource_must_be_the_broker_that_answers() -> None:
    world = AdminWorld(brokers=(1, 2))
    for name in ("2", "x", "01"):
        result = describe(world, BROKER, name)
        assert int(result.error_code) == 42
        assert "this is broker 1" in result.error_message


@pytest.mark.parametrize("kind", [0, 3, 7, 64])
def test_other_resource_types_are_invalid_requests(kind: int) -> None:
    assert int(describe(AdminWorld(), kind, "x").error_code) == 42


@pytest.mark.parametrize("version", versions(configs.APIS, DESCRIBE))
def test_a_broker_describes_kafkas_names_and_its_own_dotted_ones(version: int) -> None:
    world = AdminWorld(tidelog__admin__url="http://127.0.0.1:1", wal__flush="sync", node__data_dir="/data")
    found = by_name(describe(world, BROKER, "1", version=version, synonyms=True))
    expected = {
        "num.partitions": "4",
        "auto.create.topics.enable": "true",
        "default.replication.factor": "1",
        "message.max.bytes": "1048588",
        "log.retention.ms": "604800000",
        "log.retention.hours": "168",
        "inter.broker.protocol.version": "4.2-IV1",
        "broker.id": "1",
        "log.dirs": "/data",
        "tidelog.admin.url": "http://127.0.0.1:1",
        "wal.flush": "sync",
    }
    assert {name: found[name].value for name in expected} == expected
    assert found["wal.flush"].read_only
    assert found["wal.flush"].config_source == 4
    assert not found["log.retention.ms"].read_only
    assert found["log.retention.ms"].config_source == 5
    assert set(BROKER_KEYS) <= set(found)


def test_secrets_are_listed_without_their_value() -> None:
    world = AdminWorld(s3__secret_access_key="hush", s3__access_key_id="hush")
    result = describe(world, BROKER, "1", synonyms=True, documentation=True)
    found = by_name(result)
    for name in ("s3.secret_access_key", "s3.access_key_id"):
        assert found[name].is_sensitive
        assert found[name].value is None
        assert not found[name].synonyms
    assert "hush" not in repr(result)


# --- IncrementalAlterConfigs -------------------------------------------------------------------------------------


def change(
    world: AdminWorld,
    kind: int,
    name: str,
    *operations: tuple[str, int, str | None],
    version: int = 1,
    validate_only: bool = False,
) -> tuple[int, str]:
    altered = [
        part(INCREMENTAL, version, "AlterableConfig", name=key, config_operation=operation, value=value)
        for key, operation, value in operations
    ]
    resource = part(
        INCREMENTAL, version, "AlterConfigsResource", resource_type=kind, resource_name=name, configs=altered
    )
    answer = world.call(configs.APIS, INCREMENTAL, version, resources=[resource], validate_only=validate_only)
    (result,) = answer.responses
    assert (result.resource_type, result.resource_name) == (kind, name)
    return int(result.error_code), result.error_message or ""


def overrides(world: AdminWorld, name: str = "t") -> dict[str, str]:
    record = world.controller.image.topic(name)
    assert record is not None
    return record.configs


@pytest.mark.parametrize("version", versions(configs.APIS, INCREMENTAL))
def test_every_version_sets_and_deletes_single_configs_of_a_topic(version: int) -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1000", segment_ms="500")
    done = change(world, TOPIC, "t", ("retention.ms", SET, " 2000 "), ("segment.ms", DELETE, None), version=version)
    assert done == (0, "")
    assert overrides(world) == {"retention.ms": "2000"}


def test_append_and_subtract_change_lists_from_the_value_that_counts() -> None:
    world = AdminWorld()
    world.topic("t")
    assert change(world, TOPIC, "t", ("cleanup.policy", APPEND, "compact"))[0] == 0
    assert overrides(world) == {"cleanup.policy": "delete,compact"}
    assert change(world, TOPIC, "t", ("cleanup.policy", APPEND, "compact"))[0] == 0
    assert overrides(world) == {"cleanup.policy": "delete,compact"}
    assert change(world, TOPIC, "t", ("cleanup.policy", SUBTRACT, "delete"))[0] == 0
    assert overrides(world) == {"cleanup.policy": "compact"}


def test_subtracting_the_last_cleanup_policy_leaves_an_empty_list_as_in_kafka() -> None:
    world = AdminWorld()
    world.topic("t")
    assert change(world, TOPIC, "t", ("cleanup.policy", SUBTRACT, "delete"))[0] == 0
    assert overrides(world) == {"cleanup.policy": ""}


@pytest.mark.parametrize("operation", [APPEND, SUBTRACT])
def test_append_and_subtract_on_what_is_no_list_are_refused_with_40(operation: int) -> None:
    world = AdminWorld()
    world.topic("t")
    code, message = change(world, TOPIC, "t", ("retention.ms", operation, "1"))
    assert (code, "not a list" in message) == (40, True)


def test_validate_only_checks_and_changes_nothing() -> None:
    world = AdminWorld()
    world.topic("t")
    assert change(world, TOPIC, "t", ("retention.ms", SET, "1"), validate_only=True)[0] == 0
    assert change(world, TOPIC, "t", ("retention.ms", SET, "x"), validate_only=True)[0] == 40
    assert overrides(world) == {}


def test_an_unknown_config_is_refused_with_40_and_the_nearest_name() -> None:
    world = AdminWorld()
    world.topic("t")
    for operation, value in ((SET, "1"), (DELETE, None), (APPEND, "1")):
        code, message = change(world, TOPIC, "t", ("retention.msec", operation, value))
        assert (code, "did you mean retention.ms?" in message) == (40, True)


def test_an_override_that_this_version_does_not_know_can_still_be_deleted() -> None:
    world = AdminWorld()
    world.topic("t", from_the_future="1")
    assert change(world, TOPIC, "t", ("retention.ms", SET, "1"))[0] == 0
    assert change(world, TOPIC, "t", ("from.the.future", DELETE, None))[0] == 0
    assert overrides(world) == {"retention.ms": "1"}


@pytest.mark.parametrize("operation", [SET, APPEND, SUBTRACT])
def test_a_null_value_is_an_invalid_request(operation: int) -> None:
    world = AdminWorld()
    world.topic("t")
    assert change(world, TOPIC, "t", ("cleanup.policy", operation, None))[0] == 42


def test_an_unknown_operation_and_a_config_given_twice_are_invalid_requests() -> None:
    world = AdminWorld()
    world.topic("t")
    assert change(world, TOPIC, "t", ("retention.ms", 9, "1"))[0] == 42
    assert change(world, TOPIC, "t", ("retention.ms", SET, "1"), ("retention.ms", DELETE, None))[0] == 42


def test_a_resource_given_twice_is_refused_once() -> None:
    world = AdminWorld()
    world.topic("t")
    resource = part(INCREMENTAL, 1, "AlterConfigsResource", resource_type=TOPIC, resource_name="t", configs=[])
    answer = world.call(configs.APIS, INCREMENTAL, 1, resources=[resource, resource], validate_only=False)
    assert [int(result.error_code) for result in answer.responses] == [42]


def test_values_that_contradict_each_other_are_refused_together() -> None:
    world = AdminWorld()
    world.topic("t", max_compaction_lag_ms="100")
    code, message = change(world, TOPIC, "t", ("min.compaction.lag.ms", SET, "101"))
    assert (code, "larger than" in message) == (40, True)


def test_an_unknown_topic_cannot_be_altered() -> None:
    assert change(AdminWorld(), TOPIC, "absent", ("retention.ms", SET, "1"))[0] == 3


def test_the_name_of_no_topic_is_refused_as_such() -> None:
    assert change(AdminWorld(), TOPIC, "a b", ("retention.ms", SET, "1"))[0] == 17
    assert change(AdminWorld(), TOPIC, "", ("retention.ms", SET, "1"))[0] == 42


def test_a_change_that_changes_nothing_costs_no_command() -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1")
    world.controller.commands.clear()
    assert change(world, TOPIC, "t", ("retention.ms", SET, "1"), ("segment.ms", DELETE, None)) == (0, "")
    assert world.controller.commands == []


def test_topic_defaults_change_at_run_time_for_a_broker_and_for_the_cluster() -> None:
    world = AdminWorld()
    world.topic("t")
    assert change(world, BROKER, "", ("log.retention.ms", SET, "7000"), ("log.roll.ms", SET, "70")) == (0, "")
    assert change(world, BROKER, "1", ("log.retention.ms", SET, "9000")) == (0, "")
    retention = by_name(describe(world, TOPIC, "t", ["retention.ms"], synonyms=True))["retention.ms"]
    assert [(one.name, one.value, one.source) for one in retention.synonyms] == [
        ("log.retention.ms", "9000", 2),
        ("log.retention.ms", "7000", 3),
        ("log.retention.ms", "604800000", 5),
    ]
    cluster = by_name(describe(world, BROKER, ""))
    assert {name: (config.value, config.config_source) for name, config in cluster.items()} == {
        "log.retention.ms": ("7000", 3),
        "log.roll.ms": ("70", 3),
    }
    assert by_name(describe(world, BROKER, "1"))["log.retention.ms"].value == "9000"
    assert change(world, BROKER, "1", ("log.retention.ms", DELETE, None)) == (0, "")
    assert by_name(describe(world, TOPIC, "t"))["retention.ms"].value == "7000"


@pytest.mark.parametrize("key", ["num.partitions", "wal.flush"])
def test_a_static_broker_config_is_an_invalid_request_that_says_where_to_set_it(key: str) -> None:
    world = AdminWorld(wal__flush="sync")
    code, message = change(world, BROKER, "1", (key, SET, "1"))
    assert (code, "configuration file" in message) == (42, True)


def test_to_delete_a_known_config_that_is_not_set_is_no_error() -> None:
    world = AdminWorld(brokers=(1,), wal__flush="sync")
    world.topic("t")
    world.controller.commands.clear()
    keys = ["log.retention.ms", "leader.replication.throttled.rate", "num.partitions", "wal.flush"]
    for name in ("1", ""):
        assert change(world, BROKER, name, *((key, DELETE, None) for key in keys)) == (0, "")
    assert change(world, TOPIC, "t", ("leader.replication.throttled.replicas", DELETE, None)) == (0, "")
    assert world.controller.commands == []
    assert change(world, BROKER, "1", ("no.such.config", DELETE, None))[0] == 40


THROTTLES = (
    "follower.replication.throttled.rate",
    "leader.replication.throttled.rate",
    "replica.alter.log.dirs.io.max.bytes.per.second",
)


@pytest.mark.parametrize("name", ["1", ""])
def test_throttles_of_moves_are_taken_shown_and_said_to_have_no_effect(name: str) -> None:
    world = AdminWorld()
    code, message = change(world, BROKER, name, *((key, SET, "1000") for key in THROTTLES))
    assert code == 0
    assert message.startswith("a move copies nothing here, so throttles have no effect: follower.")
    shown = by_name(describe(world, BROKER, name, documentation=True))
    assert {shown[key].value for key in THROTTLES} == {"1000"}
    if name:
        assert all("It has no effect" in str(shown[key].documentation) for key in THROTTLES)
    assert change(world, BROKER, name, *((key, DELETE, None) for key in THROTTLES)) == (0, "")
    assert not set(THROTTLES) & set(by_name(describe(world, BROKER, "")))
    assert change(world, BROKER, name, (THROTTLES[0], SET, "-1"))[0] == 40
    world.topic("t")
    throttled = change(world, TOPIC, "t", ("leader.replication.throttled.replicas", SET, "0:1,0:2"))
    assert (throttled[0], "have no effect" in throttled[1]) == (0, True)
    assert overrides(world) == {"leader.replication.throttled.replicas": "0:1,0:2"}


def test_an_unknown_or_wrong_broker_config_is_refused_with_40() -> None:
    world = AdminWorld()
    code, message = change(world, BROKER, "1", ("log.retention.msec", SET, "1"))
    assert (code, "did you mean log.retention.ms?" in message) == (40, True)
    code, message = change(world, BROKER, "1", ("log.retention.ms", SET, "x"))
    assert (code, "log.retention.ms" in message) == (40, True)


def test_a_broker_changes_itself_and_no_other() -> None:
    world = AdminWorld(brokers=(1, 2))
    assert change(world, BROKER, "2", ("log.retention.ms", SET, "1"))[0] == 42


def test_other_resource_types_cannot_be_altered() -> None:
    code, message = change(AdminWorld(), 3, "1", ("x", SET, "1"))
    assert (code, "resource type 3 has no configs" in message) == (42, True)


# --- changes that this broker does not know of yet --------------------------------------------------------------


def changed_elsewhere(world: AdminWorld, **values: str | None) -> None:
    """Another broker has changed topic t; this one has not heard of it."""
    world.controller.late = []
    record = world.controller.image.topic("t")
    assert record is not None
    world.controller.apply(c.AlterTopicConfigs(record.id, {key.replace("_", "."): v for key, v in values.items()}))


def test_a_value_is_set_again_that_another_broker_has_changed() -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1000")
    changed_elsewhere(world, retention_ms="2000")
    assert change(world, TOPIC, "t", ("retention.ms", SET, "1000")) == (0, "")
    assert overrides(world) == {"retention.ms": "1000"}


def test_a_list_is_appended_to_that_another_broker_has_changed() -> None:
    world, name = AdminWorld(), "leader.replication.throttled.replicas"
    world.topic("t")
    changed_elsewhere(world, **{name: "0:1"})
    change(world, TOPIC, "t", (name, APPEND, "1:1"))
    assert overrides(world) == {name: "0:1,1:1"}


def test_all_overrides_are_replaced_those_of_another_broker_too() -> None:
    world = AdminWorld()
    world.topic("t")
    changed_elsewhere(world, retention_ms="2000")
    assert replace(world, 2, TOPIC, "t", segment_ms="500") == 0
    assert overrides(world) == {"segment.ms": "500"}


def test_configs_that_contradict_those_of_another_broker_are_refused() -> None:
    world = AdminWorld()
    world.topic("t")
    changed_elsewhere(world, **{"min.compaction.lag.ms": "5000"})
    assert change(world, TOPIC, "t", ("max.compaction.lag.ms", SET, "1000"))[0] == 40
    assert overrides(world) == {"min.compaction.lag.ms": "5000"}


def test_a_change_is_computed_anew_if_another_one_comes_first() -> None:
    """The other one comes between the look at the metadata and the command."""
    world, name = AdminWorld(), "leader.replication.throttled.replicas"
    world.topic("t")
    catch_up = world.controller.catch_up

    async def catch_up_then_fall_behind() -> None:
        await catch_up()
        world.controller.catch_up = catch_up  # type: ignore[method-assign]
        changed_elsewhere(world, **{name: "0:1"})

    world.controller.catch_up = catch_up_then_fall_behind  # type: ignore[method-assign]
    change(world, TOPIC, "t", (name, APPEND, "1:1"))
    assert overrides(world) == {name: "0:1,1:1"}
    assert world.controller.commands[-3:] == ["AlterTopicConfigs"] * 3


def test_a_broker_that_reaches_no_controller_says_so_even_if_nothing_would_change() -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1000")

    async def catch_up() -> None:
        raise Unavailable("no controller answers")

    world.controller.catch_up = catch_up  # type: ignore[method-assign]
    code, message = change(world, TOPIC, "t", ("retention.ms", SET, "1000"))
    assert (code, "no controller answers" in message) == (7, True)


# --- AlterConfigs (legacy) ---------------------------------------------------------------------------------------


def replace(world: AdminWorld, version: int, kind: int, name: str, **values: str | None) -> int:
    altered = [
        part(ALTER, version, "AlterableConfig", name=key.replace("_", "."), value=value)
        for key, value in values.items()
    ]
    resource = part(ALTER, version, "AlterConfigsResource", resource_type=kind, resource_name=name, configs=altered)
    answer = world.call(configs.APIS, ALTER, version, resources=[resource], validate_only=False)
    (result,) = answer.responses
    return int(result.error_code)


@pytest.mark.parametrize("version", versions(configs.APIS, ALTER))
def test_every_version_of_alter_configs_replaces_all_overrides(version: int) -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1000", segment_ms="500")
    assert replace(world, version, TOPIC, "t", retention_ms="2000", cleanup_policy="compact") == 0
    assert overrides(world) == {"retention.ms": "2000", "cleanup.policy": "compact"}
    assert replace(world, version, TOPIC, "t") == 0
    assert overrides(world) == {}


def test_alter_configs_replaces_a_brokers_dynamic_values() -> None:
    world = AdminWorld()
    assert replace(world, 2, BROKER, "1", log_retention_ms="5", log_roll_ms="6") == 0
    assert replace(world, 2, BROKER, "1", log_roll_ms="7") == 0
    assert world.controller.image.configs["broker", "1"] == {"log.roll.ms": "7"}


def test_alter_configs_refuses_what_incremental_alter_configs_refuses() -> None:
    world = AdminWorld()
    world.topic("t", retention_ms="1000")
    assert replace(world, 2, TOPIC, "t", retention_ms=None) == 42
    assert replace(world, 2, TOPIC, "t", retention_ms="x") == 40
    assert replace(world, 2, TOPIC, "t", no_such_key="x") == 40
    assert replace(world, 2, TOPIC, "absent") == 3
    assert overrides(world) == {"retention.ms": "1000"}


def test_the_default_replication_factor_is_what_the_smallest_set_with_a_master_gives() -> None:
    world = AdminWorld(brokers=(1, 2, 3))

    def told() -> set[str]:
        values = {name: each.value for name, each in by_name(describe(world, BROKER, "1")).items()}
        return {values[name] for name in ("default.replication.factor", "offsets.topic.replication.factor")}

    assert told() == {"1"}
    world.controller.replicate(1, 1, 2, 3)
    world.controller.replicate(2, 1, 2, 3)
    assert told() == {"1"}
    world.controller.set_alive(3, False)
    assert told() == {"3"}


# --- settings of the controllers ---------------------------------------------------------------------------------


SESSION = "controller.session_timeout_ms"


def test_a_dynamic_setting_of_the_controllers_is_the_clusters_and_shown_with_its_source() -> None:
    world = AdminWorld(controller__session_timeout_ms="9000", controller__heartbeat_interval_ms="1000")
    assert change(world, BROKER, "", (SESSION, SET, " 5000 "), ("log.retention.ms", SET, "7000")) == (0, "")
    assert world.controller.image.cluster_configs == {SESSION: "5000", "log.retention.ms": "7000"}
    found = by_name(describe(world, BROKER, "1", synonyms=True))[SESSION]
    assert (found.value, found.config_source, found.read_only, found.config_type) == ("5000", 3, False, 5)
    assert [(one.value, one.source) for one in found.synonyms] == [("5000", 3), ("9000", 4)]
    assert by_name(describe(world, BROKER, ""))[SESSION].value == "5000"
    assert change(world, BROKER, "", (SESSION, DELETE, None)) == (0, "")
    found = by_name(describe(world, BROKER, "1"))[SESSION]
    assert (found.value, found.config_source) == ("9000", 4)
    assert world.controller.image.cluster_configs == {"log.retention.ms": "7000"}


@pytest.mark.parametrize(
    ("name", "operation", "code", "message"),
    [
        ("", (SESSION, SET, "2000"), 40, "less than 3 heartbeat intervals"),
        ("", (SESSION, SET, "x"), 40, "invalid value"),
        ("", (SESSION, APPEND, "5000"), 40, "is not a list"),
        ("", ("controller.read_grace_ms", SET, "1000"), 40, "would read objects that are deleted"),
        ("", ("controller.members", SET, "1@h:1"), 40, "the quorum changes by a command"),
        ("1", (SESSION, SET, "5000"), 42, "counts for all brokers"),
    ],
)
def test_what_the_controllers_do_not_take_is_refused_and_nothing_of_the_request_is_done(
    name: str, operation: tuple[str, int, str], code: int, message: str
) -> None:
    world = AdminWorld()
    found = change(world, BROKER, name, ("log.retention.ms", SET, "7000"), operation)
    assert found[0] == code and message in found[1]
    assert world.controller.image.configs == {}


def test_below_level_2_the_controllers_settings_are_not_changed() -> None:
    world = AdminWorld(level=1)
    code, message = change(world, BROKER, "", (SESSION, SET, "5000"))
    assert code == 95 and "feature level 2" in message and world.controller.image.configs == {}


def test_validate_only_changes_no_setting_of_the_controllers() -> None:
    world = AdminWorld()
    assert change(world, BROKER, "", (SESSION, SET, "5000"), validate_only=True) == (0, "")
    assert world.controller.image.configs == {}
