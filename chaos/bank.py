"""The bank of the simulator (`tidelog.simulation.actors.bank`) against real processes: transactions under chaos.

Entry: `BankThread`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tidelog.chaos.actors import SETTLE_S, ActorThread
from tidelog.simulation.actors.bank import Bank
from tidelog.simulation.actors.workload import Topic, Workload

if TYPE_CHECKING:
    from tidelog.chaos.clients import ClientJournal

ORDER_PARTITIONS = 6
"""Each has a teller, with a transactional id of its own."""
ENTRY_PARTITIONS = 4
PACE_S = (0.05, 0.2)
"""See `tidelog.simulation.actors.bank.PACE_S`."""
FIRST_PROCESS = 10_000


class BankThread(ActorThread):
    """Clerks, tellers, zombies, readers and the auditor."""

    def __init__(self, journal: ClientJournal, seed: int) -> None:
        super().__init__("bank", journal, seed, FIRST_PROCESS)
        self.bank: Bank | None = None

    def places(self) -> list[str]:
        """See `ActorThread.places`."""
        return [f"{topic.name}:{index}" for topic, index in self.bank.places()] if self.bank is not None else []

    def begin(self, workload: Workload, rng: random.Random) -> None:
        """See `ActorThread.begin`."""
        orders, entries = Topic("orders", ORDER_PARTITIONS, False), Topic("entries", ENTRY_PARTITIONS, False)
        self.bank = Bank(workload, orders, entries, PACE_S)
        self.bank.start()

    async def audit(self) -> None:
        """See `ActorThread.audit`."""
        assert self.bank is not None
        await self.bank.audit(SETTLE_S)
