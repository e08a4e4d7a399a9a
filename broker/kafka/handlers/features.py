"""UpdateFeatures (KIP-584): raising the cluster's feature level (docs/design/0013-feature-levels.md), and its like.

`tidelog.level` is only ever raised. `transaction.version` may be set to any level that is supported: it says which
protocol clients use, and every one of them is served. `metadata.version` follows the feature level and is fixed.

A request is made as a whole or not at all: every update is checked before the first is made. Two updates are two
commands of the controllers, the feature level first; asked again, a request that was made in part is completed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tidelog.broker.kafka.handlers.admin_errors import INVALID_REQUEST, NONE, ItemOutcome, outcome
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.cluster import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from tidelog.controller.model.features import (
    METADATA_VERSION,
    SUPPORTED_FEATURES,
    TRANSACTION_VERSION,
    feature_key,
    finalized,
)
from tidelog.controller.model.levels import FEATURE, TRANSACTIONS_LEVEL, UnsupportedLevel

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
RESULTS_UP_TO = 1
"""The last version whose answer has a result for each feature."""


async def update_features(context: RequestContext, request: UpdateFeaturesRequest) -> UpdateFeaturesResponse:
    """UpdateFeatures v0-2. Up to v1 every feature's result says why nothing was made; v2 has one error for all."""
    refused = _malformed(request.feature_updates)
    if refused is not None:
        return UpdateFeaturesResponse(error_code=INVALID_REQUEST, error_message=refused)
    updates = sorted(request.feature_updates, key=lambda update: update.feature != FEATURE)
    found = {update.feature: await outcome(_check(context, update, updates)) for update in updates}
    made: set[str] = set()
    if not request.validate_only and all(done.code == NONE for done in found.values()):
        for update in updates:
            found[update.feature] = await outcome(_make(context.services, update))
            if found[update.feature].code != NONE:
                break
            made.add(update.feature)
    return _answer(context.api_version, request.feature_updates, found, made)


def _answer(
    version: int, updates: Sequence[FeatureUpdateKey], found: Mapping[str, ItemOutcome[None]], made: Collection[str]
) -> UpdateFeaturesResponse:
    """Return the answer; a feature that was in order and not `made` fails with the first that was not in order."""
    failed = next((name for name, done in found.items() if done.code != NONE), None)
    if failed is None:
        results = [UpdatableFeatureResult(feature=update.feature) for update in updates]
        return UpdateFeaturesResponse(results=results if version <= RESULTS_UP_TO else ())
    error = found[failed]
    said = f"{failed[:100]!r} cannot be updated: {error.message}; {', '.join(made) or 'nothing'} was updated"
    if version > RESULTS_UP_TO:
        return UpdateFeaturesResponse(error_code=error.code, error_message=said)
    own = {name: (done.code, done.message) for name, done in found.items() if done.code != NONE}
    own |= dict.fromkeys(made, (NONE, None))
    answers = [(update.feature, *own.get(update.feature, (error.code, said))) for update in updates]
    return UpdateFeaturesResponse(
        results=[
            UpdatableFeatureResult(feature=name, error_code=code, error_message=message)
            for name, code, message in answers
        ]
    )


def _malformed(updates: Sequence[FeatureUpdateKey]) -> str | None:
    if not updates:
        return "the request names no feature"
    if len({update.feature for update in updates}) != len(updates):
        return "the request names a feature twice"
    return None


async def _check(context: RequestContext, update: FeatureUpdateKey, all_updates: Sequence[FeatureUpdateKey]) -> None:
    """Check one update. Raises `UnsupportedLevel`, `Unavailable`."""
    name, level, image = update.feature, update.max_version_level, context.services.controller.image
    supported = SUPPORTED_FEATURES.get(name)
    if supported is None:
        names = ", ".join(SUPPORTED_FEATURES)
        raise UnsupportedLevel(f"there is no feature {name[:100]!r}; there are {names}")
    if update.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise UnsupportedLevel(f"upgrade type {update.upgrade_type} is not known")
    current = finalized(image.level, image.kv).get(name, 0)
    if name == METADATA_VERSION and level != current:
        raise UnsupportedLevel(f"{METADATA_VERSION} follows {FEATURE} and is fixed at {current}")
    _check_direction(context.api_version, update, current)
    if name == FEATURE:
        await _check_level(context.services, level, current)
    elif level not in supported:
        raise UnsupportedLevel(f"{name} can be at levels {supported}, and not at {level}")
    if name == TRANSACTION_VERSION and level > 0:
        raised = [each.max_version_level for each in all_updates if each.feature == FEATURE]
        if max([image.level, *raised]) < TRANSACTIONS_LEVEL:
            raise UnsupportedLevel(f"{name} needs {FEATURE} {TRANSACTIONS_LEVEL}; the cluster is at {image.level}")


def _check_direction(version: int, update: FeatureUpdateKey, current: int) -> None:
    """Check that an update that lowers says so, and that one which says so does not raise. Raises `UnsupportedLevel`.

    v0 says only whether a level may be lowered.
    """
    name, level, lowers = update.feature, update.max_version_level, update.upgrade_type != UPGRADE
    if level < current and not (update.allow_downgrade if version == 0 else lowers):
        raise UnsupportedLevel(f"{name} is {current}; an update that lowers it to {level} must say that it does")
    if level > current and lowers:
        raise UnsupportedLevel(f"{name} is {current}; an update to {level} is no downgrade")


async def _check_level(services: Services, level: int, current: int) -> None:
    """Check that the feature level can be raised. Raises `UnsupportedLevel`, `Unavailable`."""
    if level < max(1, current):
        raise UnsupportedLevel(f"{FEATURE} cannot be set to {level}: it is never lowered or deleted")
    report = await services.controller.upgrade(level, dry_run=True)
    if level < report["level"]:
        raise UnsupportedLevel(f"{FEATURE} is {report['level']} and is never lowered")
    if report["unable"] and level > report["level"]:
        raise UnsupportedLevel(f"{FEATURE} {level} is not supported by {', '.join(report['unable'])}")


async def _make(services: Services, update: FeatureUpdateKey) -> None:
    """Make one update that was checked. Raises `UnsupportedLevel`, `Unavailable`."""
    if update.feature == FEATURE:
        await services.controller.upgrade(update.max_version_level, dry_run=False)
    elif update.feature == TRANSACTION_VERSION and services.controller.image.level >= TRANSACTIONS_LEVEL:
        await services.controller.put_kv(feature_key(update.feature), b"%d" % update.max_version_level)


APIS = [serve(UpdateFeaturesRequest, 0, 2, update_features)]
