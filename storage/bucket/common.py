"""Helpers shared by all object stores: key limits, joining and slicing bodies, merging ranges, retries, the probe.

Invariants:
- A key that passes `check_key` is valid in every backend, so that data can move between them.
- `merge_ranges` covers exactly the requested bytes plus gaps of at most `MERGE_GAP_BYTES`.
- `Retrier` never starts an attempt after the budget is spent: a call lasts at most the budget plus one attempt.

Entry: `PlainViews`, `check_key`, `merge_ranges`, `Retrier`, `gather_or_cancel`, `probe_store`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError, InvalidInput, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import Account, Receipt
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.stats import OperationStats
from tidelog.storage.bucket.store import (
    ObjectExists,
    ObjectNotFound,
    ObjectStore,
    RangePastEnd,
    StoreCapabilities,
    View,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_KEY_BYTES: Final = 1024
"""S3's limit."""
MAX_SEGMENT_BYTES: Final = 255
"""Limit on a part of a key between slashes: the limit of file systems, and so of the local store and MinIO."""
MERGE_GAP_BYTES: Final = 64 * 1024
"""Ranges at most this far apart share a GET. A request costs about 1 ms of CPU in aiobotocore, the time to read
several times 64 KiB; the limit keeps the bytes read in vain below a quarter of a block."""
MAX_MERGED_BYTES: Final = 16 * 1024 * 1024
"""Upper limit of a merged GET, so that large reads run in parallel and a retry repeats little."""
LOG_INTERVAL_S: Final = 10.0
"""A failing store logs a warning once per this interval, not at every attempt."""


class PlainViews:
    """Views of an undecorated backend: purposes make no difference, and a receipt counts nothing.

    A backend that counts its requests overrides `with_account`.
    """

    def for_purpose(self, purpose: Purpose) -> Self:
        """See `ObjectStore.for_purpose`."""
        return self

    def with_receipt(self) -> tuple[Self, Receipt]:
        """See `ObjectStore.with_receipt`."""
        return self, Receipt()

    def with_account(self, account: Account) -> Self:
        """See `Backend.with_account`."""
        return self


class StoreFull(Unavailable):
    """The disk under the store is full, or the quota is used up. Retriable: space may be freed."""


class StoreAccessDenied(Unavailable):
    """The store rejects the credentials, or their policy. It says nothing about the object (rule 17).

    Retriable: keys are rotated and policies corrected while processes run. The store itself does not repeat the
    request; its callers do, at their own pace.
    """

    exit_code = 2


class BucketMissing(Unavailable):
    """The bucket does not exist. Retriable: it may be created."""


class StoreWrongRegion(ConfigError):
    """The bucket is in another region than the one that requests are signed for, or sent to."""


class StoreRefused(InvalidInput):
    """The server refuses a request that is right as far as this store knows, such as a delete of a locked object.

    Repeating it changes nothing, and the bucket is not healthy.
    """


class StoreUnsupported(StoreRefused):
    """The server does not support the request (HTTP 501, or a header it ignores)."""


def check_key(key: str) -> str:
    """Return `key` if it is valid in every backend; raise `InvalidInput` otherwise.

    1 to 1,024 UTF-8 bytes; parts between slashes of 1 to 255 bytes,
    none `.` or `..`; no control characters, and no other characters that XML cannot represent.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"object key {key!r} is not valid UTF-8") from error
    if not 1 <= len(encoded) <= MAX_KEY_BYTES:
        raise InvalidInput(f"an object key has 1 to {MAX_KEY_BYTES} bytes, this one has {len(encoded)}: {key[:80]!r}")
    if not key.isprintable() and any(character < " " or character in "\x7f\ufffe\uffff" for character in key):
        raise InvalidInput(f"object key {key!r} contains a control character, or one that XML cannot carry")
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidInput(f"object key {key!r} has an empty, '.' or '..' part between slashes")
        if len(segment) > MAX_SEGMENT_BYTES // 4 and len(segment.encode()) > MAX_SEGMENT_BYTES:
            raise InvalidInput(f"object key {key[:80]!r}… has a part of more than {MAX_SEGMENT_BYTES} bytes")
    return key


def body_size(body: Sequence[Buffer]) -> int:
    """Return the total number of bytes of all buffers."""
    return sum(memoryview(buffer).nbytes for buffer in body)


def join_body(body: Sequence[Buffer]) -> bytes:
    """Return all buffers as one `bytes`; without a copy if `body` is a single `bytes`."""
    if len(body) == 1 and isinstance(body[0], bytes):
        return body[0]
    return b"".join(body)


def slice_body(body: Sequence[Buffer], start: int, end: int) -> bytes:
    """Return bytes `[start, end)` of the joined buffers, copying only those."""
    parts: list[memoryview] = []
    position = 0
    for buffer in body:
        view = memoryview(buffer).cast("B")
        if position < end and position + len(view) > start:
            parts.append(view[max(0, start - position) : end - position])
        position += len(view)
        if position >= end:
            break
    return b"".join(parts)


@dataclass(slots=True)
class MergedRange:
    """One read that covers several ranges."""

    start: int
    end: int
    members: list[int] = field(default_factory=list)
    """Indexes into the requested ranges."""


def check_ranges(key: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise `InvalidInput` for a range that is empty, reversed or negative."""
    for start, end in ranges:
        if not 0 <= start < end:
            raise InvalidInput(f"byte range [{start}, {end}) of {key} is empty, reversed or negative")


def past_end(key: str, start: int, end: int) -> RangePastEnd:
    """Return the error for a range past the end of its object."""
    return RangePastEnd(
        f"byte range [{start}, {end}) is past the end of {key}", hint="the object is shorter than its index says"
    )


def merge_ranges(
    ranges: Sequence[tuple[int, int]], *, gap: int = MERGE_GAP_BYTES, limit: int = MAX_MERGED_BYTES
) -> list[MergedRange]:
    """Join ranges at most `gap` bytes apart, as long as the result has at most `limit` bytes; ordered by start offset.

    Ranges may overlap and come in any order. A single range longer than `limit` stays whole.
    """
    merged: list[MergedRange] = []
    for index in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        start, end = ranges[index]
        last = merged[-1] if merged else None
        if last is not None and start <= last.end + gap and (end <= last.end or end - last.start <= limit):
            last.end = max(last.end, end)
        else:
            last = MergedRange(start, end)
            merged.append(last)
        last.members.append(index)
    return merged


def split_merged(ranges: Sequence[tuple[int, int]], reads: Sequence[tuple[MergedRange, View]]) -> list[View]:
    """Return the bytes of each requested range as views of the merged reads, in the requested order."""
    parts: dict[int, View] = {}
    for merged, data in reads:
        assert len(data) == merged.end - merged.start
        view = memoryview(data)
        for index in merged.members:
            start, end = ranges[index]
            whole = end - start == len(data)
            parts[index] = data if whole else view[start - merged.start : end - merged.start]
    return [parts[index] for index in range(len(ranges))]


class Transient(Exception):  # internal to the retry loop
    """An attempt failed in a way that a retry may overcome. Never propagates out of the store."""


class Retrier:
    """Retries attempts with exponential back-off and full jitter, inside a budget (rule 11).

    An attempt that may be retried raises `Transient`; any other exception propagates to the caller.
    """

    def __init__(self, clock: Clock, rng: random.Random, *, base_s: float = 0.05, cap_s: float = 5.0) -> None:
        self._clock = clock
        self._rng = rng
        self._base_s = base_s
        self._cap_s = cap_s
        self._last_logged_s = -LOG_INTERVAL_S

    async def run(
        self, what: str, hint: str, budget_s: float, stats: OperationStats, attempt: Callable[[], Awaitable[T]]
    ) -> T:
        """Run `attempt` until it succeeds. Raises `Unavailable` once `budget_s` seconds would be exceeded."""
        started = self._clock.monotonic()
        backoff = Backoff(self._base_s, self._cap_s, self._rng)
        while True:
            try:
                return await attempt()
            except Transient as error:
                delay_s = backoff.next_delay_s()
                elapsed_s = self._clock.monotonic() - started
                if elapsed_s + delay_s >= budget_s:
                    attempts = f"{backoff.attempts} attempt{'s' if backoff.attempts > 1 else ''}"
                    raise Unavailable(
                        f"{what} failed after {attempts} in {elapsed_s:.1f} s: {error}", hint=hint
                    ) from error
                self._log(what, error)
            stats.retries += 1
            await self._clock.sleep(delay_s)

    def _log(self, what: str, error: Transient) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._last_logged_s >= LOG_INTERVAL_S:
            self._last_logged_s = now_s
            logger.warning("object store attempt failed, retrying", extra={"operation": what, "reason": str(error)})


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run `work` concurrently; when one fails or the caller is cancelled, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def probe_store(store: ObjectStore, name: str) -> StoreCapabilities:
    """Find out what a store supports, with a probe key that is removed again; `name` names the store in messages.

    Raises `Unavailable`, also for an answer that is short or absent, and what else the store's operations raise.
    """
    key = f"probe/{secrets.token_hex(16)}"
    body = b"tidelog probe: may be deleted"
    problems: list[str] = []
    conditional = False
    try:
        try:
            await store.put(key, [body], if_absent=True)
            await store.put(key, [body], if_absent=True)
            problems.append(
                f"{name} ignores `If-None-Match: *`: creating the same key twice succeeded, so a fenced writer"
                " could not be stopped"
            )
        except ObjectExists:
            conditional = True
        except StoreUnsupported:
            problems.append(f"{name} does not support conditional create (`If-None-Match: *`)")
            await store.put(key, [body])
        problems += await _probe_reads(store, name, key, body)
    finally:
        await store.delete([key])
    if [info async for info in store.list(key)]:
        problems.append(f"{name} still lists an object after its delete was acknowledged")
    return StoreCapabilities(conditional_create=conditional, problems=tuple(problems))


async def check_store(store: ObjectStore, key: str) -> None:
    """Write, read, list and delete the object `key`. Raises `Unavailable`, and what else the operations raise."""
    body = b"tidelog health check: may be deleted"
    await store.put(key, [body])
    try:
        found = await store.get(key)
    except ObjectNotFound as error:
        raise Unavailable(f"{key}, which was just written, is not found", hint="is the bucket consistent?") from error
    if found != body:
        raise Unavailable(f"{key} reads otherwise than it was just written: {found[:80]!r}")
    async for _ in store.list(key):
        break
    await store.delete([key])


async def _probe_reads(store: ObjectStore, name: str, key: str, body: bytes) -> list[str]:
    problems: list[str] = []
    try:
        if await store.get_ranges(key, [(3, 9)]) != [body[3:9]]:
            problems.append(f"{name} returns wrong bytes for a range read")
    except StoreUnsupported:
        problems.append(f"{name} does not support range reads")
    except ConfigError:
        raise
    except (InvalidInput, ObjectNotFound) as error:  # the object is there: it was just put
        raise Unavailable(f"{name} answered a range read with less than it was asked for: {error}") from error
    listed = [info async for info in store.list(key)]
    if [(info.key, info.size) for info in listed] != [(key, len(body))]:
        problems.append(f"{name} does not list an object right after its put was acknowledged")
    return problems
