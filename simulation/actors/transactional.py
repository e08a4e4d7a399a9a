"""A session of a transactional client: from InitProducerId on until it is fenced, gives up, or ends.

Old clients name their partitions to the coordinator before they write (AddPartitionsToTxn, EndTxn v4); new ones do not,
and get a new epoch with each end (Produce v12, EndTxn v5, KIP-890). A request is repeated until its time is up; what an
unanswered one has done is unknown, so its operation is `info` unless a later try tells. A session that does not know
whether its transaction was decided is over: only a new one may follow.

Entry: `TxnSession`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tidelog.batch.batch import build_batch
from tidelog.simulation.actors import kafka, kafka_txn
from tidelog.simulation.actors.client import Address, Client, Lost
from tidelog.simulation.actors.kafka import Request
from tidelog.simulation.actors.kafka_txn import NO_PAIR, Pair
from tidelog.simulation.actors.keyed import keyed_record
from tidelog.simulation.actors.workload import (
    ASK_S,
    DUPLICATE_SEQUENCE,
    MISSED_ANSWERS,
    MISSED_FOR_S,
    Topic,
    Workload,
)
from tidelog.simulation.checkers.history import UNKNOWN, Op, Outcome

GIVE_UP_S = 8.0
"""How long one call is repeated."""
SURELY_REFUSED = frozenset((45, 47, 48, 49, 53, 59, 90, 120))
"""Errors after which the session cannot go on; the request that got one has done nothing.

OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING,
TRANSACTIONAL_ID_AUTHORIZATION_FAILED, UNKNOWN_PRODUCER_ID, PRODUCER_FENCED, TRANSACTION_ABORTABLE.
"""
MISSED = "the answer was missed"
NO_TRANSACTIONS_YET = 53
"""What FindCoordinator answers below the feature level of transactions."""
NO_TRANSACTIONS_S = 2.0


class Entry(NamedTuple):
    """A record to write in a transaction."""

    topic: Topic
    partition: int
    value: int
    cause: int
    amount: int
    key: int = UNKNOWN
    tombstone: bool = False


class _Result(NamedTuple):
    """The last answer to a call that was repeated."""

    ok: bool
    uncertain: bool
    """It is not ok, and may have taken effect."""
    answer: Any
    error: str


def _code_of(answer: Any) -> int:
    return int(answer if isinstance(answer, int) else answer[0])


class TxnSession:
    """One session. After `over` is set all that is left is another one."""

    def __init__(
        self, workload: Workload, client: Client, transactional_id: str, timeout_ms: int, *, new: bool
    ) -> None:
        self._w = workload
        self._client = client
        self._id = transactional_id
        self._timeout_ms = timeout_ms
        self._new = new
        self._rng = workload.random()
        self._pair = NO_PAIR
        self._coordinators: dict[tuple[str, bool], Address] = {}
        self._sequences: dict[tuple[str, int], int] = {}
        self._added: set[tuple[str, int]] = set()
        self._txn = -1
        self.process = workload.process()
        self.over = False
        self.left = False
        """It goes on by itself: nothing else may be done with it."""
        self.failed = False
        """Something of the open transaction did not succeed: it may only be aborted."""

    # --- requests ---

    async def _coordinator(self, key: str, of_transactions: bool) -> Address:
        place = (key, of_transactions)
        if place not in self._coordinators:
            request = kafka.find_coordinator(key, of_transactions=of_transactions)
            error, address = await self._client.ask_any(request, ASK_S)
            if error == NO_TRANSACTIONS_YET:
                await asyncio.sleep(NO_TRANSACTIONS_S)
            if error:
                raise Lost(f"no coordinator: error {error}", unsent=True)
            self._coordinators[place] = address
        return self._coordinators[place]

    async def _ask(self, key: str, request: Request, *, of_transactions: bool = True) -> Any:
        return await self._client.ask(await self._coordinator(key, of_transactions), request, ASK_S)

    async def _repeat(self, key: str, request: Request, *, of_transactions: bool = True) -> _Result:
        """Ask the coordinator of `key` until it says yes or surely no, or the time is up."""
        deadline = self._w.loop.time() + GIVE_UP_S
        uncertain = False
        while True:
            answer: Any = None
            try:
                answer = await self._ask(key, request, of_transactions=of_transactions)
                code = _code_of(answer)
                error = f"error {code}"
                if code == 0:
                    if not await self._misses():
                        return _Result(ok=True, uncertain=False, answer=answer, error="")
                    error = MISSED
                if code in SURELY_REFUSED:
                    return _Result(ok=False, uncertain=uncertain, answer=answer, error=error)
                uncertain = True
            except Lost as lost:
                uncertain = uncertain or not lost.unsent
                error = str(lost)
            self._coordinators.pop((key, of_transactions), None)
            if self._w.loop.time() >= deadline:
                return _Result(ok=False, uncertain=uncertain, answer=answer, error=error)
            await asyncio.sleep(self._rng.uniform(0.02, 0.3))

    async def _misses(self) -> bool:
        """Whether an answer is missed; then the request is sent again after a long pause."""
        if self._rng.random() >= MISSED_ANSWERS:
            return False
        await asyncio.sleep(self._rng.uniform(0, MISSED_FOR_S))
        return True

    def _end(self, op: Op, result: _Result, **fields: Any) -> None:
        outcome: Outcome = "ok" if result.ok else "info" if result.uncertain else "fail"
        self._w.history.end(op, outcome, self._w.now_us(), error=result.error, **fields)

    # --- the session ---

    async def start(self, pair: Pair = NO_PAIR) -> bool:
        """Begin: fence all sessions of the transactional id before this one. `pair`: the last one of this client."""
        w = self._w
        op = w.history.begin("init_txn", self.process, w.now_us(), name=self._id)
        request = kafka_txn.init_producer_id(self._id, self._timeout_ms, pair, new=self._new)
        result = await self._repeat(self._id, request)
        if result.ok:
            self._pair = result.answer[1]
        self._end(op, result, producer=self._pair.producer)
        self.over = not result.ok
        return result.ok

    async def restart(self) -> TxnSession:
        """Return the next session of the same client, which may be over."""
        following = TxnSession(self._w, self._client, self._id, self._timeout_ms, new=self._new)
        await following.start(self._pair if self._rng.random() < 0.5 else NO_PAIR)
        return following

    def begin(self) -> int:
        """Begin a transaction; return its number."""
        self._txn = self._w.transaction()
        self._added.clear()
        self.failed = False
        if self._new:
            self._sequences.clear()
        return self._txn

    async def add(self, partitions: Sequence[tuple[str, int]]) -> None:
        """An old client's AddPartitionsToTxn."""
        wanted: dict[str, list[int]] = defaultdict(list)
        for topic, partition in dict.fromkeys(partitions):
            if (topic, partition) not in self._added:
                wanted[topic].append(partition)
                self._added.add((topic, partition))
        if self._new or not wanted:
            return
        result = await self._repeat(self._id, kafka_txn.add_partitions(self._id, self._pair, wanted))
        self._note(result)

    def _note(self, result: _Result) -> None:
        self.failed = self.failed or not result.ok

    async def send(self, entries: Sequence[Entry]) -> None:
        """Write entries of one partition as a batch."""
        w = self._w
        topic, partition = entries[0].topic, entries[0].partition
        sequence = self._sequences.get((topic.name, partition), 0)
        now_ms = w.time_ms()
        records = [
            keyed_record(now_ms, each.key, each.value, tombstone=each.tombstone, padding=b"%d" % each.amount)
            for each in entries
        ]
        keys = [each.key for each in entries]
        if any(key != UNKNOWN for key in keys):
            told = {"keys": keys, "tombstones": [each.value for each in entries if each.tombstone]}
        else:
            told = {}
        batch = build_batch(
            records, producer_id=self._pair.producer, producer_epoch=self._pair.epoch, base_sequence=sequence,
            transactional=True,
        )  # fmt: skip
        op = w.history.begin(
            "send", self.process, w.now_us(), topic=topic.name, partition=partition, txn=self._txn,
            values=[each.value for each in entries], causes=[each.cause for each in entries],
            amounts=[each.amount for each in entries], producer=self._pair.producer, idempotent=True,
            times=[now_ms] * len(entries), **told,
        )  # fmt: skip
        result = await self._deliver(topic, partition, batch)
        offset = result.answer.offset if result.ok else -1
        self._end(op, result, offsets=list(range(offset, offset + len(entries))) if offset >= 0 else [])
        self._sequences[topic.name, partition] = sequence + len(entries)
        self._note(result)

    async def _deliver(self, topic: Topic, partition: int, batch: bytes) -> _Result:
        """Ask the leader of a partition until it says yes or surely no, or the time is up."""
        request = kafka_txn.produce(self._id, topic.wire, partition, batch, 3_000, new=self._new)
        deadline = self._w.loop.time() + GIVE_UP_S
        uncertain, found, error = False, None, "no leader"
        while True:
            try:
                address = await self._client.leader(topic.name, partition)
                if address is not None:
                    found = await self._client.ask(address, request, ASK_S)
                    error = f"error {found.error}"
                    if found.error in (0, DUPLICATE_SEQUENCE):
                        if not await self._misses():
                            return _Result(ok=True, uncertain=False, answer=found, error="")
                        error = MISSED
                    if found.error in SURELY_REFUSED:
                        return _Result(ok=False, uncertain=uncertain, answer=found, error=error)
                    uncertain = True
            except Lost as lost:
                uncertain, found, error = uncertain or not lost.unsent, None, str(lost)
            self._client.forget(topic.name, partition, found.leader if found is not None else None)
            if self._w.loop.time() >= deadline:
                return _Result(ok=False, uncertain=uncertain, answer=found, error=error)
            await asyncio.sleep(self._rng.uniform(0.02, 0.3))

    async def commit_offset(self, group: str, topic: Topic, partition: int, offset: int) -> None:
        """Commit what was consumed, as a part of the transaction."""
        if not self._new:
            result = await self._repeat(self._id, kafka_txn.add_offsets(self._id, self._pair, group))
            self._note(result)
            if self.failed:
                return
        w = self._w
        op = w.history.begin(
            "txn_commit", self.process, w.now_us(), txn=self._txn, group=group, topic=topic.name, partition=partition,
            offset=offset,
        )  # fmt: skip
        request = kafka_txn.txn_offset_commit(self._id, self._pair, group, topic.wire, partition, offset, new=self._new)
        result = await self._repeat(group, request, of_transactions=False)
        self._end(op, result)
        self._note(result)

    async def end(self, *, commit: bool) -> bool:
        """End the transaction; one in which something failed is aborted. Return whether it is surely committed.

        Otherwise it is surely aborted, or the session is over.
        """
        w = self._w
        commit = commit and not self.failed
        op = w.history.begin("end_txn", self.process, w.now_us(), txn=self._txn, commits=commit, name=self._id)
        result = await self._repeat(self._id, kafka_txn.end_txn(self._id, self._pair, commit=commit, new=self._new))
        self._end(op, result)
        if not result.ok:
            self.over = True
            return False
        if result.answer[1] != self._pair:
            self._pair = result.answer[1]
            self._sequences.clear()
        elif self.failed:
            self.over = True  # the sequence numbers are unknown
        return commit

    async def committed(self, group: str, topic: Topic, partition: int) -> int | None:
        """The committed offset of a group, or -1; None if it cannot be known."""
        w = self._w
        op = w.history.begin("committed", self.process, w.now_us(), group=group, topic=topic.name, partition=partition)
        stable = self._rng.random() < 0.5  # a session's start has ended all transactions before it anyway
        fetch: Callable[[str, str, int], Request] = kafka_txn.offset_fetch if stable else kafka.offset_fetch
        result = await self._repeat(group, fetch(group, topic.wire, partition), of_transactions=False)
        offset = int(result.answer[1]) if result.ok else -1
        self._end(op, result, offset=offset)
        return offset if result.ok else None
