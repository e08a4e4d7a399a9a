"""Deletes objects from the bucket that no metadata names any more: expired ids and destroyed objects.

The controller owns the lists; this module knows keys and the bucket. The order of the steps keeps rule 6:
1. an id whose TTL has expired becomes DESTROYED in the metadata first, so that a late commit is refused;
2. a DESTROYED object is deleted from the bucket after its delay, when readers with older metadata have finished;
3. the metadata forgets the id only after the bucket has acknowledged the delete. A crash in between repeats the delete:
   deleting an absent key is success.

An upload with an expired id may still be putting its object during the delete; the orphan scan finds what this leaves
(its id is below the next id, and no metadata names it).

Entry: `ObjectCleaner`. `tidelog.controller.active.duties` decides what is due.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.objects.key import object_key

logger = logging.getLogger(__name__)

MAX_BATCH = 1000
"""Objects per step: the limit of one S3 delete request."""


class ObjectCleaner:
    """Deletes destroyed objects from the bucket."""

    def __init__(self, store: ObjectStore, cluster_id: str) -> None:
        self._store = store
        self._cluster_id = cluster_id
        self.deleted = 0
        """Objects deleted since the start."""

    async def delete(self, object_ids: Sequence[int]) -> None:
        """Delete destroyed objects; when it returns, the metadata may forget them. Raises `Unavailable`."""
        for first in range(0, len(object_ids), MAX_BATCH):
            batch = object_ids[first : first + MAX_BATCH]
            await self._store.delete([object_key(self._cluster_id, object_id) for object_id in batch])
            self.deleted += len(batch)
            logger.info("objects deleted", extra={"count": len(batch), "first": batch[0], "last": batch[-1]})
