"""`ObjectStore`, the door to the bucket.

One abstract store, several backends: S3 (`storage.object_store_s3`), a local directory (`storage.object_store_local`)
and memory (`storage.object_store_memory`). What holds for all of them, and is tested by one contract suite:

- A put is atomic: a reader sees the whole old object or the whole new one, never a part, even after a crash.
- `if_absent=True` creates or fails with `ObjectExists`; of many concurrent creators exactly one succeeds.
- What a put acknowledged is durable and visible at once to get, head and list (read-after-write).
- Listing is in the order of the keys' UTF-8 bytes.
- Deleting what is not there is success.

Transient failures are retried inside the store, with jitter and inside a budget (rule 11); what comes out as
`Unavailable` has exhausted it.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import AlreadyExists, NotFound

Buffer = bytes | bytearray | memoryview
View = bytes | memoryview
"""Bytes that nobody changes; a memoryview keeps all of what one request brought."""


class ObjectExists(AlreadyExists):
    """A conditional create found the key taken (HTTP 412)."""


class ObjectNotFound(NotFound):
    """No object has this key (HTTP 404)."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says about one object."""

    key: str
    size: int
    """Bytes."""
    etag: str
    modified_ms: int
    """Milliseconds since the Unix epoch; second precision on S3."""


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was begun and neither finished nor aborted: its parts are kept, and paid for, unseen."""

    key: str
    upload_id: str
    started_ms: int
    """Milliseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What the start-up probe found the server able to do."""

    conditional_create: bool
    """`If-None-Match: *` is honoured: the second create of a key fails. Fencing needs it."""
    problems: tuple[str, ...]
    """One clear sentence for each thing the server lacks."""


class ObjectStore(Protocol):
    """A bucket, or what behaves like one. Keys are UTF-8 strings of 1 to 1,024 bytes without a leading '/'."""

    @property
    def url(self) -> str:
        """Where the data is, for people, without credentials: `s3://bucket/prefix at endpoint`, `file:///dir`."""
        ...

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Write `body` (its buffers joined) as one object; large bodies go as multipart uploads.

        `if_absent` never uses multipart (servers differ there). Raises `ObjectExists`, `Unavailable`.
        """
        ...

    async def get(self, key: str) -> bytes:
        """Read a whole object. Raises `ObjectNotFound`, `Unavailable`."""
        ...

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """Read byte ranges `[start, end)` of one object, in the order asked; near ones share a request.

        Views of what the requests brought, so that nothing is copied: who keeps one keeps all that shared its request.
        Raises `ObjectNotFound`, `Unavailable`, and `InvalidInput` for an empty or reversed range or one past the end.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Raises `ObjectNotFound`, `Unavailable`."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """All objects whose key starts with `prefix` and is greater than `start_after`, in key order."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in batches of what the server takes. Absent keys are success. Raises `Unavailable`."""
        ...

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """Multipart uploads of keys that start with `prefix`, some thousands at most. Empty where there are none, or
        where the server lists none (MinIO, which aborts them by itself). Raises `Unavailable`."""
        ...

    async def abort(self, upload: UnfinishedUpload) -> None:
        """Give up a multipart upload; whoever still carries it out starts over. Success if it is gone already.

        Raises `Unavailable`.
        """
        ...

    async def probe(self) -> StoreCapabilities:
        """Find out what the server can do, with a key of its own that it removes. Raises `Unavailable`."""
        ...

    async def close(self) -> None:
        """Release connections. Further calls fail."""
        ...
