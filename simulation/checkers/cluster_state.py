"""Internal checks: the controller's image compared with itself, with an older image, and with the bucket.

- `check_image`: what snapshots and branches hold is in committed objects (rule 6); rule 5, and one owner per stream:
  the committed objects of a stream that is not quarantined hold exactly `[start, end)`, without duplicates and gaps.
- `check_progress`: between two versions monotonic values do not decrease: stream epochs (rule 4), starts and ends of
  streams (rules 3 and 5), master epochs, committed WAL offsets; and committed, untrimmed ranges are still in some
  committed object (rule 7). An `Image` is mutable: take a `snapshot` of the older one.
- `check_bucket`: every committed object is in the bucket (rule 6), sound to the last byte (rule 10), and equal to its
  metadata; and there are no orphans: pass the arguments of `find_orphans`, with an age of 0, after clean-up.

They reuse checks of the product (`tidelog.storage.compaction.check`, `tidelog.broker.objects.report`,
`tidelog.storage.cleaning.orphan_scan`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tidelog.broker.objects.report import verify_object
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import ObjectState, ReplicaSetRecord, StreamRecord
from tidelog.simulation.checkers.finding import Finding
from tidelog.storage.bucket.store import ObjectStore, exists
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata, find_orphans
from tidelog.storage.commits import CompactionRefused, StreamRange
from tidelog.storage.compaction.check import Interval, check_conserved, merged

RULES = ("held-objects", "contiguous-ranges", "only-grows", "compaction-conserves", "sound-objects", "no-orphans")
"""The rule names of these checks."""


def check_image(image: Image) -> list[Finding]:
    """Return the findings of one image by itself."""
    held: dict[int, list[Interval]] = defaultdict(list)
    for one in committed_ranges(image):
        held[one.stream_id].append((one.start_offset, one.end_offset))
    found = [*held_objects(image)]
    for branch in image.branches.values():  # what it shares is in objects of other streams: `held_objects`
        for place, extents in enumerate(branch.extents):
            stream = image.streams.get(branch.first_stream + place)
            if extents and stream is not None and stream.start_offset < branch.ends[place]:
                held[stream.id].append((stream.start_offset, branch.ends[place]))
    for stream_id, stream in sorted(image.streams.items()):
        what = f"stream {stream_id} at version {image.version}"
        try:
            ranges = merged(held[stream_id], what)
        except CompactionRefused as error:
            found.append(Finding(rule="contiguous-ranges", message=error.message))
            continue
        needed = [(start, end) for start, end in ranges if end > stream.start_offset]
        if stream.start_offset >= stream.end_offset:
            wrong = bool(needed) and needed[-1][1] > stream.end_offset
        else:
            wrong = len(needed) != 1 or needed[0][0] > stream.start_offset or needed[0][1] != stream.end_offset
        if wrong and not stream.quarantined:
            says = f"{what} holds {stream.start_offset}..{stream.end_offset}, its committed objects {needed}"
            found.append(Finding(rule="contiguous-ranges", message=says))
    return found


def held_objects(image: Image) -> Iterator[Finding]:
    """Yield the offsets of snapshots and branches that no committed object has, by the objects' own ranges."""
    ranges: dict[int, list[Interval]] = defaultdict(list)
    for record in image.objects.values():
        if record.state == ObjectState.COMMITTED:
            for one in record.ranges:
                ranges[one.stream_id].append((one.start_offset, one.end_offset))
    needed = [(f"snapshot {name}", extent) for name, one in image.snapshots.items() for _, extent in one.extents()]
    for branch in image.branches.values():
        for place, extents in enumerate(branch.extents):
            stream = image.streams.get(branch.first_stream + place)
            start = stream.start_offset if stream is not None else 0
            clipped = (StreamRange(each.stream_id, max(start, each.start_offset), each.end_offset) for each in extents)
            needed += [(f"branch stream {branch.first_stream + place}", each) for each in clipped]
    for what, extent in needed:
        at = extent.start_offset
        for start, end in sorted(ranges[extent.stream_id]):
            at = end if start <= at < end else at
        if at < extent.end_offset:
            held = f"{extent.start_offset}..{extent.end_offset} of stream {extent.stream_id}"
            says = f"{what} needs {held}, and {at} is gone"
            yield Finding(rule="held-objects", message=f"at version {image.version}: {says}")


def committed_ranges(image: Image) -> list[StreamRange]:
    """Return the ranges of all committed objects, of existing streams."""
    objects = [each for each in image.objects.values() if each.state == ObjectState.COMMITTED]
    return [one for each in objects for one in each.ranges if one.stream_id in image.streams]


class ImageSnapshot(NamedTuple):
    """The relevant values of an image at one version."""

    version: int
    streams: dict[int, StreamRecord]
    replica_sets: dict[int, ReplicaSetRecord]
    ranges: list[StreamRange]
    """The ranges of its committed objects."""


def snapshot(image: Image) -> ImageSnapshot:
    """Copy the values that `check_progress` compares."""
    return ImageSnapshot(image.version, dict(image.streams), dict(image.replica_sets), committed_ranges(image))


def check_progress(old: ImageSnapshot, new: Image) -> list[Finding]:
    """Return the values that decreased from an older image to a newer one."""
    found: list[Finding] = []

    def grows(what: str, was: int, now: int) -> None:
        if now < was:
            said = f"{what} was {was} at version {old.version} and is {now} at version {new.version}"
            found.append(Finding(rule="only-grows", message=said))

    for stream_id, stream in old.streams.items():
        now = new.streams.get(stream_id)
        if now is None:
            continue  # its topic was deleted
        grows(f"the epoch of stream {stream_id}", stream.epoch, now.epoch)
        grows(f"the start of stream {stream_id}", stream.start_offset, now.start_offset)
        grows(f"the end of stream {stream_id}", stream.end_offset, now.end_offset)
    for set_id, replica_set in old.replica_sets.items():
        if (later := new.replica_sets.get(set_id)) is not None:
            grows(f"the master epoch of replica set {set_id}", replica_set.master_epoch, later.master_epoch)
            committed = "what is committed of the WAL of replica set"
            grows(f"{committed} {set_id}", replica_set.committed_wal_offset, later.committed_wal_offset)
    ends = {stream_id: stream.end_offset for stream_id, stream in old.streams.items()}
    kept = [
        StreamRange(one.stream_id, one.start_offset, min(one.end_offset, ends[one.stream_id]))
        for one in committed_ranges(new)
        if one.start_offset < ends.get(one.stream_id, 0)
    ]
    try:
        check_conserved(old.ranges, kept, lambda each: new.streams[each].start_offset if each in new.streams else None)
    except CompactionRefused as error:
        said = f"from version {old.version} to version {new.version}: {error.message}"
        found.append(Finding(rule="compaction-conserves", message=said))
    return found


async def check_bucket(
    image: Image, store: ObjectStore, *, orphans: OrphanMetadata | None = None, now_ms: int = 0
) -> list[Finding]:
    """Read every committed object, and search for orphans if `orphans` is given. Raises `Unavailable`."""
    found = []
    for record in sorted(image.objects.values(), key=lambda each: each.id):
        if record.state != ObjectState.COMMITTED:
            continue
        for problem in await verify_object(image, store, record):
            said = f"object {record.id}, {problem.part}: {problem.message}"
            found.append(Finding(rule="sound-objects", message=said))
    if orphans is not None:
        report = await find_orphans(store, image.cluster_id, orphans, now_ms=now_ms, orphan_age_ms=0)
        found += [
            Finding(rule="no-orphans", message=f"{one.key} is in the bucket, and no metadata names its object")
            for one in report.orphans
            if await exists(store, one.key)  # one that was due may be deleted, and forgotten, since it was listed
        ]
        if report.unknown_future:
            said = f"{report.unknown_future} objects in the bucket have ids that were never given out"
            found.append(Finding(rule="no-orphans", message=said))
    return found
