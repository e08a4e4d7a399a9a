"""The stored record batches of a task, from the objects in the bucket, fetched ahead of who decodes them.

A thread with an event loop of its own reads indexes and blocks, some requests at a time; the caller gets the blocks in
the order of their offsets. Every block is checked against its CRC32C before it is handed on.

What a branch shares is read under the id of the stream that has written it, and of each object no more than its slice
tells: behind the cut the object may go on with what is not the branch's (docs/design/0031).

Entry: `open_bucket`, `Fetch`.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from pyspark_tidelog.plan import SharedOffsets, Slice, stream_in
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, CorruptData, TidelogError
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.local import MAX_THREADS, LocalObjectStore
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.objects.format import Block, IndexEntry
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import get_range, load_index
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import S3Settings

RUN_BYTES = 4 << 20
"""Neighbouring blocks of up to this size are one request, if they are not larger."""
RUNS_AHEAD = 4
"""Requests for blocks that are under way, or wait for the decoder."""
EMBEDDED = "embedded_url"
"""Setting that names the directory of an embedded store, as `file://…`."""


def open_bucket(settings: Mapping[str, str]) -> ObjectStore:
    """Open the bucket that `Cluster.bucket` tells, for reading. Sends nothing. Raises `ConfigError`."""
    clock = SystemClock()
    url = settings.get(EMBEDDED, "")
    if url and not settings.get("bucket") and not settings.get("endpoint"):
        path = Path(unquote(urlsplit(url).path))
        if not path.is_dir():
            raise ConfigError(
                f"the cluster keeps its objects in {path}, which this machine does not have",
                hint="an embedded bucket is read on its own machine only; use an S3 server for several machines",
            )
        return GuardedObjectStore(LocalObjectStore(path, clock), PriorityGate(MAX_THREADS), clock)
    given = {name: value for name, value in settings.items() if name != EMBEDDED}
    try:
        s3 = msgspec.convert({**given, "create_bucket": False}, S3Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings s3.… of the bucket are not right: {error}") from error
    return open_store(s3, Path(), clock, random.Random())


class StoredStream(NamedTuple):
    """A stream as objects have it."""

    cluster_id: str
    id: int
    shared: Sequence[SharedOffsets] = ()
    """Of a branch; see `PlannedRange`."""


class _Run(NamedTuple):
    """Neighbouring blocks of one object, of which offsets `[start, end)` are wanted."""

    key: str
    entries: list[IndexEntry]
    start: int
    end: int

    @property
    def span(self) -> tuple[int, int]:
        return self.entries[0].position, self.entries[-1].end_position

    def wants(self, entry: StreamEntry) -> bool:
        inside = entry.base_offset < self.end and entry.base_offset + entry.count > self.start
        return inside and not entry.is_hole


class Fetch:
    """The record batches of a stream in `[start, end)`, as an iterator of payloads, each of whole batches.

    Use it in a `with` statement. Raises what the readers of `tidelog.storage.objects.reader` raise: `ObjectNotFound`,
    `CorruptData`, `Unavailable`.
    """

    def __init__(
        self, bucket: Mapping[str, str], source: StoredStream, slices: Sequence[Slice], start: int, end: int
    ) -> None:
        self._bucket = bucket
        self._source = source
        self._slices = slices
        self._start = start
        self._end = end
        self._ready: queue.Queue[list[Any] | BaseException | None] = queue.Queue(1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tidelog-fetch", daemon=True)

    def __enter__(self) -> Fetch:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)  # the thread may wait for room
            except queue.Empty:
                continue
        self._thread.join()

    def __iter__(self) -> Iterator[Any]:
        while True:
            found = self._ready.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield from found

    def _work(self) -> None:
        try:
            asyncio.run(self._read())
        except BaseException as error:  # noqa: BLE001  # raised again where the payloads are taken
            self._ready.put(error)
        else:
            self._ready.put(None)

    async def _read(self) -> None:
        store = open_bucket(self._bucket)
        pending: deque[asyncio.Task[list[Any]]] = deque()
        problem: TidelogError | None = None
        try:
            runs = self._runs(store)
            while not self._stopping.is_set():
                try:
                    run = await anext(runs)
                except StopAsyncIteration:
                    break
                except TidelogError as error:
                    problem = error  # of an object: what lies before it is handed over first
                    break
                pending.append(asyncio.create_task(self._load(store, run)))
                if len(pending) >= RUNS_AHEAD:
                    await self._hand_over(pending.popleft())  # nothing that lies behind a problem is handed over
            while pending and not self._stopping.is_set():
                await self._hand_over(pending.popleft())
            if problem is not None:
                raise problem
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await store.close()

    async def _hand_over(self, loading: asyncio.Task[list[Any]]) -> None:
        payloads = await loading
        if not self._stopping.is_set():
            await asyncio.to_thread(self._ready.put, payloads)

    async def _runs(self, store: ObjectStore) -> AsyncIterator[_Run]:
        for piece in self._slices:
            cluster_id, stream = self._source.cluster_id, stream_in(piece, self._source.id, self._source.shared)
            key = object_key(cluster_id, piece.object_id)
            index = await load_index(store, key, piece.size, object_id=piece.object_id, cluster_id=cluster_id)
            start, end = max(self._start, piece.start), min(self._end, piece.end)
            entries: list[IndexEntry] = []
            is_found = start >= end
            for entry in index.entries_from(index.find(stream, start)):
                if entry.stream_id != stream or entry.start_offset >= end:
                    break
                if entries and entry.end_position - entries[0].position > RUN_BYTES:
                    yield _Run(key, entries, start, end)
                    entries = []
                entries.append(entry)
                is_found = True
            if not is_found:
                raise CorruptData(f"object {key} has no offsets {start} to {end - 1} of stream {stream}, as was told")
            if entries:
                yield _Run(key, entries, start, end)

    async def _load(self, store: ObjectStore, run: _Run) -> list[Any]:
        first, last = run.span
        view = memoryview(await get_range(store, run.key, first, last))
        found: list[Any] = []
        for entry in run.entries:
            data = view[entry.position - first : entry.end_position - first]
            found += [each.payload for each in Block.decode(data, entry, key=run.key) if run.wants(each)]
        return found
