"""Asks several brokers at the same time: one that accepts connections and never answers holds the others up no longer
than its own time.

Entry: `ask_at_once`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from tidelog.runtime.errors import TidelogError, Unavailable

BROKER_TIMEOUT_S = 5.0
"""For each piece of a broker's answer, while others are asked, too."""
GRACE_S = 1.0
"""The time-out of a connection is told first, which says what was waited for."""

T = TypeVar("T")
Answers = dict[int, T | TidelogError]


def ask_at_once(asks: Mapping[int, Callable[[], T]], timeout_s: float = BROKER_TIMEOUT_S) -> Answers[T]:
    """Return what each call returns, or the `TidelogError` that it raises, by broker as in `asks`. Raises other errors.

    One that has not returned `GRACE_S` after the time-out is `Unavailable`, and its thread is left alone.
    """
    futures: dict[int, Future[T]] = {}
    for broker, ask in asks.items():
        future = futures[broker] = Future()
        threading.Thread(target=_run, args=(ask, future), daemon=True, name=f"ask-{broker}").start()
    wait(futures.values(), timeout_s + GRACE_S)
    answers: Answers[T] = {}
    for broker, future in futures.items():
        error = future.exception() if future.done() else _late(broker, timeout_s)
        answers[broker] = error if isinstance(error, TidelogError) else future.result()
    return answers


def _run(ask: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(ask())
    except BaseException as error:  # noqa: BLE001  # raised where the answers are collected
        future.set_exception(error)


def _late(broker: int, timeout_s: float) -> TidelogError:
    return Unavailable(f"broker {broker} has not answered within {timeout_s:g} s", hint="see `tidelog status`")
