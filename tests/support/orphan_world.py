"""The orphan search over a `CompactionWorld`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support.compaction_world import CLUSTER, CompactionWorld
from tidelog.controller.model import commands as c
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata
from tidelog.storage.settings import CleanSettings


def metadata(world: CompactionWorld) -> OrphanMetadata:
    async def fence() -> int:
        return int(world.metadata.apply(c.PrepareObjects(1, 1), int))

    async def unknown(object_ids: Sequence[int]) -> list[int]:
        return [object_id for object_id in object_ids if object_id not in world.image.objects]

    return OrphanMetadata(fence, lambda object_id: object_id in world.image.objects, unknown)


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
