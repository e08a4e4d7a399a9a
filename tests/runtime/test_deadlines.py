"""Time-outs that share one timer."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from tidelog.runtime.deadlines import TICK_S, Deadlines


async def test_what_is_not_discarded_is_called_once_and_not_early() -> None:
    deadlines = Deadlines()
    called: dict[str, float] = {}
    started = time.monotonic()
    over = asyncio.get_running_loop().create_future()

    def note(name: str) -> None:
        assert name not in called
        called[name] = time.monotonic() - started
        if len(called) == 3:
            over.set_result(None)

    waits = {"a": 0.0, "b": 0.15, "c": 0.3}
    for name, seconds in waits.items():
        deadlines.add(seconds, partial(note, name))
    never = [partial(note, "never") for _ in range(3)]
    slots = [deadlines.add(0.2, callback) for callback in never]
    assert len(deadlines) == 6
    for slot, callback in zip(slots, never, strict=True):
        deadlines.discard(slot, callback)
        deadlines.discard(slot, callback)
    assert len(deadlines) == 3
    await asyncio.wait_for(over, 60)
    assert list(called) == ["a", "b", "c"]
    assert all(called[name] >= seconds for name, seconds in waits.items())
    assert len(deadlines) == 0


async def test_one_callback_may_discard_another_of_the_same_time() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        called: list[str] = []
        over = asyncio.get_running_loop().create_future()

        def first() -> None:
            called.append("first")
            deadlines.discard(slot, second)

        def second() -> None:
            called.append("second")

        while deadlines.add(0.0, first) != (slot := deadlines.add(0.0, second)):  # a tick lay between the two
            deadlines.discard(slot, second)
        deadlines.add(3 * TICK_S, lambda: over.set_result(None))
        await over
        assert called[-1] == "first"
        assert "second" not in called

    await asyncio.wait_for(main(), 60)
