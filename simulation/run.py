"""One simulation, from a seed to its findings.

Phases: the cluster starts; clients work during `steps` periods of faults; all faults end, and the cluster must become
idle within `REST_S` (all processes ready, no partition moving, every client's last request answered); new consumers
read every partition from start to end; the history is checked.

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

from tidelog.controller.model.levels import NEWEST, SNAPSHOTS_LEVEL
from tidelog.runtime.task_errors import ERRORS
from tidelog.simulation.actors.brancher import Brancher
from tidelog.simulation.actors.cast import start
from tidelog.simulation.actors.compacted import TABLE, CompactedTopic
from tidelog.simulation.actors.configurer import audit_configs
from tidelog.simulation.actors.consumers import read_all
from tidelog.simulation.actors.faults import FAULTS, Faults
from tidelog.simulation.actors.loader import Loader
from tidelog.simulation.actors.past import draw_past
from tidelog.simulation.actors.workload import Workload
from tidelog.simulation.checkers import CheckOptions, Finding, check
from tidelog.simulation.checkers.history import History
from tidelog.simulation.inside import find_orphans, look_inside
from tidelog.simulation.record import check_record
from tidelog.simulation.replicas import compare_replicas, unsettled_replicas
from tidelog.simulation.world.cluster import SimCluster
from tidelog.simulation.world.consensus import RaftWatch
from tidelog.simulation.world.loop import START_S, Deadlock, VirtualLoop, current_life
from tidelog.simulation.world.odd import is_odd
from tidelog.simulation.world.rounds import CleaningRounds, cleaned_up_to, left_out, rounds_missing
from tidelog.simulation.world.settings import Shape

logger = logging.getLogger(__name__)

CLEANS_EVERY = 4
"""One in this number of seeds waits until orphans must be deleted: a mostly idle minute."""
EMBEDDED = 1 / 5
"""The share of clusters with processes of both roles."""
BRANCHERS = 1 / 3
"""The share of clusters with a client that takes snapshots and makes branches."""
LOADERS = 1 / 2
"""The share of clusters with a client that loads images of the metadata again and again."""
REST_S = 60.0
"""Time within which the cluster must become idle after all faults have ended."""
START_UP_S = 30.0
MAX_TRIED_AGAIN = 5
"""Maximum number of findings about unexpected exceptions that have ended no task: each recurs with its retry."""
MAX_TURNS = 5_000_000
"""Maximum number of callbacks of one simulation: far more than any run without a busy loop needs."""


@dataclass(slots=True)
class SimulationOutcome:
    """The result of one seed."""

    seed: int
    findings: list[Finding] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    history: History = field(default_factory=History)
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    turns: int = 0
    faults_done: tuple[int, ...] = ()
    """Numbers of the faults carried out."""
    acknowledged: int = 0
    """Number of acknowledged records."""
    rounds: CleaningRounds | None = None
    """Of log compaction; None: there was no compacted topic."""
    mutated: int = 0
    """How often a switched-off protection would have taken effect (`tidelog.simulation.mutants.mutant`)."""

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings


class _SimulationRun:
    def __init__(
        self,
        seed: int,
        steps: int,
        faults: Sequence[str],
        skip: Collection[int],
        raft_watch: RaftWatch,
        *,
        transactions: bool,
        table: bool,
    ) -> None:
        self.outcome = SimulationOutcome(seed)
        self.outcome.history.about = {"seed": seed, "steps": steps, "faults": list(faults), "skip": sorted(skip)}
        self.loop = VirtualLoop()
        self.loop.max_turns = MAX_TURNS
        self.loop.set_exception_handler(self._unhandled)
        self._steps = steps
        rng = random.Random(seed)
        shape = Shape.draw(rng, embedded=random.Random(f"roles {seed}").random() < EMBEDDED)
        shape.draw_feed(random.Random(f"feed {seed}"))
        shape.draw_state(random.Random(f"state {seed}"))
        shape.draw_level(random.Random(f"level {seed}"))
        shape.draw_transactions(random.Random(f"transactions {seed}"))
        shape.draw_replication(random.Random(f"replicas {seed}"))
        shape.draw_table(random.Random(f"table {seed}"), surely=table, keeper=table and transactions)
        if transactions and not table:
            shape.bank = True
        if transactions or table:
            shape.level = NEWEST
        self.cluster = SimCluster(self.loop, shape, random.Random(rng.getrandbits(64)), self.note, self.defect)
        self.cluster.raft_watch = raft_watch
        self.table: CompactedTopic | None = None
        self._has_snapshots = False
        """They hold objects that the table has a part in."""
        self._tried_again = 0
        """Findings about unexpected exceptions that have ended no task."""
        self._cleaned: dict[tuple[str, int], int] = {}
        """How far partitions were compacted when the cluster had come to rest."""
        self.workload = Workload(self.loop, self.cluster, random.Random(rng.getrandbits(64)), self.outcome.history)
        generator = random.Random(rng.getrandbits(64))
        self.faults = Faults(self.loop, self.cluster, generator, tuple(faults), self.note, frozenset(skip))
        roles = "controllers in brokers" if shape.embedded else "controllers"
        about = f"{shape.controllers} {roles}, {shape.brokers} brokers, wal {shape.wal}, level {shape.level}"
        about += f", {shape.replicas} replicas" if shape.replicas > 1 else ""
        self.note("world", about)

    def note(self, who: str, what: str) -> None:
        """Add one line to the trace. Its number of callbacks reveals every difference between two runs."""
        self.outcome.trace.append(f"{self.loop.time() - START_S:.6f} {self.loop.turns} {who} {what}")

    def defect(self, message: str, error: BaseException) -> None:
        """Record an unexpected failure of the code: `assertion` for a failed assertion, else `defect`."""
        self.note("world", message)
        lines = "".join(traceback.format_exception(error)).rstrip()
        rule = "assertion" if isinstance(error, AssertionError) else "defect"
        self.outcome.findings.append(Finding(rule=rule, message=f"{message}\n{lines}"))

    def _task_error(self, place: str, error: BaseException, ended: bool) -> None:
        """An unexpected exception of a background task; nothing goes on there if it has `ended` the task.

        One that is tried again, or ends a request or a connection only, is a defect all the same, unless the fault
        `odd` is where it came from.
        """
        life = current_life()
        if ended and isinstance(error, AssertionError):
            self.defect(f"a task of {place} ended", error)
        elif ended:
            message = f"a task of {place} in {life.name if life else 'the world'} ended: {error!r}"
            self.note("world", message)
            lines = "".join(traceback.format_exception(error)).rstrip()
            self.outcome.findings.append(Finding(rule="task-died", message=f"{message}\n{lines}"))
        elif not is_odd(error) and self._tried_again < MAX_TRIED_AGAIN:
            self._tried_again += 1
            self.defect(f"unexpected in {place} of {life.name if life else 'the world'}: {error!r}", error)

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
        cast = start(self.workload)
        self.table = cast.table
        loads = random.Random(f"loader {self.outcome.seed}")
        if loads.random() < LOADERS:
            self.workload.spawn(Loader(self.workload, loads).run(), "loader")
        branches = random.Random(f"branches {self.outcome.seed}")
        if self.cluster.shape.level >= SNAPSHOTS_LEVEL and branches.random() < BRANCHERS:
            self.workload.spawn(Brancher(self.workload, branches).run(), "brancher")
            self._has_snapshots = True
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
                if self.table is not None:
                    what = "log compaction"
                    await self._compacted(self.table)
                what = "the last readers"
                await read_all(self.workload)
                if cast.seeker is not None:
                    await cast.seeker.audit()
                if cast.configured is not None:
                    await audit_configs(self.workload, cast.configured)
                if cast.bank is not None:
                    await cast.bank.audit()
                if self.table is not None:
                    await self.table.audit()
                self.outcome.findings += look_inside(self.cluster, self.workload.topics) + await compare_replicas(
                    self.cluster
                )
                self.outcome.findings += await check_record(self.cluster)
            if self.outcome.seed % CLEANS_EVERY == 0:
                await self._let_clean()
        except TimeoutError:
            self.note("world", f"{what} did not come to rest")
            going_on = [f"{task.get_name()} goes on" for task in self.workload.tasks if not task.done()]
            problems = (
                "; ".join([*self._unrest(), *rounds_missing(self.cluster, self._cleaned), *going_on])
                or "nothing is missing in the metadata"
            )
            message = f"{what} did not come to rest within {REST_S:.0f} s after all was healed: {problems}"
            self.outcome.findings.append(Finding(rule="liveness", message=message))
            if what != "the last readers":
                await self._read_what_can_be_read()

    async def _read_what_can_be_read(self) -> None:
        """Read all readable partitions, also if some processes are not alive: data may be lost, too."""
        self.workload.closing = True
        try:
            async with asyncio.timeout(REST_S):
                await read_all(self.workload)
                if self.table is not None:
                    await self.table.audit(0.0)
        except TimeoutError:
            self.note("world", "not all could be read")

    async def _let_clean(self) -> None:
        """Wait for the orphan search, and check the remaining orphans."""
        clean = self.cluster.shape.clean
        await asyncio.sleep((clean.orphan_age_ms + 3 * clean.interval_ms) / 1000)
        self.outcome.findings += find_orphans(self.cluster)

    async def _ready(self) -> None:
        while not all(node.ready == node.belongs for node in self.cluster.nodes.values()):  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.2)

    async def _compacted(self, table: CompactedTopic) -> None:
        """Wait until each partition that is due has had a round, and record how far they have come."""
        self._cleaned = cleaned_up_to(self.cluster)
        while rounds_missing(self.cluster, self._cleaned):  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.2)
        left = left_out(self.cluster)
        cleaned = {
            place[1]: offset
            for place, offset in cleaned_up_to(self.cluster).items()
            if place[0] == TABLE and place not in left
        }
        table.note_cleaned(cleaned, may_have_left=self._has_snapshots)

    async def _at_rest(self) -> None:
        while self._unrest():  # noqa: ASYNC110  # no event tells all of it
            await asyncio.sleep(0.2)

    def _unrest(self) -> list[str]:
        """Return the reasons why the cluster is not idle."""
        found = [
            f"{node.host} is {'' if node.ready else 'not '}ready"
            for node in self.cluster.nodes.values()
            if node.belongs != node.ready
        ]
        if self.cluster.repairs:
            found.append("a controller was not added")
        if self.cluster.raising is not None and not self.cluster.raising.done():
            found.append("the feature level was not raised")
        active = self.cluster.active
        if active is None:
            return [*found, "no controller is active"]
        image = active.image
        found += [f"broker {one.id} counts as dead" for one in image.brokers.values() if not one.alive]
        found += [
            f"{node.host} has metadata of version {node.broker.controller.image.version}, not {image.version}"
            for node in self.cluster.brokers
            if node.ready and node.broker is not None and node.broker.controller.image.version < image.version
        ]
        found += [f"{one.topic_id.hex()[:6]}-{one.index} is moving" for one in image.moving()]
        found += unsettled_replicas(self.cluster, image)
        found += [
            f"stream {stream.id} is quarantined: {stream.quarantined}"
            for stream in image.streams.values()
            if stream.quarantined
        ]
        return found

    def run(self) -> SimulationOutcome:
        outcome = self.outcome
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # its time depends on more than the seed; it may close what a dead process left behind
        asyncio.set_event_loop(self.loop)
        unlisten = ERRORS.listen(self._task_error)
        try:
            self.loop.run_until_complete(self._phases())
        except Deadlock as error:
            outcome.findings.append(Finding(rule="liveness", message=str(error)))
        except Exception as error:  # noqa: BLE001  # of a client, a fault or a check: a seed that does not end says nothing
            self.defect("the simulation ended", error)
        finally:
            unlisten()
            asyncio.set_event_loop(None)
            if collecting:
                gc.enable()
        outcome.simulated_s = self.loop.time() - START_S
        outcome.turns = self.loop.turns
        outcome.acknowledged = sum(len(op.values) for op in outcome.history.ops if op.kind == "send" and op.ok)
        self._end_table()
        outcome.findings += self.cluster.watch.findings + self.cluster.raft_watch.findings + self.workload.findings
        outcome.findings += check(outcome.history, CheckOptions(tail_waits=self.cluster.shape.replicas > 1))
        outcome.faults_done = tuple(self.faults.done)
        for finding in outcome.findings:
            self.note("finding", f"{finding.rule}: {finding.message.splitlines()[0]}")
        for op in outcome.history.ops:
            outcome.trace.append(op.text())
        outcome.cpu_s = time.process_time() - began
        return outcome

    def _end_table(self) -> None:
        if self.table is None:
            return
        rounds = self.outcome.rounds = self.cluster.rounds
        nodes = self.cluster.brokers
        for node in nodes:
            if node.log_cleaner is not None:
                rounds.add(node.log_cleaner)
        self.note("world", str(rounds))
        if any(node.clock.has_jumped for node in nodes):
            self.table.forget_times()


def simulate(
    seed: int,
    *,
    steps: int = 12,
    faults: Sequence[str] = tuple(FAULTS),
    skip: Collection[int] = (),
    raft_watch: RaftWatch | None = None,
    transactions: bool = False,
    table: bool = False,
) -> SimulationOutcome:
    """Run one simulation, without the faults whose numbers are in `skip`.

    `transactions`: with transactional clients, whatever the seed draws; `table`: with a compacted topic; both: with one
    that is written to in transactions. `raft_watch` is one to use instead of its own, for a caller who wants to see the
    controllers' log.

    Use a new process for each: the result of a seed must not depend on earlier seeds.
    """
    watch = raft_watch or RaftWatch()
    return _SimulationRun(seed, steps, faults, skip, watch, transactions=transactions, table=table).run()
