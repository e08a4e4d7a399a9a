"""A world for the diskless WAL: a bucket whose every request waits until the test decides how it ends, and a clock.

Writers run as they do in a broker: elected (a new epoch), `recover`, `begin_epoch`, appends, trims behind what is
committed. The world keeps what was acknowledged to anybody and checks, at each step, what must never break:

- an acknowledged record is in the log that every later owner recovers, byte for byte at its offset;
- once an owner has begun its epoch, an older writer acknowledges nothing that this owner has not recovered;
- what is recovered is contiguous.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tidelog.runtime.errors import Fenced, TidelogError, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectExists, ObjectInfo
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalFailed, WalFull, WalRecord
from tidelog.storage.wal.s3.wal import S3Wal

T = TypeVar("T")

TURNS = 12
"""Turns of the loop after each step: what becomes possible at once is done."""


class FakeClock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def time_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now + seconds, self._count, future))
        await future

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self._sleepers and self._sleepers[0][0] <= self.now:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)


@dataclass(eq=False)
class Op:
    """One request that is under way."""

    writer: int
    what: str
    apply: Callable[[], Any]
    future: asyncio.Future[Any]


class Interface(MemoryObjectStore):
    """The bucket as one process sees it. A WAL asks for nothing but what is defined here."""

    def __init__(self, world: World, writer: int) -> None:
        super().__init__(world.clock)
        self._world = world
        self._writer = writer
        self.dead = False

    async def _request(self, what: str, apply: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self.dead:
            self._world.ops.append(Op(self._writer, what, apply, future))
        return await future

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        data = b"".join(body)
        return await self._request(f"put {key}", lambda: self._world.put(key, data, if_absent))

    async def get(self, key: str) -> bytes:
        return await self._request(f"get {key}", lambda: self._world.run_now(self._world.store.get(key)))

    async def delete(self, keys: Sequence[str]) -> None:
        """Batch deletes are not atomic: one request a key."""
        for key in keys:
            await self._request(f"delete {key}", partial(self._world.delete, key))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        more = True
        while more:
            page = await self._request(f"list {prefix}", partial(self._world.page, prefix, start_after))
            for info in page:
                yield info
            more = len(page) == self._world.list_page
            start_after = page[-1].key if page else start_after


@dataclass
class Writer:
    """One process."""

    number: int
    epoch: int
    bucket_view: Interface
    wal: S3Wal
    recovered: list[tuple[int, bytes]] = field(default_factory=list)
    recovered_end: int = 0
    appended: list[tuple[int, int, bytes]] = field(default_factory=list)
    acknowledged: int = 0
    """How many of `appended`."""
    running: bool = False
    failed: bool = False
    crashed: bool = False
    errors: list[Exception] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class World:
    """Everything, stepped from outside the loop."""

    def __init__(self, settings: WalSettings, *, list_page: int = 3) -> None:
        self.list_page = list_page
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.store = MemoryObjectStore(self.clock)
        self.settings = settings
        self.ops: list[Op] = []
        self.late: list[Op] = []
        self.writers: list[Writer] = []
        self.owners: list[Writer] = []
        """Who has begun an epoch, in the order of their doing so."""
        self.acknowledged: dict[int, bytes] = {}
        """WAL offset → payload of every record that was acknowledged to anybody."""
        self.acknowledged_in: dict[int, int] = {}
        """WAL offset → master epoch that acknowledged it first."""
        self.committed = 0
        self.elected = 0
        self.problems: list[str] = []
        logging.getLogger("storage").setLevel(logging.CRITICAL)  # thousands of refused requests are what is tested

    # -- the bucket

    def run_now(self, work: Coroutine[Any, Any, T]) -> T:
        """The memory store never suspends."""
        try:
            work.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        raise AssertionError("the memory store suspended")

    def put(self, key: str, data: bytes, if_absent: bool) -> ObjectInfo:
        return self.run_now(self.store.put(key, (data,), if_absent=if_absent))

    def delete(self, key: str) -> None:
        self.run_now(self.store.delete([key]))

    def page(self, prefix: str, after: str) -> list[ObjectInfo]:
        async def collect() -> list[ObjectInfo]:
            found = []
            async for info in self.store.list(prefix, start_after=after):
                found.append(info)
                if len(found) == self.list_page:
                    break
            return found

        return self.run_now(collect())

    # -- steps

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        assert not self.problems, self.problems

    def start(self) -> Writer:
        """Elect a new process, and let it take over."""
        self.elected += 1
        number = len(self.writers)
        bucket_view = Interface(self, number)
        wal = S3Wal(
            bucket_view, self.settings, cluster_id="c", replica_set_id=1, clock=self.clock, rng=random.Random(number)
        )  # fmt: skip
        writer = Writer(number, self.elected, bucket_view, wal)
        self.writers.append(writer)
        wal.set_on_durable(lambda offset: self._durable(writer, offset))
        wal.set_on_failed(lambda error: self._failed(writer, error))
        writer.task = self.loop.create_task(self._live(writer))
        self.settle()
        return writer

    async def _live(self, writer: Writer) -> None:
        wal = writer.wal

        def on_record(record: WalRecord) -> None:
            if writer.recovered and record.offset != writer.recovered_end:
                self.problems.append(f"writer {writer.number} recovered {record.offset} after {writer.recovered_end}")
            writer.recovered.append((record.offset, bytes(record.payload)))
            writer.recovered_end = record.end_offset

        committed = self.committed  # a reader that was outvoted since need not see what is committed after this
        try:
            await wal.recover(on_record)
            if wal.end_offset < committed:
                self.problems.append(f"writer {writer.number} recovered less than what is committed")
            await wal.begin_epoch(writer.epoch)
        except (Fenced, WalFailed) as error:
            writer.failed = True
            writer.errors.append(error)
            return
        except TidelogError as error:
            self.problems.append(f"writer {writer.number} cannot start: {error}")
            raise
        if writer.crashed:
            return
        self._began(writer)

    def _began(self, writer: Writer) -> None:
        """A new owner: all that was ever acknowledged and not trimmed must be in what it recovered."""
        found = dict(writer.recovered)
        if writer.wal.start_offset > self.committed:
            self.problems.append(f"the WAL starts at {writer.wal.start_offset}, {self.committed} is committed")
        for offset, payload in self.acknowledged.items():
            if self.acknowledged_in[offset] > writer.epoch or offset < self.committed:
                continue
            if found.get(offset) != payload:
                self.problems.append(f"writer {writer.number} has not recovered the acknowledged record at {offset}")
        for other in self.owners:
            if other.epoch > writer.epoch and not writer.wal.durable_offset <= other.recovered_end:
                self.problems.append(f"writer {writer.number} began epoch {writer.epoch} after {other.epoch}")
        writer.running = True
        self.owners.append(writer)

    def _durable(self, writer: Writer, offset: int) -> None:
        if writer.crashed:
            return
        if writer.failed:
            self.problems.append(f"writer {writer.number} acknowledged after it had failed")
        writer.wal.note_confirmed(offset)
        while writer.acknowledged < len(writer.appended) and writer.appended[writer.acknowledged][1] <= offset:
            start, _, payload = writer.appended[writer.acknowledged]
            writer.acknowledged += 1
            for other in self.owners:
                if (
                    other.epoch > writer.epoch
                    and start >= self.committed
                    and dict(other.recovered).get(start) != payload
                ):
                    self.problems.append(f"zombie {writer.number} acknowledged {start}, which {other.number} has not")
            self.acknowledged[start] = payload
            self.acknowledged_in.setdefault(start, writer.epoch)

    def _failed(self, writer: Writer, error: Exception) -> None:
        writer.failed = True
        writer.errors.append(error)

    def append(self, writer: Writer, payload: bytes) -> None:
        if not writer.running or writer.failed or writer.crashed:
            return

        async def work() -> None:
            start = writer.wal.end_offset
            with contextlib.suppress(WalFull):
                end = writer.wal.append(StreamAppend(1, writer.epoch, start, 1, (payload,)))
                writer.appended.append((start, end, payload))

        self.loop.run_until_complete(work())
        self.settle()

    def finish(self, op: Op, how: str) -> None:
        """End a request: `ok`, `lost` (done, no answer), `refused` (not done), `late` ."""
        self.ops.remove(op)
        if how in ("ok", "lost"):
            try:
                result: Any = op.apply()
            except Exception as error:  # noqa: BLE001 - the answer, whatever it is
                result = error
        if op.future.done():  # its process was stopped
            return
        if how == "ok":
            if isinstance(result, Exception):
                op.future.set_exception(result)
            else:
                op.future.set_result(result)
        else:
            op.future.set_exception(Unavailable(f"{op.what}: {how}"))
            if how == "late":
                self.late.append(op)
        self.settle()

    def land_late(self, op: Op) -> None:
        """A request that everybody had given up is done after all."""
        self.late.remove(op)
        if not op.what.startswith(("get", "list")):
            with contextlib.suppress(ObjectExists):
                op.apply()

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.settle()

    def crash(self, writer: Writer) -> None:
        """The process ends; what it had under way may still arrive."""
        writer.crashed = writer.bucket_view.dead = True
        for op in [op for op in self.ops if op.writer == writer.number]:
            self.ops.remove(op)
            self.late.append(op)

    def commit(self, writer: Writer) -> None:
        """Upload and commit all that is durable, and trim. Only who was elected last may commit (rule 4)."""
        if not writer.running or writer.failed or writer.crashed:
            return
        if writer.epoch == self.elected:
            self.committed = max(self.committed, writer.wal.durable_offset)
        self.trim(writer)

    def trim(self, writer: Writer) -> None:
        """Trim to what is committed, as far as this process has it."""
        if writer.running and not writer.failed and not writer.crashed:
            work = writer.wal.trim(min(self.committed, writer.wal.durable_offset))
            self.loop.run_until_complete(work)
            self.settle()

    def drain(self, condition: Callable[[], bool], steps: int = 4000) -> None:
        """Let everything that is under way succeed until `condition` holds."""
        for _ in range(steps):
            if condition():
                return
            if self.ops:
                self.finish(self.ops[0], "ok")
            else:
                self.tick(0.05)
        raise AssertionError(f"still not so after {steps} steps: {[op.what for op in self.ops]}")

    def end(self) -> None:
        """One last process takes over and must find everything."""
        for writer in self.writers:
            self.crash(writer)
        while self.late:
            self.land_late(self.late[0])
        last = self.start()
        self.drain(lambda: last.running or last.failed)
        assert last.running, last.errors
        self.append(last, b"the end")
        self.drain(lambda: last.wal.durable_offset == last.wal.end_offset)
        assert not self.problems, self.problems

    def close(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()
        logging.getLogger("storage").setLevel(logging.NOTSET)
