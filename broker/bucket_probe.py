"""Probes the bucket: whether it is the cluster's, whether it answers, and what its server supports.

A bucket that nobody uses is not known to work. So whoever asks for the status has a request of each kind sent first,
unless each kind had an outcome just now.

The start with a new data directory waits for the bucket (its address may be wrong); with an existing one it does so for
`FIRST_WAIT_S` only. With the WAL in the bucket nothing can be served without it. A bucket without the cluster's objects
ends the broker, whenever that is found out: until then nothing is written to it (`tidelog.storage.bucket.proof`).

Entry: `BucketProbe.meet`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError, TidelogError, Unavailable
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.proof import WrongBucket
from tidelog.storage.bucket.store import StoreCapabilities

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 2.0
CHECK_AFTER_S = 3.0
CHECK_WAIT_S = 1.5


class BucketProbe:
    """The probe; see the module. `on_defect` is called with an error that ends the broker."""

    def __init__(
        self,
        store: GuardedObjectStore,
        clock: Clock,
        rng: random.Random,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._rng = rng
        self._on_defect = on_defect
        self._tasks = TaskSet("bucket-probe", on_defect)
        self._found: tuple[str, ...] = ()
        self._checking: asyncio.Task[None] | None = None

    async def meet(self, prove: Callable[[], Awaitable[None]], *, first_start: bool, must_fence: bool) -> None:
        """Probe the bucket: wait until it answers if this start needs it, else continue in the background.

        `prove` is called first, until it returns. Raises its `WrongBucket`, and `ConfigError` if the WAL lives there
        (`must_fence`) and the bucket cannot fence writers; on a first start also `StoreAccessDenied` and other errors
        that waiting does not cure.
        """
        if must_fence:
            found = await self._probe(prove, Unavailable, first_start=first_start)
            if not found.conditional_create:
                raise ConfigError(
                    f"wal.kind is s3, but {self._store.url} cannot keep two brokers from writing the same WAL: "
                    + "; ".join(found.problems),
                    hint="use a server with conditional creates (AWS S3, MinIO, LocalStack), or --wal disk",
                )
        elif first_start:
            await self._probe(prove, Unavailable, first_start=True)
        else:
            probing = self._tasks.spawn(self._find_wrong(prove), "probe")
            if (await asyncio.wait([probing], timeout=FIRST_WAIT_S))[0] and (wrong := probing.result()) is not None:
                raise wrong

    async def _find_wrong(self, prove: Callable[[], Awaitable[None]]) -> WrongBucket | None:
        """Probe in the background until it succeeds; end the broker if the bucket is not the cluster's."""
        try:
            await self._probe(prove, TidelogError)
        except WrongBucket as error:
            self._on_defect(error)
            return error
        return None

    async def _probe(
        self, prove: Callable[[], Awaitable[None]], retried: type[TidelogError], *, first_start: bool = False
    ) -> StoreCapabilities:
        """Probe until it succeeds; errors of the types `retried` are logged and retried, but not `WrongBucket`.

        On a first start denied access is raised: the credentials have never been right.
        """
        backoff = Backoff(0.5, 10.0, self._rng)
        while True:
            try:
                await prove()  # first: the probe would create a bucket that does not exist
                found = await self._store.probe()
            except retried as error:
                if isinstance(error, WrongBucket) or (first_start and isinstance(error, StoreAccessDenied)):
                    raise
                delay_s = backoff.next_delay_s()
                self._found = (f"the bucket {self._store.url} does not answer: {error.message}",)
                logger.error(
                    "the bucket does not answer; retrying",
                    extra={"bucket": self._store.url, "error": str(error), "retry_s": round(delay_s, 1)},
                )
                await self._clock.sleep(delay_s)
            else:
                self._found = found.problems
                for problem in found.problems:
                    logger.warning("the bucket's server lacks a capability", extra={"problem": problem})
                logger.info("the bucket answers", extra={"bucket": self._store.url})
                return found

    async def check(self, key: str) -> None:
        """Have the bucket's health known: send a request of each kind, with the object `key`, if it is not.

        Returns after `CHECK_WAIT_S` at the latest; a check that takes longer goes on.
        """
        if self._checking is None and self._store.health.needs_check(CHECK_AFTER_S):
            self._checking = self._tasks.spawn(self._check(key), "check")
        if self._checking is not None:
            await asyncio.wait([self._checking], timeout=CHECK_WAIT_S)

    async def _check(self, key: str) -> None:
        try:
            await self._store.check(key)
        except TidelogError as error:
            logger.debug("the health check of the bucket failed", extra={"error": str(error)})  # the health has it
        finally:
            self._checking = None

    def problems(self) -> list[str]:
        """Return the problems that the probe found, or else what the bucket's health tells."""
        return list(self._found) or self._store.health.problems()

    async def close(self) -> None:
        """Stop probing."""
        await self._tasks.close()
