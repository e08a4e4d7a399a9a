"""The feature level over Kafka's protocol: ApiVersions and UpdateFeatures (KIP-584)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import schema
from tests.support.admin_world import NODE_ID, AdminWorld
from tidelog.broker.kafka.handlers import features
from tidelog.broker.kafka.handlers.api_versions import ApiVersions
from tidelog.controller.model import commands as c
from tidelog.controller.model.levels import FEATURE, NEWEST, SUPPORTED, level_key, told_range

INVALID_REQUEST, INVALID_UPDATE_VERSION = 42, 95


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


def shown(world: AdminWorld) -> tuple[dict[str, tuple[int, int]], dict[str, int], int]:
    api = ApiVersions([]).api
    answer = world.call([api], 18, 3, client_software_name="test", client_software_version="1")
    return (
        {str(each.name): (each.min_version, each.max_version) for each in answer.supported_features},
        {str(each.name): each.max_version_level for each in answer.finalized_features},
        answer.finalized_features_epoch,
    )


def test_api_versions_shows_the_supported_levels_and_the_one_in_force() -> None:
    supported, finalized, epoch = shown(world_at(1))
    assert supported[FEATURE] == (1, NEWEST)
    assert finalized == {"metadata.version": 21, FEATURE: 1}
    assert epoch == 1


def test_level_0_is_no_finalized_feature() -> None:
    supported, finalized, epoch = shown(world_at(0))
    assert supported[FEATURE] == (1, NEWEST)
    assert finalized == {"metadata.version": 21}
    assert epoch == 0


@pytest.mark.parametrize("version", [0, 1])
def test_the_level_is_raised(version: int) -> None:
    world = world_at(0)
    wanted = {"feature": FEATURE, "max_version_level": 1}
    answer = update(world, version, wanted)
    assert (answer.error_code, [(one.feature, one.error_code) for one in answer.results]) == (0, [(FEATURE, 0)])
    assert level_of(world) == 1
    assert shown(world)[1][FEATURE] == 1
    assert update(world, version, wanted).results[0].error_code == 0, "asked twice is success"


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
        ({"feature": "group.version", "max_version_level": 1}, "there is no feature 'group.version'"),
        ({"feature": "metadata.version", "max_version_level": 22}, "fixed at 21"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(wanted: dict[str, Any], said: str) -> None:
    world = world_at(0)
    answer = update(world, 1, wanted)
    assert answer.results[0].error_code == INVALID_UPDATE_VERSION
    assert said in answer.results[0].error_message
    mixed = [{"feature": FEATURE, "max_version_level": 1}, wanted]
    if wanted["feature"] != FEATURE:
        assert [one.error_code for one in update(world, 1, *mixed).results] == [0, INVALID_UPDATE_VERSION]
    assert level_of(world) == 0


def test_a_request_without_features_or_with_one_twice_is_malformed() -> None:
    world, wanted = world_at(0), {"feature": FEATURE, "max_version_level": 1}
    for updates in ([], [wanted, wanted]):
        answer = update(world, 1, *updates)
        assert (answer.error_code, list(answer.results)) == (INVALID_REQUEST, [])
    assert level_of(world) == 0
