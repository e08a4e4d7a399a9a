"""Who may talk to the bucket next: bounds, priority, shares, turns, and callers who leave."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.storage_world import FastClock, FaultyStore
from tidelog.storage.bucket.gate import RANKS, TURN_EVERY, PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.purpose import Purpose


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests that enter a gate and stay until they are told to leave."""

    def __init__(self, slots: int) -> None:
        self.gate = PriorityGate(slots)
        self.entered: list[Purpose] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, *purposes: Purpose) -> None:
        for purpose in purposes:
            self.tasks.append(asyncio.create_task(self._enter(purpose)))
        await settle()

    async def _enter(self, purpose: Purpose) -> None:
        await self.gate.enter(purpose)
        self.entered.append(purpose)

    async def leave(self, purpose: Purpose) -> None:
        self.gate.leave(purpose)
        await settle()


async def test_the_urgent_enter_first_whoever_came_first() -> None:
    crowd = Crowd(1)
    await crowd.ask(Purpose.CLEAN, Purpose.COMPACTION, Purpose.COLD, Purpose.UPLOAD, Purpose.TAIL, Purpose.WAL)
    assert crowd.entered == [Purpose.CLEAN]
    wanted = [Purpose.CLEAN, Purpose.TAIL, Purpose.WAL, Purpose.UPLOAD, Purpose.COLD, Purpose.COMPACTION]
    for count in range(1, len(wanted)):
        await crowd.leave(crowd.entered[-1])
        assert crowd.entered == wanted[: count + 1]
    assert crowd.gate.waits == 5


async def test_cold_reads_and_compaction_leave_slots_for_what_is_urgent() -> None:
    crowd = Crowd(16)
    await crowd.ask(*[Purpose.COMPACTION] * 20)
    assert len(crowd.entered) == 4
    await crowd.ask(*[Purpose.COLD] * 20)
    assert crowd.entered.count(Purpose.COLD) == 8
    await crowd.ask(*[Purpose.UPLOAD] * 20)
    assert crowd.entered.count(Purpose.UPLOAD) == 2
    await crowd.ask(Purpose.WAL, Purpose.TAIL, Purpose.WAL)
    assert crowd.entered[-2:] == [Purpose.WAL, Purpose.TAIL]
    assert crowd.gate.in_flight == 16
    for task in crowd.tasks:
        task.cancel()


async def test_the_least_urgent_get_a_turn_under_a_flood() -> None:
    crowd = Crowd(1)
    await crowd.ask(Purpose.WAL, Purpose.COMPACTION)
    for _ in range(TURN_EVERY + 1):
        await crowd.ask(Purpose.WAL)
        await crowd.leave(crowd.entered[-1])
    assert crowd.entered.count(Purpose.COMPACTION) == 1
    for task in crowd.tasks:
        task.cancel()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from(Purpose), st.sampled_from(["ask", "leave", "cancel"])), max_size=60),
)
def test_no_slot_is_lost_whoever_comes_leaves_or_gives_up(slots: int, steps: list[tuple[Purpose, str]]) -> None:
    async def scenario() -> None:
        gate = PriorityGate(slots)
        inside: list[Purpose] = []
        waiting: dict[asyncio.Task[None], None] = {}

        async def enter(purpose: Purpose) -> None:
            await gate.enter(purpose)
            inside.append(purpose)

        for purpose, what in steps:
            if what == "ask":
                waiting[asyncio.create_task(enter(purpose))] = None
            elif what == "leave" and inside:
                gate.leave(inside.pop(0))
            elif waiting:
                next(iter(waiting)).cancel()
            if purpose.value < "d":  # sometimes several things happen in one turn of the loop
                await settle()
                waiting = {task: None for task in waiting if not task.done()}
        await settle()
        assert gate.in_flight == len(inside) <= slots
        while inside:
            gate.leave(inside.pop(0))
            await settle()
        assert gate.in_flight == 0
        assert all(task.done() for task in waiting)
        assert gate.waiting == 0

    asyncio.run(scenario())


def test_every_purpose_has_a_rank() -> None:
    assert set(RANKS) == set(Purpose)
    plain = MemoryObjectStore()
    assert plain.for_purpose(Purpose.WAL) is plain


async def test_a_tail_read_overtakes_a_replay_at_the_bucket() -> None:
    store = FaultyStore(FastClock())
    gated = GuardedObjectStore(store, PriorityGate(4), FastClock())
    await gated.put("k", [b"0123456789"])
    cold, tail = gated.for_purpose(Purpose.COLD), gated.for_purpose(Purpose.TAIL)
    store.get_gate = asyncio.Event()
    replay = [asyncio.create_task(cold.get_ranges("k", [(n, n + 1)])) for n in range(8)]
    await settle()
    urgent = asyncio.create_task(tail.get_ranges("k", [(9, 10)]))
    await settle()
    assert [start for _, start, _ in store.gets] == [0, 1, 2, 9]
    store.get_gate.set()
    assert await urgent == [b"9"]
    assert await asyncio.gather(*replay) == [[b"%d" % n] for n in range(8)]
    await gated.delete(["none"])
    assert [info.key async for info in gated.list("")] == ["k"]
    assert (await gated.head("k")).size == 10
    assert await gated.get("k") == b"0123456789"
    assert (await gated.probe()).conditional_create
    assert gated.url == store.url
    assert gated.stats is store.stats
    assert gated.gate.in_flight == 0
    await gated.close()
