"""Replicas of one WAL that run the real protocol (`tidelog.storage.replication`) in a world of messages, crashes and
lost disks, with an oracle beside them: what was confirmed once is on every later master.

Disks and links are models; every decision is the product's. The controllers are their state machine, without Raft:
commands are applied in the order in which they arrive. Entry: `World`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.replica_controllers import Controllers, State, Violation
from tests.support.replica_mutations import MUTATIONS
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.errors import ConfigurationRefused
from tidelog.controller.model.wal_notes import WalLost
from tidelog.runtime.errors import Fenced, TidelogError
from tidelog.simulation.mutants.mutant import Edit, Mutation, apply
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.following import Diverged, LocalWal, Step, WalFollower
from tidelog.storage.replication.frames import Ack, BadFrame, FollowerHello, Records, Welcome
from tidelog.storage.replication.master import Master
from tidelog.storage.replication.policy import ReplicationPolicy
from tidelog.storage.replication.sending import FollowerLink, LinkSettings, LinkState
from tidelog.storage.wal.epochs import EpochHistory

RECORD_BYTES = 8
"""Every record is its id, and nothing else."""
_ID = struct.Struct(">q")


class Disk:
    """A WAL on a disk: what is durable survives everything but the loss of the disk."""

    def __init__(self, wal_id: str) -> None:
        self.wal_id = wal_id
        self.start = 0
        self.ids: list[int] = []
        self.synced = 0
        """Durable records from `start` on."""
        self.history = EpochHistory()
        self.promised = -1
        self.confirm = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids) * RECORD_BYTES

    @property
    def durable(self) -> int:
        return self.start + self.synced * RECORD_BYTES

    def id_at(self, offset: int) -> int:
        """Return the id of the record at `offset`; -1 if it is not here."""
        index = (offset - self.start) // RECORD_BYTES
        return self.ids[index] if 0 <= index < len(self.ids) else -1

    def receive(self, records: Records) -> None:
        if records.epoch > self.history.last_epoch:
            self.synced = len(self.ids)
            self.history.append(records.epoch, records.epoch_start)
        assert records.offset == self.end
        self.ids += [each for (each,) in _ID.iter_unpack(records.body)]

    def truncate(self, offset: int) -> None:
        assert self.start <= offset <= self.end and offset >= self.confirm, (offset, self.confirm)
        del self.ids[(offset - self.start) // RECORD_BYTES :]
        self.synced = min(self.synced, len(self.ids))
        self.history.truncate_to(offset)

    def restart(self, offset: int) -> None:
        self.start, self.ids, self.synced, self.history = offset, [], 0, EpochHistory()
        self.confirm = offset

    def trim(self, offset: int) -> None:
        gone = max(0, min(offset, self.durable) - self.start) // RECORD_BYTES
        del self.ids[:gone]
        self.start += gone * RECORD_BYTES
        self.synced -= gone
        self.history.forget_before(self.start)

    def lose_power(self, rng: random.Random) -> None:
        """Forget some of what is not durable."""
        del self.ids[rng.randint(self.synced, len(self.ids)) :]
        self.synced = len(self.ids)
        assert not self.history.entries or self.history.entries[-1].start_offset <= self.end


@dataclass
class Link:
    """One connection of a follower to a master, with what is on its way."""

    master: Process
    follower: Process
    sender: FollowerLink
    to_master: deque[object] = field(default_factory=deque)
    to_follower: deque[object] = field(default_factory=deque)


class Process:
    """A broker's replica while the process lives."""

    def __init__(self, world: World, broker_id: int, disk: Disk) -> None:
        self.world = world
        self.broker_id = broker_id
        self.disk = disk
        self.state: State | None = None
        self.master: Master | None = None
        self.epoch = -1
        self.following: WalFollower | None = None
        self.link: Link | None = None
        self.registration = world.controllers.registrations[broker_id]
        self.told_epoch = -1
        """The newest epoch whose promise this process has sent."""

    @property
    def replica(self) -> WalReplica:
        return WalReplica(self.broker_id, self.disk.wal_id)

    def step_down(self) -> None:
        self.master = None
        for link in [each for each in self.world.links if self in (each.master, each.follower)]:
            self.world.cut(link)
        self.following = None

    def learn(self, state: State) -> None:
        """Take over what the controller says."""
        self.state = state
        if state.electing:
            if state.epoch >= self.disk.promised and state.epoch > self.told_epoch:
                self.step_down()
                self.told_epoch = self.disk.promised = state.epoch
                self.sync()
                self.world.requests.append(self._promise(state.epoch))
        elif state.master == self.replica:
            if self.master is None and state.epoch > self.disk.history.last_epoch:
                self._begin(state)
            elif self.master is not None and self.epoch == state.epoch:
                self.master.told(state.configuration)
        elif self.master is not None and self.epoch < state.epoch:
            self.step_down()
        self.disk.trim(min(state.committed, self.disk.confirm))

    def _promise(self, epoch: int) -> r.PromiseEpoch:
        disk = self.disk
        return r.PromiseEpoch(
            Controllers.SET,
            epoch,
            self.broker_id,
            self.registration,
            disk.wal_id,
            disk.history.last_epoch,
            disk.durable,
            disk.confirm,
        )

    def request(self, wanted: SetConfiguration) -> r.AlterSyncStateSet:
        """Return the command with which the master asks for a configuration."""
        assert self.master is not None
        ends = {one.replica: one.end_offset for one in self.master.followers()}
        ends[self.replica] = self.disk.durable
        members = tuple(r.ReportedMember(*each, ends.get(each, -1)) for each in sorted(wanted.members))
        return r.AlterSyncStateSet(
            Controllers.SET,
            self.broker_id,
            self.registration,
            self.epoch,
            wanted.number,
            members,
            wanted.quorum,
            self.master.confirm_offset,
        )

    def _begin(self, state: State) -> None:
        disk, world = self.disk, self.world
        if disk.promised > state.epoch:
            return
        if disk.end < state.committed:
            disk.restart(state.committed)
        world.check_master(self, state)
        disk.promised = self.epoch = state.epoch
        disk.synced = len(disk.ids)
        disk.history.append(state.epoch, disk.end)
        if world.rng.random() < 0.05:
            world.kill(self.broker_id, power=True, disk=False)  # the epoch is known to the disk, and has no byte
            return
        disk.ids.append(world.new_id())
        self.sync()
        self.master = Master(
            self.replica,
            world.policy,
            state.configuration,
            epoch_confirmable_at=disk.end,
            durable_offset=disk.durable,
            confirm_offset=disk.confirm,
        )
        world.note_confirmed(self)

    def sync(self) -> None:
        """Make the WAL durable, and tell it."""
        self.disk.synced = len(self.disk.ids)
        if self.master is not None:
            self.master.durable(self.disk.durable)
            self.world.note_confirmed(self)
        elif self.following is not None and self.link is not None and self.following.master_epoch >= 0:
            self._acknowledge(self.link)

    def _acknowledge(self, link: Link) -> None:
        assert self.following is not None
        if self.following.master_epoch >= self.disk.promised:
            link.to_master.append(Ack(self.following.master_epoch, self.disk.durable))
            self.disk.confirm = max(self.disk.confirm, self.following.confirmed(self.disk.durable))

    def connect(self) -> None:
        """Follow the master that the image names."""
        state = self.state
        if state is None or state.electing or state.master is None or self.master is not None or self.link is not None:
            return
        other = self.world.processes.get(state.master.broker_id)
        if other is None or other is self or other.master is None:
            return
        self.sync()
        self.following = WalFollower()
        link = Link(other, self, FollowerLink(other.epoch, self.world.link_settings, self.world.now))
        self.world.links.append(link)
        self.link = link
        disk = self.disk
        link.to_master.append(
            FollowerHello(
                0, self.broker_id, 0, False, disk.promised, disk.start, disk.end, disk.confirm, disk.wal_id, ()
            )
        )

    # --- frames --------------------------------------------------------------------------------------------------

    def from_follower(self, link: Link, frame: object) -> None:
        """Handle a frame at the master."""
        world, disk, master = self.world, self.disk, self.master
        if master is None:
            world.cut(link)
        elif isinstance(frame, FollowerHello):
            if frame.promised_epoch > self.epoch:
                world.cut(link)
                return
            link.sender.hello(frame, world.now)
            link.to_follower.append(
                Welcome(
                    self.epoch, disk.start, disk.end, master.confirm_offset, self._committed(), disk.history.entries
                )
            )
        elif isinstance(frame, Ack):
            if link.sender.state is LinkState.HANDSHAKE and frame.end_offset < disk.start:
                world.cut(link)  # trimmed meanwhile: the follower connects again
                return
            replica = link.follower.replica
            if link.sender.acked(frame, world.now, start_offset=disk.start, end_offset=disk.end):
                master.attached(replica, frame.end_offset, world.now)
            elif link.sender.state is LinkState.TRANSFER:
                master.acknowledged(replica, frame.end_offset, world.now)
            world.note_confirmed(self)

    def from_master(self, link: Link, frame: object) -> None:
        """Handle a frame at the follower."""
        disk, following = self.disk, self.following
        assert following is not None and self.state is not None
        try:
            if isinstance(frame, Welcome):
                mine = LocalWal(disk.start, disk.end, disk.confirm, disk.promised, disk.history)
                match = following.matched(mine, frame, max(self.state.committed, disk.start))
                if match.step is Step.TRUNCATE:
                    disk.truncate(match.offset)
                elif match.step in (Step.RESTART, Step.REPLACE):
                    disk.restart(match.offset)
                disk.promised = max(disk.promised, frame.master_epoch)
                self.sync()
            elif isinstance(frame, Records):
                if following.master_epoch < disk.promised:
                    raise Fenced("promised meanwhile")
                if following.fits(frame, disk.end):
                    disk.receive(frame)
        except Fenced:
            self.world.cut(link)
        except Diverged as error:
            if self.state.committed >= self.world.state.committed:
                raise Violation(f"broker {self.broker_id}: {error}") from error
            self.world.cut(link)  # its metadata is behind: it tries again

    def send(self, link: Link) -> None:
        """Send what is next on a link."""
        disk, master, world = self.disk, self.master, self.world
        if master is None or (link.sender.state is LinkState.TRANSFER and link.sender.next_offset < disk.start):
            world.cut(link)
            return
        batch = link.sender.batch(disk.history, disk.end)
        if batch is not None:
            at, to = ((each - disk.start) // RECORD_BYTES for each in (batch.offset, batch.max_end))
            body = b"".join(_ID.pack(each) for each in disk.ids[at:to])
            link.to_follower.append(
                Records(
                    self.epoch,
                    batch.offset,
                    batch.epoch,
                    batch.epoch_start,
                    master.confirm_offset,
                    self._committed(),
                    body,
                )
            )
            link.sender.sent(batch.offset + len(body), world.now)
        elif link.sender.state is LinkState.TRANSFER:
            link.to_follower.append(
                Records(self.epoch, link.sender.next_offset, 0, 0, master.confirm_offset, self._committed())
            )
        if link.sender.state is LinkState.TRANSFER and link.sender.next_offset == disk.end:
            master.sent(link.follower.replica, world.now)

    def _committed(self) -> int:
        assert self.state is not None
        return self.state.committed


class World:
    """Brokers, a controller, and one random choice after the other."""

    def __init__(self, seed: int, policy: ReplicationPolicy, brokers: int = 3) -> None:
        self.rng = random.Random(seed)
        self._designations = random.Random(seed)
        """Of its own, so that most seeds find what they found without designated members."""
        self.policy = policy.check()
        self.now = 0.0
        self._ids = itertools.count(1)
        self._wals = itertools.count(1)
        self.disks = {each: Disk(f"wal-{next(self._wals)}") for each in range(brokers)}
        self.controllers = Controllers({each: disk.wal_id for each, disk in self.disks.items()}, policy)
        self.processes: dict[int, Process] = {}
        self.links: list[Link] = []
        self.requests: list[r.PromiseEpoch | r.AlterSyncStateSet] = []
        self.link_settings = LinkSettings(batch_bytes=3 * RECORD_BYTES, window_bytes=10 * RECORD_BYTES)
        self.confirmed: dict[int, int] = {}
        """Record id by WAL offset: what was confirmed by anybody, once."""
        self.is_patient = True
        self.elections = self.confirmations = self.changes = 0
        self._speed = {each: self.rng.choice((0.1, 0.5, 1.0, 1.0)) for each in self.disks}
        self._cut_rate = self.rng.choice((0.0, 0.01, 0.05))
        self._misfortunes = random.Random(f"misfortune {seed}")
        self._misfortune_rate = self._misfortunes.choice((0.0, 0.0, 0.1, 0.3))
        """How often a master dies just when it has confirmed something, or has another configuration."""
        self._doomed: Process | None = None
        self._actions = (
            World.trouble,
            World.elect,
            World.answer,
            World.learn,
            World.append,
            World.sync,
            World.connect,
            World.ask,
            World.upload,
            World.network,
        )
        rare, often = (0.2, 0.5, 1, 2), (2, 5, 10, 20)
        self._weights = [
            *(self.rng.choice(rare) for _ in range(2)),
            *(self.rng.choice(often) for _ in range(6)),
            self.rng.choice(rare),
            self.rng.choice((20, 40, 80)),
        ]
        for broker_id in self.disks:
            self.start(broker_id)

    @property
    def state(self) -> State:
        """Return what the controllers' state is now."""
        return self.controllers.state()

    def new_id(self) -> int:
        """Return a new record id."""
        return next(self._ids)

    # --- the oracle ----------------------------------------------------------------------------------------------

    def note_confirmed(self, one: Process) -> None:
        """Compare what a master has confirmed with what was confirmed before."""
        assert one.master is not None
        disk, end = one.disk, one.master.confirm_offset
        for offset in range(max(disk.start, disk.confirm), end, RECORD_BYTES):
            found = disk.id_at(offset)
            if self.confirmed.setdefault(offset, found) != found:
                raise Violation(f"offset {offset}: record {self.confirmed[offset]} was confirmed, and {found} now is")
            self.confirmations += 1
        if end > disk.confirm:
            self._doom(one)
        disk.confirm = max(disk.confirm, end)

    def check_master(self, one: Process, state: State) -> None:
        """Everything confirmed and not in the bucket is on a new master."""
        for offset, record in self.confirmed.items():
            if offset >= max(one.disk.start, self.state.committed) and one.disk.id_at(offset) != record:
                raise Violation(
                    f"broker {one.broker_id}, master of epoch {state.epoch}, has {one.disk.id_at(offset)} at {offset},"
                    f" where {record} was confirmed"
                )

    # --- events --------------------------------------------------------------------------------------------------

    def start(self, broker_id: int) -> None:
        """Start a broker's process: it registers, which ends its terms as master, and joins with its WAL."""
        self.controllers.register(broker_id)
        disk = self.disks[broker_id]
        self.controllers.join(broker_id, disk.wal_id)
        self.processes[broker_id] = one = Process(self, broker_id, disk)
        one.learn(self.state)

    def kill(self, broker_id: int, *, power: bool, disk: bool) -> None:
        """End a process; lose what is not durable with the power, or the disk."""
        one = self.processes.pop(broker_id)
        one.step_down()
        if disk:
            # A configuration that counts on this disk must not come into force now: that were two faults.
            self.requests = [
                each
                for each in self.requests
                if not isinstance(each, r.AlterSyncStateSet) or each.broker_id != broker_id
            ]
            self.disks[broker_id] = Disk(f"wal-{next(self._wals)}")
        elif power:
            one.disk.lose_power(self.rng)

    def cut(self, link: Link) -> None:
        """End a connection with what is on its way."""
        if link in self.links:
            self.links.remove(link)
        link.follower.link = None
        link.follower.following = None
        link.sender.shut_down()
        master = link.master.master
        if master is not None and link.sender.acked_offset >= 0:
            master.detached(link.follower.replica)

    def begin_election(self) -> None:
        """The active controller ends the master's epoch, unless an election is under way."""
        able = sorted(each.broker_id for each in self.state.configuration.members if each.broker_id in self.processes)
        registered = self.controllers.machine.tables.brokers.rows
        able = [each for each in able if registered[each].alive]
        designated = self._designations.choice(able) if able and self._designations.random() < 0.2 else -1
        self.controllers.run(
            r.BeginElection(Controllers.SET, self.state.epoch, "chance", designated, is_patient=self.is_patient)
        )

    def find_dead(self) -> None:
        """The active controller notices whose sessions have ended."""
        for broker_id in self.disks:
            if broker_id not in self.processes:
                self.controllers.set_dead(broker_id)

    def _handle(self, request: r.PromiseEpoch | r.AlterSyncStateSet) -> None:
        before = self.state
        try:
            self.controllers.run(request)
        except TidelogError as error:
            if isinstance(error, WalLost):
                raise Violation(f"a WAL that lost nothing is refused: {error}") from error
            if isinstance(error, ConfigurationRefused):
                assert isinstance(request, r.AlterSyncStateSet)
                self._refused(request)
            return
        after = self.state
        if before.electing and not after.electing:
            self.elections += 1
        if after.configuration.number > before.configuration.number and isinstance(request, r.AlterSyncStateSet):
            self.changes += 1
            if request.broker_id in self.processes:
                self._doom(self.processes[request.broker_id])

    def _refused(self, request: r.AlterSyncStateSet) -> None:
        """The master learns of the refusal, once no copy of the request can take effect any more."""
        one = self.processes.get(request.broker_id)
        if (
            one is None
            or one.master is None
            or (one.epoch, one.registration)
            != (
                request.master_epoch,
                request.registration_epoch,
            )
        ):
            return
        pending = one.master.pending
        if pending is None or pending.number != request.sync_state_set_epoch or self._has_copy(request):
            return
        if {*pending.members} == {WalReplica(each.broker_id, each.wal_id) for each in request.members}:
            one.master.refused()
            self.note_confirmed(one)

    def _has_copy(self, request: r.AlterSyncStateSet) -> bool:
        """Return whether another request of this master is on its way."""
        return any(
            isinstance(each, r.AlterSyncStateSet) and each.broker_id == request.broker_id for each in self.requests
        )

    # --- chance --------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Make so many random steps."""
        for _ in range(steps):
            self.now += self.rng.choice((0.0, 0.01, 0.1, 1.0))
            self._step()

    def _doom(self, one: Process) -> None:
        """Let a process die next, by chance: before anybody hears of what it has just done."""
        if self._misfortunes.random() < self._misfortune_rate:
            self._doomed = one

    def _step(self) -> None:
        doomed, self._doomed = self._doomed, None
        if doomed is not None and self.processes.get(doomed.broker_id) is doomed:
            self.kill(doomed.broker_id, power=False, disk=False)
            return
        action = self.rng.choices(self._actions, self._weights)[0]
        action(self)

    def elect(self) -> None:
        state = self.state
        self.find_dead()
        if (state.master is not None and self._is_dead(state.master)) or self.rng.random() < 0.1:
            self.is_patient = self.rng.random() < 0.7
            self.begin_election()

    def answer(self) -> None:
        if self.requests:
            self._handle(self.requests.pop(self.rng.randrange(len(self.requests))))

    def learn(self) -> None:
        one = self._any()
        if one is not None and (one.state is None or one.state.version < self.state.version):
            one.learn(self.state)

    def append(self) -> None:
        masters = [one for one in self.processes.values() if one.master is not None]
        if masters:
            one = self.rng.choice(masters)
            assert one.master is not None
            if not one.master.refusal(self.now):
                one.disk.ids.append(self.new_id())
                one.master.appended(one.disk.end)

    def sync(self) -> None:
        one = self._any()
        if one is not None:
            one.sync()

    def connect(self) -> None:
        one = self._any()
        if one is not None:
            one.connect()

    def ask(self) -> None:
        one = self._any()
        if one is not None:
            self._tick(one)

    def upload(self) -> None:
        one = self._any()
        if one is not None:
            self._commit(one)

    def _any(self) -> Process | None:
        """Return one of the living processes; each is as quick as this world has it."""
        living = list(self.processes.values())
        return self.rng.choices(living, [self._speed[one.broker_id] for one in living])[0] if living else None

    def _tick(self, one: Process) -> None:
        if one.master is not None and one.state is not None:
            wanted = one.master.change(self.now)
            self.note_confirmed(one)
            if wanted is not None:
                self.requests.append(one.request(wanted))

    def _commit(self, one: Process) -> None:
        """A master's upload is committed, unless it is fenced."""
        if one.master is not None and (self.state.epoch, self.state.master) == (one.epoch, one.replica):
            self.controllers.commit(one.epoch, one.master.confirm_offset)

    def network(self) -> None:
        if not self.links:
            return
        speeds = [self._speed[link.master.broker_id] * self._speed[link.follower.broker_id] for link in self.links]
        link = self.rng.choices(self.links, speeds)[0]
        if self.rng.random() < self._cut_rate:
            self.cut(link)
        elif self.rng.random() < 0.4:
            link.master.send(link)
        elif link.to_master and self.rng.random() < 0.5:
            link.master.from_follower(link, link.to_master.popleft())
        elif link.to_follower:
            link.follower.from_master(link, link.to_follower.popleft())

    def _is_dead(self, replica: WalReplica) -> bool:
        one = self.processes.get(replica.broker_id)
        return one is None or one.replica != replica

    def trouble(self) -> None:
        rng = self.rng
        dead = [each for each in self.disks if each not in self.processes]
        if dead and rng.random() < 0.6:
            self.start(rng.choice(dead))
        elif self.processes:
            broker_id = rng.choice(list(self.processes))
            # A lost disk is one fault that a quorum of one does not survive; the oracle knows no accepted losses.
            may_lose = self.state.configuration.quorum > 1 and self._others_hold(broker_id)
            self.kill(broker_id, power=rng.random() < 0.5, disk=may_lose and rng.random() < 0.15)

    def _others_hold(self, broker_id: int) -> bool:
        """Return whether a quorum without this broker's disk still holds everything that is confirmed."""
        kept = [
            disk
            for each, disk in self.disks.items()
            if each != broker_id and WalReplica(each, disk.wal_id) in self.state.configuration.members
        ]
        needed = self.state.configuration.quorum
        end = max(self.confirmed, default=-RECORD_BYTES) + RECORD_BYTES
        return sum(disk.durable >= min(end, max(self.state.committed, end)) for disk in kept) >= needed

    def heal(self, steps: int = 4_000) -> bool:
        """Let everything live and be delivered; return whether a master confirms new records."""
        self._misfortune_rate = 0.0
        before = self.confirmations
        return any(self.confirmations > before + 5 for _ in self._rounds(steps))

    def _rounds(self, steps: int) -> Iterator[int]:
        for count in range(steps):
            self.now += 0.02
            for broker_id in self.disks:
                if broker_id not in self.processes:
                    self.start(broker_id)
            state = self.state
            if not state.electing and (state.master is None or self._is_dead(state.master)):
                self.begin_election()
            if self.requests:
                self._handle(self.requests.pop(0))
            for one in list(self.processes.values()):
                if one.state is None or one.state.version < self.state.version:
                    one.learn(self.state)
                one.connect()
                one.sync()
                self._tick(one)
                if one.master is not None and not one.master.refusal(self.now) and count % 3 == 0:
                    one.disk.ids.append(self.new_id())
                    one.master.appended(one.disk.end)
            for link in list(self.links):
                link.master.send(link)
                while link in self.links and link.to_master:
                    link.master.from_follower(link, link.to_master.popleft())
                while link in self.links and link.to_follower:
                    link.follower.from_master(link, link.to_follower.popleft())
            yield count


POLICIES = {
    "two of three": ReplicationPolicy(3, 2, 1),
    "auto": ReplicationPolicy(3, 2, 1, enable_auto_in_sync_replicas=True),
    "all-ack": ReplicationPolicy(3, 3, 1, all_ack_in_sync_state_set=True),
    "three of three": ReplicationPolicy(3, 3, 1),
    "one of three": ReplicationPolicy(3, 1, 1),
}


def finding_of_mutation(name: str, seeds: int = 1_500) -> str:
    """Switch a protection off in this process for good; return the first finding, or an empty string."""
    apply(Mutation(name, "8", name, (Edit(*MUTATIONS[name]),), ()))
    return next(
        (found for seed in range(seeds) for policy in POLICIES.values() if (found := _finding(seed, policy))), ""
    )


def _finding(seed: int, policy: ReplicationPolicy) -> str:
    world = World(seed, policy)
    try:
        world.run(4_000)
        return "" if world.heal() else f"seed {seed}: stuck: {world.state}"
    except (AssertionError, BadFrame) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"


def main() -> None:
    """Run seeds of all policies, and say what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    found = 0
    for seed in range(options.first, options.first + options.seeds):
        for name, policy in POLICIES.items():
            if text := _finding(seed, policy):
                found += 1
                print(f"{name}: {text}", flush=True)
    print(f"{options.seeds} seeds of {len(POLICIES)} policies, {found} findings")
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
