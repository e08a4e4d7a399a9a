"""The bank of the simulator (`tidelog.simulation.actors.bank`) against real processes: transactions under chaos.

The same clerks, tellers, zombies and auditor, over TCP and in real time, in a thread with a loop of its own. Their
operations are in the harness's history, and the same checkers judge them.

Invariant: `finish` returns after a bounded time, whatever the cluster does. Entry: `BankThread`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.levels import NEWEST
from tidelog.runtime.network import TcpNetwork
from tidelog.simulation.actors.bank import Bank
from tidelog.simulation.actors.workload import Topic, Workload
from tidelog.simulation.checkers import Finding

if TYPE_CHECKING:
    from tidelog.chaos.clients import ClientJournal

ORDER_PARTITIONS = 6
"""Each has a teller, with a transactional id of its own."""
ENTRY_PARTITIONS = 4
PACE_S = (0.05, 0.2)
"""See `tidelog.simulation.actors.bank.PACE_S`."""
FIRST_PROCESS = 10_000
"""Numbers of the bank's processes in the history, apart from those of other clients."""
SETTLE_S = 30.0
"""Time from the end of all faults and clients until no transaction may be open: the bound that users are told."""
END_S = 60.0
"""Time for the actors' last requests, and for the audit beyond `SETTLE_S`."""


class _LiveNetworks:
    """Every client has the same network."""

    def host(self, _name: str) -> TcpNetwork:
        """Return the network of a client."""
        return TcpNetwork()


class _NoRacks:
    """Brokers without racks."""

    def rack_of(self, _number: int) -> str:
        """Return the rack of a client: none."""
        return ""


class _LiveCluster:
    """What clients know of a cluster of processes; of its inside they know nothing."""

    controllers: tuple[Any, ...] = ()
    active = None
    level = NEWEST
    shape = _NoRacks()

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = [split_address(address) for address in bootstrap.split(",")]
        self.network = _LiveNetworks()


@dataclass(slots=True, kw_only=True)
class LiveWorkload(Workload):
    """The actors' shared state, with the clock, the values and the history of the harness."""

    journal: ClientJournal
    numbers: Any = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = iter(range(FIRST_PROCESS, 1 << 31))

    def now_us(self) -> int:
        """See `Workload.now_us`."""
        return self.journal.now_us()

    def time_ms(self) -> int:
        """See `Workload.time_ms`."""
        return time.time_ns() // 1_000_000

    def process(self) -> int:
        """See `Workload.process`."""
        return int(next(self.numbers))

    def values(self, count: int) -> list[int]:
        """See `Workload.values`."""
        return [next(self.journal.values) for _ in range(count)]


class BankThread(threading.Thread):
    """Works from `start` to `finish`."""

    def __init__(self, journal: ClientJournal, seed: int) -> None:
        super().__init__(daemon=True, name="chaos-bank")
        self._journal = journal
        self._rng = random.Random(f"bank {seed}")
        self._closing = threading.Event()
        self._workload: LiveWorkload | None = None
        self.bank: Bank | None = None
        self.error: Exception | None = None

    @property
    def findings(self) -> list[Finding]:
        """What the actors found that the history cannot express."""
        return self._workload.findings if self._workload is not None else []

    def run(self) -> None:
        """The thread's main function."""
        try:
            asyncio.run(self._work())
        except Exception as error:  # noqa: BLE001  # reported by the harness, which ends with it
            self.error = error

    async def _work(self) -> None:
        loop: Any = asyncio.get_running_loop()
        cluster: Any = _LiveCluster(self._journal.bootstrap)
        workload = self._workload = LiveWorkload(
            loop=loop, cluster=cluster, rng=self._rng, history=self._journal.history, journal=self._journal
        )
        orders, entries = Topic("orders", ORDER_PARTITIONS, False), Topic("entries", ENTRY_PARTITIONS, False)
        bank = self.bank = Bank(workload, orders, entries, PACE_S)
        bank.start()
        while not self._closing.is_set():
            for task in workload.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.1)
        async with asyncio.timeout(END_S):
            await workload.settle()
        async with asyncio.timeout(SETTLE_S + END_S):
            await bank.audit(SETTLE_S)

    def problems(self) -> list[str]:
        """Return why the actors ended early; empty if they did not."""
        return [] if self.error is None else [f"the bank ended: {self.error!r}"]

    def finish(self) -> list[str]:
        """Let the actors end, and audit; return the problems."""
        self._closing.set()
        self.join(2 * END_S + SETTLE_S + 10)
        return [*self.problems(), *(["the bank does not end"] if self.is_alive() else [])]
