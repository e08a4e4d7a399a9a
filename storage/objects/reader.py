"""Reads objects, and tells apart the four ways in which a read may fail (rule 17).

- *denied*: the bucket refuses the request, for whatever reason. `Unavailable`: it says nothing about the object.
- *absent*: `ObjectNotFound`. What that means depends on the metadata, which the caller knows (`MissingObject`).
- *short*: an answer with less than was asked for. `TruncatedObject` if the object in the bucket ends there, too;
  otherwise `Unavailable`.
- *wrong*: bytes that fail their check, `CorruptData`.

The tail (footer and index) is read by one ranged GET unless the index is large.

Entry: `get_ranges`, `load_tail`, `load_index`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidelog.runtime.errors import CorruptData, InvalidInput, Unavailable
from tidelog.storage.bucket.store import ObjectInfo, ObjectStore, RangePastEnd, View
from tidelog.storage.objects.format import (
    DATA_KINDS,
    FOOTER,
    INDEX_ENTRY,
    INDEX_OVERHEAD,
    Footer,
    ObjectIndex,
    cluster_fingerprint,
    corrupt,
)

TAIL_BYTES = FOOTER.size + INDEX_OVERHEAD + 1024 * INDEX_ENTRY.size
"""Size of the first read: enough for 1,024 blocks, which at the default sizes covers nearly every object."""


class MissingObject(CorruptData):
    """The metadata names an object that is not in the bucket. It is as lost as damaged data, with another cause."""


class TruncatedObject(CorruptData):
    """An object in the bucket ends before a byte that it must have."""


async def get_ranges(store: ObjectStore, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
    """Return byte ranges `[start, end)` of an object that must have them.

    Raises `TruncatedObject`, `ObjectNotFound`, and `Unavailable`, also for whatever else the bucket refuses.
    """
    try:
        parts = await store.get_ranges(key, ranges)
        for (start, end), data in zip(ranges, parts, strict=True):
            if len(data) != end - start:
                raise RangePastEnd(f"{len(data)} of the {end - start} bytes of {key} from byte {start} on came")
    except RangePastEnd as error:
        raise await _short(store, key, max(end for _, end in ranges), error) from error
    except InvalidInput as error:
        raise _refused(key, error) from error
    return parts


async def _short(store: ObjectStore, key: str, end: int, error: RangePastEnd) -> CorruptData | Unavailable:
    """Return the error of a read that got too little: of a truncated object, or of an answer that was cut short.

    Raises as `get_info`.
    """
    size = (await get_info(store, key)).size
    if size < end:
        return TruncatedObject(f"object {key} ends at byte {size}, before byte {end}", hint="it is truncated")
    return Unavailable(
        f"the bucket answered with less than was asked for of object {key}, which has {size} bytes: {error.message}",
        hint="look for a proxy between Tidelog and the bucket",
    )


async def get_info(store: ObjectStore, key: str) -> ObjectInfo:
    """As `ObjectStore.head`. Raises `ObjectNotFound`, and `Unavailable`, also for whatever else the bucket refuses."""
    try:
        return await store.head(key)
    except InvalidInput as error:
        raise _refused(key, error) from error


def _refused(key: str, error: InvalidInput) -> Unavailable:
    return Unavailable(f"the bucket refuses to read object {key}: {error.message}", hint=error.hint)


async def get_range(store: ObjectStore, key: str, start: int, end: int) -> View:
    """As `get_ranges`, for one range."""
    (data,) = await get_ranges(store, key, [(start, end)])
    return data


def check_identity(footer: Footer, *, key: str, object_id: int | None, cluster_id: str | None) -> None:
    """Raise `CorruptData` unless the footer is of this object of this cluster. None: not checked."""
    if object_id is not None and footer.object_id != object_id:
        raise corrupt(key, footer.index_position + footer.index_length, "object id", object_id, footer.object_id)
    if cluster_id is not None and footer.cluster != cluster_fingerprint(cluster_id):
        wanted = cluster_fingerprint(cluster_id).hex()
        raise corrupt(key, footer.index_position + footer.index_length, "cluster", wanted, footer.cluster.hex())


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of an object as it was read; it includes all of a small object."""

    index: ObjectIndex
    start: int
    """Byte position of `data` in the object."""
    data: View


async def load_tail(
    store: ObjectStore,
    key: str,
    size: int,
    *,
    object_id: int | None = None,
    cluster_id: str | None = None,
    kinds: Collection[int] = DATA_KINDS,
) -> Tail:
    """Return the checked index of the object at `key`, of `size` bytes and one of `kinds`, and the bytes read with it.

    Raises `CorruptData`, `ObjectNotFound`, `Unavailable`.
    """
    if size < FOOTER.size + INDEX_OVERHEAD:
        raise corrupt(key, 0, "object size", f"at least {FOOTER.size + INDEX_OVERHEAD} bytes", size)
    start = max(0, size - TAIL_BYTES)
    tail = await get_range(store, key, start, size)
    footer = Footer.decode(tail[-FOOTER.size :], object_size=size, key=key, kinds=kinds)
    check_identity(footer, key=key, object_id=object_id, cluster_id=cluster_id)
    index_end = footer.index_position + footer.index_length
    if footer.index_position >= start:
        raw = tail[footer.index_position - start : index_end - start]
    else:
        raw = await get_range(store, key, footer.index_position, index_end)
    return Tail(ObjectIndex.decode(raw, footer, key=key), start, tail)


async def load_index(
    store: ObjectStore,
    key: str,
    size: int,
    *,
    object_id: int | None = None,
    cluster_id: str | None = None,
    kinds: Collection[int] = DATA_KINDS,
) -> ObjectIndex:
    """Return the index alone; see `load_tail`."""
    return (await load_tail(store, key, size, object_id=object_id, cluster_id=cluster_id, kinds=kinds)).index
