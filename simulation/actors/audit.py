"""Reads what transactions have left, after all faults and clients have ended.

Open transactions must end by their time-out: each wait is bounded by `SETTLE_S`, and what is there then is recorded for
the checkers. Entry: `Auditor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidelog.simulation.actors import kafka, kafka_txn
from tidelog.simulation.actors.client import Lost
from tidelog.simulation.actors.consumers import Decoded, Fetcher, Position, ReaderActor
from tidelog.simulation.actors.kafka import LATEST, Request
from tidelog.simulation.actors.workload import ASK_S, Topic, Workload

SETTLE_S = 20.0
"""The longest time-out of a transaction, the search for it, and the markers, twice."""
SETTLED = ("", "Empty", "CompleteCommit", "CompleteAbort")
"""States of a transactional id without an open transaction; the first: it does not exist."""
TRANSACTIONAL_ID_NOT_FOUND = 105


class _MarkerReader(Fetcher):
    """Records the markers of transactions, too."""

    def took(self, position: Position, came: Decoded) -> None:
        """See `Fetcher.took`."""
        topic, partition = position.topic.name, position.partition
        for offset, producer, commits in came.markers:
            self._w.history.note(
                "marker", self.process, self._w.now_us(), topic=topic, partition=partition, offset=offset,
                producer=producer, commits=commits,
            )  # fmt: skip


class Auditor:
    """Reads everything, as one client."""

    def __init__(self, workload: Workload, settle_s: float) -> None:
        """`settle_s`: within so many seconds every transaction must have ended."""
        self._w = workload
        self._client = workload.client()
        self._until_s = workload.loop.time() + settle_s

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    async def _repeat(self, ask: Callable[[], Awaitable[Any]], is_good: Callable[[Any], bool]) -> Any:
        """Ask until the answer is good, or the time is up; return the last answer, or None."""
        answer = None
        while True:
            try:
                answer = await ask()
            except Lost:
                answer = None
            if (answer is not None and is_good(answer)) or self._w.loop.time() >= self._until_s:
                return answer
            await asyncio.sleep(0.25)

    async def _of_coordinator(self, key: str, request: Request, *, of_transactions: bool) -> Any:
        error, address = await self._client.ask_any(kafka.find_coordinator(key, of_transactions=of_transactions), ASK_S)
        if error:
            raise Lost(f"no coordinator: error {error}")
        return await self._client.ask(address, request, ASK_S)

    async def describe(self, transactional_id: str) -> None:
        """Record the state of a transactional id, once no transaction of it is open."""
        w = self._w
        op = w.history.begin("describe_txn", w.process(), w.now_us(), name=transactional_id)
        request = kafka_txn.describe_transactions(transactional_id)
        answer = await self._repeat(
            lambda: self._of_coordinator(transactional_id, request, of_transactions=True),
            lambda found: found[0] in (0, TRANSACTIONAL_ID_NOT_FOUND) and found[1] in SETTLED,
        )
        error, state = answer if answer is not None else (-1, "")
        known = error in (0, TRANSACTIONAL_ID_NOT_FOUND)
        w.history.end(op, "ok" if known else "info", w.now_us(), target=state, error="" if known else f"error {error}")

    async def read(self, topic: Topic, partition: int) -> None:
        """Record both ends of a partition once they are the same, and read it with either isolation level."""
        w = self._w
        process = w.process()
        ends: tuple[int, int] | None = await self._repeat(
            lambda: self._ends(topic, partition), lambda found: found[0] == found[1]
        )
        high, stable = ends if ends is not None else (-1, -1)
        place = {"topic": topic.name, "partition": partition}
        said: list[dict[str, Any]] = [{"high_watermark": high}, {"offset": stable, "committed_only": True}]
        for mark in said:
            op = w.history.begin("list_offsets", process, w.now_us(), **place, **mark)
            w.history.end(op, "fail" if ends is None else "ok", w.now_us())
        for committed in (False, True):
            kind = Fetcher if committed else _MarkerReader
            fetcher = kind(w, self._client, w.process(), committed=committed)
            end = await ReaderActor(self._client, fetcher, topic, partition).run(stable if committed else high)
            w.history.note("audit", fetcher.process, w.now_us(), **place, offset=end, committed_only=committed)

    async def _ends(self, topic: Topic, partition: int) -> tuple[int, int]:
        """High watermark and last stable offset. Raises `Lost`."""
        found = []
        for committed in (False, True):
            address = await self._client.leader(topic.name, partition)
            if address is None:
                raise Lost("no leader")
            request = kafka.list_offsets(topic.wire, partition, LATEST, committed=committed)
            error, offset = await self._client.ask(address, request, ASK_S)
            if error:
                self._client.forget(topic.name, partition)
                raise Lost(f"error {error}")
            found.append(int(offset))
        return found[0], found[1]

    async def offset(self, group: str, topic: Topic, partition: int) -> None:
        """Record the committed offset of a group, once no transaction may change it."""
        w = self._w
        op = w.history.begin("committed", w.process(), w.now_us(), group=group, topic=topic.name, partition=partition)
        request = kafka_txn.offset_fetch(group, topic.wire, partition)
        answer = await self._repeat(
            lambda: self._of_coordinator(group, request, of_transactions=False), lambda found: found[0] == 0
        )
        error, offset = answer if answer is not None else (-1, -1)
        w.history.end(op, "info" if error else "ok", w.now_us(), offset=offset, error=f"error {error}" if error else "")
