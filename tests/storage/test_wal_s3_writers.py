"""Writers that compete for one WAL in a bucket that fails in every way: what was acknowledged is never lost.

The state machine lets hypothesis choose each step; the walk takes steps at random from a seed, many more of them.
"""

from __future__ import annotations

import random
from typing import Unpack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import structs

from tests.storage.wal_harness import WalChanges
from tests.storage.wal_s3_world import World, Writer
from tests.support.examples import examples
from tidelog.runtime.errors import Fenced
from tidelog.storage.settings import WalSettings

ENDINGS = ("ok", "ok", "ok", "ok", "lost", "late", "refused")
MAX_ALIVE = 3


def tiny(**changes: Unpack[WalChanges]) -> WalSettings:
    values = WalSettings(max_bytes=1 << 20, max_record_bytes=4096, s3_batch_bytes=200, s3_in_flight=4)
    return structs.replace(values, **changes)


def alive(world: World) -> list[Writer]:
    return [one for one in world.writers if not one.crashed and not one.failed]


class CompetingWriters(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World(tiny())
        self.count = 0

    @precondition(lambda self: len(alive(self.world)) < MAX_ALIVE)
    @rule()
    def elect(self) -> None:
        self.world.start()

    @precondition(lambda self: bool(alive(self.world)))
    @rule(which=st.integers(0, MAX_ALIVE), records=st.integers(1, 4), size=st.integers(0, 150))
    def append(self, which: int, records: int, size: int) -> None:
        writer = alive(self.world)[which % len(alive(self.world))]
        for _ in range(records):
            self.count += 1
            self.world.append(writer, f"{self.count} ".encode().ljust(size, b"."))

    @precondition(lambda self: bool(self.world.ops))
    @rule(which=st.integers(0, 20), how=st.sampled_from(ENDINGS))
    def finish(self, which: int, how: str) -> None:
        self.world.finish(self.world.ops[which % len(self.world.ops)], how)

    @precondition(lambda self: bool(self.world.ops))
    @rule(count=st.integers(1, 30), seed=st.integers(0, 1000))
    def finish_many(self, count: int, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            if not self.world.ops:
                self.world.tick(0.05)
            else:
                self.world.finish(rng.choice(self.world.ops), "ok")

    @precondition(lambda self: bool(self.world.late))
    @rule(which=st.integers(0, 20))
    def land_late(self, which: int) -> None:
        self.world.land_late(self.world.late[which % len(self.world.late)])

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 10.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @precondition(lambda self: bool(alive(self.world)))
    @rule(which=st.integers(0, MAX_ALIVE))
    def crash(self, which: int) -> None:
        self.world.crash(alive(self.world)[which % len(alive(self.world))])

    @precondition(lambda self: bool(alive(self.world)))
    @rule(which=st.integers(0, MAX_ALIVE))
    def commit(self, which: int) -> None:
        self.world.commit(alive(self.world)[which % len(alive(self.world))])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.end()
            finally:
                self.world.close()


CompetingWriters.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_competing_writers = CompetingWriters.TestCase


def step(world: World, rng: random.Random) -> None:
    """One random step: much gets done, and what writes fails more often than what reads."""
    living = alive(world)
    dice = rng.random()
    if not living or (dice < 0.01 and len(living) < MAX_ALIVE):
        world.start()
    elif dice < 0.15:
        world.append(rng.choice(living), rng.randbytes(rng.randrange(0, 150)))
    elif dice < 0.30 or not world.ops:
        world.tick(rng.choice((0.01, 0.1, 1.0)))
    elif dice < 0.303:
        world.crash(rng.choice(living))
    elif dice < 0.33:
        world.commit(rng.choice(living))
    elif dice < 0.35 and world.late:
        world.land_late(rng.choice(world.late))
    else:
        op = rng.choice(world.ops)
        failing = 0.02 if op.what.startswith(("list", "get")) else 0.3
        world.finish(op, rng.choice(("lost", "late", "refused")) if rng.random() < failing else "ok")


@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_walk_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(tiny(), list_page=rng.choice((3, 20)))
    try:
        for _ in range(2000):
            step(world, rng)
        world.end()
        assert len(world.owners) > 2 and len(world.acknowledged) > 50, "the walk did not get far enough to mean much"
    finally:
        world.close()


def test_a_process_that_was_outvoted_while_it_read_need_not_see_what_is_committed_since() -> None:
    """It holds an old listing; that its epoch is over is what it finds when it plants its fence."""
    world = World(tiny(), list_page=1000)
    try:
        slow = world.start()
        [listing] = world.ops
        stale = listing.apply()
        listing.apply = lambda: stale
        new = world.start()
        while not new.running:
            mine = [op for op in world.ops if op.writer == new.number]
            world.finish(mine[0], "ok") if mine else world.tick(0.05)
        world.commit(new)
        assert world.committed > 0
        world.drain(lambda: slow.failed)
        assert any(isinstance(error, Fenced) for error in slow.errors)
        world.end()
    finally:
        world.close()


@pytest.mark.parametrize("faults", [False, True])
def test_an_old_writer_that_never_rests_is_shut_out_in_a_bounded_time(faults: bool) -> None:
    """Whenever requests of the new one end, one of the old one ends before them, and it appends once more."""
    world, rng = World(tiny(), list_page=1000), random.Random(5)
    try:
        old = world.start()
        world.drain(lambda: old.running)
        for _ in range(10):
            world.append(old, b"x" * 200)
        new = world.start()
        for _ in range(2000):
            if new.running:
                break
            world.append(old, b"y" * 200)
            mine = [op for op in world.ops if op.writer == old.number]
            theirs = [op for op in world.ops if op.writer == new.number]
            for op in mine[:1]:
                world.finish(op, "ok")
            for op in theirs:
                if op in world.ops:
                    world.finish(op, rng.choice(("ok", "ok", "lost", "late")) if faults else "ok")
            world.tick(0.02)
        assert new.running, new.errors
        world.drain(lambda: old.failed)
        assert old.wal.durable_offset <= new.recovered_end
        world.end()
    finally:
        world.close()
