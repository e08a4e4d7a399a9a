"""The `ObjectStore` interface: one simulated S3 server, and each node's client.

A request is a message: the server applies it on arrival, even if its sender was cancelled, timed out or crashed
meanwhile, so puts may be applied late. The server's behaviour is drawn for each request from its `BucketFaults`: it is
slow, refuses (503), denies (403), answers with less than was asked for, applies and loses the response, applies long
after the client's time-out, or does not respond (outage, or a cut between it and the node's host). Responses may be
damaged (`Flips`).

The client on a node works like `tidelog.storage.bucket.s3`: attempts with a time-out, retried with back-off within a
budget; a conditional create whose response was lost recognises its own object by the writer's id.

Entry: `SimBucket`, `SimBucket.store`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple, TypeVar

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed, TidelogError
from tidelog.runtime.types import Buffer
from tidelog.runtime.waiting import within
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.network import SimNetwork
from tidelog.storage.bucket.common import (
    PlainViews,
    Retrier,
    StoreAccessDenied,
    Transient,
    check_key,
    check_ranges,
    past_end,
)
from tidelog.storage.bucket.stats import OperationStats, StoreStats
from tidelog.storage.bucket.store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    StoreCapabilities,
    UnfinishedUpload,
    View,
)
from tidelog.storage.objects.key import parse_object_key

T = TypeVar("T")

HOST = "bucket"
"""The server's name in the network, for cuts."""
URL = "simulated://bucket"
LIST_PAGE = 1_000
ATTEMPT_S = 2.0
BUDGET_S = 20.0


@dataclass(slots=True)
class BucketFaults:
    """The faults of the server, as probabilities per request."""

    latency_s: float = 0.01
    refuse: float = 0.0
    """503 SlowDown."""
    lose_answer: float = 0.0
    """The request is applied, and the client gets no response before its time-out."""
    late: float = 0.0
    """The request is applied only after the client's time-out."""
    outage: bool = False
    deny: float = 0.0
    """403: the key was rotated, or its policy changed."""
    short: float = 0.0
    """A range is answered with less than was asked for, though the object has it."""

    def combined(self, other: BucketFaults) -> BucketFaults:
        """Both at once: of each fault the worse."""
        return BucketFaults(*(max(getattr(self, each), getattr(other, each)) for each in self.__slots__))


class Flips:
    """Responses to GETs damaged in transit by one bit, with that probability.

    A host never gets a second damaged response for the same object: a repeated request returns the true content.
    """

    def __init__(self) -> None:
        self.probability = 0.0
        self.rng = random.Random(0)
        self._had: set[tuple[str, str]] = set()

    def carry(self, host: str, key: str, body: bytes) -> bytes:
        """Return `body` as received."""
        if not self.probability or not body or self.rng.random() >= self.probability or (host, key) in self._had:
            return body
        self._had.add((host, key))
        damaged = bytearray(body)
        damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
        return bytes(damaged)


class _Object(NamedTuple):
    body: bytes
    info: ObjectInfo
    writer: int
    """The random number of each put: S3's metadata `writer id`."""


class SimBucket:
    """The server: its objects, and its current faults."""

    def __init__(self, loop: VirtualLoop, network: SimNetwork, clock: Clock, rng: random.Random) -> None:
        self.loop = loop
        self._network = network
        self.rng = rng
        self.faults = BucketFaults()
        """Those that it has now: all of `_afflictions` at once."""
        self._afflictions: list[BucketFaults] = []
        self.flips = Flips()
        self.objects: dict[str, _Object] = {}
        self._clock = clock
        self.overwritten: list[str] = []
        """Keys of objects whose content was changed, although objects are written once."""
        self._version = 0
        self._world = contextvars.Context()
        self.requests = 0

    def store(self, host: str, clock: Clock, rng: random.Random) -> SimObjectStore:
        """Return the store for one node's process."""
        return SimObjectStore(self, host, clock, rng)

    def afflict(self, faults: BucketFaults) -> Callable[[], None]:
        """Have these faults, beside those that are there, until the returned function is called."""
        self._afflictions.append(faults)
        self._combine()

        def undo() -> None:
            self._afflictions = [each for each in self._afflictions if each is not faults]
            self._combine()

        return undo

    def heal(self) -> None:
        """Have no faults."""
        self._afflictions.clear()
        self._combine()

    def _combine(self) -> None:
        self.faults = reduce(BucketFaults.combined, self._afflictions, BucketFaults())

    async def send(self, host: str, apply: Callable[[], T], timeout_s: float) -> T:
        """Run one request. Raises `Transient`, or the errors of `apply`."""
        self.requests += 1
        self._network.odd.strike("bucket", host)
        faults, rng, loop = self.faults, self.rng, self.loop
        there_s = faults.latency_s * (0.5 + rng.random()) / 2
        back_s = faults.latency_s * (0.5 + rng.random()) / 2
        drawn = rng.random()
        answer: asyncio.Future[T] = loop.create_future()
        caller = contextvars.copy_context()
        answered = True
        if drawn < faults.deny:
            await asyncio.sleep(there_s + back_s)
            raise StoreAccessDenied("the simulated bucket answered 403 AccessDenied")
        drawn -= faults.deny
        if drawn < faults.refuse:
            await asyncio.sleep(there_s + back_s)
            raise Transient("503 SlowDown")
        drawn -= faults.refuse
        if drawn < faults.lose_answer:
            answered = False
        elif drawn - faults.lose_answer < faults.late:
            there_s, answered = timeout_s * (1 + rng.random()), False

        def arrive() -> None:
            if self.faults.outage or self._network.is_cut(host, HOST):
                return
            try:
                applied = apply()
            except TidelogError as error:
                self.loop.call_later(back_s, _fail, answer, error, context=caller)
                return
            if answered and not self._network.is_cut(HOST, host):
                self.loop.call_later(back_s, _answer, answer, applied, context=caller)

        loop.call_later(there_s, arrive, context=self._world)
        try:
            result = await within(answer, timeout_s)
            self._network.odd.strike("bucket", host)  # it is applied
            return result
        except TimeoutError:
            raise Transient(f"no answer within {timeout_s} s") from None

    def shortens(self) -> bool:
        """Draw whether the next answer with a range is cut short."""
        return bool(self.faults.short) and self.rng.random() < self.faults.short

    def put(self, key: str, body: bytes, if_absent: bool, writer: int) -> ObjectInfo:
        """Apply a put. A conditional put that finds its own object has already succeeded."""
        if if_absent and key in self.objects:
            if self.objects[key].writer == writer:
                return self.objects[key].info
            raise ObjectExists(f"object {key} exists in {URL}")
        if key in self.objects and parse_object_key(key) is not None and self.objects[key].body != body:
            self.overwritten.append(key)
        self._version += 1
        info = ObjectInfo(key, len(body), f"{self._version:016x}", self._clock.time_ms())
        self.objects[key] = _Object(body, info, writer)
        return info

    def find(self, key: str) -> _Object:
        """Return an object. Raises `ObjectNotFound`."""
        found = self.objects.get(key)
        if found is None:
            raise ObjectNotFound(f"object {key} does not exist in {URL}")
        return found

    def page(self, prefix: str, start_after: str) -> list[ObjectInfo]:
        """Return up to `LIST_PAGE` objects in the order of keys."""
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)
        return [self.objects[key].info for key in keys[:LIST_PAGE]]

    def delete(self, keys: Sequence[str]) -> None:
        """Apply a delete."""
        for key in keys:
            self.objects.pop(key, None)


def _answer(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class SimObjectStore(PlainViews):
    """A `tidelog.storage.bucket.store.Backend` of one life."""

    def __init__(self, bucket: SimBucket, host: str, clock: Clock, rng: random.Random) -> None:
        self._bucket = bucket
        self._host = host
        self._rng = rng
        self._retrier = Retrier(clock, rng)
        self._closed = False
        self.stats = StoreStats(clock)

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return URL

    async def _call(self, operation: str, key: str, apply: Callable[[OperationStats], T]) -> T:
        if self._closed:
            raise Closed("the object store is closed")
        with self.stats.measure(operation) as stats:

            async def attempt() -> T:
                return await self._bucket.send(self._host, lambda: apply(stats), ATTEMPT_S)

            return await self._retrier.run(f"{operation} {key}", "the bucket fails", BUDGET_S, stats, attempt)

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        check_key(key)
        data = b"".join(body)
        writer = self._rng.getrandbits(62)

        def apply(stats: OperationStats) -> ObjectInfo:
            stats.bytes_out += len(data)
            return self._bucket.put(key, data, if_absent, writer)

        return await self._call("put", key, apply)

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""

        def apply(stats: OperationStats) -> bytes:
            body = self._bucket.find(key).body
            stats.bytes_in += len(body)
            return self._bucket.flips.carry(self._host, key, body)

        return await self._call("get", key, apply)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        check_ranges(key, ranges)

        def apply(stats: OperationStats) -> list[View]:
            body = self._bucket.find(key).body
            if self._bucket.shortens():
                raise past_end(key, *ranges[-1])
            for start, end in ranges:
                if end > len(body):
                    raise past_end(key, start, end)
            stats.bytes_in += sum(end - start for start, end in ranges)
            return [self._bucket.flips.carry(self._host, key, body[start:end]) for start, end in ranges]

        return await self._call("get_ranges", key, apply)

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return await self._call("head", key, lambda _stats: self._bucket.find(key).info)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        while True:
            page = await self._call("list", prefix, partial(self._list_page, prefix, start_after))
            for info in page:
                yield info
            if len(page) < LIST_PAGE:
                return
            start_after = page[-1].key

    def _list_page(self, prefix: str, start_after: str, _stats: OperationStats) -> builtins.list[ObjectInfo]:
        return self._bucket.page(prefix, start_after)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        await self._call("delete", "", lambda _stats: self._bucket.delete(keys))

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`: there are no multipart uploads here."""
        return []

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`: one request, without retries."""
        await self._call("head", "probe", lambda _stats: None)
        return StoreCapabilities(conditional_create=True, problems=())

    async def close(self) -> None:
        """See `ObjectStore.close`."""
        self._closed = True
