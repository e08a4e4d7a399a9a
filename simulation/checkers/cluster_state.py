"""The checks from inside: what the controller's image says, held against itself, an older image, and the bucket.

- `check_image`: rule 5, and one owner in its place: the committed objects of a stream that is not quarantined hold
  exactly `[start, end)`, nothing twice and without a gap.
- `check_progress`: between two versions nothing goes back that may only grow: stream epochs (rule 4), starts and ends
  of streams (rules 3 and 5), master epochs, what is committed of a WAL; and what was committed and is not trimmed is
  still held by some committed object (rule 7). An `Image` goes on changing: take a `snapshot` of the older one.
- `check_bucket`: every committed object is in the bucket (rule 6), sound to the last byte (rule 10), and what its
  metadata says; and nothing is there that no metadata names: give it what `find_orphans` needs, with an age of 0, after
  clean-up.

They reuse what the product asks itself (`storage.compaction_check`, `broker.object_report`, `storage.orphan_scan`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from broker.object_report import verify_object
from controller.image import Image
from controller.model import ObjectState, ReplicaSetRecord, StreamRecord
from simulation.checkers.finding import Finding
from storage.compaction_check import Interval, check_conserved, merged
from storage.managers import CompactionRefused, StreamRange
from storage.object_store import ObjectStore
from storage.orphan_scan import OrphanMetadata, find_orphans

RULES = ("contiguous-ranges", "only-grows", "compaction-conserves", "sound-objects", "no-orphans")
"""What these checks call what they find."""


def check_image(image: Image) -> list[Finding]:
    """Everything that is wrong with one image by itself."""
    held: dict[int, list[Interval]] = defaultdict(list)
    for one in committed_ranges(image):
        held[one.stream_id].append((one.start_offset, one.end_offset))
    found = []
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


def committed_ranges(image: Image) -> list[StreamRange]:
    """The ranges of all committed objects, of streams that still exist."""
    objects = [each for each in image.objects.values() if each.state == ObjectState.COMMITTED]
    return [one for each in objects for one in each.ranges if one.stream_id in image.streams]


class Snapshot(NamedTuple):
    """An image as it was."""

    version: int
    streams: dict[int, StreamRecord]
    replica_sets: dict[int, ReplicaSetRecord]
    ranges: list[StreamRange]
    """Of its committed objects."""


def snapshot(image: Image) -> Snapshot:
    """What `check_progress` needs later."""
    return Snapshot(image.version, dict(image.streams), dict(image.replica_sets), committed_ranges(image))


def check_progress(old: Snapshot, new: Image) -> list[Finding]:
    """What went back from an older image to a newer one."""
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
    """Read every committed object, and look for what nobody names if `orphans` is given. Raises `Unavailable`."""
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
        ]
        if report.unknown_future:
            said = f"{report.unknown_future} objects in the bucket have ids that were never given out"
            found.append(Finding(rule="no-orphans", message=said))
    return found
