"""Errors of the admin APIs, and how a failed item of a request becomes an error code and a message.

Admin requests carry many items, and each item has a result of its own. `outcome` runs the work of one item and turns a
`TidelogError` into `(code, message)`; anything else is a bug and goes up to the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from runtime.errors import InvalidInput, TidelogError

NONE = 0
REQUEST_TIMED_OUT = 7
SECURITY_DISABLED = 54
INVALID_REQUEST = 42

CONCURRENCY = 16
"""Items of one request in work at a time: enough to share the controller's group commit, and a bound."""

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


class Outcome(NamedTuple, Generic[R]):
    """What became of one item."""

    code: int
    message: str | None
    value: R | None


async def outcome(work: Awaitable[R], timeout_s: float | None = None) -> Outcome[R]:
    """Await `work` for at most `timeout_s` seconds (None: its own budget) and say what became of it."""
    try:
        async with asyncio.timeout(timeout_s):
            return Outcome(NONE, None, await work)
    except TidelogError as error:
        return Outcome(error.kafka_code, str(error), None)
    except TimeoutError:
        return Outcome(REQUEST_TIMED_OUT, f"not finished within {timeout_s} s; it may still take effect", None)


async def each(items: Iterable[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """`work` on every item, at most `CONCURRENCY` at a time, results in the order of the items."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(item: T) -> R:
        async with slots:
            return await work(item)

    return await asyncio.gather(*(one(item) for item in items))
