"""Finds objects in the bucket that no metadata names, and deletes them.

How an orphan comes about: an id is given up (its time is over), its object deleted, the id forgotten; and the put of an
upload that hung all that time arrives after all. Nobody can name it any more: ids are never reused, and a commit needs
a prepared id.

An object is an orphan if all of this holds, in this order:
- it was listed under `{cluster id}/objects/` with a key that `object_key` makes; everything else in the bucket (the
  WAL, quarantined records, other clusters) is not looked at;
- after the listing, its id is below a *fence*: an id that the controller gave out then. So the image, which contains
  the fence, is newer than the listing, and the id was given out by this controller;
- that image does not know the id, in any state;
- it is older than the safety age by the store's clock.

Ids from the fence on are not this metadata's (was it restored from an old backup?): they are counted, told, and never
deleted. Objects under ids that the metadata has prepared or destroyed are no orphans: the controller deletes them when
their time has come. They are listed as *waiting*, because that is what a crash leaves behind first.

Multipart uploads that a crash interrupted are no objects, and no listing shows them; their parts are paid for all the
same. Those older than the safety age are aborted. Should one be carried out after all, its put starts over.

Entry: `find_orphans`, `clean_orphans`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from storage.object_cleaner import ObjectCleaner
from storage.object_key import object_prefix, parse_object_key
from storage.object_store import ObjectInfo, ObjectStore, UnfinishedUpload
from storage.object_store_common import StoreAccessDenied, StoreUnsupported

log = logging.getLogger(__name__)

MAX_ORPHANS = 100_000
"""In one search; the rest is found by the next."""


class OrphanMetadata(NamedTuple):
    """The metadata, as the search sees it."""

    fence: Callable[[], Awaitable[int]]
    """Gives an object id newer than all in use; when it returns, `knows` knows all before it. Raises `Unavailable`."""
    knows: Callable[[int], bool]
    """Whether the metadata names an id, in any state."""
    waiting: Callable[[int], tuple[str, int] | None] = lambda object_id: None
    """State (`prepared`, `destroyed`) and time (ms since the epoch) at which it ends, of an id that the metadata knows
    and that is not committed; None for any other."""


class Orphan(msgspec.Struct, frozen=True):
    """An object that nobody can name."""

    object_id: int
    key: str
    size_bytes: int
    modified_ms: int


class WaitingObject(msgspec.Struct, frozen=True):
    """An object that the controller will delete in time: its id was given up, or not committed yet, or replaced."""

    object_id: int
    key: str
    size_bytes: int
    modified_ms: int
    state: str
    """`prepared`: an upload or a compaction is under way, or died; `destroyed`: nothing names it any more."""
    until_ms: int
    """When the prepared id is given up, or the destroyed object may be deleted (rule 6)."""


class OrphanReport(msgspec.Struct):
    """What a search found."""

    objects: int = 0
    """Objects of the cluster in the bucket."""
    bytes: int = 0
    orphans: list[Orphan] = msgspec.field(default_factory=list)
    young: int = 0
    """As orphans, but younger than the safety age."""
    unknown_future: int = 0
    """Objects with ids that the controller has not given out yet. Never deleted."""
    waiting: list[WaitingObject] = msgspec.field(default_factory=list)
    deleted: int = 0
    unfinished: list[UnfinishedUpload] = msgspec.field(default_factory=list)
    """Multipart uploads of the cluster that a crash interrupted, older than the safety age."""
    aborted: int = 0
    unfinished_problem: str = ""
    """Why they could not be listed (the policy of the bucket), or empty."""


async def find_orphans(
    store: ObjectStore,
    cluster_id: str,
    metadata: OrphanMetadata,
    *,
    now_ms: int,
    orphan_age_ms: int,
    report: OrphanReport | None = None,
) -> OrphanReport:
    """List the cluster's objects and compare. A request for each 1,000. Raises `Unavailable`.

    `report` is filled as it goes, for whoever wants to look on.
    """
    report = report if report is not None else OrphanReport()
    suspects: list[tuple[int, ObjectInfo]] = []
    async for info in store.list(object_prefix(cluster_id)):
        named = parse_object_key(info.key)
        if named is None or named[0] != cluster_id:
            continue
        report.objects += 1
        report.bytes += info.size
        if not metadata.knows(named[1]):
            if len(suspects) < MAX_ORPHANS:
                suspects.append((named[1], info))
        elif (ends := metadata.waiting(named[1])) is not None and len(report.waiting) < MAX_ORPHANS:
            report.waiting.append(WaitingObject(named[1], info.key, info.size, info.modified_ms, *ends))
    await _find_unfinished(report, store, cluster_id, now_ms - orphan_age_ms)
    if not suspects:
        return report
    fence = await metadata.fence()
    for object_id, info in suspects:
        if object_id >= fence:
            report.unknown_future += 1
        elif metadata.knows(object_id):
            continue
        elif now_ms - info.modified_ms < orphan_age_ms:
            report.young += 1
        else:
            report.orphans.append(Orphan(object_id, info.key, info.size, info.modified_ms))
    if report.unknown_future:
        log.error(
            "the bucket has objects that this controller's metadata has yet to give ids to: was it restored from old?",
            extra={"cluster": cluster_id, "objects": report.unknown_future},
        )
    return report


async def _find_unfinished(report: OrphanReport, store: ObjectStore, cluster_id: str, before_ms: int) -> None:
    try:
        uploads = await store.unfinished(f"{cluster_id}/")
    except (StoreAccessDenied, StoreUnsupported) as error:
        report.unfinished_problem = error.message
        return
    report.unfinished = [one for one in uploads if one.started_ms <= before_ms]


async def clean_orphans(
    store: ObjectStore,
    cluster_id: str,
    metadata: OrphanMetadata,
    *,
    now_ms: int,
    orphan_age_ms: int,
    dry_run: bool = False,
    report: OrphanReport | None = None,
) -> OrphanReport:
    """Find orphans and delete them, unless `dry_run`. Raises `Unavailable`. `report` as for `find_orphans`."""
    report = await find_orphans(store, cluster_id, metadata, now_ms=now_ms, orphan_age_ms=orphan_age_ms, report=report)
    if not dry_run:
        for one in report.unfinished:
            await store.abort(one)
            report.aborted += 1
    if report.orphans and not dry_run:
        await ObjectCleaner(store, cluster_id).delete([one.object_id for one in report.orphans])
        report.deleted = len(report.orphans)
        size = sum(one.size_bytes for one in report.orphans)
        log.warning("orphans deleted", extra={"cluster": cluster_id, "objects": report.deleted, "bytes": size})
    return report
