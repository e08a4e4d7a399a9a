"""`Lifecycle`: what the active controller does by itself, once a second and when a broker's connection closes.

- brokers whose session began or ended are marked so in the metadata; those that it never heard are asked after;
- a dead broker's replica set whose WAL is in the bucket gets a salvager (docs/design/0007-failover.md);
- the quorum's members are published when they have changed;
- prepared object ids whose time is over become orphans to delete;
- destroyed objects whose delay is over are deleted from the bucket, and only then forgotten (rule 6);
- garbage beyond one command's bound is swept by further commands;
- draining brokers' partitions are given targets, some at a time (`controller.drain_plan`);
- partitions that have been moving for the re-elect time-out and whose streams are closed get their targets elected.

Everything is re-derived from the image at each round, so a failed command or a crash loses nothing: the next round
finds the same work. The bucket and brokers are asked in loops of their own (`run_removals`, `run_asking`), for they may
take their time.
Entry: `Lifecycle`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice

from controller.commands import (
    MAX_MOVES_PER_COMMAND,
    MAX_OBJECTS_PER_COMMAND,
    AnyCommand,
    Barrier,
    ElectPartitions,
    ExpireObjects,
    ForgetObjects,
    MovePartitions,
    Salvage,
    SetBrokerAlive,
    SetControllers,
)
from controller.drain_plan import plan_drains
from controller.image import Image
from controller.lost import Salvaging, lost_replica_sets, next_salvager
from controller.model import STREAMS_PER_PARTITION, StreamState
from controller.sessions import BrokerSessions
from runtime.clock import Clock
from runtime.errors import TidelogError

log = logging.getLogger(__name__)

Propose = Callable[[AnyCommand], Awaitable[None]]
DeleteObjects = Callable[[Sequence[int]], Awaitable[None]]
"""Deletes objects from the bucket by id; absent ones are success."""
Refuses = Callable[[str], Awaitable[bool]]
"""Whether nobody listens at an address (`host:port`) for certain."""


class Lifecycle:
    """See the module."""

    def __init__(
        self,
        *,
        image: Callable[[], Image],
        sessions: BrokerSessions,
        propose: Propose,
        is_active: Callable[[], bool],
        clock: Clock,
        delete: DeleteObjects | None,
        controllers: Callable[[], Mapping[int, str]] = dict,
        interval_s: float = 1.0,
        reelect_timeout_ms: int = 2_000,
        refuses: Refuses | None = None,
    ) -> None:
        self._image = image
        self._sessions = sessions
        self._propose = propose
        self._is_active = is_active
        self._clock = clock
        self._delete = delete
        self._controllers = controllers
        self._interval_s = interval_s
        self._reelect_timeout_ms = reelect_timeout_ms
        self._refuses = refuses
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """Run a round now."""
        self._hurry.set()

    async def run(self) -> None:
        """Rounds until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            if self._is_active():
                await self.round()

    async def round(self) -> None:
        """Do what is due, each part by itself: one that fails is found again by the next round."""
        for part in (
            self._liveness,
            self._salvage,
            self._publish,
            self._expire,
            self._sweep,
            self._drain,
            self._reelect,
        ):
            await self._try(part)

    async def _try(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except TidelogError as error:
            log.warning("lifecycle work is put off", extra={"part": part.__name__, "error": str(error)})

    async def run_removals(self) -> None:
        """Delete what is due until cancelled, beside `run`: a slow bucket must not hold up a look at who lives."""
        while True:
            await self._clock.sleep(self._interval_s)
            if self._is_active():
                await self._try(self._remove)

    async def run_asking(self) -> None:
        """Ask after brokers until cancelled, beside `run`: an address that does not answer takes its time-out."""
        while True:
            await self._clock.sleep(self._interval_s)
            if self._is_active():
                await self.ask_after_unheard()

    async def ask_after_unheard(self) -> None:
        """End the sessions of brokers that were never heard and at whose addresses nobody listens."""
        if self._refuses is None:
            return
        for record in self._sessions.unheard(list(self._image().brokers.values()), self._clock.monotonic()):
            if not record.peer_address or not await self._refuses(record.peer_address):
                continue
            if self._sessions.nobody_listens(record, self._clock.monotonic()):
                log.info("nobody listens where a broker did", extra={"broker": record.id, "at": record.peer_address})
                self.hurry()

    async def _liveness(self) -> None:
        for verdict in self._sessions.scan(list(self._image().brokers.values()), self._clock.monotonic()):
            log.info("broker session", extra={"broker": verdict.broker_id, "alive": verdict.alive})
            await self._propose(SetBrokerAlive(verdict.broker_id, verdict.registration_epoch, verdict.alive))

    async def _salvage(self) -> None:
        for lost in lost_replica_sets(self._image()):
            absent = lost.salvager if lost.salvager >= 0 else lost.broker
            if lost.state is not Salvaging.DUE or not self._sessions.stays_away(absent, self._clock.monotonic()):
                continue
            broker = next_salvager(self._image(), lost)
            if broker is not None:
                log.info("a dead broker is salvaged", extra={"replica_set": lost.replica_set, "by": broker})
                await self._propose(Salvage(lost.replica_set, broker, lost.master_epoch))

    async def _publish(self) -> None:
        members = tuple(sorted(self._controllers().items()))
        cluster = self._image().cluster
        if cluster is not None and cluster.controllers != members:
            await self._propose(SetControllers(members))

    def _due(self, ids: Iterable[int]) -> tuple[int, ...]:
        now_ms, objects = self._clock.time_ms(), self._image().objects
        return tuple(islice((each for each in ids if objects[each].expires_ms <= now_ms), MAX_OBJECTS_PER_COMMAND))

    async def _expire(self) -> None:
        due = self._due(self._image().index.prepared)
        if due:
            log.info("prepared objects expired", extra={"count": len(due)})
            await self._propose(ExpireObjects(due))

    async def _remove(self) -> None:
        if self._delete is None:
            return
        due = self._due(self._image().index.destroyed)
        if due:
            await self._delete(due)
            await self._propose(ForgetObjects(due))
            log.info("destroyed objects deleted", extra={"count": len(due)})

    async def _sweep(self) -> None:
        if self._image().index.garbage:
            await self._propose(Barrier())

    async def _drain(self) -> None:
        moves = plan_drains(self._image())
        for start in range(0, len(moves), MAX_MOVES_PER_COMMAND):
            await self._propose(MovePartitions(tuple(moves[start : start + MAX_MOVES_PER_COMMAND])))

    async def _reelect(self) -> None:
        """The fallback of a move: its owner closed everything and did not come to ask for the election."""
        image = self._image()
        due_ms = self._clock.time_ms() - self._reelect_timeout_ms
        ready = [key for key in sorted(image.index.moving) if _is_closed(image, key, due_ms)]
        if ready:
            log.info("electing the targets of moves whose owner is silent", extra={"count": len(ready)})
            await self._propose(ElectPartitions(tuple(ready[:MAX_MOVES_PER_COMMAND])))


def _is_closed(image: Image, key: tuple[bytes, int], due_ms: int) -> bool:
    """Whether a partition has been moving since `due_ms` or longer, its streams are closed and its target lives."""
    record = image.partition(*key)
    assert record is not None, key
    streams = (image.streams[record.first_stream + step] for step in range(STREAMS_PER_PARTITION))
    return (
        record.moving_since_ms <= due_ms
        and image.master_of(record.target) is not None
        and all(stream.state == StreamState.CLOSED for stream in streams)
    )
