"""The actors of the simulator against real processes: over TCP and in real time, in a thread with a loop of its own.

Their operations are in the harness's history, and the same checkers judge them.

Invariant: `finish` returns after a bounded time, whatever the cluster does. Entry: `ActorThread`.
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
from tidelog.simulation.actors.workload import Workload
from tidelog.simulation.checkers import Finding

if TYPE_CHECKING:
    from tidelog.chaos.clients import ClientJournal

SETTLE_S = 30.0
"""Time from the end of all faults and clients until no transaction may be open: the bound that users are told."""
END_S = 60.0
"""Time for the actors' last requests, and for what they read at the end beyond `SETTLE_S`."""


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
    first_process: int
    """Numbers of their processes in the history, apart from those of other clients."""
    numbers: Any = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = iter(range(self.first_process, 1 << 31))

    def now_us(self) -> int:
        """See `Workload.now_us`."""
        return self.journal.now_us()

    def time_ms(self) -> int:
        """See `Workload.time_ms`."""
        return time.time_ns() // 1_000_000

    def process(self) -> int:
        """See `Workload.process`."""
        return int(next(self.numbers))

    def transaction(self) -> int:
        """See `Workload.transaction`: of all actors' together, as the checkers know a transaction by its number."""
        return next(self.journal.transactions)

    def values(self, count: int) -> list[int]:
        """See `Workload.values`."""
        return [next(self.journal.values) for _ in range(count)]


class ActorThread(threading.Thread):
    """Works from `start` to `finish`."""

    def __init__(self, name: str, journal: ClientJournal, seed: int, first_process: int) -> None:
        super().__init__(daemon=True, name=f"chaos-{name}")
        self._what = name
        self._journal = journal
        self._rng = random.Random(f"{name} {seed}")
        self._first_process = first_process
        self._closing = threading.Event()
        self._workload: LiveWorkload | None = None
        self.error: Exception | None = None

    @property
    def findings(self) -> list[Finding]:
        """What the actors found that the history cannot express."""
        return self._workload.findings if self._workload is not None else []

    def places(self) -> list[str]:
        """The partitions that may be moved meanwhile, as `topic:partition`."""
        raise NotImplementedError

    def begin(self, workload: Workload, rng: random.Random) -> None:
        """Start the actors. Called in the thread."""
        raise NotImplementedError

    async def audit(self) -> None:
        """Read everything when all actors have ended, after at most `SETTLE_S`. Called in the thread."""
        raise NotImplementedError

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
            loop=loop,
            cluster=cluster,
            rng=self._rng,
            history=self._journal.history,
            journal=self._journal,
            first_process=self._first_process,
        )
        self.begin(workload, self._rng)
        while not self._closing.is_set():
            for task in workload.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.1)
        async with asyncio.timeout(END_S):
            await workload.settle()
        async with asyncio.timeout(SETTLE_S + END_S):
            await self.audit()

    def problems(self) -> list[str]:
        """Return why the actors ended early; empty if they did not."""
        return [] if self.error is None else [f"the {self._what} ended: {self.error!r}"]

    def end(self) -> None:
        """Let the actors end, and audit; `finish` waits for it."""
        self._closing.set()

    def finish(self) -> list[str]:
        """Wait for the end of the audit; return the problems."""
        self.end()
        self.join(2 * END_S + SETTLE_S + 10)
        return [*self.problems(), *([f"the {self._what} does not end"] if self.is_alive() else [])]
