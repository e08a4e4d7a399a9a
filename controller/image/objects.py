"""The objects that the metadata names, as keys in the bucket.

Entry: `newest_objects`.
"""

from __future__ import annotations

from itertools import islice

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import ObjectState
from tidelog.storage.objects.key import object_key


def newest_objects(image: Image, count: int) -> list[str]:
    """Return the keys of at most `count` committed objects, of those whose rows are the newest: O(count) as a rule."""
    committed = (each.id for each in reversed(image.objects.values()) if each.state == ObjectState.COMMITTED)
    return [object_key(image.cluster_id, object_id) for object_id in islice(committed, count)]
