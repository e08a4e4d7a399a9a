"""Tries each right that Tidelog needs in its bucket, with objects of its own, for `tidelog doctor`.

The objects are below `probe/doctor-`, and nothing else is written or deleted. They are removed whatever happens; what
cannot be removed is named in `left_behind`, and removed by the next try that may. No bucket is created.

A right that cannot be tried, because one before it failed, is `not-tried`. The other outcomes:

    ok             the bucket did it, and what it answered is right
    denied         the credentials, or their policy, do not allow it
    no-bucket      there is no such bucket, or what answers is no S3 server
    wrong-region   the bucket is in another region
    timeout        no answer within `timeout_s`
    unreachable    the server cannot be reached, or it fails (5xx) at each attempt
    refused        the server refuses the request, or the settings cannot be used
    unsupported    the server does not know the request
    short          fewer bytes came back than were written
    wrong-bytes    other bytes came back than were written, or what is no S3 server's answer
    stale          an object that was written is not there, or one that was deleted is

Entry: `try_rights`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
from botocore.parsers import ResponseParserError

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.storage.bucket.common import BucketMissing, StoreAccessDenied, StoreUnsupported, StoreWrongRegion
from tidelog.storage.bucket.store import (
    ObjectExists,
    ObjectNotFound,
    ObjectStore,
    RangePastEnd,
    UnfinishedUpload,
)

T = TypeVar("T")

PROBE_PREFIX: Final = "probe/doctor-"
BODY: Final = b"tidelog doctor: may be deleted. ".ljust(4096, b".")
PART: Final = bytes(1024)
ATTEMPT_S: Final = 3.0
BUDGET_S: Final = 4.0
TIMEOUT_S: Final = 8.0
"""Of one try, in which a server has had two attempts at least: so what it says is heard before this is over."""
CLEAN_UP_S: Final = 15.0
STALE_MS: Final = 3_600_000
"""Age from which a probe's object is what an earlier one had to leave."""
MAX_STALE: Final = 1_000

Right = Literal[
    "put",
    "get",
    "ranged get",
    "head",
    "list",
    "conditional put",
    "multipart begin",
    "multipart part",
    "multipart list",
    "multipart abort",
    "delete",
]
RightOutcome = Literal[
    "ok",
    "not-tried",
    "denied",
    "no-bucket",
    "wrong-region",
    "timeout",
    "unreachable",
    "refused",
    "unsupported",
    "short",
    "wrong-bytes",
    "stale",
]


class RightTry(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one try; see the module."""

    right: Right
    outcome: RightOutcome
    took_ms: float = 0.0
    detail: str = ""
    """What the server or the store said."""
    hint: str = ""
    """What the store advises."""


class RightsFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the tries found."""

    url: str
    """Of the bucket, without credentials."""
    tries: list[RightTry] = []
    server_ms: int = 0
    """The server's time when it stored an object, to the second; 0: not known."""
    here_ms: int = 0
    """This machine's time then."""
    left_behind: list[str] = []
    """Keys that could not be removed."""


@runtime_checkable
class PartedUploads(ObjectStore, Protocol):
    """What a store on a server can do besides the others, for the tries only."""

    def with_budget(self, attempt_s: float, budget_s: float) -> PartedUploads:
        """Return a view that gives an attempt and all attempts of a request no longer than this."""
        ...

    async def begin_upload(self, key: str) -> UnfinishedUpload:
        """Begin a multipart upload."""
        ...

    async def put_part(self, upload: UnfinishedUpload, body: bytes) -> None:
        """Put the first part."""
        ...


class _Wrong(Exception):
    """The bucket answered, and the answer is not right."""

    def __init__(self, outcome: RightOutcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


async def try_rights(store: ObjectStore, clock: Clock, *, timeout_s: float = TIMEOUT_S) -> RightsFacts:
    """Try each right in turn, and remove what was written. Raises nothing but what is a defect."""
    tries = _Tries(store, clock, timeout_s)
    try:
        await tries.run()
    finally:
        await asyncio.shield(asyncio.ensure_future(tries.clean_up()))
    return tries.facts()


class _Tries:
    def __init__(self, store: ObjectStore, clock: Clock, timeout_s: float) -> None:
        self._parted = store.with_budget(ATTEMPT_S, BUDGET_S) if isinstance(store, PartedUploads) else None
        self._store: ObjectStore = self._parted or store
        self._clock = clock
        self._timeout_s = timeout_s
        self._base = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
        self._written: set[str] = set()
        """Keys that may be there."""
        self._upload: UnfinishedUpload | None = None
        self._tries: dict[Right, RightTry] = {}
        self._server_ms = self._here_ms = 0
        self._left: list[str] = []

    def facts(self) -> RightsFacts:
        return RightsFacts(
            url=self._store.url,
            tries=list(self._tries.values()),
            server_ms=self._server_ms,
            here_ms=self._here_ms,
            left_behind=self._left,
        )

    async def run(self) -> None:
        key = f"{self._base}-object"
        if await self._try("put", self._put(key)):
            await self._try("get", self._get(key))
            await self._try("ranged get", self._ranged_get(key))
            await self._try("head", self._head(key))
            await self._try("list", self._list(key))
            await self._try("conditional put", self._conditional_put())
        else:
            self._not_tried("get", "ranged get", "head", "list", "conditional put")
        await self._multipart()
        if "put" in self._tries and self._tries["put"].outcome == "ok":
            if await self._try("delete", self._delete(key)) and self._is_ok("list"):
                await self._remove_stale()
        else:
            self._not_tried("delete")

    def _is_ok(self, right: Right) -> bool:
        return right in self._tries and self._tries[right].outcome == "ok"

    def _not_tried(self, *rights: Right) -> None:
        for right in rights:
            self._tries[right] = RightTry(right=right, outcome="not-tried")

    async def _try(self, right: Right, work: Awaitable[None]) -> bool:
        started = self._clock.monotonic()
        outcome: RightOutcome = "ok"
        detail = hint = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except TimeoutError:
            outcome, detail = "timeout", f"no answer within {self._timeout_s:g} s"
        except _Wrong as error:
            outcome, detail = error.outcome, error.detail
        except TidelogError as error:
            outcome, detail, hint = outcome_of(error, right), error.message, error.hint or ""
        took_ms = round((self._clock.monotonic() - started) * 1000, 1)
        self._tries[right] = RightTry(right=right, outcome=outcome, took_ms=took_ms, detail=detail, hint=hint)
        return outcome == "ok"

    async def _put(self, key: str) -> None:
        self._written.add(key)
        await self._store.put(key, [BODY])

    async def _get(self, key: str) -> None:
        found = await self._store.get(key)
        if len(found) < len(BODY):
            raise _Wrong("short", f"{len(found)} of {len(BODY)} bytes came back")
        if found != BODY:
            raise _Wrong("wrong-bytes", f"other bytes came back than were written: {found[:40]!r}")

    async def _ranged_get(self, key: str) -> None:
        (found,) = await self._store.get_ranges(key, [(8, 24)])
        if bytes(found) != BODY[8:24]:
            raise _Wrong("wrong-bytes", f"bytes 8 to 24 came back as {bytes(found)!r}")

    async def _head(self, key: str) -> None:
        found = await self._store.head(key)
        self._server_ms, self._here_ms = found.modified_ms, self._clock.time_ms()
        if found.size != len(BODY):
            raise _Wrong("wrong-bytes", f"an object of {len(BODY)} bytes has {found.size}")

    async def _list(self, key: str) -> None:
        found = [each.key async for each in self._store.list(self._base)]
        if found != [key]:
            raise _Wrong("stale", f"the listing has {found[:3]} instead of the object that was just written")

    async def _conditional_put(self) -> None:
        key = f"{self._base}-once"
        self._written.add(key)
        await self._store.put(key, [BODY], if_absent=True)
        try:
            await self._store.put(key, [BODY], if_absent=True)
        except ObjectExists:
            return
        raise _Wrong("unsupported", "creating the same key twice succeeded: `If-None-Match: *` is ignored")

    async def _multipart(self) -> None:
        store, key = self._parted, f"{self._base}-parts"
        if store is None:
            return  # an embedded store writes large objects as it does small ones
        if not await self._try("multipart begin", self._begin(store, key)) or self._upload is None:
            self._not_tried("multipart part", "multipart list", "multipart abort")
            return
        upload = self._upload
        await self._try("multipart part", store.put_part(upload, PART))
        await self._try("multipart list", self._list_uploads())
        if await self._try("multipart abort", self._store.abort(upload)):
            self._upload = None

    async def _begin(self, store: PartedUploads, key: str) -> None:
        self._upload = await store.begin_upload(key)

    async def _list_uploads(self) -> None:
        await self._store.unfinished(self._base)  # MinIO lists none; what matters is whether it is allowed

    async def _delete(self, key: str) -> None:
        await self._store.delete(sorted(self._written))
        if [each.key async for each in self._store.list(self._base)] if self._is_ok("list") else []:
            raise _Wrong("stale", "an object is still listed after its delete was acknowledged")
        self._written.clear()

    async def _remove_stale(self) -> None:
        """Remove what earlier tries had to leave; a failure is one of the next try."""
        before_ms = self._clock.time_ms() - STALE_MS
        stale: list[str] = []

        async def find() -> None:
            async for each in self._store.list(PROBE_PREFIX):
                if each.modified_ms < before_ms and len(stale) < MAX_STALE:
                    stale.append(each.key)
            if stale:
                await self._store.delete(stale)

        async def abort() -> None:
            for each in (await self._store.unfinished(PROBE_PREFIX))[:MAX_STALE]:
                if each.started_ms < before_ms:
                    await self._store.abort(each)

        if await self._quietly(find) is not None:
            self._left += stale
        await self._quietly(abort)

    async def clean_up(self) -> None:
        """Remove everything that may still be there, and remember what could not be removed."""
        upload, written = self._upload, sorted(self._written)
        if upload is not None and await self._quietly(lambda: self._store.abort(upload)) is not None:
            self._left.append(f"{upload.key} (multipart upload {upload.upload_id})")
        if written and await self._quietly(lambda: self._store.delete(written)) is not None:
            self._left += [] if self._nothing_was_written else written

    @property
    def _nothing_was_written(self) -> bool:
        """Whether the server has certainly refused every put."""
        return all(
            self._tries[right].outcome in ("denied", "no-bucket", "wrong-region", "not-tried", "refused")
            for right in _PUTS
            if right in self._tries
        )

    async def _quietly(self, work: Callable[[], Awaitable[Any]]) -> Exception | None:
        """Do it within `CLEAN_UP_S`; return why it could not be done."""
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await work()
        except (TidelogError, TimeoutError) as error:
            return error
        return None


_PUTS: Final[tuple[Right, ...]] = ("put", "conditional put")


def outcome_of(error: TidelogError, right: Right) -> RightOutcome:
    """Return the outcome that an error of the store stands for."""
    kinds: list[tuple[type[TidelogError], RightOutcome]] = [
        (StoreAccessDenied, "denied"),
        (BucketMissing, "no-bucket"),
        (StoreWrongRegion, "wrong-region"),
        (StoreUnsupported, "unsupported"),
        (RangePastEnd, "short"),
    ]
    for kind, outcome in kinds:
        if isinstance(error, kind):
            return outcome
    if isinstance(error, ObjectNotFound):
        return "stale" if right in ("get", "ranged get", "head") else "no-bucket"
    if isinstance(error, Unavailable):
        return _of_last_attempt(error)
    return "refused"


def _of_last_attempt(error: Unavailable) -> RightOutcome:
    """Return what the last attempt before an `Unavailable` came to, by the exceptions that it is made from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            return "timeout"
        if type(cause).__name__ in _CUT_SHORT or any(words in str(cause) for words in _CUT_SHORT_WORDS):
            return "short"
        if isinstance(cause, ResponseParserError):  # a page of a proxy, or a portal
            return "wrong-bytes"
        cause = cause.__cause__
    return "unreachable"


_CUT_SHORT: Final = frozenset({"ClientPayloadError", "IncompleteReadError", "ResponseStreamingError"})
_CUT_SHORT_WORDS: Final = ("the answer ended after", "decoding response body", "response body error")
"""Of the store's own errors, and of those of obstore, which are text."""
