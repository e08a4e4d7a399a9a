"""Compaction by someone outside of the brokers: ids are given out, and what was written under them is committed.

Whoever compacts outside (`tidelog spark compact`) reads the inputs and writes the outputs by itself. This module is its
way to the controller, and trusts it with nothing that can be looked at: before a commit is asked for, each output's
index is read from the bucket, and must be of this object of this cluster, of the size, kind and ranges that are told.
The controller checks rule 7 then, as for a broker's own compaction. What no broker checks is the outputs' blocks:
whoever wrote them has read them again.

Failures: a commit that was applied may be asked for again, by any broker, and succeeds; anything else that the metadata
refuses is `CompactionRefused`, and changes nothing. Ids that are not committed expire, and their objects are deleted.

Entry: `OutsideCompaction`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, Unavailable
from tidelog.storage.bucket.store import ObjectNotFound
from tidelog.storage.commits import CompactionRefused, CompactObjects, NewObject, unpack_ranges
from tidelog.storage.compaction.compactor import CompactedData
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import load_index

logger = logging.getLogger(__name__)

COMMITS = 4
"""Commits under way at a time; others wait."""
READS = 8
"""Indexes of outputs that one commit reads at a time."""
COMMIT_S = 20.0
"""For how long a commit is tried again while no controller answers; less than an HTTP client waits."""


class OutsideCompaction:
    """One broker's part in it. It needs the term of any replica set that this broker leads."""

    def __init__(self, data: CompactedData, clock: Clock, rng: random.Random) -> None:
        self._data = data
        self._clock = clock
        self._rng = rng
        self._turns = asyncio.Semaphore(COMMITS)

    async def prepare(self, count: int, ttl_ms: int) -> int:
        """Return the first of `count` new ids. Raises `InvalidInput`, `Unavailable`."""
        return await self._data.objects.prepare_objects(count, ttl_ms)

    async def catch_up(self) -> None:
        """Return when this broker's metadata are proven current. Raises `Unavailable`."""
        await self._data.objects.catch_up()

    async def commit(self, cluster_id: str, inputs: Sequence[int], outputs: Sequence[NewObject]) -> None:
        """Replace inputs by outputs. The same twice is success.

        Raises `CompactionRefused`, `InvalidInput`, `CorruptData` for an output that is not as it is told, and
        `Unavailable` (outcome unknown: ask again, this broker or another one).
        """
        if cluster_id != self._data.cluster_id:
            raise InvalidInput(
                f"the objects were written for cluster {cluster_id}; this is {self._data.cluster_id}",
                hint="run the job again, with the address of the cluster that it is for",
            )
        async with self._turns:
            await self.catch_up()
            if not all(self._data.view.was_committed(one.object_id) for one in outputs):
                await self._check(outputs)
            await self._commit(tuple(inputs), tuple(outputs))
        logger.info("objects compacted from outside", extra={"inputs": len(inputs), "outputs": len(outputs)})

    async def _check(self, outputs: Sequence[NewObject]) -> None:
        slots = asyncio.Semaphore(READS)

        async def check(one: NewObject) -> None:
            async with slots:
                await self._check_one(one)

        try:
            async with asyncio.TaskGroup() as group:
                for one in outputs:
                    group.create_task(check(one))
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def _check_one(self, one: NewObject) -> None:
        """Raise unless the bucket has the output as it is told."""
        key = object_key(self._data.cluster_id, one.object_id)
        try:
            index = await load_index(
                self._data.store, key, one.size, object_id=one.object_id, cluster_id=self._data.cluster_id
            )
        except ObjectNotFound as error:
            raise CompactionRefused(f"output object {one.object_id} is not in the bucket: {error.message}") from error
        if index.footer.kind != one.kind or index.ranges() != unpack_ranges(one.packed):
            raise CorruptData(
                f"object {key} is not what is to be committed: its kind is {index.footer.kind} and its index has"
                f" {len(index.ranges())} ranges",
                hint="it was written by another compaction, or by another version; run the job again",
            )

    async def _commit(self, inputs: tuple[int, ...], outputs: tuple[NewObject, ...]) -> None:
        backoff = Backoff(0.05, 2.0, self._rng)
        deadline = self._clock.monotonic() + COMMIT_S
        while True:
            term = self._data.term()
            if term is None:
                raise Unavailable("this broker leads no replica set", hint="ask another broker")
            try:
                await self._data.objects.compact_objects(CompactObjects(*term, inputs, outputs))
                return
            except (Fenced, Unavailable) as error:  # a term that is over: the broker may lead another replica set
                delay_s = backoff.next_delay_s()
                if self._clock.monotonic() + delay_s > deadline:
                    raise Unavailable(
                        f"no controller took the commit within {COMMIT_S:g} s: {error.message}",
                        hint="it may have been applied; ask again",
                    ) from error
                await self._clock.sleep(delay_s)
