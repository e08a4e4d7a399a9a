"""The controllers' Raft in a simulation: the real `RaftConsensus`, over simulated time, chance, files and sockets.

The member takes its turns on the virtual loop instead of on a thread. A turn runs whole, at one moment of virtual time;
what it did to its files takes as long as the disk says (`SimRaftFiles.busy_s`), and its messages, results and the next
turn come that much later. So a crash comes between two turns, or inside one at any change of a file
(`SimRaftFiles.crash_in`).

`RaftWatch` is the oracle beside it: every entry that any member applies, at its index, must be the same for all of
them, at all times (Raft paper, figure 3: state machine safety); and none is written above the cluster's feature level.

Entry: `SimConsensus`, one for each life of a controller; `RaftWatch`, one of a cluster.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidelog.controller.image.replica import Replica
from tidelog.controller.machine.state import FailedCommand
from tidelog.controller.model.commands import decode_envelope, decode_result
from tidelog.controller.model.errors import CommandFailed
from tidelog.controller.model.levels import UnsupportedLevel
from tidelog.controller.raft.consensus import StateMachine
from tidelog.controller.raft.journal import Journal
from tidelog.controller.raft.quorum import Members
from tidelog.controller.raft.snapshot import Snapshot, write_snapshot
from tidelog.controller.raft.surroundings import Surroundings, Turns
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import Clock
from tidelog.runtime.network import Network
from tidelog.simulation.checkers.finding import Finding
from tidelog.simulation.world.loop import Life, VirtualLoop, current_life
from tidelog.simulation.world.raft_files import Gone, RaftPlatters, SimRaftFiles
from tidelog.simulation.world.raft_sockets import SimSockets
from tidelog.simulation.world.settings import Shape

NO_OP = b"\x01"
"""An entry that changes nothing."""
COMMAND = b"\x00"
"""What an entry with a command begins with."""
DIRECTORY = Path("/controller")
HEARTBEAT_S = 0.18
ELECTION_MIN_S = 0.6
ELECTION_MAX_S = 1.2
MANY_LOOKS, LOOK_S = 100, 1e-3
"""What passes with each look at the clock after so many in one turn: pysyncobj sends until its time is over."""
TURN_S = 0.00002
"""What a turn takes that touches no file."""
WORK_S = 0.002
"""What it takes to make a snapshot's bytes."""


_UNSUPPORTED = UnsupportedLevel.__name__.encode()
_FAILED = CommandFailed.__name__.encode()


class _SimWork:
    """A `tidelog.controller.raft.surroundings.BackgroundWork`: it runs whole, a moment later."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def is_alive(self) -> bool:
        return self._run is not None

    def join(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()


class _SimRunner:
    """A `tidelog.controller.raft.surroundings.Runner` on the virtual loop."""

    def __init__(self, turns: Turns, loop: VirtualLoop, files: SimRaftFiles, sockets: SimSockets, life: Life) -> None:
        self._turns = turns
        self._loop = loop
        self._files = files
        self._sockets = sockets
        self._life = life
        self._context = contextvars.copy_context()
        self._timer: asyncio.Handle | None = None
        self._at = 0.0
        """When the next turn comes, if there is a timer."""
        self._free_at = loop.time()
        """Until then the last turn is under way, or nothing is listened to."""
        self._begun = False
        self._stepping = False
        self._woken = False
        self._outbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._ended: asyncio.Future[None] = loop.create_future()
        sockets.wake, sockets.later, sockets.on_wait = self.wake, self._later, self._wait

    def start(self) -> None:
        self._schedule(self._loop.time())

    def wake(self) -> None:
        if self._stepping:
            self._woken = True
        elif not self._ended.done():
            self._schedule(max(self._free_at, self._loop.time()))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        self._outbox.append((callback, args))
        if not self._stepping:
            self._deliver()

    def is_alive(self) -> bool:
        return not self._ended.done()

    async def join(self) -> None:
        await self._ended

    def _later(self, callback: Callable[[], None]) -> None:
        self.post(callback)

    def _wait(self, seconds: float) -> None:
        self._files.busy_s += seconds

    def _schedule(self, at: float) -> None:
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._at = at
        self._timer = self._loop.call_at(at, self._step, context=self._context)

    def _step(self) -> None:
        self._timer = None
        if self._ended.done():
            return
        self._stepping, self._woken = True, False
        self._files.busy_s = TURN_S
        try:
            if self._begun:
                self._turns.listen(0.0)
            elif not self._turns.begin():
                self._end()
                return
            self._begun = True
            pause = self._turns.take()
            if pause is None:
                self._turns.end()
        except Gone:
            return
        finally:
            self._stepping = False
        if self._life.dead:
            return
        busy_s, self._files.busy_s = self._files.busy_s, 0.0
        if pause is None:
            self._end()
            return
        self._deliver(busy_s)
        self._free_at = self._loop.time() + busy_s + (0.0 if pause.listens else pause.seconds)
        goes_on = pause.listens and (self._woken or self._sockets.is_hot())
        self._schedule(self._free_at + (pause.seconds if pause.listens and not goes_on else 0.0))

    def _end(self) -> None:
        self._deliver()
        self._ended.set_result(None)

    def _deliver(self, after_s: float = 0.0) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._loop.call_later(after_s, self._hand_out, outbox, context=self._life.context.copy())

    @staticmethod
    def _hand_out(outbox: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        for callback, args in outbox:
            callback(*args)


class RaftHost(NamedTuple):
    """The simulated machine that a member runs on."""

    platters: RaftPlatters
    network: Network
    clock: Clock
    loop: VirtualLoop
    rng: random.Random


class SimConsensus(RaftConsensus):
    """`RaftConsensus` of one life, over the files that outlive it."""

    def __init__(
        self,
        *,
        credentials: Credentials,
        members: Members,
        shape: Shape,
        host: RaftHost,
        watch: RaftWatch,
    ) -> None:
        platters, network, clock, loop, rng = host
        self.files = files = SimRaftFiles(platters, rng)
        life = current_life()
        assert life is not None
        files.is_gone = lambda: life.dead
        sockets = SimSockets(network, loop, shape.raft.buffer_bytes)
        self._watch = watch
        self._name = life.name

        def work(run: Callable[[], None]) -> _SimWork:
            def guarded() -> None:
                busy_s = files.busy_s
                try:
                    run()
                except Gone:
                    return
                finally:
                    files.busy_s = busy_s

            begun = _SimWork(guarded)
            loop.call_later(WORK_S * (0.5 + rng.random()), begun.join)
            return begun

        looks = [0.0, 0]

        def monotonic() -> float:
            now = loop.time()
            looks[:] = [now, looks[1] + 1 if looks[0] == now else 0]
            if looks[1] > MANY_LOOKS:
                files.busy_s += LOOK_S
            return now + files.busy_s

        surroundings = Surroundings(
            monotonic=monotonic,
            random=rng.random,
            files=files,
            sockets=sockets,
            work=work,
            runner=lambda turns: _SimRunner(turns, loop, files, sockets, life),
        )
        settings = RaftSettings(
            directory=DIRECTORY,
            credentials=credentials,
            members=members,
            snapshot_entries=shape.controller.snapshot_entries,
            snapshot_piece_bytes=shape.raft.piece_bytes,
            election_min_s=ELECTION_MIN_S,
            election_max_s=ELECTION_MAX_S,
            heartbeat_s=HEARTBEAT_S,
        )
        super().__init__(settings, clock, surroundings)

    async def start(self, machine: StateMachine) -> None:
        """See `Consensus.start`."""
        await super().start(_Watched(machine, self._watch, self._name))


class RaftWatch:
    """See the module."""

    def __init__(self) -> None:
        self.applied: dict[int, bytes] = {}
        """Every entry, by index."""
        self.findings: list[Finding] = []
        self._forked: Sequence[bytes] | None = None

    def forks(self, contents: Sequence[bytes]) -> None:
        """From now on members have older copies of their directories, with these contents, and may add nothing."""
        self._forked = contents

    @property
    def is_forked(self) -> bool:
        """Whether members have older copies."""
        return self._forked is not None

    def joins(self) -> None:
        """The members have their own directories again."""
        self._forked = None

    def applies(self, name: str, index: int, blob: bytes) -> bool:
        """A member applies an entry. Returns whether it is the first one that does."""
        known = self.applied.get(index)
        if self._forked is not None:
            if known != blob and not any(blob in each for each in self._forked) and not self.findings:
                message = f"{name}, which has an older copy of its directory, applies a new entry at index {index}"
                self.findings.append(Finding(rule="rolled-back", message=message))
            return False
        if known is None:
            self.applied[index] = blob
        elif known != blob and not self.findings:
            message = f"{name} applies another entry at index {index} than a member did before it"
            self.findings.append(Finding(rule="raft-diverged", message=message))
        return known is None

    def refused(self, index: int, blob: bytes, result: bytes) -> None:
        """The first result of an entry: nobody writes above the level in force, which older members would apply, and
        no command meets an exception that nobody expected."""
        error = decode_result(result).error
        envelope = decode_envelope(blob)
        if error is not None and error.name == CommandFailed.__name__:
            self.findings.append(Finding(rule="defect", message=error.message))
        if error is not None and error.name == UnsupportedLevel.__name__ and error.message.startswith("command "):
            message = f"{type(envelope.command).__name__} at index {index}: {error.message}"
            self.findings.append(Finding(rule="above-level", message=message))

    def failed(self, name: str, failed: FailedCommand) -> None:
        """A member has met an unexpected exception of which the command's result says nothing."""
        message = f"{failed.command} at index {failed.index} met an unexpected exception in {name}: {failed.error}"
        self.findings.append(Finding(rule="defect", message=message))


def remember(platters: RaftPlatters, index: int, term: int, state: bytes) -> None:
    """Give a member the directory of one that has applied `index` entries and holds nothing but their snapshot."""
    files = SimRaftFiles(platters, random.Random(0))
    previous, last = (NO_OP, index - 1, term), (NO_OP, index, term)
    journal = Journal.open(DIRECTORY / "journal", files)
    journal.reset([previous, last])
    journal.set_term(term, None)
    journal.close()
    write_snapshot(DIRECTORY / "draft", Snapshot(last, previous, state), files)
    files.rename(DIRECTORY / "draft", DIRECTORY / "snapshot")
    files.sync_directory(DIRECTORY)


def remember_log(platters: RaftPlatters, term: int, commands: Sequence[bytes]) -> None:
    """Give a member the directory of one that holds a no-op and these commands in its log, and no snapshot.

    Every log begins with a no-op of term 0, so that of an empty member, too: from there on entries are sent to it.
    """
    entries = [(NO_OP, 1, 0), *((COMMAND + blob, index, term) for index, blob in enumerate(commands, 2))]
    journal = Journal.open(DIRECTORY / "journal", SimRaftFiles(platters, random.Random(0)))
    journal.reset(entries)
    journal.set_term(term, None)
    journal.close()


class _Watched:
    """A state machine whose entries are looked at."""

    def __init__(self, machine: StateMachine, watch: RaftWatch, name: str) -> None:
        self._machine = machine
        self._watch = watch
        self._name = name
        self._failed: FailedCommand | None = None
        self.flush = machine.flush
        self.freeze = machine.freeze
        self.load = machine.load
        self.level = machine.level

    def apply(self, blob: bytes, index: int) -> bytes:
        """See `StateMachine.apply`."""
        is_first = self._watch.applies(self._name, index, blob)
        result = self._machine.apply(blob, index)
        if is_first and (_UNSUPPORTED in result or _FAILED in result):
            self._watch.refused(index, blob, result)
        if isinstance(self._machine, Replica):
            self._note_failure(self._machine.state.failed, result)
        return result

    def _note_failure(self, failed: FailedCommand | None, result: bytes) -> None:
        """Tell of a failure beside the command: of one of the command itself its result does."""
        if failed is not None and failed is not self._failed and _FAILED not in result:
            self._watch.failed(self._name, failed)
        self._failed = failed
