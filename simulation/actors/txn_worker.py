"""A client with one transactional session after the other. It aborts some transactions and dies in others, and leaves
sessions behind as zombies, which the next one fences.

Entry: `TxnWorker`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from tidelog.simulation.actors.client import Client
from tidelog.simulation.actors.transactional import Entry, TxnSession
from tidelog.simulation.actors.workload import Topic, Workload

ABORTS = 0.15
"""The share of transactions that are aborted."""
DIES = 0.04
"""The share of transactions that are left open."""
SLEEPS = 0.06
"""The share of transactions in which a session becomes a zombie."""
STAYS_AWAY = 0.25
"""The share of sessions that are over whose next one comes late: time may end the transaction first."""
LEFT_AT_THE_END = 0.5
"""The share of last transactions that are left open when the clients end."""
ZOMBIE_S = 6.0
"""The longest sleep of a zombie, and the longest absence of a session."""
TIMEOUTS_MS = (1_500, 4_000, 8_000)
"""Time-outs of transactions."""


class TransactionalTopics(Protocol):
    """The topics that a worker writes to, and what it needs for that."""

    @property
    def workload(self) -> Workload:
        """Return the shared state of all actors."""
        ...

    @property
    def pace_s(self) -> tuple[float, float]:
        """Return the bounds of a worker's mean time between two transactions."""
        ...

    @property
    def topics(self) -> Sequence[Topic]:
        """Return what must exist before it begins."""
        ...

    def session(self, client: Client, transactional_id: str, rng: random.Random) -> TxnSession:
        """Return a new session, not started."""
        ...


class TxnWorker:
    """A client with one session after the other, all with one transactional id."""

    def __init__(self, home: TransactionalTopics, transactional_id: str) -> None:
        self._home = home
        self._w = home.workload
        self._id = transactional_id
        self._rng = home.workload.random()
        self._client = home.workload.client()
        self._interval_s = self._rng.uniform(*home.pace_s)
        self._zombies: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        session: TxnSession | None = None
        while not w.closing:
            await asyncio.sleep(rng.expovariate(1 / self._interval_s))
            if all(topic.exists for topic in self._home.topics):
                session = await self._session_after(session)
        for zombie in self._zombies:
            await zombie
        self._client.close()

    async def _session_after(self, before: TxnSession | None) -> TxnSession | None:
        """Begin the next session, and let it work; return it if the one after it may follow it."""
        rng = self._rng
        if before is None or rng.random() < 0.3:
            session = self._home.session(self._client, self._id, rng)
            await session.start()
        else:
            session = await before.restart()
        if session.over:
            return None
        await self.work(session)
        if session.left:
            return None  # a zombie has it, and nobody else may have its pair
        if rng.random() < STAYS_AWAY:
            await asyncio.sleep(rng.uniform(0, ZOMBIE_S))
        return session

    async def work(self, session: TxnSession) -> None:
        """Carry out transactions until the session is over, or left alone."""
        raise NotImplementedError

    async def _transaction(self, session: TxnSession, entries: Sequence[Entry], offset: int, *, slow: bool) -> bool:
        """Write entries and commit an offset (-1: none) in one transaction; return whether it is surely committed.

        `slow`: it sleeps somewhere in between.
        """
        rng = self._rng
        steps: list[list[Entry]] = [[each] for each in entries]
        rng.shuffle(steps)
        if offset >= 0:
            steps.insert(rng.randrange(len(steps) + 1), [])
        end = rng.randrange(1, len(steps) + 1) if rng.random() < DIES else len(steps) + 1
        sleeps = rng.randrange(len(steps) + 1) if slow else -1
        session.begin()
        if rng.random() < 0.5:
            await session.add([(each.topic.name, each.partition) for each in entries])
        for number, step in enumerate(steps[:end]):
            if number == sleeps:
                await asyncio.sleep(rng.uniform(0.2, ZOMBIE_S))
            if step:
                await session.add([(step[0].topic.name, step[0].partition)])
            if session.failed:
                break
            if step:
                await session.send(step)
            else:
                await self._commit_offset(session, offset)
        if end <= len(steps) or (self._w.closing and rng.random() < LEFT_AT_THE_END):
            session.over = True  # it is left open
            return False
        if sleeps == len(steps):
            await asyncio.sleep(rng.uniform(0.2, ZOMBIE_S))
        return await session.end(commit=rng.random() >= ABORTS)

    async def _commit_offset(self, session: TxnSession, offset: int) -> None:
        raise NotImplementedError

    def _leave(self, session: TxnSession, entries: Sequence[Entry], offset: int) -> None:
        """Let the session go on as a zombie, while the next one begins."""

        session.left = True

        async def go_on() -> None:
            await self._transaction(session, entries, offset, slow=True)

        self._zombies.append(self._w.life.spawn(self._w.loop, go_on(), f"zombie-{self._id}"))
