"""`Lifecycle`: periodic work of the active controller, done once a second and when a broker's connection closes.

`tidelog.controller.active.duties` derives the work from the image; this class proposes its commands. Probes of brokers
without any heartbeat, and deletions of destroyed objects from the bucket before they are removed from the metadata
(rule 6), run in separate loops (`run_asking`, `run_removals`), because brokers and the bucket may be slow. So does the
removal of what deleted topics leave (`run_deletions`). What is left follows from the image, so the next leader goes on.
An object that the bucket does not delete holds up no others (`tidelog.controller.active.removals`).

Entry: `Lifecycle`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from tidelog.controller.active.duties import Duties, Duty, removable
from tidelog.controller.active.readers import ALL, Readers
from tidelog.controller.active.removals import RETRY_S, Removals
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.model.commands import PARTITIONS_PER_DELETION, Barrier, DeletePartitions, ForgetObjects
from tidelog.controller.model.leases import held_version
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.task_errors import expected

logger = logging.getLogger(__name__)

DeleteObjects = Callable[[Sequence[int]], Awaitable[None]]
"""Deletes objects from the bucket by id; absent objects count as deleted."""
Refuses = Callable[[str], Awaitable[bool]]
"""Whether an address (`host:port`) certainly has no listener."""
INTERVAL_S = 1.0
"""Between two rounds, if nothing wakes them."""
FAILING_S = 10.0
"""A part whose rounds have failed for so long is a problem: one failure may be that of an election."""
REMOVALS = "removals"


class Lifecycle:
    """Periodic work of the active controller; see the module docstring."""

    def __init__(
        self,
        role: ActiveRole,
        *,
        sessions: BrokerSessions,
        readers: Readers,
        clock: Clock,
        delete: DeleteObjects | None,
        duties: Duties,
        refuses: Refuses | None = None,
        partitions_per_deletion: int = PARTITIONS_PER_DELETION,
    ) -> None:
        self._image = role.image
        self._sessions = sessions
        self._propose = role.propose
        self._is_active = role.is_active
        self._time_ms = role.time_ms
        self._readers = readers
        self._clock = clock
        self._delete = delete
        self._duties = duties
        self._refuses = refuses
        self._partitions_per_deletion = partitions_per_deletion
        self._removals = Removals()
        self._failing: dict[str, tuple[float, str]] = {}
        """The parts whose last round failed: since when (monotonic seconds), and the last error."""
        self._wake = asyncio.Event()
        self._deletions = asyncio.Event()
        self._asks = asyncio.Event()

    def activated(self) -> None:
        """This controller became active: probe at once the brokers that look dead to it."""
        self._removals.activated()
        self._failing.clear()
        self._asks.set()

    def wake(self) -> None:
        """Run a round now."""
        self._wake.set()

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._is_active():
                await self.round()

    async def round(self) -> None:
        """Do the work that is due. A part that fails does not stop the others; the next round repeats it."""
        for duty in self._duties.all:
            await self._try(duty.__name__, self._carry_out(duty))

    async def _carry_out(self, duty: Duty) -> None:
        """Propose what a duty asks for. A refused command is no reason to leave out those behind it, about others."""
        refusal: TidelogError | None = None
        for command in duty(self._clock.monotonic(), self._time_ms()):
            try:
                await self._propose(command)
            except Unavailable:  # there is no quorum, or this controller leads no more
                raise
            except TidelogError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    async def _try(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            error = expected("controller", failure)
            since, _ = self._failing.get(name, (self._clock.monotonic(), ""))
            self._failing[name] = since, str(error)
            logger.warning(
                "lifecycle work failed; retrying in the next round", extra={"part": name, "error": str(error)}
            )
        else:
            self._failing.pop(name, None)

    def problems(self) -> list[str]:
        """Return the parts that have failed in each round for `FAILING_S`, one clause each.

        What the bucket does not delete is in `not_deleted`.
        """
        now = self._clock.monotonic()
        return [
            f"has failed at its work ({name}) for {now - since:.0f} s: {error}"
            for name, (since, error) in self._failing.items()
            if now - since >= FAILING_S and name != REMOVALS
        ]

    async def run_removals(self) -> None:
        """Delete due objects until cancelled. Separate from `run`: a slow bucket must not delay session checks."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            if self._is_active():
                await self._try(REMOVALS, self._remove())

    def wake_deletions(self) -> None:
        """A topic was deleted: remove what is left of it now."""
        self._deletions.set()

    async def run_deletions(self) -> None:
        """Remove the partitions of deleted topics, a bounded number by each command, until cancelled.

        Separate from `run`: a topic of 100,000 partitions takes 200 commands.
        """
        while True:
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._deletions.wait()
            except TimeoutError:
                pass
            self._deletions.clear()
            if self._is_active():
                await self._try("deletions", self._delete_partitions())

    async def _delete_partitions(self) -> None:
        while topics := self._image().index.deleted_topics:
            await self._propose(DeletePartitions(min(topics), self._partitions_per_deletion))

    async def run_asking(self) -> None:
        """Probe brokers until cancelled. Separate from `run`: an address that does not answer takes its time-out."""
        while True:
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._asks.wait()
            except TimeoutError:
                pass
            self._asks.clear()
            if self._is_active():
                await self.ask_after_unheard()

    async def ask_after_unheard(self) -> None:
        """End the sessions of brokers without any heartbeat so far whose address has no listener."""
        if self._refuses is None:
            return
        for record in self._sessions.unheard(list(self._image().brokers.values()), self._clock.monotonic()):
            if not record.peer_address or not await self._refuses(record.peer_address):
                continue
            if self._sessions.nobody_listens(record, self._clock.monotonic()):
                logger.info(
                    "no listener at a broker's address; ending its session",
                    extra={"broker": record.id, "at": record.peer_address},
                )
                self.wake()

    @property
    def not_deleted(self) -> str:
        """Return the destroyed objects that the bucket has not deleted for long, and why; empty if there are none."""
        return self._removals.problem

    async def _remove(self) -> None:
        waiting = self._removals.waiting(self._clock.monotonic())
        if self._delete is None or not removable(self._image(), self._time_ms(), ALL, waiting):
            return
        await self._propose(Barrier())  # proves that no other controller is active, also after a pause of this process
        passed = self._readers.passed(self._image().brokers.values(), self._clock.monotonic())
        # A lease that is not in this image yet is newer, and holds nothing that this image knows as destroyed.
        passed = min(passed, held_version(self._image().leases.values()))
        due = self._removals.choose(removable(self._image(), self._time_ms(), passed, waiting))
        if due:
            await self._delete_some(self._delete, due)
            await self._propose(ForgetObjects(due))
            logger.info("destroyed objects deleted", extra={"count": len(due)})

    async def _delete_some(self, delete: DeleteObjects, due: Sequence[int]) -> None:
        try:
            await delete(due)
        except Exception as error:
            aside = self._removals.failed(due, self._clock.monotonic(), str(error))
            if aside is not None:
                fields = {"object": aside, "again_in_s": RETRY_S, "error": str(error)}
                logger.error("the bucket does not delete an object that no metadata names", extra=fields)
            raise
        self._removals.succeeded(due)
