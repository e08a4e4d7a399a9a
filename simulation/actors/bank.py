"""Transfers between accounts, exactly once: clerks write orders, tellers consume them, write entries, and commit both.

Topic `orders` has the orders, written in transactions that are sometimes aborted. Each of its partitions has a teller
with a transactional id and a group of its own. In one transaction a teller reads a few orders (read_committed), writes
for each a debit and a credit to two partitions of `entries`, sometimes an order that follows to another partition, and
commits its offset. Now and then it aborts, dies and leaves the transaction open, or becomes a zombie: it falls asleep,
the next session of the same id fences it, and it wakes up and goes on.

All of it is in the history; `tidelog.simulation.checkers.transactions` and `ledger` judge it. Entry: `Bank.open`;
`Bank.audit` at the end.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.simulation.actors.audit import SETTLE_S, Auditor
from tidelog.simulation.actors.client import Client
from tidelog.simulation.actors.consumers import Consumer, Decoded, Fetcher, Position
from tidelog.simulation.actors.transactional import Entry, TxnSession
from tidelog.simulation.actors.txn_worker import SLEEPS, TIMEOUTS_MS, TxnWorker
from tidelog.simulation.actors.workload import Topic, Workload
from tidelog.simulation.checkers.history import UNKNOWN

CLERK = "clerk"
FOLLOWS = 0.15
"""The share of orders that another one follows."""
PACE_S = (0.6, 2.0)
"""Bounds of a worker's mean time between two transactions."""


@dataclass(slots=True)
class Bank:
    """The topics, and who works there."""

    workload: Workload
    orders: Topic
    entries: Topic
    pace_s: tuple[float, float] = PACE_S
    timeouts_ms: dict[str, int] = field(default_factory=dict)
    """By transactional id."""

    @classmethod
    def open(cls, workload: Workload, rng: random.Random) -> Bank:
        """Draw the bank and start everybody."""
        orders, entries = Topic("orders", rng.randint(1, 2), False), Topic("entries", rng.randint(2, 3), False)
        bank = cls(workload, orders, entries)
        bank.start()
        return bank

    def start(self) -> None:
        """Create the topics, and start everybody."""
        workload = self.workload
        for topic in self.topics:
            workload.spawn(workload.create(topic), f"create-{topic.name}")
        workload.spawn(Clerk(self).run(), CLERK)
        for partition in range(self.orders.partitions):
            workload.spawn(Teller(self, partition).run(), teller_id(partition))
        reader = Consumer(workload, self.places(), committed=True)
        workload.spawn(reader.run(), "committed-reader")

    @property
    def topics(self) -> tuple[Topic, Topic]:
        """Both topics."""
        return self.orders, self.entries

    def places(self) -> list[tuple[Topic, int]]:
        """All partitions."""
        return [(topic, index) for topic in self.topics for index in range(topic.partitions)]

    def session(self, client: Client, transactional_id: str, rng: random.Random) -> TxnSession:
        """Return a new session, old or new; not started."""
        timeout_ms = self.timeouts_ms[transactional_id] = rng.choice(TIMEOUTS_MS)
        return TxnSession(self.workload, client, transactional_id, timeout_ms, new=rng.random() < 0.5)

    def transfer(self, order: int) -> list[tuple[int, int]]:
        """The entries of an order: partition and amount."""
        count, amount = self.entries.partitions, 1 + order * 7919 % 97
        debit = order % count
        credit = (debit + 1 + order // count % (count - 1)) % count
        return [(debit, -amount), (credit, amount)]

    async def audit(self, settle_s: float = SETTLE_S) -> None:
        """Read everything that is there when all others have ended, and at most `settle_s` seconds later."""
        auditor = Auditor(self.workload, settle_s)
        if self.workload.cluster.level >= TRANSACTIONS_LEVEL:
            for transactional_id in sorted(self.timeouts_ms):
                await auditor.describe(transactional_id)
        for place in self.places():
            await auditor.read(*place)
        for partition in range(self.orders.partitions):
            await auditor.offset(group_of(partition), self.orders, partition)
        auditor.close()


def teller_id(partition: int) -> str:
    """The transactional id of the teller of a partition of orders."""
    return f"teller-{partition}"


def group_of(partition: int) -> str:
    """The group that keeps the offset of a teller."""
    return f"tellers-{partition}"


class Clerk(TxnWorker):
    """Writes orders."""

    def __init__(self, bank: Bank) -> None:
        super().__init__(bank, CLERK)
        self._bank = bank

    async def work(self, session: TxnSession) -> None:
        """See `TxnWorker.work`."""
        w, rng, orders = self._w, self._rng, self._bank.orders
        while not (w.closing or session.over):
            entries = [
                Entry(orders, rng.randrange(orders.partitions), value, UNKNOWN, 0)
                for value in w.values(rng.randint(1, 4))
            ]
            if rng.random() < SLEEPS:
                self._leave(session, entries, UNKNOWN)
                return
            await self._transaction(session, entries, UNKNOWN, slow=False)
            await asyncio.sleep(rng.expovariate(1 / self._interval_s))


class _OrderFetcher(Fetcher):
    """Keeps the orders that it has read."""

    def __init__(self, workload: Workload, client: Client) -> None:
        super().__init__(workload, client, workload.process(), committed=True)
        self.waiting: list[tuple[int, int]] = []
        """Offset and value."""

    def took(self, position: Position, came: Decoded) -> None:
        """See `Fetcher.took`."""
        self.waiting += zip(came.offsets, came.values, strict=True)


class Teller(TxnWorker):
    """Carries out the orders of one partition."""

    def __init__(self, bank: Bank, partition: int) -> None:
        super().__init__(bank, teller_id(partition))
        self._bank = bank
        self._partition = partition
        self._group = group_of(partition)

    async def work(self, session: TxnSession) -> None:
        """See `TxnWorker.work`."""
        w, rng, orders = self._w, self._rng, self._bank.orders
        offset = await session.committed(self._group, orders, self._partition)
        if offset is None:
            return
        fetcher, position = _OrderFetcher(w, self._client), Position(orders, self._partition)
        fetcher.assign_at(position, max(0, offset))
        while not (w.closing or session.over):
            await asyncio.sleep(rng.expovariate(1 / self._interval_s))
            if not fetcher.waiting:
                await fetcher.fetch([position])
            taken = fetcher.waiting[: rng.randint(1, 3)]
            if not taken:
                continue
            entries = [entry for _, order in taken for entry in self._entries(order)]
            following = taken[-1][0] + 1
            if rng.random() < SLEEPS:
                self._leave(session, entries, following)
                return
            if await self._transaction(session, entries, following, slow=False):
                del fetcher.waiting[: len(taken)]

    def _entries(self, order: int) -> list[Entry]:
        w, rng, bank = self._w, self._rng, self._bank
        found = [
            Entry(bank.entries, partition, value, order, amount)
            for (partition, amount), value in zip(bank.transfer(order), w.values(2), strict=True)
        ]
        if bank.orders.partitions > 1 and rng.random() < FOLLOWS:
            other = (self._partition + 1) % bank.orders.partitions
            found.append(Entry(bank.orders, other, w.values(1)[0], order, 0))
        return found

    async def _commit_offset(self, session: TxnSession, offset: int) -> None:
        await session.commit_offset(self._group, self._bank.orders, self._partition, offset)
