"""`StateKeeper`: the active controller writes its metadata to the bucket, and looks whether it still owns the bucket.

A state is due soon after a change of what clients see (topics, partitions, configurations, brokers) or of snapshots,
and at an interval after any other change. Before it is put, a committed `Barrier` proves that no other controller is
active, and the claim of the next generation must not exist (`tidelog.controller.model.bucket_state`). Before the first
one the bucket must be
proven to be the cluster's (`tidelog.storage.bucket.proof`); otherwise the controller ends. Of the older states only
those are deleted that are behind the newest `state_kept`, and only after the newest one is in the bucket.

Entry: `StateKeeper.run`; `check_owner` before anything is deleted from the bucket; `write_last` at a clean stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tidelog.controller.active.role import ActiveRole
from tidelog.controller.image.objects import newest_objects
from tidelog.controller.image.replica import StateCopy
from tidelog.controller.model.bucket_state import (
    BucketState,
    StateName,
    claim_key,
    encode_state,
    generation_of,
    metadata_prefix,
    owner_key,
    owner_text,
    parse_state_key,
    state_key,
)
from tidelog.controller.model.commands import Barrier
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.task_errors import expected
from tidelog.storage.bucket.proof import BucketProof, WrongBucket
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the keeper looks whether a state is due."""
FIRST_LOOK_S = 1.0
"""How long a controller that becomes active waits to learn whether it owns the bucket."""
LAST_WRITE_S = 10.0
"""How long a stop waits for the last state."""
TakeState = Callable[[], asyncio.Future[StateCopy]]
"""Asks for a copy of the state; it comes when a command that is proposed afterwards was applied, or sooner."""


class BucketSuperseded(TidelogError):
    """Another cluster was rebuilt from this bucket and owns it now; this controller must not go on."""

    exit_code = 9
    """As of a wrong data directory: a restart does not help."""


class Written(NamedTuple):
    """The newest state that this controller has put."""

    log_index: int
    version: int
    at_ms: int
    """Wall clock."""
    size_bytes: int


class StateKeeper:
    """See the module. Used on the event loop's thread; it is idle unless its controller is active."""

    def __init__(
        self,
        role: ActiveRole,
        store: ObjectStore,
        settings: ControllerSettings,
        clock: Clock,
        *,
        take: TakeState,
        term: Callable[[], int],
        on_refused: Callable[[Exception], None],
        proof: BucketProof | None = None,
    ) -> None:
        self._role = role
        self._store = store
        self._settings = settings
        self._clock = clock
        self._take = take
        self._term = term
        self._on_refused = on_refused
        self._proof = proof
        self._limiter = LogLimiter(logger, clock, burst=1, period_s=60.0)
        self._lock = asyncio.Lock()
        self._term_written = -1
        self._written_at = 0.0
        self._shown_at = 0.0
        self._failed_at: float | None = None
        """When the last attempt failed; None: it did not."""
        self.written: Written | None = None
        """None: this controller has put none."""
        self.problem = ""
        """Why the last attempt failed; empty: it did not."""

    async def run(self) -> None:
        """Write states that are due, until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            if not self._role.is_active():
                continue
            if self._is_due():
                await self._try(self.write)
            elif 1000 * (self._clock.monotonic() - self._shown_at) >= self._settings.state_interval_ms:
                await self._try(self._show)

    def _is_due(self) -> bool:
        """A controller that has just become active writes one at once: what others wrote may say that they stopped."""
        image, written, now = self._role.image(), self.written, self._clock.monotonic()
        settings = self._settings
        if self._failed_at is not None and 1000 * (now - self._failed_at) < settings.state_after_change_ms:
            return False
        if written is None or self._term_written != self._term():
            return True
        if image.version <= written.version:
            return False
        is_seen = image.placement_version > written.version
        return 1000 * (now - self._written_at) >= (
            settings.state_after_change_ms if is_seen else settings.state_interval_ms
        )

    async def _show(self) -> None:
        """Show that the bucket has a living owner, while there is nothing to write."""
        async with self._lock:
            await self._role.propose(Barrier())
            await self.check_owner()
            await self._put_owner()

    async def _put_owner(self) -> None:
        image = self._role.image()
        text = owner_text(generation_of(image.kv), self._term(), self._clock.time_ms())
        await self._store.put(owner_key(image.cluster_id), [text])
        self._shown_at = self._clock.monotonic()

    async def _try(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            error = expected("metadata state", failure)
            self.problem, self._failed_at = str(error), self._clock.monotonic()
            fields = {"error": self.problem}
            self._limiter.line("write", logging.WARNING, "the metadata could not be written to the bucket", fields)

    async def write(self, *, closed: bool = False) -> Written:
        """Write the present state.

        Raises `TidelogError`, and `BucketSuperseded` and `WrongBucket` after having reported it.
        """
        async with self._lock:
            term = self._term()
            await self._prove()
            taken = self._take()
            try:
                if not closed:  # the others may have stopped; a deposed one's state sorts before its successor's
                    await self._role.propose(Barrier())
                copy = await taken
            finally:
                taken.cancel()
            await self.check_owner()
            image = self._role.image()
            generation, now_ms = generation_of(image.kv), self._clock.time_ms()
            head = (image.cluster_id, generation, copy.log_index, copy.version, term, now_ms, closed)
            data = await asyncio.to_thread(lambda: encode_state(BucketState(*head, copy.encode())))
            await self._put_owner()
            await self._store.put(state_key(image.cluster_id, generation, copy.log_index), [data])
            self.written = Written(copy.log_index, copy.version, now_ms, len(data))
            self._term_written, self._written_at = term, self._clock.monotonic()
            self.problem, self._failed_at = "", None
            await self._delete_old(image.cluster_id, StateName(generation, copy.log_index))
            return self.written

    async def _prove(self) -> None:
        if self._proof is None or self._proof.is_proven:
            return
        image = self._role.image
        try:
            await self._proof.prove(self._store, image().cluster_id, lambda count: newest_objects(image(), count))
        except WrongBucket as error:
            self._on_refused(error)
            raise

    async def write_last(self) -> None:
        """Write the state of a clean stop, if this controller is active. Never raises; takes `LAST_WRITE_S` at most."""
        if not self._role.is_active():
            return
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self.write(closed=True)
        except (TimeoutError, TidelogError) as error:
            logger.warning("the last metadata state is not in the bucket", extra={"error": str(error) or "time-out"})

    async def check_owner(self) -> None:
        """Look for the claim of a cluster that was rebuilt from this bucket.

        Raises `Unavailable`, and `BucketSuperseded`, which has been reported then.
        """
        image = self._role.image()
        generation = generation_of(image.kv)
        try:
            await self._store.head(claim_key(image.cluster_id, generation + 1))
        except ObjectNotFound:
            return
        error = BucketSuperseded(
            f"the bucket {self._store.url} belongs to generation {generation + 1} of cluster {image.cluster_id}, which"
            f" was rebuilt from it; this controller is of generation {generation}",
            hint="stop this cluster for good; its data directories may be deleted",
        )
        self._on_refused(error)
        raise error

    async def look_first(self) -> None:
        """As `check_owner`, before a controller becomes active; a bucket that does not answer soon does not stop it."""
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                await self.check_owner()
        except BucketSuperseded:
            raise
        except (TimeoutError, TidelogError) as error:
            text = str(error) or f"no answer within {FIRST_LOOK_S} s"
            logger.warning("the bucket does not say who owns it; becoming active", extra={"error": text})

    async def _delete_old(self, cluster_id: str, newest: StateName) -> None:
        """Delete states behind the newest few up to `newest`, which is in the bucket."""
        found = []
        async for info in self._store.list(metadata_prefix(cluster_id)):
            name = parse_state_key(info.key)
            if name is not None and name <= newest:
                found.append((name, info.key))
        old = [key for _, key in sorted(found, reverse=True)[self._settings.state_kept :]]
        if old:
            await self._store.delete(old)
