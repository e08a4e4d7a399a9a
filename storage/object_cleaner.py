"""Deletes from the bucket what no metadata names any more: ids given up, and objects destroyed.

The controller owns the lists; this is the part that knows keys and the bucket. The order is what keeps rule 6:
1. an id whose TTL is over is *given up* in the metadata first, so that a late commit is refused, and becomes DESTROYED;
2. a DESTROYED object is deleted from the bucket when its delay is over, so that readers with older metadata are done;
3. only when the bucket has said yes may the metadata forget the id. A crash between the two deletes once more: deleting
   what is not there is success.

An upload that was given up may still be putting its object while it is deleted; what that leaves behind is found by
the orphan scan (its id is below the next id, and no metadata names it).

Entry: `ObjectCleaner`. What is due is decided by `controller.lifecycle`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from storage.object_key import object_key
from storage.object_store import ObjectStore

log = logging.getLogger(__name__)

MAX_BATCH = 1000
"""Objects in one step: what S3 deletes by one request."""


class ObjectCleaner:
    """The bucket's side of cleaning."""

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
            log.info("objects deleted", extra={"count": len(batch), "first": batch[0], "last": batch[-1]})
