"""Has brokers write manifests, reads them and the objects that they name, as a reader outside the cluster does.

What a manifest says must hold as long as the lease that it was written for: the slices of a range follow one another
from its start (or the log start) to its end, each object is in the bucket, and has the offsets that the manifest says.
Whatever else comes is told by the rule `manifest-differs`.

Entry: `ManifestReader`; `missing_offsets` is the check of the slices.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tidelog.broker.objects.manifest_writer import WrittenManifest
from tidelog.controller.image.image import Image
from tidelog.controller.image.lookup import FoundRange, NextQuestion, OffsetRange
from tidelog.controller.model.leases import LeaseRecord
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.simulation.actors.workload import Workload
from tidelog.storage.bucket.store import ObjectNotFound
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.objects.format import Block
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.manifest import iterate_manifest
from tidelog.storage.objects.reader import get_range, load_index

RULE = "manifest-differs"
WRITE_S = 12.0
LIMITS = (1, 4, 1_000)
MAX_RANGES = 4
MAX_OPENED = 4
"""Objects of a manifest that are looked into."""
ATTEMPTS = 3
"""An answer of the bucket may be damaged on its way once."""


def missing_offsets(row: FoundRange, slices: Sequence[ObjectSlice], ends_at: int | None) -> tuple[int, int] | None:
    """Return the first offsets of a range that no slice has, as start and end; None: the slices are complete.

    `ends_at`: where the manifest says that the next one begins, if that is in this range.
    """
    at = max(row.start, row.log_start)
    end = min(row.end, row.committed_end) if ends_at is None else ends_at
    for one in slices:
        if one.start_offset > at:
            return at, one.start_offset
        at = max(at, one.end_offset)
    return (at, end) if at < end else None


class ManifestReader:
    """One reader's manifests."""

    def __init__(self, workload: Workload, name: str, rng: random.Random) -> None:
        self._w = workload
        self._rng = rng
        self._name = name
        self._store = workload.cluster.bucket.store(name, workload.cluster.clock, random.Random(rng.getrandbits(64)))

    async def ask(self, lease: LeaseRecord, image: Image) -> WrittenManifest | None:
        """Have a broker write a manifest of some partitions of `image`; None: it did not, or died meanwhile."""
        w, rng = self._w, self._rng
        ready = [node for node in w.cluster.brokers if node.ready and node.broker is not None]
        topics = sorted(image.topics.values(), key=lambda each: each.name)
        if not ready or not topics:
            return None
        node = rng.choice(ready)
        ranges = []
        for topic in rng.sample(topics, min(len(topics), MAX_RANGES)):
            start = rng.choice((0, rng.randrange(200)))
            ranges.append(OffsetRange(topic.name, rng.randrange(topic.partitions), start))
        assert node.broker is not None
        client, writer = node.broker.controller, node.broker.parts.data.manifests

        async def write() -> WrittenManifest:
            await client.wait_version(lease.version)
            return await writer.write(lease.id, ranges, rng.choice(LIMITS), reads_shared=True)

        try:
            return await node.carry_out(write(), f"manifest of {self._name}", WRITE_S)
        except (TidelogError, TimeoutError) as error:
            w.cluster.note(self._name, f"has no manifest: {type(error).__name__}")
            return None

    async def read(self, written: WrittenManifest) -> dict[int, list[ObjectSlice]] | None:
        """Return the slices of each range by its number; None: the bucket does not answer.

        Raises `ObjectNotFound`, `CorruptData`.
        """
        if written.manifest is None:
            return {}
        for attempt in range(ATTEMPTS):
            found: dict[int, list[ObjectSlice]] = {number: [] for number in range(len(written.ranges))}
            try:
                async for number, slices in iterate_manifest(self._store, written.cluster_id, written.manifest):
                    found[number] += slices
            except (ObjectNotFound, CorruptData) as error:
                if attempt + 1 == ATTEMPTS or isinstance(error, ObjectNotFound):
                    raise
            except TidelogError:
                return None
            else:
                return found
        raise AssertionError("not reached")

    def check(self, written: WrittenManifest, found: dict[int, list[ObjectSlice]]) -> None:
        """Hold the slices against what the answer says of the ranges."""
        following = written.next or NextQuestion(-1, 0)
        for number, (row, count) in enumerate(zip(written.ranges, written.counts, strict=True)):
            slices = found.get(number, [])
            if len(slices) != count:
                self._differs(row, f"has {len(slices)} slices, not {count}")
            ends_at = following.start if number == following.range else None
            if (gap := missing_offsets(row, slices, ends_at)) is not None:
                self._differs(row, f"has no slice of offsets {gap[0]} to {gap[1]}")

    async def open(self, written: WrittenManifest, found: dict[int, list[ObjectSlice]]) -> None:
        """Look into some of the objects. Raises `ObjectNotFound`, `CorruptData`, or an error of the bucket."""
        named = [(written.ranges[number], one) for number, slices in sorted(found.items()) for one in slices]
        for row, one in self._rng.sample(named, min(len(named), MAX_OPENED)):
            for attempt in range(ATTEMPTS):
                try:
                    await self._open(written.cluster_id, row, one)
                    break
                except CorruptData:
                    if attempt + 1 == ATTEMPTS:
                        raise

    async def _open(self, cluster_id: str, row: FoundRange, one: ObjectSlice) -> None:
        key = object_key(cluster_id, one.object_id)
        index = await load_index(self._store, key, one.size, object_id=one.object_id, cluster_id=cluster_id)
        shared = (each.stream for each in row.shared if each.start < one.end_offset <= each.end)
        stream = next(shared, row.stream)
        at = one.start_offset
        for entry in index.entries_from(index.find(stream, at)):
            if entry.stream_id != stream or entry.start_offset > at or at >= one.end_offset:
                break
            data = await get_range(self._store, key, entry.position, entry.end_position)
            records = list(Block.decode(data, entry, key=key))
            at = records[-1].base_offset + records[-1].count
        if at < one.end_offset:
            self._differs(row, f"object {one.object_id} has its offsets up to {at}, not {one.end_offset}")

    def _differs(self, row: FoundRange, what: str) -> None:
        self._w.found(RULE, f"{row.topic}-{row.partition} of a manifest: {what}")
