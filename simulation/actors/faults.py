"""Fault injection: a mix of faults drawn from the seed in each period; a quarter of the periods has none.

Every fault ends with its period at the latest; its consequences may last longer. Each fault has its own random
generator, so that one can be left out (`skip`, by number) without changing the others: this is used to shrink a failing
seed. `FAULTS` has their names for `--faults`. Entry: `Faults.run`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.controller.model.levels import NEWEST, OLDEST
from tidelog.runtime.errors import TidelogError
from tidelog.simulation.actors.older_controllers import OlderControllers
from tidelog.simulation.actors.older_copies import OlderCopies
from tidelog.simulation.world.bucket import HOST as BUCKET_HOST
from tidelog.simulation.world.bucket import BucketFaults
from tidelog.simulation.world.cluster import SimCluster, SimNode
from tidelog.simulation.world.directories import may_be_lost, must_return
from tidelog.simulation.world.loop import VirtualLoop

PERIOD_S = 5.0
"""Mean length of a seed's periods: twelve periods always take a minute."""
MIN_PERIOD_S = 2.0
MAX_PERIOD_S = 8.0
QUIET = 0.25
MAX_AT_ONCE = 3
ALONE = "older-raft"
"""The fault that has a period for itself: another one could keep controllers from what the bucket says."""
LASTING = "older"
"""The fault that lasts to the end of its period: until a broker that is down counts as dead, nobody is elected."""
MID_WRITE_S = 0.0002
"""After a write began: less than any sync takes."""
MAX_CHANGES = 40
"""Of a controller's files, until it crashes in the middle of one."""
SPARE_BYTES = (0, 200, 2_000, 20_000)
"""What is left on a controller's disk that is full."""
MAX_RESETS = 12
LEVEL_0_JUMP_MS = 50
"""At level 0 the active controller's wall clock is what deadlines are by."""
JUMPS_MS = (50, 2_000, 60_000, 11 * 60_000, 3 * 3_600_000, 12 * 3_600_000)
"""Of a wall clock, ahead or back."""
CHANGE_S = 6.0
CATCH_UP_S = 4.0
"""How long a controller that was cut off has trouble when it is back."""

Undo = Callable[[], None]


@dataclass(slots=True)
class Faults:
    """Draws faults, starts them and ends them."""

    loop: VirtualLoop
    cluster: SimCluster
    rng: random.Random
    chosen: tuple[str, ...]
    note: Callable[[str, str], None]
    skip: frozenset[int] = frozenset()
    """Faults that are left out, by number from 0."""
    done: list[int] = field(default_factory=list)
    """The faults that were carried out."""
    _count: int = 0
    _undo: list[Undo] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    older: OlderCopies = field(init=False)
    """Copies of the disks as they were at the beginning of a period."""
    older_controllers: OlderControllers = field(init=False)
    """Of the controllers' directories, the same."""

    def __post_init__(self) -> None:
        self.older = OlderCopies(self.cluster)
        self.older_controllers = OlderControllers(self.cluster)

    async def run(self, periods: int) -> None:
        """Run the given number of periods, then heal everything."""
        drawn = [self.rng.uniform(MIN_PERIOD_S, MAX_PERIOD_S) for _ in range(periods)]
        copying = random.Random(self.rng.getrandbits(64))
        for each_s in drawn:
            if "older" in self.chosen:
                self.older.take(copying)
            if ALONE in self.chosen:
                self.older_controllers.take(copying)
            length_s = each_s * PERIOD_S * periods / sum(drawn)
            if self.rng.random() >= QUIET and self.chosen:
                for name in self._mix():
                    rng = random.Random(self.rng.getrandbits(64))
                    if self._count not in self.skip:
                        self.done.append(self._count)
                        self._tasks.append(self.loop.create_task(self._one(name, length_s, rng)))
                    self._count += 1
            await asyncio.sleep(length_s)
            await self._end_period()
        self.heal()

    def _mix(self) -> list[str]:
        mix = self.rng.sample(self.chosen, k=min(len(self.chosen), self.rng.randint(1, MAX_AT_ONCE)))
        if ALONE in mix and self.older_controllers.is_usable():
            return [ALONE]
        return [name for name in mix if name != ALONE]

    async def _one(self, name: str, length_s: float, rng: random.Random) -> None:
        after_s, lasts_s = rng.uniform(0, length_s / 2), rng.uniform(0, length_s / 2)
        if name == ALONE:
            after_s, lasts_s = 0.0, length_s
        if name == LASTING:
            lasts_s = length_s - after_s
        await asyncio.sleep(after_s)
        undo = FAULTS[name](_Doer(self, rng))
        if undo is not None:
            self._undo.append(undo)
            await asyncio.sleep(lasts_s)
            self._take_back(undo)

    def _take_back(self, undo: Undo) -> None:
        if undo in self._undo:
            self._undo.remove(undo)
            undo()

    async def _end_period(self) -> None:
        for task in self._tasks:
            task.cancel()
        for failure in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(failure, Exception):
                raise failure  # a fault that the world cannot carry out
        self._tasks.clear()
        for undo in list(self._undo):
            self._take_back(undo)

    def heal(self) -> None:
        """End all external faults."""
        cluster = self.cluster
        self.note("world", "heal")
        cluster.network.heal()
        cluster.bucket.heal()
        cluster.bucket.flips.probability = 0.0
        cluster.network.odd.heal()
        for node in cluster.nodes.values():
            cluster.network.slow(node.host, 0.0)
            node.clock.jump(0)
            node.resume()
            if node.consensus is not None:
                node.consensus.files.heal()
            node.disks.heal()
            for replica_set in sorted(node.disks.mounts):
                if must_return(cluster, replica_set, node.id):
                    node.crash(power=False)
                    node.change_wal_directory(replica_set)
            node.recover()


class _Doer:
    """Carries out one fault."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.cluster = faults.cluster
        self._older = faults.older
        self._older_controllers = faults.older_controllers
        self.loop = faults.loop
        self.note = faults.note
        self.rng = rng

    def _node(self, alive: bool = True) -> SimNode | None:
        nodes = [node for node in self.cluster.nodes.values() if node.alive or not alive]
        return self.rng.choice(nodes) if nodes else None

    def _crash(self, power: bool) -> Undo | None:
        node = self._node()
        if node is None:
            return None
        node.crash(power=power)
        return node.recover

    def kill(self) -> Undo | None:
        """SIGKILL of one process; its writes stay in the page cache."""
        return self._crash(power=False)

    def power(self) -> Undo | None:
        """Power loss of a host, with its unsynced data; now, or in the middle of its next write."""
        node = self._node()
        if node is None:
            return None
        disks, life = node.open_disks, node.life
        if node.consensus is not None and self.rng.random() < 0.5:
            return self._crash_in_raft_files(node)
        if not disks or self.rng.random() < 0.5:
            node.crash(power=True)
            return node.recover

        disk = disks[0] if len(disks) == 1 else self.rng.choice(disks)

        def crash() -> None:
            if node.life is life:
                node.crash(power=True)

        def undo() -> None:
            disk.on_write = disk.on_replace = None
            node.recover()

        if self.cluster.shape.replicas > 1 and self.rng.random() < 0.5:  # what is promised, cut or begun is in a file
            disk.on_replace = lambda: self.cluster.later(self.rng.uniform(0.0, 2 * MID_WRITE_S), crash)
        else:
            disk.on_write = lambda: self.cluster.later(MID_WRITE_S, crash)
        return undo

    def _crash_in_raft_files(self, node: SimNode) -> Undo:
        """At one of the next changes of a controller's files, of which it has made a part then."""
        assert node.consensus is not None
        files, power = node.consensus.files, self.rng.random() < 0.7
        files.on_crash = lambda: node.crash(power=power)
        files.crash_in = self.rng.randint(1, MAX_CHANGES)

        def undo() -> None:
            files.crash_in = 0
            node.recover()

        return undo

    def kill_all(self) -> Undo | None:
        """SIGKILL of all processes at once."""
        nodes = [node for node in self.cluster.nodes.values() if node.alive]
        for node in nodes:
            node.crash(power=self.rng.random() < 0.5)

        def undo() -> None:
            for node in nodes:
                node.recover()

        return undo

    def stop(self) -> Undo | None:
        """SIGTERM of one process; it is restarted."""
        node = self._node()
        if node is None or node.stop_asked is None:
            return None
        node.stop()

        def undo() -> None:
            if node.alive:
                node.wanted = True  # the shutdown takes long: the process is restarted after it
            else:
                node.recover()

        return undo

    def pause(self) -> Undo | None:
        """SIGSTOP: the process resumes as a zombie."""
        node = self._node()
        if node is None:
            return None
        node.pause()
        return node.resume

    def cut(self) -> Undo | None:
        """Cut the network between two hosts, one way or both."""
        rng = self.rng
        hosts = [node.host for node in self.cluster.nodes.values()]
        source = rng.choice(hosts)
        target = rng.choice([host for host in [*hosts, BUCKET_HOST, "k1", "k2", "k3"] if host != source])
        pairs = [(source, target), (target, source)][: rng.randint(1, 2)]
        if rng.random() < 0.5:
            pairs.reverse()
        return self._cut(pairs)

    def isolate(self) -> Undo | None:
        """Cut one host off from all other nodes, one way or both, and optionally from clients and bucket."""
        rng = self.rng
        hosts = [node.host for node in self.cluster.nodes.values()]
        alone = rng.choice(hosts)
        others = [host for host in hosts if host != alone]
        if rng.random() < 0.5:
            others.append(BUCKET_HOST)
        ways = rng.choice(((0, 1), (0, 1), (0,), (1,)))  # a message over a one-way cut is held back and arrives late
        return self._cut([((alone, other), (other, alone))[way] for other in others for way in ways])

    def uninformed(self) -> Undo | None:
        """Cut one broker off from all controllers, both ways: clients and the bucket reach it as ever."""
        brokers = [node for node in self.cluster.brokers if node.alive and not node.is_controller]
        if not brokers:
            return None
        host = self.rng.choice(brokers).host
        others = [node.host for node in self.cluster.controllers]
        return self._cut([pair for other in others for pair in ((host, other), (other, host))])

    def _cut(self, pairs: list[tuple[str, str]]) -> Undo:
        network = self.cluster.network
        self.note("network", "cut " + " ".join(f"{source}>{target}" for source, target in pairs))
        for source, target in pairs:
            network.cut(source, target)

        def undo() -> None:
            self.note("network", "heal")
            for source, target in pairs:
                network.heal(source, target)

        return undo

    def slow(self) -> Undo | None:
        """Slow down one host's links."""
        node = self._node(alive=False)
        if node is None:
            return None
        seconds = self.rng.choice((0.02, 0.1, 0.5))
        self.note(node.host, f"links slow by {seconds}")
        self.cluster.network.slow(node.host, seconds)
        return lambda: self.cluster.network.slow(node.host, 0.0)

    def reset(self) -> Undo | None:
        """Reset some or all connections."""
        count = self.cluster.network.reset_some(self.rng.choice((0.1, 0.5, 1.0)))
        self.note("network", f"{count} connections reset")
        return None

    def bucket(self) -> Undo | None:
        """The bucket is slow, refuses, loses responses, is late, or unreachable."""
        rng = self.rng
        faults = BucketFaults(latency_s=rng.choice((0.01, 0.1, 0.5)))
        kind = rng.choice(("slow", "refuse", "lose", "late", "outage", "mixed"))
        if kind in ("refuse", "mixed"):
            faults.refuse = rng.choice((0.1, 0.5, 0.9))
        if kind in ("lose", "mixed"):
            faults.lose_answer = rng.choice((0.1, 0.3))
        if kind in ("late", "mixed"):
            faults.late = rng.choice((0.05, 0.3))
        faults.outage = kind == "outage"
        return self._bucket_has(faults)

    def deny(self) -> Undo | None:
        """The bucket denies all or some requests, as after the rotation of a key; or it cuts answers short."""
        rng = self.rng
        probability = rng.choice((0.2, 0.7, 1.0))
        faults = BucketFaults(deny=probability) if rng.random() < 0.7 else BucketFaults(short=probability)
        return self._bucket_has(faults)

    def _bucket_has(self, faults: BucketFaults) -> Undo:
        bucket = self.cluster.bucket
        end = bucket.afflict(faults)
        self.note("bucket", f"{bucket.faults}")

        def undo() -> None:
            end()
            self.note("bucket", "well" if bucket.faults == BucketFaults() else f"{bucket.faults}")

        return undo

    def disk(self) -> Undo | None:
        """The disk of one broker is slow, full, fails an fsync, or hangs: for a while, or until the power fails."""
        nodes = [node for node in self.cluster.brokers if node.open_disks]
        if not nodes:
            return None
        node = self.rng.choice(nodes)
        disks, kind = node.open_disks, self.rng.choice(("slow", "full", "fsync", "hang", "dying"))
        self.note(node.host, f"disk {kind}")
        slow_s = self.rng.choice((0.02, 0.2, 1.0)) if kind == "slow" else 0.0
        for disk in disks:
            disk.slow_s, disk.fail_next_sync = slow_s, kind == "fsync"
            if kind == "full":
                disk.full_bytes = 0
            elif kind in ("hang", "dying"):
                disk.hang()
        revive = self._die_slowly(node) if kind == "dying" else None

        def undo() -> None:
            for disk in disks:
                disk.go_on()
                disk.slow_s, disk.full_bytes, disk.fail_next_sync = 0.0, 1 << 62, False
            if revive is not None:
                revive()

        return undo

    def _die_slowly(self, node: SimNode) -> Undo:
        """Soon the host's clients lose their connections, and come back; then its power fails."""
        cluster, life = self.cluster, node.life
        reset_s = self.rng.uniform(0.1, 1.5)
        power_s = reset_s + self.rng.uniform(0.1, 1.5)
        is_over = False

        def reset() -> None:
            if not is_over and node.life is life:
                clients = cluster.network.peers_of(node.host) - {each.host for each in cluster.nodes.values()}
                cluster.network.reset_between(node.host, clients)

        def fail() -> None:
            if not is_over and node.life is life:
                node.crash(power=True)

        def undo() -> None:
            nonlocal is_over
            is_over = True
            node.recover()

        cluster.later(reset_s, reset)
        cluster.later(power_s, fail)
        return undo

    def flip(self) -> Undo | None:
        """Flip bits in some responses of the bucket, and in unused places on brokers' disks."""
        rng, flips = self.rng, self.cluster.bucket.flips
        flips.rng, flips.probability = random.Random(rng.getrandbits(64)), rng.choice((0.1, 0.5, 1.0))
        rotten = sum(node.disks.rot(rng) for node in self.cluster.brokers)
        self.note("world", f"{flips.probability:.0%} of answers damaged, {rotten} bits on disks")

        def undo() -> None:
            flips.probability = 0.0

        return undo

    def raft_disk(self) -> Undo | None:
        """Of one controller: slow, full, or a journal that cannot be synced."""
        node = self.rng.choice(self.cluster.controllers)
        if node.consensus is None:
            return None
        files, kind = node.consensus.files, self.rng.choice(("slow", "full", "fsync"))
        self.note(node.host, f"raft disk {kind}")
        if kind == "slow":
            files.slow_s = self.rng.choice((0.02, 0.2, 1.0))
        elif kind == "full":
            files.full_bytes = files.used_bytes + self.rng.choice(SPARE_BYTES)
        else:
            files.fail_next_sync = True  # what was on its way there is lost, in part or whole
        return files.heal

    def behind(self) -> Undo | None:
        """One controller is cut off from the others, often the leader with what it alone has.

        When it is back it may need a snapshot, while its connections are reset again and again, or its disk is full.
        """
        rng, cluster = self.rng, self.cluster
        if len(cluster.controllers) < 3:
            return None
        active = cluster.active_node
        node = active if active is not None and rng.random() < 0.6 else rng.choice(cluster.controllers)
        hosts = [other.host for other in cluster.controllers if other is not node]
        heal = self._cut([pair for host in hosts for pair in ((node.host, host), (host, node.host))])
        life, resets, spare_bytes = node.life, rng.random() < 0.5, rng.choice(SPARE_BYTES)

        def reset() -> None:
            cluster.network.reset_between(node.host, hosts)

        def undo() -> None:
            if node.consensus is not None and node.life is life:
                files = node.consensus.files
                if resets:
                    for _ in range(MAX_RESETS):
                        cluster.later(rng.uniform(0.0, CATCH_UP_S), reset)
                else:
                    self.note(node.host, f"raft disk full but for {spare_bytes} bytes")
                    files.full_bytes = files.used_bytes + spare_bytes
                    cluster.later(CATCH_UP_S, files.heal)
            heal()

        return undo

    def wipe(self) -> Undo | None:
        """One controller comes back with an empty directory; when all is well an operator adds it anew."""
        cluster = self.cluster
        active = cluster.active_node
        if len(cluster.controllers) < 3 or cluster.repairs or active is None or active.consensus is None:
            return None
        known = active.consensus.directories
        if len(known) < len(cluster.controllers):
            return None  # the cluster has just begun: until all are known, a lost directory looks like a new one
        if any(each.consensus is None or each.consensus.directories != known for each in cluster.controllers):
            return None  # one that was added anew has not caught up: with another's log a majority's would be lost
        cluster.repairs = True
        node = self.rng.choice(cluster.controllers)
        self.note(node.host, "directory lost")
        node.crash(power=False)
        node.raft_platters.wipe()
        rng = random.Random(self.rng.getrandbits(64))

        def undo() -> None:
            node.recover()
            cluster.repair = self.loop.create_task(self._add(node, rng))

        return undo

    def members(self) -> Undo | None:
        """One controller is removed from the quorum, and added again with the directory that it has."""
        cluster = self.cluster
        if len(cluster.controllers) < 3 or cluster.repairs:
            return None
        cluster.repairs = True
        node = self.rng.choice(cluster.controllers)
        rng = random.Random(self.rng.getrandbits(64))

        async def change() -> None:
            await self._change("rem", node, rng)
            await asyncio.sleep(rng.uniform(0.0, PERIOD_S))
            await self._add(node, rng)

        cluster.repair = self.loop.create_task(change())
        return None

    async def _add(self, node: SimNode, rng: random.Random) -> None:
        await self._change("add", node, rng)
        self.cluster.repairs = False

    async def _change(self, operation: str, node: SimNode, rng: random.Random) -> None:
        """What `tidelog controller add` and `remove` ask for, until it is done."""
        cluster = self.cluster
        client = cluster.controller_client("repair", rng, CHANGE_S)
        await client.start()
        while True:
            try:
                await client.change_quorum(operation, node.id, cluster.shape.members[node.id])
                break
            except TidelogError as error:
                self.note("operator", f"{operation} of controller {node.host} failed: {type(error).__name__}")
            await asyncio.sleep(rng.uniform(0.5, 1.5))
        self.note("operator", f"{operation} of controller {node.host}")
        await client.close()

    def level(self) -> Undo | None:
        """An operator raises the feature level, again and again until every member is there and supports it."""
        cluster = self.cluster
        if cluster.raising is None:
            rng = random.Random(self.rng.getrandbits(64))
            cluster.raising = self.loop.create_task(self._raise_level(rng))
        return None

    async def _raise_level(self, rng: random.Random) -> None:
        """What `tidelog cluster upgrade` asks for."""
        client = self.cluster.controller_client("upgrade", rng, CHANGE_S)
        await client.start()
        while True:
            try:
                report = await client.upgrade(NEWEST, dry_run=False)
                break
            except TidelogError as error:
                self.note("operator", f"the level is not raised: {type(error).__name__}: {error.message}")
            await asyncio.sleep(rng.uniform(0.5, 1.5))
        self.note("operator", f"the level is {report['level']}{', raised' if report['raised'] else ''}")
        await client.close()

    def odd(self) -> Undo | None:
        """Network, bucket, disks and background loops raise exceptions of types that nobody listed."""
        rng, odd = self.rng, self.cluster.network.odd
        odd.rng, odd.probability = random.Random(rng.getrandbits(64)), rng.choice((0.02, 0.1, 0.5))
        odd.places = frozenset(rng.sample(("network", "bucket", "disk", "loop"), rng.randint(1, 4)))
        self.note("world", f"{odd.probability:.0%} odd errors of {', '.join(sorted(odd.places))}")
        return odd.heal

    def unmount(self) -> Undo | None:
        """A broker starts with another WAL directory, at first an empty one, and later with the one before it.

        It is what the start after a crash finds while a disk is not mounted, or an older copy is. A broker that refuses
        to start with it is given the other one by `SimNode`. Only where the controllers know of the WAL: not in a
        cluster that began at level 0, and not while a broker goes on although they do not answer
        (`tidelog.broker.wal_keeper`). Of a replica set with several members one loses its directory at a time; if the
        set grew in that moment, the one that counts comes back when all faults end (`Faults.heal`).
        """
        cluster = self.cluster
        if cluster.shape.wal_settings.kind != "disk" or cluster.shape.level == OLDEST:
            return None
        places = [
            (node, each)
            for node in cluster.brokers
            if node.alive and _is_wal_known(node)
            for each in sorted(node.disks.mounts)
            if may_be_lost(cluster, each, node.id)
        ]
        if not places:
            return None
        node, replica_set = self.rng.choice(places)
        node.crash(power=self.rng.random() < 0.3)
        node.change_wal_directory(replica_set)
        node.recover()
        stays = self.rng.random() < 0.3

        def undo() -> None:
            if not stays and node.alive and _is_wal_known(node) and may_be_lost(cluster, replica_set, node.id):
                node.crash(power=False)
                node.change_wal_directory(replica_set)
            node.recover()

        return undo

    def older(self) -> Undo | None:
        """Members of a replica set start with older copies of their disks, while others may be down."""
        return self._older.mount(self.rng, self._cut)

    def older_raft(self) -> Undo | None:
        """A majority of the controllers start with older copies of their directories, and the others are down."""
        return self._older_controllers.mount(self.rng)

    def clock(self) -> Undo | None:
        """A wall clock jumps by up to half a day, often the active controller's, and later jumps back."""
        active = self.cluster.active_node
        node = active if active is not None and self.rng.random() < 0.5 else self._node(alive=False)
        if node is None:
            return None
        jump_ms = self.rng.choice(JUMPS_MS)
        if self.cluster.level == 0:
            jump_ms = min(jump_ms, LEVEL_0_JUMP_MS)
        node.clock.jump(self.rng.choice((-1, 1)) * jump_ms)
        self.note(node.host, f"clock {node.clock.skew_ms:+} ms")

        return lambda: node.clock.jump(0)

    def leader(self) -> Undo | None:
        """The active controller transfers its leadership."""
        active = next(
            (node for node in self.cluster.controllers if node.controller and node.controller.is_active), None
        )
        if active is None or active.life is None or active.life.paused or self.cluster.shape.controllers == 1:
            return None
        self.note(active.host, "hands over")
        consensus = active.consensus
        assert consensus is not None

        async def transfer() -> None:
            try:
                await consensus.transfer(None)
            except TidelogError as error:
                self.note(active.host, f"kept the leadership: {error.message}")

        active.life.spawn(self.loop, transfer(), "transfer")
        return None


def _is_wal_known(node: SimNode) -> bool:
    """Return whether a broker that lost its WAL now would be refused, or have lost nothing."""
    return not node.ready or node.broker is None or node.broker.parts.data.is_wal_known


FAULTS: dict[str, Callable[[_Doer], Undo | None]] = {
    "kill": _Doer.kill,
    "power": _Doer.power,
    "kill-all": _Doer.kill_all,
    "stop": _Doer.stop,
    "pause": _Doer.pause,
    "cut": _Doer.cut,
    "isolate": _Doer.isolate,
    "uninformed": _Doer.uninformed,
    "slow": _Doer.slow,
    "reset": _Doer.reset,
    "bucket": _Doer.bucket,
    "disk": _Doer.disk,
    "flip": _Doer.flip,
    "raft-disk": _Doer.raft_disk,
    "behind": _Doer.behind,
    "wipe": _Doer.wipe,
    "members": _Doer.members,
    "odd": _Doer.odd,
    "clock": _Doer.clock,
    "leader": _Doer.leader,
    "deny": _Doer.deny,
    "unmount": _Doer.unmount,
    "older": _Doer.older,
    ALONE: _Doer.older_raft,
    "level": _Doer.level,
}
