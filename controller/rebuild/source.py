"""Reads what a rebuild needs from a bucket: the newest whole state, the list of objects, the indexes of new ones.

Entry: `find_clusters`, `only_cluster`, `newest_state`, `read_bucket`, `require_unchanged`, `claim`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.bucket_state import (
    FIRST_GENERATION,
    BucketState,
    claim_key,
    decode_state,
    metadata_prefix,
    owner_key,
    parse_claim_key,
    parse_owner,
    parse_state_key,
)
from tidelog.controller.model.levels import NewerLevel
from tidelog.controller.model.records import ObjectState
from tidelog.controller.rebuild.plan import FoundObject
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, Unavailable
from tidelog.storage.bucket.store import ObjectExists, ObjectInfo, ObjectNotFound, ObjectStore
from tidelog.storage.objects.format import ALL_KINDS, MANIFEST_KIND, ObjectIndex
from tidelog.storage.objects.key import object_key, object_prefix, parse_object_key
from tidelog.storage.objects.reader import load_index

MAX_CLUSTERS = 1_000
"""Clusters, or other folders, that one bucket is searched for."""
READS = 16
"""Indexes that are read at a time."""


class Damaged(NamedTuple):
    """A state or an object that cannot be used."""

    key: str
    problem: str


class BucketContent(NamedTuple):
    """What the bucket holds of one cluster."""

    base: BucketState
    state: ControllerState
    """That of `base`, loaded."""
    generation: int
    """The largest that was claimed."""
    owner_seen_ms: int
    """When the owner was seen last, by the clock of the bucket; 0: it has stopped cleanly (`is_last`)."""
    is_last: bool
    """`base` is that of a clean stop, and nobody has owned the bucket since."""
    listed: dict[int, int]
    """Sizes of all objects, by id."""
    found: list[FoundObject]
    """Objects that the state does not name as committed, and may have been committed after it."""
    damaged: list[Damaged]
    seen: frozenset[str]
    """The metadata that it was read from (`metadata_seen`)."""


def metadata_seen(infos: Iterable[ObjectInfo]) -> frozenset[str]:
    """Return what differs as soon as a controller has written to the bucket: each object, and its content."""
    return frozenset(f"{info.key} {info.etag}" for info in infos)


async def find_clusters(store: ObjectStore) -> list[str]:
    """Return the ids of the clusters that have metadata in the bucket. Raises `Unavailable`."""
    found: list[str] = []
    after = ""
    for _ in range(MAX_CLUSTERS):
        info = await _first(store.list("", start_after=after))
        if info is None:
            break
        folder, slash, _ = info.key.partition("/")
        if slash and await _first(store.list(metadata_prefix(folder))) is not None:
            found.append(folder)
        after = f"{folder}/\U0010ffff" if slash else info.key
    return found


async def only_cluster(store: ObjectStore) -> str:
    """Return the id of the cluster in the bucket. Raises `NotFound`, and `InvalidInput` if there are several."""
    found = await find_clusters(store)
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(
            f"{store.url} holds no metadata of a cluster",
            hint="check --data-dir, or --s3-endpoint, --bucket and s3.prefix; they are as for `tidelog up`",
        )
    raise InvalidInput(f"{store.url} holds several clusters: {', '.join(found)}", hint="add --cluster-id ID")


async def _first(listing: AsyncIterator[ObjectInfo]) -> ObjectInfo | None:
    async for info in listing:
        return info
    return None


async def read_bucket(
    store: ObjectStore, cluster_id: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> BucketContent:
    """Read everything; nothing is changed. Raises `NotFound` without any metadata, `CorruptData`, `Unavailable`."""
    damaged: list[Damaged] = []
    infos = [info async for info in store.list(metadata_prefix(cluster_id))]
    base, base_info = await newest_state(store, cluster_id, infos, damaged)
    state = ControllerState()
    state.load(base.state)
    claims = [claim for info in infos if (claim := parse_claim_key(info.key)) is not None]
    shown = max((info.modified_ms for info in infos if info.key == owner_key(cluster_id)), default=0)
    is_last = base.closed and not damaged and not await _had_later_owner(store, base)
    seen_ms = 0 if is_last else max(shown, base_info.modified_ms)
    listed = await _list_objects(store, cluster_id)
    found = await _read_indexes(store, cluster_id, state.tables, listed, damaged, progress)
    generation = max([base.generation, FIRST_GENERATION, *claims])
    seen = metadata_seen(infos)
    return BucketContent(base, state, generation, seen_ms, is_last, listed, found, damaged, seen)


async def newest_state(
    store: ObjectStore, cluster_id: str, infos: list[ObjectInfo], damaged: list[Damaged]
) -> tuple[BucketState, ObjectInfo]:
    """Return the newest whole state of a listing, and add to `damaged`. Raises `NotFound`, `CorruptData`.

    One of a newer format is not passed over (`NewerLevel`): an older state would be taken for the newest.
    """
    names = [(name, info) for info in infos if (name := parse_state_key(info.key)) is not None]
    for _, info in sorted(names, key=lambda one: one[0], reverse=True):
        try:
            return decode_state(await store.get(info.key), key=info.key), info
        except NewerLevel:
            raise
        except CorruptData as error:
            damaged.append(Damaged(info.key, error.message))
    if damaged:
        raise CorruptData(f"none of the {len(damaged)} metadata states of {cluster_id} is whole: {damaged[0].problem}")
    raise NotFound(
        f"there is no metadata of a cluster {cluster_id!r} in {store.url}",
        hint="a cluster of this version writes it within seconds; older versions did not",
    )


async def _had_later_owner(store: ObjectStore, base: BucketState) -> bool:
    """Return whether a controller became active after the one that wrote `base`: its sign of life says its term."""
    try:
        shown = parse_owner(await store.get(owner_key(base.cluster_id)))
    except ObjectNotFound:
        return False
    return shown is not None and shown > (base.generation, base.term)


async def _list_objects(store: ObjectStore, cluster_id: str) -> dict[int, int]:
    listed: dict[int, int] = {}
    async for info in store.list(object_prefix(cluster_id)):
        named = parse_object_key(info.key)
        if named is not None and named[0] == cluster_id:
            listed[named[1]] = info.size
    return listed


def may_be_new(tables: Tables, object_id: int) -> bool:
    """Return whether an object may have been committed after the state: its id was prepared, or not given out yet."""
    row = tables.objects.get(object_id)
    if row is not None:
        return row.state == ObjectState.PREPARED
    return object_id >= (tables.counters.get("object") or 0)


def found_object(object_id: int, size: int, index: ObjectIndex) -> FoundObject:
    """Return what the index of an object says: its blocks are sorted, and contiguous within a stream."""
    return FoundObject(object_id, index.footer.kind, size, tuple(index.ranges()))


async def _read_indexes(
    store: ObjectStore,
    cluster_id: str,
    tables: Tables,
    listed: dict[int, int],
    damaged: list[Damaged],
    progress: Callable[[int, int], None],
) -> list[FoundObject]:
    wanted = [object_id for object_id in sorted(listed) if may_be_new(tables, object_id)]
    slots = asyncio.Semaphore(READS)
    found: list[FoundObject] = []

    async def read(object_id: int) -> None:
        key = object_key(cluster_id, object_id)
        async with slots:
            try:
                index = await load_index(
                    store, key, listed[object_id], object_id=object_id, cluster_id=cluster_id, kinds=ALL_KINDS
                )
            except (CorruptData, ObjectNotFound) as error:
                damaged.append(Damaged(key, error.message))
                return
        if index.footer.kind == MANIFEST_KIND:
            return  # it lists objects for a reader that is gone; the orphan search deletes it
        found.append(found_object(object_id, listed[object_id], index))
        progress(len(found), len(wanted))

    for first in range(0, len(wanted), READS):
        await asyncio.gather(*(read(object_id) for object_id in wanted[first : first + READS]))
    return sorted(found)


async def require_unchanged(store: ObjectStore, cluster_id: str, seen: frozenset[str]) -> None:
    """Raise `Unavailable` if a controller has written to the bucket since it was read.

    The cluster may have been started meanwhile: what it acknowledged since would be lost, and nobody was told.
    """
    now = metadata_seen([info async for info in store.list(metadata_prefix(cluster_id))])
    if now != seen:
        changed = sorted(one.partition(" ")[0] for one in now ^ seen)
        raise Unavailable(
            f"the bucket has changed since it was read: {changed[0]} is another one; a controller of cluster"
            f" {cluster_id} runs, or ran meanwhile",
            hint="make sure that the old cluster does not run any more; then start the command again, which reads anew",
        )


async def claim(store: ObjectStore, cluster_id: str, generation: int, text: str) -> None:
    """Make a generation the owner of the bucket. Raises `Unavailable`, also if another one was faster."""
    try:
        await store.put(claim_key(cluster_id, generation), [text.encode()], if_absent=True)
    except ObjectExists as error:
        raise Unavailable(
            f"generation {generation} of cluster {cluster_id} was claimed at this moment by another rebuild",
            hint="see who does that; then try again",
        ) from error
