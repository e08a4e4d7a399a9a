"""Writes manifests: what a reader outside the cluster would ask for in many answers, as one object in the bucket.

The id of a manifest is prepared for `TTL_MS`, and never committed. So it becomes DESTROYED in the metadata some seconds
after the manifest was written, and from then on it is kept by the lease that it was written for, as any object that was
destroyed later than the lease's version (rule 6): it is deleted when that lease has ended, by what deletes all objects.
A broker that dies between any two steps leaves an id that expires.

Invariants: the slices of a range follow one another without a gap, as those of one answer
(`tidelog.controller.image.lookup`), although the metadata may change between two pages; the event loop is not held for
longer than a page; one manifest is made at a time, and has at most `MAX_MANIFEST_SLICES` slices.

Entry: `ManifestWriter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tidelog.controller.image.lookup import MAX_RANGES, FoundRange, NextQuestion, OffsetRange, look_up
from tidelog.controller.model.leases import LeaseOver
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, Overloaded, Unavailable
from tidelog.runtime.types import Offload
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.manifest import PAGE_SLICES, ManifestId, ManifestPages

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

MAX_MANIFEST_SLICES = 200_000
"""Slices of one manifest: some 5 MB. The answer says where the next one begins."""
MAX_PER_LEASE = 100
"""Manifests that this broker writes for one version of a lease: its reader cannot fill the bucket."""
TTL_MS = 30_000
"""For how long an id is prepared. If its lease ends sooner, the manifest is kept for so long."""
WRITE_S = 20.0
"""A manifest that takes longer is given up."""
TURN_S = 10.0
"""How long a request waits for the one before it."""
RESTARTS = 5
"""How often a range is begun anew because it was trimmed meanwhile."""


class WrittenManifest(msgspec.Struct, frozen=True):
    """The answer to a request for a manifest."""

    cluster_id: str
    version: int
    """The metadata version of its last page; no page is of an older one than was asked for."""
    manifest: ManifestId | None
    """None: the ranges have no slices."""
    ranges: list[FoundRange]
    """As in an answer about slices, without these."""
    counts: list[int]
    """The number of slices of each of `ranges`."""
    next: NextQuestion | None
    """Where the next manifest begins; None: this one is complete."""


class ManifestWriter:
    """The manifests of one broker."""

    def __init__(
        self,
        *,
        image: Callable[[], Image],
        store: ObjectStore,
        prepare: Callable[[int, int], Awaitable[int]],
        clock: Clock,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """`prepare`: `tidelog.storage.managers.ObjectManager.prepare_objects`."""
        self._image = image
        self._store = store
        self._prepare = prepare
        self._clock = clock
        self._offload = offload
        self._turn = asyncio.Lock()
        self._per_lease: dict[int, tuple[int, int]] = {}
        """The version that a lease held when its last manifest was written, and how many were written for that."""

    async def write(
        self, lease_id: int, ranges: Sequence[OffsetRange], limit: int, *, reads_shared: bool = False
    ) -> WrittenManifest:
        """Write the slices of `ranges` for a lease, at most `limit` of them.

        The image is as new as the lease; `reads_shared` is that of `look_up`. Raises `LeaseOver`, `NotFound` for an
        unknown topic or partition, `InvalidInput`, `Overloaded`, `Unavailable`.
        """
        if not 0 < len(ranges) <= MAX_RANGES:
            raise InvalidInput(f"a question has 1 to {MAX_RANGES} ranges, not {len(ranges)}")
        if not 0 < limit <= MAX_MANIFEST_SLICES:
            raise InvalidInput(f"limit is {limit}: 1 to {MAX_MANIFEST_SLICES} is expected")
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(
                f"this broker writes other manifests since {TURN_S:g} s", hint="ask another broker, or again"
            ) from None
        try:
            self._admit(lease_id)
            async with asyncio.timeout(WRITE_S):
                return await self._write(ranges, limit, reads_shared=reads_shared)
        except TimeoutError:
            raise Unavailable(
                f"the manifest was not written within {WRITE_S:g} s", hint="is the bucket slow? See `tidelog status`"
            ) from None
        finally:
            self._turn.release()

    def _admit(self, lease_id: int) -> None:
        leases = self._image().leases
        for gone in [each for each in self._per_lease if each not in leases]:
            del self._per_lease[gone]
        lease = leases.get(lease_id)
        if lease is None:
            raise LeaseOver(f"there is no lease {lease_id}", hint="take a lease first: it keeps the manifest")
        version, written = self._per_lease.get(lease_id, (0, 0))
        if version < lease.version:
            written = 0  # the lease has moved on, and keeps the older ones no longer
        if written >= MAX_PER_LEASE:
            raise Overloaded(
                f"this broker wrote {MAX_PER_LEASE} manifests for version {lease.version} of lease {lease_id}",
                hint="move the lease on to a newer version, or take another lease",
            )
        self._per_lease[lease_id] = (lease.version, written + 1)

    async def _write(self, ranges: Sequence[OffsetRange], limit: int, *, reads_shared: bool) -> WrittenManifest:
        pages = ManifestPages()
        found: list[FoundRange] = []
        counts: list[int] = []
        goes_on: NextQuestion | None = None
        for number, one in enumerate(ranges):
            if pages.slices >= limit:
                goes_on = NextQuestion(number, one.start)
                break
            before = pages.slices
            row, reached = await self._add(pages, number, one, limit, reads_shared=reads_shared)
            found.append(row)
            counts.append(pages.slices - before)
            if reached is not None:
                goes_on = NextQuestion(number, reached)
                break
        image = self._image()
        manifest = await self._put(pages, image.cluster_id) if pages.slices else None
        return WrittenManifest(image.cluster_id, image.version, manifest, found, counts, goes_on)

    async def _add(
        self, pages: ManifestPages, number: int, asked: OffsetRange, limit: int, *, reads_shared: bool
    ) -> tuple[FoundRange, int | None]:
        """Add the pages of one range; return what is known of it, and its offset to go on at if there are more."""
        for _ in range(RESTARTS):
            row: FoundRange | None = None
            left = asked
            while True:
                most = min(PAGE_SLICES, limit - pages.slices)
                page = look_up(self._image(), [left], most, reads_shared=reads_shared)
                (told,) = page.ranges
                if row is not None and (told.stream != row.stream or told.log_start > left.start):
                    break  # trimmed past what was found, or deleted and created again: a gap
                row = row or msgspec.structs.replace(told, slices=[])
                if told.slices:
                    pages.add(number, told.slices)
                await asyncio.sleep(0)
                if page.next is None:
                    return row, None
                if pages.slices >= limit:
                    return row, page.next.start
                left = OffsetRange(asked.topic, asked.partition, page.next.start, row.end)
            pages.drop(number)
        raise Unavailable(f"{asked.topic}-{asked.partition} is trimmed faster than it is listed", hint="try again")

    async def _put(self, pages: ManifestPages, cluster_id: str) -> ManifestId:
        object_id = await self._prepare(1, TTL_MS)
        built = await self._offload(partial(pages.build, object_id, cluster_id, self._clock.time_ms()))
        await self._store.put(object_key(cluster_id, object_id), built.body)
        return ManifestId(object_id, built.size)
