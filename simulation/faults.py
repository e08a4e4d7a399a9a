"""What goes wrong: a mix of faults drawn from the seed, and drawn anew in each period; a quarter of them is quiet.

Every fault is undone by the end of its period at the latest, but what it led to goes on. Each draws from a generator of
its own, so that one can be left out (`skip`, by number) and the others stay what they were: that is how a failing seed
is shrunk. `FAULTS` names them for `--faults`. Entry: `Faults.run`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.errors import TidelogError
from simulation.bucket import HOST as BUCKET_HOST
from simulation.bucket import BucketFaults
from simulation.cluster import Cluster, SimNode
from simulation.loop import VirtualLoop

PERIOD_S = 5.0
"""Mean of a seed's periods: twelve of them are a minute, whatever is drawn."""
MIN_PERIOD_S = 2.0
MAX_PERIOD_S = 8.0
QUIET = 0.25
MAX_AT_ONCE = 3
MID_WRITE_S = 0.0002
"""After a write began: less than any sync takes."""

Undo = Callable[[], None]


@dataclass(slots=True)
class Faults:
    """Draws faults, and does and undoes them."""

    loop: VirtualLoop
    cluster: Cluster
    rng: random.Random
    chosen: tuple[str, ...]
    note: Callable[[str, str], None]
    skip: frozenset[int] = frozenset()
    """Faults that are left out, by number from 0."""
    done: list[int] = field(default_factory=list)
    """Which were carried out."""
    _count: int = 0
    _undo: list[Undo] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self, periods: int) -> None:
        """So many periods, then heal everything."""
        drawn = [self.rng.uniform(MIN_PERIOD_S, MAX_PERIOD_S) for _ in range(periods)]
        for each_s in drawn:
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
        return self.rng.sample(self.chosen, k=min(len(self.chosen), self.rng.randint(1, MAX_AT_ONCE)))

    async def _one(self, name: str, length_s: float, rng: random.Random) -> None:
        after_s, lasts_s = rng.uniform(0, length_s / 2), rng.uniform(0, length_s / 2)
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
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for undo in list(self._undo):
            self._take_back(undo)

    def heal(self) -> None:
        """Nothing is wrong any more, from outside."""
        cluster = self.cluster
        self.note("world", "heal")
        cluster.network.heal()
        cluster.bucket.faults = BucketFaults()
        cluster.bucket.flips.probability = 0.0
        for node in cluster.nodes.values():
            cluster.network.slow(node.host, 0.0)
            node.clock.jump(0)
            node.resume()
            if node.consensus is not None:
                node.consensus.fail_next_sync = False
            if node.disk is not None:
                node.disk.slow_s, node.disk.full_bytes, node.disk.fail_next_sync = 0.0, 1 << 62, False
            node.recover()


class _Doer:
    """Carries out one fault."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.cluster = faults.cluster
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
        """SIGKILL of one process; what it wrote stays in the page cache."""
        return self._crash(power=False)

    def power(self) -> Undo | None:
        """A host is gone, with what was not synced; now, or in the middle of its next write."""
        node = self._node()
        if node is None:
            return None
        disk, life = node.disk, node.life
        if disk is None or self.rng.random() < 0.5:
            node.crash(power=True)
            return node.recover

        def crash() -> None:
            if node.life is life:
                node.crash(power=True)

        def undo() -> None:
            disk.on_write = None
            node.recover()

        disk.on_write = lambda: self.cluster.later(MID_WRITE_S, crash)
        return undo

    def kill_all(self) -> Undo | None:
        """All processes at once."""
        nodes = [node for node in self.cluster.nodes.values() if node.alive]
        for node in nodes:
            node.crash(power=self.rng.random() < 0.5)

        def undo() -> None:
            for node in nodes:
                node.recover()

        return undo

    def stop(self) -> Undo | None:
        """SIGTERM of one process; it is started again."""
        node = self._node()
        if node is None or node.stop_asked is None:
            return None
        node.stop()

        def undo() -> None:
            if node.alive:
                node.wanted = True  # it takes long to stop: it is started again when it has
            else:
                node.recover()

        return undo

    def pause(self) -> Undo | None:
        """SIGSTOP: it wakes up a zombie."""
        node = self._node()
        if node is None:
            return None
        node.pause()
        return node.resume

    def cut(self) -> Undo | None:
        """Between two hosts, one way or both."""
        rng = self.rng
        hosts = [node.host for node in self.cluster.nodes.values()]
        source = rng.choice(hosts)
        target = rng.choice([host for host in [*hosts, BUCKET_HOST, "k1", "k2", "k3"] if host != source])
        pairs = [(source, target), (target, source)][: rng.randint(1, 2)]
        if rng.random() < 0.5:
            pairs.reverse()
        return self._cut(pairs)

    def isolate(self) -> Undo | None:
        """One host from all other nodes, both ways or one; clients and the bucket reach it, or not."""
        rng = self.rng
        hosts = [node.host for node in self.cluster.nodes.values()]
        alone = rng.choice(hosts)
        others = [host for host in hosts if host != alone]
        if rng.random() < 0.5:
            others.append(BUCKET_HOST)
        ways = rng.choice(((0, 1), (0, 1), (0,), (1,)))  # what is sent one way only is held back, and comes late
        return self._cut([((alone, other), (other, alone))[way] for other in others for way in ways])

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
        """One host's links."""
        node = self._node(alive=False)
        if node is None:
            return None
        seconds = self.rng.choice((0.02, 0.1, 0.5))
        self.note(node.host, f"links slow by {seconds}")
        self.cluster.network.slow(node.host, seconds)
        return lambda: self.cluster.network.slow(node.host, 0.0)

    def reset(self) -> Undo | None:
        """Connections, some or all."""
        count = self.cluster.network.reset_some(self.rng.choice((0.1, 0.5, 1.0)))
        self.note("network", f"{count} connections reset")
        return None

    def bucket(self) -> Undo | None:
        """Slow, refusing, losing answers, late, or away."""
        rng, bucket = self.rng, self.cluster.bucket
        faults = BucketFaults(latency_s=rng.choice((0.01, 0.1, 0.5)))
        kind = rng.choice(("slow", "refuse", "lose", "late", "outage", "mixed"))
        if kind in ("refuse", "mixed"):
            faults.refuse = rng.choice((0.1, 0.5, 0.9))
        if kind in ("lose", "mixed"):
            faults.lose_answer = rng.choice((0.1, 0.3))
        if kind in ("late", "mixed"):
            faults.late = rng.choice((0.05, 0.3))
        faults.outage = kind == "outage"
        self.note("bucket", f"{faults}")
        bucket.faults = faults

        def undo() -> None:
            self.note("bucket", "well")
            bucket.faults = BucketFaults()

        return undo

    def disk(self) -> Undo | None:
        """Of one broker: slow, full, or a failing fsync."""
        nodes = [node for node in self.cluster.brokers if node.disk is not None]
        if not nodes:
            return None
        node = self.rng.choice(nodes)
        disk, kind = node.disk, self.rng.choice(("slow", "full", "fsync"))
        assert disk is not None
        self.note(node.host, f"disk {kind}")
        if kind == "slow":
            disk.slow_s = self.rng.choice((0.02, 0.2, 1.0))
        elif kind == "full":
            disk.full_bytes = 0
        else:
            disk.fail_next_sync = True

        def undo() -> None:
            disk.slow_s, disk.full_bytes, disk.fail_next_sync = 0.0, 1 << 62, False

        return undo

    def flip(self) -> Undo | None:
        """Bits flip in what the bucket answers, now and then, and where nothing depends on them on brokers' disks."""
        rng, flips = self.rng, self.cluster.bucket.flips
        flips.rng, flips.probability = random.Random(rng.getrandbits(64)), rng.choice((0.1, 0.5, 1.0))
        rotten = sum(node.platters.rot(rng) for node in self.cluster.brokers)
        self.note("world", f"{flips.probability:.0%} of answers damaged, {rotten} bits on disks")

        def undo() -> None:
            flips.probability = 0.0

        return undo

    def raft_disk(self) -> Undo | None:
        """A controller's journal cannot be synced: what was on its way there is lost, in part or whole."""
        node = self.rng.choice(self.cluster.controllers)
        if node.consensus is None:
            return None
        self.note(node.host, "journal fails")
        node.consensus.fail_next_sync = True
        return None

    def clock(self) -> Undo | None:
        """A wall clock jumps, and later jumps back."""
        node = self._node(alive=False)
        if node is None:
            return None
        node.clock.jump(self.rng.choice((-1, 1)) * self.rng.choice((50, 2_000, 60_000)))
        self.note(node.host, f"clock {node.clock.skew_ms:+} ms")

        return lambda: node.clock.jump(0)

    def leader(self) -> Undo | None:
        """The active controller hands over."""
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


FAULTS: dict[str, Callable[[_Doer], Undo | None]] = {
    "kill": _Doer.kill,
    "power": _Doer.power,
    "kill-all": _Doer.kill_all,
    "stop": _Doer.stop,
    "pause": _Doer.pause,
    "cut": _Doer.cut,
    "isolate": _Doer.isolate,
    "slow": _Doer.slow,
    "reset": _Doer.reset,
    "bucket": _Doer.bucket,
    "disk": _Doer.disk,
    "flip": _Doer.flip,
    "raft-disk": _Doer.raft_disk,
    "clock": _Doer.clock,
    "leader": _Doer.leader,
}
