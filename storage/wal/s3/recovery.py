"""Reads the chain of WAL objects from the bucket, and creates the fence that makes a process its only writer.

It can read beside a running writer and beside deletes: objects that change meanwhile are read again.
An acknowledged object that is missing or damaged is `CorruptData`, which names it; a place counts as missing only when
it was found empty `_LOOKS` times in a row, because the pages of a listing are not a snapshot.

Entry: `BucketLog.resolve`, `BucketLog.plant`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TypeVar

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, Fenced, Unavailable
from tidelog.storage.bucket.common import gather_or_cancel
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound, ObjectStore
from tidelog.storage.wal.base import WalFailed
from tidelog.storage.wal.s3.chain import Chain, barrier_place, missing_object, next_place
from tidelog.storage.wal.s3.format import FENCE_BYTES, Origin, WalObject, decode, encode_fence, parse_seq, wal_key

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_READS_AT_ONCE = 16
"""Objects read concurrently: enough to fill a connection to a bucket, and a bound on the client's buffers."""
_LOOKS = 3


class Created(Enum):
    """The outcome of a conditional create."""

    OURS = 1
    """The object exists and is ours: created now, or by an earlier attempt whose answer was lost."""
    THEIRS = 2
    """Another writer's object exists."""


class _Moved(Exception):  # internal: never leaves this module
    """A listed object does not exist any more, or not yet, or did not come whole: list again."""


class BucketLog:
    """The objects of one replica set's WAL."""

    def __init__(self, store: ObjectStore, prefix: str, replica_set_id: int, clock: Clock, rng: random.Random) -> None:
        self._store = store.for_purpose(Purpose.WAL)
        self._cleaned = store.for_purpose(Purpose.CLEAN)
        self._prefix = prefix
        self._replica_set_id = replica_set_id
        self._clock = clock
        self._rng = rng
        self._read: dict[int, WalObject | CorruptData] = {}
        self._missing: list[int] = []
        self.listed: dict[int, int] = {}
        """Place → bytes of every object of the last listing."""

    def key(self, seq: int) -> str:
        """Return the key of the object at place `seq`."""
        return wal_key(self._prefix, seq)

    def forget(self) -> None:
        """Release the objects kept for the next `resolve`."""
        self._read.clear()

    # -- single requests

    async def persist(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Run `attempt` until the bucket answers and allows it, with back-off; log the 1st, 2nd, 4th, 8th… failure."""
        backoff = Backoff(0.05, 5.0, self._rng)
        while True:
            try:
                return await attempt()
            except Unavailable as error:
                delay_s = backoff.next_delay_s()
                if backoff.attempts & (backoff.attempts - 1) == 0:
                    fields = {"replica_set": self._replica_set_id, "what": what, "attempt": backoff.attempts}
                    logger.warning("the WAL waits for the bucket", extra={**fields, "error": error})
                await self._clock.sleep(delay_s)

    async def create(self, seq: int, data: bytes) -> Created:
        """Create the object at place `seq`, or find out who did. Raises errors that no retry can fix."""
        key = self.key(seq)

        async def put() -> Created | None:
            try:
                await self._store.put(key, (data,), if_absent=True)
            except ObjectExists:
                return None
            return Created.OURS

        while True:
            if await self.persist(f"create {key}", put) is Created.OURS:
                return Created.OURS
            for _ in range(2):  # a difference may be a transfer error: read a second time
                found = await self._get(key)
                if found == data:
                    return Created.OURS
            if found is not None:
                return Created.THEIRS
            # It existed and was deleted since, so it held trimmed data. Then creating ours has no effect.

    async def _get(self, key: str) -> bytes | None:
        async def get() -> bytes | None:
            try:
                return await self._store.get(key)
            except ObjectNotFound:
                return None

        return await self.persist(f"read {key}", get)

    async def who(self, seq: int) -> WalObject | None:
        """Return the object at place `seq` if it exists and can be read."""
        key = self.key(seq)
        data = await self._get(key)
        try:
            return None if data is None else decode(self._prefix, key, data, self._replica_set_id)
        except CorruptData:
            return None

    # -- the chain

    async def resolve(self) -> Chain:
        """Return the current chain. Raises `CorruptData`; waits while the bucket does not answer."""
        self._missing.clear()
        backoff = Backoff(0.02, 1.0, self._rng)
        while True:
            try:
                return await self._look()
            except _Moved as error:
                if backoff.attempts >= 8:
                    logger.info("the WAL changes while it is read", extra={"reason": str(error)})
                await self._clock.sleep(backoff.next_delay_s())

    async def _look(self) -> Chain:
        self.listed = await self.persist("list the WAL", self._list)
        if not self.listed:
            return Chain()
        first_seq = await self._load()
        chain = Chain(first_seq)
        while chain.hole in self.listed:
            found = self._read[chain.hole]
            if isinstance(found, CorruptData):
                raise found
            chain.extend(found)
        chain.furthest = max(chain.furthest, *self.listed)
        if not chain.objects:
            await self._suspect(first_seq, 0, "the first seq of the newest object")
        behind = [one for seq, one in self._read.items() if seq > chain.hole and isinstance(one, WalObject)]
        proof = chain.missing(behind)
        if proof is not None:
            await self._suspect(chain.hole, chain.end_offset, f"the durable offset in {proof.key}")
        return chain

    async def _list(self) -> dict[int, int]:
        found: dict[int, int] = {}
        async for info in self._store.list(self._prefix):
            seq = parse_seq(self._prefix, info.key)
            if seq is None:
                logger.warning("unknown object among the WAL objects", extra={"key": info.key})
            else:
                found[seq] = info.size
        return found

    async def _load(self) -> int:
        """Read all objects from the largest first seq on, which is returned.

        The newest object of the chain has the largest; an object above it, of a writer that was fenced, may not.
        So everything from the first seq of the highest object is read, and the largest first seq among those counts.
        """
        first_seq = -1
        for seq in sorted(self.listed, reverse=True):
            await self._fetch([seq])
            found = self._read[seq]
            if isinstance(found, WalObject):
                first_seq = found.first_seq
                break
            logger.warning("the newest WAL object cannot be read", extra={"error": found})
        else:
            found = self._read[min(self.listed)]
            assert isinstance(found, CorruptData)
            raise found
        await self._fetch([seq for seq in self.listed if seq >= first_seq])
        first_seq = max(one.first_seq for one in self._read.values() if isinstance(one, WalObject))
        for seq in [seq for seq in self._read if seq < first_seq]:
            del self._read[seq]
        return first_seq

    async def _fetch(self, wanted: list[int]) -> None:
        """Read objects that were not read before, several at a time."""
        todo = iter([seq for seq in sorted(wanted) if seq not in self._read])

        async def reader() -> None:
            for seq in todo:
                key = self.key(seq)
                found = await self._get_checked(key, self.listed[seq])
                if found is None:
                    raise _Moved(f"{key} was deleted during the look-up")
                self._read[seq] = found

        await gather_or_cancel([reader() for _ in range(_READS_AT_ONCE)])

    async def _get_checked(self, key: str, size: int) -> WalObject | CorruptData | None:
        """Return an object of `size` bytes, its error, or None. One that fails its check is read a second time.

        The transfer may have been at fault, and refusing to start because of that would be a false alarm.
        """
        damage: CorruptData | None = None
        for _ in range(2):
            data = await self._get(key)
            if data is None:
                return None
            if len(data) < size:
                raise _Moved(f"{len(data)} of the {size} bytes of {key} came")
            try:
                return decode(self._prefix, key, data, self._replica_set_id)
            except CorruptData as error:
                damage = error
                logger.error("a WAL object fails its check", extra={"error": error})
        return damage

    async def _suspect(self, seq: int, wal_offset: int, proof: str) -> None:
        """Handle a seemingly missing acknowledged object. Always raises: `CorruptData` when it is certain."""
        self._missing.append(seq)
        last = self._missing[-_LOOKS:]
        if len(last) == _LOOKS and set(last) == {seq} and await self._get(self.key(seq)) is None:
            raise missing_object(self.key(seq), wal_offset, proof)
        raise _Moved(f"{self.key(seq)} does not exist yet, or was deleted")

    # -- fencing

    async def plant(self, origin: Origin, chain: Chain, reset_offset: int, on_longer: Callable[[Chain], None]) -> Chain:
        """End the log of older writers at its hole and return the chain that ends with the fence of `origin`.

        `on_longer` is called with each chain that an older, still running writer has extended meanwhile. With
        `reset_offset` (not -1) the log restarts there, and must not have grown. Raises `Fenced` when a newer writer
        was there, `WalFailed`, `CorruptData`.
        """
        attempt = 0
        while chain.writer_id != origin.writer_id:  # else the old writer has reached our barrier
            _check_newer(origin, chain)
            if await self._fence(origin, chain, chain.hole, reset_offset) is Created.OURS:
                break
            longer = await self.resolve()
            _check_newer(origin, longer)
            if reset_offset >= 0:
                raise WalFailed("the WAL was written to while it was reset", hint="start the broker again")
            on_longer(longer)
            chain = longer
            place = barrier_place(chain, attempt)
            if place is not None and chain.writer_id != origin.writer_id:
                attempt += 1
                if await self._fence(origin, chain, place, -1) is Created.OURS:
                    attempt = 1 << 8  # one is enough: the writer cannot pass it
        # A create also succeeds where the object of a newer writer was trimmed. Only the chain is authoritative.
        found = await self.resolve()
        if found.epoch > origin.master_epoch:
            raise _overtaken(origin, found)
        if found.writer_id != origin.writer_id:
            raise WalFailed("the WAL was extended while its new epoch began", hint="start the broker again")
        return found

    async def end(self, origin: Origin, chain: Chain, start_offset: int) -> Created:
        """Create the fence that ends the log at its hole for good: a later writer starts over at `start_offset`.

        Unlike `plant`, under an epoch that the log has seen too, since it is not followed by records. Only for a log
        whose records nobody needs.
        """
        return await self._fence(origin, chain, chain.hole, start_offset)

    async def _fence(self, origin: Origin, chain: Chain, seq: int, reset_offset: int) -> Created:
        first_seq = seq if reset_offset >= 0 else chain.first_seq
        data = encode_fence(
            origin,
            seq=seq,
            first_seq=first_seq,
            durable_offset=chain.end_offset if reset_offset < 0 and seq == chain.hole else 0,
            next_seq=next_place(chain) + seq - chain.hole,
            reset_offset=reset_offset,
        )
        return await self.create(seq, data)

    # -- removal

    def leftovers(self, chain: Chain) -> list[int]:
        """Return places of the last listing with objects not needed: trimmed before, or dead after a chain's fence.

        Fences are never among them, because a writer that they stop may still be running.
        """
        on_chain = {one.seq for one in chain.objects}
        return [
            seq for seq, size in self.listed.items() if seq < chain.hole and seq not in on_chain and size != FENCE_BYTES
        ]

    async def delete(self, places: list[int]) -> None:
        """Delete the objects at `places`; on return they are deleted."""
        keys = [self.key(seq) for seq in places]
        await self.persist("delete WAL objects", lambda: self._cleaned.delete(keys))


def _check_newer(origin: Origin, chain: Chain) -> None:
    if chain.writer_id != origin.writer_id and origin.master_epoch <= chain.epoch:
        raise _overtaken(origin, chain)


def _overtaken(origin: Origin, chain: Chain) -> Fenced:
    return Fenced(
        f"master epoch {origin.master_epoch} is not newer than {chain.epoch}, which the WAL in the bucket has seen",
        hint="another broker is master of this replica set now",
    )
