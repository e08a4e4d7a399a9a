"""A reader outside the cluster: takes a lease, looks up objects, and uses them for as long as the lease allows.

What it may read it tells `SimCluster.outside`, which is looked at when objects are deleted (`deleted-under-reader`).
The reader trusts its own clock only: a lease is good for its time to live, counted from when it was asked for. Now and
then it is late with a renewal, moves its lease on to newer metadata and looks up its objects again, or goes away
without ending it. With some leases it has a broker write a manifest, and reads what that names.

Entry: `OutsideReader.run`.
"""

from __future__ import annotations

import asyncio

from tidelog.controller.model.leases import LeaseRecord
from tidelog.controller.model.levels import LEASES_LEVEL
from tidelog.controller.model.records import ObjectState
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.simulation.actors.manifests import RULE, ManifestReader
from tidelog.simulation.actors.workload import Workload
from tidelog.storage.bucket.store import ObjectNotFound

COMMAND_S = 4.0
TTL_MS = (1_000, 3_000, 8_000)
MAX_PLANNED = 50
"""Objects in a plan."""
MANIFESTS = 0.5
"""The share of leases for which a manifest is written."""
ENDS = 0.6
"""The share of leases that their reader ends; the others expire."""
MOVES_ON = 0.3
"""The share of renewals that name newer metadata."""


class OutsideReader:
    """One reader, with one lease at a time."""

    def __init__(self, workload: Workload, name: str) -> None:
        self._w = workload
        self._rng = workload.random()
        self._name = name
        self._client = workload.cluster.controller_client(name, workload.random(), COMMAND_S)
        self._manifests = ManifestReader(workload, name, workload.random())

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        await self._client.start()
        while not w.closing:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            ttl_ms, asked_s = rng.choice(TTL_MS), w.loop.time()
            try:
                lease = await self._client.leases.take(self._name, ttl_ms)
            except TidelogError as error:  # the controllers are away, or do not know of leases yet
                w.cluster.note(self._name, f"has no lease: {type(error).__name__}")
                continue
            self._plan(asked_s + ttl_ms / 1000)
            if rng.random() < MANIFESTS:
                await self._read_manifest(lease, asked_s + ttl_ms / 1000)
            await self._read(lease, ttl_ms)
        while w.cluster.level >= LEASES_LEVEL and not await self._succeed():  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.3)
        await self._client.close()

    async def _succeed(self) -> bool:
        """Read a manifest under a lease: where all is well that must be possible. Return whether it was."""
        until_s = self._w.loop.time() + TTL_MS[-1] / 1000
        try:
            lease = await self._client.leases.take(self._name, TTL_MS[-1])
        except TidelogError as error:
            self._w.cluster.note(self._name, f"has no lease: {type(error).__name__}")
            return False
        self._plan(until_s)
        could = await self._read_manifest(lease, until_s)
        await self._end(lease)
        return could

    def _plan(self, until_s: float) -> frozenset[int]:
        """Look up objects, and return them: the local metadata are of the lease's version or newer."""
        objects = self._client.image.objects.values()
        committed = [each.id for each in objects if each.state == ObjectState.COMMITTED]
        planned = frozenset(self._rng.sample(committed, min(len(committed), MAX_PLANNED)))
        self._w.cluster.outside[self._name] = (planned, until_s)
        return planned

    async def _read_manifest(self, lease: LeaseRecord, until_s: float) -> bool:
        """Have a manifest written for the lease, which ends at `until_s` unless it is renewed, and read its objects.

        Return whether it could be read, and was looked at.
        """
        w = self._w
        written = await self._manifests.ask(lease, self._client.image)
        if written is None:
            return False
        try:
            found = await self._manifests.read(written)
            if found is None:
                return False
            self._manifests.check(written, found)
            named = {one.object_id for slices in found.values() for one in slices}
            if written.manifest is not None:
                named.add(written.manifest.object_id)
            planned, _ = w.cluster.outside[self._name]
            w.cluster.outside[self._name] = (planned | named, until_s)
            await self._manifests.open(written, found)
        except (ObjectNotFound, CorruptData) as error:
            if w.loop.time() < until_s:
                w.found(RULE, f"under a lease: {error}")
            return False
        except TidelogError as error:
            w.cluster.note(self._name, f"reads no objects: {type(error).__name__}")
            return False
        return True

    async def _read(self, lease: LeaseRecord, ttl_ms: int) -> None:
        """Keep the lease for a while. It is over when a renewal fails, or is late by the reader's own clock."""
        w, rng = self._w, self._rng
        for _ in range(rng.randint(0, 6)):
            await asyncio.sleep(rng.uniform(0.2, 0.7) * ttl_ms / 1000)
            moves_on, asked_s = rng.random() < MOVES_ON, w.loop.time()
            planned, until_s = w.cluster.outside[self._name]
            if moves_on:
                planned = self._plan(until_s)  # first: what the old plan had may be deleted when the lease has moved
            version = self._client.image.version if moves_on else 0
            try:
                await self._client.leases.renew(lease.id, ttl_ms, version)
            except TidelogError as error:
                w.cluster.note(self._name, f"lost lease {lease.id}: {type(error).__name__}")
                break
            w.cluster.outside[self._name] = (planned, asked_s + ttl_ms / 1000)
        if rng.random() < ENDS or w.closing:
            await self._end(lease)

    async def _end(self, lease: LeaseRecord) -> None:
        self._w.cluster.outside.pop(self._name)
        try:
            await self._client.leases.end(lease.id)
        except TidelogError as error:
            self._w.cluster.note(self._name, f"cannot end lease {lease.id}: {type(error).__name__}")
