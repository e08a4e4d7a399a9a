"""`ObjectStore`, the interface to the bucket.

Every component depends on `ObjectStore` alone. There are several backends: S3
(`tidelog.storage.bucket.s3`), a local directory (`tidelog.storage.bucket.local`) and memory
(`tidelog.storage.bucket.memory`). All of them guarantee, tested by one contract suite:

- A put is atomic: a reader sees the whole old object or the whole new one, never a part, even after a crash.
- `if_absent=True` creates or fails with `ObjectExists`; of several concurrent creates exactly one succeeds.
- What a put acknowledged is durable and visible at once to get, head and list (read-after-write).
- Listing is in the order of the keys' UTF-8 bytes.
- Deleting an absent key is success.

Transient failures are retried inside the store, with jitter and inside a budget (rule 11); `Unavailable` means that the
budget is exhausted.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidelog.runtime.errors import AlreadyExists, InvalidInput, NotFound
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import Account, Receipt
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.stats import StoreStats

View = bytes | memoryview
"""Bytes that are never modified; a memoryview keeps the whole answer of its request in memory."""


class ObjectExists(AlreadyExists):
    """A conditional create found that the key exists (HTTP 412)."""


class ObjectNotFound(NotFound):
    """No object has this key (HTTP 404)."""


class RangePastEnd(InvalidInput):
    """A read got less than the range that it asked for (HTTP 416, or a shorter body).

    The object may be shorter than its index says, or only the answer: `tidelog.storage.objects.reader` finds out.
    """


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A store's description of one object."""

    key: str
    size: int
    """Bytes."""
    etag: str
    modified_ms: int
    """Milliseconds since the Unix epoch; second precision on S3."""


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload neither completed nor aborted: its parts are stored and charged for, and not listed."""

    key: str
    upload_id: str
    started_ms: int
    """Milliseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """The result of the start-up probe."""

    conditional_create: bool
    """`If-None-Match: *` is honoured: the second create of a key fails. Fencing needs it."""
    problems: tuple[str, ...]
    """One sentence for each capability that the server lacks."""


class ObjectStore(Protocol):
    """A bucket or its equivalent. Keys are UTF-8 strings of 1 to 1,024 bytes without a leading '/'."""

    @property
    def url(self) -> str:
        """Return the location for display, without credentials: `s3://bucket/prefix at endpoint`, `file:///dir`."""
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
        """Read byte ranges `[start, end)` of one object, in the order given; ranges close together share a request.

        Returns views of the answers, without a copy: a view keeps everything in memory that shared its request.
        Raises `ObjectNotFound`, `Unavailable`, `RangePastEnd`, and `InvalidInput` for an empty or reversed range.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size and time. Raises `ObjectNotFound`, `Unavailable`."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Iterate over all objects whose key starts with `prefix` and is greater than `start_after`, in key order."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in batches of the server's limit. Absent keys are success. Raises `Unavailable`."""
        ...

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """Return multipart uploads of keys that start with `prefix`, some thousands at most. Empty where there are
        none,
        or where the server lists none (MinIO, which aborts them by itself). Raises `Unavailable`."""
        ...

    async def abort(self, upload: UnfinishedUpload) -> None:
        """Abort a multipart upload; a writer still sending it has to start again. Success if it no longer exists.

        Raises `Unavailable`.
        """
        ...

    async def probe(self) -> StoreCapabilities:
        """Find out what the server supports, with a probe key that is removed again. Raises `Unavailable`."""
        ...

    async def close(self) -> None:
        """Release connections. Further calls fail."""
        ...

    @property
    def stats(self) -> StoreStats:
        """Return the statistics since the store was opened; one object for all views."""
        ...

    def for_purpose(self, purpose: Purpose) -> ObjectStore:
        """Return a view of the bucket with this purpose. Cheap; it lives as long as the store and needs no close."""
        ...

    def with_receipt(self) -> tuple[ObjectStore, Receipt]:
        """Return a view for one piece of work, with the same purpose, and the receipt of the view's requests.

        A caller that knows which streams the requests carried settles the receipt afterwards.
        """
        ...


class Backend(ObjectStore, Protocol):
    """A store that sends requests itself; `tidelog.storage.bucket.guarded` decorates it."""

    def with_account(self, account: Account) -> Backend:
        """Return a view of the bucket whose requests are counted on this account. Cheap; needs no close."""
        ...


async def exists(store: ObjectStore, key: str) -> bool:
    """Return whether there is an object with this key. Raises `Unavailable`."""
    try:
        await store.head(key)
    except ObjectNotFound:
        return False
    return True
