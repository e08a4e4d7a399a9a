"""UpdateFeatures (KIP-584): raising the cluster's feature level (docs/design/0013-feature-levels.md).

One feature can be updated, `tidelog.level`, and only upwards. `metadata.version` is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.broker.kafka.handlers.admin_errors import INVALID_REQUEST, outcome
from tidelog.broker.kafka.handlers.api_versions import METADATA_VERSION, METADATA_VERSION_LEVEL
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.cluster import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from tidelog.controller.model.levels import FEATURE, UnsupportedLevel

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


async def update_features(context: RequestContext, request: UpdateFeaturesRequest) -> UpdateFeaturesResponse:
    """UpdateFeatures v0-1. All updates are checked before one is made; the level is the only one that changes."""
    refused = _malformed(request.feature_updates)
    if refused is not None:
        return UpdateFeaturesResponse(error_code=INVALID_REQUEST, error_message=refused)
    updates, services = request.feature_updates, context.services
    found = [await outcome(_update(services, update, validate_only=True)) for update in updates]
    if not request.validate_only and all(done.code == 0 for done in found):
        found = [await outcome(_update(services, update, validate_only=False)) for update in updates]
    return UpdateFeaturesResponse(
        results=[
            UpdatableFeatureResult(feature=update.feature, error_code=done.code, error_message=done.message)
            for update, done in zip(updates, found, strict=True)
        ]
    )


def _malformed(updates: Sequence[FeatureUpdateKey]) -> str | None:
    if not updates:
        return "the request names no feature"
    if len({update.feature for update in updates}) != len(updates):
        return "the request names a feature twice"
    return None


async def _update(services: Services, update: FeatureUpdateKey, *, validate_only: bool) -> None:
    """Make one update, or check it only. Raises `UnsupportedLevel`, `Unavailable`."""
    level = update.max_version_level
    if update.feature == METADATA_VERSION:
        if level != METADATA_VERSION_LEVEL:
            raise UnsupportedLevel(f"{METADATA_VERSION} is fixed at {METADATA_VERSION_LEVEL}")
        return
    if update.feature != FEATURE:
        raise UnsupportedLevel(f"there is no feature {update.feature[:100]!r}; {FEATURE} can be updated")
    if update.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise UnsupportedLevel(f"upgrade type {update.upgrade_type} is not known")
    if level < 1:
        raise UnsupportedLevel(f"{FEATURE} cannot be set to {level}: it is never lowered or deleted")
    report = await services.controller.upgrade(level, dry_run=validate_only)
    if level < report["level"]:
        raise UnsupportedLevel(f"{FEATURE} is {report['level']} and is never lowered")
    if report["unable"]:
        raise UnsupportedLevel(f"{FEATURE} {level} is not supported by {', '.join(report['unable'])}")


APIS = [serve(UpdateFeaturesRequest, 0, 1, update_features)]
