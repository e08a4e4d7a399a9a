"""`BucketProof`: a process writes to a bucket only after it has found its cluster's objects in it (rule 13).

A configuration may name another bucket, or an older copy of the right one, or a server that kept nothing. What is
written there belongs to nothing, and what was uploaded before seems to be lost. So whoever has loaded the metadata
looks for the newest objects that it names, before the first write; if none of `SAMPLE` is there, the process must end,
having changed nothing. Until then writes wait (`tidelog.storage.bucket.guarded`). If some are there and others are not,
objects of the right bucket are lost, which its readers report.

"Not there" is asked for `LOOKS` times with the names of that moment: the objects of old metadata may have been replaced
and deleted. A bucket that does not answer, or refuses access, proves nothing (rule 17).

Entry: `BucketProof.prove`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.storage.bucket.store import ObjectStore, exists

SAMPLE = 3
"""How many of the newest objects are looked for."""
LOOKS = 4
PAUSE_S = 0.5


class WrongBucket(TidelogError):
    """The bucket has none of the objects that the cluster uploaded last."""

    exit_code = 9
    """As of a wrong data directory: a restart does not help."""


class BucketProof:
    """The proof of one process, for one bucket."""

    def __init__(
        self, clock: Clock, *, accepted: Callable[[str], bool] = lambda _cluster_id: False, place: str = ""
    ) -> None:
        """`accepted`: whether an operator has given up the objects of this cluster. `place`: the data directory."""
        self._clock = clock
        self._accepted = accepted
        self._place = f" --data-dir {place}" if place else ""
        self._proven = asyncio.Event()
        self._lock = asyncio.Lock()
        self._refused: WrongBucket | None = None

    @property
    def is_proven(self) -> bool:
        """Return whether the process may write."""
        return self._proven.is_set()

    async def wait(self) -> None:
        """Wait until the process may write."""
        await self._proven.wait()

    async def prove(self, store: ObjectStore, cluster_id: str, newest: Callable[[int], Sequence[str]]) -> None:
        """Look for objects of the cluster; a second call waits for the first. `newest(n)`: keys of at most n objects.

        Raises `WrongBucket`, and the errors of `ObjectStore.head`, after which it may be tried again.
        """
        async with self._lock:
            if self._refused is not None:
                raise self._refused
            if not self.is_proven:
                await self._prove(store, cluster_id, newest)
                self._proven.set()

    async def _prove(self, store: ObjectStore, cluster_id: str, newest: Callable[[int], Sequence[str]]) -> None:
        for look in range(LOOKS):
            if look:
                await self._clock.sleep(PAUSE_S)
            keys = newest(SAMPLE)
            if not keys or await _finds_one(store, keys):
                return
        if self._accepted(cluster_id):
            return
        token = f"bucket.{cluster_id}"
        self._refused = WrongBucket(
            f"{store.url} lacks what cluster {cluster_id} uploaded last, such as {keys[0]}: it is another bucket, or"
            " an older copy, or has lost its data. Nothing was written to it",
            hint="set s3.endpoint, s3.bucket and s3.prefix (or --s3-endpoint, --bucket, --data-dir) to what the cluster"
            f" used before. If its objects are gone: `tidelog object accept-loss {token}{self._place}` gives them up at"
            " the next start",
        )
        raise self._refused


async def _finds_one(store: ObjectStore, keys: Sequence[str]) -> bool:
    for key in keys:
        if await exists(store, key):
            return True
    return False
