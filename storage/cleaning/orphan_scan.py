"""Finds objects in the bucket that no metadata names, and deletes them.

An orphan arises when an id expires, its object is deleted and the id forgotten, and then a delayed put of that upload
succeeds. No metadata can name the object any more: ids are never reused, and a commit needs a prepared id.

An object is an orphan if all of this holds, in this order:
- it was listed under `{cluster id}/objects/` with a key of the form of `object_key`; everything else in the bucket (the
  WAL, quarantined records, other clusters) is ignored;
- after the listing, its id is below a *fence*: an id that the controller allocated then. So the image, which contains
  the fence, is newer than the listing, and this controller allocated the object's id;
- that image does not know the id, in any state;
- directly before its deletion the active controller, asked for each batch of ids, does not know it either: a copy of
  the metadata that lacks something is no reason to delete it (rule 15);
- it is older than the safety age by the store's clock.

Ids from the fence on do not belong to this metadata (restored from an old backup?): they are counted, reported, and
never deleted. Objects under ids that the metadata has prepared or destroyed are no orphans: the controller deletes them
when they are due. They are listed as *waiting*, because they are the first thing that a crash leaves.

Multipart uploads that a crash interrupted are no objects and in no listing, but their parts are charged for. Those
older than the safety age are aborted. If one is still being sent, its put starts again.

What the bucket refuses to abort or to delete holds up nothing else; the first refused delete ends the search with its
error when the rest is done.

Entry: `find_orphans`, `clean_orphans`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.storage.bucket.common import StoreAccessDenied, StoreRefused, StoreUnsupported
from tidelog.storage.bucket.store import ObjectInfo, ObjectStore, UnfinishedUpload
from tidelog.storage.cleaning.deleter import MAX_BATCH, ObjectCleaner
from tidelog.storage.objects.key import object_prefix, parse_object_key

logger = logging.getLogger(__name__)

MAX_ORPHANS = 100_000
"""Limit of one search; the next search finds the rest."""


class OrphanMetadata(NamedTuple):
    """The functions of the metadata that the search needs."""

    fence: Callable[[], Awaitable[int]]
    """Allocates an object id newer than all in use; afterwards `knows` covers all lower ids. Raises `Unavailable`."""
    knows: Callable[[int], bool]
    """Whether the metadata names an id, in any state."""
    unknown: Callable[[Sequence[int]], Awaitable[Sequence[int]]]
    """Asks the active controller, with metadata no older than the fence, which of these ids (at most `MAX_BATCH`) it
    does not name in any state. Raises `Unavailable`."""
    waiting: Callable[[int], tuple[str, int] | None] = lambda object_id: None
    """State (`prepared`, `destroyed`) and time (ms since the epoch) at which it ends, of an id that the metadata knows
    and that is not committed; None for any other."""


class Orphan(msgspec.Struct, frozen=True):
    """An object that no metadata can name."""

    object_id: int
    key: str
    size_bytes: int
    modified_ms: int


class WaitingObject(msgspec.Struct, frozen=True):
    """An object that the controller will delete: its id is not committed yet or has expired, or it was replaced."""

    object_id: int
    key: str
    size_bytes: int
    modified_ms: int
    state: str
    """`prepared`: an upload or a compaction is running, or was interrupted; `destroyed`: nothing names it any more."""
    until_ms: int
    """When the prepared id expires, or the destroyed object may be deleted (rule 6)."""


class OrphanReport(msgspec.Struct):
    """The result of a search."""

    objects: int = 0
    """Objects of the cluster in the bucket."""
    bytes: int = 0
    orphans: list[Orphan] = msgspec.field(default_factory=list)
    young: int = 0
    """Objects like orphans, but younger than the safety age."""
    unknown_future: int = 0
    """Objects with ids that the controller has not allocated yet. Never deleted."""
    waiting: list[WaitingObject] = msgspec.field(default_factory=list)
    deleted: int = 0
    unfinished: list[UnfinishedUpload] = msgspec.field(default_factory=list)
    """Multipart uploads of the cluster that a crash interrupted, older than the safety age."""
    aborted: int = 0
    unfinished_problem: str = ""
    """The reason why they could not be listed, or aborted (the policy of the bucket), or empty."""


async def find_orphans(
    store: ObjectStore,
    cluster_id: str,
    metadata: OrphanMetadata,
    *,
    now_ms: int,
    orphan_age_ms: int,
    report: OrphanReport | None = None,
) -> OrphanReport:
    """List the cluster's objects and compare them with the metadata; a request per 1,000. Raises `Unavailable`.

    `report` is filled during the search, for progress displays.
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
        logger.error(
            "the bucket has objects with ids not allocated by this controller: was its state restored from a backup?",
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
    """Find orphans and delete them, unless `dry_run`. `report` as for `find_orphans`.

    Raises `Unavailable`, and `CorruptData` if the active controller knows one of them: nothing more is deleted. Raises
    `StoreAccessDenied` or `StoreRefused` when the bucket has refused to delete one: of the others as many as it lets.
    """
    report = await find_orphans(store, cluster_id, metadata, now_ms=now_ms, orphan_age_ms=orphan_age_ms, report=report)
    if not dry_run:
        await _abort_unfinished(report, store)
    cleaner = ObjectCleaner(store, cluster_id)
    refused: TidelogError | None = None
    for first in range(0, len(report.orphans), MAX_BATCH):
        batch = [one.object_id for one in report.orphans[first : first + MAX_BATCH]]
        await _require_unknown(metadata, batch)
        if dry_run:
            continue
        try:
            await cleaner.delete(batch)
        except (StoreAccessDenied, StoreRefused) as error:
            refused = refused or error
        else:
            report.deleted += len(batch)
    if report.deleted:
        size = sum(one.size_bytes for one in report.orphans)
        logger.warning("orphans deleted", extra={"cluster": cluster_id, "objects": report.deleted, "bytes": size})
    if refused is not None:
        raise refused
    return report


async def _abort_unfinished(report: OrphanReport, store: ObjectStore) -> None:
    for one in report.unfinished:
        try:
            await store.abort(one)
        except (StoreAccessDenied, StoreRefused) as error:
            report.unfinished_problem = error.message
            if isinstance(error, StoreAccessDenied):
                return  # the others would be denied, too
        else:
            report.aborted += 1


async def _require_unknown(metadata: OrphanMetadata, object_ids: Sequence[int]) -> None:
    """Raise `CorruptData` if the active controller knows one of these ids, which this copy of the metadata lacks."""
    unknown = set(await metadata.unknown(object_ids))
    known = [object_id for object_id in object_ids if object_id not in unknown]
    if known:
        raise CorruptData(
            f"the active controller knows {len(known)} objects that this process's copy of the metadata lacks"
            f" (the first is {known[0]}); none of them is deleted",
            hint="restart this process, which loads its metadata anew, and report this error",
        )
