"""One simulation from a seed to its verdict.

Phases: the cluster starts; clients work while faults come and go for `steps` periods; everything heals, and the cluster
must come to rest within `REST_S` (all processes ready, no partition moving, every client's last request answered);
every partition is read from start to end by new consumers; the history is judged.

Entry: `simulate`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from simulation.cast import start
from simulation.checkers import CheckOptions, Finding, check
from simulation.cluster import Cluster
from simulation.consumers import read_all
from simulation.faults import FAULTS, Faults
from simulation.history import History
from simulation.inside import find_orphans, look_inside
from simulation.loop import START_S, Deadlock, VirtualLoop
from simulation.past import draw_past
from simulation.settings import Shape
from simulation.workload import Workload

log = logging.getLogger(__name__)

CLEANS_EVERY = 4
"""One seed in so many waits until orphans must be gone: a minute of little to do."""
EMBEDDED = 1 / 5
"""How many of the clusters have processes of both roles."""
REST_S = 60.0
"""Within which a healed cluster must be at rest."""
START_UP_S = 30.0
MAX_TURNS = 5_000_000
"""Bound on the callbacks of one simulation: far more than any needs that does not spin."""


@dataclass(slots=True)
class Outcome:
    """What came of one seed."""

    seed: int
    findings: list[Finding] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    history: History = field(default_factory=History)
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    turns: int = 0
    faults_done: tuple[int, ...] = ()
    """By number."""
    acknowledged: int = 0
    """Records that producers were told are there."""
    mutated: int = 0
    """How often a switched-off line would have protected (`simulation.mutant`)."""

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.findings


class _Run:
    def __init__(self, seed: int, steps: int, faults: Sequence[str], skip: Collection[int]) -> None:
        self.outcome = Outcome(seed)
        self.outcome.history.about = {"seed": seed, "steps": steps, "faults": list(faults), "skip": sorted(skip)}
        self.loop = VirtualLoop()
        self.loop.max_turns = MAX_TURNS
        self.loop.set_exception_handler(self._unhandled)
        self._steps = steps
        rng = random.Random(seed)
        shape = Shape.draw(rng, embedded=random.Random(f"roles {seed}").random() < EMBEDDED)
        self.cluster = Cluster(self.loop, shape, random.Random(rng.getrandbits(64)), self.note, self.defect)
        self.workload = Workload(self.loop, self.cluster, random.Random(rng.getrandbits(64)), self.outcome.history)
        generator = random.Random(rng.getrandbits(64))
        self.faults = Faults(self.loop, self.cluster, generator, tuple(faults), self.note, frozenset(skip))
        roles = "controllers in brokers" if shape.embedded else "controllers"
        self.note("world", f"{shape.controllers} {roles}, {shape.brokers} brokers, wal {shape.wal}")

    def note(self, who: str, what: str) -> None:
        """One line of the trace. The number of callbacks in it betrays every difference between two runs."""
        self.outcome.trace.append(f"{self.loop.time() - START_S:.6f} {self.loop.turns} {who} {what}")

    def defect(self, message: str, error: BaseException) -> None:
        """Code failed in a way that it should not: `assertion` if it noticed by itself, else `defect`."""
        self.note("world", message)
        lines = "".join(traceback.format_exception(error)).rstrip()
        rule = "assertion" if isinstance(error, AssertionError) else "defect"
        self.outcome.findings.append(Finding(rule=rule, message=f"{message}\n{lines}"))

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, Deadlock):
            raise error
        message = f"{context.get('message')}: {error!r}"
        if isinstance(error, BaseException):
            self.defect(message, error)
        else:
            self.outcome.findings.append(Finding(rule="defect", message=message))

    async def _phases(self) -> None:
        start(self.workload)
        draw_past(self.cluster, self.workload.topics, random.Random(f"past {self.outcome.seed}"))
        self.cluster.start()
        await self.faults.run(self._steps)
        self.outcome.history.note("heal", 0, self.workload.now_us())
        deadline = self.loop.time() + REST_S
        what = "the cluster"
        try:
            async with asyncio.timeout_at(deadline):
                await self._ready()
                self.note("world", "ready")
                what = "the clients"
                await self.workload.settle()
                what = "the cluster"
                await self._at_rest()
                self.note("world", "at rest")
                what = "the last readers"
                await read_all(self.workload)
                self.outcome.findings += look_inside(self.cluster)
            if self.outcome.seed % CLEANS_EVERY == 0:
                await self._let_clean()
        except TimeoutError:
            self.note("world", f"{what} did not come to rest")
            going_on = [f"{task.get_name()} goes on" for task in self.workload.tasks if not task.done()]
            problems = "; ".join([*self._unrest(), *going_on]) or "nothing is missing in the metadata"
            message = f"{what} did not come to rest within {REST_S:.0f} s after all was healed: {problems}"
            self.outcome.findings.append(Finding(rule="liveness", message=message))
            if what != "the last readers":
                await self._read_what_can_be_read()

    async def _read_what_can_be_read(self) -> None:
        """What is not alive may have lost something, too."""
        self.workload.closing = True
        try:
            async with asyncio.timeout(REST_S):
                await read_all(self.workload)
        except TimeoutError:
            self.note("world", "not all could be read")

    async def _let_clean(self) -> None:
        """Give the search for orphans its time, and see what it left."""
        clean = self.cluster.shape.clean
        await asyncio.sleep((clean.orphan_age_ms + 3 * clean.interval_ms) / 1000)
        self.outcome.findings += find_orphans(self.cluster)

    async def _ready(self) -> None:
        while not all(node.ready == node.belongs for node in self.cluster.nodes.values()):  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.2)

    async def _at_rest(self) -> None:
        while self._unrest():  # noqa: ASYNC110  # no event tells all of it
            await asyncio.sleep(0.2)

    def _unrest(self) -> list[str]:
        """What is not as it should be."""
        found = [
            f"{node.host} is {'' if node.ready else 'not '}ready"
            for node in self.cluster.nodes.values()
            if node.belongs != node.ready
        ]
        active = self.cluster.active
        if active is None:
            return [*found, "no controller is active"]
        image = active.image
        found += [f"broker {one.id} counts as dead" for one in image.brokers.values() if not one.alive]
        found += [f"{one.topic_id.hex()[:6]}-{one.index} is moving" for one in image.moving()]
        found += [
            f"stream {stream.id} is quarantined: {stream.quarantined}"
            for stream in image.streams.values()
            if stream.quarantined
        ]
        return found

    def run(self) -> Outcome:
        outcome = self.outcome
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # when it runs depends on more than the seed; it may close what a dead process left behind
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._phases())
        except Deadlock as error:
            outcome.findings.append(Finding(rule="liveness", message=str(error)))
        finally:
            asyncio.set_event_loop(None)
            if collecting:
                gc.enable()
        outcome.simulated_s = self.loop.time() - START_S
        outcome.turns = self.loop.turns
        outcome.acknowledged = sum(len(op.values) for op in outcome.history.ops if op.kind == "send" and op.ok)
        outcome.findings += self.cluster.watch.findings + self.workload.findings
        outcome.findings += check(outcome.history, CheckOptions())
        outcome.faults_done = tuple(self.faults.done)
        for finding in outcome.findings:
            self.note("finding", f"{finding.rule}: {finding.message.splitlines()[0]}")
        for op in outcome.history.ops:
            outcome.trace.append(op.text())
        outcome.cpu_s = time.process_time() - began
        return outcome


def simulate(
    seed: int, *, steps: int = 12, faults: Sequence[str] = tuple(FAULTS), skip: Collection[int] = ()
) -> Outcome:
    """Run one simulation, without the faults whose numbers are in `skip`.

    Use a process for each: what a seed does must not depend on what ran before it.
    """
    return _Run(seed, steps, faults, skip).run()
