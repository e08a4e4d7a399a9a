"""`FollowerPrefetch`: what a follower would read of the bucket if it were elected, it has read before.

A partition that opens reads its meta stream, the ends of its indexes, and the batches behind its last checkpoint
(`tidelog.stream.partition_recovery`); the coordinators read their topics whole. What a follower has not received, or
not kept in memory (`tidelog.broker.replication.warm`), is in the bucket. A dead master's clients would wait for these
reads, and while the bucket is away for its return. So a follower brings the same blocks into the block cache, all the
time.

It looks at a replica set when some of it was committed: at the partitions whose streams have another end than before,
and those that were not ready. First their meta streams, and with what these say, the rest; partitions with the fewest
offsets to scan come first. All partitions are looked at again after `AGAIN_S`, because the cache evicts, and compaction
replaces objects; a bucket that does not answer holds each look up for a bounded time.

Invariants: it never fails and holds up nobody: the requests are those of read-ahead, their bytes are bounded by
`bytes_per_s`, and while producers need the CPU time it waits. What it has not read is read when the partition opens. A
partition counts as ready only if everything that opening reads is seen in the cache.

Entry: `FollowerPrefetch.start`, `figures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from tidelog.broker.partitions.read_replicas import FollowedReplicas
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import STREAMS_PER_PARTITION, PartitionRecord
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.cache.log_cache import StreamLog
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.commits import StreamRange
from tidelog.storage.reads.reader import BlockReader
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_recovery import checkpoint_after, meta_to_read, scan_to_read

logger = logging.getLogger(__name__)

T = TypeVar("T")
PERIOD_S = 1.0
"""How often it looks for commits."""
PAUSE_S = 5.0
"""Between two looks at a set: for each 1,000 partitions, which take some 0.1 s, and once at least."""
AGAIN_S = 30.0
"""After so long it looks at all partitions again."""
SAVED_S = 4.0
"""Bytes that were not read count for later, up to those of this time."""
_AT_ONCE = 16
"""Partitions that are looked at before the loop serves requests again: about a millisecond."""
_FOUND_AT_ONCE = 256
"""Partitions that are found in the metadata before that: about two milliseconds."""
_META_BYTES = 1 << 20
"""A meta stream is read in steps of so much."""

Streams = tuple[OpenedStream, OpenedStream, OpenedStream, OpenedStream]
"""Meta, data, time and txn."""


class _SeenPartition(NamedTuple):
    """What is known of a partition."""

    ends: tuple[int, ...]
    """The committed ends of its streams."""
    meta_end: int
    """Its meta stream was read up to here."""
    checkpoint: int
    """Data offset of the last checkpoint there."""
    is_ready: bool
    """Whether all that opening reads was in the cache."""


class _DuePartition(NamedTuple):
    """A partition that is looked at now."""

    streams: Streams
    is_internal: bool
    records: RecoveredRecords
    """Of its replica set."""

    def kept(self, number: int) -> StreamLog | None:
        """Return the newest committed records of a stream that are in memory."""
        one = self.streams[number]
        return self.records.kept(one.stream_id, one.end_offset, one.owner_since_epoch)


_UNSEEN = _SeenPartition((), 0, 0, False)


@dataclass(slots=True)
class _FollowedSet:
    """A replica set that is followed here."""

    id: int
    seen: dict[int, _SeenPartition] = field(default_factory=dict)
    """Its partitions, by meta stream."""
    ready: int = 0
    """How many of them are."""
    basis: tuple[int, int] = (-1, -1)
    """On what the last look depended: the committed WAL offset, and the version of placements."""
    paused_until: float = -math.inf
    again_at: float = -math.inf
    """When all partitions are looked at, in monotonic seconds."""

    def count(self) -> None:
        """Count which are ready."""
        self.ready = sum(each.is_ready for each in self.seen.values())

    def note_lack(self, stream_id: int) -> None:
        """The partition with this meta stream is not ready, whatever it was, and however long the bucket takes."""
        self.seen[stream_id] = self.seen.get(stream_id, _UNSEEN)._replace(is_ready=False)


class FollowerPrefetch:
    """See the module. Used on the event loop's thread."""

    def __init__(
        self,
        image: Callable[[], Image],
        followed: FollowedReplicas,
        reader: BlockReader,
        clock: Clock,
        bytes_per_s: int,
    ) -> None:
        """`bytes_per_s`: bound on what is read, `replication.prefetch_bytes_per_s`; 0: nothing is."""
        self._image = image
        self._followed = followed
        self._reader = reader
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._left = 0.0
        """Bytes that may be read now; less than 0 after a block that was larger: they are made up for first."""
        self._sets: dict[int, _FollowedSet] = {}
        self._tasks = TaskSet("prefetch")

    def start(self) -> None:
        """Begin."""
        if self._bytes_per_s:
            self._tasks.keep(self._run, "followed")

    async def close(self) -> None:
        """End."""
        await self._tasks.close()

    def figures(self) -> dict[str, int]:
        """Return how many partitions are followed, and how many of them would open without the bucket."""
        found = [each for each in self._sets.values() if self._follows(each.id)]
        return {"followed": sum(len(each.seen) for each in found), "ready": sum(each.ready for each in found)}

    # --- when ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(PERIOD_S)
            self._left = min(self._left + PERIOD_S * self._bytes_per_s, SAVED_S * self._bytes_per_s)
            following = [each for each in self._image().replica_sets if self._follows(each)]
            for gone in self._sets.keys() - set(following):
                del self._sets[gone]
            for each in following:
                await self._look_if_due(self._sets.setdefault(each, _FollowedSet(each)))

    async def _look_if_due(self, one: _FollowedSet) -> None:
        image, now_s = self._image(), self._clock.monotonic()
        record = image.replica_sets.get(one.id)
        if record is None or now_s < one.paused_until:
            return
        basis, everything = (record.committed_wal_offset, image.placement_version), now_s >= one.again_at
        if everything:
            one.again_at = now_s + AGAIN_S
        elif basis == one.basis and one.ready == len(one.seen):
            return
        one.basis = basis
        looked_at = await self._look(one, everything=everything)
        one.count()
        one.paused_until = self._clock.monotonic() + PAUSE_S * max(1.0, looked_at / 1000)

    def _follows(self, replica_set: int) -> bool:
        replica = self._followed.get(replica_set)
        return replica is not None and replica.is_following

    # --- what ----------------------------------------------------------------------------------------------------

    async def _look(self, one: _FollowedSet, *, everything: bool) -> int:
        """Look at the partitions of a set that have changed, and at those that are not ready, or at all.

        Return at how many.
        """
        seen = one.seen
        partitions = {stream: each async for stream, each in _in_slices(self._partitions(one.id), _FOUND_AT_ONCE)}
        for gone in seen.keys() - partitions.keys():
            del seen[gone]
        due = [
            each
            for stream, each in partitions.items()
            if everything or not (known := seen.get(stream, _UNSEEN)).is_ready or _ends(each) != known.ends
        ]
        lacked = await self._gather(one, due, lambda each: meta_to_read(each.streams[0]))
        async for each in _in_slices(due):
            self._read_meta(each, seen)
        due.sort(key=lambda each: each.streams[1].end_offset - self._scan_start(each, seen))
        lacked |= await self._gather(one, due, lambda each: self._to_scan(each, seen))
        async for each in _in_slices(due):
            self._note(each, seen, lacked=each.streams[0].stream_id in lacked)
        return len(due)

    def _partitions(self, replica_set: int) -> Iterator[tuple[int, _DuePartition]]:
        """The partitions of a set whose streams can be read, by meta stream."""
        image, replica = self._image(), self._followed.get(replica_set)
        if replica is None:
            return
        for place in image.owned(replica_set):
            streams, topic = _streams(image, place), image.topics.get(place.topic_id)
            if streams is not None and topic is not None:
                yield place.first_stream, _DuePartition(streams, topic.internal, replica.tail.records)

    async def _gather(
        self, one: _FollowedSet, due: Iterable[_DuePartition], needed: Callable[[_DuePartition], list[StreamRange]]
    ) -> set[int]:
        """Bring what partitions need, as far as bytes are left. Return the meta streams of those that lacked some."""
        missing: list[StreamRange] = []
        lacked: set[int] = set()
        async for each in _in_slices(due):
            if found := list(self._missing(each, needed(each))):
                missing += found
                lacked.add(each.streams[0].stream_id)
                one.note_lack(each.streams[0].stream_id)
        one.count()
        if missing and self._left >= 1:
            allowed = int(self._left)
            self._left -= allowed
            with contextlib.suppress(TimeoutError):  # the requests go on; meanwhile more may have been evicted
                async with asyncio.timeout(AGAIN_S):
                    self._left += allowed - await self._reader.gather(missing, allowed, is_ahead=True)
        return lacked

    def _missing(self, one: _DuePartition, ranges: Iterable[StreamRange]) -> Iterator[StreamRange]:
        """What of these ranges is neither in the block cache nor kept with the WAL."""
        for each in ranges:
            kept = one.kept(each.stream_id - one.streams[0].stream_id)
            missing = each if kept is None else kept.not_cached(each)
            if missing is not None and not self._reader.holds(missing):
                yield missing

    def _read_meta(self, one: _DuePartition, seen: dict[int, _SeenPartition]) -> None:
        """Find the last checkpoint, as far as the meta stream is in memory."""
        meta, kept = one.streams[0], one.kept(0)
        known = seen.get(meta.stream_id, _UNSEEN)
        at, checkpoint = max(known.meta_end, meta.start_offset), known.checkpoint
        try:
            while at < meta.end_offset:
                found = kept.read(at, meta.end_offset, _META_BYTES) if kept is not None else None
                if found is None:
                    found = self._reader.read_cached(meta.stream_id, at, meta.end_offset, _META_BYTES, is_urgent=True)
                if not found:
                    break
                checkpoint = checkpoint_after(found, checkpoint)
                at = found[-1].base_offset + found[-1].count
        except TidelogError as error:  # whoever opens it says so
            logger.debug("a meta stream is not read ahead", extra={"stream": meta.stream_id, "error": str(error)})
        seen[meta.stream_id] = known._replace(meta_end=at, checkpoint=checkpoint)

    def _to_scan(self, one: _DuePartition, seen: dict[int, _SeenPartition]) -> list[StreamRange]:
        return scan_to_read(one.streams, self._scan_start(one, seen))

    def _scan_start(self, one: _DuePartition, seen: dict[int, _SeenPartition]) -> int:
        """Return from which data offset on opening reads; the end if that is not known."""
        meta, data = one.streams[:2]
        known = seen[meta.stream_id]
        if known.meta_end < meta.end_offset:
            return data.end_offset
        return data.start_offset if one.is_internal else max(known.checkpoint, data.start_offset)

    def _note(self, one: _DuePartition, seen: dict[int, _SeenPartition], *, lacked: bool) -> None:
        """Note whether a partition is ready; `lacked`: something had to be brought for it."""
        meta = one.streams[0]
        known = seen[meta.stream_id]
        is_ready = known.meta_end >= meta.end_offset
        if is_ready and lacked:
            is_ready = not any(self._missing(one, [*meta_to_read(meta), *self._to_scan(one, seen)]))
        seen[meta.stream_id] = known._replace(ends=_ends(one), is_ready=is_ready)


async def _in_slices(looked: Iterable[T], at_once: int = _AT_ONCE) -> AsyncIterator[T]:
    """Iterate; the loop serves requests in between."""
    for number, each in enumerate(looked, start=1):
        yield each
        if number % at_once == 0:
            await asyncio.sleep(0)


def _ends(one: _DuePartition) -> tuple[int, ...]:
    return tuple(each.end_offset for each in one.streams)


def _streams(image: Image, place: PartitionRecord) -> Streams | None:
    """Return the streams of a partition; None unless all can be read."""
    rows = [image.stream(place.first_stream + number) for number in range(STREAMS_PER_PARTITION)]
    found = [row.as_opened() for row in rows if row is not None and not row.quarantined]
    return (found[0], found[1], found[2], found[3]) if len(found) == len(rows) else None
