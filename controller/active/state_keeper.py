"""`StateKeeper`: the active controller writes its metadata to the bucket, and looks whether it still owns the bucket.

A state is due soon after a change of what clients see (topics, partitions, configurations, brokers) or of snapshots,
and at an interval after any other change. Before it is put, a committed `Barrier` proves that no other controller is
active, and the claim of the next generation must not exist (`tidelog.controller.model.bucket_state`). Before the first
one the bucket must be proven to be the cluster's (`tidelog.storage.bucket.proof`); otherwise the controller ends. Of
the older states only those are deleted that are behind the newest `state_kept`, and only after the newest one is in the
bucket.

Whoever becomes active has all commands of earlier terms in its log, so no state in the bucket is newer than what it
begins with, but those that it puts itself. One that is shows that this log is an older copy, or that a process runs
over a copy of its directory: the two would give the same ids to different objects, and overwrite each other's. The
controller ends then. It looks before its term changes anything: what each refused start would add to the log could
make an old copy look new. A broker with newer metadata than the whole log shows the same.

Entry: `StateKeeper.run`; `check_owner` before anything is deleted from the bucket; `write_last` at a clean stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tidelog.controller.active.role import ActiveRole
from tidelog.controller.image.objects import newest_objects
from tidelog.controller.image.replica import StateCopy
from tidelog.controller.model.bucket_state import (
    STATE_HEAD_BYTES,
    BucketState,
    StateName,
    claim_key,
    decode_state,
    encode_state,
    generation_of,
    metadata_prefix,
    owner_key,
    owner_text,
    parse_state_key,
    state_key,
    version_in,
)
from tidelog.controller.model.commands import Barrier
from tidelog.controller.model.errors import NotController
from tidelog.controller.model.levels import NewerLevel
from tidelog.controller.model.records import BrokerRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.task_errors import expected
from tidelog.storage.bucket.proof import BucketProof, WrongBucket
from tidelog.storage.bucket.store import ObjectInfo, ObjectNotFound, ObjectStore, exists

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the keeper looks whether a state is due."""
FIRST_LOOK_S = 1.0
"""How long a controller that becomes active waits to learn whether it owns the bucket."""
NEWER_STATE_S = 30.0
"""How long it waits for a state whose first bytes say that it is newer than its log: that of a large cluster."""
LAST_WRITE_S = 10.0
"""How long a stop waits for the last state."""
OLDER_COPY = (
    "stop the other process, if there is one. Otherwise put the newest data directory in place, or make one of what is"
    " in the bucket: `tidelog cluster rebuild`"
)
KNOWN_STATES = 1024
"""How many states a keeper remembers to have put, or tried to, until it finds them in the bucket."""
TakeState = Callable[[], asyncio.Future[StateCopy]]
"""Asks for a copy of the state; it comes when a command that is proposed afterwards was applied, or sooner."""


class KeptLog(NamedTuple):
    """What a keeper asks of the replicated log."""

    take: TakeState
    term: Callable[[], int]
    """Returns the term in which this controller is active; raises `NotController` if it is not."""
    confirm: Callable[[], Awaitable[int]]
    """Returns the term that this controller leads in after a new entry was committed; -1 if it changed meanwhile."""


class BucketSuperseded(TidelogError):
    """Another cluster was rebuilt from this bucket, or has gone on with it; this controller must not go on."""

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
        log: KeptLog,
        on_refused: Callable[[Exception], None],
        proof: BucketProof | None = None,
    ) -> None:
        self._role = role
        self._store = store
        self._settings = settings
        self._clock = clock
        self._take = log.take
        self._term = log.term
        self._confirm = log.confirm
        self._on_refused = on_refused
        self._proof = proof
        self._limiter = LogLimiter(logger, clock, burst=1, period_s=60.0)
        self._lock = asyncio.Lock()
        self._began = (-1, 0)
        """Present term, and the metadata version with which it began."""
        self._put_lately: deque[int] = deque(maxlen=KNOWN_STATES)
        """Log indices of the newest states that this keeper has put, or tried to."""
        self._known: set[int] = set()
        """Log indices of states that it found in the bucket, and that are its own or not newer than its beginning; as
        many as there are, where nobody may delete them."""
        self._has_looked = False
        """Whether the states have been compared with the log in the present term."""
        self._newest = (0, -1)
        """The newest metadata version that a broker was heard to have, and the broker."""
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
            if self._newest[0] > self._role.image().version:
                await self._try(self._end_for_broker)
            elif self._is_due():
                await self._try(self.write)
            elif 1000 * (self._clock.monotonic() - self._shown_at) >= self._settings.state_interval_ms:
                await self._try(self._show)

    def note_version(self, broker: BrokerRecord, registration_epoch: int, version: int) -> None:
        """A broker of this cluster has metadata of this version. One of an older registration is of an older cluster,
        which may have been given up with what it knows."""
        if registration_epoch >= broker.registration_epoch:
            self._newest = max(self._newest, (version, broker.id))

    async def _end_for_broker(self) -> None:
        """End because of a broker with newer metadata, if another controller has not become active since."""
        term, (version, broker_id) = self._term(), self._newest
        if await self._confirm() != term:
            raise NotController("a broker has newer metadata, and this controller is not active any more")
        ours = self._role.image().version
        if ours < version:
            raise self._refuse(
                f"broker {broker_id} has metadata of version {version}; this controller's, of its whole log, is of"
                f" version {ours}: its data directory is an older copy, or another process runs over a copy",
                hint=f"{OLDER_COPY}. If there is nothing newer, stop all brokers before you start it again",
            )

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
            found = await self._check_states()
            image = self._role.image()
            generation, now_ms = generation_of(image.kv), self._clock.time_ms()
            head = (image.cluster_id, generation, copy.log_index, copy.version, term, now_ms, closed)
            data = await asyncio.to_thread(lambda: encode_state(BucketState(*head, copy.encode())))
            await self._put_owner()
            self._put_lately.append(copy.log_index)  # before its outcome is known
            key = state_key(image.cluster_id, generation, copy.log_index)
            await self._store.put(key, [data])
            self.written = Written(copy.log_index, copy.version, now_ms, len(data))
            self._term_written, self._written_at = term, self._clock.monotonic()
            self.problem, self._failed_at = "", None
            await self._delete_old({**found, StateName(generation, copy.log_index): key})
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
        """Look for the claim of a cluster that was rebuilt from this bucket, and once in a term for newer metadata.

        Raises `Unavailable`, `NotController`, and `BucketSuperseded`, which has been reported then.
        """
        await self._check_claim()
        if not self._has_looked:
            await self._check_states()

    async def _check_claim(self) -> None:
        image = self._role.image()
        generation = generation_of(image.kv)
        if not await exists(self._store, claim_key(image.cluster_id, generation + 1)):
            return
        raise self._refuse(
            f"the bucket {self._store.url} belongs to generation {generation + 1} of cluster {image.cluster_id}, which"
            f" was rebuilt from it; this controller is of generation {generation}",
            hint="stop this cluster for good; its data directories may be deleted",
        )

    async def _check_states(self) -> dict[StateName, str]:
        """Return the keys of all states. Raises `BucketSuperseded`, which has been reported then, if one is foreign."""
        found, foreign = await self._look_at_states()
        if foreign is not None:
            await self._end_for(*foreign)
        return found

    async def _look_at_states(
        self, limit: asyncio.Timeout | None = None
    ) -> tuple[dict[StateName, str], tuple[int, int, int] | None]:
        """Return the keys of all states, and the term, its first version and that of a newer state that is not ours.

        `limit` is put off where such a state is read.
        """
        image, (term, began_at) = self._role.image(), self._began
        infos = [info async for info in self._store.list(metadata_prefix(image.cluster_id))]
        states = [(name, info) for info in infos if (name := parse_state_key(info.key)) is not None]
        found = {name: info.key for name, info in states}
        generation = generation_of(image.kv)
        for name, info in states:
            if name.generation != generation or name.log_index <= began_at or name.log_index in self._known:
                continue
            if name.log_index not in self._put_lately:
                version = await self._version_of(info, began_at, limit)
                if version > began_at:
                    return found, (term, began_at, version)
            self._known.add(name.log_index)
        self._known &= {name.log_index for name in found}
        if self._began == (term, began_at):  # else another term has begun since
            self._has_looked = True
        return found, None

    async def _end_for(self, term: int, began_at: int, version: int) -> None:
        """End because of a state of `version`, if the term is still ours: its author was not elected after us then."""
        if await self._confirm() != term:
            raise NotController("this controller was active when a newer state was found, and is not any more")
        cluster_id = self._role.image().cluster_id
        raise self._refuse(
            f"the bucket {self._store.url} has metadata of cluster {cluster_id} of version {version}; this controller"
            f" began with version {began_at}: its data directory is an older copy, or another process runs over a copy",
            hint=OLDER_COPY,
        )

    async def _version_of(self, info: ObjectInfo, began_at: int, limit: asyncio.Timeout | None) -> int:
        """Return the metadata version of a state; -1 if it is gone, or cannot be read.

        It may be large, and is read whole, and so checked, only if its first bytes say that it is newer than ours.
        """
        try:
            first = [(0, min(info.size, STATE_HEAD_BYTES))] if info.size else []  # an empty object has no range
            version = version_in(b"".join(await self._store.get_ranges(info.key, first)))
            if version is not None and version <= began_at:
                return version
            if limit is not None and version is not None:
                limit.reschedule(asyncio.get_running_loop().time() + NEWER_STATE_S)
            return decode_state(await self._store.get(info.key), key=info.key).version
        except ObjectNotFound:
            return -1
        except (CorruptData, NewerLevel) as error:
            logger.warning("a metadata state in the bucket cannot be read", extra={"error": str(error)})
            return -1

    def _refuse(self, message: str, *, hint: str) -> BucketSuperseded:
        """Report that this controller must not go on."""
        error = BucketSuperseded(message, hint=hint)
        self._on_refused(error)
        return error

    async def look_first(self, term: int) -> None:
        """Look who owns the bucket, before the term of a controller that is elected changes anything.

        A bucket that does not answer soon does not stop it, nor one that does not give a newer state in
        `NEWER_STATE_S`: `check_owner` looks again. Raises `BucketSuperseded`, which has been reported then, and errors
        of the log.
        """
        await self._confirm()  # all commands of earlier terms are applied then
        image = self._role.image()
        self._began, self._has_looked = (term, image.version), False
        foreign = None
        if image.cluster is None:
            return
        try:
            async with asyncio.timeout(FIRST_LOOK_S) as limit:
                await self._check_claim()
                _, foreign = await self._look_at_states(limit)
        except BucketSuperseded:
            raise
        except (TimeoutError, TidelogError) as error:
            text = str(error) or "no answer in time"
            logger.warning("the bucket does not say who owns it; becoming active", extra={"error": text})
        if foreign is not None:
            await self._end_for(*foreign)

    async def _delete_old(self, found: dict[StateName, str]) -> None:
        """Delete all but the newest few; the newest one is in the bucket."""
        old = [found[name] for name in sorted(found, reverse=True)[self._settings.state_kept :]]
        if old:
            await self._store.delete(old)
