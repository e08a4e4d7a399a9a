"""Reads the tail of an object: footer and index, by one ranged GET unless the index is large.

Entry: `load_tail`, `load_index`.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import CorruptData, InvalidInput
from storage.object_format import (
    FOOTER,
    INDEX_ENTRY,
    INDEX_OVERHEAD,
    Footer,
    ObjectIndex,
    cluster_fingerprint,
    corrupt,
)
from storage.object_store import ObjectStore, View

TAIL_BYTES = FOOTER.size + INDEX_OVERHEAD + 1024 * INDEX_ENTRY.size
"""How much is asked for first: enough for 1,024 blocks, which at the default sizes is nearly every object."""


async def get_range(store: ObjectStore, key: str, start: int, end: int) -> View:
    """Bytes `[start, end)` of an object that must have them. A shorter object is `CorruptData`.

    Raises `ObjectNotFound`, `Unavailable` as the store does.
    """
    try:
        (data,) = await store.get_ranges(key, [(start, end)])
    except InvalidInput as error:
        raise CorruptData(f"object {key} ends before byte {end}: {error}", hint="it was cut short") from error
    if len(data) != end - start:
        raise corrupt(key, start, "length of range", end - start, len(data))
    return data


def check_identity(footer: Footer, *, key: str, object_id: int | None, cluster_id: str | None) -> None:
    """Raise `CorruptData` unless the footer is of this object of this cluster. None: whatever it says."""
    if object_id is not None and footer.object_id != object_id:
        raise corrupt(key, footer.index_position + footer.index_length, "object id", object_id, footer.object_id)
    if cluster_id is not None and footer.cluster != cluster_fingerprint(cluster_id):
        wanted = cluster_fingerprint(cluster_id).hex()
        raise corrupt(key, footer.index_position + footer.index_length, "cluster", wanted, footer.cluster.hex())


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of an object as it was read: a small object is in it whole."""

    index: ObjectIndex
    start: int
    """Byte position of `data` in the object."""
    data: View


async def load_tail(
    store: ObjectStore, key: str, size: int, *, object_id: int | None = None, cluster_id: str | None = None
) -> Tail:
    """The checked index of the object at `key`, which is `size` bytes long, and what was read with it.

    Raises `CorruptData`, `ObjectNotFound`, `Unavailable`.
    """
    if size < FOOTER.size + INDEX_OVERHEAD:
        raise corrupt(key, 0, "object size", f"at least {FOOTER.size + INDEX_OVERHEAD} bytes", size)
    start = max(0, size - TAIL_BYTES)
    tail = await get_range(store, key, start, size)
    footer = Footer.decode(tail[-FOOTER.size :], object_size=size, key=key)
    check_identity(footer, key=key, object_id=object_id, cluster_id=cluster_id)
    index_end = footer.index_position + footer.index_length
    if footer.index_position >= start:
        raw = tail[footer.index_position - start : index_end - start]
    else:
        raw = await get_range(store, key, footer.index_position, index_end)
    return Tail(ObjectIndex.decode(raw, footer, key=key), start, tail)


async def load_index(
    store: ObjectStore, key: str, size: int, *, object_id: int | None = None, cluster_id: str | None = None
) -> ObjectIndex:
    """The index alone; see `load_tail`."""
    return (await load_tail(store, key, size, object_id=object_id, cluster_id=cluster_id)).index
