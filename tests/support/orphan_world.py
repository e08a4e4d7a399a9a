"""The orphan search over a `CompactionWorld`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from controller import commands as c
from storage.orphan_cleaner import OrphanCleaner
from storage.orphan_scan import OrphanMetadata
from storage.settings import CleanSettings
from tests.support.compaction_world import CLUSTER, CompactionWorld


def metadata(world: CompactionWorld) -> OrphanMetadata:
    async def fence() -> int:
        return int(world.metadata.apply(c.PrepareObjects(1, 1), int))

    return OrphanMetadata(fence, lambda object_id: object_id in world.image.objects)


def cleaner(world: CompactionWorld, is_active: Callable[[], bool] = lambda: True, **settings: Any) -> OrphanCleaner:
    return OrphanCleaner(
        store=world.store,
        cluster_id=lambda: CLUSTER,
        metadata=metadata(world),
        clock=world.clock,
        rng=world.rng,
        settings=CleanSettings(**settings),
        is_active=is_active,
    )
