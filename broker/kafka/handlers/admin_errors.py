"""Errors of the admin APIs, and the conversion of a failed item to an error code and a message.

Admin requests carry many items, and each item has its own result. `outcome` runs the work of one item and converts a
`TidelogError` to `(code, message)`; any other exception is a bug and propagates to the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from tidelog.runtime.errors import InvalidInput, TidelogError
from tidelog.runtime.steps import ITEMS_A_TURN, paced

NONE = 0
REQUEST_TIMED_OUT = 7
SECURITY_DISABLED = 54
INVALID_REQUEST = 42

CONCURRENCY = 16
"""Concurrent items of one request: enough to benefit from the controller's group commit, and a bound."""

T = TypeVar("T")
R = TypeVar("R")


class PolicyViolation(InvalidInput):
    """Kafka: POLICY_VIOLATION (44)."""

    kafka_code = 44


class PreferredLeaderNotAvailable(TidelogError):
    """Kafka: PREFERRED_LEADER_NOT_AVAILABLE (80)."""

    kafka_code = 80
    retriable = True


class EligibleLeadersNotAvailable(TidelogError):
    """Kafka: ELIGIBLE_LEADERS_NOT_AVAILABLE (83)."""

    kafka_code = 83
    retriable = True


class ElectionNotNeeded(TidelogError):
    """Kafka: ELECTION_NOT_NEEDED (84)."""

    kafka_code = 84


class ItemOutcome(NamedTuple, Generic[R]):
    """The result of one item: a value, or an error code and its message."""

    code: int
    message: str | None
    value: R | None


async def outcome(work: Awaitable[R], timeout_s: float | None = None) -> ItemOutcome[R]:
    """Await `work` for at most `timeout_s` seconds (None: its own budget) and return its outcome."""
    try:
        async with asyncio.timeout(timeout_s):
            return ItemOutcome(NONE, None, await work)
    except TidelogError as error:
        return ItemOutcome(error.kafka_code, str(error), None)
    except TimeoutError:
        return ItemOutcome(REQUEST_TIMED_OUT, f"not finished within {timeout_s} s; it may still take effect", None)


async def each(items: Iterable[T], work: Callable[[T], Awaitable[R]], concurrency: int = CONCURRENCY) -> list[R]:
    """Run `work` on every item, at most `concurrency` at a time; return the results in the order of the items.

    There are as many tasks, and not one for each item: a request has thousands of them. Others run after every
    `ITEMS_A_TURN` items: most work waits for nothing.
    """
    wanted = list(items)
    results: dict[int, R] = {}
    left = iter(enumerate(wanted))
    items_a_turn = max(1, ITEMS_A_TURN // concurrency)

    async def some() -> None:
        async for at, item in paced(left, items_a_turn):
            results[at] = await work(item)

    await asyncio.gather(*(some() for _ in range(min(concurrency, len(wanted)))))
    return [results[at] for at in range(len(wanted))]
