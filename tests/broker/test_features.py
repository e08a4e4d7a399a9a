"""The feature level over Kafka's protocol: ApiVersions and UpdateFeatures (KIP-584)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support import schema
from tests.support.admin_world import NODE_ID, AdminWorld
from tidelog.broker.kafka.handlers import features
from tidelog.broker.kafka.handlers.api_versions import ApiVersions
from tidelog.controller.model import commands as c
from tidelog.controller.model.features import METADATA_LEVELS
from tidelog.controller.model.levels import (
    FEATURE,
    NEWEST,
    SUPPORTED,
    TRANSACTIONS_LEVEL,
    level_key,
    told_range,
)
from tidelog.runtime.errors import Unavailable

INVALID_REQUEST, INVALID_UPDATE_VERSION = 42, 95
METADATA = METADATA_LEVELS.newest


def world_at(level: int, *, told: bool = True) -> AdminWorld:
    """A cluster at a level, whose broker supports every one if it `told` that."""
    world = AdminWorld(level=level)
    if told:
        world.controller.apply(c.PutKv(level_key(NODE_ID), told_range(1, SUPPORTED)))
    return world


def update(world: AdminWorld, version: int, *updates: dict[str, Any], **fields: Any) -> Any:
    make = schema.request(57, version).make
    found = tuple(make("FeatureUpdateKey", **{"allow_downgrade": False, **each}) for each in updates)
    return world.call(features.APIS, 57, version, feature_updates=found, **fields)


def level_of(world: AdminWorld) -> int:
    cluster = world.controller.image.cluster
    assert cluster is not None
    return cluster.level


def shown(world: AdminWorld, version: int = 4) -> tuple[dict[str, tuple[int, int]], dict[str, int], int]:
    api = ApiVersions([]).api
    answer = world.call([api], 18, version, client_software_name="test", client_software_version="1")
    return (
        {str(each.name): (each.min_version, each.max_version) for each in answer.supported_features},
        {str(each.name): each.max_version_level for each in answer.finalized_features},
        answer.finalized_features_epoch,
    )


def test_api_versions_shows_the_supported_levels_and_the_one_in_force() -> None:
    supported, finalized, _ = shown(world_at(1))
    assert supported == {FEATURE: (1, NEWEST), "metadata.version": (7, METADATA), "transaction.version": (0, 2)}
    assert finalized == {"metadata.version": 21, FEATURE: 1}


def test_kafkas_own_features_are_finalized_from_the_level_of_transactions_on() -> None:
    assert shown(world_at(TRANSACTIONS_LEVEL - 1))[1] == {"metadata.version": 21, FEATURE: TRANSACTIONS_LEVEL - 1}
    wanted = {"metadata.version": METADATA, FEATURE: TRANSACTIONS_LEVEL, "transaction.version": 2}
    assert shown(world_at(TRANSACTIONS_LEVEL))[1] == wanted


def test_clients_that_cannot_decode_a_minimum_of_0_are_not_shown_one() -> None:
    supported, finalized, _ = shown(world_at(NEWEST), 3)
    assert set(supported) == {FEATURE, "metadata.version"}
    assert finalized["transaction.version"] == 2


def test_the_epoch_of_finalized_features_grows_with_every_change() -> None:
    world = world_at(0)
    epochs = [shown(world)[2]]
    for wanted in (
        {"feature": FEATURE, "max_version_level": NEWEST},
        {"feature": "transaction.version", "max_version_level": 1, "upgrade_type": 2},
        {"feature": "transaction.version", "max_version_level": 2},
    ):
        assert update(world, 2, wanted).error_code == 0
        epochs.append(shown(world)[2])
    assert epochs[0] >= 0 and all(before < after for before, after in itertools.pairwise(epochs))


def test_level_0_is_no_finalized_feature() -> None:
    supported, finalized, epoch = shown(world_at(0))
    assert supported[FEATURE] == (1, NEWEST)
    assert finalized == {"metadata.version": 21}
    assert epoch >= 0


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_level_is_raised(version: int) -> None:
    world = world_at(0)
    wanted = {"feature": FEATURE, "max_version_level": 1}
    for _ in range(2):  # asked twice is success
        answer = update(world, version, wanted)
        assert answer.error_code == 0
        if version < 2:
            assert [(one.feature, one.error_code) for one in answer.results] == [(FEATURE, 0)]
    assert level_of(world) == 1
    assert shown(world)[1][FEATURE] == 1


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_level_in_force_is_set_again_although_a_controller_is_away(version: int) -> None:
    world = world_at(NEWEST)
    world.controller.members = {NODE_ID: "own", 7: "away:7"}
    assert "controller 7" in str(update(world, version, {"feature": FEATURE, "max_version_level": NEWEST + 1}))
    answer = update(world, version, {"feature": FEATURE, "max_version_level": NEWEST})
    assert answer.error_code == 0
    if version < 2:
        assert [one.error_code for one in answer.results] == [0]


@pytest.mark.parametrize("level", [0, 1])
def test_the_protocol_of_transactions_that_clients_use_is_lowered_and_raised_again(level: int) -> None:
    world = world_at(NEWEST)
    lower = {"feature": "transaction.version", "max_version_level": level, "upgrade_type": 2}
    assert update(world, 2, {**lower, "upgrade_type": 1}).error_code == INVALID_UPDATE_VERSION, "does not say so"
    assert update(world, 2, lower, validate_only=True).error_code == 0
    assert shown(world)[1]["transaction.version"] == 2
    assert update(world, 2, lower).error_code == 0
    assert shown(world)[1].get("transaction.version", 0) == level
    raised = {**lower, "max_version_level": 2}
    assert "is no downgrade" in update(world, 2, raised).error_message
    assert update(world, 2, {**raised, "upgrade_type": 1}).error_code == 0
    assert shown(world)[1]["transaction.version"] == 2


def test_version_0_lowers_a_feature_only_if_it_may() -> None:
    world, wanted = world_at(NEWEST), {"feature": "transaction.version", "max_version_level": 1}
    assert update(world, 0, wanted).results[0].error_code == INVALID_UPDATE_VERSION
    assert update(world, 0, {**wanted, "allow_downgrade": True}).results[0].error_code == 0
    assert shown(world)[1]["transaction.version"] == 1


def test_transactions_are_finalized_together_with_the_level_that_they_need() -> None:
    world = world_at(TRANSACTIONS_LEVEL - 1)
    wanted = {"feature": "transaction.version", "max_version_level": 1}
    refused = update(world, 2, wanted)
    assert refused.error_code == INVALID_UPDATE_VERSION
    assert f"needs {FEATURE} {TRANSACTIONS_LEVEL}; the cluster is at {TRANSACTIONS_LEVEL - 1}" in refused.error_message
    off = {"feature": "transaction.version", "max_version_level": 0}
    assert update(world, 2, off).error_code == 0, "it is off already"
    assert update(world, 2, wanted, {"feature": FEATURE, "max_version_level": NEWEST}).error_code == 0
    assert level_of(world) == NEWEST and shown(world)[1]["transaction.version"] == 1


def test_an_update_that_stops_halfway_tells_what_was_made() -> None:
    wanted = [{"feature": "transaction.version", "max_version_level": 1}, {"feature": FEATURE, "max_version_level": 4}]
    for version in (1, 2):
        world = world_at(TRANSACTIONS_LEVEL - 1)

        async def lost(key: str, value: bytes) -> None:
            raise Unavailable(f"the controllers are away, {key} stays")

        world.controller.put_kv = lost  # type: ignore[method-assign]
        answer = update(world, version, *wanted)
        assert level_of(world) == 4
        if version == 1:
            assert [(one.feature, one.error_code) for one in answer.results] == [
                ("transaction.version", Unavailable.kafka_code),
                (FEATURE, 0),
            ]
        else:
            assert answer.error_code == Unavailable.kafka_code
            assert f"{FEATURE} was updated" in answer.error_message


def test_a_validation_changes_nothing() -> None:
    world = world_at(0)
    answer = update(world, 1, {"feature": FEATURE, "max_version_level": 1}, validate_only=True)
    assert answer.results[0].error_code == 0
    assert level_of(world) == 0


@pytest.mark.parametrize("validate_only", [False, True])
def test_a_member_that_does_not_support_the_level_is_named(validate_only: bool) -> None:
    world = world_at(0, told=False)
    [one] = update(world, 1, {"feature": FEATURE, "max_version_level": 1}, validate_only=validate_only).results
    assert one.error_code == INVALID_UPDATE_VERSION
    assert f"broker {NODE_ID} (levels 0)" in one.error_message
    assert level_of(world) == 0


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"feature": FEATURE, "max_version_level": 0}, "never lowered or deleted"),
        ({"feature": FEATURE, "max_version_level": NEWEST + 1}, "not supported by controller 1"),
        ({"feature": FEATURE, "max_version_level": 1, "upgrade_type": 9}, "upgrade type 9"),
        ({"feature": FEATURE, "max_version_level": 1, "upgrade_type": 2}, "is no downgrade"),
        ({"feature": "group.version", "max_version_level": 1}, "there is no feature 'group.version'"),
        ({"feature": "metadata.version", "max_version_level": 22}, "fixed at 21"),
        ({"feature": "metadata.version", "max_version_level": 7, "upgrade_type": 3}, "fixed at 21"),
        ({"feature": "transaction.version", "max_version_level": 3}, "can be at levels 0 to 2, and not at 3"),
        ({"feature": "transaction.version", "max_version_level": -1, "upgrade_type": 2}, "not at -1"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(wanted: dict[str, Any], said: str) -> None:
    world = world_at(0)
    answer = update(world, 1, wanted)
    assert answer.results[0].error_code == INVALID_UPDATE_VERSION
    assert said in answer.results[0].error_message
    mixed = [{"feature": FEATURE, "max_version_level": 1}, wanted]
    if wanted["feature"] != FEATURE:
        for version in (0, 1, 2):
            answer = update(world, version, *mixed)
            if version < 2:
                assert [one.error_code for one in answer.results] == [INVALID_UPDATE_VERSION] * 2
                assert "nothing was updated" in answer.results[0].error_message
            else:
                assert answer.error_code == INVALID_UPDATE_VERSION
                assert said in answer.error_message and "nothing was updated" in answer.error_message
    assert level_of(world) == 0


def test_a_request_without_features_or_with_one_twice_is_malformed() -> None:
    world, wanted = world_at(0), {"feature": FEATURE, "max_version_level": 1}
    for updates in ([], [wanted, wanted]):
        answer = update(world, 1, *updates)
        assert (answer.error_code, list(answer.results)) == (INVALID_REQUEST, [])
    assert level_of(world) == 0
